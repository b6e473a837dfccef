//! A worker process on a mount: it makes random calls and logs each before and after it, so that the call in progress
//! is known when it is killed.

use std::fs::File;
use std::io::{BufRead, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nigh_sim::history::{CELLS, Call, DIRS, Label, NAMES, RenameMode, Slot};
use nigh_sim::random::Dice;
use rustix::fs::{AtFlags, Mode, OFlags};

use super::calls::{Dirs, Opened};
use crate::load::moment;
use crate::race::maps::{LENGTH, Map};

/// Number of byte values that belong to one worker.
pub const BYTES: u8 = 40;

#[derive(clap::Args)]
pub struct Options {
    /// The mount.
    dir: PathBuf,
    #[arg(long)]
    seed: u64,
}

/// A worker's parameters for one window; one line on its standard input.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkOrder {
    /// The directory of the window, below the mount.
    pub window: String,
    /// The log of its calls.
    pub log: PathBuf,
    /// The label of its first inode.
    pub label: Label,
    pub calls: Calls,
    pub pace: Pace,
    /// The first of the byte values that it stores into the shared map; 0: it stores none.
    pub bytes: u8,
}

/// Limits of calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Calls {
    pub most: u32,
    /// No call begins later than this after the first.
    pub time_ms: u64,
}

/// The timing of calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pace {
    /// One after the other.
    Fast,
    /// Changes take turns with the workers of all mounts, each this many ms after the last; reads between.
    Turns { change_ms: u64, worker: u64, workers: u64 },
}

impl WorkOrder {
    #[must_use]
    pub fn line(&self) -> String {
        let (change_ms, worker, workers) = match self.pace {
            Pace::Fast => (0, 0, 0),
            Pace::Turns { change_ms, worker, workers } => (change_ms, worker, workers),
        };
        let WorkOrder { window, log, label, calls: Calls { most, time_ms }, .. } = self;
        format!(
            "work {window} {} {label} {most} {time_ms} {change_ms} {worker} {workers} {}\n",
            log.display(),
            self.bytes
        )
    }

    fn read(words: &[&str]) -> Option<WorkOrder> {
        let [window, log, label, most, time_ms, change_ms, worker, workers, bytes] = words else {
            return None;
        };
        let pace = match change_ms.parse().ok()? {
            0 => Pace::Fast,
            change_ms => {
                Pace::Turns { change_ms, worker: worker.parse().ok()?, workers: workers.parse().ok()? }
            }
        };
        Some(WorkOrder {
            window: (*window).to_owned(),
            log: PathBuf::from(log),
            label: label.parse().ok()?,
            calls: Calls { most: most.parse().ok()?, time_ms: time_ms.parse().ok()? },
            pace,
            bytes: bytes.parse().ok()?,
        })
    }
}

/// Orders on standard input: `make WINDOW`, `work …`, `look` (reads every name once more), `close` (closes open
/// files), `remove WINDOW`. Each gets a line in reply.
pub fn run(options: &Options) -> Result<bool> {
    rustix::process::umask(Mode::empty());
    let mut dice = Dice::new(options.seed);
    let mut work = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        match &words[..] {
            ["make", window] => make(&options.dir.join(window))?,
            ["work", words @ ..] => {
                let order = WorkOrder::read(words).context("not an order")?;
                let mut at_work = Work::new(&options.dir, order, &mut dice)?;
                at_work.calls()?;
                work = Some(at_work.pause());
            }
            ["look"] => {
                let paused: WorkerState = work.take().context("nothing to look at")?;
                let mut at_work = paused.go_on(&mut dice);
                at_work.looks()?;
                work = Some(at_work.pause());
            }
            ["close"] => work = None,
            ["remove", window] => std::fs::remove_dir_all(options.dir.join(window))?,
            _ => bail!("not an order: {line}"),
        }
        println!("done");
        std::io::stdout().flush()?;
    }
    Ok(true)
}

fn make(dir: &Path) -> Result<()> {
    for part in 0..DIRS {
        std::fs::create_dir_all(dir.join(dir_name(part)))?;
    }
    std::fs::write(dir.join(MAPPED), vec![0; usize::from(LENGTH)])?;
    Ok(())
}

/// The name of a window's shared file.
pub const MAPPED: &str = "mapped";

/// Returns the name of a window's directory.
#[must_use]
pub fn dir_name(dir: u8) -> String {
    char::from(b'a' + dir).to_string()
}

/// Returns a name in a directory.
#[must_use]
pub fn name(name: u8) -> String {
    format!("n{name}")
}

/// The window in progress.
struct Work<'d> {
    dice: &'d mut Dice,
    inner: WorkerState,
}

/// Its state between orders: created files stay open until the end of the window, so that inode numbers are not
/// reused.
struct WorkerState {
    order: WorkOrder,
    dirs: Dirs,
    log: File,
    files: Vec<Opened>,
    labels: Label,
    /// The turn in which it made its latest change.
    turn: u64,
    map: Option<Map>,
    stored: u8,
}

impl WorkerState {
    fn go_on(self, dice: &mut Dice) -> Work<'_> {
        Work { dice, inner: self }
    }
}

impl<'d> Work<'d> {
    fn new(mount: &Path, order: WorkOrder, dice: &'d mut Dice) -> Result<Work<'d>> {
        let open = |dir| -> rustix::io::Result<OwnedFd> {
            let path = mount.join(&order.window).join(dir_name(dir));
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::openat(rustix::fs::CWD, path, flags, Mode::empty())
        };
        let dirs = Dirs((0..DIRS).map(open).collect::<rustix::io::Result<_>>()?);
        let log = File::options().create(true).append(true).open(&order.log)?;
        let mapped = || {
            let path = mount.join(&order.window).join(MAPPED);
            let file = File::options().read(true).write(true).open(path)?;
            Map::of(&file)
        };
        let map = (order.bytes > 0).then(mapped).transpose()?;
        let inner = WorkerState { order, dirs, log, files: Vec::new(), labels: 0, turn: 0, map, stored: 0 };
        Ok(Work { dice, inner })
    }

    fn pause(self) -> WorkerState {
        self.inner
    }

    fn calls(&mut self) -> Result<()> {
        let Calls { most, time_ms } = self.inner.order.calls;
        let end = moment() + time_ms * 1_000_000;
        for _ in 0..most {
            if moment() > end {
                break;
            }
            let call = match self.inner.order.pace {
                Pace::Fast if self.dice.below(5) < 2 => self.change(),
                Pace::Fast => self.look(),
                Pace::Turns { change_ms, worker, workers } => {
                    let now = moment() / 1_000_000;
                    let round = change_ms * workers;
                    let turn = (now + round - change_ms * worker % round) % round;
                    let number = (now + round - change_ms * worker % round) / round;
                    if turn < change_ms / 2 && self.inner.turn != number {
                        self.inner.turn = number;
                        self.change()
                    } else {
                        std::thread::sleep(Duration::from_micros(self.dice.below(20_000)));
                        self.look()
                    }
                }
            };
            self.make(call)?;
            match call {
                // Contents of empty files do not come ahead.
                Call::Create { .. } => self.fill()?,
                Call::List { dir } => self.scan(dir)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes the file that was opened last.
    fn fill(&mut self) -> Result<()> {
        let value = self.value();
        let Some(file) = self.inner.files.last().map(|opened| opened.file) else { return Ok(()) };
        self.make(Call::Write { file, word: value })
    }

    /// Opens and reads each file of a directory in the order of names, so that the contents of later ones come ahead.
    fn scan(&mut self, dir: u8) -> Result<()> {
        for name in 0..NAMES {
            let known = self.inner.files.len();
            self.make(Call::Open { slot: Slot::new(dir, name) })?;
            if let Some(file) = self.inner.files.get(known).map(|opened| opened.file) {
                self.make(Call::Read { file })?;
            }
        }
        Ok(())
    }

    /// Reads every name once, and both directories.
    fn looks(&mut self) -> Result<()> {
        for slot in Slot::all() {
            self.make(Call::Stat { slot })?;
        }
        for dir in 0..DIRS {
            self.make(Call::List { dir })?;
        }
        for cell in (0..CELLS).filter(|_| self.inner.map.is_some()).collect::<Vec<u8>>() {
            self.make(Call::Load { cell })?;
        }
        for at in 0..self.inner.files.len() {
            let file = self.inner.files[at].file;
            self.make(Call::Fstat { file })?;
            self.make(Call::Read { file })?;
        }
        Ok(())
    }

    /// Logs a call, makes it, and logs its result.
    fn make(&mut self, call: Call) -> Result<()> {
        let inner = &mut self.inner;
        let forced = self.dice.below(8) == 0;
        let seek = self.dice.below(3) == 0;
        inner.log.write_all(format!("> {} {call}\n", moment()).as_bytes())?;
        let told = match (&inner.map, call) {
            (Some(map), Call::Store { .. } | Call::Load { .. }) => super::calls::of_map(map, call),
            _ => inner.dirs.make(call, &inner.files, super::calls::ReadMode { forced, seek }),
        };
        let end = told.end;
        if let Some(opened) = told.opened {
            inner.files.push(opened);
        }
        // Without a result the outcome is unknown.
        if let Some(answer) = told.result {
            inner.log.write_all(format!("= {end} {answer}\n").as_bytes())?;
        }
        Ok(())
    }

    fn slot(&mut self) -> Slot {
        Slot::new(self.below(DIRS), self.below(NAMES))
    }

    fn below(&mut self, n: u8) -> u8 {
        u8::try_from(self.dice.below(u64::from(n))).unwrap_or(0)
    }

    fn value(&mut self) -> u64 {
        self.inner.labels += 1;
        u64::from(self.inner.order.label + self.inner.labels)
    }

    fn label(&mut self) -> Label {
        self.inner.labels += 1;
        self.inner.order.label + self.inner.labels
    }

    /// Returns one of the recently opened files.
    fn file(&mut self) -> Option<nigh_sim::history::File> {
        let count = self.inner.files.len().min(6);
        let back = usize::from(self.below(u8::try_from(count).unwrap_or(1).max(1)));
        self.inner.files.iter().rev().nth(back).map(|opened| opened.file)
    }

    /// Returns a store of a byte that no other worker stores.
    fn store(&mut self) -> Call {
        let WorkerState { order, stored, .. } = &mut self.inner;
        *stored = (*stored + 1) % BYTES;
        let byte = order.bytes + *stored;
        Call::Store { cell: self.below(CELLS), byte }
    }

    fn change(&mut self) -> Call {
        if self.inner.map.is_some() && self.dice.below(8) == 0 {
            return self.store();
        }
        let (slot, label) = (self.slot(), self.label());
        let other = Slot((slot.0 + 1 + self.below(Slot::COUNT - 1)) % Slot::COUNT);
        let Some(file) = self.file() else { return Call::Create { slot, label, mode: 0o644 } };
        let value = self.value();
        match self.dice.below(28) {
            0..=4 => Call::Create { slot, label, mode: 0o644 },
            5 | 6 => Call::Mkdir { slot, label },
            7 => Call::Symlink { slot, label },
            8 | 9 => Call::Link { old: slot, new: other },
            10 | 11 => Call::Unlink { slot },
            12 => Call::Rmdir { slot },
            13..=15 => Call::Rename { old: slot, new: other, how: RenameMode::Plain },
            16 => Call::Rename { old: slot, new: other, how: RenameMode::NoReplace },
            17 | 18 => Call::Rename { old: slot, new: other, how: RenameMode::Exchange },
            19 | 20 => Call::Chmod { file, mode: 0o400 | (label & 0o377) },
            21 => Call::Truncate {
                file,
                size: if value.is_multiple_of(3) { 0 } else { 4096 + value % 100_000 },
            },
            22 => Call::Times { file, secs: i64::try_from(value).unwrap_or(1) },
            23 => Call::SetXattr { file, value },
            24 => Call::RemoveXattr { file },
            _ => Call::Write { file, word: value },
        }
    }

    fn look(&mut self) -> Call {
        if self.inner.map.is_some() && self.dice.below(8) == 0 {
            return Call::Load { cell: self.below(CELLS) };
        }
        let slot = self.slot();
        match (self.dice.below(16), self.file()) {
            (0 | 1, _) => Call::Open { slot },
            (2, _) => Call::ReadLink { slot },
            (3 | 4, _) => Call::List { dir: slot.dir() },
            (5 | 6, Some(file)) => Call::Fstat { file },
            (7 | 8, Some(file)) => Call::Read { file },
            (9, Some(file)) => Call::GetXattr { file },
            (10, Some(file)) => Call::Fsync { file },
            _ => Call::Stat { slot },
        }
    }
}

/// All calls here act on the entry itself, not on a symlink's target.
pub const NOT_FOLLOWED: AtFlags = AtFlags::SYMLINK_NOFOLLOW;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_order_line_round_trips() {
        let calls = Calls { most: 200, time_ms: 6_000 };
        for pace in [Pace::Fast, Pace::Turns { change_ms: 250, worker: 2, workers: 6 }] {
            let log = "log/7".into();
            let order = WorkOrder { window: "w7".into(), log, label: 70_000, calls, pace, bytes: 41 };
            let line = order.line();
            let words: Vec<&str> = line.trim_end().split(' ').collect();
            assert_eq!(WorkOrder::read(&words[1..]), Some(order));
        }
    }
}
