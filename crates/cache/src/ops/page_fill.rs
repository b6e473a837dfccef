//! Small files that are stored in the kernel's page cache before the reply that opens them (docs/decisions/0043-contents.md).
//!
//! A reader then sends no READ. It sends no GETATTR after it either: at each READ the kernel drops its copy of atime
//! (`fuse_invalidate_atime`), which fstat asks for. Stored are only files whose bytes are all in memory, and only while
//! the kernel has no page of them: the file is not open, so no request holds a page locked for which a store would wait.

use crate::op::{Fh, OpReply, Output};
use crate::ops::content_reads;
use crate::ops::file_prefetch::{self, FileRead};
use crate::state::State;
use crate::store::Inode;
use nigh_types::Time;

/// Largest file that is stored, in bytes: of a larger one, more would count as read than a reader of its first bytes
/// has the kernel ask for.
const MOST_BYTES: u64 = 32 << 10;

/// Stores a file of `size` bytes that a caller has just opened to read. It counts as read to its end. Returns whether it
/// is stored: then the kernel must keep its pages at this open.
pub(crate) fn fill(state: &mut State, now: Time, (ino, fh): (u64, Fh), size: u64) -> bool {
    let may_store = state.config.stores_files && state.kernel.can_notify() && state.contents.may_store();
    let Some(whole) = u32::try_from(size).ok().filter(|_| is_small(size) && may_store) else { return false };
    if !has_whole(state, ino, size) || !is_without_pages(state, ino, fh) {
        return false;
    }
    let Some(OpReply::Data(data)) = content_reads::answer(state, now, (ino, fh), (0, whole)) else {
        return false;
    };
    if data.len() as u64 != size {
        return false;
    }
    state.counters.contents_stored += size;
    state.contents.note_stored(size);
    state.out.push_back(Output::Store { ino, data });
    let read = FileRead { ino, fh, offset: 0, size: whole, is_hit: true, is_queued: false };
    file_prefetch::note_read(state, now, read);
    true
}

/// Records a read of the kernel: callers that open small files read them, too.
pub(crate) fn note_read(state: &mut State, offset: u64, answer: Option<&OpReply>) {
    if let Some(OpReply::Data(data)) = answer
        && offset == 0
        && is_small(data.len() as u64)
    {
        state.contents.note_small_read();
    }
}

fn is_small(size: u64) -> bool {
    (1..=MOST_BYTES).contains(&size)
}

/// Returns whether all bytes of a file are in memory, under a grant that is recalled.
fn has_whole(state: &State, ino: u64, size: u64) -> bool {
    let is_granted = state.contents.tag(ino).is_some_and(|tag| tag.held.recallable);
    is_granted && state.contents.gaps(ino, 0..size) == (Vec::new(), false)
}

/// Returns whether the kernel has no page of a file, and will have none before the reply to this open.
fn is_without_pages(state: &State, ino: u64, fh: Fh) -> bool {
    let is_direct = state.open.files.get(fh).is_none_or(|file| file.access.direct);
    let is_only = |inode: &Inode| inode.opens().count() == 1 && inode.pages().full().is_none();
    !is_direct && state.store.inode(ino).is_some_and(is_only) && !state.kernel.is_dropping_pages(ino)
}
