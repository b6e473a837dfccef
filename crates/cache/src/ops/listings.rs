//! Listing calls: sent, joined or expected from a prefetch job.

use crate::calls::{CallKind, InflightCall, ReplyKind};
use crate::facts::leases;
use crate::op::Op;
use crate::out::{replies, sending};
use crate::state::State;
use crate::view::paths;
use nigh_types::{Call, CallId, Errno, NodeId, OpId, Time};

/// Returns the directory's listing call, sent unless a listing that will be kept is in flight.
pub(crate) fn list(state: &mut State, now: Time, dir: u64) -> Result<(CallId, bool), Errno> {
    if state.answers_stale() {
        // Nothing is sent: see `wait`.
        return Ok((CallId(0), false));
    }
    if state.store.oversized.contains(now, dir) {
        return Err(Errno::NOMEM);
    }
    let listing = state.store.dir(dir).and_then(|d| d.listing);
    if let Some(call) = listing
        && state.calls.inflight(call).is_some_and(|f| {
            f.detached_entries.is_none() && !f.race_log.all_grants_ended && f.race_log.recalled.is_empty()
        })
    {
        return Ok((call, true));
    }
    if let Some(call) = join_expected(state, now, dir) {
        return Ok((call, true));
    }
    let place = paths::node_ref(state, dir).ok_or(Errno::STALE)?;
    let node = place.node;
    let call = sending::send(state, now, None, CallKind::List { dir }, Call::List { dir: place });
    replace_listing(state, node, call);
    Ok((call, false))
}

/// Makes a call the directory's listing. An earlier listing goes on for its waiters, with detached entries.
fn replace_listing(state: &mut State, node: NodeId, call: CallId) {
    leases::dir_record(state, node);
    let Some(directory) = state.store.dir_mut(node.ino) else { return };
    let old = directory.listing.replace(call).and_then(|old| state.calls.inflight_mut(old));
    if let Some(old) = old.filter(|f| f.has_chunk && f.detached_entries.is_none()) {
        old.detached_entries = Some(Box::new(directory.rows.up_to(directory.progress.unwrap_or_default())));
    }
    directory.progress = None;
}

pub(crate) fn relist_for_late_joiners(state: &mut State, now: Time, dir: u64, late: Vec<OpId>) {
    let (Some(place), false) = (paths::node_ref(state, dir), late.is_empty()) else { return };
    let node = place.node;
    sending::resend_for_joiners(state, now, late, CallKind::List { dir }, Call::List { dir: place });
    let call = state.calls.last_id();
    // A call that was not sent (see `send`) brings nothing.
    if state.calls.contains(call) {
        replace_listing(state, node, call);
    }
}

/// Moves the waiters of a complete listing that need a name under update to the queue for its commit.
pub(crate) fn requeue_on_commit(state: &mut State, now: Time, dir: u64, waiters: &[OpId]) {
    if !state.store.suspended.has_names(dir) {
        return;
    }
    for id in waiters {
        let Some(waiting) = state.calls.waiter(*id) else { continue };
        let (caller, ReplyKind::Page { fh, offset, size, plus }) = (waiting.caller, waiting.want.clone())
        else {
            continue;
        };
        state.calls.remove_waiter(*id);
        replies::wait_for_commit(
            state,
            now,
            *id,
            caller,
            dir,
            Op::ReadDir { ino: dir, fh, offset, size, plus },
        );
    }
}

pub(crate) fn end_listing(state: &mut State, call: CallId, dir: u64) {
    state.watches.note_listed();
    if let Some(directory) = state.store.dir_mut(dir)
        && directory.listing == Some(call)
    {
        directory.listing = None;
        directory.progress = None;
    }
}

/// Returns whether a directory needs a listing call: no listing is in flight, and no job will bring it.
pub(crate) fn is_to_be_listed(state: &State, dir: u64) -> bool {
    if state.store.oversized.contains(state.clock, dir) {
        return false;
    }
    let listing = state.store.dir(dir).and_then(|d| d.listing);
    listing.is_none() && state.prefetch.expected_by(dir).is_none()
}

/// Returns the listing of a directory that a job will bring.
fn join_expected(state: &mut State, now: Time, dir: u64) -> Option<CallId> {
    let job = state.prefetch.expected_by(dir)?;
    let node = state.store.id_of(dir)?;
    let call = begin_prefetched_listing(state, job, node)?;
    if state.prefetch.widen_if_out_of_credit(job, state.largest_window()) {
        request_directory(state, now, job, dir);
    }
    Some(call)
}

/// Begins the listing of a directory by a job, unless it has begun.
pub(crate) fn begin_prefetched_listing(state: &mut State, walk_call: CallId, node: NodeId) -> Option<CallId> {
    if let Some(call) = state.prefetch.listing(walk_call, node.ino)? {
        return Some(call);
    }
    let walk = state.calls.inflight(walk_call)?;
    let told = InflightCall {
        race_log: walk.race_log.clone(),
        ..InflightCall::new(CallKind::List { dir: node.ino }, "list", walk.sent)
    };
    let call = state.calls.new_id();
    state.calls.insert(call, told);
    replace_listing(state, node, call);
    state.prefetch.add_listing(walk_call, node.ino, call);
    Some(call)
}

pub(crate) fn request_directory(state: &mut State, now: Time, walk_call: CallId, dir: u64) {
    let Some(place) = paths::node_ref(state, dir) else { return };
    if let Some(more) = state.prefetch.request(now, walk_call, dir) {
        sending::send_credit(state, walk_call, more, Some(place));
    }
}
