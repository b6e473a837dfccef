//! What lost a name a moment ago, for who was just led there by it: between the lookup of a path and
//! the call that follows it another client may have moved, removed or replaced what it led to. On a local disk such a call
//! gets the old file. Without this it would have to look again, and might again come too late: Linux looks a path up
//! twice, and then says ESTALE.

use crate::descriptors::{Cached, Descriptors};
use crate::export::Kept;
use crate::reach::Node;
use nigh_types::NodeId;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For how long such a file is held, and its space on the disk unless somebody needs it, and how many at the most.
const HELD: Duration = Duration::from_secs(2);
const MOST: usize = 128;

/// The latest of them, by `O_PATH` descriptors; the oldest first.
#[derive(Debug)]
pub(crate) struct Departed {
    files: Mutex<VecDeque<(Instant, Node, Cached)>>,
    descriptors: Arc<Descriptors>,
}

impl Departed {
    pub(crate) fn new(descriptors: Arc<Descriptors>) -> Departed {
        Departed { files: Mutex::default(), descriptors }
    }

    /// Not where too many are held in all.
    pub(crate) fn keep(&self, node: Node) {
        let now = Instant::now();
        self.close_old(now);
        if self.descriptors.is_crowded() {
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
            files.iter().rev().find(|(since, node, _)| node.id == id && since.elapsed() < HELD)?;
        Some(node.clone())
    }

    /// Takes all out, to be closed.
    pub(crate) fn take_all(&self) -> Vec<Kept> {
        let all = std::mem::take(&mut *self.files.lock());
        let kept = |(_, node, cached): (Instant, Node, Cached)| {
            let filesystem = node.object.filesystem;
            Kept { filesystem, file: Box::new((node, cached)) }
        };
        all.into_iter().map(kept).collect()
    }

    /// Lets go those that were held for long enough.
    pub(crate) fn close_old(&self, now: Instant) {
        let mut files = self.files.lock();
        let young = files.iter().take_while(|(since, ..)| now.saturating_duration_since(*since) >= HELD);
        let count = young.count();
        let old: Vec<_> = files.drain(..count).collect();
        drop(files);
        drop(old);
    }
}
