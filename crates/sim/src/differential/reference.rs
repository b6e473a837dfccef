//! The reference tree: it executes each request at once.

use super::outcome::Outcome;
use nigh_cache::{Fh, Op};
use nigh_remote::model_fs::{ModelFs, ModelFsConfig};
use nigh_types::{
    Call, Credentials, Handle, Name, NodeId, NodeRef, Reply, Request, Response, Time, WriteFlags,
};
use std::collections::BTreeMap;

/// A tree, and the node ids and handles that its kernel would know.
pub struct ReferenceTree {
    pub tree: ModelFs,
    ids: BTreeMap<u64, NodeId>,
    files: BTreeMap<Fh, Handle>,
}

impl ReferenceTree {
    #[must_use]
    pub fn new(config: ModelFsConfig) -> ReferenceTree {
        let tree = ModelFs::new(ModelFsConfig { by_hint_only: false, ..config });
        let root = tree.root();
        ReferenceTree { tree, ids: BTreeMap::from([(root.ino, root)]), files: BTreeMap::new() }
    }

    /// Executes a request; returns its result and the handle that it opened.
    pub fn execute(&mut self, now: Time, op: &Op) -> (Outcome, Option<Handle>) {
        let Some(call) = self.call(op) else { return (Outcome::Done, None) };
        let request = Request { credentials: Credentials::default(), mutation_id: None, call };
        let responses = self.tree.execute(now, &request);
        responses.iter().for_each(|response| self.record_ids(response));
        let handle = responses.first().and_then(|response| match &response.result {
            Ok(Reply::Opened { handle, .. }) => Some(*handle),
            Ok(Reply::Created { handle, .. }) => *handle,
            _ => None,
        });
        (Outcome::from_responses(op, &responses), handle)
    }

    /// Maps the cache's file handle to the tree's.
    pub fn opened(&mut self, fh: Fh, handle: Handle) {
        self.files.insert(fh, handle);
    }

    pub fn closed(&mut self, fh: Fh) {
        if let Some(handle) = self.files.remove(&fh) {
            self.tree.release(&[handle]);
        }
    }

    /// Returns whether an inode is open or has a name.
    #[must_use]
    pub fn has(&self, ino: u64) -> bool {
        self.ids.get(&ino).is_some_and(|id| self.tree.attr(*id).is_some())
    }

    fn record_ids(&mut self, response: &Response) {
        match &response.result {
            Ok(Reply::Entry(Some(entry)) | Reply::Created { entry, .. }) => {
                self.ids.insert(entry.id.ino, entry.id);
            }
            Ok(Reply::Listed(part)) => {
                self.ids.extend(part.entries.iter().map(|(_, entry)| (entry.id.ino, entry.id)));
            }
            _ => {}
        }
    }

    /// Returns the node id of an inode number that the kernel knows.
    #[must_use]
    pub fn id(&self, ino: u64) -> NodeId {
        self.ids.get(&ino).copied().unwrap_or(NodeId { ino, generation: 0 })
    }

    fn place(&self, ino: u64) -> NodeRef {
        NodeRef::without_hint(self.id(ino))
    }

    fn handle(&self, fh: Fh) -> Option<Handle> {
        self.files.get(&fh).copied()
    }

    /// Converts a request to a call; `None` if the tree has nothing to do.
    fn call(&self, op: &Op) -> Option<Call> {
        let call = match op.clone() {
            Op::Lookup { dir, name } => Call::Lookup { dir: self.place(dir), name },
            Op::LookupSelf { ino } | Op::GetAttr { ino } => Call::GetAttr { node: self.place(ino) },
            Op::SetAttr { ino, fh, set } => {
                Call::SetAttr { node: self.place(ino), handle: fh.and_then(|fh| self.handle(fh)), set }
            }
            Op::ReadLink { ino } => Call::ReadLink { node: self.place(ino) },
            Op::ReadDir { ino, .. } => Call::List { dir: self.place(ino) },
            Op::GetXattr { ino, name, .. } => Call::Xattr { node: self.place(ino), name },
            Op::ListXattr { ino, .. } => Call::Xattrs { node: self.place(ino) },
            Op::SetXattr { ino, name, value, flags, kill_sgid } => {
                Call::SetXattr { node: self.place(ino), name, value, flags, kill_sgid }
            }
            Op::RemoveXattr { ino, name } => Call::RemoveXattr { node: self.place(ino), name },
            Op::StatFs { ino } => Call::StatFs { node: self.place(ino) },
            Op::GetFlags { ino } => Call::GetFlags { node: self.place(ino) },
            Op::Open { ino, access, .. } => Call::Open { node: self.place(ino), access },
            Op::OpenDir { .. }
            | Op::ReleaseDir { .. }
            | Op::LookupParent { .. }
            | Op::Flush { .. }
            | Op::Release { .. } => return None,
            other => return self.making(other).or_else(|| self.on_file(op)),
        };
        Some(call)
    }

    fn making(&self, op: Op) -> Option<Call> {
        let dir = |dir| self.place(dir);
        Some(match op {
            Op::Symlink { dir: at, name, target } => Call::Symlink { dir: dir(at), name, target },
            Op::Mknod { dir: at, name, kind, mode, umask, rdev } => {
                Call::Mknod { dir: dir(at), name, kind, mode, umask, rdev }
            }
            Op::Mkdir { dir: at, name, mode, umask } => Call::Mkdir { dir: dir(at), name, mode, umask },
            Op::Unlink { dir: at, name } => Call::Unlink { dir: dir(at), name, keep: None },
            Op::Rmdir { dir: at, name } => Call::Rmdir { dir: dir(at), name },
            Op::Rename { from, name, to, new_name, no_replace, exchange, whiteout } => {
                let (from, to) = (dir(from), dir(to));
                Call::Rename { from, name, to, new_name, no_replace, exchange, whiteout, keep: None }
            }
            Op::Link { ino, dir: at, name } => Call::Link { node: self.place(ino), dir: dir(at), name },
            Op::Create { dir: at, name, mode, umask, exclusive, access, .. } => {
                Call::Create { dir: dir(at), name, mode, umask, exclusive, access }
            }
            Op::Tmpfile { dir: at, mode, umask, access } => {
                Call::Tmpfile { dir: dir(at), mode, umask, access }
            }
            _ => return None,
        })
    }

    fn on_file(&self, op: &Op) -> Option<Call> {
        let at = |ino: u64, fh: Fh| (self.place(ino), self.handle(fh));
        Some(match *op {
            Op::Read { ino, fh, offset, size } => {
                let (node, handle) = at(ino, fh);
                Call::Read { node, handle, offset, length: size }
            }
            Op::Write { ino, fh, offset, ref data, flags } => {
                let (node, handle) = at(ino, fh);
                let (append, kill_suidgid) = (flags.append && !flags.write_back, flags.kill_suidgid);
                let flags = WriteFlags { append, kill_suidgid, ..WriteFlags::default() };
                Call::Write { node, handle, offset, data: data.clone(), flags }
            }
            Op::Fsync { ino, fh, data_only } => {
                Call::Fsync { node: self.place(ino), handle: fh.and_then(|fh| self.handle(fh)), data_only }
            }
            Op::Fallocate { ino, fh, mode, offset, length } => {
                let (node, handle) = at(ino, fh);
                Call::Fallocate { node, handle, mode, offset, length }
            }
            Op::Seek { ino, fh, offset, data } => {
                let (node, handle) = at(ino, fh);
                Call::Seek { node, handle, offset, data }
            }
            Op::CopyRange { ino, fh, offset, to_ino, to_fh, to_offset, length } => {
                let (from, from_handle) = at(ino, fh);
                let (to, to_handle) = at(to_ino, to_fh);
                let from_offset = offset;
                Call::CopyRange { from, from_handle, from_offset, to, to_handle, to_offset, length }
            }
            _ => return None,
        })
    }

    /// Returns the inode of a name.
    #[must_use]
    pub fn child(&self, dir: u64, name: &Name) -> Option<u64> {
        self.tree.child_of(dir, name)
    }
}
