//! A request that waits for its reply, and its reply.

use super::size_barrier::SizeNotice;
use crate::reply::ReplyFormat;
use crate::revalidations::NameKey;
use nigh_cache::{Cache, Op, OpReply};
use nigh_types::{OpId, WriteFlags};

pub(super) struct Pending {
    pub unique: u64,
    pub shape: ReplyFormat,
    pub pid: u32,
    pub role: Option<Role>,
    /// Inode of the file whose pages the kernel keeps locked until the reply.
    pub locked_file: Option<u64>,
    /// A reply delayed by the size barrier, and the requests for which it waits.
    pub delayed: Option<(OpReply, Vec<OpId>)>,
}

/// How the calling thread applies the reply when it runs again (`reply_barrier.rs`).
#[derive(Clone, Copy)]
pub(super) enum Role {
    /// GETATTR before a read: the thread may use the file size that the kernel then has cached.
    Reads(u64),
    /// The thread applies the reply's attributes even if the kernel was invalidated after the reply.
    Changes(u64),
    /// As `Changes`, and the reply sets the file size.
    Sets(u64),
    /// The thread may read or change the file's pages after the reply.
    Opens(u64),
    /// The thread applies no attributes from the reply.
    Leaves(u64),
    /// The reply removes a name of some file.
    Unlinks,
    /// The reply may revalidate a cached dentry.
    Looks(NameKey),
}

/// A reply for the kernel.
pub(super) struct Sent {
    pub unique: u64,
    pub shape: ReplyFormat,
    pub answer: OpReply,
    pub role: Option<Role>,
    pub pid: u32,
    pub length: Option<SizeNotice>,
    /// Inode whose attributes are invalidated in the kernel before the reply is sent.
    pub invalidates_attrs: Option<u64>,
}

impl Role {
    pub fn of(op: &Op, cache: &Cache) -> Option<Role> {
        match op {
            Op::GetAttr { ino } => cache.reads_by_size(*ino).then_some(Role::Reads(*ino)),
            Op::SetAttr { ino, set, .. } if set.size.is_some() => Some(Role::Sets(*ino)),
            Op::Open { ino, access, .. } if access.truncate => Some(Role::Sets(*ino)),
            Op::Open { ino, .. } => Some(Role::Opens(*ino)),
            Op::Write { ino, flags: WriteFlags { write_back: false, .. }, .. }
            | Op::SetAttr { ino, .. }
            | Op::Link { ino, .. }
            | Op::Fallocate { ino, .. }
            | Op::CopyRange { to_ino: ino, .. } => Some(Role::Changes(*ino)),
            Op::Write { ino, .. } | Op::SetXattr { ino, .. } | Op::RemoveXattr { ino, .. } => {
                Some(Role::Leaves(*ino))
            }
            Op::Unlink { .. } | Op::Rename { .. } => Some(Role::Unlinks),
            Op::Lookup { dir, name } => Some(Role::Looks(NameKey::of(*dir, name))),
            _ => None,
        }
    }

    /// The inode of a local change.
    pub fn changed(self) -> Option<u64> {
        match self {
            Role::Changes(ino) | Role::Sets(ino) | Role::Leaves(ino) => Some(ino),
            Role::Reads(_) | Role::Opens(_) | Role::Unlinks | Role::Looks(_) => None,
        }
    }
}
