//! Remote changes for inotify watchers (docs/decisions/0017-events.md).
//!
//! Each watched directory has a snapshot: its state as last reported to watchers. When its names are no longer granted,
//! for whatever reason, it is listed again and compared. The difference is put out as [`RemoteChange`]s
//! ([`crate::Cache::poll_change`]). Local changes update the snapshot with their replies, since the kernel has reported them.
//!
//! Invariant: a snapshot that is not `unsettled` equals the directory's facts, and these are granted.

use crate::calls::InflightCall;
use crate::facts::leases;
use crate::inotify::{MOST_LISTINGS, TOGETHER, seen};
use crate::op::OpReply;
use crate::ops::listings;
use crate::out::{invalidate, sending};
use crate::state::State;
use crate::view;
use nigh_types::{Kind, Name, Span, Time};
use std::collections::BTreeSet;

/// Sets the watched inodes: directories, and files in their directories. `all`: also every directory with a
/// complete listing in memory.
pub(crate) fn handle_watch(state: &mut State, now: Time, inos: &BTreeSet<u64>, all: bool) {
    state.clock = now;
    let mut wanted: BTreeSet<u64> = inos.iter().flat_map(|ino| watched_by(state, *ino)).collect();
    if all {
        wanted.extend(state.store.dirs().filter(|(_, directory)| directory.complete).map(|(ino, _)| ino));
    }
    state.watches.set(now, wanted);
}

/// Returns the directories in which changes of an inode show; itself and its parent if its kind is unknown.
fn watched_by(state: &State, ino: u64) -> Vec<u64> {
    if state.store.id_of(ino).is_none() {
        return Vec::new();
    }
    let above = state.store.inode(ino).and_then(|inode| inode.parent_entry()).map(|(dir, _)| *dir);
    let kind = view::kind_of(state, ino);
    let itself = (state.store.is_directory(ino)
        || ino == state.store.root()
        || kind.is_none_or(|k| k == Kind::Directory))
    .then_some(ino);
    let above = above.filter(|_| kind != Some(Kind::Directory));
    itself.into_iter().chain(above).collect()
}

/// Invalidates a dentry, so that the kernel looks the name up.
pub(crate) fn invalidate_name(state: &mut State, dir: u64, name: &Name) {
    invalidate::invalidate(state, vec![crate::KernelInvalidation::Entry { dir, name: name.clone() }], None);
}

/// Returns an inode's cached attributes, without a timeout; if there are none, they are fetched so that the cache
/// soon has them.
pub(crate) fn attributes_without_timeout(state: &mut State, now: Time, ino: u64) -> Option<OpReply> {
    let id = state.store.id_of(ino)?;
    if let Some((attr, _)) = view::cached_attr(state, now, id) {
        return Some(OpReply::Attr(id, attr, Span::ZERO));
    }
    if state.session.is_active() {
        // No request waits: if the call cannot be sent, the attributes stay unknown.
        let _ = sending::fetch_attr(state, now, ino);
    }
    None
}

/// Does due work: lists directories without a lease, and compares those that are ready.
pub(crate) fn compare_watched(state: &mut State) {
    let now = state.clock;
    while let Some(dir) = state.watches.take_ended(now) {
        leases::live_directory(state, now, dir);
    }
    if !state.session.is_active() {
        return;
    }
    while state.watches.is_walk_due(now) {
        let (ready, waiting) = walk_unsettled(state, now);
        if state.watches.is_compare_due(now, !ready.is_empty(), waiting) {
            compare(state, &ready);
            // Directories without a lease stay unsettled.
            state.watches.note_listed();
        }
    }
}

/// Lists due directories, up to the limit. Returns those ready for comparison, and whether others soon will be.
fn walk_unsettled(state: &mut State, now: Time) -> (Vec<u64>, bool) {
    let (mut ready, mut listed, mut waiting, mut next) = (Vec::new(), 0, false, None);
    for dir in state.watches.unsettled() {
        let Some((due, compares)) = state.watches.due_of(dir) else { continue };
        if compares
            || leases::live_directory(state, now, dir).is_some_and(|(directory, _)| directory.complete)
        {
            ready.push(dir);
            continue;
        }
        let lists = state.store.dir(dir).is_some_and(|directory| directory.listing.is_some());
        waiting |= lists || due <= now.after(TOGETHER);
        if lists {
            // The end of the listing sets `changed`.
            listed += 1;
            continue;
        }
        if due <= now && listed < MOST_LISTINGS {
            listed += 1;
            relist_watched(state, now, dir);
        }
        // Directories over the limit are visited when a listing has ended.
        let due = state.watches.due_of(dir).map(|(due, _)| due).filter(|due| *due > now);
        next = next.into_iter().chain(due).min();
    }
    state.watches.end_pass(next);
    (ready, waiting)
}

fn relist_watched(state: &mut State, now: Time, dir: u64) {
    let is_sent = listings::list(state, now, dir).is_ok();
    state.watches.note_look(now, dir, is_sent);
}

/// Handles the end of a listing. Without a grant the directory is listed again, at growing intervals.
pub(crate) fn on_watched_listing(state: &mut State, now: Time, dir: u64, flight: &InflightCall) {
    let detached = flight.detached_entries.as_ref();
    let is_compared = state.watches.note_listing(now, dir, detached.map(|rows| rows.existing()));
    if let Some(rows) = detached.filter(|_| is_compared) {
        let skipped = flight.race_log.local_dentries(dir).map(|(name, _)| name.clone()).collect();
        let rows = rows.iter().filter_map(|row| {
            seen(row).map(|(name, seen)| {
                let older = flight.race_log.local_inodes.contains(&seen.id.ino);
                (name, seen.with_stat(seen.stat.filter(|_| !older)))
            })
        });
        state.watches.keep_detached(dir, (rows.collect(), skipped));
    }
}

fn compare(state: &mut State, ready: &[u64]) {
    let busy = state.calls.inodes_in_flight();
    let mut differences = Vec::new();
    for &dir in ready {
        let skipped: BTreeSet<Name> = state.calls.names_in_flight(dir).into_iter().collect();
        differences.extend(state.watches.compare(dir, skipped, &busy, state.store.dir(dir)));
    }
    state.watches.report_differences(differences);
}

#[cfg(test)]
mod tests;
