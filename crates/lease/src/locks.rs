//! Lock table of a server, without I/O. See docs/decisions/0011-locks.md.

mod intervals;
mod lock_index;
mod reclaimable;

use lock_index::LockIndex;
use nigh_types::{CallId, Errno, LockInfo, LockKind};
use reclaimable::ReclaimableLocks;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Ranges that one session may hold.
const MAX_RANGES: u64 = 65_536;
/// Calls that may wait for locks of one object: each is checked whenever a part of the object is unlocked.
const MAX_WAITS_OF_OBJECT: usize = 4_096;
/// Locks that the search for a deadlock visits.
const MAX_SEARCH: u64 = 1 << 16;
/// Up to this many waiting owners, the search tests each of them for a conflict instead of visiting the conflicting
/// locks.
const FEW_WAITING: usize = 64;
/// The most owners or waits that are checked to learn whether a session blocks others.
const MAX_CHECKED: usize = 1_024;

/// Owner of a lock. flock(2) and fcntl(2) locks are separate spaces that do not conflict.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LockOwner {
    pub session: u64,
    pub flock: bool,
    /// The client's owner number.
    pub owner: u64,
}

/// A requested lock on `object`, in the caller's identification of objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockRequest<K> {
    pub object: K,
    pub owner: LockOwner,
    pub kind: LockKind,
    pub start: u64,
    /// Inclusive.
    pub end: u64,
    pub pid: u32,
}

/// Result of requesting a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockResult {
    Granted,
    /// [`LockTable::poll_ended`] says when the lock is granted.
    Waits,
    /// `EAGAIN`, `EDEADLK` or `ENOLCK`.
    Refused(Errno),
}

/// All locks of one server.
///
/// **Contract.** After each `handle_` call drain `poll_ended`: the waiting calls that were granted or refused, to be
/// answered in that order.
///
/// A request is granted as soon as no *held* lock of another owner conflicts with it. Waiting requests are tried in
/// their order of arrival, and a waiting request never blocks another. So each waiting request waits for a lock holder,
/// and the search for deadlocks sees every cycle.
#[derive(Debug)]
pub struct LockTable<K> {
    held: LockIndex<K>,
    /// Waiting requests by arrival.
    waits: BTreeMap<u64, Wait<K>>,
    waits_of_object: BTreeMap<(K, bool), BTreeSet<u64>>,
    waits_of_owner: BTreeMap<LockOwner, BTreeSet<u64>>,
    waits_of_call: BTreeMap<(u64, CallId), u64>,
    reclaimable: ReclaimableLocks<K>,
    arrivals: u64,
    ended: VecDeque<(u64, CallId, Result<(), Errno>)>,
}

#[derive(Debug)]
struct Wait<K> {
    claim: LockRequest<K>,
    call: CallId,
}

impl<K: Ord + Copy> Default for LockTable<K> {
    fn default() -> LockTable<K> {
        LockTable {
            held: LockIndex::default(),
            waits: BTreeMap::new(),
            waits_of_object: BTreeMap::new(),
            waits_of_owner: BTreeMap::new(),
            waits_of_call: BTreeMap::new(),
            reclaimable: ReclaimableLocks::default(),
            arrivals: 0,
            ended: VecDeque::new(),
        }
    }
}

impl<K: Ord + Copy> LockRequest<K> {
    fn space(&self) -> (K, bool) {
        (self.object, self.owner.flock)
    }
}

impl<K: Ord + Copy> LockTable<K> {
    /// Requests a lock; with `wait`, that call waits for it. The lock replaces the owner's locks on the range. As on
    /// Linux, an fcntl(2) request that has to wait leaves the owner's locks in place, while flock(2) releases the lock
    /// that it converts, even if the request then fails.
    pub fn handle_lock(&mut self, claim: LockRequest<K>, wait: Option<CallId>) -> LockResult {
        let converted = claim.owner.flock && self.release_other_kind(&claim);
        let tried = if !self.is_excluded(&claim) {
            match self.grant(&claim) {
                Ok(()) => LockResult::Granted,
                Err(errno) => LockResult::Refused(errno),
            }
        } else {
            match wait {
                None => LockResult::Refused(Errno::AGAIN),
                Some(_) if self.waits_for(claim.space()) >= MAX_WAITS_OF_OBJECT => {
                    LockResult::Refused(Errno::NOLCK)
                }
                Some(_) if !claim.owner.flock && self.is_deadlock(&claim) => {
                    LockResult::Refused(Errno::DEADLK)
                }
                Some(call) => {
                    self.enqueue(claim, call);
                    LockResult::Waits
                }
            }
        };
        // A write lock may have become a read lock.
        if converted || tried == LockResult::Granted && claim.kind == LockKind::Read {
            self.grant_waiting(claim.space());
        }
        tried
    }

    /// Reclaims a lock that its owner held in a forgotten session. It fails with `EAGAIN` if the owner did not hold it,
    /// or if a conflicting lock was granted since, even if that is released by now. `known`: it is known from elsewhere
    /// that the owner held it and that no conflicting lock was granted.
    pub fn handle_reclaim(&mut self, claim: LockRequest<K>, known: bool) -> LockResult {
        if self.reclaimable.take(&claim) || known {
            self.handle_lock(claim, None)
        } else {
            LockResult::Refused(Errno::AGAIN)
        }
    }

    /// Unlocks a range of an owner. The owner's waiting requests go on waiting.
    ///
    /// # Errors
    /// `ENOLCK`: the unlock would split a range, and its session would hold one more than it may.
    pub fn handle_unlock(&mut self, object: K, owner: LockOwner, start: u64, end: u64) -> Result<(), Errno> {
        let Some(ranges) = self.held.ranges((object, owner.flock), owner) else { return Ok(()) };
        self.has_room(owner.session, u64::from(ranges.is_split_by(start, end)))?;
        self.held.change((object, owner.flock), owner, |ranges| ranges.clear(start, end));
        self.grant_waiting((object, owner.flock));
        Ok(())
    }

    /// Cancels a call that waits for a lock, and returns the lock's object. `None`: it does not wait; it was granted or
    /// never requested.
    pub fn handle_cancel(&mut self, session: u64, call: CallId) -> Option<K> {
        let arrival = *self.waits_of_call.get(&(session, call))?;
        self.dequeue(arrival).map(|claim| claim.object)
    }

    /// Ends a session whose client may come back: as [`LockTable::handle_session_end`], but its locks can be reclaimed
    /// by the session that replaces it ([`LockTable::handle_successor`]).
    pub fn handle_forgotten(&mut self, session: u64) {
        let LockTable { held, reclaimable: left, .. } = self;
        for space in held.spaces(session) {
            for (owner, ranges) in held.of_session(*space, session) {
                left.add(*space, owner, ranges);
            }
        }
        self.release_session(session);
    }

    /// Lets a session reclaim the locks of the forgotten session that it replaces.
    pub fn handle_successor(&mut self, forgotten: u64, session: u64) {
        self.reclaimable.inherit(forgotten, session);
    }

    /// Drops the locks that a session has not reclaimed.
    pub fn handle_reclaim_ended(&mut self, session: u64) {
        self.reclaimable.drop_session(session);
    }

    /// The number of ranges that one session can reclaim, or, for a forgotten session, the session that replaces it.
    #[must_use]
    pub fn reclaimable_by(&self, session: u64) -> u64 {
        self.reclaimable.count_of(session)
    }

    /// Ends a session: its locks and waiting requests are dropped.
    pub fn handle_session_end(&mut self, session: u64) {
        self.reclaimable.drop_session(session);
        self.release_session(session);
    }

    fn release_session(&mut self, session: u64) {
        let of_session = (session, CallId(0))..=(session, CallId(u64::MAX));
        let waits: Vec<u64> = self.waits_of_call.range(of_session).map(|(_, arrival)| *arrival).collect();
        for arrival in waits {
            self.dequeue(arrival);
        }
        let freed = self.held.take_session(session);
        let spaces: BTreeSet<(K, bool)> = freed.into_iter().map(|(space, ..)| space).collect();
        spaces.into_iter().for_each(|space| self.grant_waiting(space));
    }

    /// Returns a call that waits no longer, with its session: its lock is granted, or refused (`ENOLCK`).
    pub fn poll_ended(&mut self) -> Option<(u64, CallId, Result<(), Errno>)> {
        self.ended.pop_front()
    }

    /// The first lock that conflicts with a request, with its owner.
    #[must_use]
    pub fn conflict(&self, claim: &LockRequest<K>) -> Option<(LockOwner, LockInfo)> {
        self.held.conflicts(claim).next()
    }

    /// Whether a session has a lock on an object or waits for one.
    #[must_use]
    pub fn is_used_by(&self, object: &K, session: u64) -> bool {
        [false, true].into_iter().any(|flock| {
            let space = (*object, flock);
            let held = self.held.of_session(space, session).next().is_some();
            let mut waits = self.waits_of_object.get(&space).into_iter().flatten();
            held || waits.any(|at| self.waits.get(at).is_some_and(|w| w.claim.owner.session == session))
        })
    }

    /// Whether locks of a session conflict with a request of another one; only its first owners are checked.
    fn blocks(&self, session: u64, claim: &LockRequest<K>) -> bool {
        let LockRequest { kind, start, end, .. } = *claim;
        let mut theirs = self.held.of_session(claim.space(), session).take(MAX_CHECKED);
        theirs.any(|(_, ranges)| ranges.first_conflict(start, end, kind).is_some())
    }

    /// Whether another session waits for a lock of this one; only the first locks and waits are checked.
    #[must_use]
    pub fn is_waited_for(&self, session: u64) -> bool {
        let all = self.waits_of_object.len() < MAX_CHECKED;
        let waited = all.then(|| self.waits_of_object.keys()).into_iter().flatten();
        let spaces = (!all).then(|| self.held.spaces(session).take(MAX_CHECKED)).into_iter().flatten();
        let theirs = |space: &&(K, bool)| self.held.of_session(**space, session).next().is_some();
        let waits = waited.chain(spaces).filter(theirs).filter_map(|space| self.waits_of_object.get(space));
        let waits = waits.flatten().take(MAX_CHECKED).filter_map(|arrival| self.waits.get(arrival));
        let mut others = waits.filter(|wait| wait.claim.owner.session != session);
        others.any(|wait| self.blocks(session, &wait.claim))
    }

    /// The number of ranges of all sessions.
    #[must_use]
    pub fn ranges(&self) -> u64 {
        self.held.count()
    }

    /// The number of ranges of a session.
    #[must_use]
    pub fn held(&self, session: u64) -> u64 {
        self.held.count_of(session)
    }

    /// For each waiting call, in the order of arrival, its session and the sessions whose locks block it; only the
    /// first thousand conflicts are checked.
    pub fn waits(&self) -> impl Iterator<Item = (u64, BTreeSet<u64>)> {
        self.waits.values().map(|wait| {
            let others = self.conflicts(&wait.claim).take(MAX_CHECKED).map(|(owner, _)| owner.session);
            (wait.claim.owner.session, others.collect())
        })
    }

    /// Whether there is no lock and no waiting request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty() && self.waits.is_empty()
    }

    /// Whether a held lock conflicts with a request.
    fn is_excluded(&self, claim: &LockRequest<K>) -> bool {
        self.held.conflicts(claim).next().is_some()
    }

    /// The locks that a request must wait for, by their starts. Each takes time with the logarithm of the number of
    /// locks.
    pub fn conflicts(&self, claim: &LockRequest<K>) -> impl Iterator<Item = (LockOwner, LockInfo)> {
        self.held.conflicts(claim)
    }

    fn grant(&mut self, claim: &LockRequest<K>) -> Result<(), Errno> {
        let LockRequest { owner, kind, start, end, pid, .. } = *claim;
        let ranges = self.held.ranges(claim.space(), owner);
        let split = ranges.is_some_and(|ranges| ranges.is_split_by(start, end));
        self.has_room(owner.session, 1 + u64::from(split))?;
        self.held.change(claim.space(), owner, |ranges| ranges.set(LockInfo { kind, start, end, pid }));
        self.reclaimable.remove_conflicting(claim);
        Ok(())
    }

    /// Fails with `ENOLCK` if so many more ranges are too many for a session.
    fn has_room(&self, session: u64, more: u64) -> Result<(), Errno> {
        let count = self.held.count_of(session);
        if more == 0 || count + more <= MAX_RANGES { Ok(()) } else { Err(Errno::NOLCK) }
    }

    /// Releases an owner's flock(2) lock if it is of the other kind than the requested one. Returns whether it did.
    fn release_other_kind(&mut self, claim: &LockRequest<K>) -> bool {
        let held = self.held.ranges(claim.space(), claim.owner);
        let other = held.is_some_and(|ranges| ranges.has_writes() != (claim.kind == LockKind::Write));
        if other {
            self.held.change(claim.space(), claim.owner, |ranges| ranges.clear(0, u64::MAX));
        }
        other
    }

    /// Grants waiting requests of one object that no longer conflict, in the order of arrival; again if a grant turned
    /// a write lock into a read lock.
    fn grant_waiting(&mut self, space: (K, bool)) {
        loop {
            let Some(arrivals) = self.waits_of_object.get(&space).cloned() else { return };
            let mut again = false;
            for arrival in arrivals {
                let Some(wait) = self.waits.get(&arrival) else { continue };
                let (claim, call) = (wait.claim, wait.call);
                if self.is_excluded(&claim) {
                    continue;
                }
                self.dequeue(arrival);
                let granted = self.grant(&claim);
                self.ended.push_back((claim.owner.session, call, granted));
                again |= granted.is_ok() && claim.kind == LockKind::Read;
            }
            if !again {
                return;
            }
        }
    }

    fn enqueue(&mut self, claim: LockRequest<K>, call: CallId) {
        self.arrivals += 1;
        let arrival = self.arrivals;
        self.waits_of_object.entry(claim.space()).or_default().insert(arrival);
        self.waits_of_owner.entry(claim.owner).or_default().insert(arrival);
        let earlier = self.waits_of_call.insert((claim.owner.session, call), arrival);
        assert!(earlier.is_none(), "a call waits for one lock");
        self.waits.insert(arrival, Wait { claim, call });
    }

    fn waits_for(&self, space: (K, bool)) -> usize {
        self.waits_of_object.get(&space).map_or(0, BTreeSet::len)
    }

    fn dequeue(&mut self, arrival: u64) -> Option<LockRequest<K>> {
        let Wait { claim, call } = self.waits.remove(&arrival)?;
        remove_from(&mut self.waits_of_object, &claim.space(), arrival);
        remove_from(&mut self.waits_of_owner, &claim.owner, arrival);
        self.waits_of_call.remove(&(claim.owner.session, call));
        Some(claim)
    }

    /// Whether that owner has a lock that conflicts with a request of another one.
    fn excludes(&self, owner: LockOwner, claim: &LockRequest<K>) -> bool {
        let LockRequest { kind, start, end, .. } = *claim;
        let ranges = self.held.ranges(claim.space(), owner);
        ranges.is_some_and(|ranges| ranges.first_conflict(start, end, kind).is_some())
    }

    /// Whether a holder that a request would wait for waits, directly or transitively, for the request's owner. A
    /// search that takes too long counts as a deadlock.
    fn is_deadlock(&self, claim: &LockRequest<K>) -> bool {
        let mut seen = BTreeSet::new();
        let mut ahead = Vec::new();
        let mut left = MAX_SEARCH;
        let mut at = Some(*claim);
        let mut waits = Vec::new();
        while let Some(claim_at) = at {
            let mut found = |owner: LockOwner| {
                if owner != claim.owner && seen.insert(owner) {
                    ahead.push(owner);
                }
                owner == claim.owner
            };
            if self.waits_of_owner.len() <= FEW_WAITING {
                for owner in self.waits_of_owner.keys().chain([&claim.owner]) {
                    left -= 1;
                    let excludes = *owner != claim_at.owner && self.excludes(*owner, &claim_at);
                    if left == 0 || excludes && found(*owner) {
                        return true;
                    }
                }
            } else {
                for (owner, _) in self.conflicts(&claim_at) {
                    left -= 1;
                    if left == 0 || found(owner) {
                        return true;
                    }
                }
            }
            while waits.is_empty()
                && let Some(owner) = ahead.pop()
            {
                waits.extend(self.waits_of_owner.get(&owner).into_iter().flatten());
            }
            at = waits.pop().and_then(|arrival| self.waits.get(arrival)).map(|wait| wait.claim);
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
