//! Order of local changes, remote changes and replies that were in flight together.

use crate::calls::{CallKind, ConcurrentDentry, InflightCall, RaceLog};
use crate::grants::LiveGrant;
use crate::state::State;
use crate::view::paths::nodes_to_resolve;
use nigh_types::{Attr, Call, Grant, LeaseScope, Name, NodeId, Reply, Response};

/// Records a name that was learned for local changes in flight: their replies may be older.
pub(crate) fn mark_name_in_flight(state: &mut State, dir: u64, name: &Name, id: Option<NodeId>) {
    let learned =
        ConcurrentDentry { cookie: state.store.cookie(name), id, local: None, lease_generation: None };
    state.calls.mark_name_learned(dir, name, learned);
}

/// Returns the directory's lease generation if its lease has lived without a break since the change was sent, so
/// that the cache received all changes by other clients.
pub(crate) fn lease_generation_since_sent(state: &State, since: &RaceLog, dir: u64) -> Option<u64> {
    let directory = state.store.dir(dir).filter(|_| !since.granted_dirs.contains(&dir))?;
    directory
        .held
        .filter(|held| held.recallable && held.is_live(state.clock))
        .map(|_| directory.lease_generation)
}

/// Returns whether the reply to a local change contradicts what was learned since, without a known order: another
/// local change bound the name otherwise, or other clients may have.
pub(crate) fn is_change_ambiguous(
    state: &State,
    change: &InflightCall,
    dir: u64,
    name: &Name,
    id: Option<NodeId>,
) -> bool {
    let own = change.race_log.name(dir, name).and_then(|learned| learned.local);
    let by_others = change.is_contradicted(dir, name, id)
        && lease_generation_since_sent(state, &change.race_log, dir).is_none();
    by_others || own.is_some_and(|own| own != id)
}

/// Updates the ids of directory grants from a reply, and nothing else of them: the server renumbers a grant with each
/// reply, and ends it by its latest id.
pub(crate) fn refresh_grant_ids(state: &mut State, flight: &InflightCall, grants: &[Grant]) {
    for grant in grants.iter().filter(|g| g.covers == LeaseScope::Directory) {
        let directory = state.store.dir_mut(grant.node.ino).filter(|d| d.id == grant.node);
        let held = directory.and_then(|d| d.held.as_mut());
        if let Some(held) = held.filter(|_| !flight.recalled(grant.node, LeaseScope::Directory)) {
            held.id = held.id.max(grant.id);
        }
    }
}

/// Returns whether a reply may carry attributes older than those of replies in between. A reply that sets the size
/// does not.
pub(crate) fn may_predate_replies(flight: &InflightCall) -> bool {
    !matches!(&flight.resend, Some(Call::SetAttr { set, .. }) if set.size.is_some())
}

/// Returns the files of a change whose attributes other callers await. This includes files that lose a name, as
/// seen by the kernel (`fuse_entry_unlinked`) or by the remote, and files that gain one.
pub(crate) fn changed_files_awaited(state: &State, purpose: &CallKind, response: &Response) -> Vec<u64> {
    let named = match &response.result {
        Ok(Reply::Created { entry, .. }) => Some(entry.id.ino),
        Ok(Reply::Removed { node, .. }) => Some(node.ino),
        Ok(Reply::Renamed { replaced, .. }) => replaced.map(|node| node.ino),
        _ => None,
    };
    let itself = match purpose {
        CallKind::Write { ino, writeback: false, .. } | CallKind::Change { ino, .. } => Some(*ino),
        _ => None,
    };
    let names = purpose.names();
    if named.is_none() && itself.is_none() && names.is_empty() {
        return Vec::new();
    }
    let is_at = |ino: u64| {
        let inode = state.store.inode(ino);
        inode.is_some_and(|inode| names.iter().any(|(dir, name)| inode.is_at(*dir, name)))
    };
    let asked = state.calls.inodes_with_attr_call();
    let told = state.kernel.inodes_of_queued_replies();
    asked.chain(told).filter(|ino| named == Some(*ino) || itself == Some(*ino) || is_at(*ino)).collect()
}

/// Returns whether the call's inode has lost its number since: the reply is about no inode that is known now.
pub(crate) fn is_for_old_inode(state: &State, flight: &InflightCall) -> bool {
    let ino = match flight.purpose {
        CallKind::Attr { ino }
        | CallKind::ReadLink { ino }
        | CallKind::Xattrs { ino }
        | CallKind::Open { ino, .. } => ino,
        _ => return false,
    };
    let asked = flight.resend.as_ref().and_then(|call| nodes_to_resolve(call)[0]);
    !flight.is_mutation() && asked.is_some_and(|asked| state.store.id_of(ino).is_some_and(|id| id != asked))
}

/// Returns the grant on an inode's attributes in a reply: its own grant, or the lease of the directory where it was
/// found. What was known of that directory before keeps its earlier end.
pub(crate) fn grant_in_reply(
    state: &State,
    flight: &InflightCall,
    id: NodeId,
    attr: &Attr,
    grants: &[Grant],
) -> Option<LiveGrant> {
    let parent_entry = state.store.inode(id.ino).and_then(|i| i.parent_entry());
    let dir = parent_entry.and_then(|(dir, _)| state.store.id_of(*dir)).filter(|_| attr.covered_by_parent());
    let own = flight.granted(grants, id, LeaseScope::Attributes);
    let granted = own.or_else(|| flight.granted(grants, dir?, LeaseScope::Directory));
    granted.map(|grant| LiveGrant::begin(grant, flight.sent))
}

/// Returns whether the known state of a name is newer than a listing that was sent before.
pub(crate) fn is_newer_than_listing(state: &State, seen: &RaceLog, dir: u64, name: &Name) -> bool {
    let known = seen.remote_names.get(&dir).and_then(|names| names.get(name));
    known.is_some_and(|known| is_known(state, dir, *known))
}

/// Returns whether the directory has had no gap since.
fn is_known(state: &State, dir: u64, since: Option<u64>) -> bool {
    since.is_some() && since == state.store.dir(dir).map(|directory| directory.lease_generation)
}

/// Returns whether other clients changed names whose state has been unknown since, so that a listing sent before
/// may show their old or their new state.
pub(crate) fn is_outdated(state: &State, seen: &RaceLog, dir: u64) -> bool {
    let mut names = seen.remote_names.get(&dir).into_iter().flatten();
    names.any(|(name, known)| !state.store.suspended.has_name(dir, name) && !is_known(state, dir, *known))
}
