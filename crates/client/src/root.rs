//! The kernel knows the root before it is told that something of it has changed.
//!
//! It makes a root without any permission, and takes those that it has from the first answer to GETATTR. An answer that an
//! invalidation has crossed it throws away (`fuse_change_attributes_i`), and without having asked again it lets nobody in who is
//! not privileged (`fuse_permission`): `EACCES` for whoever is the first in a mount whose root is being changed.

use nigh_fuse::mount::Probe;
use parking_lot::{Condvar, Mutex};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// What waits for the first look does not wait for a server that has gone away.
const PATIENCE: Duration = Duration::from_secs(1);

/// The first look at the root.
pub(crate) struct FirstLook {
    give_up: Instant,
    looked: Mutex<bool>,
    changed: Condvar,
}

impl FirstLook {
    /// Looks, if something is mounted; the mount has to be served meanwhile. A child process looks, not a thread of the daemon: a
    /// thread that waits in its own mount keeps `/dev/fuse` open when the daemon is killed.
    pub fn begin(mountpoint: Option<PathBuf>) -> Arc<FirstLook> {
        let first_look = Arc::new(FirstLook {
            give_up: Instant::now() + PATIENCE,
            looked: Mutex::new(mountpoint.is_none()),
            changed: Condvar::new(),
        });
        if let Some(mountpoint) = mountpoint {
            let looking = Arc::clone(&first_look);
            thread::spawn(move || {
                if let Some(probe) = Probe::start(&mountpoint)
                    && probe.wait(PATIENCE).is_none()
                {
                    tracing::debug!(target: "nigh::kernel", "the root cannot be looked at");
                    probe.end();
                }
                *looking.looked.lock() = true;
                looking.changed.notify_all();
            });
        }
        first_look
    }

    /// Until the kernel knows the root, or for as long as one can wait for that.
    pub fn wait(&self) {
        let mut looked = self.looked.lock();
        while !*looked && !self.changed.wait_until(&mut looked, self.give_up).timed_out() {}
    }
}
