//! Reclaim of locks, locks that could not be reclaimed, and locks that were granted too late.

use crate::calls::CallKind;
use crate::open::{Correction, LockOwner};
use crate::ops::{aborting, closing};
use crate::out::sending;
use crate::state::State;
use crate::view::paths;
use nigh_types::{Call, Errno, LockInfo, NodeId, Reply, Response, Time};

/// Reclaims a lock of a session that the remote has forgotten.
pub(crate) fn reclaim_lock(state: &mut State, now: Time, holder: LockOwner, range: LockInfo) -> bool {
    let other = |id: NodeId| {
        state
            .open
            .locks
            .files_of(holder)
            .any(|fh| state.open.files.get(*fh).is_some_and(|f| f.generation != id.generation))
    };
    if paths::node_ref(state, holder.ino).is_none_or(|place| other(place.node)) {
        fail_owner(state, holder);
        return false;
    }
    send_lock(state, now, holder, range, CallKind::ReclaimLock { holder, range })
}

/// Sends a lock call. False: no path leads to the file any more.
fn send_lock(state: &mut State, now: Time, holder: LockOwner, range: LockInfo, purpose: CallKind) -> bool {
    let Some(node) = paths::node_ref(state, holder.ino) else { return false };
    let (LockOwner { flock, owner, .. }, LockInfo { start, end, kind, pid }) = (holder, range);
    let reclaim = purpose.is_reclaim();
    let call = Call::Lock { node, owner, flock, kind, start, end, wait: false, pid, reclaim };
    sending::send(state, now, None, purpose, call);
    true
}

pub(crate) fn on_reclaim_lock_reply(
    state: &mut State,
    now: Time,
    holder: LockOwner,
    range: LockInfo,
    response: &Response,
) {
    let errno = match &response.result {
        Ok(Reply::Done) => return on_lock_reclaimed(state, now, holder, range),
        Ok(_) => Errno::PROTO,
        Err(errno) => *errno,
    };
    let path = paths::shown_path(state, holder.ino);
    tracing::warn!(target: "nigh::session", path, %errno, "a lock could not be taken again");
    fail_and_release(state, now, holder);
}

/// Handles a reclaimed lock. Its owner may have unlocked some of it meanwhile, or closed the file.
fn on_lock_reclaimed(state: &mut State, now: Time, holder: LockOwner, range: LockInfo) {
    match state.open.locks.reclaimed(holder, range) {
        Some(true) => correct_remote(state, now, holder),
        Some(false) => {}
        None => drop(closing::release_range(state, now, holder, range.start, range.end)),
    }
}

/// Marks an owner's locks as lost until it closes. Requests sent under the locks and without a reply fail, and are
/// not done if they were not. True: the owner held some.
fn fail_owner(state: &mut State, holder: LockOwner) -> bool {
    let files = state.open.locks.mark_lost(holder);
    files.as_ref().into_iter().for_each(|files| aborting::fail_requests_through(state, files));
    files.is_some()
}

/// Marks locks as lost and releases those that the owner may still hold, which would block all others. The release
/// follows all reclaims.
fn fail_and_release(state: &mut State, now: Time, holder: LockOwner) {
    if fail_owner(state, holder) {
        closing::release_locks(state, now, holder);
    }
}

/// Corrects the remote's state after unwanted locks were granted: a call says what the owner does hold.
pub(crate) fn correct_remote(state: &mut State, now: Time, holder: LockOwner) {
    for correction in state.open.locks.take_corrections(holder) {
        match correction {
            Correction::Release(part) => {
                closing::release_range(state, now, holder, part.start, part.end);
            }
            Correction::Weaken(part) => {
                let purpose = CallKind::Lock { holder, range: part, wait: false, cancelled: false };
                if send_lock(state, now, holder, part, purpose) {
                    state.open.locks.begin_correction(holder);
                }
            }
            Correction::Fail => fail_and_release(state, now, holder),
        }
    }
}
