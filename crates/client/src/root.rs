//! The kernel knows the root before it is told that something of it has changed.
//!
//! It makes a root without any permission, and takes those that it has from the first answer to GETATTR. An answer that an
//! invalidation has crossed it throws away (`fuse_change_attributes_i`), and without having asked again it lets nobody in who is
//! not privileged (`fuse_permission`): `EACCES` for whoever is the first in a mount whose root is being changed.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// What waits for the first look does not wait for a server that has gone away.
const PATIENCE: Duration = Duration::from_secs(1);

/// Somebody looks at the root.
pub(crate) struct FirstLook(Option<Receiver<()>>);

impl FirstLook {
    /// Looks, if something is mounted; the mount has to be served meanwhile.
    pub fn begin(mountpoint: Option<PathBuf>) -> FirstLook {
        FirstLook(mountpoint.map(|mountpoint| {
            let (looked, looking) = channel();
            // Nobody waits for this one's end: that may be the connection's.
            thread::spawn(move || {
                if let Err(error) = std::fs::symlink_metadata(&mountpoint) {
                    tracing::debug!(target: "nigh::kernel", %error, "the root cannot be looked at");
                }
                drop(looked);
            });
            looking
        }))
    }

    /// Until the kernel knows the root, or for as long as one can wait for that.
    pub fn wait(self) {
        if let Some(looking) = self.0 {
            let _ = looking.recv_timeout(PATIENCE);
        }
    }
}
