//! Kernel locks: directories and pages that the kernel has locked for requests without a reply.

use crate::byte_ranges::PAGE;
use crate::cache::Cache;
use crate::calls::CallKind;
use crate::op::Op;
use nigh_types::{Name, OpId, WriteFlags};

/// File, and a range of it: offset and length.
pub(crate) type PageRange = (u64, (u64, u64));

impl Cache {
    /// Returns whether the kernel may have a directory locked for a waiting request: invalidating a dentry in it waits
    /// for the lock.
    #[must_use]
    pub fn is_locked(&self, dir: u64) -> bool {
        let home = self.store.inode(dir).and_then(|inode| inode.parent_entry.as_ref());
        let mut out = self.calls.awaited();
        out.any(|flight| flight.purpose.locks_names(dir) || flight.purpose.locks_victim(home))
            || self.calls.queued().any(|(_, op)| op.locks_names(dir) || op.locks_victim(home))
            || self.store.suspended.waiting().any(|op| op.locks_names(dir))
    }
}

impl Cache {
    /// Returns whether a LOOKUP waits. If it is part of rename(2), the kernel has another directory locked too
    /// (`do_renameat2`), which the request does not name.
    #[must_use]
    pub fn has_waiting_lookup(&self) -> bool {
        let mut out = self.calls.awaited();
        out.any(|flight| matches!(flight.purpose, CallKind::Lookup { .. }))
            || self.calls.queued().any(|(_, op)| matches!(op, Op::Lookup { .. }))
    }
}

impl Cache {
    /// Returns queued requests, with the pages of that file that the kernel has locked for each (offset, length).
    pub(crate) fn queued_pages(
        &self,
        file: u64,
        but_flushes: bool,
    ) -> impl Iterator<Item = (OpId, (u64, u64))> {
        let parked = self.calls.queued().filter(|(_, op)| !self.is_direct(op));
        parked.filter_map(move |(id, op)| Some((id, op.locks_pages(file, but_flushes)?)))
    }
}

impl CallKind {
    /// Returns the file and the pages that the kernel has locked until the reply.
    pub(crate) fn pages(&self) -> Option<PageRange> {
        match *self {
            CallKind::Read { ino, offset, size, .. } => Some((ino, (offset, u64::from(size)))),
            CallKind::Write { ino, offset, size, direct: None, .. } => Some((ino, (offset, size))),
            CallKind::ReadLink { ino } => Some((ino, (0, PAGE))),
            _ => None,
        }
    }

    /// Returns the pages (offset, length), if they are of that file.
    pub(crate) fn locks_pages(&self, file: u64, but_flushes: bool) -> Option<(u64, u64)> {
        let pages = self.pages().filter(|(ino, _)| *ino == file && !(self.is_writeback() && but_flushes));
        pages.map(|(_, range)| range)
    }

    fn locks_names(&self, of: u64) -> bool {
        match self {
            CallKind::Lookup { dir, .. }
            | CallKind::List { dir }
            | CallKind::ListNames { dir, .. }
            | CallKind::Create { dir, .. }
            | CallKind::Remove { dir, .. } => *dir == of,
            CallKind::Rename { from, to, .. } => *from == of || *to == of,
            CallKind::Change { ino, .. } | CallKind::Fsync { ino } => *ino == of,
            _ => false,
        }
    }

    /// Returns whether the directory of this name is locked too: a directory that is removed or replaced, or one that
    /// is moved (since Linux 6.5).
    fn locks_victim(&self, home: Option<&(u64, Name)>) -> bool {
        let Some((at, called)) = home else { return false };
        match self {
            CallKind::Remove { dir, name } => dir == at && name == called,
            CallKind::Rename { from, name, to, new_name, .. } => {
                from == at && name == called || to == at && new_name == called
            }
            _ => false,
        }
    }
}

impl Op {
    /// Returns the file and the pages that the kernel has locked for a queued request.
    pub(crate) fn pages(&self) -> Option<PageRange> {
        match self {
            Op::Read { ino, offset, size, .. } => Some((*ino, (*offset, u64::from(*size)))),
            Op::Write { ino, offset, data, .. } => Some((*ino, (*offset, data.len() as u64))),
            Op::ReadLink { ino } => Some((*ino, (0, PAGE))),
            Op::CopyRange { to_ino, to_offset, length, .. } => Some((*to_ino, (*to_offset, *length))),
            _ => None,
        }
    }

    pub(crate) fn locks_pages(&self, file: u64, but_flushes: bool) -> Option<(u64, u64)> {
        let flush = matches!(self, Op::Write { flags: WriteFlags { write_back: true, .. }, .. });
        let pages = self.pages().filter(|(ino, _)| *ino == file && !(flush && but_flushes));
        pages.map(|(_, range)| range)
    }

    fn locks_names(&self, of: u64) -> bool {
        match self {
            Op::Lookup { dir, .. }
            | Op::Create { dir, .. }
            | Op::Mkdir { dir, .. }
            | Op::Mknod { dir, .. }
            | Op::Symlink { dir, .. }
            | Op::Link { dir, .. }
            | Op::Unlink { dir, .. }
            | Op::Rmdir { dir, .. } => *dir == of,
            Op::Rename { from, to, .. } => *from == of || *to == of,
            Op::ReadDir { ino, .. }
            | Op::SetAttr { ino, .. }
            | Op::SetXattr { ino, .. }
            | Op::RemoveXattr { ino, .. }
            | Op::Fsync { ino, .. } => *ino == of,
            _ => false,
        }
    }

    fn locks_victim(&self, home: Option<&(u64, Name)>) -> bool {
        let Some((at, called)) = home else { return false };
        match self {
            Op::Rmdir { dir, name } => dir == at && name == called,
            Op::Rename { from, name, to, new_name, .. } => {
                from == at && name == called || to == at && new_name == called
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::op::Caller;
    use crate::test_fixtures::{T0, cache, calls};
    use nigh_types::{Attr, Entry, Event, NodeId, OpId, Reply, Response};

    /// Directories below the root.
    const MET: u64 = 7;
    const OTHER: u64 = 8;

    fn name(bytes: &[u8]) -> Name {
        Name::new(bytes).unwrap()
    }

    fn with_directories() -> Cache {
        let mut cache = cache(Config::default());
        for (ino, named) in [(MET, "met"), (OTHER, "other")] {
            let lookup = Op::Lookup { dir: 1, name: name(named.as_bytes()) };
            assert_eq!(cache.handle_op(T0, OpId(ino), Caller::default(), lookup), None);
            let [call] = calls(&mut cache)[..] else { panic!("it is looked up") };
            let attr = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
            let id = NodeId { ino, generation: 1 };
            let entry = Entry { id, attr, target: None, no_xattrs: true };
            let response = Response::plain(Ok(Reply::Entry(Some(entry))));
            cache.handle_event(T0, Event::Response { call, response });
        }
        cache
    }

    fn rename(from: u64, old: &[u8], to: u64, new: &[u8]) -> Op {
        let (name, new_name) = (name(old), name(new));
        Op::Rename { from, name, to, new_name, no_replace: false, exchange: false, whiteout: false }
    }

    /// Returns which of `MET`, the root and `OTHER` may be locked for a request, in flight or queued while the remote
    /// was away.
    fn locked(op: &Op) -> [bool; 3] {
        let [out, parked] = [false, true].map(|parked| {
            let mut cache = with_directories();
            if parked {
                cache.handle_event(T0, Event::Expired { why: String::new() });
            }
            assert_eq!(cache.handle_op(T0, OpId(99), Caller::default(), op.clone()), None);
            assert_eq!(cache.calls.queued_op(OpId(99)).is_some(), parked);
            [MET, 1, OTHER].map(|dir| cache.is_locked(dir))
        });
        assert_eq!(out, parked, "{op:?}");
        out
    }

    #[test]
    fn directory_counts_as_locked_during_xattr_changes_and_fsync() {
        let (value, flags) = (b"1".to_vec(), 0);
        let set = Op::SetXattr { ino: MET, name: b"user.x".to_vec(), value, flags, kill_sgid: false };
        let remove = Op::RemoveXattr { ino: MET, name: b"user.x".to_vec() };
        let sync = Op::Fsync { ino: MET, fh: None, data_only: false };
        for op in [set, remove, sync] {
            assert_eq!(locked(&op), [true, false, false], "{op:?}");
        }
        assert_eq!(locked(&Op::GetAttr { ino: MET }), [false; 3]);
    }

    #[test]
    fn directory_counts_as_locked_during_rmdir_and_rename() {
        assert_eq!(locked(&Op::Rmdir { dir: 1, name: name(b"met") }), [true, true, false]);
        assert_eq!(locked(&rename(OTHER, b"x", 1, b"met")), [true, true, true]);
        assert_eq!(locked(&rename(1, b"met", OTHER, b"x")), [true, true, true]);
        assert_eq!(locked(&Op::Rmdir { dir: 1, name: name(b"x") }), [false, true, false]);
        assert_eq!(locked(&Op::Rmdir { dir: OTHER, name: name(b"met") }), [false, false, true]);
        assert_eq!(locked(&rename(1, b"x", 1, b"y")), [false, true, false]);
    }
}
