//! Open files by handle.

use super::fids::Fid;
use super::file_locks::FileLocks;
use super::node_ids::is_directory;
use nigh_types::{DataVersion, Errno, Handle, NodeId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most data versions of a file that are remembered, each made of the one before by own writes.
const MOST_STATES: usize = 64;

#[derive(Debug)]
pub(crate) struct OpenFile {
    pub uid: u32,
    pub node: NodeId,
    pub fid: Arc<Fid>,
    /// A fid of the file that is open for append.
    pub appends: Option<Arc<Fid>>,
    /// The file, or a directory, was moved: where fids are paths, this fid is usable for data only.
    pub is_moved: bool,
}

impl OpenFile {
    /// A file that was just opened.
    pub fn new(uid: u32, node: NodeId, fid: Arc<Fid>) -> OpenFile {
        OpenFile { uid, node, fid, appends: None, is_moved: false }
    }
}

/// All open files.
#[derive(Debug, Default)]
pub(crate) struct Files {
    open: BTreeMap<Handle, OpenFile>,
    by_node: BTreeMap<(u32, NodeId), Vec<Handle>>,
    next: u64,
    /// Handles under which a file is being opened without a reply, and whether they were released meanwhile.
    pinning: BTreeMap<Handle, bool>,
    pub locks: FileLocks,
    /// Data versions of files, each made of the one before by own writes.
    own: BTreeMap<NodeId, Vec<DataVersion>>,
}

impl Files {
    /// Adds a file that was just opened, and returns its handle.
    pub fn add(&mut self, file: OpenFile) -> Handle {
        loop {
            self.next += 1;
            let handle = Handle(self.next);
            if !self.open.contains_key(&handle) {
                self.add_as(handle, file);
                return handle;
            }
        }
    }

    pub fn is_open(&self, handle: Handle) -> bool {
        self.open.contains_key(&handle)
    }

    /// Whether files are being opened without a reply: calls that remove names wait for them.
    pub fn is_pinning(&self) -> bool {
        !self.pinning.is_empty()
    }

    /// Notes that a file is being opened under that handle; no reply will follow.
    pub fn pin_begins(&mut self, handle: Handle) {
        self.pinning.insert(handle, false);
    }

    /// Returns whether the handle is still wanted.
    pub fn pin_ends(&mut self, handle: Handle) -> bool {
        self.pinning.remove(&handle) == Some(false)
    }

    /// Adds a file under an unused handle that the client chose.
    pub fn add_as(&mut self, handle: Handle, file: OpenFile) {
        self.by_node.entry((file.uid, file.node)).or_default().push(handle);
        self.open.insert(handle, file);
    }

    pub fn remove(&mut self, handle: Handle) -> Option<OpenFile> {
        if let Some(released) = self.pinning.get_mut(&handle) {
            *released = true;
        }
        let file = self.open.remove(&handle)?;
        let key = (file.uid, file.node);
        if let Some(handles) = self.by_node.get_mut(&key) {
            handles.retain(|other| *other != handle);
            if handles.is_empty() {
                self.by_node.remove(&key);
            }
        }
        Some(file)
    }

    /// The file of a handle; `None`: the client chose the handle, and the file could not be opened under it.
    ///
    /// # Errors
    /// `EBADF`: the handle is another file's, or unknown.
    pub fn get(&mut self, handle: Handle, node: NodeId) -> Result<Option<&mut OpenFile>, Errno> {
        match self.open.get_mut(&handle) {
            Some(file) if file.node == node => Ok(Some(file)),
            None if handle.is_client_assigned() => Ok(None),
            _ => Err(Errno::BADF),
        }
    }

    /// The fid of a handle, if it is usable for more than data.
    pub fn fid(&mut self, handle: Handle, node: NodeId) -> Option<Arc<Fid>> {
        let file = self.get(handle, node).ok().flatten().filter(|file| !file.is_moved);
        file.map(|file| Arc::clone(&file.fid))
    }

    /// Notes that a file was moved, or a directory, below which any open file may be.
    pub fn moved(&mut self, node: NodeId) {
        let is_dir = is_directory(node);
        let files = self.open.values_mut().filter(|file| is_dir || file.node == node);
        files.for_each(|file| file.is_moved = true);
    }

    /// The fid of any open file of a node.
    pub fn any(&self, uid: u32, node: NodeId) -> Option<Arc<Fid>> {
        let mut files = self.by_node.get(&(uid, node))?.iter().filter_map(|handle| self.open.get(handle));
        files.find(|file| !file.is_moved).map(|file| Arc::clone(&file.fid))
    }

    /// The fid of any open file of a node, also if it is usable for data only unless its qid proves to be the node's.
    pub fn any_moved(&self, uid: u32, node: NodeId) -> Option<Arc<Fid>> {
        let handle = self.by_node.get(&(uid, node))?.first()?;
        self.open.get(handle).map(|file| Arc::clone(&file.fid))
    }

    /// As [`Files::fid_moved`], with the user that has opened it.
    pub fn opened_by(
        &mut self,
        handle: Option<Handle>,
        node: NodeId,
    ) -> Result<Option<(Arc<Fid>, u32)>, Errno> {
        let Some(handle) = handle else { return Ok(None) };
        Ok(self.get(handle, node)?.map(|file| (Arc::clone(&file.fid), file.uid)))
    }

    /// The fid of a handle, as [`Files::any_moved`]; `None`: there is none, as [`Files::get`] says.
    pub fn fid_moved(&mut self, handle: Option<Handle>, node: NodeId) -> Result<Option<Arc<Fid>>, Errno> {
        let Some(handle) = handle else { return Ok(None) };
        Ok(self.get(handle, node)?.map(|file| Arc::clone(&file.fid)))
    }

    /// Notes that an own write changed a file's data from one version to another.
    pub fn note_own_write(&mut self, node: NodeId, before: DataVersion, after: DataVersion) {
        let states = self.own.entry(node).or_default();
        if states.last() != Some(&before) {
            states.clear();
            states.push(before);
        }
        states.push(after);
        if states.len() > MOST_STATES {
            states.remove(0);
        }
        if self.own.len() > MOST_STATES * MOST_STATES {
            self.own.clear();
        }
    }

    /// Whether data versions of a file are tracked, because mmap stores into it were written back.
    pub fn tracks_own_writes(&self, node: NodeId) -> bool {
        self.own.contains_key(&node)
    }

    /// Whether only own writes lie between the versions `then` and `now`.
    pub fn is_own(&self, node: NodeId, then: DataVersion, now: DataVersion) -> bool {
        let states = self.own.get(&node);
        then == now || states.is_some_and(|states| states.last() == Some(&now) && states.contains(&then))
    }

    /// Forgets the open files of a connection that is gone.
    pub fn forget_fids(&mut self) {
        self.open.clear();
        self.by_node.clear();
        self.own.clear();
        self.pinning.clear();
        self.locks = FileLocks::default();
    }
}
