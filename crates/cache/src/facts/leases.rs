//! End of facts: of a directory lease, of an inode's attributes and pages; and what the kernel holds under them.

use crate::config::OnDisconnect;
use crate::facts::forgetting;
use crate::grants::LiveGrant;
use crate::kernel::{MAX_SINGLE_DENTRIES, NotifyLevel};
use crate::op::KernelInvalidation;
use crate::out::invalidate;
use crate::pages::ChangeToken;
use crate::state::State;
use crate::store::{CachedEntry, Directory, Inode};
use crate::view;
use nigh_types::{Attr, Bug, GrantId, LeaseScope, Name, NodeId, Time, planted};

pub(crate) fn dir_record(state: &mut State, id: NodeId) -> &mut Directory {
    if let Some(limit) = state.config.dir_timeout {
        state.idle_due.get_or_insert(state.clock.after(limit));
    }
    state.store.dir_or_insert(state.clock, id)
}

/// Drops attributes because a recall of them raced with a local change.
pub(crate) fn discard_uncertain_attr(state: &mut State, id: NodeId) {
    state.calls.mark_uncertain((id, LeaseScope::Attributes));
    drop_attr(state, id.ino);
    if state.kernel.can_notify() {
        invalidate::invalidate(state, vec![KernelInvalidation::Attr { ino: id.ino }], None);
    }
}

/// Drops attributes because the order of two replies is not known.
pub(crate) fn drop_attr(state: &mut State, ino: u64) {
    let Some(inode) = state.store.inode_mut(ino) else { return };
    inode.drop_own_attr();
    inode.drop_xattrs();
    if let Some(child) = state.store.child_at_parent_entry(ino) {
        child.attr_known = false;
    }
}

/// Drops an inode's expired facts, as `drop_expired_names` does for a directory.
pub(crate) fn drop_expired(state: &mut State, ino: u64) {
    let clock = state.clock;
    let Some(inode) = state.store.inode_mut(ino) else { return };
    inode.drop_expired(clock);
    if let Some(dir) = inode.parent_entry().map(|(dir, _)| *dir) {
        drop_expired_names(state, dir);
    }
}

/// Returns a directory with its live lease; ends the lease if its deadline has passed.
pub(crate) fn live_directory(state: &mut State, now: Time, dir: u64) -> Option<(&mut Directory, LiveGrant)> {
    if state.store.dir(dir)?.held.is_some_and(|h| !h.is_live(now)) {
        if state.config.on_disconnect == OnDisconnect::Stale {
            // Stale mode may serve the names later (see `drop_expired_names`); until then no request gets them.
            detach_listings(state, dir);
        } else {
            end_directory_lease(state, dir);
        }
        return None;
    }
    let directory = state.store.dir_mut(dir)?;
    directory.note_use(now);
    let held = directory.held?;
    Some((directory, held))
}

/// Drops the dentries of a directory that is found by another name than before. Other clients moved it, or it is a
/// new directory with the number of one that is gone, which such a remote does not tell apart.
pub(crate) fn discard_moved_dir(state: &mut State, id: NodeId, at: (u64, &Name)) {
    let parent_entry = state.store.inode(id.ino).and_then(|inode| inode.parent_entry());
    if parent_entry.is_some_and(|(dir, name)| (*dir, name) == at) {
        return;
    }
    let Some(directory) = state.store.dir(id.ino) else { return };
    let dentry_leases = directory
        .dentry_leases
        .names()
        .map(|name| KernelInvalidation::Entry { dir: id.ino, name: name.clone() });
    let dentry_leases = dentry_leases.collect();
    discard_dir(state, id, dentry_leases);
}

/// Drops all facts about a directory, here and in the kernel, if a failed change contradicts them: its errno says
/// whether a name exists (`None`: that something else is wrong with it).
pub(crate) fn discard_uncertain_name(state: &mut State, dir: u64, name: &Name, exists: Option<bool>) {
    let cookie = state.store.cookie(name);
    if let Some(directory) = state.store.dir_mut(dir) {
        directory.dentry_leases.remove(name);
    }
    let Some(directory) = state.store.dir(dir).filter(|d| d.held.is_some()) else { return };
    let listed = directory.find(cookie, name).map(|child| child.is_some());
    if listed.is_none() || listed == exists {
        return;
    }
    let id = directory.id;
    discard_dir(state, id, Vec::new());
}

/// Drops a directory's facts if its entries contradict a reply to a local change that may be older than the lease:
/// either may be right.
pub(crate) fn discard_if_contradicted(state: &mut State, dir: NodeId, name: &Name, id: Option<NodeId>) {
    let Some(directory) = state.store.dir(dir.ino) else { return };
    let listed = directory.find(state.store.cookie(name), name);
    if listed.is_some_and(|child| child.map(|child| child.id) != id) {
        discard_uncertain_dir(state, dir);
    }
}

/// Drops a directory's facts because a recall raced with a local change: what was learned since may be older or
/// newer than the change.
pub(crate) fn discard_uncertain_dir(state: &mut State, dir: NodeId) {
    state.calls.mark_uncertain((dir, LeaseScope::Directory));
    discard_dir(state, dir, Vec::new());
}

/// Drops a directory's names here, and invalidates them and `more` in the kernel.
fn discard_dir(state: &mut State, dir: NodeId, more: Vec<KernelInvalidation>) {
    let mut stale = more;
    stale.extend(invalidations_under_lease(state, dir));
    drop_dir_names(state, dir.ino);
    if state.kernel.can_notify() && !stale.is_empty() {
        invalidate::invalidate(state, stale, None);
    }
}

/// Drops a directory's names, dentry leases included.
pub(crate) fn drop_dir_names(state: &mut State, dir: u64) {
    if let Some(directory) = state.store.dir_mut(dir) {
        directory.dentry_leases.clear();
    }
    end_directory_lease(state, dir);
}

/// Ends a directory's lease here and drops the names under it. The kernel is not invalidated: its timeouts have ended,
/// or the caller does it.
pub(crate) fn end_directory_lease(state: &mut State, dir: u64) {
    detach_listings(state, dir);
    let mut listed = Vec::new();
    if let Some(directory) = state.store.dir_mut(dir) {
        // Leases of this kind end by time, and would leave records behind again and again.
        if directory.held.is_some_and(|held| !held.recallable) {
            listed = own_records(directory);
        }
        directory.forget();
    }
    state.store.recount(dir);
    for ino in listed {
        // A job that brings a directory needs its record.
        if state.prefetch.expected_by(ino).is_none() {
            forgetting::drop_if_idle(state, ino);
        }
    }
}

/// Returns the entries that have records of their own: if the kernel never looked one up, only the listing leads to it.
fn own_records(directory: &Directory) -> Vec<u64> {
    let children = directory.rows.iter().filter_map(|row| row.child);
    children.filter(|child| !child.attr().covered_by_parent()).map(|child| child.id.ino).collect()
}

/// Detaches the directory's listings at the end of its lease: the kernel's cached listing is invalidated. Entries
/// of a listing in flight go on serving its waiters only.
fn detach_listings(state: &mut State, dir: u64) {
    state.watches.mark_unsettled(state.clock, dir);
    let Some(directory) = state.store.dir_mut(dir) else { return };
    let flight = directory.listing.and_then(|call| state.calls.inflight_mut(call));
    if let Some(flight) = flight.filter(|f| f.has_chunk && f.detached_entries.is_none()) {
        let listed = directory.progress.unwrap_or_default();
        flight.detached_entries = Some(Box::new(directory.rows.up_to(listed)));
    }
    directory.progress = None;
    let listed = directory.kernel_version.take().is_some();
    if listed && state.store.inode(dir).is_some_and(|i| i.opens().is_open()) {
        invalidate::invalidate(
            state,
            vec![KernelInvalidation::Data { ino: dir, offset: 0, length: 0 }],
            None,
        );
    }
}

/// Drops names whose lease has ended. In stale mode they are kept until memory is short, because they may yet be
/// served ([`OnDisconnect::Stale`]), but not once a local change has made them outdated.
pub(crate) fn drop_expired_names(state: &mut State, dir: u64) {
    if state.store.dir(dir).is_some_and(|d| d.held.is_some_and(|held| !held.is_live(state.clock))) {
        end_directory_lease(state, dir);
    }
}

/// Begins another grant on a directory's names. Facts under a live grant with recall stay known, since the kernel
/// may have them; so all of them end at the earlier deadline (page 0004, rule 1). Under a grant that only ends by
/// itself the kernel's timeouts end with it, and the older facts are dropped.
pub(crate) fn renew_lease(state: &mut State, now: Time, dir: NodeId, fresh: LiveGrant) {
    let old = live_directory(state, now, dir.ino).map(|(_, old)| old);
    let mut held = fresh;
    match old.filter(|old| old.recallable && fresh.recallable) {
        Some(old) => {
            held.deadline = held.deadline.min(old.deadline);
            held.id = held.id.max(old.id);
        }
        None => {
            end_directory_lease(state, dir.ino);
            note_lease_begin(state, dir.ino);
        }
    }
    dir_record(state, dir).held = Some(held);
}

/// Records that a grant on a directory's names is returned, or about to be.
pub(crate) fn note_grant_returned(state: &mut State, dir: NodeId, id: GrantId) {
    state.store.note_grant_returned(dir, id, state.calls.is_empty());
}

/// Records a new directory lease for local changes in flight: they may have been made before it.
pub(crate) fn note_lease_begin(state: &mut State, dir: u64) {
    state.calls.mark_lease_begin(dir);
}

/// Returns the invalidations for an entry that is gone, or leads to `id` now: no recall will cover the old entry.
pub(crate) fn invalidations_for_replaced(
    state: &mut State,
    (dir, name): (u64, &Name),
    old: Option<&CachedEntry>,
    id: Option<NodeId>,
) -> Vec<KernelInvalidation> {
    if id == old.map(|c| c.id) {
        return Vec::new();
    }
    let held = state.store.dir(dir).and_then(|d| d.held);
    let drops = held.is_none_or(|held| state.kernel.level().gives_dentries(&held));
    let entry = drops.then_some(KernelInvalidation::Entry { dir, name: name.clone() });
    let Some(child) = old else { return entry.into_iter().collect() };
    let Some(inode) = state.store.inode_of_mut(child.id) else {
        return Vec::new();
    };
    inode.drop_xattrs();
    inode.kernel.end_attr_timeout();
    if !inode.kernel.is_known() {
        return Vec::new();
    }
    entry.into_iter().chain([KernelInvalidation::Attr { ino: child.id.ino }]).collect()
}

/// Drops pages of another data version than these attributes tell, under a grant that is not recalled before all
/// changes: no caller may read old data beside the new attributes until the grant ends.
pub(crate) fn drop_other_version(state: &mut State, now: Time, id: NodeId, attr: &Attr) {
    let Some(inode) = state.store.inode_of_mut(id) else { return };
    let grant = inode.pages().live_grant(now);
    let is_limited = grant.is_some_and(|h| !h.recalled_before_any_change() && !h.stale);
    if !is_limited || !inode.pages().is_of_another_version(ChangeToken::of(attr)) {
        return;
    }
    inode.drop_pages();
    // Pages of a file that is not open are dropped by its next open.
    if inode.opens().is_open() {
        mark_pages_stale(state, id.ino, false);
        invalidate::invalidate(
            state,
            vec![KernelInvalidation::Data { ino: id.ino, offset: 0, length: 0 }],
            None,
        );
    }
}

/// Marks a file's pages as stale: the data grant ends, and an invalidation of the pages follows. `unbroken`: the
/// grant ends before its time, with its session. A file that is not open for writing has no stores.
pub(crate) fn mark_pages_stale(state: &mut State, ino: u64, unbroken: bool) {
    let after = state.kernel.last_invalidation();
    let Some(inode) = state.store.inode_mut(ino) else { return };
    let is_written = inode.opens().is_written();
    inode.pages_if_any().into_iter().for_each(|pages| pages.note_stale(after, unbroken, is_written));
}

/// Returns what the kernel holds under a directory lease.
pub(crate) fn invalidations_under_lease(state: &mut State, node: NodeId) -> Vec<KernelInvalidation> {
    let mut stale = invalidations_under_lease_without_pages(state, node);
    stale.extend(invalidations_of_pages(state, (node, LeaseScope::Directory)));
    stale
}

/// Returns it without pages of files.
pub(crate) fn invalidations_under_lease_without_pages(
    state: &mut State,
    node: NodeId,
) -> Vec<KernelInvalidation> {
    let Some((directory, inodes)) = state.store.dir_and_inodes(node) else { return Vec::new() };
    let Some(held) = directory.held else { return Vec::new() };
    let ino = node.ino;
    let mut stale = vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }];
    directory.kernel_version = None;
    let missing = std::mem::take(&mut directory.has_negative_dentries);
    let drops = state.kernel.level().gives_dentries(&held);
    let mut names: Vec<(u64, Name)> = Vec::new();
    for row in directory.rows.iter() {
        let Some(child) = row.child else { continue };
        let Some(inode) = inodes.of_mut(child.id) else { continue };
        if child.attr().covered_by_parent() {
            inode.drop_xattrs();
        }
        if !inode.kernel.is_known() {
            continue;
        }
        if child.attr().covered_by_parent() {
            stale.push(KernelInvalidation::Attr { ino: child.id.ino });
        }
        if drops {
            names.push((ino, row.to_name()));
        }
    }
    let count = names.len() as u64;
    let missing = match missing {
        true => state.kernel.take_negative_dentries(ino, count),
        false => (count <= MAX_SINGLE_DENTRIES).then(Vec::new),
    };
    if state.kernel.level() == NotifyLevel::All && missing.is_none() {
        // The epoch drops all negative dentries.
        names.extend(state.kernel.take_all_negative_dentries());
        stale.push(KernelInvalidation::AllDentries(names));
    } else {
        let names = names.into_iter().chain(missing.into_iter().flatten());
        stale.extend(names.map(|(dir, name)| KernelInvalidation::Entry { dir, name }));
    }
    stale
}

/// Returns pages of open files that depend on this grant on attributes; closed files have none.
pub(crate) fn invalidations_of_pages(state: &mut State, on: (NodeId, LeaseScope)) -> Vec<KernelInvalidation> {
    view::open_files_under(state, on).into_iter().flat_map(|file| recall_data(state, file)).collect()
}

/// Drops facts of an inode that depended on the directory lease: the inode is covered no more, or by another lease.
/// `still`: the directory whose lease goes on covering it.
pub(crate) fn drop_uncovered(state: &mut State, ino: u64, still: Option<u64>) {
    let Some(inode) = state.store.inode_mut(ino) else { return };
    inode.drop_xattrs();
    let id = inode.id;
    let names =
        inode.pages().grant().map(|held| held.on).filter(|(_, covers)| *covers == LeaseScope::Directory);
    if names.is_some_and(|(dir, _)| Some(dir.ino) != still) {
        mark_pages_stale(state, ino, false);
        let stale = recall_data(state, id);
        if state.kernel.can_notify() && !stale.is_empty() {
            invalidate::invalidate(state, stale, None);
        }
    }
}

pub(crate) fn recall_inode(state: &mut State, node: NodeId) -> Vec<KernelInvalidation> {
    let mut stale = invalidations_of_pages(state, (node, LeaseScope::Attributes));
    let Some(inode) = state.store.inode_of_mut(node) else { return Vec::new() };
    inode.drop_own_attr();
    inode.drop_xattrs();
    let known = inode.kernel.is_known();
    forgetting::drop_if_idle(state, node.ino);
    if known {
        stale.push(KernelInvalidation::Attr { ino: node.ino });
    }
    stale
}

/// Handles a data recall. Local reads and writes in flight were sent before the recall and get their replies after
/// it: their pages may be older than the next grant.
pub(crate) fn recall_data(state: &mut State, node: NodeId) -> Vec<KernelInvalidation> {
    let ino = node.ino;
    if !planted(Bug::KeepsContents) {
        state.drop_contents(ino);
    }
    let Some(inode) = state.store.inode_mut(ino).filter(|i| i.id == node) else { return Vec::new() };
    inode.drop_pages();
    if !inode.kernel.is_known() {
        return Vec::new();
    }
    state.calls.drop_pages_of(ino, false);
    vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }]
}

/// Keeps serving facts after their grants have ended. The kernel gets them without a timeout.
pub(crate) fn mark_facts_stale(state: &mut State) {
    state.store.dirs_mut().for_each(|dir| {
        dir.held = dir.held.map(LiveGrant::into_stale);
        dir.dentry_leases.keep_as_stale();
    });
    state.store.inodes_mut().for_each(Inode::keep_as_stale);
}

/// Drops an inode's xattrs.
pub(crate) fn drop_xattrs(state: &mut State, ino: u64) {
    let Some(inode) = state.store.inode_mut(ino) else { return };
    inode.drop_xattrs();
    if let Some(child) = state.store.child_at_parent_entry(ino) {
        child.no_xattrs = false;
    }
}

#[cfg(test)]
mod tests;
