//! Races on names.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use rustix::fs::{Mode, OFlags};

use super::stage::{Announced, CallTimes, Stage};
use crate::listing;

/// How many rounds a side may be ahead of the other, so that they meet.
const AHEAD: u64 = 3;

/// One round of a side creates a name, renames it, and unlinks it unless it is to stay.
struct Rounds<'a> {
    top: &'a Path,
    who: &'static str,
    /// Rounds after which both sides continue in the next directory.
    each: u64,
}

fn kept(round: u64) -> bool {
    round.is_multiple_of(5)
}

impl Rounds<'_> {
    fn dir(&self, round: u64) -> PathBuf {
        self.top.join(format!("d{}", round / self.each))
    }

    fn made(&self, round: u64) -> PathBuf {
        self.dir(round).join(format!("{}{round}", self.who))
    }

    fn moved(&self, round: u64) -> PathBuf {
        self.dir(round).join(format!("{}{round} moved", self.who))
    }

    fn change(&self, meter: &mut CallTimes, round: u64) -> Result<()> {
        let (made, moved) = (self.made(round), self.moved(round));
        meter.call("create", || OpenOptions::new().write(true).create_new(true).open(&made).map(drop))?;
        meter.call("stat of what was created", || fs::symlink_metadata(&made))?;
        meter.call("rename", || fs::rename(&made, &moved))?;
        meter.absent("stat of what was renamed", || fs::symlink_metadata(&made))?;
        if !kept(round) {
            meter.call("unlink", || fs::remove_file(&moved))?;
        }
        self.look(meter, round)
    }

    /// Checks the state after a round.
    fn look(&self, meter: &mut CallTimes, round: u64) -> Result<()> {
        meter.absent("stat of a name that was renamed", || fs::symlink_metadata(self.made(round)))?;
        let moved = self.moved(round);
        if kept(round) {
            meter.call("stat of a name that stays", || fs::symlink_metadata(&moved))?;
        } else {
            meter.absent("stat of a name that was unlinked", || fs::symlink_metadata(&moved))?;
        }
        Ok(())
    }

    /// Returns the names that stay in this round's directory, of this side's first `done` rounds.
    fn all_kept(&self, round: u64, done: u64) -> Vec<String> {
        let first = (round / self.each).saturating_mul(self.each);
        let rounds = (first..done.min(first.saturating_add(self.each))).filter(|r| kept(*r));
        rounds.map(|r| format!("{}{r} moved", self.who)).collect()
    }
}

/// Returns how often each name is listed.
fn listed(meter: &mut CallTimes, dir: &Path) -> Result<BTreeMap<String, u32>> {
    let mut times = BTreeMap::new();
    let names = meter.call("listing", || {
        fs::read_dir(dir)?.map(|entry| entry.map(|e| e.file_name())).collect::<io::Result<Vec<_>>>()
    })?;
    for name in names {
        *times.entry(name.to_string_lossy().into_owned()).or_default() += 1;
    }
    Ok(times)
}

/// Makes `count` changes on each side.
pub fn names(first: &Path, second: &Path, count: u64, each: u64) -> Result<CallTimes> {
    let rounds = count / 3;
    let directories = if each == u64::MAX { 1 } else { rounds / each + 1 };
    for i in 0..directories {
        fs::create_dir(first.join(format!("d{i}")))?;
    }
    let (stage, done) = (Stage::default(), [AtomicU64::new(0), AtomicU64::new(0)]);
    let side = |top, mine: usize, meter: &mut CallTimes| {
        let who = ["first", "second"];
        let own = Rounds { top, who: who[mine], each };
        let other = Rounds { top, who: who[1 - mine], each };
        let theirs = || done[1 - mine].load(Ordering::SeqCst);
        for round in 0..rounds {
            stage.wait_until(|| theirs() + AHEAD > round)?;
            own.change(meter, round).with_context(|| format!("round {round}"))?;
            done[mine].store(round + 1, Ordering::SeqCst);
            let told = theirs();
            if told > 0 {
                other.look(meter, told - 1).with_context(|| format!("the other's round {}", told - 1))?;
            }
            if round % 50 == 49 || each != u64::MAX {
                let times = listed(meter, &own.dir(round))?;
                let expected = [own.all_kept(round, round + 1), other.all_kept(round, told)].concat();
                for name in expected {
                    let got = times.get(&name).copied().unwrap_or(0);
                    ensure!(got == 1, "round {round}: {name} is listed {got} times");
                }
            }
        }
        Ok(())
    };
    let mut meter = stage.both(|meter| side(first, 0, meter), |meter| side(second, 1, meter))?;
    for top in [first, second] {
        for directory in 0..directories {
            let round = directory.saturating_mul(each);
            let mut expected = BTreeMap::new();
            for who in ["first", "second"] {
                let kept = Rounds { top, who, each }.all_kept(round, rounds);
                expected.extend(kept.into_iter().map(|name| (name, 1)));
            }
            let times = listed(&mut meter, &top.join(format!("d{directory}")))?;
            ensure!(times == expected, "{}: {} names, not {}", top.display(), times.len(), expected.len());
        }
    }
    Ok(meter)
}

/// Number of names that stay while others come and go; they are long, so that a scan takes several requests.
const STAY: u64 = 600;

fn stays(i: u64) -> String {
    format!("stays {i:05} {:.<120}", "")
}

fn comes(i: u64) -> String {
    format!("comes {i:05} {:.<120}", "")
}

/// Number of temporary names that exist at a time.
const AT_A_TIME: u64 = 30;

/// `count` names come and go on the first side, while the second side scans.
pub fn listing(first: &Path, second: &Path, count: u64) -> Result<CallTimes> {
    for i in 0..STAY {
        fs::write(first.join(stays(i)), b"")?;
    }
    let (stage, created, removed) = (Stage::default(), Announced::default(), Announced::default());
    let change = |meter: &mut CallTimes| {
        for i in 0..count {
            meter.call("create", || fs::write(first.join(comes(i)), b""))?;
            created.announce(i + 1);
            if let Some(old) = i.checked_sub(AT_A_TIME) {
                removed.begin(old + 1);
                meter.call("unlink", || fs::remove_file(first.join(comes(old))))?;
                removed.announce(old + 1);
            }
            if stage.failed() {
                break;
            }
        }
        Ok(())
    };
    let scan = |meter: &mut CallTimes| {
        loop {
            let (there, gone) = (created.announced(), removed.announced());
            let times = listed(meter, second)?;
            let going = removed.begun();
            let often = |name: String| times.get(&name).copied().unwrap_or(0);
            ensure!(times.values().all(|t| *t == 1), "a name is listed twice");
            for i in 0..STAY {
                ensure!(often(stays(i)) == 1, "{} stays and is not listed", stays(i));
            }
            for i in going..there {
                ensure!(often(comes(i)) == 1, "name {i} of {there} is there and not listed");
            }
            for i in 0..gone {
                ensure!(often(comes(i)) == 0, "name {i} was removed, as all before {gone}, and is listed");
            }
            if there == count || stage.failed() {
                return Ok(());
            }
        }
    };
    stage.both(change, scan)
}

/// One process reads a part of a directory; then names in it are changed to lead to other files, and another process
/// begins to read. The first one reads to the end, which its kernel may take for the end of a listing to cache, and
/// the other one continues in that listing.
pub fn halves(changes: &Path, reads: &Path, count: u64) -> Result<CallTimes> {
    let mut meter = CallTimes::default();
    for round in 0..count {
        let name = format!("{}{round}", if changes == reads { "own" } else { "others" });
        let (dir, seen) = (changes.join(&name), reads.join(name));
        meter.call("mkdir", || fs::create_dir(&dir))?;
        for name in HALVES {
            meter.call("create", || fs::write(dir.join(name), b""))?;
        }
        let mut first = PartialScan::open(&seen)?;
        first.part()?;
        let mut there = BTreeMap::new();
        for name in HALVES {
            let new = dir.join("new");
            meter.call("create", || fs::write(&new, b""))?;
            there.insert(name.to_owned(), fs::metadata(&new)?.ino());
            meter.call("rename", || fs::rename(&new, dir.join(name)))?;
        }
        let mut second = PartialScan::open(&seen)?;
        let mut listed = second.part()?;
        first.rest()?;
        listed.extend(second.rest()?);
        ensure!(
            listed == there,
            "round {round}: {listed:?} is listed, and {there:?} was there before that began"
        );
    }
    Ok(meter)
}

const HALVES: [&str; 4] = ["a", "b", "c", "d"];

/// An open directory, read two or three names at a time.
struct PartialScan(OwnedFd);

type Inodes = BTreeMap<String, u64>;

impl PartialScan {
    fn open(dir: &Path) -> Result<PartialScan> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(PartialScan(rustix::fs::open(dir, flags, Mode::empty())?))
    }

    /// Reads the next names; empty only at the end.
    fn part(&mut self) -> Result<Inodes> {
        let (part, _) = listing::part(&self.0)?;
        part.into_iter().map(|(name, ino)| Ok((String::from_utf8(name)?, ino))).collect()
    }

    fn rest(&mut self) -> Result<Inodes> {
        let mut rest = Inodes::new();
        loop {
            let part = self.part()?;
            if part.is_empty() {
                return Ok(rest);
            }
            rest.extend(part);
        }
    }
}
