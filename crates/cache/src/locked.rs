//! What the kernel has locked for requests that are not answered, and what follows when one fails.

use crate::cache::Cache;
use crate::flight::{Purpose, Want};
use crate::op::Op;

/// A file, and of it a range: offset and length.
pub(crate) type Pages = (u64, (u64, u64));

impl Cache {
    /// Whether the kernel may have a directory locked for a request that waits: dropping a name in it waits for that.
    #[must_use]
    pub fn is_locked(&self, dir: u64) -> bool {
        let mut out = self.flights.values().filter(|flight| !flight.waiters.is_empty());
        let mut again = self.waiting.values().filter_map(|waiting| match &waiting.want {
            Want::Again(op) => Some(&**op),
            _ => None,
        });
        out.any(|flight| flight.purpose.locks_names(dir))
            || again.any(|op| op.locks_names(dir))
            || self.parked.values().any(|(_, op)| op.locks_names(dir))
    }
}

impl Purpose {
    /// The file whose pages the kernel has locked until this is answered, and which.
    pub(crate) fn pages(&self) -> Option<Pages> {
        match *self {
            Purpose::Read { ino, offset, size } => Some((ino, (offset, u64::from(size)))),
            Purpose::Write { ino, offset, size, .. } => Some((ino, (offset, size))),
            _ => None,
        }
    }

    /// The same, if it is of that file: offset and length.
    pub(crate) fn locks_pages(&self, file: u64, but_flushes: bool) -> Option<(u64, u64)> {
        let flush = matches!(self, Purpose::Write { flush: true, .. });
        let pages = self.pages().filter(|(ino, _)| *ino == file && !(flush && but_flushes));
        pages.map(|(_, range)| range)
    }

    fn locks_names(&self, of: u64) -> bool {
        match self {
            Purpose::Lookup { dir, .. }
            | Purpose::List { dir }
            | Purpose::Make { dir, .. }
            | Purpose::Remove { dir, .. } => *dir == of,
            Purpose::Rename { from, to, .. } => *from == of || *to == of,
            Purpose::Change { ino, .. } => *ino == of,
            _ => false,
        }
    }
}

impl Op {
    /// The same of a request that is not begun.
    pub(crate) fn pages(&self) -> Option<Pages> {
        match self {
            Op::Read { ino, offset, size, .. } => Some((*ino, (*offset, u64::from(*size)))),
            Op::Write { ino, offset, data, .. } => Some((*ino, (*offset, data.len() as u64))),
            Op::CopyRange { to_ino, to_offset, length, .. } => Some((*to_ino, (*to_offset, *length))),
            _ => None,
        }
    }

    pub(crate) fn locks_pages(&self, file: u64, but_flushes: bool) -> Option<(u64, u64)> {
        let flush = matches!(self, Op::Write { from_page_cache: true, .. });
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
            Op::ReadDir { ino, .. } | Op::SetAttr { ino, .. } => *ino == of,
            _ => false,
        }
    }
}
