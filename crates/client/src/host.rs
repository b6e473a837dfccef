//! What the kernel of this machine alone knows of callers, and of mounts below the mount. See
//! docs/decisions/0040-host.md.
//!
//! A FUSE request names its caller by the number of a thread. The number means something here only if this machine's
//! kernel sends the requests ([`LocalHost`]). A guest's kernel, over virtio-fs, numbers threads of its own: looked up
//! here, the number would be another program's ([`NoHost`]).
//!
//! `cargo xtask tidy` checks that no other module of this crate reads about other processes. What the daemon asks of
//! itself (its threads, its cgroup, its id map) is independent of the callers' kernel and lies elsewhere.

mod local;
mod signals;
mod submounts;
#[cfg(test)]
pub(crate) mod test_host;
mod thread_credentials;
mod user_namespace;
mod watchers;

use crate::thread_state::ThreadState;
pub use local::LocalHost;
use nigh_types::IdRange;
use std::collections::BTreeSet;
use std::path::Path;
pub use submounts::Submounts;
pub use thread_credentials::ThreadCredentials;
pub use user_namespace::UserNamespace;

/// The kernel under which callers run, beyond its FUSE requests. `thread` is the number in a request; 0: a thread of
/// another pid namespace, of which every host answers as of an invisible one.
pub trait Host: Send + Sync {
    /// Supplementary groups, filesystem ids and capabilities of a thread; empty if the thread is not visible.
    fn credentials(&self, thread: u32) -> ThreadCredentials;

    /// The user namespace in whose ids requests name users, which is the daemon's. `None`: unknown, so no caller's
    /// capabilities are sent to the server.
    fn own_user_namespace(&self) -> Option<UserNamespace>;

    /// The user namespace of a thread; `None` if the thread is not visible.
    fn user_namespace(&self, thread: u32) -> Option<UserNamespace>;

    /// User and group ids, in the daemon's numbers, that a thread's user namespace maps.
    fn mapped_ids(&self, thread: u32) -> (Vec<IdRange>, Vec<IdRange>);

    /// Whether a thread has a pending signal that ends its process. `None` if the thread is not visible.
    fn has_fatal_signal(&self, thread: u32) -> Option<bool>;

    /// Scheduler state of a thread, which shows whether it has run since an earlier look. `None` if the thread is not
    /// visible.
    fn thread_state(&self, thread: u32) -> Option<ThreadState>;

    /// Whether a thread is known to have ended.
    fn has_ended(&self, thread: u32) -> bool;

    /// Mounts and overlay layers below a mount point.
    fn submounts(&self, mountpoint: &Path) -> Submounts;

    /// Inode numbers on a device (major, minor) that any visible process watches by inotify(7).
    fn watched_inodes(&self, device: (u32, u32)) -> BTreeSet<u64>;
}

/// No host: the callers run under another machine's kernel, such as a guest's. Every thread counts as invisible:
///
/// - a call is sent with the ids and the group of its request, without capabilities;
/// - an INTERRUPT of the kernel ends the wait, whatever the signal;
/// - whether a thread has applied its reply is unknown, so the waits for it last their fixed times;
/// - mounts below and inotify watches are unknown, and assumed absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHost;

impl Host for NoHost {
    fn credentials(&self, _: u32) -> ThreadCredentials {
        ThreadCredentials::default()
    }

    fn own_user_namespace(&self) -> Option<UserNamespace> {
        None
    }

    fn user_namespace(&self, _: u32) -> Option<UserNamespace> {
        None
    }

    fn mapped_ids(&self, _: u32) -> (Vec<IdRange>, Vec<IdRange>) {
        (Vec::new(), Vec::new())
    }

    fn has_fatal_signal(&self, _: u32) -> Option<bool> {
        None
    }

    fn thread_state(&self, _: u32) -> Option<ThreadState> {
        None
    }

    fn has_ended(&self, _: u32) -> bool {
        false
    }

    fn submounts(&self, _: &Path) -> Submounts {
        Submounts::none()
    }

    fn watched_inodes(&self, _: (u32, u32)) -> BTreeSet<u64> {
        BTreeSet::new()
    }
}
