//! Prefetch: complete directories of a subtree, one after another (docs/decisions/0019-walks-ahead.md).

use super::Context;
use super::list::{self, Listing, PART_BYTES};
use crate::limits::reaper::MemoryAccount;
use crate::ops::prefetch_control::{ControlMessages, PrefetchControl};
use crate::os::error::{Fault, Result};
use nigh_types::{
    Call, Errno, Grant, LeaseScope, NodeId, NodeRef, PrefetchOrder, PrefetchedDir, Reply, Response,
};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Progress of a call with a streamed reply.
pub(crate) enum ReplyStream {
    Listing(Box<Listing>),
    Prefetch(Box<PrefetchJob>),
}

impl ReplyStream {
    /// Charges the memory of a call that waits for its client.
    pub(crate) fn count(&mut self, account: &Arc<MemoryAccount>) {
        match self {
            ReplyStream::Listing(listing) => listing.count(account),
            ReplyStream::Prefetch(walk) => walk.open.iter_mut().for_each(|open| open.listing.count(account)),
        }
    }

    /// Whether this is a job that waits for a control message.
    pub(crate) fn waits(&self) -> bool {
        matches!(self, ReplyStream::Prefetch(walk) if walk.control.waits())
    }
}

/// Whether the reply to a call is streamed.
pub(crate) fn is_streamed(call: &Call) -> bool {
    matches!(call, Call::List { .. } | Call::ListNames { .. } | Call::Prefetch { .. })
}

/// Executes a call with a streamed reply; see [`list::list`].
pub(crate) fn stream_reply(
    cx: Context<'_>,
    call: &Call,
    begun: Option<ReplyStream>,
    sink: &mut dyn FnMut(Response) -> bool,
) -> Result<Option<ReplyStream>> {
    let begun = match begun {
        Some(ReplyStream::Prefetch(walk)) => return Ok(walk.advance(cx, sink)?.map(ReplyStream::Prefetch)),
        Some(ReplyStream::Listing(listing)) => Some(listing),
        None => None,
    };
    let begun = match call {
        Call::List { dir } => list::list(cx, dir, begun, sink)?,
        Call::ListNames { dir, after } => list::dirents(cx, (dir, *after), begun, sink)?,
        // The job exceeds the session's limit.
        _ => return Err(Fault(Errno::AGAIN)),
    };
    Ok(begun.map(ReplyStream::Listing))
}

/// A running prefetch job.
pub(crate) struct PrefetchJob {
    control: Arc<PrefetchControl>,
    /// Number of entries that the client accepts.
    credit: i64,
    order: PrefetchOrder,
    pending: PendingDirs,
    /// Directories sent most recently: a request for one of them is already answered.
    recently_sent: VecDeque<NodeId>,
    open: Option<OpenDir>,
}

/// Directories still to be sent, each once: a directory that moves while the job runs is found below two others.
#[derive(Default)]
struct PendingDirs {
    /// The next one last. Those that the client has requested come before all others.
    queue: VecDeque<NodeRef>,
    ids: BTreeSet<NodeId>,
    requested: BTreeSet<NodeId>,
}

impl PendingDirs {
    /// Adds directories in their order, before all but the requested ones.
    fn push_next(&mut self, places: Vec<NodeRef>) {
        let is_requested = |place: &&NodeRef| self.requested.contains(&place.node);
        let first = self.queue.iter().rev().take_while(is_requested).count();
        let mut first = self.queue.split_off(self.queue.len() - first);
        let new = places.into_iter().rev().filter(|place| self.ids.insert(place.node));
        self.queue.extend(new);
        self.queue.append(&mut first);
    }

    fn push_last(&mut self, place: NodeRef) {
        if self.ids.insert(place.node) {
            self.queue.push_front(place);
        }
    }

    /// Makes a directory the next one to send, and adds it if it is not pending.
    fn request(&mut self, place: NodeRef) {
        self.requested.insert(place.node);
        if !self.ids.insert(place.node)
            && let Some(at) = self.queue.iter().rposition(|waiting| waiting.node == place.node)
        {
            self.queue.remove(at);
        }
        self.queue.push_back(place);
    }

    fn contains(&self, dir: NodeId) -> bool {
        self.ids.contains(&dir)
    }

    /// Returns whether there is a next directory, and whether the client has requested it.
    fn next_is_requested(&self) -> Option<bool> {
        self.queue.back().map(|place| self.requested.contains(&place.node))
    }

    /// Takes the next directory off, with whether the client has requested it.
    fn pop(&mut self) -> Option<(NodeRef, bool)> {
        let place = self.queue.pop_back()?;
        self.ids.remove(&place.node);
        let is_requested = self.requested.remove(&place.node);
        Some((place, is_requested))
    }

    fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    fn room(&self) -> usize {
        MOST_WAITING.saturating_sub(self.queue.len())
    }
}

/// A directory that has been sent in part.
struct OpenDir {
    dir: NodeId,
    listing: Box<Listing>,
    wanted: bool,
    names: i64,
}

/// A part is sent after this time even if it is short, because the client may be waiting for it.
const PART_TIME: Duration = Duration::from_millis(2);
const MOST_RECENT: usize = 4_096;
/// Maximum number of pending directories; the job skips further ones.
const MOST_WAITING: usize = 1 << 20;
/// Encoded size of a step without its names.
const STEP_BYTES: usize = 32;

impl PrefetchJob {
    pub(crate) fn new(control: Arc<PrefetchControl>, call: &Call) -> PrefetchJob {
        let (roots, order, credit) = match call {
            Call::Prefetch { roots, order, credit } => (roots.as_slice(), *order, *credit),
            _ => (&[][..], PrefetchOrder::default(), 0),
        };
        let mut pending = PendingDirs::default();
        roots.iter().for_each(|place| pending.push_last(place.clone()));
        PrefetchJob {
            control,
            credit: i64::from(credit),
            order,
            pending,
            recently_sent: VecDeque::new(),
            open: None,
        }
    }

    /// Sends parts until the job ends. Returns the job if the send queue is full or the credit is used up.
    pub(crate) fn advance(
        mut self: Box<Self>,
        cx: Context<'_>,
        sink: &mut dyn FnMut(Response) -> bool,
    ) -> Result<Option<Box<PrefetchJob>>> {
        if self.open.as_ref().is_some_and(|open| !open.listing.is_confined(cx)) {
            // The directory may have been moved out of the export meanwhile.
            return Err(Fault::STALE);
        }
        loop {
            let ControlMessages { credit, wants, ends, .. } = self.control.take_messages();
            if ends {
                return Err(Fault(Errno::INTR));
            }
            self.credit = self.credit.saturating_add(i64::try_from(credit).unwrap_or(i64::MAX));
            wants.into_iter().rev().for_each(|place| self.prioritise(place));
            let (steps, grants) = self.part(cx)?;
            let last = self.open.is_none() && self.pending.is_empty();
            if !last && steps.is_empty() {
                if self.control.wait() {
                    return Ok(Some(self));
                }
                continue;
            }
            cx.resolver().ids.settle()?;
            let room =
                sink(Response { result: Ok(Reply::Prefetched(steps)), after: Vec::new(), grants, last });
            if last {
                return Ok(None);
            }
            if !room {
                return Ok(Some(self));
            }
        }
    }

    fn prioritise(&mut self, place: NodeRef) {
        let is_open = self.open.as_ref().is_some_and(|open| open.dir == place.node);
        // One that was found again after it was sent is not answered yet.
        let is_sent = self.recently_sent.contains(&place.node) && !self.pending.contains(place.node);
        if !is_open && !is_sent {
            self.pending.request(place);
        }
    }

    /// Collects the next part; empty if there is no credit.
    fn part(&mut self, cx: Context<'_>) -> Result<(Vec<PrefetchedDir>, Vec<Grant>)> {
        let (mut steps, mut grants, mut bytes) = (Vec::new(), Vec::new(), 0);
        let begun = Instant::now();
        // At least one step: an empty part means that there is no credit.
        while steps.is_empty()
            || bytes + grants.len() * list::GRANT_BYTES < PART_BYTES && begun.elapsed() < PART_TIME
        {
            let mut own = Vec::new();
            let mut open = match self.open.take() {
                Some(open) => open,
                None => match self.next(cx, &mut own) {
                    Next::Open(open) => open,
                    Next::LeftOut(dir) => {
                        steps.push(PrefetchedDir { dir, listed: None, last: true });
                        bytes += STEP_BYTES;
                        continue;
                    }
                    Next::Nothing => break,
                },
            };
            let listed = open.listing.part(cx, &mut own)?;
            let last = open.listing.is_done();
            bytes += STEP_BYTES + open.listing.part_bytes();
            open.names += i64::try_from(listed.entries.len()).unwrap_or(i64::MAX);
            steps.push(PrefetchedDir { dir: open.dir, listed: Some(listed), last });
            grants.append(&mut own);
            if last {
                self.credit -= if open.wanted { 0 } else { open.names + 1 };
                self.push(open.listing.take_subdirs());
            } else {
                self.open = Some(open);
            }
        }
        Ok((steps, grants))
    }

    fn next(&mut self, cx: Context<'_>, own: &mut Vec<Grant>) -> Next {
        if self.credit <= 0 && self.pending.next_is_requested() != Some(true) {
            return Next::Nothing;
        }
        let Some((place, wanted)) = self.pending.pop() else { return Next::Nothing };
        let dir = place.node;
        if self.recently_sent.len() == MOST_RECENT {
            self.recently_sent.pop_front();
        }
        self.recently_sent.push_back(dir);
        match list::begin(cx, &place, own) {
            Ok(listing) if wanted || listing.count_names() <= u64::from(Call::MOST_PREFETCHED_NAMES) => {
                let mut listing = Box::new(listing);
                listing.collect_subdirs();
                Next::Open(OpenDir { dir, listing, wanted, names: 0 })
            }
            Ok(listing) => {
                listing.revoke_partial(cx, own);
                own.clear();
                Next::LeftOut(dir)
            }
            Err(Fault(errno)) => {
                tracing::debug!(ino = dir.ino, %errno, "a directory is left out of a walk ahead");
                own.clear();
                Next::LeftOut(dir)
            }
        }
    }

    /// Queues newly found directories before the pending ones that were not requested.
    fn push(&mut self, mut below: Vec<NodeRef>) {
        fn name(place: &NodeRef) -> Option<&[u8]> {
            place.path_hint.as_ref().map(|(_, name)| name.as_bytes())
        }
        match self.order.forward() {
            PrefetchOrder::Name => below.sort_by(|a, b| name(a).cmp(&name(b))),
            PrefetchOrder::InodeNumber => below.sort_by_key(|place| place.node.ino),
            _ => {}
        }
        if self.order.is_reversed() {
            below.reverse();
        }
        below.truncate(self.pending.room());
        self.pending.push_next(below);
    }
}

enum Next {
    Open(OpenDir),
    LeftOut(NodeId),
    /// No directory is pending, or no credit is left for one.
    Nothing,
}

impl Listing {
    /// Revokes the grant on the directory's names, which are not sent.
    fn revoke_partial(&self, cx: Context<'_>, own: &mut Vec<Grant>) {
        if self.is_granted() {
            cx.call_leases.revoke_partial(own, self.object(), LeaseScope::Directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(ino: u64) -> NodeRef {
        NodeRef::without_hint(NodeId { ino, generation: 1 })
    }

    #[test]
    fn requested_directories_come_before_those_found_later() {
        let mut pending = PendingDirs::default();
        (1..=3).for_each(|ino| pending.push_last(dir(ino)));
        pending.request(dir(3));
        pending.request(dir(9));
        pending.push_next(vec![dir(4), dir(3), dir(5)]);
        let order: Vec<(u64, bool)> = std::iter::from_fn(|| pending.pop())
            .map(|(place, is_requested)| (place.node.ino, is_requested))
            .collect();
        assert_eq!(order, [(9, true), (3, true), (4, false), (5, false), (1, false), (2, false)]);
        assert!(pending.is_empty() && pending.ids.is_empty() && pending.requested.is_empty());
    }
}
