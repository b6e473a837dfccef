//! Locked ranges, by object and by session.

use super::intervals::{Interval, Intervals, OverlapQuery};
use super::{LockOwner, LockRequest};
use nigh_types::{LockEdit, LockInfo, LockKind, LockRanges};
use std::collections::{BTreeMap, BTreeSet};

/// LockRanges of many owners. Operations take time with the ranges changed or found, and with the logarithm of the number
/// of ranges.
#[derive(Debug)]
pub(super) struct LockIndex<K> {
    objects: BTreeMap<(K, bool), ObjectLocks>,
    of_session: BTreeMap<u64, SessionLocks<K>>,
    count: u64,
}

/// The ranges of one session.
#[derive(Debug)]
struct SessionLocks<K> {
    ranges: u64,
    spaces: BTreeSet<(K, bool)>,
}

/// The owners of locks on one object.
#[derive(Default, Debug)]
pub(super) struct ObjectLocks {
    pub(super) all: BTreeMap<LockOwner, LockRanges>,
    ranges: Intervals,
    /// The write locks among the ranges: only they conflict with a read lock.
    writes: Intervals,
}

impl ObjectLocks {
    /// Changes an owner's ranges. Returns their number before and after.
    fn change(
        &mut self,
        owner: LockOwner,
        change: impl FnOnce(&mut LockRanges) -> Vec<LockEdit>,
    ) -> (u64, u64) {
        let ranges = self.all.entry(owner).or_default();
        let before = ranges.count();
        let edits = change(ranges);
        let after = ranges.count();
        for LockEdit { range: info, is_added } in edits {
            let at = Interval { owner, info };
            let writes = (info.kind == LockKind::Write).then_some(&mut self.writes);
            for tree in [Some(&mut self.ranges), writes].into_iter().flatten() {
                if is_added { tree.insert(at) } else { tree.remove(&at) }
            }
        }
        if after == 0 {
            self.all.remove(&owner);
        }
        (before, after)
    }

    /// The ranges of a session's owners.
    fn of_session(&self, session: u64) -> impl Iterator<Item = (LockOwner, &LockRanges)> {
        let owner = |flock, owner| LockOwner { session, flock, owner };
        let all = self.all.range(owner(false, 0)..=owner(true, u64::MAX));
        all.map(|(owner, ranges)| (*owner, ranges))
    }
}

impl<K: Ord + Copy> Default for LockIndex<K> {
    fn default() -> LockIndex<K> {
        LockIndex { objects: BTreeMap::new(), of_session: BTreeMap::new(), count: 0 }
    }
}

impl<K: Ord + Copy> LockIndex<K> {
    pub(super) fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// The number of ranges.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn count_of(&self, session: u64) -> u64 {
        self.of_session.get(&session).map_or(0, |share| share.ranges)
    }

    #[cfg(test)]
    pub(super) fn objects(&self) -> impl Iterator<Item = (&(K, bool), &ObjectLocks)> {
        self.objects.iter()
    }

    pub(super) fn ranges(&self, space: (K, bool), owner: LockOwner) -> Option<&LockRanges> {
        self.objects.get(&space)?.all.get(&owner)
    }

    /// The locks of other owners that conflict with a request, by their starts.
    pub(super) fn conflicts(&self, claim: &LockRequest<K>) -> impl Iterator<Item = (LockOwner, LockInfo)> {
        let LockRequest { owner, kind, start, end, .. } = *claim;
        let wanted = OverlapQuery { start, end, not_of: owner };
        let holders = self.objects.get(&claim.space()).into_iter();
        let found = holders.flat_map(move |holders| match kind {
            LockKind::Write => holders.ranges.overlapping(wanted),
            LockKind::Read => holders.writes.overlapping(wanted),
        });
        found.map(|at| (at.owner, at.info))
    }

    /// The ranges of a session's owners on an object.
    pub(super) fn of_session(
        &self,
        space: (K, bool),
        session: u64,
    ) -> impl Iterator<Item = (LockOwner, &LockRanges)> {
        self.objects.get(&space).into_iter().flat_map(move |holders| holders.of_session(session))
    }

    /// The objects on which a session has locks.
    pub(super) fn spaces(&self, session: u64) -> impl Iterator<Item = &(K, bool)> {
        self.of_session.get(&session).into_iter().flat_map(|share| &share.spaces)
    }

    /// Changes an owner's ranges, keeping count. `change` returns its edits.
    pub(super) fn change(
        &mut self,
        space: (K, bool),
        owner: LockOwner,
        change: impl FnOnce(&mut LockRanges) -> Vec<LockEdit>,
    ) {
        let holders = self.objects.entry(space).or_default();
        let (before, after) = holders.change(owner, change);
        let has_none = after == 0 && holders.of_session(owner.session).next().is_none();
        if holders.all.is_empty() {
            self.objects.remove(&space);
        }
        self.count = self.count - before + after;
        let none = SessionLocks { ranges: 0, spaces: BTreeSet::new() };
        let share = self.of_session.entry(owner.session).or_insert(none);
        share.ranges = share.ranges - before + after;
        if has_none {
            share.spaces.remove(&space);
        } else if after > 0 {
            share.spaces.insert(space);
        }
        if share.ranges == 0 {
            self.of_session.remove(&owner.session);
        }
    }

    /// Removes and returns all ranges of a session.
    pub(super) fn take_session(&mut self, session: u64) -> Vec<((K, bool), LockOwner, LockRanges)> {
        let spaces: Vec<(K, bool)> = self.spaces(session).copied().collect();
        let mut taken = Vec::new();
        for space in spaces {
            let theirs: Vec<(LockOwner, LockRanges)> =
                self.of_session(space, session).map(|(owner, ranges)| (owner, ranges.clone())).collect();
            for (owner, ranges) in theirs {
                self.change(space, owner, |ranges| ranges.clear(0, u64::MAX));
                taken.push((space, owner, ranges));
            }
        }
        taken
    }
}
