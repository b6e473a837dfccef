//! Records of file locks: which owners may hold locks, and what they hold.

use crate::op::Fh;
use nigh_types::{LockInfo, LockKind, LockRanges};
use std::collections::{BTreeMap, BTreeSet};

/// Lock owner on an inode. Owners of flock(2) locks have a number space of their own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct LockOwner {
    pub ino: u64,
    pub flock: bool,
    pub owner: u64,
}

/// Locks of one owner.
#[derive(Clone, Debug, Default)]
struct OwnerLocks {
    /// Open files through which the owner set locks.
    files: BTreeSet<Fh>,
    /// Lock calls in flight.
    calls: u32,
    /// Number of locks granted so far.
    grants: u64,
    /// The owner may still hold locks.
    may_hold: bool,
    /// Granted locks without an unlock call.
    ranges: LockRanges,
    /// Locks granted after the last waiter was gone: see [`LockRecords::take_corrections`].
    unwanted: LockRanges,
    /// The locks could not be reclaimed.
    lost: bool,
}

/// Owners that may hold locks. An entry lasts from the owner's first lock call until the owner unlocks the whole file,
/// closes it, or was granted no lock.
#[derive(Clone, Debug, Default)]
pub(crate) struct LockRecords {
    holders: BTreeMap<LockOwner, OwnerLocks>,
    /// Open files with lost locks: reads and writes through them fail.
    lost_files: BTreeSet<Fh>,
}

impl LockRecords {
    /// Returns whether locks that were set through an open file are lost.
    pub fn are_lost(&self, fh: Fh) -> bool {
        self.lost_files.contains(&fh)
    }

    /// Marks all locks as lost.
    pub fn mark_all_lost(&mut self) {
        let holders: Vec<LockOwner> = self.holders.keys().copied().collect();
        for holder in holders {
            self.mark_lost(holder);
        }
    }

    /// Forgets lock calls: the session is over.
    pub fn forget_calls(&mut self) {
        self.holders.retain(|_, held| held.may_hold || held.lost);
        self.holders.values_mut().for_each(|held| held.calls = 0);
    }

    /// Forgets unwanted locks: the remote holds no lock any more.
    pub fn forget_unwanted(&mut self) {
        self.holders.values_mut().for_each(|held| held.unwanted = LockRanges::default());
    }

    /// Returns all locks to reclaim, in a fixed order. `asked` are lock calls without a reply: where one asks for a
    /// weaker lock than is held, the remote may hold only the weaker one.
    pub fn locks_to_reclaim(&self, asked: &[(LockOwner, LockInfo)]) -> Vec<(LockOwner, LockInfo)> {
        let mut claims = Vec::new();
        for (holder, held) in self.holders.iter().filter(|(_, held)| held.may_hold && !held.lost) {
            let mut ranges = held.ranges.clone();
            asked.iter().filter(|(of, _)| of == holder).for_each(|(_, range)| ranges.weaken(range));
            claims.extend(ranges.iter().map(|range| (*holder, range)));
        }
        claims
    }

    /// Marks an owner's locks as lost until it closes. Returns the open files through which it set them; `None`: it
    /// held none.
    pub fn mark_lost(&mut self, holder: LockOwner) -> Option<BTreeSet<Fh>> {
        let held = self.holders.get_mut(&holder).filter(|held| held.may_hold)?;
        (held.may_hold, held.lost, held.ranges) = (false, true, LockRanges::default());
        self.lost_files.extend(&held.files);
        Some(held.files.clone())
    }

    /// Returns the open files through which an owner set locks.
    pub fn files_of(&self, holder: LockOwner) -> impl Iterator<Item = &Fh> {
        self.holders.get(&holder).into_iter().flat_map(|held| &held.files)
    }

    pub fn is_lost(&self, holder: LockOwner) -> bool {
        self.holders.get(&holder).is_some_and(|held| held.lost)
    }

    /// Closes a file for an owner. Returns whether the remote must be told.
    pub fn close(&mut self, holder: LockOwner) -> bool {
        let Some(held) = self.holders.get_mut(&holder) else { return false };
        let tell = held.may_hold || held.calls > 0;
        let was_lost = std::mem::take(&mut held.lost);
        (held.may_hold, held.ranges) = (false, LockRanges::default());
        let files = if was_lost { std::mem::take(&mut held.files) } else { BTreeSet::new() };
        if held.calls == 0 {
            self.holders.remove(&holder);
        }
        for fh in files {
            if !self.is_lost_by_another(fh) {
                self.lost_files.remove(&fh);
            }
        }
        tell
    }

    fn is_lost_by_another(&self, fh: Fh) -> bool {
        self.holders.values().any(|held| held.lost && held.files.contains(&fh))
    }

    /// Removes an open file. Returns the owners that set locks through it and no other open file, since its last
    /// descriptor closes it for them: open file descriptions, and flock(2), whose locks end with the description.
    pub fn file_gone(&mut self, ino: u64, fh: Fh) -> Vec<LockOwner> {
        self.lost_files.remove(&fh);
        let first = LockOwner { ino, flock: false, owner: 0 };
        let last = LockOwner { ino, flock: true, owner: u64::MAX };
        let mut ended = Vec::new();
        for (holder, held) in self.holders.range_mut(first..=last) {
            if held.files.remove(&fh) && held.files.is_empty() {
                ended.push(*holder);
            }
        }
        ended
    }
}

/// What the remote is to do after unwanted locks were granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Correction {
    Release(LockInfo),
    /// Set the weaker lock that the owner does hold.
    Weaken(LockInfo),
    /// Other owners may have read these bytes since, while this owner believed in its write lock.
    Fail,
}

/// Lock calls.
impl LockRecords {
    /// Records a lock call of an owner through an open file. `replaces`: for flock(2), the kind of the lock that the
    /// remote sets after it has released one of another kind, whether it grants the other one or not.
    pub fn begin_call(&mut self, holder: LockOwner, fh: Fh, replaces: Option<LockKind>) {
        let held = self.holders.entry(holder).or_default();
        held.files.insert(fh);
        held.calls += 1;
        if replaces.is_some_and(|kind| held.ranges.iter().any(|range| range.kind != kind)) {
            held.ranges = LockRanges::default();
        }
    }

    /// Returns the number of locks granted to an owner so far; `None`: it holds none.
    pub fn grants_of(&self, holder: LockOwner) -> Option<u64> {
        self.holders.get(&holder).map(|held| held.grants)
    }

    /// Records an unlock call.
    pub fn unlock(&mut self, holder: LockOwner, (start, end): (u64, u64)) {
        if let Some(held) = self.holders.get_mut(&holder) {
            held.ranges.clear(start, end);
            held.unwanted.clear(start, end);
        }
    }

    /// Records the reply to a lock call; `is_awaited`: a request waits for it. Returns whether the owner's locks are
    /// lost; `None`: the owner is not known any more.
    pub fn end_call(
        &mut self,
        holder: LockOwner,
        range: LockInfo,
        granted: bool,
        is_awaited: bool,
    ) -> Option<bool> {
        let held = self.holders.get_mut(&holder)?;
        held.calls = held.calls.saturating_sub(1);
        if granted && !held.lost && is_awaited {
            held.grants += 1;
            held.may_hold = true;
            held.ranges.set(range);
            held.unwanted.clear(range.start, range.end);
        } else if granted {
            // The caller is dead, or got another reply.
            held.unwanted.set(range);
        }
        Some(held.lost)
    }

    /// Records the reply to the unlock of a whole file, before which the owner had been granted `grants` locks.
    pub fn end_whole_unlock(&mut self, holder: LockOwner, grants: Option<u64>) {
        let is_free = |held: &OwnerLocks| Some(held.grants) == grants && held.calls == 0 && !held.lost;
        if self.holders.get(&holder).is_some_and(is_free) {
            self.holders.remove(&holder);
        }
    }

    /// Records a reclaimed lock: of it, the owner may have unlocked some meanwhile. Returns whether the remote's state is
    /// to be corrected; `None`: the owner has closed the file.
    pub fn reclaimed(&mut self, holder: LockOwner, range: LockInfo) -> Option<bool> {
        let held = self.holders.get_mut(&holder)?;
        if !held.lost {
            held.unwanted.set(range);
        }
        Some(!held.lost)
    }

    /// Takes what the remote is to do about unwanted locks of an owner. Only without a lock call of the owner in flight:
    /// that call may be for the same bytes.
    pub fn take_corrections(&mut self, holder: LockOwner) -> Vec<Correction> {
        let Some(held) = self.holders.get_mut(&holder).filter(|held| held.calls == 0) else {
            return Vec::new();
        };
        let unwanted = std::mem::take(&mut held.unwanted);
        let parts = |late: LockInfo| held.ranges.parts(&late).into_iter().map(move |part| (late.kind, part));
        let parts: Vec<_> = unwanted.iter().flat_map(parts).collect();
        if !held.may_hold && !held.lost {
            self.holders.remove(&holder);
        }
        let corrections = parts.into_iter().filter_map(|(granted, (part, kind))| match (kind, granted) {
            (None, _) => Some(Correction::Release(part)),
            (Some(LockKind::Read), LockKind::Write) => Some(Correction::Weaken(part)),
            (Some(LockKind::Write), LockKind::Read) => Some(Correction::Fail),
            _ => None,
        });
        corrections.collect()
    }

    /// Records a call that weakens a lock.
    pub fn begin_correction(&mut self, holder: LockOwner) {
        if let Some(held) = self.holders.get_mut(&holder) {
            held.calls += 1;
        }
    }
}
