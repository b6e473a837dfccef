//! Kinds of calls, and forms of replies.

use crate::contents::ReadAs;
use crate::op::{Caller, Fh};
use crate::open::LockOwner;
use nigh_types::{Access, CallId, DataVersion, Handle, LockInfo, Name, NodeId};

/// Kind of a call, with the arguments that its reply needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum CallKind {
    Lookup {
        dir: u64,
        name: Name,
    },
    Attr {
        ino: u64,
    },
    List {
        dir: u64,
    },
    /// Names-only listing for one open directory.
    ListNames {
        dir: u64,
        fh: Fh,
    },
    /// Prefetch of directories that no caller has asked for yet.
    Prefetch,
    ReadLink {
        ino: u64,
    },
    Xattrs {
        ino: u64,
    },
    /// One xattr value that was too large for the set of all xattrs.
    Xattr {
        ino: u64,
    },
    StatFs {
        ino: u64,
    },
    Flags,
    Read {
        ino: u64,
        fh: Fh,
        offset: u64,
        size: u32,
    },
    /// Read ahead of any request for these bytes.
    ReadAhead {
        node: NodeId,
        offset: u64,
        size: u32,
        /// Version of the file in the cache when the call was sent.
        known: Option<DataVersion>,
        read_as: ReadAs,
    },
    Seek,
    Open {
        ino: u64,
        file: OpenParams,
    },
    /// Creates a name; `file` is set if the call also opens it.
    Create {
        dir: u64,
        name: Name,
        file: Option<OpenParams>,
    },
    Tmpfile {
        file: OpenParams,
    },
    Remove {
        dir: u64,
        name: Name,
    },
    Rename {
        from: u64,
        name: Name,
        to: u64,
        new_name: Name,
        exchange: bool,
        whiteout: bool,
    },
    /// Changes attributes or xattrs of one inode.
    Change {
        ino: u64,
        xattrs: bool,
    },
    Write {
        ino: u64,
        offset: u64,
        size: u64,
        /// Write-back of mmap stores by the kernel.
        writeback: bool,
        /// The remote chooses the offset.
        append: bool,
        /// The write bypasses the kernel's page cache, through this open file.
        direct: Option<Fh>,
    },
    Fsync {
        ino: u64,
    },
    Lock {
        holder: LockOwner,
        range: LockInfo,
        wait: bool,
        /// A cancel was sent: the remote ends the wait.
        cancelled: bool,
    },
    Unlock {
        holder: LockOwner,
        /// For an unlock of the whole file: the number of locks granted to its owner so far.
        whole_after: Option<u64>,
        closing: bool,
    },
    TestLock,
    /// Reopens a file in a new session: an open file, or without `fh` the handle that pins the inode.
    Reopen {
        ino: u64,
        fh: Option<Fh>,
        handle: Handle,
    },
    /// Reclaims a lock in a new session.
    ReclaimLock {
        holder: LockOwner,
        range: LockInfo,
    },
    /// Revalidates the pages that the kernel holds of an open file.
    Revalidate {
        ino: u64,
    },
    /// Gives the remote an inode's path again; `then` is resent afterwards.
    ResolvePath {
        then: CallId,
    },
}

impl CallKind {
    /// Returns whether the call releases the locks of a closed file or a dead caller.
    pub(crate) fn releases_locks(&self) -> bool {
        matches!(self, CallKind::Unlock { closing: true, .. })
    }

    /// Returns whether the call reclaims state in a session that has forgotten it.
    pub(crate) fn is_reclaim(&self) -> bool {
        matches!(self, CallKind::Reopen { .. } | CallKind::ReclaimLock { .. })
    }

    /// Returns whether the call writes back mmap stores.
    pub(crate) fn is_writeback(&self) -> bool {
        matches!(self, CallKind::Write { writeback: true, .. })
    }

    /// Returns whether the reply updates the cache.
    pub(crate) fn updates_cache(&self) -> bool {
        !matches!(
            self,
            CallKind::Lock { .. }
                | CallKind::Unlock { .. }
                | CallKind::TestLock
                | CallKind::ReclaimLock { .. }
                | CallKind::ResolvePath { .. }
                | CallKind::StatFs { .. }
                | CallKind::Seek
                | CallKind::Flags
        )
    }

    /// Returns whether concurrent changes are recorded for the call. (A lock call may wait for hours.)
    pub(crate) fn tracks_races(&self) -> bool {
        !matches!(self, CallKind::Lock { .. })
    }

    /// Returns the names that a change binds or unbinds.
    pub(crate) fn names(&self) -> Vec<(u64, &Name)> {
        match self {
            CallKind::Create { dir, name, .. } | CallKind::Remove { dir, name } => vec![(*dir, name)],
            CallKind::Rename { from, name, to, new_name, .. } => vec![(*from, name), (*to, new_name)],
            _ => Vec::new(),
        }
    }

    /// Returns whether the change binds or unbinds this name.
    pub(crate) fn binds(&self, dir: u64, name: &Name) -> bool {
        self.names().contains(&(dir, name))
    }

    /// Returns whether the change binds or unbinds a name of this directory.
    pub(crate) fn binds_in(&self, dir: u64) -> bool {
        self.names().iter().any(|(of, _)| *of == dir)
    }
}

/// Open parameters of a file about to be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OpenParams {
    pub append: bool,
    pub access: Access,
    pub caller: Caller,
}

/// Form of the reply that a waiting request needs once the call has its reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ReplyKind {
    /// As the call's kind says.
    Reply,
    Xattr {
        name: Vec<u8>,
        size: u32,
    },
    XattrNames {
        size: u32,
    },
    Page {
        fh: Fh,
        offset: nigh_types::Cookie,
        size: u32,
        plus: bool,
    },
    OpenDir {
        ino: u64,
    },
    /// Attributes for a lookup by inode number.
    SelfLookup,
}
