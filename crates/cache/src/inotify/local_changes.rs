//! Local changes: the kernel has reported them to watchers, so they update the snapshots and are not reported again.

use super::{ComparedAttrs, RemoteChange, SnapshotEntry, seen_child};
use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, attr_after};
use nigh_types::{Attr, Name, NodeId, Reply, Response};

impl Cache {
    /// Applies a local change with a reply to the snapshots.
    pub(crate) fn note_local_change(&mut self, flight: &InflightCall, response: &Response) {
        if self.watches.is_empty() || !flight.is_mutation() {
            return;
        }
        // The kernel takes a change whose caller was killed for not done.
        if flight.waiters.is_empty() {
            let dirs: Vec<u64> = flight.purpose.names().iter().map(|(dir, _)| *dir).collect();
            return dirs.into_iter().for_each(|dir| self.watches.compare_again(self.clock, dir));
        }
        if response.result.is_ok() {
            for (dir, name) in flight.purpose.names() {
                self.watches.supersede(dir, name);
            }
        }
        match (&flight.purpose, &response.result) {
            (CallKind::Create { dir, name, .. }, Ok(Reply::Created { entry, .. })) => {
                let seen =
                    SnapshotEntry::new(entry.id, entry.attr.kind(), Some(ComparedAttrs::of(&entry.attr)));
                self.snapshot_name(*dir, name, Some(seen));
                self.snapshot_attr(entry.id, Some(&entry.attr));
            }
            (CallKind::Remove { dir, name }, Ok(Reply::Removed { .. })) => {
                self.snapshot_name(*dir, name, None)
            }
            (CallKind::Rename { .. }, Ok(Reply::Renamed { moved, replaced, whiteout, .. })) => {
                self.snapshot_rename(&flight.purpose, *moved, *replaced, *whiteout, response);
            }
            (
                CallKind::Change { ino, .. } | CallKind::Write { ino, .. } | CallKind::Open { ino, .. },
                Ok(_),
            ) => {
                if let Some(id) = self.store.id_of(*ino) {
                    self.snapshot_attr(id, None);
                }
            }
            _ => {}
        }
        if let Ok(Reply::Attr(id, attr)) = &response.result {
            self.snapshot_attr(*id, Some(attr));
        }
        for (id, attr) in &response.after {
            self.snapshot_attr(*id, Some(attr));
        }
        for (dir, name) in flight.purpose.names() {
            self.watches.compare_again_if_skipped(self.clock, dir, name);
        }
    }

    /// Returns whether a local change of the name has a reply since the change with that number was put out: the kernel
    /// has reported what came later.
    #[must_use]
    pub fn is_superseded(&self, number: u64, dir: u64, name: &Name) -> bool {
        self.watches.is_superseded(number, dir, name)
    }

    /// Returns the part of a change that is still to be reported; `None`: local changes have overtaken it.
    #[must_use]
    pub fn unreported_part(&self, number: u64, change: &RemoteChange) -> Option<RemoteChange> {
        let overtaken = |(dir, name): (u64, &Name)| self.is_superseded(number, dir, name);
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

    fn snapshot_name(&mut self, dir: u64, name: &Name, seen: Option<SnapshotEntry>) {
        self.watches.set_name(dir, name, seen);
    }

    /// Updates an inode's attributes in the snapshots after a local change; `None`: they are unknown.
    fn snapshot_attr(&mut self, id: NodeId, attr: Option<&Attr>) {
        let stat = attr.map(ComparedAttrs::of);
        if attr.is_some_and(|attr| attr.nlink > 1 && !attr.is_dir()) {
            return self.watches.set_stat(id, stat);
        }
        let Some((dir, name)) = self.store.inode(id.ino).and_then(|inode| inode.parent_entry.clone()) else {
            return;
        };
        if let Some(seen) = self.watches.seen(dir, &name, id).copied() {
            self.watches.set_name(dir, &name, Some(SnapshotEntry { stat, ..seen }));
        }
    }

    fn snapshot_rename(
        &mut self,
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
        let found = self.snapshot_entry_of((*from, name), (*to, new_name), moved, response);
        let other = replaced.filter(|_| *exchange).or(whiteout);
        let other = other.and_then(|id| self.snapshot_entry_of((*to, new_name), (*from, name), id, response));
        self.snapshot_name(*from, name, other);
        self.snapshot_name(*to, new_name, found);
    }

    /// Returns the snapshot entry of an inode that moves from one name to another.
    fn snapshot_entry_of(
        &self,
        (from, name): (u64, &Name),
        (to, new_name): (u64, &Name),
        id: NodeId,
        response: &Response,
    ) -> Option<SnapshotEntry> {
        if let Some(attr) = attr_after(response, id.ino) {
            return Some(SnapshotEntry::new(id, attr.kind(), Some(ComparedAttrs::of(&attr))));
        }
        // The rename has changed its ctime.
        let seen = self.watches.seen(from, name, id).map(|seen| SnapshotEntry { stat: None, ..*seen });
        seen.or_else(|| {
            let row = self.store.row(to, new_name)?;
            row.child.filter(|child| child.id == id).map(seen_child)
        })
    }
}
