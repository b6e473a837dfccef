//! The workload of the demonstration, and its report.

use super::resident::is_resident;
use crate::output::print_line;
use anyhow::{Result, ensure};
use serde_json::Value;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A tree to run the workload on. Each method returns the number of replies that it needed.
pub trait Files {
    /// Visits every name below the root with its attributes.
    fn walk(&self, names: u64) -> Result<u64>;
    /// Looks up different names that do not exist in the root.
    fn missing(&self, prefix: &str, count: u64) -> Result<u64>;
    /// Looks up one name that does not exist.
    fn missing_one(&self, times: u64) -> Result<u64>;
    fn read_links(&self, count: u64) -> Result<u64>;
    /// Number of files that are not wholly in the page cache; `None` without a page cache.
    fn count_not_resident(&self) -> Result<Option<u64>>;
    /// Reads every file's contents.
    fn read(&self, count: u64) -> Result<u64>;
}

/// The workload by system calls on a mount.
pub struct Mounted {
    root: PathBuf,
}

impl Mounted {
    pub fn new(root: &Path) -> Mounted {
        Mounted { root: root.to_owned() }
    }

    fn each(&self, mut visit: impl FnMut(&Path, &fs::Metadata) -> Result<()>) -> Result<u64> {
        let mut seen = 0;
        let mut todo = vec![self.root.clone()];
        while let Some(dir) = todo.pop() {
            for entry in fs::read_dir(&dir)? {
                let path = entry?.path();
                let metadata = fs::symlink_metadata(&path)?;
                seen += 1;
                visit(&path, &metadata)?;
                if metadata.is_dir() {
                    todo.push(path);
                }
            }
        }
        Ok(seen)
    }
}

impl Files for Mounted {
    fn walk(&self, names: u64) -> Result<u64> {
        let seen = self.each(|_, _| Ok(()))?;
        ensure!(seen == names, "{seen} names are listed, {names} were made");
        Ok(seen)
    }

    fn missing(&self, prefix: &str, count: u64) -> Result<u64> {
        for n in 0..count {
            absent(&self.root.join(format!("{prefix}{n}")))?;
        }
        Ok(count)
    }

    fn missing_one(&self, times: u64) -> Result<u64> {
        let path = self.root.join("no-such-name");
        (0..times).try_for_each(|_| absent(&path))?;
        Ok(times)
    }

    fn read_links(&self, count: u64) -> Result<u64> {
        let mut read = 0;
        self.each(|path, metadata| {
            if metadata.is_symlink() {
                ensure!(fs::read_link(path)? == Path::new("part-0/file-0.txt"), "{}", path.display());
                read += 1;
            }
            Ok(())
        })?;
        ensure!(read == count, "{read} symlinks are read, {count} were made");
        Ok(read)
    }

    fn count_not_resident(&self) -> Result<Option<u64>> {
        let mut dropped = 0;
        self.each(|path, metadata| {
            dropped += u64::from(metadata.is_file() && !is_resident(path)?);
            Ok(())
        })?;
        Ok(Some(dropped))
    }

    fn read(&self, count: u64) -> Result<u64> {
        let mut read = 0;
        self.each(|path, metadata| {
            if metadata.is_file() {
                ensure!(fs::read(path)?.starts_with(b"contents of"), "{}", path.display());
                read += 1;
            }
            Ok(())
        })?;
        ensure!(read == count, "{read} files are read, {count} were made");
        Ok(read)
    }
}

fn absent(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => anyhow::bail!("{}: {other:?}", path.display()),
    }
}

/// A report with one line for each piece of work.
pub struct Table<S> {
    status: S,
    answers: u64,
    waits: u64,
    /// Requests that repeated work sent.
    again: u64,
}

impl<S: Fn() -> Value> Table<S> {
    pub fn new(status: S) -> Table<S> {
        Table { status, answers: 0, waits: 0, again: 0 }
    }

    /// Repeats the work of the line before.
    pub fn again(&mut self, work: impl FnOnce() -> Result<u64>) -> Result<()> {
        self.again += self.line("the same again", work)?;
        Ok(())
    }

    /// Runs `work`, prints its line and returns the number of requests.
    pub fn line(&mut self, what: &str, work: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let before = (self.status)();
        let begun = Instant::now();
        self.answers += work()?;
        let took = begun.elapsed();
        let after = (self.status)();
        let count = |key: &str| {
            let read = |status: &Value| status.pointer(key).and_then(Value::as_u64).unwrap_or(0);
            read(&after) - read(&before)
        };
        let (requests, waits) = (count("/remote/requests"), count("/remote/waits"));
        self.waits += waits;
        let took_ms = took.as_secs_f64() * 1e3;
        print_line(&format!("{what:<44} {took_ms:>7.1} ms {requests:>10} {waits:>8}"))?;
        Ok(requests)
    }

    /// Summarises the run. `dropped`: files that were not wholly in the page cache before they were read again.
    pub fn conclusion(&self, dropped: u64) -> String {
        match (self.again, dropped) {
            (0, _) => "Every answer after the first came from memory.".into(),
            (again, 0) => format!("Repeated work sent {again} request(s) to the server."),
            (again, dropped) => format!(
                "Repeated work sent {again} request(s) to the server: the page cache no longer held {dropped} file(s)."
            ),
        }
    }

    /// Least time that the answers from memory saved.
    pub fn saved(&self, round_trip: Duration) -> Duration {
        let from_memory = u32::try_from(self.answers.saturating_sub(self.waits)).unwrap_or(u32::MAX);
        round_trip * from_memory
    }
}
