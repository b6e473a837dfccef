//! Effects of this mount's own changes on the cached facts and on calls in flight.
//!
//! Nothing here reads a reply (`facts/learn.rs`) or answers a request (`ops`). `made` and `note_dentry` take what was learned
//! since the change was sent, which may be older or newer; of a change that is not sent before it takes effect nothing
//! was. Replies to other calls bind names and set attributes by the same functions.

use crate::calls::{ConcurrentDentry, RaceLog};
use crate::facts::{inodes, leases, order};
use crate::grants::LiveGrant;
use crate::state::State;
use crate::store::CachedEntry;
use crate::view;
use nigh_types::{Attr, Entry, LeaseScope, Name, NodeId};

/// Records in every call in flight that a local change changed an inode.
pub(crate) fn note_inode(state: &mut State, ino: u64) {
    leases::drop_expired(state, ino);
    state.statfs_cache = None;
    state.calls.mark_local_inode(ino);
}

/// Records a local change of a name in all calls in flight, unless the directory was recalled since: calls sent
/// later know better. Runs before anything is learned from that change.
pub(crate) fn note_dentry(state: &mut State, since: &RaceLog, (dir, name): (u64, &Name), id: Option<NodeId>) {
    leases::drop_expired_names(state, dir);
    if let Some(directory) = state.store.dir_mut(dir) {
        directory.version += 1;
    }
    if state.store.id_of(dir).is_some_and(|id| since.has_recall_of(id, LeaseScope::Directory)) {
        return;
    }
    let (cookie, same_lease) =
        (state.store.cookie(name), order::lease_generation_since_sent(state, since, dir));
    let learned = ConcurrentDentry { cookie, id, local: Some(id), lease_generation: same_lease };
    state.calls.mark_local_dentry(dir, name, learned);
}

/// Applies that a change made `name`, or gave it to an inode that has other names.
pub(crate) fn made(state: &mut State, since: &RaceLog, (dir, name): (u64, &Name), entry: &Entry) {
    // A further link: the entry of its only name so far must not go on answering for the inode.
    leases::drop_attr(state, entry.id.ino);
    leases::drop_uncovered(state, entry.id.ino, (entry.attr.nlink == 1).then_some(dir));
    inodes::note_earlier_name(state, entry, (dir, name));
    note_dentry(state, since, (dir, name), Some(entry.id));
}

/// Applies that a directory was made: it is empty, under this grant.
pub(crate) fn made_empty(state: &mut State, id: NodeId, held: LiveGrant) {
    let directory = leases::dir_record(state, id);
    directory.forget();
    directory.held = Some(held);
    directory.complete = true;
}

/// Applies that an inode lost a name. A directory is gone, but processes may still be in it. `after`: its attributes in
/// the reply, where the protocol reports them.
pub(crate) fn unnamed(state: &mut State, node: NodeId, (dir, name): (u64, &Name), after: Option<Attr>) {
    let last =
        after.or_else(|| view::last_attr(state, node)).or_else(|| state.kernel.recent_dirs.attr_of(node));
    inodes::forget_earlier_name(state, node, (dir, name));
    leases::drop_dir_names(state, node.ino);
    if state.store.id_of(node.ino) == Some(node) {
        leases::drop_uncovered(state, node.ino, None);
    }
    let Some(inode) = state.store.inode_of_mut(node) else { return };
    inode.note_name_lost(dir, name);
    if let Some(attr) = last.filter(Attr::is_dir) {
        inode.note_unlinked(attr);
    }
}

/// Applies that an inode moved from one name to another.
pub(crate) fn moved(state: &mut State, node: NodeId, old: (u64, &Name), new: (u64, &Name)) {
    inodes::forget_earlier_name(state, node, old);
    inodes::move_parent_entry(state, node, new);
}

/// Binds a name to `child`, or to nothing, in a directory whose lease lives. Returns the entry in its place before.
pub(crate) fn bind(
    state: &mut State,
    (dir, name): (u64, &Name),
    child: Option<CachedEntry>,
) -> Option<Option<CachedEntry>> {
    let cookie = state.store.cookie(name);
    let directory = state.store.dir_mut(dir)?;
    let old = if child.is_none() && directory.complete {
        directory.rows.remove(cookie, name.as_bytes())
    } else {
        directory.rows.insert(cookie, name.as_bytes(), child)
    };
    state.store.recount(dir);
    old
}

/// Sets the attributes in an inode's parent entry, in a directory whose lease lives. Returns whether that lease covers
/// them.
pub(crate) fn set_entry_attr(state: &mut State, id: NodeId, attr: Attr) -> bool {
    let Some(child) = state.store.child_at_parent_entry(id.ino).filter(|child| child.id == id) else {
        return false;
    };
    // An entry that did not answer for the inode was not updated for new xattrs.
    child.no_xattrs &= child.is_covered();
    child.packed = attr.into();
    child.attr_known = true;
    attr.covered_by_parent()
}
