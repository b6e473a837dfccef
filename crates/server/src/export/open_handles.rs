//! The open files of one session.

use crate::export::kept_fds::KeptFd;
use crate::export::open_files::OpenRef;
use crate::limits::descriptors::{Descriptors, OpenFileCharge};
use crate::os::error::{Fault, Result};
use nigh_lease::{Object, WriteHistory};
use nigh_types::{Errno, Handle, NodeId, Origin, Term};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A limited number of open files of one session. Dropping it closes the files.
#[derive(Debug)]
pub struct OpenHandles {
    table: Mutex<Table>,
    /// Number of files removed from the table and not closed yet.
    closing: Arc<AtomicU64>,
    limit: u64,
    /// Maximum lifetime of the session's grants.
    term: Term,
    /// The origin's share of the server's descriptors.
    share: Option<(Arc<Descriptors>, Origin)>,
    vouched: bool,
    trusts_watch: bool,
}

#[derive(Debug, Default)]
struct Table {
    open: FxHashMap<Handle, Arc<OpenFile>>,
    by_node: FxHashMap<NodeId, Vec<Handle>>,
    /// Write history of open files that this session has changed.
    own: FxHashMap<NodeId, Arc<Mutex<WriteHistory>>>,
    last: u64,
}

/// An open file.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) node: NodeId,
    pub(crate) object: Object,
    pub(crate) fd: OwnedFd,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Each write is durable before it returns.
    pub(crate) syncs: bool,
    /// Opened with `O_APPEND`, as a file with the append-only flag requires.
    pub(crate) append_only: bool,
    /// Held while a call uses the descriptor's file position.
    pub(crate) position: Mutex<()>,
    /// Counts the file as open.
    #[allow(dead_code, reason = "held, not looked at")]
    pub(crate) counted: OpenRef,
}

/// Largest handle that a client may claim in a reopen. No server assigns larger ones, and enough remain above it.
const MOST_REOPENED: u64 = 1 << 62;

impl OpenHandles {
    /// A table with at most `limit` open files, of a session whose grants end after `term`.
    pub(crate) fn new(limit: u64, term: Term) -> OpenHandles {
        OpenHandles {
            table: Mutex::default(),
            closing: Arc::default(),
            limit,
            term,
            share: None,
            vouched: true,
            trusts_watch: false,
        }
    }

    /// Sets whether the server trusts the permission checks of the client's kernel
    /// ([`crate::CredentialPolicy::vouches`]). The default is true.
    pub(crate) fn vouched(self, vouched: bool) -> OpenHandles {
        OpenHandles { vouched, ..self }
    }

    /// Charges the open files to an origin.
    pub(crate) fn sharing(self, descriptors: &Arc<Descriptors>, origin: Origin) -> OpenHandles {
        OpenHandles { share: Some((Arc::clone(descriptors), origin)), ..self }
    }

    /// Reserves a descriptor of the origin for a file that is about to be opened.
    pub(crate) fn opened(&self) -> Option<OpenFileCharge> {
        self.share.as_ref().map(|(descriptors, origin)| descriptors.open(*origin))
    }

    fn may_open(&self, more: u64) -> bool {
        self.share.as_ref().is_none_or(|(descriptors, origin)| descriptors.may_open(*origin, more))
    }

    pub(crate) fn is_vouched(&self) -> bool {
        self.vouched
    }

    /// Sets whether the session's term limits only grants on unwatched files.
    pub(crate) fn trusting(self, trusts_watch: bool) -> OpenHandles {
        OpenHandles { trusts_watch, ..self }
    }

    pub(crate) fn trusts_watch(&self) -> bool {
        self.trusts_watch
    }

    /// Maximum lifetime of this session's grants.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// Number of open files.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.table.lock().open.len() as u64
    }

    #[cfg(test)]
    pub(crate) fn closing(&self) -> u64 {
        self.closing.load(Ordering::SeqCst)
    }

    /// Fails with `ENFILE` if one more open file would exceed a limit. Call this before changing the export.
    pub(crate) fn has_room(&self) -> Result<()> {
        if self.count() + self.closing.load(Ordering::SeqCst) < self.limit && self.may_open(1) {
            Ok(())
        } else {
            Err(Fault(Errno::NFILE))
        }
    }

    pub(crate) fn insert(&self, file: OpenFile) -> Result<Handle> {
        self.insert_as(None, Arc::new(file))
    }

    /// Takes over an open file of another session.
    pub(crate) fn adopt(&self, file: Arc<OpenFile>) -> Result<Handle> {
        self.insert_as(None, file)
    }

    /// Returns the open file of this handle, whatever its node.
    pub(crate) fn share(&self, handle: Handle) -> Option<Arc<OpenFile>> {
        self.table.lock().open.get(&handle).cloned()
    }

    /// Whether writes through this handle are synchronous.
    pub(crate) fn syncs(&self, handle: Handle) -> bool {
        self.table.lock().open.get(&handle).is_some_and(|file| file.syncs)
    }

    /// Inserts an open file, under a client-assigned handle if given. Fails with `EEXIST` if that handle is in use.
    pub(crate) fn insert_as(&self, chosen: Option<Handle>, file: Arc<OpenFile>) -> Result<Handle> {
        // The file itself is counted already.
        if !self.may_open(0) {
            return Err(Fault(Errno::NFILE));
        }
        let mut table = self.table.lock();
        if table.open.len() as u64 + self.closing.load(Ordering::SeqCst) >= self.limit {
            return Err(Fault(Errno::NFILE));
        }
        table.last += u64::from(chosen.is_none());
        let handle = chosen.unwrap_or(Handle(table.last));
        if table.open.contains_key(&handle) {
            return Err(Fault(Errno::EXIST));
        }
        table.by_node.entry(file.node).or_default().push(handle);
        table.open.insert(handle, file);
        Ok(handle)
    }

    /// Inserts a reopened file under the handle that the client had before the server discarded its session. Fails
    /// with `EINVAL` if the handle is in use or cannot have been assigned.
    pub(crate) fn insert_reopened(&self, handle: Handle, file: OpenFile) -> Result<()> {
        if !handle.is_client_assigned() {
            if handle.0 > MOST_REOPENED {
                return Err(Fault(Errno::INVAL));
            }
            let mut table = self.table.lock();
            table.last = table.last.max(handle.0);
        }
        match self.insert_as(Some(handle), Arc::new(file)) {
            Err(Fault(Errno::EXIST)) => Err(Fault(Errno::INVAL)),
            inserted => inserted.map(drop),
        }
    }

    /// Returns the open file of this handle. Fails with `EBADF` if there is none, or if it belongs to another node.
    pub(crate) fn find(&self, handle: Handle, node: NodeId) -> Result<Arc<OpenFile>> {
        let table = self.table.lock();
        let file = table.open.get(&handle).filter(|f| f.node == node);
        file.cloned().ok_or(Fault(Errno::BADF))
    }

    /// Like [`OpenHandles::find`] for an optional handle. Also returns `None` for an unknown client-assigned handle:
    /// its open may have failed, and the file can still be resolved by its node id.
    pub(crate) fn find_optional(
        &self,
        handle: Option<Handle>,
        node: NodeId,
    ) -> Result<Option<Arc<OpenFile>>> {
        let Some(handle) = handle else { return Ok(None) };
        match self.find(handle, node) {
            Err(_) if handle.is_client_assigned() => Ok(None),
            found => found.map(Some),
        }
    }

    /// Returns any open file of this node.
    pub(crate) fn of_node(&self, node: NodeId) -> Option<Arc<OpenFile>> {
        let table = self.table.lock();
        let handle = table.by_node.get(&node)?.last()?;
        table.open.get(handle).cloned()
    }

    /// Whether this node has an open file that satisfies `such`.
    pub(crate) fn has_open(&self, node: NodeId, such: impl Fn(&OpenFile) -> bool) -> bool {
        let table = self.table.lock();
        let mut handles = table.by_node.get(&node).into_iter().flatten();
        handles.any(|handle| table.open.get(handle).is_some_and(|file| such(file)))
    }

    /// Returns the history of this session's own changes of a file's data. `None` if the session has not opened the
    /// file.
    pub(crate) fn write_history(&self, node: NodeId) -> Option<Arc<Mutex<WriteHistory>>> {
        let mut table = self.table.lock();
        table.by_node.contains_key(&node).then(|| Arc::clone(table.own.entry(node).or_default()))
    }

    /// Returns a readable open file of this node.
    pub(crate) fn readable(&self, node: NodeId) -> Option<Arc<OpenFile>> {
        let table = self.table.lock();
        let files = table.by_node.get(&node)?.iter().filter_map(|handle| table.open.get(handle));
        files.rev().find(|file| file.readable).cloned()
    }

    pub(crate) fn release(&self, handles: &[Handle]) {
        drop(self.take(handles));
    }

    /// Removes files from the table. The caller closes them by dropping, which may wait for the disk. Until then they
    /// count towards the session's limit. Returns `None` if no handle was open.
    pub(crate) fn take(&self, handles: &[Handle]) -> Option<Closing> {
        let mut closing = Vec::new();
        let mut table = self.table.lock();
        for handle in handles {
            let Some(file) = table.open.remove(handle) else { continue };
            if let Some(list) = table.by_node.get_mut(&file.node) {
                list.retain(|h| h != handle);
                if list.is_empty() {
                    table.by_node.remove(&file.node);
                    table.own.remove(&file.node);
                }
            }
            closing.push(file);
        }
        self.closing.fetch_add(closing.len() as u64, Ordering::SeqCst);
        let pending = Arc::clone(&self.closing);
        (!closing.is_empty()).then_some(Closing { files: closing, pending })
    }
}

/// Files removed from the table, closed when dropped.
pub(crate) struct Closing {
    files: Vec<Arc<OpenFile>>,
    pending: Arc<AtomicU64>,
}

impl Closing {
    /// Returns the files of each filesystem by themselves.
    pub(crate) fn by_filesystem(mut self) -> Vec<KeptFd> {
        let mut parts = FxHashMap::<u64, Vec<Arc<OpenFile>>>::default();
        for file in self.files.drain(..) {
            parts.entry(file.object.filesystem).or_default().push(file);
        }
        let part = |(filesystem, files)| {
            let closing = Closing { files, pending: Arc::clone(&self.pending) };
            KeptFd { filesystem, file: Box::new(closing) }
        };
        parts.into_iter().map(part).collect()
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        for file in self.files.drain(..) {
            drop(file);
            self.pending.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::open_files::OpenFileTable;

    fn file(ino: u64) -> OpenFile {
        let object = Object { filesystem: 1, ino, birth: 1 };
        let counted = Arc::new(OpenFileTable::default()).count(object, None);
        let fd = std::fs::File::open("/dev/null").unwrap().into();
        OpenFile {
            node: NodeId { ino, generation: 1 },
            object,
            fd,
            readable: true,
            append_only: false,
            writable: false,
            syncs: false,
            position: Mutex::new(()),
            counted,
        }
    }

    #[test]
    fn handle_taken_in_reopen_is_not_assigned_again() {
        let files = OpenHandles::new(5, Term::Session);
        let first = files.insert(file(1)).unwrap();
        assert_eq!(files.insert_reopened(first, file(2)), Err(Fault(Errno::INVAL)));
        assert_eq!(files.insert_reopened(Handle(MOST_REOPENED + 1), file(2)), Err(Fault(Errno::INVAL)));
        files.insert_reopened(Handle(9), file(2)).unwrap();
        assert_eq!(files.insert_reopened(Handle(9), file(2)), Err(Fault(Errno::INVAL)));
        assert_eq!((files.insert(file(3)).unwrap(), files.count()), (Handle(10), 3));
        assert!(files.find(Handle(9), NodeId { ino: 2, generation: 1 }).is_ok());
        files.insert_reopened(Handle(Handle::CLIENT_ASSIGNED | 7), file(3)).unwrap();
        assert_eq!(files.insert(file(3)).unwrap(), Handle(11), "those that clients choose are apart");
        assert_eq!(files.insert_reopened(Handle(20), file(2)), Err(Fault(Errno::NFILE)));
    }

    #[test]
    fn files_are_bounded_and_found_by_handle_and_node() {
        let files = OpenHandles::new(2, Term::Session);
        let (a, b) = (files.insert(file(1)).unwrap(), files.insert(file(1)).unwrap());
        assert_eq!(files.insert(file(2)).unwrap_err(), Fault(Errno::NFILE));
        let node = NodeId { ino: 1, generation: 1 };
        assert!(files.find(a, node).is_ok());
        assert_eq!(files.find(a, NodeId { ino: 2, generation: 1 }).unwrap_err(), Fault(Errno::BADF));
        files.release(&[b, b, Handle(99)]);
        assert!(files.of_node(node).is_some());
        files.release(&[a]);
        assert!(files.of_node(node).is_none());
        assert_eq!(files.count(), 0);
    }
}
