//! UNLINK and RMDIR.

use crate::calls::{CallKind, InflightCall, attr_after};
use crate::facts::{changes, learn, leases, victims};
use crate::op::{Caller, KernelInvalidation, OpReply};
use crate::ops::name_errors;
use crate::out::{invalidate, pins, sending};
use crate::state::State;
use crate::view::{self, paths};
use nigh_types::{Call, Errno, Handle, Name, NodeId, OpId, Reply, Response, Time};

pub(crate) fn unlink(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    dir: u64,
    name: Name,
) -> Option<OpReply> {
    let Some(place) = paths::node_ref(state, dir) else { return Some(OpReply::Failed(Errno::STALE)) };
    pins::pin_open_at(state, dir, &name);
    let call = Call::Unlink { dir: place, name: name.clone(), keep: None };
    sending::send_for(state, now, op, caller, CallKind::Remove { dir, name }, call)
}

pub(crate) fn rmdir(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    dir: u64,
    name: Name,
) -> Option<OpReply> {
    let Some(place) = paths::node_ref(state, dir) else { return Some(OpReply::Failed(Errno::STALE)) };
    let call = Call::Rmdir { dir: place, name: name.clone() };
    sending::send_for(state, now, op, caller, CallKind::Remove { dir, name }, call)
}

pub(crate) fn on_remove_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (dir, name): (u64, &Name),
    response: &Response,
) -> OpReply {
    let (node, kept) = match &response.result {
        Ok(Reply::Removed { node, pinned: kept }) => (*node, *kept),
        Ok(_) => return OpReply::Failed(Errno::PROTO),
        Err(errno) => {
            if !name_errors::says_nothing_of_names(*errno) {
                leases::discard_uncertain_name(state, dir, name, name_errors::says_exists(*errno));
            }
            return OpReply::Failed(*errno);
        }
    };
    if !flight.waiters.is_empty() {
        victims::alias_live_directory(state, flight.victim_dir, Some(node));
    }
    on_name_removed(state, node, (dir, name), kept, response);
    unbind(state, now, flight, (dir, name), response);
    learn::apply_attrs_after(state, now, flight, response);
    changes::note_inode(state, dir);
    changes::note_inode(state, node.ino);
    OpReply::Done
}

fn unbind(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (dir, name): (u64, &Name),
    response: &Response,
) {
    changes::note_dentry(state, &flight.race_log, (dir, name), None);
    if let Some(dir_id) = state.store.id_of(dir) {
        learn::apply_dentry(state, now, flight, dir_id, name, None, &response.grants);
    }
}

/// Handles an inode's loss of its name; `kept` is the handle by which the remote keeps it readable.
pub(crate) fn on_name_removed(
    state: &mut State,
    node: NodeId,
    (dir, name): (u64, &Name),
    kept: Option<Handle>,
    response: &Response,
) {
    invalidate_if_unforeseen(state, node, (dir, name));
    state.drop_contents(node.ino);
    changes::unnamed(state, node, (dir, name), attr_after(response, node.ino));
    keep_pin(state, node, kept);
    let is_open = state.store.inode_of(node).is_some_and(|inode| inode.opens().is_open());
    if is_open && state.kernel.can_notify() {
        // The kernel keeps the attributes under the name's grant (`fuse_entry_unlinked` but sets the ctime).
        invalidate::invalidate(state, vec![KernelInvalidation::Attr { ino: node.ino }], None);
    }
}

/// Keeps the handle of a removed file that is open without one, or that a caller which looked its name up may be about
/// to open.
fn keep_pin(state: &mut State, node: NodeId, kept: Option<Handle>) {
    let Some(handle) = kept else { return };
    match state.store.inode_of_mut(node) {
        Some(inode)
            if !inode.opens().is_pinned() && (inode.opens().has_unpinned() || inode.kernel.is_known()) =>
        {
            inode.opens_mut().note_pin(handle);
        }
        _ => sending::release_handle(state, handle),
    }
}

/// Invalidates an inode's attributes if the kernel does not know that a local change took its name: it knows if it
/// had a dentry of that name for the inode.
fn invalidate_if_unforeseen(state: &mut State, node: NodeId, (dir, name): (u64, &Name)) {
    let foreseen = state.store.child(dir, name).is_some_and(|child| child.id == node);
    let known = view::knows(state, node);
    if known && !foreseen && state.kernel.can_notify() {
        invalidate::invalidate(state, vec![KernelInvalidation::Attr { ino: node.ino }], None);
    }
}
