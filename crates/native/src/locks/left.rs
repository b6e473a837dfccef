//! What forgotten sessions held, for as long as nobody was granted what it excludes.

use super::ranges::Ranges;
use super::{Claim, Holders, LockOwner, MAX_RANGES};
use std::collections::BTreeMap;

/// Locks that may be claimed, by the number of the session in which their client may do so: the forgotten one's,
/// then that of the one in its place. None of them excludes anything that is held by others.
#[derive(Debug)]
pub(super) struct Left<K> {
    objects: BTreeMap<(K, bool), Holders>,
    /// Ranges, by session: at most [`MAX_RANGES`], else it has none.
    counts: BTreeMap<u64, u64>,
}

impl<K: Ord + Copy> Default for Left<K> {
    fn default() -> Left<K> {
        Left { objects: BTreeMap::new(), counts: BTreeMap::new() }
    }
}

impl<K: Ord + Copy> Left<K> {
    /// How many ranges.
    pub(super) fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    pub(super) fn count_of(&self, session: u64) -> u64 {
        self.counts.get(&session).copied().unwrap_or(0)
    }

    /// Its owner held this until now.
    pub(super) fn add(&mut self, space: (K, bool), owner: LockOwner, held: &Ranges) {
        self.change(space, owner, |ranges| ranges.lay_over(held));
    }

    /// Somebody is granted a lock: what excludes it is nobody's any more.
    pub(super) fn strike(&mut self, claim: &Claim<K>) {
        let Claim { owner, kind, start, end, .. } = *claim;
        let Some(holders) = self.objects.get(&claim.space()) else { return };
        let struck = |(other, ranges): (LockOwner, &Ranges)| {
            ranges.first_conflict(start, end, kind).is_some().then_some(other)
        };
        let struck: Vec<LockOwner> = holders.rivals(owner, kind).filter_map(struck).collect();
        for other in struck {
            self.change(claim.space(), other, |ranges| ranges.clear_conflicts(start, end, kind));
        }
    }

    /// Whether an owner's lock may be claimed; it is not left any more then.
    pub(super) fn take(&mut self, claim: &Claim<K>) -> bool {
        let ranges = self.objects.get(&claim.space()).and_then(|holders| holders.all.get(&claim.owner));
        let covered = ranges.is_some_and(|ranges| ranges.covers(claim.start, claim.end, claim.kind));
        if covered {
            self.change(claim.space(), claim.owner, |ranges| ranges.clear(claim.start, claim.end));
        }
        covered
    }

    /// A session takes the place of a forgotten one.
    pub(super) fn inherit(&mut self, from: u64, session: u64) {
        for (space, owner, ranges) in self.take_out(from) {
            self.add(space, LockOwner { session, ..owner }, &ranges);
        }
    }

    /// Nothing of a session may be claimed any more.
    pub(super) fn drop_session(&mut self, session: u64) {
        drop(self.take_out(session));
    }

    #[cfg(test)]
    pub(super) fn holders(&self) -> impl Iterator<Item = &Holders> {
        self.objects.values()
    }

    fn take_out(&mut self, session: u64) -> Vec<((K, bool), LockOwner, Ranges)> {
        if self.counts.remove(&session).is_none() {
            return Vec::new();
        }
        let mut taken = Vec::new();
        self.objects.retain(|space, holders| {
            let first = LockOwner { session, flock: space.1, owner: 0 };
            let last = LockOwner { owner: u64::MAX, ..first };
            let theirs: Vec<LockOwner> = holders.all.range(first..=last).map(|(owner, _)| *owner).collect();
            for owner in theirs {
                holders.writers.remove(&owner);
                taken.extend(holders.all.remove(&owner).map(|ranges| (*space, owner, ranges)));
            }
            !holders.all.is_empty()
        });
        taken
    }

    /// Changes what is left of an owner, keeping count.
    fn change(&mut self, space: (K, bool), owner: LockOwner, change: impl FnOnce(&mut Ranges)) {
        let holders = self.objects.entry(space).or_default();
        let (before, after) = holders.change(owner, change);
        if holders.all.is_empty() {
            self.objects.remove(&space);
        }
        let count = self.counts.entry(owner.session).or_default();
        *count = *count - before + after;
        match *count {
            0 => drop(self.counts.remove(&owner.session)),
            count if count > MAX_RANGES => self.drop_session(owner.session),
            _ => {}
        }
    }
}
