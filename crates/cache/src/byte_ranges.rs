//! Ranges of a file, and the pages in them.

/// Returns the parts of `ranges` that lie in (offset, length); a length of 0: to the end.
pub(crate) fn clip(ranges: Vec<(u64, u64)>, offset: u64, length: u64) -> Vec<(u64, u64)> {
    let end_of =
        |(offset, length): (u64, u64)| if length == 0 { u64::MAX } else { offset.saturating_add(length) };
    let end = end_of((offset, length));
    let cut = ranges.into_iter().map(|range| (range.0.max(offset), end_of(range).min(end)));
    cut.filter(|(from, to)| from < to)
        .map(|(from, to)| (from, if to == u64::MAX { 0 } else { to - from }))
        .collect()
}

/// Size of a page: the kernel locks whole pages.
pub(crate) const PAGE: u64 = 4096;

/// Returns whether two ranges of a file have a page in common.
pub(crate) fn pages_overlap(one: (u64, u64), other: (u64, u64)) -> bool {
    let ((from, length), (begin, size)) = (pages(one), pages(other));
    from < begin.saturating_add(size) && begin < from.saturating_add(length)
}

/// Returns the whole pages of a range.
pub(crate) fn pages((offset, length): (u64, u64)) -> (u64, u64) {
    let end = offset.saturating_add(length).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
    let offset = offset / PAGE * PAGE;
    (offset, end - offset)
}

/// Returns the ranges (offset, length; 0 = to the end) of a file without the pages of `busy`.
pub(crate) fn complement(mut busy: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    busy.sort_unstable();
    let mut gaps = Vec::new();
    let mut at = 0u64;
    for (offset, length) in busy.into_iter().map(pages) {
        if offset > at {
            gaps.push((at, offset - at));
        }
        at = at.max(offset.saturating_add(length));
    }
    if at < i64::MAX.cast_unsigned() {
        gaps.push((at, 0));
    }
    gaps
}

/// Returns whether a range covers a page from its beginning to its end.
pub(crate) fn covers_full_page((offset, length): (u64, u64)) -> bool {
    let end = offset.saturating_add(length);
    offset.checked_next_multiple_of(PAGE).is_some_and(|at| at.saturating_add(PAGE) <= end)
}

/// Returns the pages that a range covers in part.
pub(crate) fn partial_page_ranges((offset, length): (u64, u64)) -> Vec<(u64, u64)> {
    let end = offset.saturating_add(length);
    let mut ends = vec![offset / PAGE * PAGE, end / PAGE * PAGE];
    ends.dedup();
    let is_cut = |at: &u64| *at < offset || end < at.saturating_add(PAGE);
    ends.into_iter().filter(|at| *at < end).filter(is_cut).map(|at| (at, PAGE)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn droppable_ranges_leave_out_pages_in_flight() {
        assert_eq!(complement(vec![]), [(0, 0)]);
        assert_eq!(complement(vec![(0, 10)]), [(PAGE, 0)]);
        assert_eq!(complement(vec![(PAGE - 1, 2)]), [(2 * PAGE, 0)]);
        let busy = vec![(8 * PAGE, 10), (2 * PAGE, PAGE), (2 * PAGE + 7, 2 * PAGE)];
        assert_eq!(complement(busy), [(0, 2 * PAGE), (5 * PAGE, 3 * PAGE), (9 * PAGE, 0)]);
        assert_eq!(complement(vec![(0, u64::MAX)]), []);
        assert_eq!(clip(complement(vec![(0, 10)]), 0, 0), [(PAGE, 0)]);
        assert_eq!(clip(complement(vec![(0, 10)]), 0, PAGE), []);
        assert_eq!(
            clip(complement(vec![(PAGE, 10)]), 10, 3 * PAGE),
            [(10, PAGE - 10), (2 * PAGE, PAGE + 10)]
        );
    }

    #[test]
    fn partial_page_ranges_are_pages_covered_in_part() {
        assert!(
            covers_full_page((0, PAGE))
                && covers_full_page((7, 2 * PAGE))
                && !covers_full_page((7, 2 * PAGE - 8))
        );
        assert!(!covers_full_page((u64::MAX - 7, 10)));
        assert_eq!(partial_page_ranges((0, PAGE)), []);
        assert_eq!(partial_page_ranges((PAGE, 3 * PAGE)), []);
        assert_eq!(partial_page_ranges((PAGE, 10)), [(PAGE, PAGE)]);
        assert_eq!(partial_page_ranges((PAGE + 7, 10)), [(PAGE, PAGE)]);
        assert_eq!(partial_page_ranges((PAGE + 7, PAGE - 7)), [(PAGE, PAGE)]);
        assert_eq!(partial_page_ranges((7, 2 * PAGE)), [(0, PAGE), (2 * PAGE, PAGE)]);
    }
}
