//! Recently unlinked or renamed files, by `O_PATH` descriptors. Between a path lookup and the call that follows,
//! another client may move, remove or replace the file. On a local disk the call still reaches the old file. Without
//! these descriptors the client would have to look the path up again, possibly too late once more: Linux retries a
//! lookup once and then fails with ESTALE.

use crate::export::kept_fds::KeptFd;
use crate::export::node::Node;
use crate::limits::descriptors::{CachedFdCharge, Descriptors};
use nigh_types::NodeId;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a file is kept, and its disk space occupied even without another user; and the maximum number of kept
/// files.
const KEEP_TIME: Duration = Duration::from_secs(2);
const MOST: usize = 128;

/// Recently unlinked or renamed files, oldest first.
#[derive(Debug)]
pub(crate) struct RecentlyUnlinked {
    files: Mutex<VecDeque<(Instant, Node, CachedFdCharge)>>,
    descriptors: Arc<Descriptors>,
}

impl RecentlyUnlinked {
    pub(crate) fn new(descriptors: Arc<Descriptors>) -> RecentlyUnlinked {
        RecentlyUnlinked { files: Mutex::default(), descriptors }
    }

    /// Keeps a file, unless the server runs short of descriptors.
    pub(crate) fn keep(&self, node: Node) {
        let now = Instant::now();
        self.close_expired(now);
        if self.descriptors.is_short() {
            return;
        }
        let cached = self.descriptors.cache();
        let mut files = self.files.lock();
        files.push_back((now, node, cached));
        let too_many = if files.len() > MOST { files.pop_front() } else { None };
        drop(files);
        drop(too_many); // closing may wait for the disk
    }

    pub(crate) fn find(&self, id: NodeId) -> Option<Node> {
        let files = self.files.lock();
        let (_, node, _) =
            files.iter().rev().find(|(since, node, _)| node.id == id && since.elapsed() < KEEP_TIME)?;
        Some(node.clone())
    }

    /// Removes all files from the table, for the caller to close.
    pub(crate) fn take_all(&self) -> Vec<KeptFd> {
        let all = std::mem::take(&mut *self.files.lock());
        let kept = |(_, node, cached): (Instant, Node, CachedFdCharge)| {
            let filesystem = node.object.filesystem;
            KeptFd { filesystem, file: Box::new((node, cached)) }
        };
        all.into_iter().map(kept).collect()
    }

    /// Closes files that were kept for long enough.
    pub(crate) fn close_expired(&self, now: Instant) {
        let mut files = self.files.lock();
        let young = files.iter().take_while(|(since, ..)| now.saturating_duration_since(*since) >= KEEP_TIME);
        let count = young.count();
        let old: Vec<_> = files.drain(..count).collect();
        drop(files);
        drop(old);
    }
}
