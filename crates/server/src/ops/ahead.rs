//! Walks ahead: whole directories below others, one after the other (docs/decisions/0019-walks-ahead.md).

use super::Context;
use super::list::{self, Listing, PART_BYTES};
use crate::error::{Fault, Result};
use crate::keeper::Tally;
use crate::steering::{Said, Steering};
use nigh_types::{Call, Covers, Errno, Grant, NodeId, Order, Place, Reply, Response, Step};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How far a call came that answers in parts.
pub(crate) enum Begun {
    Listing(Box<Listing>),
    Walk(Box<Ahead>),
}

impl Begun {
    /// It waits for its client.
    pub(crate) fn count(&mut self, tally: &Arc<Tally>) {
        match self {
            Begun::Listing(listing) => listing.count(tally),
            Begun::Walk(walk) => walk.open.iter_mut().for_each(|open| open.listing.count(tally)),
        }
    }

    /// A walk that goes on only when its client says something.
    pub(crate) fn waits(&self) -> bool {
        matches!(self, Begun::Walk(walk) if walk.steering.waits())
    }
}

/// Whether a call answers in parts.
pub(crate) fn is_in_parts(call: &Call) -> bool {
    matches!(call, Call::List { .. } | Call::Dirents { .. } | Call::Ahead { .. })
}

/// A call that answers in parts; see [`list::list`].
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
        Call::Dirents { dir, after } => list::dirents(cx, (dir, *after), begun, sink)?,
        // Of one walk more than there may be nothing is begun.
        _ => return Err(Fault(Errno::AGAIN)),
    };
    Ok(begun.map(Begun::Listing))
}

/// A walk that is under way.
pub(crate) struct Ahead {
    steering: Arc<Steering>,
    /// Entries that its client takes.
    credit: i64,
    order: Order,
    /// Directories to come, the next one last.
    stack: Vec<Place>,
    /// Of these, the ones that were asked for.
    wanted: BTreeSet<NodeId>,
    /// The last ones that were told: who asks for one of these has it on its way.
    told: VecDeque<NodeId>,
    open: Option<Open>,
}

/// A directory that is not told to its end.
struct Open {
    dir: NodeId,
    listing: Box<Listing>,
    wanted: bool,
    names: i64,
}

/// A part goes out after this time, however little it holds: somebody may wait for it.
const PART_TIME: Duration = Duration::from_millis(2);
const TOLD: usize = 4_096;
/// Directories that wait for their turn. What is beyond that is not walked.
const MOST_WAITING: usize = 1 << 20;
/// What a step takes on the wire beside its names.
const STEP_BYTES: usize = 32;

impl Ahead {
    pub(crate) fn new(steering: Arc<Steering>, call: &Call) -> Ahead {
        let (roots, order, credit) = match call {
            Call::Ahead { roots, order, credit } => (roots.as_slice(), *order, *credit),
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

    /// Puts out parts until there is nothing to tell. Answers itself where there is no room, or no credit.
    pub(crate) fn go_on(
        mut self: Box<Self>,
        cx: Context<'_>,
        sink: &mut dyn FnMut(Response) -> bool,
    ) -> Result<Option<Box<Ahead>>> {
        if self.open.as_ref().is_some_and(|open| !open.listing.is_within(cx)) {
            // It may have been moved out of the export meanwhile.
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
            let room = sink(Response { result: Ok(Reply::Ahead(steps)), after: Vec::new(), grants, last });
            if last {
                return Ok(None);
            }
            if !room {
                return Ok(Some(self));
            }
        }
    }

    fn want(&mut self, place: Place) {
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

    /// What is told next; nothing where there is no credit.
    fn part(&mut self, cx: Context<'_>) -> Result<(Vec<Step>, Vec<Grant>)> {
        let (mut steps, mut grants, mut bytes) = (Vec::new(), Vec::new(), 0);
        let begun = Instant::now();
        while bytes + grants.len() * list::GRANT_BYTES < PART_BYTES && begun.elapsed() < PART_TIME {
            let mut own = Vec::new();
            let mut open = match self.open.take() {
                Some(open) => open,
                None => match self.next(cx, &mut own) {
                    Next::Open(open) => open,
                    Next::LeftOut(dir) => {
                        steps.push(Step { dir, listed: None, last: true });
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
            steps.push(Step { dir: open.dir, listed: Some(listed), last });
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

    /// Directories were found: they come before what was to come.
    fn push(&mut self, mut below: Vec<Place>) {
        fn name(place: &Place) -> Option<&[u8]> {
            place.hint.as_ref().map(|(_, name)| name.as_bytes())
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
    /// There is none, or no credit for it.
    Nothing,
}

impl Listing {
    /// Its names were granted, and are not told.
    fn forsake(&self, cx: Context<'_>, own: &mut Vec<Grant>) {
        if self.is_granted() {
            cx.stake.forsake(own, self.object(), Covers::Names);
        }
    }
}
