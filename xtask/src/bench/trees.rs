//! The trees of the workloads.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

/// The sizes of the trees.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Files in one directory.
    pub flat: u32,
    /// Nested directories, two small files each.
    pub deep: u32,
    /// Files that are read.
    pub read: u32,
    pub links: u32,
    /// Files of the archive.
    pub archive: u32,
    /// Repetitions of calls on one name, and files created.
    pub calls: u32,
}

impl Sizes {
    /// Returns scaled sizes; 1 gives the sizes of the published figures.
    #[must_use]
    pub fn scaled(scale: f64) -> Sizes {
        let of = |full: f64, least: f64| (full * scale).max(least).min(1e8) as u32;
        Sizes {
            flat: of(100_000.0, 100.0),
            deep: of(15_005.0, 30.0),
            read: of(10_000.0, 100.0).min(1000),
            links: of(10_000.0, 100.0),
            archive: of(20_000.0, 200.0),
            calls: of(100_000.0, 500.0).min(10_000),
        }
    }

    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "flat": self.flat, "deep": self.deep, "read": self.read, "links": self.links,
            "archive": self.archive, "calls": self.calls,
        })
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "flat_dir {} files, deep_dir {} directories × 2 files, archive {} files",
            self.flat, self.deep, self.archive
        )
    }
}

/// Creates all trees below `root`.
pub fn build(root: &Path, sizes: &Sizes) -> io::Result<()> {
    let flat = root.join("flat_dir");
    fs::create_dir(&flat)?;
    for i in 0..sizes.flat {
        fs::write(flat.join(format!("file-{i:07}")), b"")?;
    }
    deep(&root.join("deep_dir"), sizes.deep)?;
    fill(root, "read", sizes.read, |path, i| fs::write(path, format!("{i}\n").repeat(500)))?;
    fill(root, "links", sizes.links, |path, i| symlink(format!("../read/{i}"), path))?;
    archive(&root.join("tree"), sizes.archive)
}

fn fill(root: &Path, name: &str, count: u32, make: impl Fn(&Path, u32) -> io::Result<()>) -> io::Result<()> {
    let dir = root.join(name);
    fs::create_dir(&dir)?;
    (0..count).try_for_each(|i| make(&dir.join(format!("{i}")), i))
}

/// Creates directories in levels of at most ten, as in source trees.
fn deep(root: &Path, count: u32) -> io::Result<()> {
    fs::create_dir(root)?;
    for number in 1..=count {
        let mut names = Vec::new();
        let mut rest = number;
        while rest > 0 {
            names.push(format!("d{}", rest % 10));
            rest /= 10;
        }
        names.reverse();
        let dir = names.iter().fold(root.to_owned(), |path, name| path.join(name));
        fs::create_dir_all(&dir)?;
        fs::write(dir.join("a"), b"small")?;
        fs::write(dir.join("b"), b"small too")?;
    }
    Ok(())
}

/// Creates source files of 1 to 20 KiB, 20 per directory.
fn archive(root: &Path, count: u32) -> io::Result<()> {
    for i in 0..count {
        let dir = root.join(format!("part{}/module{}", i / 400, i / 20 % 20));
        if i % 20 == 0 {
            fs::create_dir_all(&dir)?;
        }
        fs::write(dir.join(format!("source{i}.c")), "int line;\n".repeat(100 + (i % 19) as usize * 100))?;
    }
    Ok(())
}
