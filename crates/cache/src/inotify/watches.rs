//! Watched directories: what is yet to be compared and when, and what has been reported.

use super::snapshot::{DirSnapshot, SnapshotDiff, SnapshotEntry, seen};
use super::{RemoteChange, snapshot};
use crate::store::Directory;
use nigh_types::{Name, NodeId, Span, Time};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most names of one snapshot, and of all.
const MOST_NAMES: u64 = 100_000;
const MOST_NAMES_OF_ALL: u64 = 500_000;
/// Most listings in flight for snapshots.
pub(crate) const MOST_LISTINGS: usize = 16;
/// Shortest delay before the listing of recalled names: they are about to be changed, and not granted until then. Each
/// further delay is four times as long, up to `CONTENDED`.
pub(crate) const FIRST_LOOK: Span = Span::from_millis(2);
/// A client that is granted names twice within a second, and loses them within `SETTLED`, gets no grant for a while
/// (0008, rule 5).
const SETTLED: Span = Span::from_millis(200);
pub(crate) const CONTENDED: Span = Span::from_millis(1_100);
/// Number of listings without a grant after which the directory is compared anyway.
const UNGRANTED: u32 = 3;
/// Delay after a failed listing; each further delay is twice as long, up to 64 times.
pub(crate) const FAILED: Span = Span::from_secs(15);
/// Time that a directory ready for comparison waits for others to be compared with it; those are listed up to three
/// times meanwhile.
pub(crate) const TOGETHER: Span = Span::from_millis(200);

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

    pub fn is_walk_due(&self, now: Time) -> bool {
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

/// Set of directories.
impl Watches {
    /// Sets the watched directories.
    pub fn set(&mut self, now: Time, wanted: BTreeSet<u64>) {
        let mut gone = 0;
        self.dirs.retain(|dir, watched| {
            let stays = wanted.contains(dir);
            gone += watched.snapshot.as_ref().filter(|_| !stays).map_or(0, DirSnapshot::len);
            stays
        });
        self.names -= gone;
        self.changed = true;
        self.unsettled.retain(|dir| wanted.contains(dir));
        self.ends.retain(|(_, dir)| wanted.contains(dir));
        for dir in wanted {
            if self.dirs.contains_key(&dir) {
                continue;
            }
            self.unsettled.insert(dir);
            self.dirs.insert(
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
        if self.unsettled.is_empty() {
            (self.compare_together_by, self.next) = (None, None);
        }
    }
}

/// Pass over unsettled directories.
impl Watches {
    /// Takes a directory whose lease has ended by its deadline.
    pub fn take_ended(&mut self, now: Time) -> Option<u64> {
        self.ends.first().filter(|(end, _)| *end <= now)?;
        self.ends.pop_first().map(|(_, dir)| dir)
    }

    pub fn unsettled(&self) -> Vec<u64> {
        self.unsettled.iter().copied().collect()
    }

    /// Returns when a directory may be listed, and whether a detached listing of it is to be compared.
    pub fn due_of(&self, dir: u64) -> Option<(Time, bool)> {
        self.dirs.get(&dir).map(|watched| (watched.due, watched.detached.is_some()))
    }

    /// Ends a pass; the next one is due at `next`, or after a change.
    pub fn end_pass(&mut self, next: Option<Time>) {
        (self.changed, self.next) = (false, next);
    }

    /// Returns whether the directories that are ready are compared now, rather than later with others.
    pub fn is_compare_due(&mut self, now: Time, is_any_ready: bool, waiting: bool) -> bool {
        let until = is_any_ready.then(|| self.compare_together_by.unwrap_or(now.after(TOGETHER)));
        self.compare_together_by = until.filter(|until| waiting && *until > now);
        is_any_ready && self.compare_together_by.is_none()
    }

    /// Records that a directory is listed for comparison; or not, if that failed at once.
    pub fn note_look(&mut self, now: Time, dir: u64, is_sent: bool) {
        self.looks += 1;
        if !is_sent {
            self.note_listing_failed(now, dir);
        } else if let Some(watched) = self.dirs.get_mut(&dir) {
            // If the listing fails.
            watched.due = now.after(CONTENDED);
        }
    }

    /// Records a failed listing, which is sent again at growing intervals.
    pub fn note_listing_failed(&mut self, now: Time, dir: u64) {
        if let Some(watched) = self.dirs.get_mut(&dir) {
            watched.due = now.after(Span(FAILED.0 << watched.failed.min(6)));
            watched.failed = watched.failed.saturating_add(1);
        }
    }

    /// Records the end of a listing of an unsettled directory. Without a grant (`names`: their number) it is listed
    /// again, at growing intervals. Returns whether such a listing is to be compared.
    pub fn note_listing(&mut self, now: Time, dir: u64, names: Option<u64>) -> bool {
        let Some(watched) = self.dirs.get_mut(&dir).filter(|watched| watched.unsettled) else { return false };
        watched.failed = 0;
        let Some(names) = names else {
            watched.granted_at = now;
            return false;
        };
        watched.tries = watched.tries.saturating_add(1);
        let factor = 4_u64.saturating_pow(watched.tries.min(6));
        watched.due = now.after(Span(FIRST_LOOK.0.saturating_mul(factor).min(CONTENDED.0)));
        watched.tries >= UNGRANTED && names <= MOST_NAMES
    }

    /// Keeps a listing without a grant for comparison.
    pub fn keep_detached(&mut self, dir: u64, listing: DetachedListing) {
        if let Some(watched) = self.dirs.get_mut(&dir) {
            watched.detached = Some(listing);
        }
    }

    /// Compares a directory with its snapshot, but for the names in `skipped`, which local changes in flight bind or
    /// unbind, and attributes of the inodes in `busy`.
    pub fn compare(
        &mut self,
        dir: u64,
        mut skipped: BTreeSet<Name>,
        busy: &BTreeSet<u64>,
        facts: Option<&Directory>,
    ) -> Option<SnapshotDiff> {
        let room = MOST_NAMES_OF_ALL.saturating_sub(self.names);
        let watched = self.dirs.get_mut(&dir)?;
        let (rows, deadline) = match (watched.detached.take(), facts) {
            (Some((rows, older)), _) => {
                skipped.extend(older);
                (rows, None)
            }
            (None, Some(directory)) => {
                let large = directory.rows.existing() > MOST_NAMES.min(room);
                watched.too_large = large && watched.snapshot.is_none();
                let rows = directory.rows.iter().filter(|_| !watched.too_large).filter_map(seen);
                (rows.collect(), directory.held.map(|held| held.deadline))
            }
            (None, None) => return None,
        };
        let first = !std::mem::replace(&mut watched.compared, true);
        if let Some(deadline) = deadline {
            watched.unsettled = false;
            watched.tries = 0;
            self.unsettled.remove(&dir);
            if deadline != Time::FAR {
                self.ends.insert((deadline, dir));
            }
        }
        let unknown = |(name, one): (Name, SnapshotEntry)| {
            let stat = one.stat.filter(|_| !busy.contains(&one.id.ino));
            (name, SnapshotEntry { stat, ..one })
        };
        if watched.too_large {
            if !first && watched.unreported == 0 {
                self.report(vec![RemoteChange::Gap { dir }]);
            }
            return None;
        }
        watched.skipped.extend(skipped.iter().cloned());
        let first = watched.snapshot.is_none();
        watched.snapshot.get_or_insert_default();
        let rows = rows.into_iter().map(unknown);
        let difference = self.update_snapshot(dir, |picture| picture.compare(dir, rows, &skipped));
        difference.filter(|_| !first)
    }

    /// Compares names of a settled directory with its snapshot, but for those in `skipped`.
    pub fn compare_names(
        &mut self,
        dir: u64,
        mut names: Vec<(Name, Option<SnapshotEntry>)>,
        skipped: &[Name],
        busy: &BTreeSet<u64>,
    ) -> Option<SnapshotDiff> {
        // Unsettled directories are compared as a whole.
        let watched = self.dirs.get_mut(&dir).filter(|watched| !watched.unsettled)?;
        if watched.too_large && watched.unreported == 0 {
            self.report(vec![RemoteChange::Gap { dir }]);
            return None;
        }
        names.retain(|(name, _)| {
            let skips = skipped.contains(name);
            if skips {
                watched.skipped.insert(name.clone());
            }
            !skips
        });
        for (_, seen) in &mut names {
            if let Some(seen) = seen.as_mut().filter(|seen| busy.contains(&seen.id.ino)) {
                seen.stat = None;
            }
        }
        self.update_snapshot(dir, |picture| picture.take(dir, names))
    }

    /// Reports the changes between directories and their snapshots.
    pub fn report_differences(&mut self, differences: Vec<SnapshotDiff>) {
        self.report(snapshot::changes_between(differences));
    }
}

/// What has been reported.
impl Watches {
    pub fn poll(&mut self) -> Option<(u64, RemoteChange)> {
        self.out.pop_front()
    }

    /// Records that a change was reported to watchers, or cannot be.
    pub fn note_reported(&mut self, change: &RemoteChange) {
        let (dir, other) = change.dirs();
        for dir in [Some(dir), other].into_iter().flatten() {
            if let Some(watched) = self.dirs.get_mut(&dir) {
                watched.unreported = watched.unreported.saturating_sub(1);
                if watched.unreported == 0 {
                    watched.unreported_names.clear();
                }
            }
        }
    }

    pub fn report_gap(&mut self, dir: u64) {
        self.report(vec![RemoteChange::Gap { dir }]);
    }

    pub fn status(&self) -> WatchStatus {
        WatchStatus {
            directories: self.dirs.len() as u64,
            unsettled: self.unsettled.len() as u64,
            looks: self.looks,
            gaps: self.gaps,
        }
    }

    /// Records that a local change of a name has a reply: the kernel has reported what came later.
    pub fn supersede(&mut self, dir: u64, name: &Name) {
        let watched = self.dirs.get_mut(&dir);
        if let Some(unreported) = watched.and_then(|watched| watched.unreported_names.get_mut(name)) {
            unreported.superseded = unreported.last;
        }
    }

    /// Returns whether a local change of the name has a reply since the change with that number was put out.
    pub fn is_superseded(&self, number: u64, dir: u64, name: &Name) -> bool {
        let unreported = self.dirs.get(&dir).and_then(|watched| watched.unreported_names.get(name));
        unreported.is_some_and(|unreported| number <= unreported.superseded)
    }
}

/// Snapshots.
impl Watches {
    /// Updates a name after a local change.
    pub fn set_name(&mut self, dir: u64, name: &Name, seen: Option<SnapshotEntry>) {
        self.update_snapshot(dir, |picture| picture.set(name, seen));
    }

    /// Returns an inode's entry in a snapshot, if that has the inode at the name.
    pub fn seen(&self, dir: u64, name: &Name, id: NodeId) -> Option<&SnapshotEntry> {
        let picture = self.dirs.get(&dir)?.snapshot.as_ref()?;
        picture.seen(name).filter(|seen| seen.id == id)
    }

    /// Updates an inode's attributes under all its names.
    pub fn set_stat(&mut self, id: NodeId, stat: Option<super::ComparedAttrs>) {
        let pictures = self.dirs.values_mut().filter_map(|watched| watched.snapshot.as_mut());
        pictures.for_each(|picture| picture.set_stat(id, stat));
    }

    /// Marks a directory for comparison: a name was left out of the last one, or no report covers a change.
    pub fn compare_again(&mut self, now: Time, dir: u64) {
        let Some(watched) = self.dirs.get_mut(&dir) else { return };
        if !watched.unsettled {
            (watched.unsettled, watched.due) = (true, now);
            self.unsettled.insert(dir);
            self.changed = true;
        }
    }

    /// Marks a directory for comparison if the last one left out this name.
    pub fn compare_again_if_skipped(&mut self, now: Time, dir: u64, name: &Name) {
        let watched = self.dirs.get_mut(&dir);
        if watched.is_some_and(|watched| watched.skipped.remove(name)) {
            self.compare_again(now, dir);
        }
    }
}

#[cfg(test)]
impl Watches {
    /// Panics unless the count of names in all snapshots is right.
    pub fn check_count(&self) {
        let pictures = self.dirs.values().filter_map(|watched| watched.snapshot.as_ref());
        assert_eq!(self.names, pictures.map(DirSnapshot::len).sum::<u64>());
    }
}
