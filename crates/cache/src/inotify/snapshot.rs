//! Directory snapshots: state last reported to watchers, and its difference from the present state.

use super::RemoteChange;
use crate::store::{CachedEntry, DirEntryRef};
use nigh_types::{Attr, Kind, Name, NodeId, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

/// Attributes of an inode that are compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ComparedAttrs {
    size: u64,
    mode: u32,
    owner: (u32, u32),
    atime: Timestamp,
    mtime: Timestamp,
    ctime: Timestamp,
}

impl ComparedAttrs {
    pub fn of(attr: &Attr) -> ComparedAttrs {
        ComparedAttrs {
            size: attr.size,
            mode: attr.mode,
            owner: (attr.uid, attr.gid),
            atime: attr.atime,
            mtime: attr.mtime,
            ctime: attr.ctime,
        }
    }
}

/// Inode that a name leads to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SnapshotEntry {
    pub id: NodeId,
    pub kind: Kind,
    /// `None`: unknown.
    pub stat: Option<ComparedAttrs>,
    /// Comparison in which the name was last present.
    pub(super) round: u64,
}

impl SnapshotEntry {
    pub fn new(id: NodeId, kind: Kind, stat: Option<ComparedAttrs>) -> SnapshotEntry {
        SnapshotEntry { id, kind, stat, round: 0 }
    }

    pub fn with_stat(self, stat: Option<ComparedAttrs>) -> SnapshotEntry {
        SnapshotEntry { stat, ..self }
    }
}

/// Snapshot of a directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct DirSnapshot {
    names: BTreeMap<Name, SnapshotEntry>,
    round: u64,
}

/// Difference between a directory and its snapshot.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotDiff {
    pub dir: u64,
    vanished: Vec<(Name, SnapshotEntry)>,
    appeared: Vec<(Name, SnapshotEntry)>,
    changed: Vec<(Name, NodeId, ChangeKinds)>,
}

/// Kinds of change of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ChangeKinds {
    written: bool,
    attributes: bool,
}

impl DirSnapshot {
    pub fn len(&self) -> u64 {
        self.names.len() as u64
    }

    pub fn seen(&self, name: &Name) -> Option<&SnapshotEntry> {
        self.names.get(name)
    }

    /// Updates a name that watchers know already: the kernel has reported it.
    pub fn set(&mut self, name: &Name, seen: Option<SnapshotEntry>) {
        match seen {
            Some(seen) => drop(self.names.insert(name.clone(), seen)),
            None => drop(self.names.remove(name)),
        }
    }

    /// Updates an inode's attributes under all its names.
    pub fn set_stat(&mut self, id: NodeId, stat: Option<ComparedAttrs>) {
        self.names.values_mut().filter(|seen| seen.id == id).for_each(|seen| seen.stat = stat);
    }

    /// Replaces the snapshot by the present state, except for the names in `skipped`. Unknown attributes count as
    /// unchanged.
    pub fn compare(
        &mut self,
        dir: u64,
        now: impl Iterator<Item = (Name, SnapshotEntry)>,
        skipped: &BTreeSet<Name>,
    ) -> SnapshotDiff {
        self.round += 1;
        let round = self.round;
        let mut difference = SnapshotDiff::none(dir);
        for (name, seen) in now.filter(|(name, _)| !skipped.contains(name)) {
            self.meet(&mut difference, name, SnapshotEntry { round, ..seen });
        }
        let vanished = &mut difference.vanished;
        self.names.retain(|name, seen| {
            let stays = seen.round == round || skipped.contains(name);
            if !stays {
                vanished.push((name.clone(), *seen));
            }
            stays
        });
        difference
    }
}

impl DirSnapshot {
    /// Updates a few names; `None`: the name is gone.
    pub fn take(&mut self, dir: u64, now: Vec<(Name, Option<SnapshotEntry>)>) -> SnapshotDiff {
        let round = self.round;
        let mut difference = SnapshotDiff::none(dir);
        for (name, seen) in now {
            match seen {
                Some(seen) => self.meet(&mut difference, name, SnapshotEntry { round, ..seen }),
                None => {
                    let old = self.names.remove(&name);
                    difference.vanished.extend(old.map(|old| (name, old)));
                }
            }
        }
        difference
    }

    fn meet(&mut self, difference: &mut SnapshotDiff, name: Name, seen: SnapshotEntry) {
        match self.names.get_mut(&name) {
            Some(old) if old.id == seen.id => {
                if let (Some(before), Some(after)) = (old.stat, seen.stat) {
                    let touched = touched(seen.kind, &before, &after, false);
                    if touched.written || touched.attributes {
                        difference.changed.push((name, seen.id, touched));
                    }
                }
                let stat = seen.stat.or(old.stat);
                *old = SnapshotEntry { stat, ..seen };
            }
            Some(old) => {
                difference.vanished.push((name.clone(), *old));
                difference.appeared.push((name, seen));
                *old = seen;
            }
            None => {
                difference.appeared.push((name.clone(), seen));
                self.names.insert(name, seen);
            }
        }
    }
}

impl SnapshotDiff {
    fn none(dir: u64) -> SnapshotDiff {
        SnapshotDiff { dir, vanished: Vec::new(), appeared: Vec::new(), changed: Vec::new() }
    }
}

/// Classifies a change as a write or a change of attributes or times. Writing sets mtime and ctime alike and leaves
/// atime; touching sets all three alike; setting other times leaves ctime apart. `moved`: so does moving.
fn touched(kind: Kind, before: &ComparedAttrs, after: &ComparedAttrs, moved: bool) -> ChangeKinds {
    let mut attributes = (before.mode, before.owner) != (after.mode, after.owner);
    if kind == Kind::Directory {
        // A directory's size and times are those of its names.
        return ChangeKinds { written: false, attributes };
    }
    let mut written = kind == Kind::File && before.size != after.size;
    if !written && before.mtime != after.mtime {
        let explained = after.mtime == after.ctime || attributes || moved;
        written = kind == Kind::File && explained && after.atime != after.mtime;
        attributes |= !written;
    }
    ChangeKinds { written, attributes }
}

/// Returns the changes in directories that were compared together: an inode that vanished here and appeared there was
/// moved.
pub(crate) fn changes_between(differences: Vec<SnapshotDiff>) -> Vec<RemoteChange> {
    let mut left: BTreeMap<NodeId, Vec<(u64, Name, SnapshotEntry)>> = BTreeMap::new();
    let (mut appeared, mut changed) = (Vec::new(), Vec::new());
    for difference in differences {
        let dir = difference.dir;
        for (name, seen) in difference.vanished {
            left.entry(seen.id).or_default().push((dir, name, seen));
        }
        appeared.extend(difference.appeared.into_iter().map(|(name, seen)| (dir, name, seen)));
        changed.extend(difference.changed.into_iter().map(|(name, id, how)| (dir, name, id, how)));
    }
    let (mut moves, mut made) = (Vec::new(), Vec::new());
    for (to, new_name, seen) in appeared {
        let Some((from, name, before)) = left.get_mut(&seen.id).and_then(Vec::pop) else {
            made.push(RemoteChange::Made { dir: to, name: new_name, kind: seen.kind });
            continue;
        };
        if let (Some(before), Some(after)) = (before.stat, seen.stat) {
            let how = touched(seen.kind, &before, &after, true);
            if how.written || how.attributes {
                changed.push((to, new_name.clone(), seen.id, how));
            }
        }
        moves.push(RemoteChange::Moved { from, name, to, new_name, node: seen.id, kind: seen.kind });
    }
    let moves = in_order(moves);
    let replaced: BTreeSet<(u64, Name)> = moves.iter().filter_map(RemoteChange::target).collect();
    let removed = left.into_values().flatten().map(|(dir, name, seen)| {
        let replaced = replaced.contains(&(dir, name.clone()));
        RemoteChange::Removed { dir, name, node: seen.id, kind: seen.kind, replaced }
    });
    let mut all: Vec<RemoteChange> = removed.collect();
    all.extend(moves);
    all.extend(made);
    for (dir, name, node, how) in changed {
        if how.written {
            all.push(RemoteChange::Written { dir, name: name.clone(), node });
        }
        if how.attributes {
            all.push(RemoteChange::Attributes { dir, name, node });
        }
    }
    all
}

/// Sorts moves so that a name is left before another inode moves to it; any move of a cycle goes first.
fn in_order(mut moves: Vec<RemoteChange>) -> Vec<RemoteChange> {
    let mut ordered = Vec::new();
    while !moves.is_empty() {
        let sources: BTreeSet<(u64, Name)> = moves.iter().filter_map(RemoteChange::source).collect();
        let free = moves.iter().position(|one| one.target().is_some_and(|target| !sources.contains(&target)));
        if free.is_none() {
            ordered.push(moves.remove(0));
            continue;
        }
        let (now, later) =
            moves.into_iter().partition(|one| one.target().is_some_and(|target| !sources.contains(&target)));
        moves = later;
        ordered.extend::<Vec<RemoteChange>>(now);
    }
    ordered
}

/// Returns the snapshot entry of a directory entry, if the name exists.
pub(crate) fn seen(row: DirEntryRef<'_>) -> Option<(Name, SnapshotEntry)> {
    let child = row.child?;
    Some((row.to_name(), seen_child(child)))
}

pub(crate) fn seen_child(child: &CachedEntry) -> SnapshotEntry {
    let attr = child.attr();
    SnapshotEntry::new(child.id, attr.kind(), child.attr_known.then(|| ComparedAttrs::of(&attr)))
}
