//! One owner's locks on one object.

use nigh_types::{LockInfo, LockKind};
use std::collections::BTreeMap;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Held {
    /// Inclusive.
    end: u64,
    kind: LockKind,
    pid: u32,
}

/// Byte ranges by their first byte. They do not overlap, and adjacent ones are of different kinds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Ranges {
    by_start: BTreeMap<u64, Held>,
    /// The number of write locks among them.
    writes: u64,
    /// Ranges added (true) and removed since the edits were last taken.
    edits: Vec<(LockInfo, bool)>,
}

impl Held {
    fn info(self, start: u64) -> LockInfo {
        let Held { end, kind, pid } = self;
        LockInfo { kind, start, end, pid }
    }
}

impl Ranges {
    /// The number of ranges.
    pub(super) fn count(&self) -> u64 {
        self.by_start.len() as u64
    }

    /// Whether any range is a write lock.
    pub(super) fn has_writes(&self) -> bool {
        self.writes > 0
    }

    /// Whether a change of this range splits a range in two.
    pub(super) fn is_split_by(&self, start: u64, end: u64) -> bool {
        let before = self.by_start.range(..start).next_back();
        before.is_some_and(|(_, held)| held.end > end)
    }

    /// Locks a range in place of earlier locks on it; `end` is inclusive.
    pub(super) fn set(&mut self, start: u64, end: u64, kind: LockKind, pid: u32) {
        self.clear(start, end);
        let (mut from, mut to) = (start, end);
        if let Some((&before, held)) = self.by_start.range(..start).next_back()
            && held.kind == kind
            && held.end.checked_add(1) == Some(start)
        {
            self.remove(before);
            from = before;
        }
        if let Some(next) = end.checked_add(1)
            && let Some(held) = self.by_start.get(&next).copied()
            && held.kind == kind
        {
            self.remove(next);
            to = held.end;
        }
        self.insert(from, Held { end: to, kind, pid });
    }

    /// Unlocks a range; locks on both sides of it stay.
    pub(super) fn clear(&mut self, start: u64, end: u64) {
        let touched: Vec<(u64, Held)> = self.overlapping(start, end).collect();
        for (at, held) in touched {
            self.remove(at);
            if at < start {
                self.insert(at, Held { end: start - 1, ..held });
            }
            if held.end > end {
                self.insert(end + 1, held);
            }
        }
    }

    /// Locks all ranges of `other` in place of earlier locks on them.
    pub(super) fn lay_over(&mut self, other: &Ranges) {
        for (start, Held { end, kind, pid }) in &other.by_start {
            self.set(*start, *end, *kind, *pid);
        }
    }

    /// Unlocks the parts of a range that conflict with another owner's lock.
    pub(super) fn clear_conflicts(&mut self, start: u64, end: u64, kind: LockKind) {
        let touched: Vec<(u64, Held)> = self.overlapping(start, end).collect();
        for (at, held) in touched.into_iter().filter(|(_, held)| held.kind.excludes(kind)) {
            self.clear(at.max(start), held.end.min(end));
        }
    }

    /// Whether all of a range is locked with this kind or a stronger one.
    pub(super) fn covers(&self, start: u64, end: u64, kind: LockKind) -> bool {
        let mut next = Some(start);
        for (at, held) in self.overlapping(start, end) {
            if next.is_none_or(|next| at > next) || (kind == LockKind::Write && held.kind == LockKind::Read) {
                return false;
            }
            next = held.end.checked_add(1);
        }
        next.is_none_or(|next| next > end)
    }

    fn insert(&mut self, start: u64, held: Held) {
        self.writes += u64::from(held.kind == LockKind::Write);
        self.by_start.insert(start, held);
        self.edits.push((held.info(start), true));
    }

    fn remove(&mut self, start: u64) {
        let Some(held) = self.by_start.remove(&start) else { return };
        self.writes -= u64::from(held.kind == LockKind::Write);
        self.edits.push((held.info(start), false));
    }

    /// Takes the edits since the last call, in order.
    pub(super) fn take_edits(&mut self) -> Vec<(LockInfo, bool)> {
        std::mem::take(&mut self.edits)
    }

    /// The first range that conflicts with another owner's lock of this kind.
    pub(super) fn first_conflict(&self, start: u64, end: u64, kind: LockKind) -> Option<LockInfo> {
        self.overlapping(start, end)
            .find(|(_, held)| held.kind.excludes(kind))
            .map(|(start, held)| held.info(start))
    }

    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, Held)> + '_ {
        let before = self.by_start.range(..start).next_back().filter(move |(_, held)| held.end >= start);
        before.into_iter().chain(self.by_start.range(start..=end)).map(|(at, held)| (*at, *held))
    }
}
