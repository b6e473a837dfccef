//! Locks on the server's own files, which keep another server from using them.

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long to wait for the lock of a server's state. An earlier server may still be ending, a thread may be closing the
/// same export, and a child of this process between fork and exec holds its locks too.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);
/// How long to wait for the lock of an orphan folder, which another server may hold for as long as it runs.
pub(crate) const FOLDER_PATIENCE: Duration = Duration::from_millis(500);

/// Locks a file exclusively, waiting at most `patience`.
///
/// # Errors
/// `EWOULDBLOCK`: another process has it locked.
pub(crate) fn lock_exclusively(file: impl AsFd, patience: Duration) -> Result<(), Errno> {
    let give_up = Instant::now() + patience;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(5));
            }
            locked => return locked,
        }
    }
}
