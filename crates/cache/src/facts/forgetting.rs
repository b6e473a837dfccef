//! End of an inode's record: neither the kernel nor a fact needs it.

use crate::config::OnDisconnect;
use crate::out::sending;
use crate::state::State;
use nigh_types::{Name, NodeId};

/// Most remembered inodes; the share of the budget that they may have beside it, and the size of each in bytes.
const MOST: u64 = 1 << 16;

pub(crate) const PART: u64 = 32;

const BYTES: u64 = 128;

/// Drops the record of an inode that neither the kernel nor a fact needs.
pub(crate) fn drop_if_idle(state: &mut State, ino: u64) {
    let (root, clock) = (state.store.root(), state.clock);
    let keeps_expired = state.config.on_disconnect == OnDisconnect::Stale;
    let Some(inode) = state.store.inode_mut(ino) else { return };
    inode.shrink();
    if inode.is_held_by_kernel() {
        return;
    }
    let is_known = inode.own_attr().is_some_and(|(_, held)| held.is_live(clock) || keeps_expired);
    let pinned = inode.opens_if_any().and_then(|opens| opens.take_pin());
    let needed = is_known || ino == root;
    if let Some(handle) = pinned {
        sending::release_handle(state, handle);
    }
    if !needed && let Some(inode) = state.store.remove_inode(ino) {
        remember_forgotten(state, inode.id, inode.into_parent_entry());
    }
}

/// Remembers an inode whose record is dropped.
fn remember_forgotten(state: &mut State, id: NodeId, parent_entry: Option<(u64, Name)>) {
    let Some(parent_entry) = parent_entry.filter(|_| id.generation != 0 && id.ino != state.store.root())
    else {
        return;
    };
    put_forgotten(state, id, Some(parent_entry));
}

pub(crate) fn put_forgotten(state: &mut State, id: NodeId, parent_entry: Option<(u64, Name)>) {
    let most = MOST.min(state.config.budget_bytes / PART / BYTES);
    state.store.forgotten.put(id, parent_entry, most);
}

/// Handles a FORGET of `count` lookups of a node id.
pub(crate) fn handle_forget(state: &mut State, number: u64, count: u64) {
    let ino = match state.kernel.nodeids.forget(number, count) {
        Ok(ino) => ino,
        // The record of the inode that has its number now may have been kept for it alone.
        Err(former) => return drop_if_idle(state, former.id.ino),
    };
    let Some(inode) = state.store.inode_mut(ino) else { return };
    inode.kernel.forget(count);
    if !inode.kernel.is_known() {
        state.kernel.nodeids.release(ino);
    }
    drop_if_idle(state, ino);
}
