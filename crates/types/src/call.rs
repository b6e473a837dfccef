//! Calls that a cache sends to its remote.

use crate::{
    CallId, Cookie, Credentials, DataVersion, GrantId, Handle, Kind, LeaseScope, LockKind, Name, NodeId,
    NodeRef, SetAttr,
};
use std::cmp::Ordering;

/// Permanent identifier of a mutation: the remote recognises a retransmission by it.
/// See docs/decisions/0003-mutation-ids.md.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MutationId {
    /// The client's durable identity.
    pub client: u64,
    /// Random, new at each start of the client.
    pub incarnation: u64,
    /// Counts the mutations of this incarnation from 1.
    pub sequence: u64,
}

/// A call with its credentials and mutation id.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    pub credentials: Credentials,
    /// Set on mutations only.
    pub mutation_id: Option<MutationId>,
    pub call: Call,
}

/// Access mode and flags of an open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    pub read: bool,
    pub write: bool,
    pub truncate: bool,
    /// `O_DIRECT`, passed on where the export's filesystem supports it.
    pub direct: bool,
    /// `O_SYNC` or `O_DSYNC`: the remote makes a write durable before it replies.
    pub sync: bool,
    /// `O_APPEND`, required to open a file with the append-only flag for writing. The offset of a write depends on
    /// [`WriteFlags::append`] alone.
    pub append: bool,
}

impl Access {
    /// Whether this mode may open a file with the append-only flag (`may_open` in fs/namei.c).
    #[must_use]
    pub fn is_append_only(&self) -> bool {
        self.write && self.append && !self.truncate
    }
}

/// Flags of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WriteFlags {
    /// The remote chooses the offset: the end of the file at the time of the write.
    pub append: bool,
    /// Drop setuid and setgid bits as Linux does for an unprivileged writer.
    pub kill_suidgid: bool,
    /// The remote makes the data durable before it replies.
    pub sync: bool,
    /// Write-back of a shared mapping's dirty pages by the client's kernel, possibly because of an invalidation.
    pub write_back: bool,
    /// Precondition of a write-back. The remote applies the write if the file's data has not changed otherwise since,
    /// or if the file already contains these bytes; else it replies `ECANCELED`.
    pub since: Option<WriteBackPrecondition>,
}

/// Precondition of a write-back: the version of the data on which the kernel's pages are based, with local changes
/// only. While the grant lives, its record shows whether other clients have changed the data. After its end the
/// remote compares the version: the file must still have it, or a version made from it by changes of this session
/// alone. See docs/decisions/0008-leases.md, rule 12.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteBackPrecondition {
    pub stamp: DataVersion,
    /// The grant that covers the pages; `None` after its end.
    pub under: Option<(GrantId, LeaseScope)>,
}

/// One call. Offsets and lengths are bytes. Calls from [`Call::Create`] on are mutations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Call {
    /// Looks up one name in a directory → `Reply::Entry`.
    Lookup { dir: NodeRef, name: Name },
    /// Names from the export's root to `node`, so that the remote can find the inode again by path; at most
    /// [`Call::MOST_NAMES`] → `Reply::Done`.
    ResolvePath { node: NodeId, names: Vec<Name> },
    /// → `Reply::Attr`
    GetAttr { node: NodeRef },
    /// Lists a whole directory in cookie order → several `Reply::Entries` or `Reply::Names`.
    List { dir: NodeRef },
    /// Names-only listing from the first entry after a cookie on, in cookie order, without grants → several
    /// `Reply::Dirents`. See docs/decisions/0023-names-before-attributes.md.
    ListNames { dir: NodeRef, after: Cookie },
    /// Prefetch of whole directories: each of `roots` with the directories found below it, before the next of
    /// `roots`; at most [`Call::MOST_ROOTS`] → several `Reply::Prefetched`. See docs/decisions/0019-walks-ahead.md.
    /// `credit` is the number of entries that the remote may send; a directory costs its names and one. Without
    /// credit the remote starts no directory. It skips directories of more than [`Call::MOST_PREFETCHED_NAMES`] names.
    /// The last reply comes when nothing is left to send, or the call is cancelled.
    Prefetch { roots: Vec<NodeRef>, order: PrefetchOrder, credit: u32 },
    /// More credit for a running prefetch, and the directory to send next, regardless of its cost. The remote sends or
    /// reports this directory in any case, unless it did before. No reply.
    PrefetchCredit { walk: CallId, credit: u32, want: Option<NodeRef> },
    /// → `Reply::Target`
    ReadLink { node: NodeRef },
    /// Lists all xattr names, with the values as far as they fit → `Reply::Xattrs`
    Xattrs { node: NodeRef },
    /// Gets one xattr value → `Reply::Value`, or `ENODATA`
    Xattr { node: NodeRef, name: Vec<u8> },
    /// → `Reply::Space`
    StatFs { node: NodeRef },
    /// → `Reply::Opened`
    Open { node: NodeRef, access: Access },
    /// Reads up to `length` bytes (fewer only at the end of the file) → `Reply::Data`
    Read { node: NodeRef, handle: Option<Handle>, offset: u64, length: u32 },
    /// `SEEK_DATA` (`data`) or `SEEK_HOLE` → `Reply::Offset`
    Seek { node: NodeRef, handle: Option<Handle>, offset: u64, data: bool },
    /// `FS_IOC_GETFLAGS` → `Reply::Flags`
    GetFlags { node: NodeRef },
    /// Closes open handles, at most [`Call::MOST_HANDLES`]; no reply.
    Release { handles: Vec<Handle> },
    /// Pins a file that this client's kernel opened under a grant, without a call to the remote: the file stays
    /// readable under `handle`, even after its last name is removed, until the client releases the handle. The client
    /// assigns the handle ([`Handle::CLIENT_ASSIGNED`]). `names` is the path from the root, at most
    /// [`Call::MOST_NAMES`], or empty. No reply; the remote processes the pin before everything that the client sends
    /// later, acknowledgements included.
    PinOpen { node: NodeRef, names: Vec<Name>, handle: Handle },
    /// Sets a lock on the bytes from `start` to `end` (inclusive) of a regular file, or with `flock` on the whole file.
    /// It replaces the owner's locks on this range. `owner` is a number of this client; flock(2) owners have a number
    /// space of their own → `Reply::Done`. Without `wait` a conflict is `EAGAIN`. With `wait` the reply comes when the
    /// lock is granted, or as `EINTR` when the call is cancelled, or as `EDEADLK` or `ENOLCK`.
    /// With `reclaim` it restores a lock that the client held when the remote lost its locks. The remote processes a
    /// reclaim at once, even during the grace period of a restarted server, and a reclaim never waits itself.
    Lock {
        node: NodeRef,
        owner: u64,
        flock: bool,
        kind: LockKind,
        start: u64,
        end: u64,
        wait: bool,
        pid: u32,
        reclaim: bool,
    },
    /// Releases the owner's locks on these bytes → `Reply::Done`, even if there are none.
    Unlock { node: NodeRef, owner: u64, flock: bool, start: u64, end: u64 },
    /// Returns the lock that conflicts with the given one → `Reply::LockConflict`
    GetLock { node: NodeRef, owner: u64, flock: bool, kind: LockKind, start: u64, end: u64 },
    /// Reopens a file under the handle that the remote has lost, with the checks of any open
    /// → `Reply::Opened` with this handle, or `EINVAL` if the handle is in use
    Reopen { node: NodeRef, handle: Handle, access: Access },
    /// Finds an inode by its number, where the session supports it ([`crate::Features::lookup_number`])
    /// → `Reply::Found`, or `ESTALE` if no inode has this number. See docs/decisions/0035-file-handles.md.
    LookupNumber { ino: u64 },

    /// Creates and opens a regular file → `Reply::Created` with a handle. Without `exclusive` it opens an existing file
    /// unchanged. `mode` is the application's; the server's filesystem applies `umask` unless a default ACL
    /// takes its place. The other calls that create a name treat `mode` and `umask` likewise.
    Create { dir: NodeRef, name: Name, mode: u32, umask: u32, exclusive: bool, access: Access },
    /// Creates and opens a regular file without a name → `Reply::Created` with a handle.
    Tmpfile { dir: NodeRef, mode: u32, umask: u32, access: Access },
    /// Creates any inode but a symlink and a directory → `Reply::Created`
    Mknod { dir: NodeRef, name: Name, kind: Kind, mode: u32, umask: u32, rdev: u32 },
    /// → `Reply::Created`
    Mkdir { dir: NodeRef, name: Name, mode: u32, umask: u32 },
    /// → `Reply::Created`
    Symlink { dir: NodeRef, name: Name, target: Vec<u8> },
    /// → `Reply::Created`
    Link { node: NodeRef, dir: NodeRef, name: Name },
    /// Removes anything but a directory → `Reply::Removed`. `keep` is a file that this client may have open without a
    /// handle: if the name leads to it, the remote pins the file and returns a handle.
    Unlink { dir: NodeRef, name: Name, keep: Option<NodeId> },
    /// → `Reply::Removed`
    Rmdir { dir: NodeRef, name: Name },
    /// → `Reply::Renamed`. `keep` as for unlink, for the replaced file. With `whiteout` the old name becomes a whiteout
    /// (`RENAME_WHITEOUT`, a character device 0:0); `EINVAL` where the filesystem does not support it.
    Rename {
        from: NodeRef,
        name: Name,
        to: NodeRef,
        new_name: Name,
        no_replace: bool,
        exchange: bool,
        whiteout: bool,
        keep: Option<NodeId>,
    },
    /// → `Reply::Attr`
    SetAttr { node: NodeRef, handle: Option<Handle>, set: SetAttr },
    /// → `Reply::Written`
    Write { node: NodeRef, handle: Option<Handle>, offset: u64, data: Vec<u8>, flags: WriteFlags },
    /// `mode` as fallocate(2) → `Reply::Attr`
    Fallocate { node: NodeRef, handle: Option<Handle>, mode: u32, offset: u64, length: u64 },
    /// → `Reply::Written` (the offset is the destination's)
    CopyRange {
        from: NodeRef,
        from_handle: Option<Handle>,
        from_offset: u64,
        to: NodeRef,
        to_handle: Option<Handle>,
        to_offset: u64,
        length: u64,
    },
    /// `flags` as setxattr(2). `kill_sgid`: setting an access ACL drops setgid → `Reply::Attr`
    SetXattr { node: NodeRef, name: Vec<u8>, value: Vec<u8>, flags: u32, kill_sgid: bool },
    /// → `Reply::Attr`
    RemoveXattr { node: NodeRef, name: Vec<u8> },
    /// Makes a file or directory durable, with a name that leads to it → `Reply::Done`
    Fsync { node: NodeRef, handle: Option<Handle>, data_only: bool },
}

/// Order in which a prefetch visits the directories of a directory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum PrefetchOrder {
    /// The order of listings.
    #[default]
    Cookie,
    /// By the bytes of their names.
    Name,
    /// By inode number.
    InodeNumber,
    /// The same orders reversed, as of a walker with a stack of directories
    /// ([`crate::Features::reversed_prefetch`]).
    CookieReversed,
    NameReversed,
    InodeNumberReversed,
}

impl PrefetchOrder {
    /// All orders that are not reversed.
    pub const FORWARD: [PrefetchOrder; 3] =
        [PrefetchOrder::Cookie, PrefetchOrder::Name, PrefetchOrder::InodeNumber];
    pub const REVERSED: [PrefetchOrder; 3] =
        [PrefetchOrder::CookieReversed, PrefetchOrder::NameReversed, PrefetchOrder::InodeNumberReversed];

    /// The order of which this one is the reverse, or itself.
    #[must_use]
    pub fn forward(self) -> PrefetchOrder {
        match self {
            PrefetchOrder::Cookie | PrefetchOrder::CookieReversed => PrefetchOrder::Cookie,
            PrefetchOrder::Name | PrefetchOrder::NameReversed => PrefetchOrder::Name,
            PrefetchOrder::InodeNumber | PrefetchOrder::InodeNumberReversed => PrefetchOrder::InodeNumber,
        }
    }

    #[must_use]
    pub fn is_reversed(self) -> bool {
        self != self.forward()
    }

    #[must_use]
    pub fn reversed(self) -> PrefetchOrder {
        match self {
            PrefetchOrder::Cookie => PrefetchOrder::CookieReversed,
            PrefetchOrder::Name => PrefetchOrder::NameReversed,
            PrefetchOrder::InodeNumber => PrefetchOrder::InodeNumberReversed,
            reversed => reversed.forward(),
        }
    }

    /// Compares two entries of a directory in this order, each by its cookie, name and inode number.
    #[must_use]
    pub fn compare(self, one: (Cookie, &[u8], u64), other: (Cookie, &[u8], u64)) -> Ordering {
        let forward = match self.forward() {
            PrefetchOrder::Name => one.1.cmp(other.1),
            PrefetchOrder::InodeNumber => one.2.cmp(&other.2),
            _ => (one.0, one.1).cmp(&(other.0, other.1)),
        };
        if self.is_reversed() { forward.reverse() } else { forward }
    }
}

impl Call {
    /// Most root directories of one prefetch.
    pub const MOST_ROOTS: u32 = 1_024;
    /// Most names of a directory that a prefetch sends without a request for it.
    pub const MOST_PREFETCHED_NAMES: u32 = 16_384;
    /// Most names of a path from the root to an inode (Linux's PATH_MAX allows 2,048).
    pub const MOST_NAMES: u32 = 4_096;
    /// Most handles in one release.
    pub const MOST_HANDLES: u32 = 65_536;

    /// Whether this call changes the export, and so must carry an [`MutationId`].
    #[must_use]
    pub fn is_mutation(&self) -> bool {
        match self {
            Call::Lookup { .. }
            | Call::ResolvePath { .. }
            | Call::GetAttr { .. }
            | Call::List { .. }
            | Call::ListNames { .. }
            | Call::Prefetch { .. }
            | Call::PrefetchCredit { .. }
            | Call::ReadLink { .. }
            | Call::Xattrs { .. }
            | Call::Xattr { .. }
            | Call::StatFs { .. }
            | Call::Open { access: Access { truncate: false, .. }, .. }
            | Call::Read { .. }
            | Call::Seek { .. }
            | Call::GetFlags { .. }
            | Call::Release { .. }
            | Call::PinOpen { .. }
            | Call::Lock { .. }
            | Call::Unlock { .. }
            | Call::GetLock { .. }
            | Call::Reopen { .. }
            | Call::LookupNumber { .. } => false,
            Call::Open { .. }
            | Call::Create { .. }
            | Call::Tmpfile { .. }
            | Call::Mknod { .. }
            | Call::Mkdir { .. }
            | Call::Symlink { .. }
            | Call::Link { .. }
            | Call::Unlink { .. }
            | Call::Rmdir { .. }
            | Call::Rename { .. }
            | Call::SetAttr { .. }
            | Call::Write { .. }
            | Call::Fallocate { .. }
            | Call::CopyRange { .. }
            | Call::SetXattr { .. }
            | Call::RemoveXattr { .. }
            | Call::Fsync { .. } => true,
        }
    }

    /// Whether a reply is sent.
    #[must_use]
    pub fn has_reply(&self) -> bool {
        !matches!(self, Call::Release { .. } | Call::PinOpen { .. } | Call::PrefetchCredit { .. })
    }

    /// Whether the reply may wait for actions of other callers. Such calls do not count against a session's limit on
    /// outstanding calls; otherwise callers that wait for a lock could keep the lock's holder from unlocking.
    #[must_use]
    pub fn waits_for_lock(&self) -> bool {
        matches!(self, Call::Lock { wait: true, reclaim: false, .. })
    }

    /// Whether it writes back dirty pages of a shared mapping; an acknowledgement may wait for such a call.
    #[must_use]
    pub fn is_write_back(&self) -> bool {
        matches!(self, Call::Write { flags: WriteFlags { write_back: true, .. }, .. })
    }

    /// Whether it reclaims state that the server has lost with the session. It is meaningless in the next session.
    #[must_use]
    pub fn is_reclaim(&self) -> bool {
        matches!(self, Call::Reopen { .. } | Call::Lock { reclaim: true, .. })
    }

    /// Whether the client may send it during reclaim.
    #[must_use]
    pub fn is_allowed_during_reclaim(&self) -> bool {
        self.is_reclaim() || matches!(self, Call::ResolvePath { .. })
    }

    /// The name under which `nigh status` counts this call (`remote.by_type`).
    #[must_use]
    pub fn type_name(&self) -> &'static str {
        match self {
            Call::Lookup { .. } => "lookup",
            Call::ResolvePath { .. } => "walk",
            Call::GetAttr { .. } => "getattr",
            Call::List { .. } => "list",
            Call::ListNames { .. } => "dirents",
            Call::Prefetch { .. } => "ahead",
            Call::PrefetchCredit { .. } => "steer",
            Call::ReadLink { .. } => "readlink",
            Call::Xattrs { .. } => "xattrs",
            Call::Xattr { .. } => "xattr",
            Call::StatFs { .. } => "statfs",
            Call::Open { .. } => "open",
            Call::Read { .. } => "read",
            Call::Seek { .. } => "seek",
            Call::GetFlags { .. } => "getflags",
            Call::Release { .. } => "release",
            Call::PinOpen { .. } => "keep",
            Call::Lock { .. } => "lock",
            Call::Unlock { .. } => "unlock",
            Call::GetLock { .. } => "getlock",
            Call::Reopen { .. } => "reopen",
            Call::LookupNumber { .. } => "lookupnumber",
            Call::Create { .. } => "create",
            Call::Tmpfile { .. } => "tmpfile",
            Call::Mknod { .. } => "mknod",
            Call::Mkdir { .. } => "mkdir",
            Call::Symlink { .. } => "symlink",
            Call::Link { .. } => "link",
            Call::Unlink { .. } => "unlink",
            Call::Rmdir { .. } => "rmdir",
            Call::Rename { .. } => "rename",
            Call::SetAttr { .. } => "setattr",
            Call::Write { .. } => "write",
            Call::Fallocate { .. } => "fallocate",
            Call::CopyRange { .. } => "copyrange",
            Call::SetXattr { .. } => "setxattr",
            Call::RemoveXattr { .. } => "removexattr",
            Call::Fsync { .. } => "fsync",
        }
    }
}
