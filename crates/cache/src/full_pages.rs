//! Tracker of files of which the kernel may have full pages, for local writes of partial pages.
//!
//! If the kernel has a full page, it does not keep the page locked until the reply to a write of a part
//! (`fuse_fill_write_pages`). The rest of the page would hide remote changes, so an invalidation must drop it. A page
//! that the kernel has not in full stays locked, and is read anew after the reply; trying to drop it is in vain and
//! takes time. So the cache tracks for each file whether the kernel may have full pages: reads and writes of full pages
//! bring some, until all are dropped.

use crate::byte_ranges::{PAGE, clip, pages, pages_overlap};
use crate::cache::Cache;
use crate::calls::CallKind;
use crate::kernel_locks::PageRange;
use crate::op::{Fh, InvalidationId, KernelInvalidation, Op};
use crate::store::Inode;
use nigh_types::{SetAttr, WriteFlags};

/// Count of full pages that the kernel got and dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FullPageTracker {
    /// Number of times the kernel got some.
    filled: u64,
    /// Of these, the number of which none is left.
    dropped: u64,
    /// Invalidation of all pages that is running, with the value of `made` when it began.
    in_progress: Option<(InvalidationId, u64)>,
}

impl FullPageTracker {
    pub const fn none() -> FullPageTracker {
        FullPageTracker { filled: 0, dropped: 0, in_progress: None }
    }

    /// Returns whether there are none, and no invalidation of all pages is running.
    pub fn is_none(self) -> bool {
        !self.may_exist() && self.in_progress.is_none()
    }

    /// Records the begin or the reply of a read or a full-page write.
    pub fn note_filled(&mut self) {
        self.filled += 1;
    }

    /// Records a reply to a write, of full pages or parts: the running invalidation may have left out its parts.
    fn note_reply(&mut self, whole: bool) {
        self.filled += u64::from(whole || self.in_progress.is_some());
    }

    pub fn note_drop_started(&mut self, id: InvalidationId) {
        self.in_progress = Some((id, self.filled));
    }

    pub fn note_drop_done(&mut self, id: InvalidationId) {
        if let Some((_, made)) = self.in_progress.take_if(|(told, _)| *told == id) {
            self.dropped = made;
        }
    }

    fn may_exist(self) -> bool {
        self.filled > self.dropped
    }
}

impl Cache {
    /// Records a write that begins: the kernel has its full pages from now on, and again after the reply.
    pub(crate) fn note_write_started(&mut self, op: &Op) {
        if let Op::Write { ino, offset, data, .. } = op
            && covers_full_page((*offset, data.len() as u64))
            && !self.is_direct(op)
        {
            self.store.inode_mut(*ino).into_iter().for_each(|inode| inode.ext_mut().whole.note_filled());
        }
    }

    /// Records the reply to a write.
    pub(crate) fn note_write_reply(&mut self, purpose: &CallKind, is_done: bool) {
        let CallKind::Write { ino, offset, size, direct, .. } = *purpose else { return };
        let inode = self.store.inode_mut(ino).filter(|_| direct.is_none());
        inode
            .into_iter()
            .for_each(|inode| inode.ext_mut().whole.note_reply(covers_full_page((offset, size))));
        if let Some(fh) = direct.filter(|_| is_done) {
            self.open.files.note_unfinished_write(fh, None);
        }
    }

    /// Records that a page could not be tried: the kernel may keep it in full.
    pub fn note_not_dropped(&mut self, ino: u64) {
        self.store.inode_mut(ino).into_iter().for_each(|inode| inode.ext_mut().whole.note_filled());
    }

    /// Returns whether write-backs overlap a part of a file (offset, length) that is to be dropped for a recall, and
    /// must be done first: whether any is in progress, and whether there may be stores that the kernel has not sent
    /// yet.
    #[must_use]
    pub fn writeback_overlaps(&self, why: InvalidationId, ino: u64, part: (u64, u64)) -> (bool, bool) {
        if !self.kernel.is_recalled(why) {
            return (false, false);
        }
        let is_of_it = |pages: Option<PageRange>| {
            pages.is_some_and(|(of, range)| of == ino && pages_overlap(range, part))
        };
        let is_flush = |op: &Op| matches!(op, Op::Write { flags: WriteFlags { write_back: true, .. }, .. });
        let is_out = self.calls.values().any(|f| f.purpose.is_writeback() && is_of_it(f.purpose.pages()))
            || self.calls.queued().any(|(_, op)| is_flush(op) && is_of_it(op.pages()));
        let has_pages = |i: &Inode| {
            i.base.is_some() || i.old.is_some() || self.ungranted.versions_in(i.id, part).next().is_some()
        };
        let may_be = self.store.inode(ino).is_some_and(|i| i.writers > 0 && has_pages(i));
        (is_out, may_be)
    }

    /// Returns whether a request bypasses the kernel's page cache. (Reads may still be those of an mmap.)
    pub(crate) fn is_direct(&self, op: &Op) -> bool {
        match op {
            Op::Write { fh, flags: WriteFlags { write_back: false, .. }, .. } => {
                self.open.files.get(*fh).is_some_and(|file| file.direct)
            }
            _ => false,
        }
    }

    /// Handles a write past the page cache, at the end of file that the kernel knows. The kernel has dropped the pages
    /// there, but a concurrent read may have filled some again before this request came; reads from now on wait.
    pub(crate) fn on_direct_append(&mut self, ino: u64, fh: Fh, offset: u64) {
        self.open.files.note_unfinished_write(fh, Some(offset));
        let has_whole = self.store.inode(ino).is_some_and(|inode| inode.whole.may_exist());
        if has_whole && self.kernel.can_notify() {
            self.invalidate(
                vec![KernelInvalidation::Data { ino, offset: offset / PAGE * PAGE, length: 0 }],
                None,
            );
        }
    }

    /// Returns whether a truncation undoes a failed write past the page cache that was to extend the file. The kernel
    /// truncates to the end that it knew (`fuse_direct_IO`, for `io_submit` and the like), which may be before data
    /// that other clients have appended.
    pub(crate) fn is_failed_append_rollback(&self, fh: Option<Fh>, set: &SetAttr) -> bool {
        let file = fh.and_then(|fh| self.open.files.get(fh));
        set.size.is_some()
            && *set == SetAttr { size: set.size, kill_suidgid: set.kill_suidgid, ..SetAttr::default() }
            && file.is_some_and(|file| file.direct && file.unfinished_write_at == set.size)
    }

    /// Returns pages that [`Cache::droppable_ranges`] leaves out (offset, length) and the kernel may have in full: those of
    /// which local writes bring a part, or all at an offset that the remote chooses. They are to be dropped one by one.
    /// A locked page waits for the reply to its write, and need not be waited for.
    #[must_use]
    pub fn partial_pages(&self, ino: u64, (offset, length): (u64, u64)) -> Vec<(u64, u64)> {
        if !self.store.inode(ino).is_some_and(|inode| inode.whole.may_exist()) {
            return Vec::new();
        }
        let out = self.calls.awaited();
        let out = out.filter_map(|flight| match flight.purpose {
            CallKind::Write { ino: of, offset, size, writeback: false, append, direct: None }
                if of == ino =>
            {
                Some(((offset, size), append))
            }
            _ => None,
        });
        let parked = self.calls.queued().filter(|(_, op)| !self.is_direct(op));
        let parked = parked.filter_map(|(_, op)| match op {
            Op::Write { ino: of, offset, data, flags, .. } if *of == ino && !flags.write_back => {
                Some(((*offset, data.len() as u64), flags.append))
            }
            _ => None,
        });
        let writes = out.chain(parked).filter(|((_, size), _)| *size > 0);
        let parts = writes
            .flat_map(|(range, append)| if append { vec![pages(range)] } else { partial_page_ranges(range) });
        clip(parts.collect(), offset, length)
    }
}

/// Returns whether a range covers a page from its beginning to its end.
fn covers_full_page((offset, length): (u64, u64)) -> bool {
    let end = offset.saturating_add(length);
    offset.checked_next_multiple_of(PAGE).is_some_and(|at| at.saturating_add(PAGE) <= end)
}

/// Returns the pages that a range covers in part.
fn partial_page_ranges((offset, length): (u64, u64)) -> Vec<(u64, u64)> {
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

    #[test]
    fn read_during_a_full_invalidation_may_leave_full_pages() {
        let mut whole = FullPageTracker::none();
        assert!(!whole.may_exist());
        whole.note_filled();
        whole.note_drop_started(InvalidationId(1));
        whole.note_drop_done(InvalidationId(2));
        assert!(whole.may_exist(), "that was another one");
        whole.note_drop_done(InvalidationId(1));
        assert!(!whole.may_exist());
        whole.note_filled();
        whole.note_drop_started(InvalidationId(3));
        whole.note_filled();
        whole.note_drop_done(InvalidationId(3));
        assert!(whole.may_exist());
        whole.note_drop_started(InvalidationId(4));
        whole.note_reply(false);
        whole.note_drop_done(InvalidationId(4));
        assert!(whole.may_exist(), "of what was being written a part may have been left out");
        whole.note_drop_started(InvalidationId(5));
        whole.note_drop_done(InvalidationId(5));
        whole.note_reply(false);
        assert!(!whole.may_exist());
        whole.note_reply(true);
        assert!(whole.may_exist());
    }
}
