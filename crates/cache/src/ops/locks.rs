//! File locks: requests and replies. The remote owns the lock table; `open/locks.rs` has what this mount may hold. See
//! docs/decisions/0011-locks.md.

use crate::calls::{CallKind, InflightCall};
use crate::op::{Caller, Fh, LockSpan, Op, OpReply, Output};
use crate::open::LockOwner;
use crate::ops::{aborting, closing, lock_reclaim};
use crate::out::{replies, sending};
use crate::state::State;
use crate::view::paths;
use nigh_types::{Call, Errno, LockInfo, LockKind, OpId, Reply, Response, Time};

/// The last byte that the kernel locks (`OFFSET_MAX`): a lock up to it goes to the end of the file.
const LAST_BYTE: u64 = i64::MAX.cast_unsigned();

#[allow(clippy::too_many_arguments, reason = "the fields of one FUSE request")]
pub(crate) fn set_lock(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    (ino, fh): (u64, Fh),
    span: LockSpan,
    kind: LockKind,
    (pid, wait): (u32, bool),
) -> Option<OpReply> {
    let LockSpan { owner, flock, start, end } = span;
    let holder = LockOwner { ino, flock, owner };
    if state.open.locks.is_lost(holder) {
        return Some(OpReply::Failed(Errno::IO));
    }
    if state.open.files.get(fh).is_none() {
        return Some(OpReply::Failed(Errno::BADF));
    }
    let Some(node) = paths::node_ref(state, ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    state.open.locks.begin_call(holder, fh, flock.then_some(kind));
    if let Some(inode) = state.store.inode_mut(ino).filter(|_| !flock) {
        inode.opens_mut().note_lock_request();
    }
    let range = if flock { (0, u64::MAX) } else { (start, end) };
    let range = LockInfo { start: range.0, end: range.1, kind, pid };
    let purpose = CallKind::Lock { holder, range, wait, cancelled: false };
    let call = Call::Lock { node, owner, flock, kind, start, end, wait, pid, reclaim: false };
    sending::send_for(state, now, op, caller, purpose, call)
}

pub(crate) fn unlock(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
    span: LockSpan,
) -> Option<OpReply> {
    let LockSpan { owner, flock, start, end } = span;
    let holder = LockOwner { ino, flock, owner };
    let Some(grants) = state.open.locks.grants_of(holder) else { return Some(OpReply::Done) };
    if state.open.locks.is_lost(holder) {
        return Some(OpReply::Failed(Errno::IO));
    }
    let whole = flock || start == 0 && end >= LAST_BYTE;
    let purpose = CallKind::Unlock { holder, whole_after: whole.then_some(grants), closing: false };
    let Some(node) = paths::node_ref(state, ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    let all = if flock { (0, u64::MAX) } else { (start, end) };
    state.open.locks.unlock(holder, all);
    sending::send_for(state, now, op, caller, purpose, Call::Unlock { node, owner, flock, start, end })
}

pub(crate) fn test_lock(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
    span: LockSpan,
    kind: LockKind,
) -> Option<OpReply> {
    let LockSpan { owner, flock, start, end } = span;
    if state.open.locks.is_lost(LockOwner { ino, flock, owner }) {
        return Some(OpReply::Failed(Errno::IO));
    }
    let Some(node) = paths::node_ref(state, ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    let call = Call::GetLock { node, owner, flock, kind, start, end };
    sending::send_for(state, now, op, caller, CallKind::TestLock, call)
}

/// Releases a process's fcntl(2) locks on a file when the process closes one of its descriptors. The close waits
/// for the release, so that no other process finds the locks after it.
pub(crate) fn flush(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
    owner: u64,
) -> Option<OpReply> {
    let holder = LockOwner { ino, flock: false, owner };
    match state.open.locks.close(holder).then(|| closing::release_locks(state, now, holder)).flatten() {
        // The call goes out in any case; only stale mode does not wait for the reply.
        Some(call) if !state.answers_stale() => {
            replies::wait(state, op, caller, call, crate::calls::ReplyKind::Reply, false)
        }
        _ => Some(OpReply::Done),
    }
}

pub(crate) fn on_lock_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    response: &Response,
) -> OpReply {
    let CallKind::Lock { holder, range, cancelled, .. } = flight.purpose else {
        return OpReply::Failed(Errno::PROTO);
    };
    let granted = response.result == Ok(Reply::Done);
    let known = state.open.locks.end_call(holder, range, granted, !flight.waiters.is_empty());
    if known.is_some() {
        lock_reclaim::correct_remote(state, now, holder);
    }
    let lost = known == Some(true);
    match &response.result {
        _ if lost => OpReply::Failed(Errno::IO),
        Ok(Reply::Done) => OpReply::Done,
        Ok(_) => OpReply::Failed(Errno::PROTO),
        Err(_) if cancelled => OpReply::Failed(Errno::INTR),
        Err(errno) => OpReply::Failed(*errno),
    }
}

pub(crate) fn on_unlock_reply(state: &mut State, flight: &InflightCall, response: &Response) -> OpReply {
    let CallKind::Unlock { holder, whole_after, closing } = flight.purpose else {
        return OpReply::Failed(Errno::PROTO);
    };
    match response.result {
        Ok(Reply::Done) => {
            state.open.locks.end_whole_unlock(holder, whole_after);
            OpReply::Done
        }
        // A close leaves the owner without locks, whatever the reply.
        _ if closing => OpReply::Done,
        Ok(_) => OpReply::Failed(Errno::PROTO),
        Err(errno) => OpReply::Failed(errno),
    }
}

/// Ends a blocking lock request on a signal, by cancelling the call. The reply to the call answers the request; it
/// may say that the lock was just granted.
pub(crate) fn interrupt_lock(state: &mut State, op: OpId) {
    if let Some(Op::SetLock { wait: true, .. }) = state.calls.queued_op(op) {
        state.calls.remove_queued(op);
        return replies::reply(state, op, OpReply::Failed(Errno::INTR));
    }
    let Some(call) = state.calls.waiter(op).map(|waiting| waiting.call) else { return };
    let Some(flight) = state.calls.inflight_mut(call) else { return };
    if let CallKind::Lock { wait: true, cancelled, .. } = &mut flight.purpose
        && !std::mem::replace(cancelled, true)
    {
        state.out.push_back(Output::Cancel(call));
        if !state.session.is_active() {
            // The reply may be long in coming. A lock that is granted after all is released.
            aborting::abort(state, op, Errno::INTR);
        }
    }
}

/// Returns whether a request waits for a lock of another owner, at a remote that replies.
pub(crate) fn waits_for_lock(state: &State, op: OpId) -> bool {
    let flight = state.calls.waiter(op).and_then(|waiting| state.calls.inflight(waiting.call));
    let waits = |flight: &InflightCall| matches!(flight.purpose, CallKind::Lock { wait: true, .. });
    state.session.is_active() && flight.is_some_and(waits)
}

/// Ends the lock waits that a signal has cancelled: the remote is away.
pub(crate) fn end_signalled_waits(state: &mut State) {
    let signalled = |flight: &&InflightCall| matches!(flight.purpose, CallKind::Lock { cancelled: true, .. });
    let ops: Vec<OpId> = state.calls.values().filter(signalled).flat_map(|f| f.waiters.clone()).collect();
    ops.into_iter().for_each(|op| aborting::abort(state, op, Errno::INTR));
}

#[cfg(test)]
mod tests;
