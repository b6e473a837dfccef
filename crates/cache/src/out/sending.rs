//! Calls: how they are sent and sent again.

use crate::calls::{CallKind, InflightCall, ReplyKind};
use crate::op::{Caller, OpReply, Output};
use crate::out::{pins, replies};
use crate::session::SessionState;
use crate::state::State;
use crate::view::{self, paths, victims};
use nigh_types::{Call, CallId, Errno, Handle, NodeRef, OpId, Time};

/// Returns the handles that a call names.
fn handles_of(call: &Call) -> [Option<Handle>; 2] {
    match call {
        Call::Read { handle, .. }
        | Call::Write { handle, .. }
        | Call::Seek { handle, .. }
        | Call::SetAttr { handle, .. }
        | Call::Fallocate { handle, .. }
        | Call::Fsync { handle, .. } => [*handle, None],
        Call::CopyRange { from_handle, to_handle, .. } => [*from_handle, *to_handle],
        _ => [None, None],
    }
}

/// Releases a handle; nothing waits for that. If the session has expired, the release is sent when the session is
/// back.
pub(crate) fn release_handle(state: &mut State, handle: Handle) {
    match state.session.state() {
        SessionState::Expired => state.session.release_later(handle),
        SessionState::Lost => {}
        _ => release_handles(state, vec![handle]),
    }
}

/// Releases several handles at a reachable remote.
pub(crate) fn release_handles(state: &mut State, mut handles: Vec<Handle>) {
    // The reply to a reclaim releases a handle without an owner.
    handles.retain(|handle| !view::is_reclaiming(state, *handle));
    for some in handles.chunks(Call::MOST_HANDLES as usize) {
        let call = Call::Release { handles: some.to_vec() };
        state.out.push_back(Output::Call { id: state.calls.new_id(), caller: None, mutation_id: None, call });
    }
}

/// Fetches attributes, or joins a call in flight (then `true`).
pub(crate) fn fetch_attr(
    state: &mut State,
    now: Time,
    ino: u64,
) -> Result<(nigh_types::CallId, bool), Errno> {
    // A lookup by number may not find an inode that has a name here.
    let by_number = |flight: &InflightCall| matches!(flight.resend, Some(Call::LookupNumber { .. }));
    if let Some(call) = state.calls.attr_call(ino)
        && state.calls.is_joinable(call)
        && !state.calls.inflight(call).is_some_and(by_number)
    {
        return Ok((call, true));
    }
    let node = paths::node_ref(state, ino).ok_or(Errno::STALE)?;
    let older = state.calls.attr_call(ino);
    let id = send(state, now, None, CallKind::Attr { ino }, Call::GetAttr { node });
    state.calls.enter_joins(id, CallKind::Attr { ino });
    if let Some(older) = older.filter(|_| view::reads_by_size(state, ino)) {
        replies::wait_for_newer(state, older, id);
    }
    Ok((id, false))
}

/// Grants a job more credit, or asks for one directory before all others.
pub(crate) fn send_credit(state: &mut State, walk: CallId, credit: u64, want: Option<NodeRef>) {
    let credit = u32::try_from(credit).unwrap_or(u32::MAX);
    let call = Call::PrefetchCredit { walk, credit, want };
    state.out.push_back(Output::Call { id: state.calls.new_id(), caller: None, mutation_id: None, call });
}

/// Sends a call again. Returns false if no request waits for it.
pub(crate) fn resend_call(state: &mut State, now: Time, id: CallId) -> bool {
    let Some(flight) = state.calls.inflight_mut(id).filter(|flight| !flight.is_unwanted_lock()) else {
        return false;
    };
    let Some(call) = flight.resend.clone() else { return false };
    flight.sent = now;
    let caller = flight.caller;
    state.out.push_back(Output::Call { id, caller, mutation_id: None, call });
    true
}

/// Sends a call without a waiter.
pub(crate) fn send(
    state: &mut State,
    now: Time,
    caller: Option<Caller>,
    purpose: CallKind,
    call: Call,
) -> CallId {
    let id = state.calls.new_id();
    if state.answers_stale() && !purpose.releases_locks() {
        // The call is not sent, and no request waits for it: see `wait`.
        return id;
    }
    drop_changing_contents(state, &call, &purpose);
    let name = call.is_mutation().then(|| {
        let leaving = pins::suspend_victims(state, &purpose);
        state.calls.begin_mutation(leaving)
    });
    let handled = match &call {
        Call::Read { handle, .. } | Call::Write { handle, .. } => handle.is_some(),
        Call::ResolvePath { .. } | Call::Prefetch { .. } | Call::ListNames { .. } => true,
        _ => false,
    };
    let goes = victims::expected_victim(state, &purpose);
    tracing::trace!(target: "nigh::fetch", call = id.0, kind = call.type_name());
    state.calls.insert(
        id,
        InflightCall {
            handles: handles_of(&call),
            caller,
            resend: (!handled).then(|| call.clone()),
            sequence: name.map(|n| n.sequence),
            victim_dir: goes,
            ..InflightCall::new(purpose, call.type_name(), now)
        },
    );
    state.out.push_back(Output::Call { id, caller, mutation_id: name, call });
    id
}

/// Drops the contents of a file that a call may change: from now on a reader elsewhere may see the change.
fn drop_changing_contents(state: &mut State, call: &Call, purpose: &CallKind) {
    if let (
        Call::Write { .. },
        CallKind::Write { ino, offset, size, writeback: false, append: false, direct: None },
    ) = (call, purpose)
    {
        return state.drop_changing_contents(*ino, *offset, *size);
    }
    if let CallKind::Change { ino, .. } | CallKind::Write { ino, .. } | CallKind::Open { ino, .. } = *purpose
        && call.is_mutation()
    {
        state.drop_contents(ino);
    }
}

/// Resends a call for late waiters: a reply without a grant was composed before they came.
pub(crate) fn resend_for_joiners(
    state: &mut State,
    now: Time,
    late: Vec<OpId>,
    purpose: CallKind,
    call: Call,
) {
    if late.is_empty() {
        return;
    }
    let id = send(state, now, None, purpose.clone(), call);
    state.calls.move_waiters(late, id);
    state.calls.enter_joins(id, purpose);
}

/// Sends a call for one request.
pub(crate) fn send_for(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    purpose: CallKind,
    call: Call,
) -> Option<OpReply> {
    let on_behalf = (call.is_mutation() || matches!(call, Call::Open { .. })).then_some(caller);
    let id = send(state, now, on_behalf, purpose, call);
    replies::wait(state, op, caller, id, ReplyKind::Reply, false)
}
