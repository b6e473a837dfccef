//! Byte ranges that one owner has locked, for reclaim from a remote that has forgotten them.

use nigh_types::LockKind;

/// Locked bytes, both ends inclusive, with kind and process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Range {
    pub start: u64,
    pub end: u64,
    pub kind: LockKind,
    /// Process id for `F_GETLK`.
    pub pid: u32,
}

/// Sorted ranges without overlap.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Ranges(Vec<Range>);

impl Ranges {
    /// Adds a granted lock, which replaces earlier locks on these bytes.
    pub fn set(&mut self, range: Range) {
        self.clear(range.start, range.end);
        let at = self.0.partition_point(|held| held.start < range.start);
        self.0.insert(at, range);
        self.join(at + 1);
        self.join(at);
    }

    /// Removes the locks on these bytes.
    pub fn clear(&mut self, start: u64, end: u64) {
        let mut left = Vec::with_capacity(self.0.len() + 1);
        for held in self.0.drain(..) {
            if held.end < start || held.start > end {
                left.push(held);
                continue;
            }
            if held.start < start {
                left.push(Range { end: start - 1, ..held });
            }
            if held.end > end {
                left.push(Range { start: end + 1, ..held });
            }
        }
        self.0 = left;
    }

    /// Weakens the locks on these bytes to at most this kind.
    pub fn weaken(&mut self, to: &Range) {
        for (part, kind) in self.parts(to) {
            if (kind, to.kind) == (Some(LockKind::Write), LockKind::Read) {
                self.set(Range { kind: LockKind::Read, ..part });
            }
        }
    }

    /// Splits these bytes into parts, each with the lock on it, if any.
    pub fn parts(&self, range: &Range) -> Vec<(Range, Option<LockKind>)> {
        let mut parts = Vec::new();
        let mut next = Some(range.start);
        let touched = self.0.iter().filter(|held| held.end >= range.start && held.start <= range.end);
        for held in touched {
            let Some(at) = next else { break };
            if held.start > at {
                parts.push((Range { start: at, end: held.start - 1, ..*range }, None));
            }
            let part = Range { start: held.start.max(at), end: held.end.min(range.end), ..*held };
            parts.push((part, Some(held.kind)));
            next = held.end.checked_add(1);
        }
        if let Some(start) = next.filter(|next| *next <= range.end) {
            parts.push((Range { start, ..*range }, None));
        }
        parts
    }

    pub fn iter(&self) -> impl Iterator<Item = Range> + '_ {
        self.0.iter().copied()
    }

    /// Joins two equal neighbours, so that the list is bounded by the locks held.
    fn join(&mut self, at: usize) {
        let Some([before, after]) = at.checked_sub(1).and_then(|first| self.0.get(first..=at)) else {
            return;
        };
        if before.end.checked_add(1) == Some(after.start)
            && (before.kind, before.pid) == (after.kind, after.pid)
        {
            self.0[at - 1].end = after.end;
            self.0.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: LockKind = LockKind::Read;
    const WRITE: LockKind = LockKind::Write;

    fn range(kind: LockKind, start: u64, end: u64) -> Range {
        Range { start, end, kind, pid: 1 }
    }

    fn held(ranges: &Ranges) -> Vec<(LockKind, u64, u64)> {
        ranges.iter().map(|r| (r.kind, r.start, r.end)).collect()
    }

    #[test]
    fn lock_replaces_earlier_locks_on_its_range() {
        let mut ranges = Ranges::default();
        ranges.set(range(WRITE, 10, 19));
        ranges.set(range(READ, 14, 15));
        assert_eq!(held(&ranges), [(WRITE, 10, 13), (READ, 14, 15), (WRITE, 16, 19)]);
        let parts = ranges.parts(&range(READ, 8, 15)).into_iter();
        let parts: Vec<_> = parts.map(|(part, kind)| (part.start, part.end, kind)).collect();
        assert_eq!(parts, [(8, 9, None), (10, 13, Some(WRITE)), (14, 15, Some(READ))]);
        let beyond = ranges.parts(&range(READ, 19, u64::MAX)).into_iter();
        let beyond: Vec<_> = beyond.map(|(part, kind)| (part.start, part.end, kind)).collect();
        assert_eq!(beyond, [(19, 19, Some(WRITE)), (20, u64::MAX, None)]);
        ranges.set(range(WRITE, 14, 15));
        assert_eq!(held(&ranges), [(WRITE, 10, 19)]);
        let mut weak = ranges.clone();
        weak.weaken(&range(WRITE, 0, 99));
        weak.weaken(&range(READ, 5, 12));
        assert_eq!(held(&weak), [(READ, 10, 12), (WRITE, 13, 19)]);
        ranges.clear(0, 11);
        ranges.clear(19, u64::MAX);
        assert_eq!(held(&ranges), [(WRITE, 12, 18)]);
        ranges.set(range(WRITE, 0, u64::MAX));
        ranges.clear(u64::MAX, u64::MAX);
        assert_eq!(held(&ranges), [(WRITE, 0, u64::MAX - 1)]);
    }

    #[test]
    fn lock_ranges_match_a_table_of_single_bytes() {
        const BYTES: u64 = 24;
        let mut seed = 7u64;
        let mut below = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for _ in 0..200 {
            let (mut ranges, mut table) = (Ranges::default(), [None; BYTES as usize]);
            for _ in 0..60 {
                let start = below(BYTES);
                let end = start + below(BYTES - start);
                let kind = [None, Some(READ), Some(WRITE)][below(3) as usize];
                match kind {
                    Some(kind) => ranges.set(range(kind, start, end)),
                    None => ranges.clear(start, end),
                }
                table[start as usize..=end as usize].fill(kind);
                let mut said = [None; BYTES as usize];
                let mut last: Option<(LockKind, u64)> = None;
                for one in ranges.iter() {
                    assert!(last != Some((one.kind, one.start)), "neighbours are joined: {ranges:?}");
                    last = Some((one.kind, one.end + 1));
                    said[one.start as usize..=one.end as usize].fill(Some(one.kind));
                }
                assert_eq!(said, table);
            }
        }
    }
}
