//! The server's table of locks, without I/O. See docs/decisions/0011-locks.md.

mod ranges;

use nigh_types::{CallId, Errno, LockInfo, LockKind};
use ranges::Ranges;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Calls of one session that may wait for locks.
pub const MAX_LOCK_WAITS: u32 = 16_384;
/// Ranges that one session may hold.
const MAX_RANGES: u64 = 65_536;

/// Who holds a lock. flock(2) and fcntl(2) locks are two spaces that do not see each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LockOwner {
    pub session: u64,
    pub flock: bool,
    /// The client's number.
    pub owner: u64,
}

/// A lock that is wanted on `object`, whatever that is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim<K> {
    pub object: K,
    pub owner: LockOwner,
    pub kind: LockKind,
    pub start: u64,
    /// Inclusive.
    pub end: u64,
    pub pid: u32,
}

/// What came of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tried {
    Granted,
    /// [`LockTable::poll_granted`] says when it is held.
    Waits,
    /// `EAGAIN`, `EDEADLK` or `ENOLCK`.
    Refused(Errno),
}

/// All locks of one server.
///
/// **Contract.** After each `handle_` call drain `poll_granted`: the waiting calls that were granted, to be
/// answered in that order.
///
/// A claim is granted as soon as no *held* lock of another owner excludes it. Of those that wait, the one
/// that came first is looked at first; nobody is held up by another who waits. So whoever waits, waits
/// for a holder, and the search for deadlocks sees every cycle.
#[derive(Debug)]
pub struct LockTable<K> {
    objects: BTreeMap<(K, bool), BTreeMap<LockOwner, Ranges>>,
    /// By arrival.
    waits: BTreeMap<u64, Wait<K>>,
    waits_of_object: BTreeMap<(K, bool), BTreeSet<u64>>,
    waits_of_owner: BTreeMap<LockOwner, BTreeSet<u64>>,
    waits_of_call: BTreeMap<(u64, CallId), u64>,
    /// Ranges held, by session.
    counts: BTreeMap<u64, u64>,
    arrivals: u64,
    granted: VecDeque<(u64, CallId)>,
}

#[derive(Debug)]
struct Wait<K> {
    claim: Claim<K>,
    call: CallId,
}

impl<K: Ord + Copy> Default for LockTable<K> {
    fn default() -> LockTable<K> {
        LockTable {
            objects: BTreeMap::new(),
            waits: BTreeMap::new(),
            waits_of_object: BTreeMap::new(),
            waits_of_owner: BTreeMap::new(),
            waits_of_call: BTreeMap::new(),
            counts: BTreeMap::new(),
            arrivals: 0,
            granted: VecDeque::new(),
        }
    }
}

impl<K: Ord + Copy> Claim<K> {
    fn space(&self) -> (K, bool) {
        (self.object, self.owner.flock)
    }
}

impl<K: Ord + Copy> LockTable<K> {
    /// Wants a lock; with `wait`, that call waits for it. It takes the place of what its owner holds there.
    /// As on Linux an fcntl(2) lock that has to wait leaves the owner what it holds, while flock(2) gives
    /// up the lock that it is to convert, even if it then fails.
    pub fn handle_lock(&mut self, claim: Claim<K>, wait: Option<CallId>) -> Tried {
        let converted = claim.owner.flock && self.give_up_other_kind(&claim);
        let tried = if self.conflict(&claim).is_none() {
            self.grant(&claim)
        } else {
            match wait {
                None => Tried::Refused(Errno::AGAIN),
                Some(_) if !claim.owner.flock && self.is_deadlock(&claim) => Tried::Refused(Errno::DEADLK),
                Some(call) => {
                    self.enqueue(claim, call);
                    Tried::Waits
                }
            }
        };
        // What was a write lock may have become a read lock.
        if converted || tried == Tried::Granted && claim.kind == LockKind::Read {
            self.grant_waiting(claim.space());
        }
        tried
    }

    /// Ends what an owner holds of a range. What it waits for goes on waiting.
    pub fn handle_unlock(&mut self, object: K, owner: LockOwner, start: u64, end: u64) {
        let held = self.change(object, owner, |ranges| ranges.clear(start, end));
        if held {
            self.grant_waiting((object, owner.flock));
        }
    }

    /// Nobody waits for that lock any more. False: it does not wait; it was granted or never wanted.
    pub fn handle_cancel(&mut self, session: u64, call: CallId) -> bool {
        match self.waits_of_call.get(&(session, call)) {
            Some(&arrival) => {
                self.dequeue(arrival);
                true
            }
            None => false,
        }
    }

    /// A session is over: all that it holds and waits for is dropped.
    pub fn handle_session_end(&mut self, session: u64) {
        let of_session = (session, CallId(0))..=(session, CallId(u64::MAX));
        let waits: Vec<u64> = self.waits_of_call.range(of_session).map(|(_, arrival)| *arrival).collect();
        waits.into_iter().for_each(|arrival| self.dequeue(arrival));
        self.counts.remove(&session);
        let mut freed = Vec::new();
        for (space, owners) in &mut self.objects {
            let before = owners.len();
            owners.retain(|owner, _| owner.session != session);
            if owners.len() < before {
                freed.push(*space);
            }
        }
        self.objects.retain(|_, owners| !owners.is_empty());
        freed.into_iter().for_each(|space| self.grant_waiting(space));
    }

    /// A waiting call whose lock is held now, with its session.
    pub fn poll_granted(&mut self) -> Option<(u64, CallId)> {
        self.granted.pop_front()
    }

    /// The first of the locks that exclude a claim, with its owner.
    #[must_use]
    pub fn conflict(&self, claim: &Claim<K>) -> Option<(LockOwner, LockInfo)> {
        self.conflicts(claim).min_by_key(|(_, info)| info.start)
    }

    /// Whether a session holds or waits for anything of an object.
    #[must_use]
    pub fn is_used_by(&self, object: &K, session: u64) -> bool {
        [false, true].into_iter().any(|flock| {
            let first = LockOwner { session, flock, owner: 0 };
            let last = LockOwner { session, flock, owner: u64::MAX };
            let space = (*object, flock);
            let held = self.objects.get(&space).is_some_and(|o| o.range(first..=last).next().is_some());
            let mut waits = self.waits_of_object.get(&space).into_iter().flatten();
            held || waits.any(|at| self.waits.get(at).is_some_and(|w| w.claim.owner.session == session))
        })
    }

    /// How many ranges a session holds.
    #[must_use]
    pub fn held(&self, session: u64) -> u64 {
        self.counts.get(&session).copied().unwrap_or(0)
    }

    /// Of each call that waits, in the order of arrival, the session and the sessions whose locks are in its
    /// way. Each takes time with the locks on its object.
    pub fn waits(&self) -> impl Iterator<Item = (u64, BTreeSet<u64>)> {
        self.waits.values().map(|wait| {
            let others = self.conflicts(&wait.claim).map(|(owner, _)| owner.session);
            (wait.claim.owner.session, others.collect())
        })
    }

    /// Whether nothing is held and nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.waits.is_empty()
    }

    /// Of each owner that a claim must wait for, the first lock.
    fn conflicts(&self, claim: &Claim<K>) -> impl Iterator<Item = (LockOwner, LockInfo)> {
        let Claim { owner, kind, start, end, .. } = *claim;
        let holders = self.objects.get(&claim.space()).into_iter().flatten();
        holders
            .filter(move |(other, _)| **other != owner)
            .filter_map(move |(other, ranges)| Some((*other, ranges.first_conflict(start, end, kind)?)))
    }

    fn grant(&mut self, claim: &Claim<K>) -> Tried {
        let Claim { object, owner, kind, start, end, pid } = *claim;
        if self.counts.get(&owner.session).is_some_and(|count| *count >= MAX_RANGES) {
            return Tried::Refused(Errno::NOLCK);
        }
        self.change(object, owner, |ranges| ranges.set(start, end, kind, pid));
        Tried::Granted
    }

    /// Changes what an owner holds, keeping count; answers whether it held anything before.
    fn change(&mut self, object: K, owner: LockOwner, change: impl FnOnce(&mut Ranges)) -> bool {
        let owners = self.objects.entry((object, owner.flock)).or_default();
        let ranges = owners.entry(owner).or_default();
        let before = ranges.count();
        change(ranges);
        let after = ranges.count();
        if ranges.is_empty() {
            owners.remove(&owner);
        }
        if owners.is_empty() {
            self.objects.remove(&(object, owner.flock));
        }
        let count = self.counts.entry(owner.session).or_default();
        *count = *count - before + after;
        if *count == 0 {
            self.counts.remove(&owner.session);
        }
        before > 0
    }

    /// An owner's flock(2) lock of the kind that is not wanted any more.
    fn give_up_other_kind(&mut self, claim: &Claim<K>) -> bool {
        let held = self.objects.get(&claim.space()).and_then(|owners| owners.get(&claim.owner));
        // Only a write lock excludes a read lock.
        let writes = |ranges: &Ranges| ranges.first_conflict(0, u64::MAX, LockKind::Read).is_some();
        let other = held.is_some_and(|ranges| writes(ranges) != (claim.kind == LockKind::Write));
        if other {
            self.change(claim.object, claim.owner, |ranges| ranges.clear(0, u64::MAX));
        }
        other
    }

    /// Grants what can be granted of what waits for one object, in the order in which it came; again if that
    /// turned a write lock into a read lock.
    fn grant_waiting(&mut self, space: (K, bool)) {
        loop {
            let Some(arrivals) = self.waits_of_object.get(&space).cloned() else { return };
            let mut again = false;
            for arrival in arrivals {
                let Some(wait) = self.waits.get(&arrival) else { continue };
                let (claim, call) = (wait.claim, wait.call);
                if self.conflict(&claim).is_some() {
                    continue;
                }
                self.dequeue(arrival);
                self.change(claim.object, claim.owner, |r| {
                    r.set(claim.start, claim.end, claim.kind, claim.pid)
                });
                self.granted.push_back((claim.owner.session, call));
                again |= claim.kind == LockKind::Read;
            }
            if !again {
                return;
            }
        }
    }

    fn enqueue(&mut self, claim: Claim<K>, call: CallId) {
        self.arrivals += 1;
        let arrival = self.arrivals;
        self.waits_of_object.entry(claim.space()).or_default().insert(arrival);
        self.waits_of_owner.entry(claim.owner).or_default().insert(arrival);
        let earlier = self.waits_of_call.insert((claim.owner.session, call), arrival);
        assert!(earlier.is_none(), "a call waits for one lock");
        self.waits.insert(arrival, Wait { claim, call });
    }

    fn dequeue(&mut self, arrival: u64) {
        let Some(Wait { claim, call }) = self.waits.remove(&arrival) else { return };
        remove_from(&mut self.waits_of_object, &claim.space(), arrival);
        remove_from(&mut self.waits_of_owner, &claim.owner, arrival);
        self.waits_of_call.remove(&(claim.owner.session, call));
    }

    /// Whether one of those that a claim would wait for waits, over however many others, for its owner.
    fn is_deadlock(&self, claim: &Claim<K>) -> bool {
        let mut seen = BTreeSet::new();
        let mut ahead: Vec<LockOwner> = self.conflicts(claim).map(|(owner, _)| owner).collect();
        while let Some(owner) = ahead.pop() {
            if owner == claim.owner {
                return true;
            }
            if !seen.insert(owner) {
                continue;
            }
            let waits = self.waits_of_owner.get(&owner).into_iter().flatten();
            for wait in waits.filter_map(|arrival| self.waits.get(arrival)) {
                ahead.extend(self.conflicts(&wait.claim).map(|(owner, _)| owner));
            }
        }
        false
    }
}

fn remove_from<Q: Ord + Copy>(index: &mut BTreeMap<Q, BTreeSet<u64>>, key: &Q, arrival: u64) {
    if let Some(arrivals) = index.get_mut(key) {
        arrivals.remove(&arrival);
        if arrivals.is_empty() {
            index.remove(key);
        }
    }
}

#[cfg(test)]
mod tests;
