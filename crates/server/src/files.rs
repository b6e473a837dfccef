//! The open files of one session.

use crate::error::{Fault, Result};
use nigh_types::{Errno, GrantId, Handle, NodeId, Span, Term};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the server keeps for one session: its open files, bounded, and the term of its grants.
/// Dropping it closes all.
#[derive(Debug)]
pub struct SessionFiles {
    table: Mutex<Table>,
    limit: u64,
    /// Nanoseconds; `u64::MAX` for [`Term::Session`].
    term_ns: AtomicU64,
}

#[derive(Debug, Default)]
struct Table {
    open: FxHashMap<Handle, Arc<OpenFile>>,
    by_node: FxHashMap<NodeId, Vec<Handle>>,
    last: u64,
}

/// An open file.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) node: NodeId,
    pub(crate) fd: OwnedFd,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Held by whoever uses the descriptor's own position.
    pub(crate) position: Mutex<()>,
}

impl SessionFiles {
    /// At most `limit` open files; grants end after `term`.
    #[must_use]
    pub fn new(limit: u64, term: Term) -> SessionFiles {
        let files = SessionFiles { table: Mutex::default(), limit, term_ns: AtomicU64::new(0) };
        files.change_term(term);
        files
    }

    /// From now on grants end after `term`.
    pub fn change_term(&self, term: Term) {
        let ns = match term {
            Term::Session => u64::MAX,
            Term::Limited(Span(ns)) => ns.min(u64::MAX - 1),
        };
        self.term_ns.store(ns, Ordering::SeqCst);
    }

    /// When the grants of this session end.
    #[must_use]
    pub fn term(&self) -> Term {
        match self.term_ns.load(Ordering::SeqCst) {
            u64::MAX => Term::Session,
            ns => Term::Limited(Span(ns)),
        }
    }

    /// How many files are open.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.table.lock().open.len() as u64
    }

    /// Refuses with `ENFILE` what could not be kept; ask before changing the export.
    pub(crate) fn has_room(&self) -> Result<()> {
        if self.count() < self.limit { Ok(()) } else { Err(Fault(Errno::NFILE)) }
    }

    pub(crate) fn insert(&self, file: OpenFile) -> Result<Handle> {
        let mut table = self.table.lock();
        if table.open.len() as u64 >= self.limit {
            return Err(Fault(Errno::NFILE));
        }
        table.last += 1;
        let handle = Handle(table.last);
        table.by_node.entry(file.node).or_default().push(handle);
        table.open.insert(handle, Arc::new(file));
        Ok(handle)
    }

    /// The open file of that number; `EBADF` where there is none or it is of another node.
    pub(crate) fn find(&self, handle: Handle, node: NodeId) -> Result<Arc<OpenFile>> {
        let table = self.table.lock();
        let file = table.open.get(&handle).filter(|f| f.node == node);
        file.cloned().ok_or(Fault(Errno::BADF))
    }

    /// Any open file of that node.
    pub(crate) fn of_node(&self, node: NodeId) -> Option<Arc<OpenFile>> {
        let table = self.table.lock();
        let handle = table.by_node.get(&node)?.last()?;
        table.open.get(handle).cloned()
    }

    pub(crate) fn release(&self, handles: &[Handle]) {
        let mut closing = Vec::new();
        let mut table = self.table.lock();
        for handle in handles {
            let Some(file) = table.open.remove(handle) else { continue };
            if let Some(list) = table.by_node.get_mut(&file.node) {
                list.retain(|h| h != handle);
                if list.is_empty() {
                    table.by_node.remove(&file.node);
                }
            }
            closing.push(file);
        }
        drop(table); // closing may wait for the disk
    }
}

/// Numbers grants; unique within the process, and so within each session.
pub(crate) fn next_grant() -> GrantId {
    static LAST: AtomicU64 = AtomicU64::new(0);
    GrantId(LAST.fetch_add(1, Ordering::Relaxed) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64) -> OpenFile {
        let fd = std::fs::File::open("/dev/null").unwrap().into();
        OpenFile {
            node: NodeId { ino, generation: 1 },
            fd,
            readable: true,
            writable: false,
            position: Mutex::new(()),
        }
    }

    #[test]
    fn files_are_bounded_and_found_by_handle_and_node() {
        let files = SessionFiles::new(2, Term::Session);
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
