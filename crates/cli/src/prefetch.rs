//! `nigh prefetch`: reads names and attributes of a tree into the cache, and contents if asked.
//!
//! It lists and reads the tree as any application would, with the caller's rights; the mount fetches ahead of it.

use crate::output::print_line;
use anyhow::{Context, Result, bail};
use nigh_client::fuse::mount::{FILESYSTEM_TYPE, mounts};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::{CStr, CString};
use std::io::{IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Interval of progress output.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// Bytes of one read.
const PIECE: usize = 1 << 20;

/// Reads all directories below `path` on its mount; `contents`: all files, too.
pub fn run(path: &Path, contents: bool) -> Result<()> {
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
    let mut walk = Walk::new(about.dev(), contents);
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
    /// Bytes of the files that were read, and a buffer for one read; `None`: files are not read.
    contents: Option<(u64, Vec<u8>)>,
    /// Number of unreadable directories and files, and name and error of the first.
    unreadable: (u64, Option<(CString, Errno)>),
    began: Instant,
    /// Time of the last progress output; `None` if standard error is not a terminal.
    last_progress: Option<Instant>,
}

impl Walk {
    fn new(device: u64, contents: bool) -> Walk {
        let now = Instant::now();
        let last_progress = std::io::stderr().is_terminal().then_some(now);
        Walk {
            device,
            levels: Vec::new(),
            directories: 0,
            entries: 0,
            contents: contents.then(|| (0, vec![0; PIECE])),
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
                Err(errno) => self.note_unreadable(name, errno),
            }
            self.print_progress();
        }
        Ok(())
    }

    fn read(&mut self, fd: OwnedFd) -> rustix::io::Result<()> {
        let (mut below, mut files) = (Vec::new(), Vec::new());
        for entry in Dir::read_from(&fd)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            self.entries += 1;
            // Brings the attributes into the cache, even where a listing carries none.
            let Ok(about) = rustix::fs::statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            match FileType::from_raw_mode(about.st_mode) {
                FileType::Directory if about.st_dev == self.device => below.push(name.to_owned()),
                FileType::RegularFile if self.contents.is_some() => files.push(name.to_owned()),
                _ => {}
            }
        }
        for name in files {
            match self.read_file(&fd, &name) {
                Ok(()) | Err(Errno::NOENT | Errno::LOOP | Errno::STALE) => {}
                Err(errno) => self.note_unreadable(name, errno),
            }
        }
        below.reverse();
        self.directories += 1;
        self.levels.push(Level { fd, subdirs: below });
        Ok(())
    }

    /// Reads a file to its end.
    fn read_file(&mut self, dir: &OwnedFd, name: &CStr) -> rustix::io::Result<()> {
        // It may have been replaced by a FIFO.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(dir, name, flags, Mode::empty())?;
        while let Some((bytes, buffer)) = &mut self.contents {
            match rustix::io::read(&file, &mut buffer[..]) {
                Ok(0) => break,
                Ok(count) => *bytes += count as u64,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
            self.print_progress();
        }
        Ok(())
    }

    fn note_unreadable(&mut self, name: CString, errno: Errno) {
        self.unreadable.0 += 1;
        self.unreadable.1.get_or_insert((name, errno));
    }

    /// Numbers so far, for people.
    fn numbers(&self) -> String {
        let contents = self.contents.as_ref();
        let contents = contents
            .map_or_else(String::new, |(bytes, _)| format!(", {:.1} MiB", *bytes as f64 / 1_048_576.0));
        format!("{} directories, {} entries{contents}", self.directories, self.entries)
    }

    fn print_progress(&mut self) {
        if self.last_progress.is_some_and(|said| said.elapsed() >= PROGRESS_INTERVAL) {
            // Without a terminal any more, the walk goes on.
            let _ = write!(std::io::stderr(), "\r{}", self.numbers());
            self.last_progress = Some(Instant::now());
        }
    }

    fn print_summary(self, path: &Path) -> Result<()> {
        if self.last_progress.is_some() {
            write!(std::io::stderr(), "\r\x1b[K")?;
        }
        let (took, path) = (self.began.elapsed().as_secs_f64(), path.display());
        print_line(&format!("{path}: {} in {took:.1} s", self.numbers()))?;
        match self.unreadable {
            (count, Some((name, errno))) => {
                bail!(
                    "{count} directories or files could not be read, the first {}: {errno}",
                    name.to_string_lossy()
                )
            }
            _ => Ok(()),
        }
    }
}
