//! Remote changes for inotify watchers (docs/decisions/0017-events.md).
//!
//! Each watched directory has a snapshot: its state as last reported to watchers. When its names are no longer granted,
//! for whatever reason, it is listed again and compared. The difference is put out as [`RemoteChange`]s
//! ([`Cache::poll_change`]). Local changes update the snapshot with their replies, since the kernel has reported them.
//!
//! Invariant: a snapshot that is not `unsettled` equals the directory's facts, and these are granted.

mod local_changes;
mod remote_changes;
mod snapshot;
#[cfg(test)]
mod tests;

use crate::cache::Cache;
use crate::calls::InflightCall;
use crate::dir_entries::{CachedEntry, DirEntryRef};
use crate::op::OpReply;
use nigh_types::{Kind, Name, NodeId, Span, Time};
pub(crate) use remote_changes::RemoteUpdate;
use snapshot::{ComparedAttrs, DirSnapshot, SnapshotEntry};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most names of one snapshot, and of all.
const MOST_NAMES: u64 = 100_000;
const MOST_NAMES_OF_ALL: u64 = 500_000;
/// Most listings in flight for snapshots.
const MOST_LISTINGS: usize = 16;
/// Shortest delay before the listing of recalled names: they are about to be changed, and not granted until then. Each
/// further delay is four times as long, up to `CONTENDED`.
const FIRST_LOOK: Span = Span::from_millis(2);
/// A client that is granted names twice within a second, and loses them within `SETTLED`, gets no grant for a while
/// (0008, rule 5).
const SETTLED: Span = Span::from_millis(200);
const CONTENDED: Span = Span::from_millis(1_100);
/// Number of listings without a grant after which the directory is compared anyway.
const UNGRANTED: u32 = 3;
/// Delay after a failed listing; each further delay is twice as long, up to 64 times.
const FAILED: Span = Span::from_secs(15);
/// Time that a directory ready for comparison waits for others to be compared with it; those are listed up to three
/// times meanwhile.
const TOGETHER: Span = Span::from_millis(200);

/// Remote change in a watched directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RemoteChange {
    Made {
        dir: u64,
        name: Name,
        kind: Kind,
    },
    /// `replaced`: another inode was moved to the name.
    Removed {
        dir: u64,
        name: Name,
        node: NodeId,
        kind: Kind,
        replaced: bool,
    },
    Moved {
        from: u64,
        name: Name,
        to: u64,
        new_name: Name,
        node: NodeId,
        kind: Kind,
    },
    /// The data changed.
    Written {
        dir: u64,
        name: Name,
        node: NodeId,
    },
    Attributes {
        dir: u64,
        name: Name,
        node: NodeId,
    },
    /// Unknown changes.
    Gap {
        dir: u64,
    },
}

impl RemoteChange {
    /// Returns the directories of the change.
    #[must_use]
    pub fn dirs(&self) -> (u64, Option<u64>) {
        match self {
            RemoteChange::Moved { from, to, .. } => (*from, Some(*to).filter(|to| to != from)),
            RemoteChange::Made { dir, .. }
            | RemoteChange::Removed { dir, .. }
            | RemoteChange::Written { dir, .. }
            | RemoteChange::Attributes { dir, .. }
            | RemoteChange::Gap { dir } => (*dir, None),
        }
    }

    /// Returns the names of the change.
    fn names(&self) -> Vec<(u64, &Name)> {
        match self {
            RemoteChange::Moved { from, name, to, new_name, .. } => vec![(*from, name), (*to, new_name)],
            RemoteChange::Made { dir, name, .. }
            | RemoteChange::Removed { dir, name, .. }
            | RemoteChange::Written { dir, name, .. }
            | RemoteChange::Attributes { dir, name, .. } => vec![(*dir, name)],
            RemoteChange::Gap { .. } => Vec::new(),
        }
    }

    pub(crate) fn source(&self) -> Option<(u64, Name)> {
        let RemoteChange::Moved { from, name, .. } = self else { return None };
        Some((*from, name.clone()))
    }

    pub(crate) fn target(&self) -> Option<(u64, Name)> {
        let RemoteChange::Moved { to, new_name, .. } = self else { return None };
        Some((*to, new_name.clone()))
    }
}

/// State of the watches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WatchStatus {
    /// Watched directories.
    pub directories: u64,
    /// Of these, the ones that are yet to be compared.
    pub unsettled: u64,
    /// Listings sent for comparison.
    pub looks: u64,
    /// How often all grants ended, and how often the changes in a directory were unknown.
    pub gaps: u64,
}

/// Detached listing, and the names in it that may be older than local changes.
type DetachedListing = (Vec<(Name, SnapshotEntry)>, BTreeSet<Name>);

/// Watched directory.
#[derive(Clone, Debug)]
struct WatchedDir {
    /// `None`: the directory was not listed yet, or is too large.
    snapshot: Option<DirSnapshot>,
    too_large: bool,
    unsettled: bool,
    /// No listing is sent before this moment.
    due: Time,
    /// The directory has been compared.
    compared: bool,
    /// Time of the last directory lease.
    granted_at: Time,
    /// Time of the last recall soon after that.
    soon_at: Time,
    /// Listings without a grant since then.
    tries: u32,
    /// Failed listings in a row.
    failed: u32,
    /// Listing without a grant to be compared, and the names that may be older than local changes.
    detached: Option<DetachedListing>,
    /// Names with local changes in flight at the last comparison.
    skipped: BTreeSet<Name>,
    /// Changes not yet reported, and the names in them.
    unreported: u64,
    unreported_names: BTreeMap<Name, UnreportedName>,
}

/// Sequence numbers of the changes of one name: the last one put out, and the last one before a local change of the
/// name.
#[derive(Clone, Copy, Debug, Default)]
struct UnreportedName {
    last: u64,
    superseded: u64,
}

/// All watched directories.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watches {
    dirs: BTreeMap<u64, WatchedDir>,
    unsettled: BTreeSet<u64>,
    /// Deadlines of their leases.
    ends: BTreeSet<(Time, u64)>,
    /// End of the wait of directories that are ready for comparison; `None` if there are none.
    compare_together_by: Option<Time>,
    /// Set if something changed since the last pass over unsettled directories; else the next pass is at `next`.
    changed: bool,
    next: Option<Time>,
    /// Names in all snapshots.
    names: u64,
    /// Changes with their sequence numbers, from 1.
    out: VecDeque<(u64, RemoteChange)>,
    reported: u64,
    looks: u64,
    gaps: u64,
}

impl Watches {
    pub fn is_empty(&self) -> bool {
        self.dirs.is_empty()
    }

    pub fn dirs(&self) -> impl Iterator<Item = u64> {
        self.dirs.keys().copied()
    }

    /// Marks a directory for comparison: its names are no longer granted.
    pub fn mark_unsettled(&mut self, now: Time, dir: u64) {
        let Some(watched) = self.dirs.get_mut(&dir) else { return };
        self.changed = true;
        if watched.unsettled {
            // It may be far off after a failed listing.
            watched.due = watched.due.min(now.after(CONTENDED));
            return;
        }
        watched.unsettled = true;
        watched.tries = 0;
        let soon = now.since(watched.granted_at) < SETTLED;
        let again = soon && now.since(watched.soon_at) < CONTENDED;
        watched.due = now.after(if again { CONTENDED } else { FIRST_LOOK });
        if soon {
            watched.soon_at = now;
        }
        self.unsettled.insert(dir);
    }

    /// Records the end of all grants, which says nothing about changes. Failed listings may succeed now.
    pub fn note_gap(&mut self, now: Time) {
        self.gaps += u64::from(!self.dirs.is_empty());
        self.changed = true;
        let soon = now.after(FIRST_LOOK);
        self.dirs.values_mut().for_each(|watched| watched.due = watched.due.min(soon));
    }

    /// Returns whether a change of a name in the directory may yet be reported. The kernel then must hold no dentry
    /// there, or it would not ask the cache during the report.
    pub fn is_reporting(&self, dir: u64) -> bool {
        self.dirs.get(&dir).is_some_and(|watched| watched.unsettled || watched.unreported > 0)
    }

    /// Returns the next time for work: never a past one, once all due work is done.
    pub fn due(&self) -> Option<Time> {
        let ends = self.ends.first().map(|(end, _)| *end);
        ends.into_iter().chain(self.compare_together_by).chain(self.next).min()
    }

    fn is_walk_due(&self, now: Time) -> bool {
        self.changed || self.compare_together_by.into_iter().chain(self.next).any(|due| due <= now)
    }

    /// Records the end of a listing: another one may begin.
    pub fn note_listed(&mut self) {
        self.changed = true;
    }

    /// Changes a snapshot.
    fn update_snapshot<R>(&mut self, dir: u64, new: impl FnOnce(&mut DirSnapshot) -> R) -> Option<R> {
        let picture = self.dirs.get_mut(&dir)?.snapshot.as_mut()?;
        let before = picture.len();
        let result = new(picture);
        self.names = self.names - before + picture.len();
        Some(result)
    }

    fn report(&mut self, changes: Vec<RemoteChange>) {
        for change in changes {
            let (dir, other) = change.dirs();
            for dir in [Some(dir), other].into_iter().flatten() {
                if let Some(watched) = self.dirs.get_mut(&dir) {
                    watched.unreported += 1;
                }
            }
            self.reported += 1;
            for (dir, name) in change.names() {
                if let Some(watched) = self.dirs.get_mut(&dir) {
                    watched.unreported_names.entry(name.clone()).or_default().last = self.reported;
                }
            }
            self.gaps += u64::from(matches!(change, RemoteChange::Gap { .. }));
            self.out.push_back((self.reported, change));
        }
    }
}

impl Cache {
    /// Sets the watched inodes: directories, and files in their directories. `all`: also every directory with a
    /// complete listing in memory.
    pub fn handle_watch(&mut self, now: Time, inos: &BTreeSet<u64>, all: bool) {
        self.clock = now;
        let mut wanted: BTreeSet<u64> = inos.iter().flat_map(|ino| self.watched_by(*ino)).collect();
        if all {
            wanted.extend(self.dirs.iter().filter(|(_, directory)| directory.complete).map(|(ino, _)| *ino));
        }
        let watches = &mut self.watches;
        let mut gone = 0;
        watches.dirs.retain(|dir, watched| {
            let stays = wanted.contains(dir);
            gone += watched.snapshot.as_ref().filter(|_| !stays).map_or(0, DirSnapshot::len);
            stays
        });
        watches.names -= gone;
        watches.changed = true;
        watches.unsettled.retain(|dir| wanted.contains(dir));
        watches.ends.retain(|(_, dir)| wanted.contains(dir));
        for dir in wanted {
            if watches.dirs.contains_key(&dir) {
                continue;
            }
            watches.unsettled.insert(dir);
            watches.dirs.insert(
                dir,
                WatchedDir {
                    snapshot: None,
                    too_large: false,
                    unsettled: true,
                    due: now,
                    compared: false,
                    granted_at: Time(0),
                    soon_at: Time(0),
                    tries: 0,
                    failed: 0,
                    detached: None,
                    skipped: BTreeSet::new(),
                    unreported: 0,
                    unreported_names: BTreeMap::new(),
                },
            );
        }
        if watches.unsettled.is_empty() {
            (watches.compare_together_by, watches.next) = (None, None);
        }
    }

    /// Returns the directories in which changes of an inode show; itself and its parent if its kind is unknown.
    fn watched_by(&self, ino: u64) -> Vec<u64> {
        if self.id_of(ino).is_none() {
            return Vec::new();
        }
        let home = self.inodes.get(&ino).and_then(|inode| inode.parent_entry.as_ref()).map(|(dir, _)| *dir);
        let kind = self.kind_of(ino);
        let itself =
            (self.is_directory(ino) || ino == self.root || kind.is_none_or(|k| k == Kind::Directory))
                .then_some(ino);
        let home = home.filter(|_| kind != Some(Kind::Directory));
        itself.into_iter().chain(home).collect()
    }

    fn kind_of(&self, ino: u64) -> Option<Kind> {
        let inode = self.inodes.get(&ino)?;
        if let Some((attr, _)) = inode.own {
            return Some(attr.kind());
        }
        let (dir, name) = inode.parent_entry.as_ref()?;
        let row = self.dirs.get(dir)?.rows.find(self.key.cookie(name.as_bytes()), name.as_bytes())?;
        row.child.filter(|child| child.id == inode.id).map(|child| child.attr().kind())
    }

    /// Returns the next change for watchers, and its sequence number; the caller answers with
    /// [`Cache::handle_reported`].
    pub fn poll_change(&mut self) -> Option<(u64, RemoteChange)> {
        self.watches.out.pop_front()
    }

    /// Records that a change was reported to watchers, or cannot be.
    pub fn handle_reported(&mut self, change: &RemoteChange) {
        let (dir, other) = change.dirs();
        for dir in [Some(dir), other].into_iter().flatten() {
            if let Some(watched) = self.watches.dirs.get_mut(&dir) {
                watched.unreported = watched.unreported.saturating_sub(1);
                if watched.unreported == 0 {
                    watched.unreported_names.clear();
                }
            }
        }
    }

    /// Reports a gap: the changes in a directory could not be reported to watchers.
    pub fn handle_unreportable(&mut self, dir: u64) {
        self.watches.report(vec![RemoteChange::Gap { dir }]);
    }

    /// Invalidates a dentry, so that the kernel looks the name up.
    pub fn invalidate_name(&mut self, dir: u64, name: &Name) {
        self.invalidate(vec![crate::KernelInvalidation::Entry { dir, name: name.clone() }], None);
    }

    /// Returns an inode's cached attributes, without a timeout; if there are none, they are fetched so that the cache
    /// soon has them.
    pub fn attributes_without_timeout(&mut self, now: Time, ino: u64) -> Option<OpReply> {
        let id = self.id_of(ino)?;
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
        WatchStatus {
            directories: self.watches.dirs.len() as u64,
            unsettled: self.watches.unsettled.len() as u64,
            looks: self.watches.looks,
            gaps: self.watches.gaps,
        }
    }

    /// Returns whether the kernel knows the inode.
    #[must_use]
    pub fn knows(&self, node: NodeId) -> bool {
        self.inodes.get(&node.ino).is_some_and(|inode| inode.id == node && inode.nlookup > 0)
    }

    /// Does due work: lists directories without a lease, and compares those that are ready.
    pub(crate) fn compare_watched(&mut self) {
        let now = self.clock;
        while let Some(&(end, dir)) = self.watches.ends.first().filter(|(end, _)| *end <= now) {
            self.watches.ends.remove(&(end, dir));
            self.live_directory(now, dir);
        }
        if !self.session.is_active() {
            return;
        }
        while self.watches.is_walk_due(now) {
            let (ready, waiting) = self.walk_unsettled(now);
            let until =
                (!ready.is_empty()).then(|| self.watches.compare_together_by.unwrap_or(now.after(TOGETHER)));
            self.watches.compare_together_by = until.filter(|until| waiting && *until > now);
            if !ready.is_empty() && self.watches.compare_together_by.is_none() {
                self.compare(&ready);
                // Directories without a lease stay unsettled.
                self.watches.changed = true;
            }
        }
    }

    /// Lists due directories, up to the limit. Returns those ready for comparison, and whether others soon will be.
    fn walk_unsettled(&mut self, now: Time) -> (Vec<u64>, bool) {
        let unsettled: Vec<u64> = self.watches.unsettled.iter().copied().collect();
        let (mut ready, mut listed, mut waiting, mut next) = (Vec::new(), 0, false, None);
        for dir in unsettled {
            let Some(watched) = self.watches.dirs.get(&dir) else { continue };
            let (due, compares) = (watched.due, watched.detached.is_some());
            if compares || self.live_directory(now, dir).is_some_and(|(directory, _)| directory.complete) {
                ready.push(dir);
                continue;
            }
            let lists = self.dirs.get(&dir).is_some_and(|directory| directory.listing.is_some());
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
            let due = self.watches.dirs.get(&dir).map(|watched| watched.due).filter(|due| *due > now);
            next = next.into_iter().chain(due).min();
        }
        (self.watches.changed, self.watches.next) = (false, next);
        (ready, waiting)
    }

    fn relist_watched(&mut self, now: Time, dir: u64) {
        self.watches.looks += 1;
        if self.list(now, dir).is_err() {
            self.on_watched_listing_failed(now, dir);
        } else if let Some(watched) = self.watches.dirs.get_mut(&dir) {
            // If the listing fails.
            watched.due = now.after(CONTENDED);
        }
    }

    /// Handles the end of a listing. Without a grant the directory is listed again, at growing intervals.
    pub(crate) fn on_watched_listing(&mut self, now: Time, dir: u64, flight: &InflightCall) {
        let Some(watched) = self.watches.dirs.get_mut(&dir).filter(|watched| watched.unsettled) else {
            return;
        };
        watched.failed = 0;
        let Some(rows) = &flight.detached_entries else {
            watched.granted_at = now;
            return;
        };
        watched.tries = watched.tries.saturating_add(1);
        let factor = 4_u64.saturating_pow(watched.tries.min(6));
        watched.due = now.after(Span(FIRST_LOOK.0.saturating_mul(factor).min(CONTENDED.0)));
        if watched.tries >= UNGRANTED && rows.existing() <= MOST_NAMES {
            let skipped = flight.race_log.local_dentries(dir).map(|(name, _)| name.clone()).collect();
            let rows = rows.iter().filter_map(|row| {
                seen(row).map(|(name, seen)| {
                    let older = flight.race_log.local_inodes.contains(&seen.id.ino);
                    (name, SnapshotEntry { stat: seen.stat.filter(|_| !older), ..seen })
                })
            });
            watched.detached = Some((rows.collect(), skipped));
        }
    }

    /// Handles a failed listing, which is sent again at growing intervals.
    pub(crate) fn on_watched_listing_failed(&mut self, now: Time, dir: u64) {
        if let Some(watched) = self.watches.dirs.get_mut(&dir) {
            watched.due = now.after(Span(FAILED.0 << watched.failed.min(6)));
            watched.failed = watched.failed.saturating_add(1);
        }
    }

    fn compare(&mut self, ready: &[u64]) {
        let busy = self.calls.inodes_in_flight();
        let mut differences = Vec::new();
        for &dir in ready {
            let mut skipped: BTreeSet<Name> = self.calls.names_in_flight(dir).into_iter().collect();
            let room = MOST_NAMES_OF_ALL.saturating_sub(self.watches.names);
            let Some(watched) = self.watches.dirs.get_mut(&dir) else { continue };
            let aside = watched.detached.take();
            let (rows, deadline) = match (&aside, self.dirs.get(&dir)) {
                (Some((rows, older)), _) => {
                    skipped.extend(older.iter().cloned());
                    (rows.clone(), None)
                }
                (None, Some(directory)) => {
                    let large = directory.rows.existing() > MOST_NAMES.min(room);
                    watched.too_large = large && watched.snapshot.is_none();
                    let rows = directory.rows.iter().filter(|_| !watched.too_large).filter_map(seen);
                    (rows.collect(), directory.held.map(|held| held.deadline))
                }
                (None, None) => continue,
            };
            let first = !std::mem::replace(&mut watched.compared, true);
            if let Some(deadline) = deadline {
                watched.unsettled = false;
                watched.tries = 0;
                self.watches.unsettled.remove(&dir);
                if deadline != Time::FAR {
                    self.watches.ends.insert((deadline, dir));
                }
            }
            let unknown = |(name, one): (Name, SnapshotEntry)| {
                let stat = one.stat.filter(|_| !busy.contains(&one.id.ino));
                (name, SnapshotEntry { stat, ..one })
            };
            let rows = rows.into_iter().map(unknown);
            if watched.too_large {
                if !first && watched.unreported == 0 {
                    self.watches.report(vec![RemoteChange::Gap { dir }]);
                }
                continue;
            }
            watched.skipped.extend(skipped.iter().cloned());
            let first = watched.snapshot.is_none();
            watched.snapshot.get_or_insert_default();
            let difference =
                self.watches.update_snapshot(dir, |picture| picture.compare(dir, rows, &skipped));
            differences.extend(difference.filter(|_| !first));
        }
        self.watches.report(snapshot::changes_between(differences));
    }
}

/// Returns the snapshot entry of a directory entry, if the name exists.
fn seen(row: DirEntryRef<'_>) -> Option<(Name, SnapshotEntry)> {
    let child = row.child?;
    Some((row.to_name(), seen_child(child)))
}

fn seen_child(child: &CachedEntry) -> SnapshotEntry {
    let attr = child.attr();
    SnapshotEntry::new(child.id, attr.kind(), child.attr_known.then(|| ComparedAttrs::of(&attr)))
}
