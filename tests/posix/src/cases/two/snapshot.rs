//! A snapshot of all observable properties of a tree, for comparing two mounts.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::sys;

/// Properties of one name. Left out: access times, which reading changes; block counts, which the disk decides later;
/// and the device, which each mount has of its own.
#[derive(PartialEq, Eq)]
struct EntrySnapshot {
    ino: u64,
    mode: u32,
    links: u64,
    owner: (u32, u32),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    target: Option<PathBuf>,
    contents: Option<Vec<u8>>,
    xattrs: BTreeMap<String, Vec<u8>>,
}

/// A directory with everything below it, by relative path.
pub struct TreeSnapshot(BTreeMap<PathBuf, EntrySnapshot>);

impl TreeSnapshot {
    pub fn of(top: &Path) -> Result<TreeSnapshot> {
        let mut tree = TreeSnapshot(BTreeMap::new());
        tree.add(top, Path::new(""))?;
        Ok(tree)
    }

    fn add(&mut self, top: &Path, at: &Path) -> Result<()> {
        let path = if at.as_os_str().is_empty() { top.to_owned() } else { top.join(at) };
        let say = || format!("{}", at.display());
        let metadata = fs::symlink_metadata(&path).with_context(say)?;
        if metadata.is_dir() {
            for entry in fs::read_dir(&path).with_context(say)? {
                let name = entry.with_context(say)?.file_name();
                self.add(top, &at.join(name))?;
            }
        }
        let kind = metadata.file_type();
        let mut xattrs = BTreeMap::new();
        for name in sys::list_xattrs(&path).with_context(say)? {
            let value =
                sys::xattr(&path, &name).with_context(|| format!("{}: xattr {name}", at.display()))?;
            xattrs.insert(name, value);
        }
        let seen = EntrySnapshot {
            ino: metadata.ino(),
            mode: metadata.mode(),
            links: metadata.nlink(),
            owner: (metadata.uid(), metadata.gid()),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            target: kind.is_symlink().then(|| fs::read_link(&path)).transpose().with_context(say)?,
            contents: kind.is_file().then(|| fs::read(&path)).transpose().with_context(say)?,
            xattrs,
        };
        self.0.insert(at.to_owned(), seen);
        Ok(())
    }

    /// Returns the first difference from the other tree, as "name: value here, value there".
    pub fn difference(&self, other: &TreeSnapshot) -> Option<String> {
        for (path, seen) in &self.0 {
            let Some(there) = other.0.get(path) else {
                return Some(format!("{} is missing", path.display()));
            };
            if let Some(what) = seen.difference(there) {
                return Some(format!("{}: {what}", path.display()));
            }
        }
        let more = other.0.keys().find(|path| !self.0.contains_key(*path))?;
        Some(format!("{} is there only", more.display()))
    }
}

impl EntrySnapshot {
    fn difference(&self, other: &EntrySnapshot) -> Option<String> {
        let words = [
            ("inode", self.ino.to_string(), other.ino.to_string()),
            ("mode", format!("{:o}", self.mode), format!("{:o}", other.mode)),
            ("links", self.links.to_string(), other.links.to_string()),
            ("owner", format!("{:?}", self.owner), format!("{:?}", other.owner)),
            ("size", self.size.to_string(), other.size.to_string()),
            ("mtime", format!("{:?}", self.modified), format!("{:?}", other.modified)),
            ("ctime", format!("{:?}", self.changed), format!("{:?}", other.changed)),
            ("target", format!("{:?}", self.target), format!("{:?}", other.target)),
            ("xattrs", format!("{:?}", self.xattrs), format!("{:?}", other.xattrs)),
        ];
        if let Some((what, here, there)) = words.iter().find(|(_, here, there)| here != there) {
            return Some(format!("{what} {there}, not {here}"));
        }
        (self.contents != other.contents).then(|| "other contents".to_owned())
    }
}
