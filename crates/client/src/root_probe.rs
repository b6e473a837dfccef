//! Probe that makes the kernel read the root's attributes before the first invalidation of the root.
//!
//! The kernel creates the root inode without permissions and takes them from the first GETATTR reply. If an
//! invalidation races with this reply, the kernel discards the reply (`fuse_change_attributes_i`). Without another
//! GETATTR it then refuses unprivileged callers (`fuse_permission`): the first caller would get `EACCES` while the
//! root is being changed.

use nigh_fuse::mount::Probe;
use parking_lot::{Condvar, Mutex};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Limit on the wait for the first GETATTR, so that an unreachable server blocks nothing.
const PATIENCE: Duration = Duration::from_secs(1);

/// The first GETATTR on the root.
pub(crate) struct RootProbe {
    give_up: Instant,
    is_done: Mutex<bool>,
    changed: Condvar,
}

impl RootProbe {
    /// Starts the probe, if something is mounted; the mount must be served meanwhile. A child process makes it: a
    /// thread of the daemon that waits in its own mount would keep `/dev/fuse` open if the daemon is killed.
    pub fn begin(mountpoint: Option<PathBuf>) -> Arc<RootProbe> {
        let first_look = Arc::new(RootProbe {
            give_up: Instant::now() + PATIENCE,
            is_done: Mutex::new(mountpoint.is_none()),
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
                *looking.is_done.lock() = true;
                looking.changed.notify_all();
            });
        }
        first_look
    }

    /// Waits until the kernel has the root's attributes, at most [`PATIENCE`] from the start.
    pub fn wait(&self) {
        let mut looked = self.is_done.lock();
        while !*looked && !self.changed.wait_until(&mut looked, self.give_up).timed_out() {}
    }
}
