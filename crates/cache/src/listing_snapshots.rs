//! Listing snapshots: listings that no grant covers, each for the open directories that read it.

use crate::cache::Cache;
use crate::dir_entries::DirEntries;
use crate::op::Fh;
use nigh_types::CallId;
use std::collections::BTreeMap;

/// Snapshots by the call that brought them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshots {
    kept: BTreeMap<CallId, Snapshot>,
    bytes: u64,
}

#[derive(Clone, Debug)]
struct Snapshot {
    rows: DirEntries,
    /// Number of open directories that read it. Invariant: none, no snapshot.
    readers: u64,
}

impl Snapshots {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn rows(&self, call: CallId) -> Option<&DirEntries> {
        self.kept.get(&call).map(|snapshot| &snapshot.rows)
    }

    fn leave(&mut self, call: CallId) {
        let Some(snapshot) = self.kept.get_mut(&call) else { return };
        snapshot.readers -= 1;
        if snapshot.readers == 0 {
            self.bytes -= snapshot.rows.bytes();
            self.kept.remove(&call);
        }
    }
}

impl Cache {
    /// Stores a complete listing for these open directories.
    pub(crate) fn keep_snapshot(&mut self, call: CallId, rows: DirEntries, readers: &[Fh]) {
        let bytes = rows.bytes();
        let mut count = 0;
        for fh in readers {
            let Some(open) = self.open_dirs.get_mut(fh) else { continue };
            count += 1;
            if let Some(old) = open.snapshot.replace(call) {
                self.snapshots.leave(old);
            }
        }
        if count > 0 {
            self.snapshots.kept.insert(call, Snapshot { rows, readers: count });
            self.snapshots.bytes += bytes;
        }
    }

    /// Drops an open directory's snapshot.
    pub(crate) fn leave_snapshot(&mut self, fh: Fh) {
        if let Some(call) = self.open_dirs.get_mut(&fh).and_then(|open| open.snapshot.take()) {
            self.snapshots.leave(call);
        }
    }

    /// Drops all snapshots but the latest, so that its reader comes to an end; other readers list again.
    pub(crate) fn drop_snapshots(&mut self) {
        let Some(latest) = self.snapshots.kept.keys().next_back().copied() else { return };
        let older =
            self.open_dirs.iter().filter(|(_, open)| open.snapshot.is_some_and(|call| call != latest));
        let older: Vec<Fh> = older.map(|(fh, _)| *fh).collect();
        older.into_iter().for_each(|fh| self.leave_snapshot(fh));
    }
}
