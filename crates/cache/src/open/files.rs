//! Open files.

use crate::op::{Caller, Fh};
use nigh_types::{Access, Handle, NodeId};
use std::collections::BTreeMap;

/// Regular file that the kernel holds open.
#[derive(Clone, Debug)]
pub(crate) struct OpenFile {
    pub ino: u64,
    /// Generation of the opened inode: another inode may have the number by now.
    pub generation: u64,
    pub kind: OpenKind,
    /// Access mode of the open.
    pub access: Access,
    /// Writes through it bypass the kernel's page cache.
    pub direct: bool,
    /// Offset of the latest such write, until it is known to be done.
    pub unfinished_write_at: Option<u64>,
    /// Caller of the open; writes use its credentials.
    pub caller: Caller,
}

/// How a file is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OpenKind {
    /// At the remote, which knows it by this handle.
    Remote(Handle),
    /// Under a grant, without a call to the remote.
    Granted,
    /// It could not be reopened in a new session: every use fails with `EIO`.
    Lost,
}

impl OpenFile {
    /// The remote's handle.
    pub fn handle(&self) -> Option<Handle> {
        match self.kind {
            OpenKind::Remote(handle) => Some(handle),
            OpenKind::Granted | OpenKind::Lost => None,
        }
    }

    /// Returns whether the file is of that inode and was opened under a grant.
    pub fn lacks_handle_for(&self, id: NodeId) -> bool {
        self.kind == OpenKind::Granted && self.generation == id.generation
    }
}

/// Open files by the handle that the kernel has.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenFiles {
    files: BTreeMap<Fh, OpenFile>,
    /// Number of files without a handle at the remote.
    without_handle: u64,
}

impl OpenFiles {
    pub fn insert(&mut self, fh: Fh, file: OpenFile) {
        self.without_handle += u64::from(file.handle().is_none());
        self.files.insert(fh, file);
    }

    pub fn remove(&mut self, fh: Fh) -> Option<OpenFile> {
        let file = self.files.remove(&fh)?;
        self.without_handle -= u64::from(file.handle().is_none());
        Some(file)
    }

    pub fn get(&self, fh: Fh) -> Option<&OpenFile> {
        self.files.get(&fh)
    }

    pub fn iter(&self) -> impl Iterator<Item = (Fh, &OpenFile)> {
        self.files.iter().map(|(fh, file)| (*fh, file))
    }

    pub fn values(&self) -> impl Iterator<Item = &OpenFile> {
        self.files.values()
    }

    pub fn count(&self) -> u64 {
        self.files.len() as u64
    }

    /// Returns whether some open file has no handle: it was opened under a grant, or is lost.
    pub fn has_any_without_handle(&self) -> bool {
        self.without_handle > 0
    }

    /// Marks a file as lost. Returns whether it had a handle, which it has no more; `None`: it is not open.
    pub fn lose(&mut self, fh: Fh) -> Option<bool> {
        let file = self.files.get_mut(&fh)?;
        let had_handle = file.handle().is_some();
        file.kind = OpenKind::Lost;
        self.without_handle += u64::from(had_handle);
        Some(had_handle)
    }

    pub fn lose_all(&mut self) {
        self.files.values_mut().for_each(|file| file.kind = OpenKind::Lost);
        self.without_handle = self.count();
    }

    /// Records the offset of a write past the page cache that has no reply (`None`: it has one).
    pub fn note_unfinished_write(&mut self, fh: Fh, offset: Option<u64>) {
        if let Some(file) = self.files.get_mut(&fh) {
            file.unfinished_write_at = offset;
        }
    }

    /// Detaches the open files of an inode number from the inode that has it now, whatever its id says.
    pub fn detach(&mut self, ino: u64) {
        self.files.values_mut().filter(|file| file.ino == ino).for_each(|file| file.generation = 0);
    }

    #[cfg(test)]
    pub fn take_handles(&mut self) {
        self.files.values_mut().for_each(|file| file.kind = OpenKind::Granted);
        self.without_handle = self.count();
    }
}
