//! Requests that begin later or once more.

use crate::calls::{CallKind, InflightCall};
use crate::op::{Caller, Fh, Op, OpReply};
use crate::ops::begin;
use crate::out::{page_drops, replies};
use crate::state::State;
use nigh_types::{Errno, OpId, Time};

/// Returns the errno of requests that stale facts cannot answer.
fn refused_while_stale(op: &Op) -> Option<Errno> {
    match op {
        Op::SetAttr { .. }
        | Op::Symlink { .. }
        | Op::Mknod { .. }
        | Op::Mkdir { .. }
        | Op::Unlink { .. }
        | Op::Rmdir { .. }
        | Op::Rename { .. }
        | Op::Link { .. }
        | Op::Create { .. }
        | Op::Tmpfile { .. }
        | Op::Write { .. }
        | Op::SetXattr { .. }
        | Op::RemoveXattr { .. }
        | Op::Fallocate { .. }
        | Op::CopyRange { .. } => Some(Errno::ROFS),
        Op::Open { access, .. } if access.write || access.truncate => Some(Errno::ROFS),
        Op::SetLock { .. } | Op::Unlock { .. } | Op::TestLock { .. } | Op::Fsync { .. } => Some(Errno::IO),
        _ => None,
    }
}

/// Starts the reads that waited for the reply to a write.
pub(crate) fn start_queued_reads(state: &mut State, now: Time, ino: u64) {
    for (op, (caller, what)) in state.calls.take_queued_reads(ino) {
        restart_request(state, now, op, caller, what, true);
        state.calls.take_asking(op);
    }
}

/// Starts the reads that waited for contents to come, and others of the file.
pub(crate) fn start_reads_behind_read_ahead(state: &mut State, now: Time, ino: u64) {
    for (op, (caller, what)) in state.calls.take_queued_reads(ino) {
        // The bytes are valid when the reply is composed. But stale pages end only after each request that had pages
        // locked while they were dropped (`page_cache/writeback.rs`).
        let has_stale = state.store.inode(ino).is_some_and(|inode| inode.pages().has_stale());
        let is_answered = restart_request(state, now, op, caller, what, has_stale);
        let asked = state.calls.take_asking(op);
        if is_answered {
            state.counters.misses += 1;
            state.counters.waits += 1;
            state.counters.joins += u64::from(!asked);
        }
    }
}

/// Restarts reads whose reply was composed before a write that is done or in flight.
pub(crate) fn resend_reads(
    state: &mut State,
    now: Time,
    ops: &[OpId],
    fh: Fh,
    (ino, offset, size): (u64, u64, u32),
) {
    for op in ops {
        if let Some(waiting) = state.calls.remove_waiter(*op) {
            let read = Op::Read { ino, fh, offset, size };
            restart_request(state, now, *op, waiting.caller, read, true);
        }
    }
}

/// Restarts a request. `drops_pages`: an invalidation may have left out its pages meanwhile, so they are dropped after the
/// reply. Returns whether it is answered.
fn restart_request(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    what: Op,
    drops_pages: bool,
) -> bool {
    let pages = what.pages();
    if let Some(answer) = begin::start(state, now, op, caller, what) {
        replies::reply(state, op, answer);
        page_drops::drop_after_reply(state, &[op], pages.filter(|_| drops_pages));
        return true;
    }
    if drops_pages
        && let Some(waiting) = state.calls.waiter(op)
        && let Some(flight) = state.calls.inflight_mut(waiting.call)
    {
        flight.drop_data = true;
    }
    false
}

/// Answers the waiting requests with the present attributes.
pub(crate) fn answer_unchanged(state: &mut State, now: Time, flight: &InflightCall) {
    let CallKind::Change { ino, .. } = flight.purpose else { return };
    for op in &flight.waiters {
        if let Some(waiting) = state.calls.remove_waiter(*op)
            && let Some(answer) = begin::start(state, now, *op, waiting.caller, Op::GetAttr { ino })
        {
            replies::reply(state, *op, answer);
        }
    }
}

/// Handles a request without a session.
pub(crate) fn start_disconnected(
    state: &mut State,
    now: Time,
    id: OpId,
    caller: Caller,
    op: Op,
) -> Option<OpReply> {
    if !state.answers_stale() {
        state.calls.queue(id, caller, op);
        return None;
    }
    match refused_while_stale(&op) {
        Some(errno) => Some(OpReply::Failed(errno)),
        None => begin::start(state, now, id, caller, op),
    }
}

pub(crate) fn resume_listings(state: &mut State, now: Time, dir: u64) {
    for (id, caller, op) in state.store.suspended.take_waiting(dir) {
        if let Some(answer) = begin::start(state, now, id, caller, op) {
            state.counters.waits += 1;
            replies::reply(state, id, answer);
        }
    }
    // A listing that waits again keeps its start time.
    state.store.suspended.forget_if_idle(dir);
}
