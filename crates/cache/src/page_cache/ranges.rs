//! Ranges of a file that the kernel can drop now, and those that it has locked.

use crate::byte_ranges::{clip, complement, pages, pages_overlap, partial_page_ranges};
use crate::calls::{CallKind, InflightCall, PageRange};
use crate::op::{InvalidationId, Op};
use crate::state::State;
use crate::store::Inode;
use crate::view;
use nigh_types::{OpId, WriteFlags};

/// Records that a page could not be tried: the kernel may keep it in full.
pub(crate) fn note_not_dropped(state: &mut State, ino: u64) {
    state.store.inode_mut(ino).into_iter().for_each(|inode| inode.pages_mut().full_mut().note_filled());
}

/// Returns whether write-backs overlap a part of a file (offset, length) that is to be dropped for a recall, and
/// must be done first: whether any is in progress, and whether there may be stores that the kernel has not sent
/// yet.
pub(crate) fn writeback_overlaps(
    state: &State,
    why: InvalidationId,
    ino: u64,
    part: (u64, u64),
) -> (bool, bool) {
    if !state.kernel.is_recalled(why) {
        return (false, false);
    }
    let is_of_it =
        |pages: Option<PageRange>| pages.is_some_and(|(of, range)| of == ino && pages_overlap(range, part));
    let is_flush = |op: &Op| matches!(op, Op::Write { flags: WriteFlags { write_back: true, .. }, .. });
    let is_out = state.calls.values().any(|f| f.purpose.is_writeback() && is_of_it(f.purpose.pages()))
        || state.calls.queued().any(|(_, op)| is_flush(op) && is_of_it(op.pages()));
    let has_pages =
        |i: &Inode| i.pages().has_data_version() || state.ungranted.versions_in(i.id, part).next().is_some();
    let may_be = state.store.inode(ino).is_some_and(|i| i.opens().is_written() && has_pages(i));
    (is_out, may_be)
}

/// Returns pages that [`crate::Cache::droppable_ranges`] leaves out (offset, length) and the kernel may have in full: those of
/// which local writes bring a part, or all at an offset that the remote chooses. They are to be dropped one by one.
/// A locked page waits for the reply to its write, and need not be waited for.
pub(crate) fn partial_pages(state: &State, ino: u64, (offset, length): (u64, u64)) -> Vec<(u64, u64)> {
    if !state.store.inode(ino).is_some_and(|inode| inode.pages().full().may_exist()) {
        return Vec::new();
    }
    let out = state.calls.awaited();
    let out = out.filter_map(|flight| match flight.purpose {
        CallKind::Write { ino: of, offset, size, writeback: false, append, direct: None } if of == ino => {
            Some(((offset, size), append))
        }
        _ => None,
    });
    let parked = state.calls.queued().filter(|(_, op)| !view::is_direct(state, op));
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

/// Returns queued requests, with the pages of that file that the kernel has locked for each (offset, length).
pub(crate) fn queued_pages(
    state: &State,
    file: u64,
    but_flushes: bool,
) -> impl Iterator<Item = (OpId, (u64, u64))> {
    let parked = state.calls.queued().filter(|(_, op)| !view::is_direct(state, op));
    parked.filter_map(move |(id, op)| Some((id, op.locks_pages(file, but_flushes)?)))
}

/// Returns the parts (offset, length) of a range of a file (length 0: to the end) that the kernel can drop now.
/// Pages of local reads and writes in flight are left out, since dropping them would deadlock; they are dropped
/// right after the replies. Write-back of mmap stores is waited for if a recall is to be acknowledged: the stores
/// must reach the remote before any other client's change.
pub(crate) fn droppable_ranges(
    state: &mut State,
    why: InvalidationId,
    ino: u64,
    (offset, length): (u64, u64),
) -> Vec<(u64, u64)> {
    let busy = locked_ranges(state, why, ino);
    let recalled = state.kernel.is_recalled(why);
    state.calls.drop_pages_of(ino, recalled);
    leave_out_ungranted(state, why, ino, (offset, length));
    if (offset, length) == (0, 0) && state.kernel.drops_all_pages(why, ino) {
        state
            .store
            .inode_mut(ino)
            .into_iter()
            .for_each(|inode| inode.pages_mut().full_mut().note_drop_started(why));
    }
    clip(complement(busy), offset, length)
}

/// Returns whether reads and writes that came after [`crate::Cache::droppable_ranges`] have pages in these ranges locked:
/// dropping them waits for these.
pub(crate) fn blocks_drop(state: &State, why: InvalidationId, ino: u64, dropping: &[(u64, u64)]) -> bool {
    let meets =
        |&range: &(u64, u64)| dropping.iter().any(|part| !clip(vec![*part], range.0, range.1).is_empty());
    locked_ranges(state, why, ino).iter().map(|range| pages(*range)).any(|range| meets(&range))
}

/// Returns the ranges of a file (offset, length) that the kernel has locked for reads and writes: in flight, or
/// queued while the remote was away.
fn locked_ranges(state: &State, why: InvalidationId, ino: u64) -> Vec<(u64, u64)> {
    let recalled = state.kernel.is_recalled(why);
    // A call without a waiter has no page locked.
    let out = state.calls.awaited();
    let out = out.filter_map(|flight| flight.purpose.locks_pages(ino, recalled));
    let parked = queued_pages(state, ino, recalled).map(|(_, range)| range);
    out.chain(parked).filter(|range| range.1 > 0).collect()
}

/// Records an invalidation of a range of a file (length 0: to the end), which leaves out pages that local writes
/// have locked.
fn leave_out_ungranted(state: &mut State, why: InvalidationId, ino: u64, (offset, length): (u64, u64)) {
    if state.ungranted.has_any(ino) {
        let written = written(state, ino, state.kernel.is_recalled(why));
        state.ungranted.leave_out(why, ino, (offset, length), &written);
    }
}

/// Returns the pages that local writes have locked; `but_flushes`: except write-back, for which the invalidation
/// waits.
fn written(state: &State, ino: u64, but_flushes: bool) -> Vec<(u64, u64)> {
    let of_flight = |flight: &InflightCall| match flight.purpose {
        CallKind::Write { .. } => flight.purpose.locks_pages(ino, but_flushes),
        _ => None,
    };
    let of_parked = |op: &Op| match op {
        Op::Write { .. } if !view::is_direct(state, op) => op.locks_pages(ino, but_flushes),
        _ => None,
    };
    let out = state.calls.values().filter_map(of_flight);
    out.chain(state.calls.queued().filter_map(|(_, op)| of_parked(op))).collect()
}
