//! Reclaim of open files and locks in a session that has forgotten them. Files go first, since only an open file may be
//! locked.

use crate::calls::{CallKind, InflightCall, OpenParams};
use crate::facts::learn;
use crate::inputs::responses;
use crate::op::{Fh, OpReply, Output};
use crate::open::{InodeOpens, OpenFile};
use crate::ops::{aborting, begin, lock_reclaim};
use crate::out::{invalidate, page_drops, pins, replies, sending};
use crate::page_cache::writeback;
use crate::pages::ChangeToken;
use crate::session::SessionState;
use crate::state::State;
use crate::view::paths;
use nigh_types::{Access, Call, Errno, Handle, NodeRef, OpId, Reply, Response, Time};

/// Access mode of a handle that pins an inode: reading.
const PIN_ACCESS: Access =
    Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };

/// Returns the handle under which a reply says that a file was opened.
fn opened_handle(response: &Response) -> Option<Handle> {
    match &response.result {
        Ok(Reply::Opened { handle, .. }) => Some(*handle),
        Ok(Reply::Created { handle, .. }) => *handle,
        _ => None,
    }
}

/// Returns that handle with the file's node reference and open parameters.
fn opened_file_of_reply(flight: &InflightCall, response: &Response) -> Option<(NodeRef, Handle, OpenParams)> {
    let handle = opened_handle(response)?;
    let made = match &response.result {
        Ok(Reply::Created { entry, .. }) => Some(entry.id),
        _ => None,
    };
    match (&flight.purpose, &flight.resend, made) {
        (CallKind::Open { file, .. }, Some(Call::Open { node, .. }), None) => {
            Some((node.clone(), handle, *file))
        }
        (CallKind::Create { name, file: Some(file), .. }, Some(Call::Create { dir, .. }), Some(node)) => {
            Some((NodeRef { node, path_hint: Some((dir.node, name.clone())) }, handle, *file))
        }
        (CallKind::Tmpfile { file }, _, Some(node)) => Some((NodeRef::without_hint(node), handle, *file)),
        _ => None,
    }
}

/// Sends reclaim calls for everything that was open. Locks follow.
pub(crate) fn reclaim_all(state: &mut State, now: Time) {
    state.session.begin_reclaims();
    pins::assign_pins(state);
    let mut files = Vec::new();
    for (fh, file) in state.open.files.iter() {
        files
            .extend(file.handle().map(|handle| (file.ino, Some(fh), handle, file.access, Some(file.caller))));
    }
    let mut pins: Vec<_> = state.store.inodes().filter_map(|i| Some((i.id.ino, i.opens().pin()?))).collect();
    pins.sort_unstable();
    files.extend(pins.into_iter().map(|(ino, handle)| (ino, None, handle, PIN_ACCESS, None)));
    for (ino, fh, handle, access, caller) in files {
        let generation = fh.and_then(|fh| state.open.files.get(fh)).map(|file| file.generation);
        match paths::node_ref(state, ino) {
            Some(node) if generation.is_none_or(|opened| opened == node.node.generation) => {
                state.session.add_reclaim();
                let purpose = CallKind::Reopen { ino, fh, handle };
                sending::send(state, now, caller, purpose, Call::Reopen { node, handle, access });
            }
            // Another inode has the number by now.
            _ => mark_file_lost(state, ino, fh, handle, Errno::STALE),
        }
    }
    reclaim_deferred(state, now);
    reclaim_locks(state, now);
}

/// Reclaims locks when all files have their replies: the server may grant a lock only on an open file.
fn reclaim_locks(state: &mut State, now: Time) {
    if !state.session.take_lock_reclaims() {
        return;
    }
    let asked = state.calls.values().filter_map(|flight| match flight.purpose {
        CallKind::Lock { holder, range, .. } if !flight.is_unwanted_lock() => Some((holder, range)),
        _ => None,
    });
    for (holder, range) in state.open.locks.locks_to_reclaim(&asked.collect::<Vec<_>>()) {
        if lock_reclaim::reclaim_lock(state, now, holder, range) {
            state.session.add_reclaim();
        }
    }
}

/// Handles deferred replies of the forgotten session. Files that they opened are reclaimed with the rest, under the
/// same handle. A lock call is sent again, since its caller has no reply yet.
fn reclaim_deferred(state: &mut State, now: Time) {
    let mut left = Vec::new();
    for (call, mut response) in state.session.take_deferred() {
        let Some(flight) = state.calls.inflight(call) else { continue };
        let is_lock = matches!(flight.purpose, CallKind::Lock { .. }) && response.result.is_ok();
        if is_lock && sending::resend_call(state, now, call) {
            continue;
        }
        let opened = state.calls.inflight(call).and_then(|flight| opened_file_of_reply(flight, &response));
        match (&mut response.result, opened) {
            (result, _) if is_lock => *result = Err(Errno::INTR),
            // A holder that has the removed file open reclaims it under a handle that the client assigned.
            (Ok(Reply::Removed { pinned: kept, .. } | Reply::Renamed { pinned: kept, .. }), _) => {
                *kept = None
            }
            (_, Some((node, handle, file))) => {
                state.session.add_reclaim();
                let access = Access { truncate: false, ..file.access };
                let purpose = CallKind::Reopen { ino: node.node.ino, fh: None, handle };
                sending::send(state, now, Some(file.caller), purpose, Call::Reopen { node, handle, access });
            }
            _ => {}
        }
        left.push((call, response));
    }
    state.session.set_deferred(left);
}

/// Returns the deferred reply that opened a file under this handle.
fn deferred_open(state: &mut State, handle: Handle) -> Option<&mut Response> {
    state.session.deferred_mut().find(|response| opened_handle(response) == Some(handle))
}

/// Forgets reclaim calls in flight: another session takes over.
pub(crate) fn forget_reclaims(state: &mut State) {
    state.calls.forget_reclaims();
}

/// Handles the reply to a reclaim call.
pub(crate) fn on_reclaim_reply(state: &mut State, now: Time, flight: &InflightCall, response: &Response) {
    match flight.purpose {
        CallKind::Reopen { ino, fh, handle } => {
            on_reopen_reply(state, now, flight, (ino, fh, handle), response)
        }
        CallKind::ReclaimLock { holder, range } => {
            lock_reclaim::on_reclaim_lock_reply(state, now, holder, range, response)
        }
        _ => return,
    }
    state.session.end_reclaim();
    reclaim_locks(state, now);
    finish_reclaim(state, now);
}

fn on_reopen_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (ino, fh, handle): (u64, Option<Fh>, Handle),
    response: &Response,
) {
    let attr = match &response.result {
        Ok(Reply::Opened { handle: opened, attr }) if *opened == handle => *attr,
        Ok(_) => return mark_file_lost(state, ino, fh, handle, Errno::PROTO),
        Err(errno) => return mark_file_lost(state, ino, fh, handle, *errno),
    };
    if deferred_open(state, handle).is_some() {
        return;
    }
    let wanted = match fh {
        Some(fh) => state.open.files.get(fh).is_some_and(|file| file.handle() == Some(handle)),
        None => state.store.inode(ino).is_some_and(|inode| inode.opens().is_pinned_by(handle)),
    };
    match state.store.id_of(ino).filter(|_| wanted) {
        Some(id) => {
            learn::apply_attr(state, now, flight, id, attr, &response.grants);
            learn::begin_data_grant(state, now, flight, id, Some(ChangeToken::of(&attr)), response);
            // A file that is open for reading only has no write-back.
            if fh.and_then(|fh| state.open.files.get(fh)).is_some_and(|file| file.access.write) {
                writeback::keep_pages_in_new_session(state, now, flight, (id, &attr), response);
            }
        }
        None => sending::release_handle(state, handle),
    }
}

/// Ends reclaiming once all is reclaimed and the kernel has dropped its facts: other clients may make changes, and
/// queued requests begin.
pub(crate) fn finish_reclaim(state: &mut State, now: Time) {
    if state.session.state() != SessionState::Reclaiming
        || state.session.has_pending_reclaims()
        || state.waits_for_kernel()
    {
        return;
    }
    if state.session.finish_reclaim() {
        state.out.push_back(Output::Reclaimed);
    }
    start_queued(state, now);
    invalidate::drop_stale_pages(state);
}

/// Marks an open file as lost: it could not be reclaimed. It fails until it is closed, and so do its requests in
/// flight. A file opened without a handle may still be read by its node reference, if it still exists.
fn mark_file_lost(state: &mut State, ino: u64, fh: Option<Fh>, handle: Handle, errno: Errno) {
    if let Some(response) = deferred_open(state, handle) {
        response.result = Err(errno);
    }
    let mut lost = Vec::new();
    match fh {
        Some(fh) => lost.push(fh),
        None => {
            let Some(inode) = state.store.inode_mut(ino) else { return };
            if !inode.opens_if_any().is_some_and(|opens| opens.lose_pin(handle)) {
                return;
            }
            let id = inode.id;
            let pinned = |file: &OpenFile| file.ino == ino && file.lacks_handle_for(id);
            if errno == Errno::STALE {
                lost.extend(state.open.files.iter().filter(|(_, file)| pinned(file)).map(|(fh, _)| fh));
            }
        }
    }
    for fh in &lost {
        let Some(had_handle) = state.open.files.lose(*fh) else { continue };
        if had_handle && let Some(inode) = state.store.inode_mut(ino) {
            inode.opens_mut().note_handle_lost();
        }
        let path = paths::shown_path(state, ino);
        tracing::warn!(target: "nigh::session", path, %errno, "an open file could not be opened again");
    }
    aborting::fail_requests_through(state, &lost.into_iter().collect());
    let needs = |flight: &&InflightCall| flight.handles.contains(&Some(handle));
    let waiters = state.calls.values().filter(needs).flat_map(|flight| flight.waiters.iter().copied());
    let waiters: Vec<OpId> = waiters.collect();
    waiters.into_iter().for_each(|op| aborting::abort(state, op, Errno::IO));
}

/// Fails all open files: the server exports another directory, or has lost the secrets from which it makes ids.
pub(crate) fn on_export_replaced(state: &mut State) {
    tracing::error!(
        target: "nigh::session",
        "the server exports something else than what was mounted: what was open fails; unmount and mount again"
    );
    state.open.files.lose_all();
    let all = state.store.inodes_mut().filter_map(|inode| inode.opens_if_any());
    all.for_each(InodeOpens::note_all_handles_lost);
    for file in state.open.files.values() {
        if let Some(inode) = state.store.inode_mut(file.ino) {
            inode.opens_mut().note_handle_lost();
        }
    }
    state.open.locks.mark_all_lost();
    state.session.deferred_mut().for_each(|response| response.result = Err(Errno::IO));
    for call in state.calls.ids() {
        let Some(flight) = state.calls.inflight_mut(call) else { continue };
        let waiters = std::mem::take(&mut flight.waiters);
        let pages = flight.purpose.pages().filter(|_| flight.drop_data);
        replies::reply_all(state, &waiters, &OpReply::Failed(Errno::IO));
        page_drops::drop_after_reply(state, &waiters, pages);
        state.out.push_back(Output::Cancel(call));
    }
    state.open.names.forget();
}

/// Handles the replies and requests that waited for a session and the kernel.
fn start_queued(state: &mut State, now: Time) {
    for (call, response) in state.session.take_deferred() {
        responses::handle_response(state, now, call, response);
    }
    for (op, (caller, what)) in state.calls.take_queued() {
        let pages = what.pages();
        if let Some(answer) = begin::start(state, now, op, caller, what) {
            state.counters.waits += 1;
            replies::reply(state, op, answer);
            page_drops::drop_after_reply(state, &[op], pages);
        }
    }
    // The kernel left out pages that a write had locked: their unwritten parts are stale.
    state.calls.drop_pages_of_all();
}
