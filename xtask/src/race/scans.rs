//! Scans of a large directory that the other side changes meanwhile.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use nigh_sim::random::Dice;
use rustix::fs::{CWD, FileType, Mode, OFlags};

use super::stage::{CallTimes, Stage};
use crate::listing;

/// How many changes one side may be ahead of the other's position in its scan, so that changes are spread over the
/// whole scan.
const AHEAD: u64 = 64;

/// The changed names. They are numbers; a removed name is not used again.
struct Names {
    there: Vec<u32>,
    next: u32,
    touched: Vec<bool>,
}

/// A third each of creations, removals and renames.
enum Change {
    Make(u32),
    Remove(u32),
    Rename(u32, u32),
}

impl Names {
    fn change(&mut self, dice: &mut Dice) -> Change {
        match dice.below(3) {
            0 => Change::Make(self.another()),
            1 => Change::Remove(self.one(dice)),
            _ => Change::Rename(self.one(dice), self.another()),
        }
    }

    fn one(&mut self, dice: &mut Dice) -> u32 {
        let at = usize::try_from(dice.below(self.there.len() as u64)).unwrap_or(0);
        let name = self.there.swap_remove(at);
        self.touched[name as usize] = true;
        name
    }

    fn another(&mut self) -> u32 {
        self.next += 1;
        self.touched.push(true);
        self.there.push(self.next - 1);
        self.next - 1
    }
}

fn path(dir: &Path, name: u32) -> PathBuf {
    dir.join(name.to_string())
}

fn make(path: &Path) -> std::io::Result<()> {
    Ok(rustix::fs::mknodat(CWD, path, FileType::RegularFile, Mode::from_raw_mode(0o644), 0)?)
}

/// Runs `scans` times: `count` changes of a directory of twice as many entries on the first side, while the second
/// side scans it once in parts of two or three names.
pub fn scans(first: &Path, second: &Path, count: u64, scans: u64) -> Result<CallTimes> {
    let mut meter = CallTimes::default();
    let next = u32::try_from(count * 2)?;
    (0..next).try_for_each(|name| make(&path(first, name))).context("making the entries")?;
    let mut names = Names { there: (0..next).collect(), next, touched: Vec::new() };
    for seed in 0..scans {
        let before = names.there.clone();
        names.touched = vec![false; names.next as usize];
        let mut dice = Dice::new(seed);
        let (stage, done, due) = (Stage::default(), AtomicU64::new(0), AtomicU64::new(0));
        let mut seen = Vec::new();
        let changes = |meter: &mut CallTimes| {
            for number in 0..count {
                stage.wait_until(|| due.load(Ordering::SeqCst) + AHEAD > number)?;
                match names.change(&mut dice) {
                    Change::Make(name) => meter.call("mknod", || make(&path(first, name)))?,
                    Change::Remove(name) => meter.call("unlink", || fs::remove_file(path(first, name)))?,
                    Change::Rename(from, to) => {
                        meter.call("rename", || fs::rename(path(first, from), path(first, to)))?;
                    }
                }
                done.store(number + 1, Ordering::SeqCst);
            }
            Ok(())
        };
        let scan = |meter: &mut CallTimes| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let dir = meter.call("opendir", || Ok(rustix::fs::open(second, flags, Mode::empty())?))?;
            loop {
                let (part, place) = meter.call("getdents", || Ok(listing::part(&dir)?))?;
                // Cookies are spread evenly over 63 bits; on other filesystems this only changes the pace.
                let now = place.map_or(count, |place| (count * (place >> 31)) >> 32);
                due.store(now.min(count), Ordering::SeqCst);
                if part.is_empty() {
                    return Ok(());
                }
                seen.extend(part.into_iter().map(|(name, _)| name));
                stage.wait_until(|| done.load(Ordering::SeqCst) + AHEAD >= now.min(count))?;
            }
        };
        meter.add(&stage.both(changes, scan)?);
        judge(&names, &before, seen).with_context(|| format!("scan {seed}"))?;
    }
    Ok(meter)
}

/// Checks that each name present throughout was returned once, no name twice, and no name that never existed.
fn judge(names: &Names, before: &[u32], seen: Vec<Vec<u8>>) -> Result<()> {
    let mut times = vec![0_u32; names.touched.len()];
    let mut known = vec![false; names.touched.len()];
    before.iter().for_each(|name| known[*name as usize] = true);
    for name in seen {
        let text = String::from_utf8(name)?;
        let times = text.parse().ok().and_then(|name: usize| times.get_mut(name));
        *times.with_context(|| format!("{text} never was"))? += 1;
    }
    for (name, times) in times.iter().enumerate() {
        let (was, touched) = (known[name], names.touched[name]);
        ensure!(*times <= 1 && (was || touched || *times == 0), "{name} came {times} times");
        ensure!(touched || !was || *times == 1, "{name} was there throughout and came {times} times");
    }
    Ok(())
}
