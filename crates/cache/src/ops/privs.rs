//! Set-user-ID and set-group-ID bits and capabilities of files, which changes of data and owner clear.
//!
//! After a write the kernel drops size and times, and keeps the mode that it knew (`FUSE_STATX_MODSIZE` in
//! `fuse_write_update_attr`). It would show cleared bits, and execute the changed program with them. So the driver
//! invalidates all attributes before the reply to such a change. Only files with these bits cost that.
//!
//! Before a write to a file that has these bits in its cached mode, or a capability, the kernel sends a SETATTR without
//! attributes (`file_remove_privs`; `fuse_setattr` leaves the mode out). A chown(2) that leaves owner and group as they
//! are is the same request.

use crate::calls::{CallKind, InflightCall, attr_after};
use crate::facts::leases;
use crate::kernel::set_id;
use crate::op::{Caller, OpReply};
use crate::ops::lookup;
use crate::out::sending;
use crate::state::State;
use crate::view::{self, paths};
use nigh_types::{Call, Errno, OpId, Reply, Response, SetAttr, Time};

const CAPABILITY: &[u8] = b"security.capability";

/// Returns whether the kernel must drop an inode's attributes before the reply to a local change of it.
pub(crate) fn is_set_id_gone(state: &State, ino: u64) -> bool {
    state.store.inode(ino).is_some_and(|inode| inode.kernel.is_set_id_cleared())
}

/// Records that the kernel has dropped these attributes.
pub(crate) fn handle_set_id_forgotten(state: &mut State, ino: u64) {
    state.store.inode_mut(ino).into_iter().for_each(|inode| inode.kernel.note_set_id_dropped());
}

/// Handles the reply to a local change, before anything is learned from it.
pub(crate) fn note_set_id_after(state: &mut State, flight: &InflightCall, response: &Response) {
    let ino = match flight.purpose {
        CallKind::Write { ino, .. } | CallKind::Change { ino, .. } => ino,
        CallKind::Open { ino, .. } if flight.is_mutation() => ino,
        _ => return,
    };
    let Some(inode) = state.store.inode_mut(ino) else { return };
    let after = match &response.result {
        // The kernel takes the attributes from the reply.
        Ok(Reply::Attr(..)) if matches!(flight.resend, Some(Call::SetAttr { .. })) => None,
        Ok(Reply::Attr(id, attr)) if id.ino == ino => Some(set_id(attr)),
        Ok(Reply::Opened { attr, .. }) => Some(set_id(attr)),
        _ => Some(attr_after(response, ino).map_or(0, |attr| set_id(&attr))),
    };
    if let Some(left) = after {
        inode.kernel.note_set_id_left(left);
    }
    if let (Some(Call::RemoveXattr { name, .. }), Some(caller)) = (&flight.resend, flight.caller)
        && name == CAPABILITY
    {
        inode.opens_mut().note_uncapped(caller);
    }
    let known = inode.xattrs();
    if known.is_some_and(|(set, _)| set.items.iter().any(|(name, _)| name.as_ref() == CAPABILITY)) {
        leases::drop_xattrs(state, ino);
    }
}

/// Handles a SETATTR without attributes as a chown(2) that leaves owner and group as they are, whichever it was: a
/// write that follows clears the same bits. Except after root's removal of a capability: root's write clears that
/// alone.
pub(crate) fn set_attr_empty(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
) -> Option<OpReply> {
    let opens = state.store.inode_mut(ino).and_then(|inode| inode.opens_if_any());
    if opens.is_some_and(|opens| opens.take_uncapped(caller)) && view::is_written(state, ino) {
        return lookup::attributes(state, now, op, caller, ino);
    }
    let Some((node, handle)) = paths::handle_for(state, ino, None) else {
        return Some(OpReply::Failed(Errno::STALE));
    };
    let call = Call::SetAttr { node, handle, set: SetAttr::chown_to_same() };
    sending::send_for(state, now, op, caller, CallKind::Change { ino, xattrs: false }, call)
}

/// Returns whether a refused SETATTR without attributes may succeed: the caller does not own the file, and its
/// write will clear the bits.
pub(crate) fn may_precede_write(state: &State, flight: &InflightCall, response: &Response) -> bool {
    let is_empty = matches!(&flight.resend, Some(Call::SetAttr { set, .. }) if set.is_empty());
    let CallKind::Change { ino, .. } = flight.purpose else { return false };
    is_empty && response.result == Err(Errno::PERM) && view::is_written(state, ino)
}

#[cfg(test)]
mod tests;
