//! Reclaimable locks: those of forgotten sessions, until a conflicting lock is granted.

use super::lock_index::LockIndex;
use super::{LockOwner, LockRequest, MAX_RANGES};
use nigh_types::{LockEdit, LockRanges};
use std::collections::BTreeSet;

/// Reclaimable locks, by the session in which their client may reclaim them: first the forgotten one, then the one that
/// replaces it. None of them conflicts with another owner's held lock. A session has at most [`MAX_RANGES`]; with more,
/// it has none.
#[derive(Debug)]
pub(super) struct ReclaimableLocks<K>(LockIndex<K>);

impl<K: Ord + Copy> Default for ReclaimableLocks<K> {
    fn default() -> ReclaimableLocks<K> {
        ReclaimableLocks(LockIndex::default())
    }
}

impl<K: Ord + Copy> ReclaimableLocks<K> {
    /// The number of ranges of a session.
    pub(super) fn count_of(&self, session: u64) -> u64 {
        self.0.count_of(session)
    }

    /// Adds the ranges that an owner held until now.
    pub(super) fn add(&mut self, space: (K, bool), owner: LockOwner, held: &LockRanges) {
        self.change(space, owner, |ranges| ranges.lay_over(held));
    }

    /// Removes the reclaimable locks that conflict with a lock that is granted.
    pub(super) fn remove_conflicting(&mut self, claim: &LockRequest<K>) {
        let LockRequest { kind, start, end, .. } = *claim;
        let struck: BTreeSet<LockOwner> = self.0.conflicts(claim).map(|(owner, _)| owner).collect();
        for other in struck {
            self.change(claim.space(), other, |ranges| ranges.clear_conflicts(start, end, kind));
        }
    }

    /// Returns whether an owner's lock may be reclaimed; if so, it is removed from here.
    pub(super) fn take(&mut self, claim: &LockRequest<K>) -> bool {
        let ranges = self.0.ranges(claim.space(), claim.owner);
        let covered = ranges.is_some_and(|ranges| ranges.covers(claim.start, claim.end, claim.kind));
        if covered {
            self.change(claim.space(), claim.owner, |ranges| ranges.clear(claim.start, claim.end));
        }
        covered
    }

    /// Moves the locks of a forgotten session to the one that replaces it.
    pub(super) fn inherit(&mut self, from: u64, session: u64) {
        for (space, owner, ranges) in self.0.take_session(from) {
            self.add(space, LockOwner { session, ..owner }, &ranges);
        }
    }

    /// Drops the reclaimable locks of a session.
    pub(super) fn drop_session(&mut self, session: u64) {
        drop(self.0.take_session(session));
    }

    #[cfg(test)]
    pub(super) fn book(&self) -> &LockIndex<K> {
        &self.0
    }

    /// Changes an owner's reclaimable ranges, keeping count.
    fn change(
        &mut self,
        space: (K, bool),
        owner: LockOwner,
        change: impl FnOnce(&mut LockRanges) -> Vec<LockEdit>,
    ) {
        self.0.change(space, owner, change);
        if self.0.count_of(owner.session) > MAX_RANGES {
            self.drop_session(owner.session);
        }
    }
}
