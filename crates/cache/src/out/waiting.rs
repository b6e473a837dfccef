//! Requests that wait and have no call yet.

use crate::op::OpReply;
use crate::out::{page_drops, replies};
use crate::state::State;
use nigh_types::{Errno, OpId};

/// Fails a request that waits for the session or for an update, and has no call yet. Returns whether it was one.
pub(crate) fn fail(state: &mut State, op: OpId, errno: Errno) -> bool {
    if let Some(what) = state.calls.remove_queued(op) {
        replies::reply(state, op, OpReply::Failed(errno));
        page_drops::drop_after_reply(state, &[op], what.pages());
        return true;
    }
    let is_suspended = state.store.suspended.abort(op);
    if is_suspended {
        replies::reply(state, op, OpReply::Failed(errno));
    }
    is_suspended
}
