//! The changes, and the checks that show whether a change is visible.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Assigns changes to directories: in each round one change in each directory.
pub struct Plan {
    pub dirs: u64,
    /// All kinds of changes; otherwise only kinds that stay visible after later ones.
    pub all_kinds: bool,
}

/// The kind of change of a round. `base` exists from the beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Make,
    Append,
    Mode,
    Rename,
    Replace,
    Remove,
}

const KINDS: [Kind; 6] = [Kind::Make, Kind::Append, Kind::Mode, Kind::Rename, Kind::Replace, Kind::Remove];

impl Plan {
    pub fn prepare(&self, source: &Path) -> io::Result<()> {
        for dir in 0..self.dirs {
            let dir = source.join(format!("d{dir}"));
            fs::create_dir(&dir)?;
            write(&dir.join("base"), 0)?;
        }
        Ok(())
    }

    fn at(&self, top: &Path, nth: u64) -> (PathBuf, u64) {
        (top.join(format!("d{}", nth % self.dirs)), nth / self.dirs)
    }

    fn kind(&self, round: u64) -> Kind {
        let kinds = if self.all_kinds { 6 } else { 2 };
        KINDS[usize::try_from(round % kinds).unwrap_or(0)]
    }

    /// Returns the size of `base` after a round.
    fn size(&self, round: u64) -> u64 {
        let mut size = 0;
        for round in 0..=round {
            match self.kind(round) {
                Kind::Append => size += 1,
                Kind::Replace => size = 1000 + round,
                _ => {}
            }
        }
        size
    }

    pub fn what(&self, nth: u64) -> String {
        let (dir, round) = self.at(Path::new(""), nth);
        format!("{:?} in {}", self.kind(round), dir.display())
    }

    /// Makes a change.
    pub fn change(&self, source: &Path, nth: u64) -> io::Result<()> {
        let (dir, round) = self.at(source, nth);
        let base = dir.join("base");
        match self.kind(round) {
            Kind::Make => write(&made(&dir, round), 0),
            Kind::Append => OpenOptions::new().append(true).open(base)?.write_all(b"x"),
            Kind::Mode => fs::set_permissions(base, Permissions::from_mode(mode(round))),
            Kind::Rename => fs::rename(made(&dir, round - 3), renamed(&dir, round)),
            Kind::Replace => {
                let aside = dir.join("aside");
                write(&aside, 1000 + round)?;
                fs::rename(aside, base)
            }
            Kind::Remove => fs::remove_file(renamed(&dir, round - 2)),
        }
    }

    /// Returns whether a change is visible.
    pub fn shows(&self, point: &Path, nth: u64) -> bool {
        let (dir, round) = self.at(point, nth);
        let base = || fs::metadata(dir.join("base")).ok();
        match self.kind(round) {
            Kind::Make => made(&dir, round).exists(),
            Kind::Append => base().is_some_and(|meta| meta.len() >= self.size(round)),
            Kind::Mode => base().is_some_and(|meta| meta.permissions().mode() & 0o777 == mode(round)),
            Kind::Rename => renamed(&dir, round).exists() && !made(&dir, round - 3).exists(),
            Kind::Replace => base().is_some_and(|meta| meta.len() == 1000 + round),
            Kind::Remove => !renamed(&dir, round - 2).exists(),
        }
    }
}

fn made(dir: &Path, round: u64) -> PathBuf {
    dir.join(format!("made-{round}"))
}

fn renamed(dir: &Path, round: u64) -> PathBuf {
    dir.join(format!("renamed-{round}"))
}

fn mode(round: u64) -> u32 {
    if round.is_multiple_of(12) || round % 12 == 2 { 0o640 } else { 0o644 }
}

fn write(path: &Path, size: u64) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(&vec![b'x'; usize::try_from(size).unwrap_or(0)])
}

/// Returns a directory's contents: sizes and modes by path.
fn tree(top: &Path) -> Result<BTreeMap<PathBuf, (u64, u32)>> {
    let mut all = BTreeMap::new();
    let mut left = vec![top.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let path = entry?.path();
            let meta = fs::symlink_metadata(&path).with_context(|| path.display().to_string())?;
            let size = if meta.is_dir() { 0 } else { meta.len() };
            all.insert(path.strip_prefix(top)?.to_owned(), (size, meta.permissions().mode()));
            if meta.is_dir() {
                left.push(path);
            }
        }
    }
    Ok(all)
}

/// Fails if two trees differ; returns their number of entries.
pub fn compare(source: &Path, point: &Path) -> Result<u64> {
    let (ours, theirs) = (tree(source)?, tree(point)?);
    let of = |path: &PathBuf| (ours.get(path).copied(), theirs.get(path).copied());
    let differing: Vec<_> =
        ours.keys().chain(theirs.keys()).filter(|path| of(path).0 != of(path).1).collect();
    ensure!(
        differing.is_empty(),
        "{} differ, such as {}: on disk {:?}, in the mount {:?}",
        differing.len(),
        differing[0].display(),
        of(differing[0]).0,
        of(differing[0]).1
    );
    Ok(ours.len() as u64)
}
