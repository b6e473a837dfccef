//! Updates in place: other clients' changes while the grants go on, first prepared, then committed. See
//! docs/decisions/0014-pushes.md.
//!
//! In between the cache serves no suspended fact. A name or attributes are asked of the remote like any unknown fact; a
//! listing waits, for a second at most.

use crate::calls::CallKind;
use crate::facts::{inodes, learn, leases, order};
use crate::inotify::RemoteUpdate;
use crate::kernel::{NotifyLevel, OnInvalidated};
use crate::memory::evict;
use crate::op::KernelInvalidation;
use crate::ops::restart;
use crate::out::{invalidate, pins, sending};
use crate::state::State;
use crate::store::CachedEntry;
use crate::view::{self, locked, paths};
use crate::watching::remote_changes;
use nigh_types::{
    Attr, Call, Entry, LeaseScope, Name, NodeId, Time, UpdateCommit, UpdatePrepare, UpdateScope, UpdatedFact,
};
use std::collections::BTreeSet;

/// Splits suspended facts into single ones.
fn facts_of(held: &[UpdateScope]) -> impl Iterator<Item = (NodeId, Option<Name>)> + '_ {
    held.iter().flat_map(|held| {
        let names = held.names.iter().map(|name| (held.node, Some(name.clone())));
        let whole = (held.covers == LeaseScope::Attributes).then_some((held.node, None));
        names.chain(whole)
    })
}

/// Handles the preparation of a remote change: suspends the facts, and acknowledges once the kernel has none of
/// them.
pub(crate) fn handle_update_prepare(state: &mut State, now: Time, hold: UpdatePrepare) {
    tracing::debug!(target: "nigh::hold", facts = hold.facts.len());
    let id = hold.id;
    let mut stale = Vec::new();
    for held in &hold.facts {
        match held.covers {
            LeaseScope::Directory => {
                for name in &held.names {
                    pins::pin_open_at(state, held.node.ino, name);
                    stale.extend(invalidations_for_name(state, now, held.node, name));
                }
            }
            LeaseScope::Attributes => {
                pins::pin_open(state, held.node.ino);
                stale.extend(invalidations_for_inode(state, held.node));
            }
            LeaseScope::Data | LeaseScope::Dentry | LeaseScope::NegativeDentry => {}
        }
    }
    state.store.suspended.begin(hold);
    invalidate::invalidate_then(state, stale, OnInvalidated::Acknowledge(id));
}

/// Returns what the kernel holds of one name under its directory lease. Calls in flight may return the name's old
/// state.
fn invalidations_for_name(
    state: &mut State,
    now: Time,
    node: NodeId,
    name: &Name,
) -> Vec<KernelInvalidation> {
    let mut stale = invalidations_for_entry(state, now, node, name);
    // A data grant may outlive the entry (page 0004, rule 1), so open files are found by their grants.
    let files = view::open_files_under(state, (node, LeaseScope::Directory)).into_iter();
    let files: Vec<NodeId> =
        files.filter(|file| !view::is_under_other_name(state, now, *file, node, name)).collect();
    stale.extend(files.into_iter().flat_map(|file| leases::recall_data(state, file)));
    stale
}

/// Returns the dentry, attributes and listing of one name, without pages of files.
fn invalidations_for_entry(
    state: &mut State,
    now: Time,
    node: NodeId,
    name: &Name,
) -> Vec<KernelInvalidation> {
    let dir = node.ino;
    state.calls.mark_remote_name(dir, name, None);
    let cookie = state.store.cookie(name);
    let Some(directory) = state.store.dir_of_mut(node) else { return Vec::new() };
    directory.note_remote_change(now);
    let Some(held) = directory.held else { return Vec::new() };
    let mut stale = Vec::new();
    if directory.kernel_version.take().is_some() {
        stale.push(KernelInvalidation::Data { ino: dir, offset: 0, length: 0 });
    }
    let row = directory.rows.find(cookie, name.as_bytes());
    let child = row.and_then(|row| row.child).map(|child| (child.id, child.attr()));
    let mut known = state.kernel.take_negative_dentry(dir, name);
    if let Some((id, attr)) = child {
        state.calls.mark_remote_inode(id.ino);
        if let Some(inode) = state.store.inode_of_mut(id) {
            // The kernel may have an old dentry under another name.
            known |= inode.kernel.may_have_dentry(now, inode.is_at(dir, name));
            if attr.covered_by_parent() {
                inode.drop_xattrs();
                stale.extend((inode.kernel.is_known()).then_some(KernelInvalidation::Attr { ino: id.ino }));
            }
        }
    }
    tracing::trace!(target: "nigh::hold", dir, name = %name.as_bytes().escape_ascii(), known, there = child.is_some());
    if known && state.kernel.level().gives_dentries(&held) {
        stale.push(KernelInvalidation::Entry { dir, name: name.clone() });
        state.store.suspended.note_expired(dir, name);
        name_dropped(state, dir, name, child.map(|(id, _)| id));
    }
    stale
}

/// Records that the kernel no longer trusts a dentry, until the next reply about it.
fn name_dropped(state: &mut State, dir: u64, name: &Name, led_to: Option<NodeId>) {
    let inode = led_to.and_then(|id| state.store.inode_of_mut(id));
    if let Some(inode) = inode.filter(|inode| inode.is_at(dir, name)) {
        inode.kernel.end_entry_timeout();
    }
}

/// Returns what the kernel holds of an inode under its own grant.
fn invalidations_for_inode(state: &mut State, node: NodeId) -> Vec<KernelInvalidation> {
    state.calls.mark_recalled((node, LeaseScope::Attributes), true);
    let mut stale = leases::invalidations_of_pages(state, (node, LeaseScope::Attributes));
    if let Some(inode) = state.store.inode_of_mut(node) {
        inode.drop_xattrs();
        stale.extend((inode.kernel.is_known()).then_some(KernelInvalidation::Attr { ino: node.ino }));
    }
    stale
}

/// Handles a commit: the suspended facts change to these.
pub(crate) fn handle_update_commit(state: &mut State, now: Time, commit: UpdateCommit) {
    let Some(held) = state.store.suspended.end(commit.id) else { return };
    state.counters.updated_in_place += 1;
    let mut left: Vec<(NodeId, Option<Name>)> = facts_of(&held).collect();
    let mut pushed = RemoteUpdate::default();
    let (mut replaced, mut found) = (Vec::new(), BTreeSet::new());
    for fact in commit.facts {
        let of = match &fact {
            UpdatedFact::Name { dir, name, .. } => (*dir, Some(name.clone())),
            UpdatedFact::Attr { node, .. } => (*node, None),
        };
        // Facts that were not suspended are ignored.
        let Some(at) = left.iter().position(|held| *held == of) else { continue };
        left.swap_remove(at);
        match fact {
            UpdatedFact::Name { dir, name, entry } => {
                let old = commit_name(state, now, dir, &name, entry.as_ref());
                pushed.name(dir.ino, &name);
                found.extend(entry.map(|entry| entry.id));
                replaced.extend(old.map(|old| (dir.ino, name, old)));
            }
            UpdatedFact::Attr { node, attr } => {
                commit_attr(state, now, node, attr);
                pushed.attr(node, attr);
            }
        }
    }
    remote_changes::note_remote_update(state, &pushed);
    let names = facts_of(&held).filter_map(|(node, name)| Some((node.ino, name?)));
    let expired: BTreeSet<(u64, Name)> =
        names.filter(|name| state.store.suspended.take_expired(name)).collect();
    replaced.retain(|(dir, name, _)| expired.contains(&(*dir, name.clone())));
    // A moved inode keeps its dentry: the kernel finds it under its old path until the next lookup.
    replaced.retain(|(_, _, old)| !found.contains(old));
    drop_replaced(state, replaced);
    for (node, name) in left {
        match name {
            Some(name) if !state.store.suspended.has_name(node.ino, &name) => {
                look_up_uncommitted(state, now, node, name)
            }
            None if !state.store.suspended.has_inode(node.ino) => leases::discard_uncertain_attr(state, node),
            _ => {}
        }
    }
    for directory in held.iter().filter(|held| held.covers == LeaseScope::Directory) {
        if !state.store.suspended.has_names(directory.node.ino) {
            restart::resume_listings(state, now, directory.node.ino);
        }
    }
    evict::trim(state, now);
}

/// Looks up a name that a commit left open: its state could not be told, or it did not change in the end.
fn look_up_uncommitted(state: &mut State, now: Time, dir: NodeId, name: Name) {
    if leases::live_directory(state, now, dir.ino).is_none_or(|(directory, _)| directory.id != dir) {
        return;
    }
    let Some(place) = paths::node_ref(state, dir.ino) else {
        return leases::discard_uncertain_dir(state, dir);
    };
    state.store.suspended.begin_lookup(dir.ino, &name);
    let purpose = CallKind::Lookup { dir: dir.ino, name: name.clone() };
    let call = sending::send(state, now, None, purpose.clone(), Call::Lookup { dir: place, name });
    state.calls.enter_joins(call, purpose);
}

/// Handles the reply to a lookup of a suspended name. `kept`: a fact was made of it.
pub(crate) fn on_suspended_lookup(state: &mut State, now: Time, dir: u64, name: &Name, kept: bool) {
    if !state.store.suspended.end_lookup(dir, name) {
        return;
    }
    if kept {
        let mut pushed = RemoteUpdate::default();
        pushed.name(dir, name);
        remote_changes::note_remote_update(state, &pushed);
    }
    // If another update of the name is in progress, its commit gives the new state.
    if !kept
        && !state.store.suspended.has_name(dir, name)
        && let Some(id) = state.store.id_of(dir)
    {
        leases::discard_uncertain_dir(state, id);
    }
    if !state.store.suspended.has_names(dir) {
        restart::resume_listings(state, now, dir);
    }
}

/// Invalidates dentries that lead to nothing or to another inode by now: open files of the old inode must not be
/// found by that path.
fn drop_replaced(state: &mut State, replaced: Vec<(u64, Name, NodeId)>) {
    let is_known = |id: &NodeId| state.store.inode(id.ino).is_some_and(|inode| inode.kernel.is_known());
    let dropped = replaced.into_iter().filter(|(_, _, old)| is_known(old));
    let stale: Vec<KernelInvalidation> =
        dropped.map(|(dir, name, _)| KernelInvalidation::RemovedDentry { dir, name }).collect();
    if state.kernel.level() == NotifyLevel::All && !stale.is_empty() {
        invalidate::invalidate(state, stale, None);
    }
}

/// Returns whether a dentry that other clients removed or replaced may be dropped: no later reply bound the name,
/// and no local change of the directory that may bind it is in flight.
pub(crate) fn is_dentry_removed(state: &State, dir: u64, name: &Name) -> bool {
    let child = state.store.child(dir, name).and_then(|child| state.store.inode(child.id.ino));
    let is_told = child.is_some_and(|inode| inode.kernel.is_known() && inode.is_at(dir, name));
    !is_told && !locked::is_locked(state, dir)
}

/// Applies a committed name. Returns the inode that it led to before, if that is another one.
fn commit_name(
    state: &mut State,
    now: Time,
    dir: NodeId,
    name: &Name,
    entry: Option<&Entry>,
) -> Option<NodeId> {
    let child = entry.map(CachedEntry::new);
    tracing::trace!(target: "nigh::commit", dir = dir.ino, name = %name.as_bytes().escape_ascii(), there = child.is_some());
    order::mark_name_in_flight(state, dir.ino, name, entry.map(|entry| entry.id));
    if let Some(entry) = entry {
        state.calls.mark_remote_inode(entry.id.ino);
        state.calls.mark_attr_learned(entry.id.ino);
    }
    let cookie = state.store.cookie(name);
    let gaps = leases::live_directory(state, now, dir.ino)
        .filter(|(d, _)| d.id == dir)
        .map(|(directory, _)| directory.lease_generation);
    state.calls.mark_remote_name(dir.ino, name, gaps);
    let directory = state.store.dir_mut(dir.ino).filter(|_| gaps.is_some())?;
    directory.version += 1;
    let old = if child.is_none() && directory.complete {
        directory.rows.remove(cookie, name.as_bytes())
    } else {
        directory.rows.insert(cookie, name.as_bytes(), child)
    };
    state.store.recount(dir.ino);
    if let Some(entry) = entry {
        commit_child(state, now, (dir.ino, name), entry);
    }
    old.flatten().map(|old| old.id).filter(|old| entry.is_none_or(|entry| entry.id != *old))
}

/// Applies a committed child, as far as the cache keeps more than its entry. (Attributes under a grant of its own
/// have a fact of their own.)
fn commit_child(state: &mut State, now: Time, parent_entry: (u64, &Name), entry: &Entry) {
    leases::drop_other_version(state, now, entry.id, &entry.attr);
    let Some(inode) = state.store.inode_of_mut(entry.id) else {
        return;
    };
    inode.drop_xattrs();
    learn::keep_target(state, now, entry.id, entry.target.clone());
    // A hard link's other names may be equally right.
    if entry.attr.covered_by_parent() || entry.attr.is_dir() {
        inodes::note_listed_at(state, entry.id, parent_entry);
    }
}

fn commit_attr(state: &mut State, now: Time, node: NodeId, attr: Attr) {
    state.calls.mark_remote_inode(node.ino);
    state.calls.mark_attr_learned(node.ino);
    leases::drop_other_version(state, now, node, &attr);
    let Some(inode) = state.store.inode_of_mut(node) else { return };
    inode.drop_xattrs();
    inode.replace_own_attr(now, attr);
}

#[cfg(test)]
mod tests;
