//! Cached descriptors for reads without an open file.

use crate::export::kept_fds::KeptFd;
use crate::limits::descriptors::{CachedFdCharge, Descriptors};
use lru::LruCache;
use nigh_lease::Object;
use nigh_types::NodeId;
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Idle time after which a descriptor is closed: it may be the last reference to a removed file.
const IDLE: Duration = Duration::from_secs(2);
/// Number of descriptors kept even when descriptors are short.
const LEAST: usize = 4;

/// The cached descriptors of one export.
#[derive(Debug)]
pub(crate) struct ReadFds {
    files: Mutex<LruCache<NodeId, ReadFd>>,
    descriptors: Arc<Descriptors>,
}

#[derive(Debug)]
struct ReadFd {
    object: Object,
    fd: Arc<OwnedFd>,
    used: Instant,
    #[allow(dead_code, reason = "held, not looked at")]
    cached: CachedFdCharge,
}

impl ReadFds {
    pub(crate) fn new(most: NonZeroUsize, descriptors: Arc<Descriptors>) -> ReadFds {
        ReadFds { files: Mutex::new(LruCache::new(most)), descriptors }
    }

    pub(crate) fn find(&self, node: NodeId) -> Option<(Object, Arc<OwnedFd>)> {
        let mut files = self.files.lock();
        let reader = files.get_mut(&node)?;
        reader.used = Instant::now();
        Some((reader.object, Arc::clone(&reader.fd)))
    }

    pub(crate) fn note(&self, (node, object): (NodeId, Object), fd: &Arc<OwnedFd>) {
        let cached = self.descriptors.cache();
        let reader = ReadFd { object, fd: Arc::clone(fd), used: Instant::now(), cached };
        let mut files = self.files.lock();
        let evicted = files.push(node, reader);
        let crowded = self.descriptors.is_short() && files.len() > LEAST;
        let oldest = if crowded { files.pop_lru() } else { None };
        drop(files);
        drop((evicted, oldest)); // closing may wait for the disk
    }

    pub(crate) fn forget(&self, node: NodeId) {
        let held = self.files.lock().pop(&node);
        drop(held);
    }

    /// Removes and returns all descriptors, for the caller to close.
    pub(crate) fn take_all(&self) -> Vec<KeptFd> {
        let mut files = self.files.lock();
        let kept = |(_, reader): (NodeId, ReadFd)| {
            let filesystem = reader.object.filesystem;
            KeptFd { filesystem, file: Box::new(reader) }
        };
        std::iter::from_fn(|| files.pop_lru().map(kept)).collect()
    }

    pub(crate) fn close_idle(&self, now: Instant) {
        let mut idle = Vec::new();
        let mut files = self.files.lock();
        while let Some((_, reader)) = files.peek_lru() {
            if now.saturating_duration_since(reader.used) < IDLE {
                break;
            }
            idle.extend(files.pop_lru());
        }
        drop(files); // closing may wait for the disk
    }
}
