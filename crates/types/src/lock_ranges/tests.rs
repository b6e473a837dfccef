//! Lock ranges against a table of single bytes, and by hand.

use super::*;

const READ: LockKind = LockKind::Read;
const WRITE: LockKind = LockKind::Write;
const BYTES: u64 = 24;

type Table = [Option<LockKind>; BYTES as usize];

fn lock(kind: LockKind, start: u64, end: u64) -> LockInfo {
    LockInfo { kind, start, end, pid: 1 }
}

fn held(ranges: &LockRanges) -> Vec<(LockKind, u64, u64)> {
    ranges.iter().map(|lock| (lock.kind, lock.start, lock.end)).collect()
}

fn parts(ranges: &LockRanges, start: u64, end: u64) -> Vec<(u64, u64, Option<LockKind>)> {
    let parts = ranges.parts(&lock(READ, start, end)).into_iter();
    parts.map(|(part, kind)| (part.start, part.end, kind)).collect()
}

#[test]
fn lock_replaces_earlier_locks_on_its_range() {
    let mut ranges = LockRanges::default();
    ranges.set(lock(WRITE, 10, 19));
    ranges.set(lock(READ, 14, 15));
    assert_eq!(held(&ranges), [(WRITE, 10, 13), (READ, 14, 15), (WRITE, 16, 19)]);
    assert_eq!(parts(&ranges, 8, 15), [(8, 9, None), (10, 13, Some(WRITE)), (14, 15, Some(READ))]);
    assert_eq!(parts(&ranges, 19, u64::MAX), [(19, 19, Some(WRITE)), (20, u64::MAX, None)]);
    ranges.set(lock(WRITE, 14, 15));
    assert_eq!(held(&ranges), [(WRITE, 10, 19)]);
    let mut weak = ranges.clone();
    weak.weaken(&lock(WRITE, 0, 99));
    weak.weaken(&lock(READ, 5, 12));
    assert_eq!(held(&weak), [(READ, 10, 12), (WRITE, 13, 19)]);
    ranges.clear(0, 11);
    ranges.clear(19, u64::MAX);
    assert_eq!(held(&ranges), [(WRITE, 12, 18)]);
    ranges.set(lock(WRITE, 0, u64::MAX));
    ranges.clear(u64::MAX, u64::MAX);
    assert_eq!(held(&ranges), [(WRITE, 0, u64::MAX - 1)]);
}

#[test]
fn lock_ranges_are_split_and_joined() {
    let mut ranges = LockRanges::default();
    ranges.set(lock(WRITE, 10, 29));
    assert!(ranges.is_split_by(15, 19) && !ranges.is_split_by(10, 19) && !ranges.is_split_by(15, 29));
    ranges.clear(15, 19);
    assert_eq!(ranges.count(), 2);
    ranges.set(LockInfo { pid: 2, ..lock(WRITE, 15, 19) });
    assert_eq!(ranges.count(), 1, "joined on both sides");
    ranges.set(lock(READ, 12, 13));
    assert_eq!(ranges.count(), 3);
    let found = ranges.first_conflict(0, u64::MAX, WRITE);
    assert_eq!(found, Some(LockInfo { pid: 2, ..lock(WRITE, 10, 11) }));
    ranges.set(lock(READ, 0, u64::MAX));
    assert_eq!(held(&ranges), [(READ, 0, u64::MAX)]);
    ranges.clear(0, u64::MAX);
    assert_eq!(ranges, LockRanges::default());
}

#[test]
fn laid_over_ranges_replace_those_below() {
    let (mut ranges, mut other) = (LockRanges::default(), LockRanges::default());
    ranges.set(lock(READ, 0, 9));
    other.set(lock(WRITE, 2, 3));
    other.set(lock(READ, 10, 12));
    ranges.lay_over(&other);
    assert_eq!(held(&ranges), [(READ, 0, 1), (WRITE, 2, 3), (READ, 4, 12)]);
}

/// Compares what can be learnt of ranges with the table.
fn check(ranges: &LockRanges, table: &Table, (start, end, kind): (u64, u64, LockKind)) {
    let mut said = [None; BYTES as usize];
    let mut last: Option<(LockKind, u64)> = None;
    for one in ranges.iter() {
        assert!(last != Some((one.kind, one.start)), "neighbours are joined: {ranges:?}");
        last = Some((one.kind, one.end + 1));
        said[one.start as usize..=one.end as usize].fill(Some(one.kind));
    }
    assert_eq!(said, *table);
    assert_eq!(ranges.has_writes(), table.contains(&Some(WRITE)));
    assert_eq!((ranges.count(), ranges.is_empty()), (ranges.iter().count() as u64, ranges.count() == 0));
    let bytes = &table[start as usize..=end as usize];
    assert_eq!(ranges.covers(start, end, kind), bytes.iter().all(|held| *held >= Some(kind)));
    let excludes = |held: &Option<LockKind>| held.is_some_and(|held| held.excludes(kind));
    let first = ranges.first_conflict(start, end, kind).map(|lock| lock.start.max(start));
    assert_eq!(first, bytes.iter().position(excludes).map(|at| start + at as u64));
    let mut byte = start;
    for (from, to, kind) in parts(ranges, start, end) {
        assert!(from == byte && to >= from);
        assert!((from..=to).all(|at| table[at as usize] == kind));
        byte = to + 1;
    }
    assert_eq!(byte, end + 1);
}

#[test]
fn lock_ranges_match_a_table_of_single_bytes() {
    let mut seed = 7u64;
    let mut below = |n: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % n
    };
    for _ in 0..200 {
        let (mut ranges, mut table) = (LockRanges::default(), Table::default());
        let mut index = Vec::new();
        for _ in 0..60 {
            let start = below(BYTES);
            let end = start + below(BYTES - start);
            let kind = [READ, WRITE][below(2) as usize];
            let bytes = &mut table[start as usize..=end as usize];
            let edits = match below(5) {
                0 | 1 => {
                    bytes.fill(None);
                    ranges.clear(start, end)
                }
                2 => {
                    let struck = bytes.iter_mut().filter(|held| held.is_some_and(|held| held.excludes(kind)));
                    struck.for_each(|held| *held = None);
                    ranges.clear_conflicts(start, end, kind)
                }
                _ => {
                    bytes.fill(Some(kind));
                    ranges.set(LockInfo { pid: below(2) as u32, ..lock(kind, start, end) })
                }
            };
            for LockEdit { range, is_added } in edits {
                if is_added {
                    index.push(range);
                } else {
                    let at = index.iter().position(|known| *known == range);
                    index.swap_remove(at.expect("a removed range was there"));
                }
            }
            index.sort_by_key(|range| range.start);
            assert_eq!(index, ranges.iter().collect::<Vec<_>>(), "the edits lead to the ranges");
            let from = below(BYTES);
            check(&ranges, &table, (from, from + below(BYTES - from), kind));
        }
    }
}
