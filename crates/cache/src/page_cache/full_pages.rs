//! Full pages of files: how reads, writes and invalidations change their records (`pages/full.rs`).

use crate::byte_ranges::{PAGE, covers_full_page};
use crate::calls::CallKind;
use crate::op::{Fh, KernelInvalidation, Op};
use crate::out::invalidate;
use crate::state::State;
use crate::view;
use nigh_types::SetAttr;

/// Records a write that begins: the kernel has its full pages from now on, and again after the reply.
pub(crate) fn note_write_started(state: &mut State, op: &Op) {
    if let Op::Write { ino, offset, data, .. } = op
        && covers_full_page((*offset, data.len() as u64))
        && !view::is_direct(state, op)
    {
        state.store.inode_mut(*ino).into_iter().for_each(|inode| inode.pages_mut().full_mut().note_filled());
    }
}

/// Records the reply to a write.
pub(crate) fn note_write_reply(state: &mut State, purpose: &CallKind, is_done: bool) {
    let CallKind::Write { ino, offset, size, direct, .. } = *purpose else { return };
    let inode = state.store.inode_mut(ino).filter(|_| direct.is_none());
    inode
        .into_iter()
        .for_each(|inode| inode.pages_mut().full_mut().note_reply(covers_full_page((offset, size))));
    if let Some(fh) = direct.filter(|_| is_done) {
        state.open.files.note_unfinished_write(fh, None);
    }
}

/// Handles a write past the page cache, at the end of file that the kernel knows. The kernel has dropped the pages
/// there, but a concurrent read may have filled some again before this request came; reads from now on wait.
pub(crate) fn on_direct_append(state: &mut State, ino: u64, fh: Fh, offset: u64) {
    state.open.files.note_unfinished_write(fh, Some(offset));
    let has_whole = state.store.inode(ino).is_some_and(|inode| inode.pages().full().may_exist());
    if has_whole && state.kernel.can_notify() {
        invalidate::invalidate(
            state,
            vec![KernelInvalidation::Data { ino, offset: offset / PAGE * PAGE, length: 0 }],
            None,
        );
    }
}

/// Returns whether a truncation undoes a failed write past the page cache that was to extend the file. The kernel
/// truncates to the end that it knew (`fuse_direct_IO`, for `io_submit` and the like), which may be before data
/// that other clients have appended.
pub(crate) fn is_failed_append_rollback(state: &State, fh: Option<Fh>, set: &SetAttr) -> bool {
    let file = fh.and_then(|fh| state.open.files.get(fh));
    set.size.is_some()
        && *set == SetAttr { size: set.size, kill_suidgid: set.kill_suidgid, ..SetAttr::default() }
        && file.is_some_and(|file| file.direct && file.unfinished_write_at == set.size)
}
