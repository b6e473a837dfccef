//! Directories and pages that the kernel has locked for requests without a reply.

use super::CallKind;
use crate::byte_ranges::PAGE;
use crate::op::Op;
use nigh_types::{Name, WriteFlags};

/// File, and a range of it: offset and length.
pub(crate) type PageRange = (u64, (u64, u64));

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

    pub(crate) fn locks_names(&self, of: u64) -> bool {
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
    pub(crate) fn locks_victim(&self, parent_entry: Option<&(u64, Name)>) -> bool {
        let Some((at, called)) = parent_entry else { return false };
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

    pub(crate) fn locks_names(&self, of: u64) -> bool {
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

    pub(crate) fn locks_victim(&self, parent_entry: Option<&(u64, Name)>) -> bool {
        let Some((at, called)) = parent_entry else { return false };
        match self {
            Op::Rmdir { dir, name } => dir == at && name == called,
            Op::Rename { from, name, to, new_name, .. } => {
                from == at && name == called || to == at && new_name == called
            }
            _ => false,
        }
    }
}
