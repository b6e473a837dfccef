//! The base of a byte-wise merge: what write-back of several clients into one file needs besides the pages themselves.
//!
//! A kernel writes back whole pages and does not say which bytes were stored through mmap. While no other client has
//! changed the file, the other bytes equal those in the file. After another client's write-back they are older. The
//! server tells them from stores by the values that the file had since that kernel read its pages: a byte that equals
//! one of those was not stored (docs/decisions/0028).

use std::collections::BTreeMap;

/// Size of the pieces of a file: a run of bytes lies within one piece.
const PIECE: u64 = 4096;
/// The most unchanged bytes between two changed ones that are recorded with them: cheaper than another run.
const GAP: usize = 32;
/// Memory cost of a run besides its bytes.
const RUN_COST: u64 = 96;

/// Earlier values of a file's bytes since one client's kernel read its pages, where other clients' write-back has
/// changed them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MergeBase {
    /// By offset, then by a sequence number for runs with equal offsets.
    runs: BTreeMap<(u64, u64), Vec<u8>>,
    next: u64,
    cost: u64,
}

/// Write-back of one range of a file, after the server has applied it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WroteBack<'a> {
    pub offset: u64,
    /// The file's earlier content there, as long as the other slices; zeros behind its end. `None`: the server could
    /// not read it.
    pub before: Option<&'a [u8]>,
    /// The pages as the kernel has them.
    pub pages: &'a [u8],
    /// What the server has written in their place.
    pub written: &'a [u8],
}

impl MergeBase {
    /// Whether pages are written as they are.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Whether no other client has changed any byte of the file.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        self.next == 0
    }

    /// Bytes of memory.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Merges a kernel's write-back of `pages` at `offset` with the file's `current` content, and returns the bytes to
    /// write. Both have one length.
    #[must_use]
    pub fn merge(&self, offset: u64, pages: &[u8], current: &[u8]) -> Vec<u8> {
        let mut merged = pages.to_vec();
        for (at, old) in self.overlapping(offset, pages.len() as u64) {
            let (skip, old) = cut(at, old, offset);
            let there = merged.iter_mut().zip(pages).zip(current).skip(skip);
            for (((merged, page), current), old) in there.zip(old) {
                if page == old {
                    *merged = *current;
                }
            }
        }
        merged
    }

    /// The part of the base that a merge of this range needs.
    #[must_use]
    pub fn part(&self, offset: u64, length: u64) -> MergeBase {
        let mut part = MergeBase::default();
        self.overlapping(offset, length).for_each(|(at, old)| part.push(at, old.to_vec()));
        part.next = self.next;
        part
    }

    /// Notes the earlier values of bytes that another client's write-back changed.
    pub fn note_changed(&mut self, offset: u64, before: &[u8], written: &[u8]) {
        self.push_differing(offset, before, written);
    }

    /// Notes the kernel's own applied write: its pages hold `pages` there, and the file holds `written`.
    pub fn note_own(&mut self, offset: u64, pages: &[u8], written: &[u8]) {
        self.discard_range(offset, pages.len() as u64);
        self.push_differing(offset, pages, written);
    }

    /// Forgets a range in which the kernel's pages are no longer older than the file.
    pub fn discard_range(&mut self, offset: u64, length: u64) {
        let end = offset.saturating_add(length);
        let hit: Vec<(u64, u64)> = self.keys(offset, length).collect();
        for key in hit {
            let Some(old) = self.runs.remove(&key) else { continue };
            self.cost -= RUN_COST + old.len() as u64;
            let (at, run_end) = (key.0, key.0 + old.len() as u64);
            if at < offset {
                self.push(at, old.iter().take(index(offset - at)).copied().collect());
            }
            if run_end > end {
                self.push(end, old.iter().skip(index(end - at)).copied().collect());
            }
        }
    }

    /// Records the bytes of `old` that differ from those of `new`.
    fn push_differing(&mut self, offset: u64, old: &[u8], new: &[u8]) {
        let mut run: Option<(u64, Vec<u8>)> = None;
        let mut same = 0;
        for (at, (old, new)) in (offset..).zip(old.iter().zip(new)) {
            if let Some((begin, bytes)) = &mut run {
                bytes.push(*old);
                same = if old == new { same + 1 } else { 0 };
                if same > GAP || (at + 1).is_multiple_of(PIECE) {
                    bytes.truncate(bytes.len() - same);
                    let (begin, bytes) = (*begin, std::mem::take(bytes));
                    self.push(begin, bytes);
                    (run, same) = (None, 0);
                }
            } else if old != new {
                run = Some((at, vec![*old]));
                if (at + 1).is_multiple_of(PIECE) {
                    run.take().into_iter().for_each(|(begin, bytes)| self.push(begin, bytes));
                }
            }
        }
        if let Some((begin, mut bytes)) = run {
            bytes.truncate(bytes.len() - same);
            self.push(begin, bytes);
        }
    }

    fn push(&mut self, at: u64, bytes: Vec<u8>) {
        let is_known = |(key, old): (&(u64, u64), &Vec<u8>)| key.0 == at && *old == bytes;
        if self.runs.range((at, 0)..=(at, u64::MAX)).any(is_known) {
            return;
        }
        self.cost += RUN_COST + bytes.len() as u64;
        self.next += 1;
        self.runs.insert((at, self.next), bytes);
    }

    fn overlapping(&self, offset: u64, length: u64) -> impl Iterator<Item = (u64, &[u8])> {
        let end = offset.saturating_add(length);
        let from = offset.saturating_sub(PIECE);
        let runs = self.runs.range((from, 0)..(end, 0)).map(|((at, _), old)| (*at, old.as_slice()));
        runs.filter(move |(at, old)| at + old.len() as u64 > offset)
    }

    fn keys(&self, offset: u64, length: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let end = offset.saturating_add(length);
        let from = offset.saturating_sub(PIECE);
        let runs = self.runs.range((from, 0)..(end, 0));
        runs.filter(move |((at, _), old)| at + old.len() as u64 > offset).map(|(key, _)| *key)
    }
}

/// The number of bytes from `offset` to a run's beginning, and the part of the run that lies there.
fn cut(at: u64, old: &[u8], offset: u64) -> (usize, &[u8]) {
    let before = index(offset.saturating_sub(at));
    (index(at.saturating_sub(offset)), old.get(before..).unwrap_or_default())
}

/// A length within one write or one run.
fn index(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn merge_keeps_bytes_stored_by_another_client() {
        let mut base = MergeBase::default();
        assert_eq!(base.merge(0, b"a...", b"...."), b"a...");
        base.note_changed(0, b"....", b"...b");
        assert_eq!(base.merge(0, b"a...", b"...b"), b"a..b");
        assert_eq!(base.merge(0, b"a..c", b"...b"), b"a..c", "both have stored into that byte");
        assert_eq!(base.merge(2, b"..", b".b"), b".b");
        assert_eq!(base.merge(3, b".", b"b"), b"b");
        assert_eq!(base.merge(4, b".", b"x"), b".", "nothing is known of that");
    }

    #[test]
    fn merge_handles_page_read_between_two_changes() {
        let mut base = MergeBase::default();
        base.note_changed(0, b"....", b"x...");
        base.note_changed(0, b"x...", b"y...");
        assert_eq!(base.merge(0, b"...a", b"y..."), b"y..a");
        assert_eq!(base.merge(0, b"x..a", b"y..."), b"y..a");
    }

    #[test]
    fn merge_keeps_store_of_earlier_value_after_own_write_back() {
        let mut base = MergeBase::default();
        base.note_changed(0, b"00", b"07");
        assert_eq!(base.merge(0, b"10", b"07"), b"17");
        base.note_own(0, b"10", b"17");
        assert_eq!(
            base.merge(0, b"00", b"17"),
            b"07",
            "the first byte was stored once more, the second never"
        );
        base.note_own(0, b"00", b"07");
        base.note_own(0, b"07", b"07");
        assert!(base.is_empty());
        assert_eq!(base.cost(), 0);
    }

    #[test]
    fn discarded_range_leaves_rest_of_its_run() {
        let mut base = MergeBase::default();
        base.note_changed(10, b"abcdef", b"ABCDEF");
        base.discard_range(12, 2);
        assert_eq!(base.merge(10, b"abcdef", b"ABCDEF"), b"ABcdEF");
        base.discard_range(0, u64::MAX);
        assert!(base.is_empty());
        assert_eq!(base.cost(), 0);
    }

    #[test]
    fn repeated_identical_change_adds_no_merge_memory() {
        let mut base = MergeBase::default();
        for _ in 0..1000 {
            base.note_changed(0, b"0", b"1");
            base.note_changed(0, b"1", b"0");
        }
        assert_eq!(base.cost(), 2 * (RUN_COST + 1));
    }

    proptest! {
        /// Against a model that keeps all values of each byte. Two pieces, so that runs are cut.
        #[test]
        fn merge_matches_model_of_all_byte_values(
            steps in proptest::collection::vec((0_u8..3, 0_u64..60, proptest::collection::vec(0_u8..3, 1..60)), 1..20),
        ) {
            const AT: u64 = PIECE - 60;
            const LENGTH: usize = 120;
            let (mut base, mut file) = (MergeBase::default(), vec![0_u8; LENGTH]);
            let mut values: Vec<Vec<u8>> = vec![Vec::new(); LENGTH];
            for (what, from, bytes) in steps {
                let begin = usize::try_from(from).unwrap();
                let range = begin..begin + bytes.len();
                let current = file[range.clone()].to_vec();
                if what == 0 {
                    base.note_changed(AT + from, &current, &bytes);
                    for (at, new) in range.clone().zip(&bytes) {
                        if file[at] != *new {
                            values[at].push(file[at]);
                        }
                    }
                    file[range].copy_from_slice(&bytes);
                } else {
                    let merged = base.merge(AT + from, &bytes, &current);
                    for ((at, page), merged) in range.clone().zip(&bytes).zip(&merged) {
                        // Bytes between two that changed may be recorded as well: those that equal the file.
                        let is_old = values[at].contains(page);
                        let wanted = if is_old { file[at] } else { *page };
                        prop_assert_eq!(*merged, wanted);
                    }
                    prop_assert_eq!(&base.part(AT + from, bytes.len() as u64).merge(AT + from, &bytes, &current), &merged);
                    base.note_own(AT + from, &bytes, &merged);
                    for ((at, page), merged) in range.clone().zip(&bytes).zip(&merged) {
                        values[at] = if page == merged { Vec::new() } else { vec![*page] };
                    }
                    file[range].copy_from_slice(&merged);
                }
            }
        }
    }
}
