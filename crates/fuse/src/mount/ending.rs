//! Unmounting a mount that may be dead or silent.
//!
//! A mount whose daemon has died or is stopped may hold programs that cannot be killed, and be in use because of them. Only the
//! end of its connection frees them (`fuse_abort_conn`), and after that nothing in the mount can be used.

use super::{Liveness, UnmountError, connection, is_root, liveness_within, locate, unmount_located};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// A process that only looks at a mount has left it after this time.
const LOOKS: Duration = Duration::from_millis(300);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// A mount in use that gives no attributes of its root for so long counts as silent.
const SILENCE: Duration = Duration::from_secs(5);

/// How a mount ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unmounted {
    /// No process was in it.
    Idle,
    /// It was dead or silent: its connection was aborted.
    Aborted,
}

/// Unmounts a mount that no process uses for longer than a look at it takes.
pub fn unmount_idle(mountpoint: &Path) -> Result<(), UnmountError> {
    idle(&locate(mountpoint))
}

/// The same; a mount in use is aborted and detached where it is dead or silent.
pub fn unmount_unless_used(mountpoint: &Path) -> Result<Unmounted, UnmountError> {
    let path = locate(mountpoint);
    match idle(&path) {
        Ok(()) => Ok(Unmounted::Idle),
        Err(UnmountError::Busy { .. }) if !answers(&path) => by_force(&path),
        Err(error) => Err(error),
    }
}

/// Aborts the connection of a mount whether it answers or not, and unmounts it.
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
        // Needs no fusectl: the connection is aborted before it is looked whether the mount is in use (`fuse_umount_begin`).
        (Some(_), true) => match rustix::mount::unmount(path, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW) {
            Ok(()) => return Ok(Unmounted::Aborted),
            Err(Errno::BUSY) => Ok(()),
            Err(error) => Err(error.into()),
        },
    };
    match (idle(path), aborted) {
        // What is still open there is of no use to its holder.
        (Err(UnmountError::Busy { .. }), Ok(())) => unmount_located(path, true)?,
        (Err(UnmountError::Busy { path }), Err(error)) => return Err(UnmountError::NotEnded { path, error }),
        (result, _) => result?,
    }
    Ok(Unmounted::Aborted)
}
