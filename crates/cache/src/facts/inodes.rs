//! Records of inodes: made for a reply, given a name, or kept for an inode whose number another one has taken.

use crate::facts::leases;
use crate::grants::LiveGrant;
use crate::op::{KernelInvalidation, Node, Op, OpReply};
use crate::out::{invalidate, prune, queue, waiting};
use crate::state::State;
use crate::store::Inode;
use nigh_types::{Attr, Entry, Errno, Kind, Name, NodeId, OpId, Span, Time};

/// Returns the record of an inode, created if absent. If another inode had its number, all facts about that one are
/// dropped.
pub(crate) fn record(state: &mut State, id: NodeId) -> &mut Inode {
    if let Some(old) = state.store.dir(id.ino).map(|d| d.id).filter(|old| *old != id) {
        drop_reused_directory(state, old);
        leases::drop_dir_names(state, id.ino);
        if let Some(directory) = state.store.dir_mut(id.ino) {
            directory.reassign(id);
        }
    }
    keep_old_nodeid(state, id);
    let numbers = &mut state.kernel.nodeids;
    let inode = state.store.inode_or_insert(id, || numbers.restore(id));
    if inode.id != id {
        inode.reset(id);
        inode.kernel.add_lookups(state.kernel.nodeids.restore(id));
    }
    inode
}

/// Returns the reply about an inode that a name led to, and counts the lookup.
pub(crate) fn entry_reply(
    state: &mut State,
    now: Time,
    parent_entry: Option<(u64, &Name)>,
    id: NodeId,
    attr: Attr,
    name_held: Option<LiveGrant>,
    attr_held: Option<LiveGrant>,
) -> Node {
    let level = state.kernel.level();
    let changes = parent_entry
        .is_some_and(|(dir, _)| state.changes_frequently(now, dir) || state.watches.is_reporting(dir));
    let held_back = parent_entry.is_some_and(|(dir, name)| state.store.suspended.has_name(dir, name));
    let name_held = name_held.filter(|_| !changes && !held_back);
    let entry_valid = name_held.map_or(Span::ZERO, |h| level.entry_timeout(&h, now));
    keep_removed_nodeid(state, id);
    let number = nodeid_for_reply(state, id);
    let attr_valid = queue::attr_timeout(state, now, id.ino, &attr, attr_held);
    let inode = record(state, id);
    let is_new = inode.kernel.note_lookup();
    if parent_entry.is_some() {
        inode.kernel.note_timeouts(now, entry_valid, attr_valid);
    }
    let elsewhere = parent_entry.filter(|(dir, name)| !inode.is_at(*dir, name));
    if is_new {
        prune::note_new_to_kernel(state, id.ino);
    }
    if let Some(parent_entry) = parent_entry {
        state.kernel.recent_dirs.put(parent_entry, attr.is_dir().then_some((id, attr)));
    }
    if let Some(parent_entry) = elsewhere {
        set_parent_entry(state, id, parent_entry);
    }
    Node { id, number, known: !is_new, attr, entry_valid, attr_valid }
}

/// Moves an inode's parent entry. An old entry that said that the inode has no other name loses its attributes:
/// later changes would not reach it.
pub(crate) fn set_parent_entry(state: &mut State, id: NodeId, (dir, name): (u64, &Name)) {
    if let Some(child) =
        state.store.child_at_parent_entry(id.ino).filter(|child| child.attr().covered_by_parent())
    {
        child.attr_known = false;
    }
    record(state, id).note_found_at(dir, name.clone());
}

/// Returns the reply about a name that does not exist. A suspended name has a grant here only in the reply to the
/// lookup that ends its suspension: while an update is in progress the server grants nothing on the key, and a reply
/// that a later prepare overtook is not kept.
pub(crate) fn negative_reply(
    state: &mut State,
    now: Time,
    dir: u64,
    name: &Name,
    held: Option<LiveGrant>,
) -> OpReply {
    state.kernel.recent_dirs.put((dir, name), None);
    let held = held.filter(|_| !state.changes_frequently(now, dir));
    let held = held.filter(|_| !state.watches.is_reporting(dir));
    let valid = held.map_or(Span::ZERO, |h| state.kernel.level().negative_timeout(&h, now));
    if valid == Span::ZERO || !state.kernel.add_negative_dentry(dir, name) {
        return OpReply::Missing(Span::ZERO);
    }
    if let Some(directory) = state.store.dir_mut(dir) {
        directory.has_negative_dentries = true;
    }
    OpReply::Missing(valid)
}

/// Keeps an inode's earlier name when it gets another. Holders of a dentry that look no name up (`O_PATH`,
/// overlayfs) reach the inode by it once the later name is gone; the remote pins regular files.
pub(crate) fn note_earlier_name(state: &mut State, entry: &Entry, at: (u64, &Name)) {
    let inode = state.store.inode_of_mut(entry.id);
    let Some(inode) = inode.filter(|_| entry.attr.nlink > 1 && entry.attr.kind() != Kind::File) else {
        return;
    };
    inode.keep_earlier_name(at);
}

/// Forgets an earlier name that leads to the inode no more.
pub(crate) fn forget_earlier_name(state: &mut State, node: NodeId, at: (u64, &Name)) {
    if let Some(inode) = state.store.inode_of_mut(node) {
        inode.forget_earlier_name(at);
    }
}

/// Resets a new inode's record. Without birth times an inode that is gone may have had the same id.
pub(crate) fn reset_reused_id(state: &mut State, id: NodeId) {
    if state.store.has_dir(id.ino) {
        leases::drop_dir_names(state, id.ino);
    }
    keep_old_nodeid(state, id);
    keep_removed_nodeid(state, id);
    if let Some(inode) = state.store.inode_mut(id.ino) {
        if inode.opens().is_open() {
            // Files opened under this number are not of the new inode, whatever its id says.
            state.open.files.detach(id.ino);
        }
        inode.reset(id);
        inode.kernel.add_lookups(state.kernel.nodeids.restore(id));
    }
}

/// Makes a listed name the parent entry of an inode with one name.
pub(crate) fn note_listed_at(state: &mut State, id: NodeId, (dir, name): (u64, &Name)) {
    let inode = state.store.inode_of_mut(id);
    if let Some(inode) = inode.filter(|i| !i.is_at(dir, name)) {
        inode.kernel.note_listed_elsewhere();
        move_parent_entry(state, id, (dir, name));
    }
}

pub(crate) fn move_parent_entry(state: &mut State, id: NodeId, (dir, name): (u64, &Name)) {
    let Some(inode) = state.store.inode_of(id) else { return };
    if !inode.is_at(dir, name) {
        set_parent_entry(state, id, (dir, name));
    }
    leases::drop_uncovered(state, id.ino, Some(dir));
}

/// Returns the node id for a reply about an inode.
fn nodeid_for_reply(state: &mut State, id: NodeId) -> u64 {
    match record(state, id).kernel.is_known() {
        false => state.kernel.nodeids.assign_if_reused(id.ino),
        true => state.kernel.nodeids.nodeid(id.ino),
    }
}

/// Keeps a node id for the inode that the kernel knows by it, when another inode has taken the inode number.
fn keep_old_nodeid(state: &mut State, id: NodeId) {
    let is_root = id.ino == state.store.root();
    let Some(old) = state.store.inode_mut(id.ino).filter(|old| old.id != id && !is_root) else { return };
    let Some(lookups) = old.kernel.take_lookups() else { return };
    let gone = old.take_unlinked_attr();
    let old = old.id;
    drop_reused_inode(state, old.ino);
    state.kernel.nodeids.reuse(old, lookups, gone);
    // Requests that have yet to begin mean the old inode too.
    let means_it = |op: &Op| op.nodes_by_number().into_iter().flatten().any(|ino| ino == id.ino);
    let parked = state.calls.queued().filter(|(_, op)| means_it(op)).map(|(op, _)| op);
    let waiting: Vec<OpId> = parked.chain(state.store.suspended.waiting_for(id.ino)).collect();
    for op in waiting {
        waiting::fail(state, op, Errno::STALE);
    }
}

/// Gives an inode a new node id if it has the id of a directory that a local change removed, on a filesystem
/// without birth times. The kernel keeps that directory dead (`S_DEAD` in `vfs_rmdir`), and would do so with the
/// new inode.
fn keep_removed_nodeid(state: &mut State, id: NodeId) {
    let Some(inode) = state.store.inode_of_mut(id) else { return };
    let Some(gone) = inode.take_unlinked_attr() else { return };
    if let Some(lookups) = inode.kernel.take_lookups() {
        state.kernel.nodeids.alias(id, lookups, Some(gone));
    }
}

/// Drops an inode whose number was reused, according to a reply. Invalidates the old inode in the kernel, because
/// no recall will cover it and the reply may be late. New requests must not join calls for the old inode.
fn drop_reused_inode(state: &mut State, ino: u64) {
    state.calls.leave_joins_of_inode(ino);
    if state.kernel.can_notify() {
        invalidate::invalidate(
            state,
            vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }, KernelInvalidation::Attr { ino }],
            None,
        );
    }
}

/// Invalidates the old directory's names in the kernel.
fn drop_reused_directory(state: &mut State, old: NodeId) {
    if state.store.inode(old.ino).is_some_and(|inode| inode.id == old && inode.kernel.is_known()) {
        let stale = leases::invalidations_under_lease(state, old);
        if !stale.is_empty() {
            invalidate::invalidate(state, stale, None);
        }
    }
}
