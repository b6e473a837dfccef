//! Requests that are answered without their call: the caller is dead, or the wait was too long.

use crate::calls::CallKind;
use crate::facts::forgetting;
use crate::op::{Fh, OpReply, Output};
use crate::ops::closing;
use crate::out::{page_drops, queue, replies, waiting};
use crate::state::State;
use crate::view::paths;
use nigh_types::{CallId, Errno, OpId};
use std::collections::BTreeSet;

/// Delivers the reply to a finished change that waits in the queue for a GETATTR reply, because no later
/// invalidation would cover it. If the kernel is about to drop everything, the request gets no reply and the result
/// is false.
fn deliver_now(state: &mut State, op: OpId) -> bool {
    let Some(late) = state.kernel.take_queued_reply(op) else { return false };
    if state.waits_for_kernel() {
        undo_reply(state, late.answer);
        return false;
    }
    queue::deliver_late(state, &[op], late);
    true
}

/// Undoes the effects of a reply that no caller receives: the open file and the lookup count.
fn undo_reply(state: &mut State, answer: OpReply) {
    if let OpReply::Created(_, opened) = &answer {
        closing::release(state, state.clock, opened.fh, None);
    }
    if let OpReply::Node(node) | OpReply::Created(node, _) = answer {
        forgetting::handle_forget(state, node.number, 1);
    }
}

/// Fails requests that use these open files.
pub(crate) fn fail_requests_through(state: &mut State, files: &BTreeSet<Fh>) {
    state.calls.ops_through(files).into_iter().for_each(|op| abort(state, op, Errno::IO));
}

/// Answers a request without its call: `INTR`, because its caller is dead or the wait was interrupted, or `IO`. A
/// call that changes something goes on, and its reply is applied.
pub(crate) fn abort(state: &mut State, op: OpId, errno: Errno) {
    let mut answer = OpReply::Failed(errno);
    if waiting::fail(state, op, errno) || deliver_now(state, op) {
        return;
    }
    let Some(waiting) = state.calls.remove_waiter(op) else { return };
    let away = !state.session.is_attached();
    let Some(flight) = state.calls.inflight_mut(waiting.call) else {
        return replies::reply(state, op, answer);
    };
    flight.waiters.retain(|&waiter| waiter != op);
    let ends_locks = flight.purpose.releases_locks();
    if ends_locks && errno == Errno::IO {
        // A close leaves the owner without locks, whatever the reply.
        answer = OpReply::Done;
    }
    let told = matches!(flight.purpose, CallKind::Lock { cancelled: true, .. });
    // An unlock goes on whether a request waits for it or not.
    let goes_on = told
        || matches!(
            flight.purpose,
            CallKind::List { .. } | CallKind::ListNames { .. } | CallKind::Unlock { .. }
        );
    let cancel = (flight.waiters.is_empty() && !goes_on).then(|| flight.purpose.clone());
    let left_out = flight.drop_data.then(|| flight.purpose.pages()).flatten();
    if away || errno == Errno::IO {
        log_unknown_outcome(state, waiting.call);
    }
    replies::reply(state, op, answer);
    page_drops::drop_after_reply(state, &[op], left_out);
    if let Some(purpose) = cancel {
        // New requests must not join the cancelled call: it is answered `EINTR`.
        state.calls.leave_joins(waiting.call, &purpose);
        state.out.push_back(Output::Cancel(waiting.call));
    }
}

/// Logs a change that was sent, whose caller does not learn the outcome.
pub(crate) fn log_unknown_outcome(state: &State, call: CallId) {
    let Some(flight) = state.calls.inflight(call).filter(|flight| flight.is_mutation()) else { return };
    let names = flight.purpose.names().into_iter();
    let mut paths: Vec<String> = names.map(|(dir, name)| paths::shown_name(state, dir, name)).collect();
    match flight.purpose {
        CallKind::Open { ino, .. } | CallKind::Change { ino, .. } | CallKind::Write { ino, .. } => {
            paths.push(paths::shown_path(state, ino));
        }
        _ => {}
    }
    let (operation, path) = (flight.call_name, paths.join(" to "));
    tracing::warn!(target: "nigh::unknown", operation, path, "it may have taken effect, or yet take effect");
}
