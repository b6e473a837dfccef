//! Locked byte ranges of one owner.

use crate::{LockInfo, LockKind};
use std::collections::BTreeMap;

/// The locks of one owner on one file, as byte ranges. They do not overlap, and adjacent ones are of different kinds: as
/// on Linux, a lock joins its neighbours of the same kind, and the joined range has the process of the newest lock.
/// Arguments `start` and `end` are both inclusive, and `start` is at most `end`; decoders check it.
///
/// Operations take time with the ranges changed or found, and with the logarithm of the number of ranges.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LockRanges {
    /// By the first byte.
    by_start: BTreeMap<u64, Held>,
    /// The number of write locks among them.
    writes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Held {
    /// Inclusive.
    end: u64,
    kind: LockKind,
    pid: u32,
}

/// A range that a change of [`LockRanges`] added or removed, for an index of the ranges of many owners.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockEdit {
    pub range: LockInfo,
    /// Whether the range was added, not removed.
    pub is_added: bool,
}

impl Held {
    fn info(self, start: u64) -> LockInfo {
        let Held { end, kind, pid } = self;
        LockInfo { kind, start, end, pid }
    }
}

impl LockRanges {
    /// The number of ranges.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.by_start.len() as u64
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_start.is_empty()
    }

    /// Whether any range is a write lock.
    #[must_use]
    pub fn has_writes(&self) -> bool {
        self.writes > 0
    }

    /// All ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = LockInfo> + '_ {
        self.by_start.iter().map(|(start, held)| held.info(*start))
    }

    /// Whether a change of this range splits a range in two.
    #[must_use]
    pub fn is_split_by(&self, start: u64, end: u64) -> bool {
        let before = self.by_start.range(..start).next_back();
        before.is_some_and(|(_, held)| held.end > end)
    }

    /// Locks a range in place of earlier locks on it. Returns the edits in order, as all changes do.
    pub fn set(&mut self, lock: LockInfo) -> Vec<LockEdit> {
        let LockInfo { kind, start, end, pid } = lock;
        let mut edits = self.clear(start, end);
        let (mut from, mut to) = (start, end);
        if let Some((&before, held)) = self.by_start.range(..start).next_back()
            && held.kind == kind
            && held.end.checked_add(1) == Some(start)
        {
            edits.extend(self.remove(before));
            from = before;
        }
        if let Some(next) = end.checked_add(1)
            && let Some(held) = self.by_start.get(&next).copied()
            && held.kind == kind
        {
            edits.extend(self.remove(next));
            to = held.end;
        }
        edits.push(self.insert(from, Held { end: to, kind, pid }));
        edits
    }

    /// Unlocks a range; locks on both sides of it stay.
    pub fn clear(&mut self, start: u64, end: u64) -> Vec<LockEdit> {
        let mut edits = Vec::new();
        let touched: Vec<(u64, Held)> = self.overlapping(start, end).collect();
        for (at, held) in touched {
            edits.extend(self.remove(at));
            if at < start {
                edits.push(self.insert(at, Held { end: start - 1, ..held }));
            }
            if held.end > end {
                edits.push(self.insert(end + 1, held));
            }
        }
        edits
    }

    /// Locks all ranges of `other` in place of earlier locks on them.
    pub fn lay_over(&mut self, other: &LockRanges) -> Vec<LockEdit> {
        other.iter().flat_map(|lock| self.set(lock)).collect()
    }

    /// Unlocks the parts of a range that conflict with another owner's lock.
    pub fn clear_conflicts(&mut self, start: u64, end: u64, kind: LockKind) -> Vec<LockEdit> {
        let touched = self.overlapping(start, end).filter(|(_, held)| held.kind.excludes(kind));
        let parts: Vec<_> = touched.map(|(at, held)| (at.max(start), held.end.min(end))).collect();
        parts.into_iter().flat_map(|(start, end)| self.clear(start, end)).collect()
    }

    /// Weakens the locks on these bytes to at most this kind.
    pub fn weaken(&mut self, to: &LockInfo) {
        for (part, kind) in self.parts(to) {
            if (kind, to.kind) == (Some(LockKind::Write), LockKind::Read) {
                self.set(LockInfo { kind: LockKind::Read, ..part });
            }
        }
    }

    /// Splits these bytes into parts, each with the kind of the lock on it, if any.
    #[must_use]
    pub fn parts(&self, range: &LockInfo) -> Vec<(LockInfo, Option<LockKind>)> {
        let mut parts = Vec::new();
        let mut next = Some(range.start);
        for (start, held) in self.overlapping(range.start, range.end) {
            let Some(at) = next else { break };
            if start > at {
                parts.push((LockInfo { start: at, end: start - 1, ..*range }, None));
            }
            let part = LockInfo { start: start.max(at), end: held.end.min(range.end), ..held.info(start) };
            parts.push((part, Some(held.kind)));
            next = held.end.checked_add(1);
        }
        if let Some(start) = next.filter(|next| *next <= range.end) {
            parts.push((LockInfo { start, ..*range }, None));
        }
        parts
    }

    /// Whether all of a range is locked with this kind or a stronger one.
    #[must_use]
    pub fn covers(&self, start: u64, end: u64, kind: LockKind) -> bool {
        let mut next = Some(start);
        for (at, held) in self.overlapping(start, end) {
            if next.is_none_or(|next| at > next) || held.kind < kind {
                return false;
            }
            next = held.end.checked_add(1);
        }
        next.is_none_or(|next| next > end)
    }

    /// The first range that conflicts with another owner's lock of this kind.
    #[must_use]
    pub fn first_conflict(&self, start: u64, end: u64, kind: LockKind) -> Option<LockInfo> {
        self.overlapping(start, end)
            .find(|(_, held)| held.kind.excludes(kind))
            .map(|(start, held)| held.info(start))
    }

    fn insert(&mut self, start: u64, held: Held) -> LockEdit {
        self.writes += u64::from(held.kind == LockKind::Write);
        self.by_start.insert(start, held);
        LockEdit { range: held.info(start), is_added: true }
    }

    fn remove(&mut self, start: u64) -> Option<LockEdit> {
        let held = self.by_start.remove(&start)?;
        self.writes -= u64::from(held.kind == LockKind::Write);
        Some(LockEdit { range: held.info(start), is_added: false })
    }

    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, Held)> + '_ {
        let before = self.by_start.range(..start).next_back().filter(move |(_, held)| held.end >= start);
        before.into_iter().chain(self.by_start.range(start..=end)).map(|(at, held)| (*at, *held))
    }
}

#[cfg(test)]
mod tests;
