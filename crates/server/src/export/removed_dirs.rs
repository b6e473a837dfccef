//! Removed directories that other sessions may have open or as working directory.
//!
//! On a local disk such a directory is empty, and can be read, changed and synced until the last process leaves it. A
//! descriptor gives clients these semantics, and keeps the inode number from being reused. A directory removed by
//! another process on the server's host is kept open only as any directory is. An open descriptor delays the release
//! of disk space and inode quota, and a read-only remount. So it is closed after a time without use, and when space
//! is needed.

use crate::export::kept_fds::KeptFd;
use crate::export::node::{Node, is_deleted};
use crate::limits::descriptors::{CachedFdCharge, Descriptors};
use lru::LruCache;
use nigh_types::NodeId;
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of kept directories. The least recently used one is closed first; calls on it then fail with
/// `ESTALE`.
const MOST: NonZeroUsize = NonZeroUsize::new(128).unwrap();
/// How long an unused directory is kept.
const UNUSED: Duration = Duration::from_secs(600);

#[derive(Debug)]
struct RemovedDir {
    fd: Arc<OwnedFd>,
    /// The filesystem ([`nigh_lease::Object`]) of the directory.
    filesystem: u64,
    used: Instant,
    _counted: CachedFdCharge,
}

#[derive(Debug)]
pub(crate) struct RemovedDirs {
    directories: Mutex<LruCache<NodeId, RemovedDir>>,
    descriptors: Arc<Descriptors>,
}

impl RemovedDirs {
    pub(crate) fn new(descriptors: Arc<Descriptors>) -> RemovedDirs {
        RemovedDirs { directories: Mutex::new(LruCache::new(MOST)), descriptors }
    }

    /// Keeps a removed directory. A directory that still exists is skipped: a host process may have moved it away
    /// while another one was removed in its place. If descriptors are short, other directories are closed instead.
    pub(crate) fn keep(&self, node: &Node, now: Instant) {
        if !is_deleted(&node.fd) {
            return;
        }
        if self.descriptors.is_short() {
            let mut directories = self.directories.lock();
            let oldest = [directories.pop_lru(), directories.pop_lru()];
            drop(directories);
            return drop(oldest);
        }
        let (fd, filesystem) = (Arc::clone(&node.fd), node.object.filesystem);
        let held = RemovedDir { fd, filesystem, used: now, _counted: self.descriptors.cache() };
        let evicted = self.directories.lock().push(node.id, held);
        drop(evicted); // closed after the lock is released
    }

    pub(crate) fn find(&self, id: NodeId, now: Instant) -> Option<Arc<OwnedFd>> {
        let mut directories = self.directories.lock();
        let held = directories.get_mut(&id)?;
        held.used = now;
        Some(Arc::clone(&held.fd))
    }

    /// Removes and returns all directories, for the caller to close.
    pub(crate) fn take_all(&self) -> Vec<KeptFd> {
        let mut directories = self.directories.lock();
        let all = std::iter::from_fn(|| directories.pop_lru());
        all.map(|(_, held)| KeptFd { filesystem: held.filesystem, file: Box::new(held) }).collect()
    }

    /// Closes directories that were unused for a while.
    pub(crate) fn close_unused(&self, now: Instant) {
        let mut directories = self.directories.lock();
        let is_old = |held: &RemovedDir| now.saturating_duration_since(held.used) >= UNUSED;
        let mut old = Vec::new();
        while directories.peek_lru().is_some_and(|(_, held)| is_old(held)) {
            old.extend(directories.pop_lru());
        }
        drop(directories);
        drop(old); // closing may wait for the disk
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::stat;
    use nigh_lease::Object;
    use rustix::fs::{CWD, Mode, OFlags};

    const ID: NodeId = NodeId { ino: 7, generation: 1 };

    #[test]
    fn removed_directory_is_kept_open_while_used_and_existing_one_is_not() {
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("d");
        std::fs::create_dir(&path).unwrap();
        let fd = rustix::fs::openat(CWD, &path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let (stat, now) = (stat::of_fd(&fd).unwrap(), Instant::now());
        let object = Object { filesystem: 3, ino: 7, birth: 1 };
        let node = Node { id: ID, fd: Arc::new(fd), stat, object, resolved_by: None, confined_at: now };
        let removed = RemovedDirs::new(Arc::default());
        removed.keep(&node, now);
        assert!(removed.find(ID, now).is_none(), "it lives");
        std::fs::remove_dir(&path).unwrap();
        removed.keep(&node, now);
        let later = now + UNUSED / 2;
        assert!(removed.find(ID, later).is_some());
        removed.close_unused(now + UNUSED);
        assert!(removed.find(ID, later).is_some(), "it was used meanwhile");
        removed.close_unused(later + UNUSED);
        assert!(removed.find(ID, later).is_none());
        removed.keep(&node, now);
        let filesystems: Vec<u64> = removed.take_all().iter().map(|kept| kept.filesystem).collect();
        assert_eq!(filesystems, [3]);
        assert!(removed.find(ID, now).is_none());
    }
}
