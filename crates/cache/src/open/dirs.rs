//! Open directories, and the listings that some of them read which no grant covers.

use crate::op::Fh;
use crate::store::DirEntries;
use nigh_types::{CallId, Cookie};
use std::collections::BTreeMap;

/// Directory that the kernel holds open.
#[derive(Clone, Debug)]
pub(crate) struct OpenDir {
    pub ino: u64,
    /// A listing that no grant covers: it serves this open until a rewind.
    pub snapshot: Option<CallId>,
    /// With `cookies=31`: the last inexact offset that was returned, and the cookie that it stands for.
    pub inexact_cookie: Option<(Cookie, Cookie)>,
    /// The reader has not come to the end.
    pub reading: bool,
    /// The kernel caches what it reads here (`FOPEN_CACHE_DIR`).
    pub kernel_keeps: bool,
    /// Thread that reads, number of files returned to it with attributes, and whether one was withheld
    /// (`open/readdirplus_heuristic.rs`).
    pub reader: u32,
    pub files_with_attrs: u64,
    pub is_probed: bool,
}

/// Listing that no grant covers.
#[derive(Clone, Debug)]
struct Snapshot {
    rows: DirEntries,
    /// Number of open directories that read it. Invariant: none, no snapshot.
    readers: u64,
}

/// Open directories by the handle that the kernel has, and their snapshots by the call that brought them.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenDirs {
    dirs: BTreeMap<Fh, OpenDir>,
    snapshots: BTreeMap<CallId, Snapshot>,
    snapshot_bytes: u64,
    /// Directory that was opened or read last.
    last_read: u64,
}

impl OpenDirs {
    pub fn insert(&mut self, fh: Fh, open: OpenDir) {
        self.last_read = open.ino;
        self.dirs.insert(fh, open);
    }

    /// Removes an open directory, and its snapshot if no other reads it.
    pub fn remove(&mut self, fh: Fh) -> Option<OpenDir> {
        self.leave_snapshot(fh);
        self.dirs.remove(&fh)
    }

    pub fn dir(&self, fh: Fh) -> Option<&OpenDir> {
        self.dirs.get(&fh)
    }

    /// Returns an open directory for a change of its state of reading; its snapshot is changed by other methods.
    pub fn dir_mut(&mut self, fh: Fh) -> Option<&mut OpenDir> {
        self.dirs.get_mut(&fh)
    }

    /// Records a page of entries (`ended`: an empty one).
    pub fn note_page(&mut self, fh: Fh, ended: bool) -> Option<&OpenDir> {
        let open = self.dirs.get_mut(&fh)?;
        open.reading = !ended;
        self.last_read = open.ino;
        Some(open)
    }

    pub fn last_read(&self) -> u64 {
        self.last_read
    }

    /// Returns whether an open directory of this inode is being read.
    pub fn is_being_read(&self, ino: u64) -> bool {
        self.dirs.values().any(|open| open.ino == ino && open.reading)
    }

    /// Returns the directories that are being read from facts.
    pub fn being_read(&self) -> impl Iterator<Item = u64> {
        let open = self.dirs.values().filter(|open| open.reading && open.snapshot.is_none());
        open.map(|open| open.ino)
    }

    /// Returns the memory of the snapshots, in bytes.
    pub fn snapshot_bytes(&self) -> u64 {
        self.snapshot_bytes
    }

    /// Returns the entries of the snapshot that an open directory reads.
    pub fn snapshot(&self, fh: Fh) -> Option<&DirEntries> {
        let call = self.dirs.get(&fh)?.snapshot?;
        self.snapshots.get(&call).map(|snapshot| &snapshot.rows)
    }

    /// Stores a complete listing for these open directories.
    pub fn keep_snapshot(&mut self, call: CallId, rows: DirEntries, readers: &[Fh]) {
        let bytes = rows.bytes();
        let mut count = 0;
        for fh in readers {
            let Some(open) = self.dirs.get_mut(fh) else { continue };
            count += 1;
            if let Some(old) = open.snapshot.replace(call) {
                self.leave(old);
            }
        }
        if count > 0 {
            self.snapshots.insert(call, Snapshot { rows, readers: count });
            self.snapshot_bytes += bytes;
        }
    }

    /// Drops an open directory's snapshot.
    pub fn leave_snapshot(&mut self, fh: Fh) {
        if let Some(call) = self.dirs.get_mut(&fh).and_then(|open| open.snapshot.take()) {
            self.leave(call);
        }
    }

    fn leave(&mut self, call: CallId) {
        let Some(snapshot) = self.snapshots.get_mut(&call) else { return };
        snapshot.readers -= 1;
        if snapshot.readers == 0 {
            self.snapshot_bytes -= snapshot.rows.bytes();
            self.snapshots.remove(&call);
        }
    }

    /// Drops all snapshots but the latest, so that its reader comes to an end; other readers list again.
    pub fn drop_snapshots(&mut self) {
        let Some(latest) = self.snapshots.keys().next_back().copied() else { return };
        let is_older = |open: &OpenDir| open.snapshot.is_some_and(|call| call != latest);
        let older: Vec<Fh> = self.dirs.iter().filter(|(_, open)| is_older(open)).map(|(fh, _)| *fh).collect();
        older.into_iter().for_each(|fh| self.leave_snapshot(fh));
    }
}
