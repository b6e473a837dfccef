//! Unmount by the mount's own daemon, after a signal.

use nigh_fuse::mount::{UnmountError, mounts, open_abort, unmount, unmount_idle};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Time to answer running requests after the mount is detached; then the connection is aborted.
const GRACE: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(5);

/// Unmounts one mount, at all its mount points.
pub struct Stopper {
    connection: u32,
    /// Whether the kernel has unmounted.
    over: Arc<AtomicBool>,
}

impl Stopper {
    pub(crate) fn new(connection: u32, over: Arc<AtomicBool>) -> Stopper {
        Stopper { connection, over }
    }

    /// Unmounts. A mount in use is detached, and its connection aborted after a second.
    ///
    /// # Errors
    /// The connection cannot be aborted: it ends with the process.
    pub fn stop(&self) -> io::Result<()> {
        for mountpoint in self.mountpoints() {
            let unmounted = match unmount_idle(&mountpoint) {
                Err(UnmountError::Busy { .. }) => unmount(&mountpoint, true),
                result => result,
            };
            if let Err(error) = unmounted {
                tracing::warn!(%error, "cannot unmount at the end");
            }
        }
        let give_up = Instant::now() + GRACE;
        while !self.over.load(Ordering::Relaxed) {
            if Instant::now() >= give_up {
                // While this process serves the connection, its number cannot be reused.
                return open_abort(self.connection)?.write_all(b"1");
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Mount points at which this mount is visible, latest first.
    fn mountpoints(&self) -> Vec<PathBuf> {
        let all = mounts();
        let is_ours = |at: usize| all[at].device == (0, self.connection);
        let is_seen = |at: usize| !all[at + 1..].iter().any(|later| later.mountpoint == all[at].mountpoint);
        let ours = (0..all.len()).rev().filter(|at| is_ours(*at) && is_seen(*at));
        ours.map(|at| all[at].mountpoint.clone()).collect()
    }
}
