//! Prefetch: complete directories of a subtree, one after another (docs/decisions/0019-walks-ahead.md).

use super::Context;
use super::list::{self, Listing, PART_BYTES};
use crate::error::{Fault, Result};
use crate::prefetch_control::{Said, Steering};
use crate::session_reaper::MemoryAccount;
use nigh_types::{Call, Errno, Grant, LeaseScope, NodeId, NodeRef, Order, PrefetchedDir, Reply, Response};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Progress of a call with a streamed reply.
pub(crate) enum Begun {
    Listing(Box<Listing>),
    Walk(Box<Ahead>),
}

impl Begun {
    /// Charges the memory of a call that waits for its client.
    pub(crate) fn count(&mut self, tally: &Arc<MemoryAccount>) {
        match self {
            Begun::Listing(listing) => listing.count(tally),
            Begun::Walk(walk) => walk.open.iter_mut().for_each(|open| open.listing.count(tally)),
        }
    }

    /// Whether this is a job that waits for a control message.
    pub(crate) fn waits(&self) -> bool {
        matches!(self, Begun::Walk(walk) if walk.steering.waits())
    }
}

/// Whether the reply to a call is streamed.
pub(crate) fn is_in_parts(call: &Call) -> bool {
    matches!(call, Call::List { .. } | Call::ListNames { .. } | Call::Prefetch { .. })
}

/// Executes a call with a streamed reply; see [`list::list`].
pub(crate) fn in_parts(
    cx: Context<'_>,
    call: &Call,
    begun: Option<Begun>,
    sink: &mut dyn FnMut(Response) -> bool,
) -> Result<Option<Begun>> {
    let begun = match begun {
        Some(Begun::Walk(walk)) => return Ok(walk.go_on(cx, sink)?.map(Begun::Walk)),
        Some(Begun::Listing(listing)) => Some(listing),
        None => None,
    };
    let begun = match call {
        Call::List { dir } => list::list(cx, dir, begun, sink)?,
        Call::ListNames { dir, after } => list::dirents(cx, (dir, *after), begun, sink)?,
        // The job exceeds the session's limit.
        _ => return Err(Fault(Errno::AGAIN)),
    };
    Ok(begun.map(Begun::Listing))
}

/// A running prefetch job.
pub(crate) struct Ahead {
    steering: Arc<Steering>,
    /// Number of entries that the client accepts.
    credit: i64,
    order: Order,
    /// Directories still to be sent, the next one last.
    stack: Vec<NodeRef>,
    /// The subset of `stack` that the client has requested.
    wanted: BTreeSet<NodeId>,
    /// Directories sent most recently: a request for one of them is already answered.
    told: VecDeque<NodeId>,
    open: Option<Open>,
}

/// A directory that has been sent in part.
struct Open {
    dir: NodeId,
    listing: Box<Listing>,
    wanted: bool,
    names: i64,
}

/// A part is sent after this time even if it is short, because the client may be waiting for it.
const PART_TIME: Duration = Duration::from_millis(2);
const TOLD: usize = 4_096;
/// Maximum number of pending directories; the job skips further ones.
const MOST_WAITING: usize = 1 << 20;
/// Encoded size of a step without its names.
const STEP_BYTES: usize = 32;

impl Ahead {
    pub(crate) fn new(steering: Arc<Steering>, call: &Call) -> Ahead {
        let (roots, order, credit) = match call {
            Call::Prefetch { roots, order, credit } => (roots.as_slice(), *order, *credit),
            _ => (&[][..], Order::default(), 0),
        };
        Ahead {
            steering,
            credit: i64::from(credit),
            order,
            stack: roots.iter().rev().cloned().collect(),
            wanted: BTreeSet::new(),
            told: VecDeque::new(),
            open: None,
        }
    }

    /// Sends parts until the job ends. Returns the job if the send queue is full or the credit is used up.
    pub(crate) fn go_on(
        mut self: Box<Self>,
        cx: Context<'_>,
        sink: &mut dyn FnMut(Response) -> bool,
    ) -> Result<Option<Box<Ahead>>> {
        if self.open.as_ref().is_some_and(|open| !open.listing.is_within(cx)) {
            // The directory may have been moved out of the export meanwhile.
            return Err(Fault::STALE);
        }
        loop {
            let Said { credit, wants, ends, .. } = self.steering.hear();
            if ends {
                return Err(Fault(Errno::INTR));
            }
            self.credit = self.credit.saturating_add(i64::try_from(credit).unwrap_or(i64::MAX));
            wants.into_iter().rev().for_each(|place| self.want(place));
            let (steps, grants) = self.part(cx)?;
            let last = self.open.is_none() && self.stack.is_empty();
            if !last && steps.is_empty() {
                if self.steering.wait() {
                    return Ok(Some(self));
                }
                continue;
            }
            cx.reach().ids.settle()?;
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

    fn want(&mut self, place: NodeRef) {
        let is_open = self.open.as_ref().is_some_and(|open| open.dir == place.node);
        if is_open || self.told.contains(&place.node) {
            return;
        }
        if let Some(at) = self.stack.iter().rposition(|waiting| waiting.node == place.node) {
            self.stack.remove(at);
        }
        self.wanted.insert(place.node);
        self.stack.push(place);
    }

    /// Collects the next part; empty if there is no credit.
    fn part(&mut self, cx: Context<'_>) -> Result<(Vec<PrefetchedDir>, Vec<Grant>)> {
        let (mut steps, mut grants, mut bytes) = (Vec::new(), Vec::new(), 0);
        let begun = Instant::now();
        while bytes + grants.len() * list::GRANT_BYTES < PART_BYTES && begun.elapsed() < PART_TIME {
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
                self.push(open.listing.take_below());
            } else {
                self.open = Some(open);
            }
        }
        Ok((steps, grants))
    }

    fn next(&mut self, cx: Context<'_>, own: &mut Vec<Grant>) -> Next {
        let Some(place) = self.stack.last() else { return Next::Nothing };
        let wanted = self.wanted.contains(&place.node);
        if self.credit <= 0 && !wanted {
            return Next::Nothing;
        }
        let Some(place) = self.stack.pop() else { return Next::Nothing };
        let dir = place.node;
        self.wanted.remove(&dir);
        if self.told.len() == TOLD {
            self.told.pop_front();
        }
        self.told.push_back(dir);
        match list::begin(cx, &place, own) {
            Ok(listing) if wanted || listing.count_names() <= u64::from(Call::MOST_AHEAD) => {
                let mut listing = Box::new(listing);
                listing.note_below();
                Next::Open(Open { dir, listing, wanted, names: 0 })
            }
            Ok(listing) => {
                listing.forsake(cx, own);
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

    /// Queues newly found directories before the pending ones.
    fn push(&mut self, mut below: Vec<NodeRef>) {
        fn name(place: &NodeRef) -> Option<&[u8]> {
            place.path_hint.as_ref().map(|(_, name)| name.as_bytes())
        }
        match self.order {
            Order::Cookie => {}
            Order::Name => below.sort_by(|a, b| name(a).cmp(&name(b))),
            Order::Number => below.sort_by_key(|place| place.node.ino),
        }
        below.truncate(MOST_WAITING.saturating_sub(self.stack.len()));
        self.stack.extend(below.into_iter().rev());
    }
}

enum Next {
    Open(Open),
    LeftOut(NodeId),
    /// No directory is pending, or no credit is left for one.
    Nothing,
}

impl Listing {
    /// Revokes the grant on the directory's names, which are not sent.
    fn forsake(&self, cx: Context<'_>, own: &mut Vec<Grant>) {
        if self.is_granted() {
            cx.stake.revoke_partial(own, self.object(), LeaseScope::Directory);
        }
    }
}
