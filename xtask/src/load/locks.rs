//! Locks that are held during a load.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use anyhow::{Context, Result};

/// Takes the locks; dropping the returned files releases them.
pub fn hold(dir: &Path) -> Result<[File; 2]> {
    let (whole, range) = open(dir)?;
    flock(&whole).context("taking a flock")?;
    lock_range(&range).context("taking a range lock")?;
    Ok([whole, range])
}

/// Returns whether each of them, flock and range, can be taken.
pub fn free(dir: &Path) -> Result<[bool; 2]> {
    let (whole, range) = open(dir)?;
    Ok([
        had(flock(&whole)).context("trying a flock")?,
        had(lock_range(&range)).context("trying a range lock")?,
    ])
}

fn open(dir: &Path) -> Result<(File, File)> {
    let file = |name: &str| {
        OpenOptions::new().read(true).write(true).open(dir.join(name)).with_context(|| name.to_owned())
    };
    Ok((file("lock-flock")?, file("lock-range")?))
}

fn had(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

fn flock(file: &File) -> io::Result<()> {
    // SAFETY: a descriptor of ours.
    let done = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes a range lock of this process with `fcntl`.
fn lock_range(file: &File) -> io::Result<()> {
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::F_WRLCK as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    (range.l_start, range.l_len) = (10, 20);
    // SAFETY: the kernel reads one `flock`.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const range) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
