//! Directories that were removed while other sessions may have them open or stand in them.
//!
//! On a local disk such a directory is empty, and can be looked at, changed and synced until the last process leaves it. Through a descriptor the kernel
//! does that here, and no other inode has the number while one is held. What is removed beside the server is held as any directory is.

use crate::descriptors::{Cached, Descriptors};
use crate::reach::Node;
use lru::LruCache;
use nigh_types::NodeId;
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How many are held; the one that was used least lately goes first, and its calls are `ESTALE` from then on.
const MOST: NonZeroUsize = NonZeroUsize::new(128).unwrap();

#[derive(Debug)]
pub(crate) struct Removed {
    directories: Mutex<LruCache<NodeId, (Arc<OwnedFd>, Cached)>>,
    descriptors: Arc<Descriptors>,
}

impl Removed {
    pub(crate) fn new(descriptors: Arc<Descriptors>) -> Removed {
        Removed { directories: Mutex::new(LruCache::new(MOST)), descriptors }
    }

    /// Where too many descriptors are held in all, others go instead.
    pub(crate) fn keep(&self, node: &Node) {
        if self.descriptors.is_crowded() {
            let mut directories = self.directories.lock();
            let oldest = [directories.pop_lru(), directories.pop_lru()];
            drop(directories);
            return drop(oldest);
        }
        let held = (Arc::clone(&node.fd), self.descriptors.cache());
        let evicted = self.directories.lock().push(node.id, held);
        drop(evicted); // closed when the lock is free
    }

    pub(crate) fn find(&self, id: NodeId) -> Option<Arc<OwnedFd>> {
        self.directories.lock().get(&id).map(|(fd, _)| Arc::clone(fd))
    }
}
