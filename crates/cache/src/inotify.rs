//! Remote changes for inotify watchers (docs/decisions/0017-events.md).
//!
//! Each watched directory has a snapshot: its state as last reported to watchers. When its names are no longer granted,
//! for whatever reason, it is listed again and compared. The difference is put out as [`RemoteChange`]s
//! ([`Cache::poll_change`]). Local changes update the snapshot with their replies, since the kernel has reported them.
//!
//! Invariant: a snapshot that is not `unsettled` equals the directory's facts, and these are granted.

mod change;
mod local_changes;
mod remote_changes;
mod snapshot;
#[cfg(test)]
mod tests;
mod watches;

use crate::cache::Cache;
use crate::calls::InflightCall;
use crate::op::OpReply;
pub use change::RemoteChange;
pub(crate) use change::RemoteUpdate;
use nigh_types::{Kind, Name, NodeId, Span, Time};
use snapshot::{ComparedAttrs, SnapshotEntry, seen, seen_child};
use std::collections::BTreeSet;
pub use watches::WatchStatus;
pub(crate) use watches::Watches;
use watches::{MOST_LISTINGS, TOGETHER};

impl Cache {
    /// Sets the watched inodes: directories, and files in their directories. `all`: also every directory with a
    /// complete listing in memory.
    pub fn handle_watch(&mut self, now: Time, inos: &BTreeSet<u64>, all: bool) {
        self.clock = now;
        let mut wanted: BTreeSet<u64> = inos.iter().flat_map(|ino| self.watched_by(*ino)).collect();
        if all {
            wanted.extend(self.store.dirs().filter(|(_, directory)| directory.complete).map(|(ino, _)| ino));
        }
        self.watches.set(now, wanted);
    }

    /// Returns the directories in which changes of an inode show; itself and its parent if its kind is unknown.
    fn watched_by(&self, ino: u64) -> Vec<u64> {
        if self.store.id_of(ino).is_none() {
            return Vec::new();
        }
        let home = self.store.inode(ino).and_then(|inode| inode.parent_entry.as_ref()).map(|(dir, _)| *dir);
        let kind = self.kind_of(ino);
        let itself = (self.store.is_directory(ino)
            || ino == self.store.root()
            || kind.is_none_or(|k| k == Kind::Directory))
        .then_some(ino);
        let home = home.filter(|_| kind != Some(Kind::Directory));
        itself.into_iter().chain(home).collect()
    }

    fn kind_of(&self, ino: u64) -> Option<Kind> {
        let inode = self.store.inode(ino)?;
        if let Some((attr, _)) = inode.own {
            return Some(attr.kind());
        }
        let (dir, name) = inode.parent_entry.as_ref()?;
        let row = self.store.row(*dir, name)?;
        row.child.filter(|child| child.id == inode.id).map(|child| child.attr().kind())
    }

    /// Returns the next change for watchers, and its sequence number; the caller answers with
    /// [`Cache::handle_reported`].
    pub fn poll_change(&mut self) -> Option<(u64, RemoteChange)> {
        self.watches.poll()
    }

    /// Records that a change was reported to watchers, or cannot be.
    pub fn handle_reported(&mut self, change: &RemoteChange) {
        self.watches.note_reported(change);
    }

    /// Reports a gap: the changes in a directory could not be reported to watchers.
    pub fn handle_unreportable(&mut self, dir: u64) {
        self.watches.report_gap(dir);
    }

    /// Invalidates a dentry, so that the kernel looks the name up.
    pub fn invalidate_name(&mut self, dir: u64, name: &Name) {
        self.invalidate(vec![crate::KernelInvalidation::Entry { dir, name: name.clone() }], None);
    }

    /// Returns an inode's cached attributes, without a timeout; if there are none, they are fetched so that the cache
    /// soon has them.
    pub fn attributes_without_timeout(&mut self, now: Time, ino: u64) -> Option<OpReply> {
        let id = self.store.id_of(ino)?;
        if let Some((attr, _)) = self.cached_attr(now, id) {
            return Some(OpReply::Attr(id, attr, Span::ZERO));
        }
        if self.session.is_active() {
            // No request waits: if the call cannot be sent, the attributes stay unknown.
            let _ = self.fetch_attr(now, ino);
        }
        None
    }

    #[must_use]
    pub fn watching(&self) -> WatchStatus {
        self.watches.status()
    }

    /// Returns whether the kernel knows the inode.
    #[must_use]
    pub fn knows(&self, node: NodeId) -> bool {
        self.store.inode(node.ino).is_some_and(|inode| inode.id == node && inode.nlookup > 0)
    }

    /// Does due work: lists directories without a lease, and compares those that are ready.
    pub(crate) fn compare_watched(&mut self) {
        let now = self.clock;
        while let Some(dir) = self.watches.take_ended(now) {
            self.live_directory(now, dir);
        }
        if !self.session.is_active() {
            return;
        }
        while self.watches.is_walk_due(now) {
            let (ready, waiting) = self.walk_unsettled(now);
            if self.watches.is_compare_due(now, !ready.is_empty(), waiting) {
                self.compare(&ready);
                // Directories without a lease stay unsettled.
                self.watches.note_listed();
            }
        }
    }

    /// Lists due directories, up to the limit. Returns those ready for comparison, and whether others soon will be.
    fn walk_unsettled(&mut self, now: Time) -> (Vec<u64>, bool) {
        let (mut ready, mut listed, mut waiting, mut next) = (Vec::new(), 0, false, None);
        for dir in self.watches.unsettled() {
            let Some((due, compares)) = self.watches.due_of(dir) else { continue };
            if compares || self.live_directory(now, dir).is_some_and(|(directory, _)| directory.complete) {
                ready.push(dir);
                continue;
            }
            let lists = self.store.dir(dir).is_some_and(|directory| directory.listing.is_some());
            waiting |= lists || due <= now.after(TOGETHER);
            if lists {
                // The end of the listing sets `changed`.
                listed += 1;
                continue;
            }
            if due <= now && listed < MOST_LISTINGS {
                listed += 1;
                self.relist_watched(now, dir);
            }
            // Directories over the limit are visited when a listing has ended.
            let due = self.watches.due_of(dir).map(|(due, _)| due).filter(|due| *due > now);
            next = next.into_iter().chain(due).min();
        }
        self.watches.end_pass(next);
        (ready, waiting)
    }

    fn relist_watched(&mut self, now: Time, dir: u64) {
        let is_sent = self.list(now, dir).is_ok();
        self.watches.note_look(now, dir, is_sent);
    }

    /// Handles the end of a listing. Without a grant the directory is listed again, at growing intervals.
    pub(crate) fn on_watched_listing(&mut self, now: Time, dir: u64, flight: &InflightCall) {
        let detached = flight.detached_entries.as_ref();
        let is_compared = self.watches.note_listing(now, dir, detached.map(|rows| rows.existing()));
        if let Some(rows) = detached.filter(|_| is_compared) {
            let skipped = flight.race_log.local_dentries(dir).map(|(name, _)| name.clone()).collect();
            let rows = rows.iter().filter_map(|row| {
                seen(row).map(|(name, seen)| {
                    let older = flight.race_log.local_inodes.contains(&seen.id.ino);
                    (name, SnapshotEntry { stat: seen.stat.filter(|_| !older), ..seen })
                })
            });
            self.watches.keep_detached(dir, (rows.collect(), skipped));
        }
    }

    fn compare(&mut self, ready: &[u64]) {
        let busy = self.calls.inodes_in_flight();
        let mut differences = Vec::new();
        for &dir in ready {
            let skipped: BTreeSet<Name> = self.calls.names_in_flight(dir).into_iter().collect();
            differences.extend(self.watches.compare(dir, skipped, &busy, self.store.dir(dir)));
        }
        self.watches.report_differences(differences);
    }
}
