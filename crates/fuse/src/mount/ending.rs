//! Unmounting a mount that may be dead or unresponsive.
//!
//! A mount whose daemon has died or is stopped may block unkillable programs, and so be in use. Only an abort of its
//! connection frees them (`fuse_abort_conn`), and after that nothing in the mount can be used.

use super::{Liveness, UnmountError, connection, is_root, liveness_within, locate, unmount_located};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// A process that only accesses the mount briefly has left it after this time.
const LOOKS: Duration = Duration::from_millis(300);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// A mount in use counts as silent if it does not return its root's attributes within this time.
const SILENCE: Duration = Duration::from_secs(5);

/// How a mount ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unmounted {
    /// No process was in it.
    Idle,
    /// It was dead or silent: its connection was aborted.
    Aborted,
}

/// Unmounts a mount that no process uses for longer than a brief access.
pub fn unmount_idle(mountpoint: &Path) -> Result<(), UnmountError> {
    idle(&locate(mountpoint))
}

/// As `unmount_idle`; a mount in use is aborted and detached if it is dead or silent.
pub fn unmount_unless_used(mountpoint: &Path) -> Result<Unmounted, UnmountError> {
    let path = locate(mountpoint);
    match idle(&path) {
        Ok(()) => Ok(Unmounted::Idle),
        Err(UnmountError::Busy { .. }) if !answers(&path) => by_force(&path),
        Err(error) => Err(error),
    }
}

/// Aborts the connection of a mount, responsive or not, and unmounts it.
pub fn unmount_by_force(mountpoint: &Path) -> Result<Unmounted, UnmountError> {
    by_force(&locate(mountpoint))
}

fn answers(path: &Path) -> bool {
    matches!(liveness_within(path, SILENCE), Liveness::Alive | Liveness::Absent)
}

fn idle(path: &Path) -> Result<(), UnmountError> {
    let give_up = Instant::now() + LOOKS;
    loop {
        match unmount_located(path, false) {
            Err(UnmountError::Busy { .. }) if Instant::now() < give_up => std::thread::sleep(LOOK_AGAIN),
            result => return result,
        }
    }
}

fn by_force(path: &Path) -> Result<Unmounted, UnmountError> {
    let aborted = match (connection::connection_id(path), is_root()) {
        (None, _) => Err(io::Error::from(io::ErrorKind::NotFound)),
        (Some(_), false) => connection::abort(path),
        // Needs no fusectl: the kernel aborts the connection before it checks whether the mount is in use
        // (`fuse_umount_begin`).
        (Some(_), true) => match rustix::mount::unmount(path, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW) {
            Ok(()) => return Ok(Unmounted::Aborted),
            Err(Errno::BUSY) => Ok(()),
            Err(error) => Err(error.into()),
        },
    };
    match (idle(path), aborted) {
        // Files still open there are of no use to their holders.
        (Err(UnmountError::Busy { .. }), Ok(())) => unmount_located(path, true)?,
        (Err(UnmountError::Busy { path }), Err(error)) => return Err(UnmountError::NotEnded { path, error }),
        (result, _) => result?,
    }
    Ok(Unmounted::Aborted)
}
