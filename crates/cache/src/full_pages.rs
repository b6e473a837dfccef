//! Full pages of files: how reads, writes and invalidations change their records (`pages/full.rs`).

use crate::byte_ranges::{PAGE, clip, covers_full_page, pages, pages_overlap, partial_page_ranges};
use crate::cache::Cache;
use crate::calls::{CallKind, PageRange};
use crate::op::{Fh, InvalidationId, KernelInvalidation, Op};
use crate::store::Inode;
use nigh_types::{SetAttr, WriteFlags};

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
