//! Close of a file, and release of the locks that end with it.

use crate::calls::CallKind;
use crate::facts::forgetting;
use crate::op::{Fh, OpReply};
use crate::open::LockOwner;
use crate::out::sending;
use crate::session::SessionState;
use crate::state::State;
use crate::view::paths;
use nigh_types::{Call, Time};

pub(crate) fn release(state: &mut State, now: Time, fh: Fh, flock: Option<u64>) -> Option<OpReply> {
    let Some(file) = state.open.files.remove(fh) else { return Some(OpReply::Done) };
    state.contents.note_close(fh);
    release_with_file(state, now, file.ino, fh, flock);
    if let Some(handle) = file.handle() {
        sending::release_handle(state, handle);
    }
    let mut idle_pin = None;
    if let Some(inode) = state.store.inode_mut(file.ino) {
        inode.opens_mut().note_close(file.handle().is_some(), file.access.write);
        let (is_open, is_written) = (inode.opens().is_open(), inode.opens().is_written());
        inode.pages_mut().note_close(now, is_open, is_written);
        if !is_written {
            state.ungranted.forget(file.ino);
        }
        // A caller that looked up the lost name may be about to open it.
        let is_named = inode.parent_entry().is_some() || !inode.kernel.is_known();
        if is_named {
            // The server would release the handle before it does earlier calls that use it: the pin then stays
            // until the inode is forgotten.
            let calls = &state.calls;
            idle_pin = inode.opens_mut().take_idle_pin(|handle| calls.uses_handle(handle));
        }
    }
    if let Some(handle) = idle_pin {
        sending::release_handle(state, handle);
    }
    forgetting::drop_if_idle(state, file.ino);
    Some(OpReply::Done)
}

/// Releases the locks that end with an open file; `flock` is its flock(2) owner, if it was used as one.
fn release_with_file(state: &mut State, now: Time, ino: u64, fh: Fh, flock: Option<u64>) {
    let mut gone = state.open.locks.file_gone(ino, fh);
    gone.extend(flock.map(|owner| LockOwner { ino, flock: true, owner }));
    for holder in gone {
        if state.open.locks.close(holder) {
            release_locks(state, now, holder);
        }
    }
}

pub(crate) fn release_locks(state: &mut State, now: Time, holder: LockOwner) -> Option<nigh_types::CallId> {
    // A lost session has no locks.
    (state.session.state() != SessionState::Lost).then_some(())?;
    release_range(state, now, holder, 0, u64::MAX)
}

pub(crate) fn release_range(
    state: &mut State,
    now: Time,
    holder: LockOwner,
    start: u64,
    end: u64,
) -> Option<nigh_types::CallId> {
    let LockOwner { ino, flock, owner } = holder;
    let node = paths::node_ref(state, ino)?;
    let purpose = CallKind::Unlock { holder, whole_after: None, closing: true };
    Some(sending::send(state, now, None, purpose, Call::Unlock { node, owner, flock, start, end }))
}
