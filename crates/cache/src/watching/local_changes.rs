//! Local changes: the kernel has reported them to watchers, so they update the snapshots and are not reported again.

use crate::calls::{CallKind, InflightCall, attr_after};
use crate::inotify::{ComparedAttrs, RemoteChange, SnapshotEntry, seen_child};
use crate::state::State;
use nigh_types::{Attr, Name, NodeId, Reply, Response};

/// Applies a local change with a reply to the snapshots.
pub(crate) fn note_local_change(state: &mut State, flight: &InflightCall, response: &Response) {
    if state.watches.is_empty() || !flight.is_mutation() {
        return;
    }
    // The kernel takes a change whose caller was killed for not done.
    if flight.waiters.is_empty() {
        let dirs: Vec<u64> = flight.purpose.names().iter().map(|(dir, _)| *dir).collect();
        return dirs.into_iter().for_each(|dir| state.watches.compare_again(state.clock, dir));
    }
    if response.result.is_ok() {
        for (dir, name) in flight.purpose.names() {
            state.watches.supersede(dir, name);
        }
    }
    match (&flight.purpose, &response.result) {
        (CallKind::Create { dir, name, .. }, Ok(Reply::Created { entry, .. })) => {
            let seen = SnapshotEntry::new(entry.id, entry.attr.kind(), Some(ComparedAttrs::of(&entry.attr)));
            snapshot_name(state, *dir, name, Some(seen));
            snapshot_attr(state, entry.id, Some(&entry.attr));
        }
        (CallKind::Remove { dir, name }, Ok(Reply::Removed { .. })) => snapshot_name(state, *dir, name, None),
        (CallKind::Rename { .. }, Ok(Reply::Renamed { moved, replaced, whiteout, .. })) => {
            snapshot_rename(state, &flight.purpose, *moved, *replaced, *whiteout, response);
        }
        (CallKind::Change { ino, .. } | CallKind::Write { ino, .. } | CallKind::Open { ino, .. }, Ok(_)) => {
            if let Some(id) = state.store.id_of(*ino) {
                snapshot_attr(state, id, None);
            }
        }
        _ => {}
    }
    if let Ok(Reply::Attr(id, attr)) = &response.result {
        snapshot_attr(state, *id, Some(attr));
    }
    for (id, attr) in &response.after {
        snapshot_attr(state, *id, Some(attr));
    }
    for (dir, name) in flight.purpose.names() {
        state.watches.compare_again_if_skipped(state.clock, dir, name);
    }
}

/// Returns the part of a change that is still to be reported; `None`: local changes have overtaken it.
pub(crate) fn unreported_part(state: &State, number: u64, change: &RemoteChange) -> Option<RemoteChange> {
    let overtaken = |(dir, name): (u64, &Name)| state.watches.is_superseded(number, dir, name);
    let RemoteChange::Moved { from, name, to, new_name, node, kind } = change else {
        return (!change.names().into_iter().any(overtaken)).then(|| change.clone());
    };
    let (node, kind) = (*node, *kind);
    match (overtaken((*from, name)), overtaken((*to, new_name))) {
        (false, false) => Some(change.clone()),
        (true, false) => Some(RemoteChange::Made { dir: *to, name: new_name.clone(), kind }),
        (false, true) => {
            Some(RemoteChange::Removed { dir: *from, name: name.clone(), node, kind, replaced: false })
        }
        (true, true) => None,
    }
}

fn snapshot_name(state: &mut State, dir: u64, name: &Name, seen: Option<SnapshotEntry>) {
    state.watches.set_name(dir, name, seen);
}

/// Updates an inode's attributes in the snapshots after a local change; `None`: they are unknown.
fn snapshot_attr(state: &mut State, id: NodeId, attr: Option<&Attr>) {
    let stat = attr.map(ComparedAttrs::of);
    if attr.is_some_and(|attr| attr.nlink > 1 && !attr.is_dir()) {
        return state.watches.set_stat(id, stat);
    }
    let Some((dir, name)) = state.store.inode(id.ino).and_then(|inode| inode.parent_entry().cloned()) else {
        return;
    };
    if let Some(seen) = state.watches.seen(dir, &name, id).copied() {
        state.watches.set_name(dir, &name, Some(seen.with_stat(stat)));
    }
}

fn snapshot_rename(
    state: &mut State,
    purpose: &CallKind,
    moved: NodeId,
    replaced: Option<NodeId>,
    whiteout: Option<NodeId>,
    response: &Response,
) {
    let CallKind::Rename { from, name, to, new_name, exchange, .. } = purpose else { return };
    if !exchange && replaced == Some(moved) {
        return;
    }
    let found = snapshot_entry_of(state, (*from, name), (*to, new_name), moved, response);
    let other = replaced.filter(|_| *exchange).or(whiteout);
    let other = other.and_then(|id| snapshot_entry_of(state, (*to, new_name), (*from, name), id, response));
    snapshot_name(state, *from, name, other);
    snapshot_name(state, *to, new_name, found);
}

/// Returns the snapshot entry of an inode that moves from one name to another.
fn snapshot_entry_of(
    state: &State,
    (from, name): (u64, &Name),
    (to, new_name): (u64, &Name),
    id: NodeId,
    response: &Response,
) -> Option<SnapshotEntry> {
    if let Some(attr) = attr_after(response, id.ino) {
        return Some(SnapshotEntry::new(id, attr.kind(), Some(ComparedAttrs::of(&attr))));
    }
    // The rename has changed its ctime.
    let seen = state.watches.seen(from, name, id).map(|seen| seen.with_stat(None));
    seen.or_else(|| state.store.child(to, new_name).filter(|child| child.id == id).map(seen_child))
}
