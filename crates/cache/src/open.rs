//! What the kernel holds open: files, directories, locks, and names-only listings for its readers.

mod dirs;
mod files;
mod inode_opens;
mod locks;
mod name_streams;
mod readdirplus_heuristic;

pub(crate) use dirs::{OpenDir, OpenDirs};
pub(crate) use files::{OpenFile, OpenFiles, OpenKind};
pub(crate) use inode_opens::InodeOpens;
pub(crate) use locks::{Correction, LockOwner, LockRecords};
pub(crate) use name_streams::NameStreams;
pub(crate) use readdirplus_heuristic::{FilesWithAttrs, ReaderTable};

use crate::op::Fh;

/// Open files and directories of one mount.
#[derive(Clone, Debug, Default)]
pub(crate) struct Open {
    pub files: OpenFiles,
    pub dirs: OpenDirs,
    pub locks: LockRecords,
    pub names: NameStreams,
    pub readers: ReaderTable,
    last_fh: u64,
}

impl Open {
    pub fn new_fh(&mut self) -> Fh {
        self.last_fh += 1;
        Fh(self.last_fh)
    }
}
