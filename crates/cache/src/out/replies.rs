//! Replies to requests that waited, and waits.

use crate::calls::{ReplyKind, Waiter};
use crate::op::{Caller, Op, OpReply, Output};
use crate::state::State;
use nigh_types::{CallId, Errno, OpId, Time};

/// Replies to a request that waited: the only place that does.
pub(crate) fn reply(state: &mut State, op: OpId, answer: OpReply) {
    state.calls.end_deadline(op);
    state.out.push_back(Output::Answer { op, answer });
}

/// Moves the waiters of an older call to a newer call.
pub(crate) fn wait_for_newer(state: &mut State, older: CallId, newer: CallId) {
    if older == newer || !state.calls.contains(newer) {
        return;
    }
    let Some(flight) = state.calls.inflight_mut(older) else { return };
    let waiters = std::mem::take(&mut flight.waiters);
    state.calls.move_waiters(waiters, newer);
}

/// Makes a request wait for a call.
pub(crate) fn wait(
    state: &mut State,
    op: OpId,
    caller: Caller,
    call: CallId,
    want: ReplyKind,
    joined: bool,
) -> Option<OpReply> {
    if state.answers_stale() {
        return Some(OpReply::Failed(Errno::IO));
    }
    state.counters.misses += 1;
    let waiter = Waiter { call, caller, want, joined, reply_may_predate: joined, open_files: [None; 2] };
    state.calls.wait(op, waiter);
    None
}

/// Replies to a waiting request.
pub(crate) fn reply_to(state: &mut State, op: OpId, answer: OpReply) {
    if let Some(waiting) = state.calls.remove_waiter(op) {
        state.counters.waits += 1;
        state.counters.joins += u64::from(waiting.joined);
        reply(state, op, answer);
    }
}

pub(crate) fn reply_all(state: &mut State, waiters: &[OpId], answer: &OpReply) {
    for &op in waiters {
        reply_to(state, op, answer.clone());
    }
}

/// Makes a listing wait for the commit of a suspended name.
pub(crate) fn wait_for_commit(
    state: &mut State,
    now: Time,
    id: OpId,
    caller: Caller,
    dir: u64,
    op: Op,
) -> Option<OpReply> {
    state.counters.misses += 1;
    state.store.suspended.wait(now, id, caller, dir, op);
    None
}
