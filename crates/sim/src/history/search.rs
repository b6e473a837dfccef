//! The search for a linearization (Wing and Gong, in Lowe's just-in-time form).
//!
//! Events are processed in time order. The possible pasts form a set of configurations: a state, and the pending
//! pieces with their progress. A change takes effect no earlier than another piece needs it: when a call returns, the
//! search tries those orders of pending changes that end with it. Reads never branch: the first state that fits
//! satisfies them. Trying a change late loses nothing, because only a return sets a limit.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Limit of configurations per object. Above it the search fails: a verdict is yes or no, and windows are small enough
/// for one.
pub const MAX_CONFIGURATIONS: usize = 100_000;

/// An object whose state is searched.
pub trait Object {
    type State: Clone + Ord;
    type Act: std::fmt::Debug;

    /// Returns whether the act is a read.
    fn is_read(&self, act: &Self::Act) -> bool;

    /// Adds to `seen` what a pending act sees in this state. A read that fits sees [`SATISFIED`].
    fn observe(&self, state: &Self::State, act: &Self::Act, seen: &mut Vec<u16>);

    /// Returns the possible states after a change, depending on what it has seen; none if it cannot take effect.
    fn apply(&self, state: &Self::State, act: &Self::Act, seen: &[u16]) -> Vec<Self::State>;
}

/// What a satisfied read has seen.
pub const SATISFIED: u16 = u16::MAX;

/// A change or a read of one object, and its time window.
#[derive(Clone, Debug)]
pub struct Operation<A> {
    /// From when it can see states.
    pub visible_from: u64,
    /// From when it may take effect.
    pub effective_from: u64,
    /// By when it has happened or never will; `u64::MAX`: it may happen until the end.
    pub ends: u64,
    /// Whether it must have happened by `ends`.
    pub required: bool,
    pub act: A,
    /// The number of its record.
    pub record: usize,
}

/// A pending piece in a configuration.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct PendingOp {
    piece: usize,
    /// Whether the change has taken effect.
    done: bool,
    seen: Vec<u16>,
}

impl PendingOp {
    fn satisfied(&self) -> bool {
        self.done || self.seen.contains(&SATISFIED)
    }
}

/// A possible past; `underway` is sorted by piece.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Configuration<S> {
    state: S,
    pending: Vec<PendingOp>,
}

/// Why no order exists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SearchFailure {
    /// In no order had this piece happened when it returned.
    Unexplained { piece: usize },
    /// More than [`MAX_CONFIGURATIONS`] configurations.
    TooMany { piece: usize },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Opens,
    Begins,
    Ends,
}

/// Searches for an order that explains all pieces, and returns the size of the largest set of configurations.
///
/// # Errors
/// The piece that no order explains.
pub fn search<O: Object>(
    object: &O,
    first: O::State,
    pieces: &[Operation<O::Act>],
) -> Result<usize, SearchFailure> {
    let mut events: Vec<(u64, Event, usize)> = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        events.push((piece.visible_from, Event::Opens, number));
        events.push((piece.effective_from, Event::Begins, number));
        if piece.ends != u64::MAX {
            events.push((piece.ends, Event::Ends, number));
        }
    }
    events.sort_unstable();
    let mut run = Run { object, pieces, begun: vec![false; pieces.len()] };
    let mut set = BTreeSet::from([Configuration { state: first, pending: Vec::new() }]);
    let mut largest = 1;
    for (_, event, piece) in events {
        set = match event {
            Event::Opens => set.into_iter().map(|config| run.open(config, piece)).collect(),
            Event::Begins => {
                run.begun[piece] = true;
                set
            }
            Event::Ends => run.end(&set, piece)?,
        };
        largest = largest.max(set.len());
        if set.is_empty() {
            return Err(SearchFailure::Unexplained { piece });
        }
    }
    Ok(largest)
}

struct Run<'a, O: Object> {
    object: &'a O,
    pieces: &'a [Operation<O::Act>],
    begun: Vec<bool>,
}

impl<O: Object> Run<'_, O> {
    fn open(&self, mut config: Configuration<O::State>, piece: usize) -> Configuration<O::State> {
        let mut seen = Vec::new();
        self.object.observe(&config.state, &self.pieces[piece].act, &mut seen);
        let at = config.pending.partition_point(|other| other.piece < piece);
        config.pending.insert(at, PendingOp { piece, done: false, seen });
        config
    }

    /// Returns the configurations in which the piece has happened, without the piece.
    fn end(
        &self,
        set: &BTreeSet<Configuration<O::State>>,
        piece: usize,
    ) -> Result<BTreeSet<Configuration<O::State>>, SearchFailure> {
        let (mut ended, mut tried) = (MinimalSet::new(self.pieces), MinimalSet::new(self.pieces));
        // Configurations with fewer changes come first, as they cover others.
        let mut open: VecDeque<Configuration<O::State>> = set.iter().cloned().collect();
        for config in set {
            tried.insert(config.clone());
            if !self.pieces[piece].required {
                // It has not happened, or it happens now at the latest, even if no piece needs it yet.
                ended.insert(without(config.clone(), piece));
            }
        }
        while let Some(config) = open.pop_front() {
            if config.pending[place(&config, piece)].satisfied() {
                ended.insert(without(config, piece));
            } else {
                open.extend(self.steps(&config).into_iter().filter(|next| tried.insert(next.clone())));
            }
            if tried.count + ended.count > MAX_CONFIGURATIONS {
                return Err(SearchFailure::TooMany { piece });
            }
        }
        Ok(ended.into_all())
    }

    /// Returns the configurations after one more change has taken effect.
    fn steps(&self, config: &Configuration<O::State>) -> Vec<Configuration<O::State>> {
        let mut steps = Vec::new();
        for (at, underway) in config.pending.iter().enumerate() {
            let act = &self.pieces[underway.piece].act;
            if underway.done || !self.begun[underway.piece] || self.object.is_read(act) {
                continue;
            }
            for state in self.object.apply(&config.state, act, &underway.seen) {
                let mut next = Configuration { state, pending: config.pending.clone() };
                next.pending[at].done = true;
                next.pending[at].seen.clear();
                for other in next.pending.iter_mut().filter(|other| !other.done) {
                    self.object.observe(&next.state, &self.pieces[other.piece].act, &mut other.seen);
                }
                steps.push(next);
            }
        }
        steps
    }
}

fn place<S>(config: &Configuration<S>, piece: usize) -> usize {
    let found = config.pending.binary_search_by_key(&piece, |other| other.piece);
    found.expect("what ends has been opened")
}

fn without<S>(mut config: Configuration<S>, piece: usize) -> Configuration<S> {
    config.pending.remove(place(&config, piece));
    config
}

/// What two configurations share if one covers the other: the state, and for each piece whether it had to happen and
/// has.
type CoverKey<S> = (S, Vec<(usize, bool)>);

/// Configurations of which none covers another. One covers another if any continuation of the other is possible after
/// it.
///
/// That holds for equal states, if the covering one has seen as much and has as much left to happen: a change that
/// need not happen may as well be left out.
struct MinimalSet<'a, S, A> {
    pieces: &'a [Operation<A>],
    members: BTreeMap<CoverKey<S>, Vec<Vec<PendingOp>>>,
    count: usize,
}

impl<'a, S: Clone + Ord, A> MinimalSet<'a, S, A> {
    fn new(pieces: &'a [Operation<A>]) -> Self {
        MinimalSet { pieces, members: BTreeMap::new(), count: 0 }
    }

    /// Returns whether no stored configuration covers `config`; it replaces those that it covers.
    fn insert(&mut self, config: Configuration<S>) -> bool {
        let pieces = self.pieces;
        let key =
            config.pending.iter().map(|one| (one.piece, one.done && pieces[one.piece].required)).collect();
        let alike = self.members.entry((config.state, key)).or_default();
        if alike.iter().any(|other| covers(other, &config.pending)) {
            return false;
        }
        let before = alike.len();
        alike.retain(|other| !covers(&config.pending, other));
        self.count = self.count + 1 + alike.len() - before;
        alike.push(config.pending);
        true
    }

    fn into_all(self) -> BTreeSet<Configuration<S>> {
        let all = self.members.into_iter().flat_map(|((state, _), alike)| {
            alike.into_iter().map(move |underway| Configuration { state: state.clone(), pending: underway })
        });
        all.collect()
    }
}

/// Returns whether `one` covers `other`; the two have equal keys.
fn covers(one: &[PendingOp], other: &[PendingOp]) -> bool {
    let left = |(one, other): (&PendingOp, &PendingOp)| match (one.done, other.done) {
        (_, true) => true,
        (true, false) => false,
        (false, false) => other.seen.iter().all(|seen| one.seen.contains(seen)),
    };
    one.iter().zip(other).all(left)
}
