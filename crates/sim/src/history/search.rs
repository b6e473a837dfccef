//! The search for an order (Wing and Gong, in Lowe's just-in-time form).
//!
//! Events are taken by time. What may have happened so far is a set of configurations: a state, and what is under way with
//! what it has come to. A change takes effect no earlier than something needs it: when a call returns, those orders of
//! changes that are under way are tried which end with it. Looks never branch: they are satisfied in the first state
//! that fits. Changes that come early only to be tried later lose nothing, as nothing but a return sets a limit.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Above that an object is refused: a verdict is yes or no, and a window is made so that it is found.
pub const MOST: usize = 100_000;

/// Something of which the state is searched.
pub trait Object {
    type State: Clone + Ord;
    type Act: std::fmt::Debug;

    /// Whether it only looks.
    fn is_look(&self, act: &Self::Act) -> bool;

    /// Adds to `seen` what an act under way sees in this state. A look that fits sees [`FITS`].
    fn see(&self, state: &Self::State, act: &Self::Act, seen: &mut Vec<u16>);

    /// What a change can make of the state, by what it has seen; nothing where it cannot take effect.
    fn after(&self, state: &Self::State, act: &Self::Act, seen: &[u16]) -> Vec<Self::State>;
}

/// What a satisfied look has seen.
pub const FITS: u16 = u16::MAX;

/// A change or a look, and its moments.
#[derive(Clone, Debug)]
pub struct Piece<A> {
    /// From when on it sees.
    pub opens: u64,
    /// From when on it may take effect.
    pub begins: u64,
    /// When it has happened, or will not happen any more; `u64::MAX`: it may happen until the end.
    pub ends: u64,
    /// Whether it has happened by then.
    pub must: bool,
    pub act: A,
    /// Of which record it is.
    pub record: usize,
}

/// What is under way in a configuration.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Underway {
    piece: usize,
    /// A change that has taken effect.
    done: bool,
    seen: Vec<u16>,
}

impl Underway {
    fn satisfied(&self) -> bool {
        self.done || self.seen.contains(&FITS)
    }
}

/// What may be: sorted by piece.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Configuration<S> {
    state: S,
    underway: Vec<Underway>,
}

/// Why there is no order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// In no order had this piece happened when it returned.
    Nothing { piece: usize },
    /// More than [`MOST`] configurations.
    TooMany { piece: usize },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Opens,
    Begins,
    Ends,
}

/// Searches for an order that explains all pieces; the size of the largest set on the way.
///
/// # Errors
/// Which piece nothing explains.
pub fn search<O: Object>(object: &O, first: O::State, pieces: &[Piece<O::Act>]) -> Result<usize, Refusal> {
    let mut events: Vec<(u64, Event, usize)> = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        events.push((piece.opens, Event::Opens, number));
        events.push((piece.begins, Event::Begins, number));
        if piece.ends != u64::MAX {
            events.push((piece.ends, Event::Ends, number));
        }
    }
    events.sort_unstable();
    let mut run = Run { object, pieces, begun: vec![false; pieces.len()] };
    let mut set = BTreeSet::from([Configuration { state: first, underway: Vec::new() }]);
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
            return Err(Refusal::Nothing { piece });
        }
    }
    Ok(largest)
}

struct Run<'a, O: Object> {
    object: &'a O,
    pieces: &'a [Piece<O::Act>],
    begun: Vec<bool>,
}

impl<O: Object> Run<'_, O> {
    fn open(&self, mut config: Configuration<O::State>, piece: usize) -> Configuration<O::State> {
        let mut seen = Vec::new();
        self.object.see(&config.state, &self.pieces[piece].act, &mut seen);
        let at = config.underway.partition_point(|other| other.piece < piece);
        config.underway.insert(at, Underway { piece, done: false, seen });
        config
    }

    /// The configurations in which it has happened, without it.
    fn end(
        &self,
        set: &BTreeSet<Configuration<O::State>>,
        piece: usize,
    ) -> Result<BTreeSet<Configuration<O::State>>, Refusal> {
        let (mut ended, mut tried) = (Distinct::new(self.pieces), Distinct::new(self.pieces));
        // Those with fewer changes come first, as they cover others.
        let mut open: VecDeque<Configuration<O::State>> = set.iter().cloned().collect();
        for config in set {
            tried.insert(config.clone());
            if !self.pieces[piece].must {
                // It has not happened, or it happens now at the latest, though nothing may need it yet.
                ended.insert(without(config.clone(), piece));
            }
        }
        while let Some(config) = open.pop_front() {
            if config.underway[place(&config, piece)].satisfied() {
                ended.insert(without(config, piece));
            } else {
                open.extend(self.steps(&config).into_iter().filter(|next| tried.insert(next.clone())));
            }
            if tried.count + ended.count > MOST {
                return Err(Refusal::TooMany { piece });
            }
        }
        Ok(ended.into_all())
    }

    /// One change more takes effect.
    fn steps(&self, config: &Configuration<O::State>) -> Vec<Configuration<O::State>> {
        let mut steps = Vec::new();
        for (at, underway) in config.underway.iter().enumerate() {
            let act = &self.pieces[underway.piece].act;
            if underway.done || !self.begun[underway.piece] || self.object.is_look(act) {
                continue;
            }
            for state in self.object.after(&config.state, act, &underway.seen) {
                let mut next = Configuration { state, underway: config.underway.clone() };
                next.underway[at].done = true;
                next.underway[at].seen.clear();
                for other in next.underway.iter_mut().filter(|other| !other.done) {
                    self.object.see(&next.state, &self.pieces[other.piece].act, &mut other.seen);
                }
                steps.push(next);
            }
        }
        steps
    }
}

fn place<S>(config: &Configuration<S>, piece: usize) -> usize {
    let found = config.underway.binary_search_by_key(&piece, |other| other.piece);
    found.expect("what ends has been opened")
}

fn without<S>(mut config: Configuration<S>, piece: usize) -> Configuration<S> {
    config.underway.remove(place(&config, piece));
    config
}

/// In what one that covers another is alike: the state, and each piece with whether it must happen and has.
type Alike<S> = (S, Vec<(usize, bool)>);

/// Configurations of which none covers another: what can follow this one can follow that one.
///
/// That is so with the same state, where it has seen as much and has as much left to happen: a change that need not
/// happen may as well have been left.
struct Distinct<'a, S, A> {
    pieces: &'a [Piece<A>],
    kept: BTreeMap<Alike<S>, Vec<Vec<Underway>>>,
    count: usize,
}

impl<'a, S: Clone + Ord, A> Distinct<'a, S, A> {
    fn new(pieces: &'a [Piece<A>]) -> Self {
        Distinct { pieces, kept: BTreeMap::new(), count: 0 }
    }

    /// Whether none that is kept covers it; it takes the place of those that it covers.
    fn insert(&mut self, config: Configuration<S>) -> bool {
        let pieces = self.pieces;
        let key = config.underway.iter().map(|one| (one.piece, one.done && pieces[one.piece].must)).collect();
        let alike = self.kept.entry((config.state, key)).or_default();
        if alike.iter().any(|other| covers(other, &config.underway)) {
            return false;
        }
        let before = alike.len();
        alike.retain(|other| !covers(&config.underway, other));
        self.count = self.count + 1 + alike.len() - before;
        alike.push(config.underway);
        true
    }

    fn into_all(self) -> BTreeSet<Configuration<S>> {
        let all = self.kept.into_iter().flat_map(|((state, _), alike)| {
            alike.into_iter().map(move |underway| Configuration { state: state.clone(), underway })
        });
        all.collect()
    }
}

/// Of two that are alike in what must happen.
fn covers(one: &[Underway], other: &[Underway]) -> bool {
    let left = |(one, other): (&Underway, &Underway)| match (one.done, other.done) {
        (_, true) => true,
        (true, false) => false,
        (false, false) => other.seen.iter().all(|seen| one.seen.contains(seen)),
    };
    one.iter().zip(other).all(left)
}
