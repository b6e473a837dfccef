//! `nigh prefetch`: reads names and attributes of a tree into the cache.
//!
//! It lists the tree as any application would, with the caller's rights; the mount lets its server prefetch.

use crate::output::print_line;
use anyhow::{Context, Result, bail};
use nigh_client::fuse::mount::{FILESYSTEM_TYPE, mounts};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::CString;
use std::io::{IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Interval of progress output.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// Reads everything below `path` on its mount.
pub fn run(path: &Path) -> Result<()> {
    let about = std::fs::symlink_metadata(path).with_context(|| path.display().to_string())?;
    let device = (rustix::fs::major(about.dev()), rustix::fs::minor(about.dev()));
    let is_ours = mounts().iter().any(|mount| mount.fstype == FILESYSTEM_TYPE && mount.device == device);
    if !is_ours {
        bail!("{}: not in a mount of nigh; `nigh status` lists yours", path.display());
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = rustix::fs::open(path, flags, Mode::empty()).with_context(|| path.display().to_string())?;
    // One descriptor for each level.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let mut walk = Walk::new(about.dev());
    walk.read(top).with_context(|| path.display().to_string())?;
    walk.read_subdirs()?;
    walk.print_summary(path)
}

/// A directory whose subdirectories are being read.
struct Level {
    fd: OwnedFd,
    /// Subdirectories still to read, the next one last.
    subdirs: Vec<CString>,
}

struct Walk {
    device: u64,
    levels: Vec<Level>,
    directories: u64,
    entries: u64,
    /// Number of unreadable directories, and name and error of the first.
    unreadable: (u64, Option<(CString, Errno)>),
    began: Instant,
    /// Time of the last progress output; `None` if standard error is not a terminal.
    last_progress: Option<Instant>,
}

impl Walk {
    fn new(device: u64) -> Walk {
        let now = Instant::now();
        let last_progress = std::io::stderr().is_terminal().then_some(now);
        Walk {
            device,
            levels: Vec::new(),
            directories: 0,
            entries: 0,
            unreadable: (0, None),
            began: now,
            last_progress,
        }
    }

    fn read_subdirs(&mut self) -> Result<()> {
        while let Some(level) = self.levels.last_mut() {
            let Some(name) = level.subdirs.pop() else {
                self.levels.pop();
                continue;
            };
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let read = rustix::fs::openat(&level.fd, &name, flags, Mode::empty());
            match read.and_then(|fd| self.read(fd)) {
                // The directory was removed or replaced meanwhile.
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE) => {}
                Err(errno @ (Errno::MFILE | Errno::NFILE)) => {
                    return Err(errno).context("more levels of directories than files may be open");
                }
                Err(errno) => {
                    self.unreadable.0 += 1;
                    self.unreadable.1.get_or_insert((name, errno));
                }
            }
            self.print_progress()?;
        }
        Ok(())
    }

    fn read(&mut self, fd: OwnedFd) -> rustix::io::Result<()> {
        let mut below = Vec::new();
        for entry in Dir::read_from(&fd)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            self.entries += 1;
            // Brings the attributes into the cache, even where a listing carries none.
            let Ok(about) = rustix::fs::statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if FileType::from_raw_mode(about.st_mode) == FileType::Directory && about.st_dev == self.device {
                below.push(name.to_owned());
            }
        }
        below.reverse();
        self.directories += 1;
        self.levels.push(Level { fd, subdirs: below });
        Ok(())
    }

    fn print_progress(&mut self) -> Result<()> {
        if self.last_progress.is_some_and(|said| said.elapsed() >= PROGRESS_INTERVAL) {
            write!(std::io::stderr(), "\r{} directories, {} entries", self.directories, self.entries)?;
            self.last_progress = Some(Instant::now());
        }
        Ok(())
    }

    fn print_summary(self, path: &Path) -> Result<()> {
        if self.last_progress.is_some() {
            write!(std::io::stderr(), "\r\x1b[K")?;
        }
        let (took, path) = (self.began.elapsed().as_secs_f64(), path.display());
        print_line(&format!(
            "{path}: {} directories, {} entries in {took:.1} s",
            self.directories, self.entries
        ))?;
        match self.unreadable {
            (count, Some((name, errno))) => {
                bail!("{count} directories could not be read, the first {}: {errno}", name.to_string_lossy())
            }
            _ => Ok(()),
        }
    }
}
