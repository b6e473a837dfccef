//! What a cache asks of its remote.

use crate::{
    CallId, Cookie, Covers, Credentials, DataStamp, GrantId, Handle, Kind, LockKind, Name, NodeId, Place,
    SetAttr,
};

/// Names a mutation for ever: the remote can tell a repeated one from a new one.
/// See docs/decisions/0003-operation-names.md.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpName {
    /// The client's durable identity.
    pub client: u64,
    /// Random, new with each start of the client.
    pub incarnation: u64,
    /// Counts the mutations of that incarnation from 1.
    pub sequence: u64,
}

/// A call with what goes with every call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    pub credentials: Credentials,
    /// Set on mutations and on nothing else.
    pub name: Option<OpName>,
    pub call: Call,
}

/// For what a file is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    pub read: bool,
    pub write: bool,
    pub truncate: bool,
    /// `O_DIRECT`, passed on where the export's filesystem has it.
    pub direct: bool,
    /// `O_SYNC` or `O_DSYNC`: a write is durable before it is answered.
    pub sync: bool,
    /// `O_APPEND`, without which a file with the append-only flag cannot be opened for writing. Where a write goes, each
    /// write says itself.
    pub append: bool,
}

impl Access {
    /// Whether a file with the append-only flag can be opened so (`may_open` in fs/namei.c).
    #[must_use]
    pub fn is_append_only(&self) -> bool {
        self.write && self.append && !self.truncate
    }
}

/// How a write is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WriteFlags {
    /// The remote chooses the offset: the file's end at that moment.
    pub append: bool,
    /// Drop setuid and setgid bits as Linux does for an unprivileged writer.
    pub kill_suidgid: bool,
    /// Durable before it is answered.
    pub sync: bool,
    /// Stores into a map, which a kernel writes back; it may do so because it was told to drop them.
    pub flush: bool,
    /// What the client's kernel has pages of, said of flushes: such a one is made only if nobody else has changed the file's data
    /// since, or if the bytes stand there already; otherwise it is `ECANCELED`.
    pub since: Option<Since>,
}

/// A state of a file's data that a client's kernel had, to which only changes of its own were added. Whether others have changed
/// it since is told by the grant, and where that has ended by the stamp: the file has it still, or what changes of this
/// session alone have made of it.
/// See docs/decisions/0008-leases.md, rule 12.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Since {
    pub stamp: DataStamp,
    /// The grant under which the pages stand. `None`: it has ended.
    pub under: Option<(GrantId, Covers)>,
}

/// One call. Offsets and lengths are bytes. Calls from [`Call::Create`] on are mutations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Call {
    /// One name of a directory → `Reply::Looked`.
    Lookup { dir: Place, name: Name },
    /// Names from the export's root to `node`, so that the remote can reach it again; at most
    /// [`Call::MOST_NAMES`] → `Reply::Done`.
    Walk { node: NodeId, names: Vec<Name> },
    /// → `Reply::Attr`
    GetAttr { node: Place },
    /// A whole directory in cookie order → several `Reply::Listed` or `Reply::Names`.
    List { dir: Place },
    /// Names alone, of a directory, from behind a cookie on and in cookie order; without grants → several `Reply::Dirents`.
    /// See docs/decisions/0023-names-before-attributes.md.
    Dirents { dir: Place, after: Cookie },
    /// What is below directories, whole directories one after the other: each of `roots`, then what is found in it, before the
    /// next; at most [`Call::MOST_ROOTS`] → several `Reply::Ahead`. See docs/decisions/0019-walks-ahead.md.
    /// `credit`: so many entries may come, a directory counting one more than its names; none is begun where none is left.
    /// One of more than [`Call::MOST_AHEAD`] names is left out. The last reply comes when nothing is left to be told, or the call
    /// was cancelled.
    Ahead { roots: Vec<Place>, order: Order, credit: u32 },
    /// Of a walk ahead that is under way: so much more credit, and the directory that is to come next, whatever it costs.
    /// It is told in any case, unless it was before. No reply is sent.
    Steer { walk: CallId, credit: u32, want: Option<Place> },
    /// → `Reply::Target`
    ReadLink { node: Place },
    /// All names, and the values as far as they fit → `Reply::Xattrs`
    Xattrs { node: Place },
    /// One value → `Reply::Value`, or `ENODATA`
    Xattr { node: Place, name: Vec<u8> },
    /// → `Reply::Space`
    StatFs { node: Place },
    /// → `Reply::Opened`
    Open { node: Place, access: Access },
    /// Up to `length` bytes (fewer only at the end of the file) → `Reply::Data`
    Read { node: Place, handle: Option<Handle>, offset: u64, length: u32 },
    /// `SEEK_DATA` (`data`) or `SEEK_HOLE` → `Reply::Offset`
    Seek { node: Place, handle: Option<Handle>, offset: u64, data: bool },
    /// `FS_IOC_GETFLAGS` → `Reply::Flags`
    GetFlags { node: Place },
    /// Open files that are needed no more, at most [`Call::MOST_HANDLES`]; no reply is sent.
    Release { handles: Vec<Handle> },
    /// This client's kernel has that file open since it was opened under a grant, without the remote: it stays
    /// readable under `handle`, whatever becomes of its names, until that is released. The client chooses
    /// the number ([`Handle::CHOSEN`]). `names` lead there from the root, at most [`Call::MOST_NAMES`], or are
    /// none. No reply is sent; it is done before whatever is sent later, acknowledgements too.
    Keep { node: Place, names: Vec<Name>, handle: Handle },
    /// A lock on the bytes from `start` to `end` (inclusive) of a regular file, or with `flock` on all
    /// of it. It takes the place of what the owner holds there. `owner` is a number of this client's; those
    /// of flock(2) are a space of their own → `Reply::Done`; else, without `wait`, `EAGAIN`. With it the
    /// reply comes when the lock is held, or `EINTR` when the call is cancelled; `EDEADLK`, `ENOLCK`.
    /// With `reclaim` it is one that was held when the remote forgot this client's locks: it is looked at
    /// at once, even where other claims have to wait for a restarted server, and never waits itself.
    Lock {
        node: Place,
        owner: u64,
        flock: bool,
        kind: LockKind,
        start: u64,
        end: u64,
        wait: bool,
        pid: u32,
        reclaim: bool,
    },
    /// Ends what the owner holds of these bytes → `Reply::Done`, also where that is nothing.
    Unlock { node: Place, owner: u64, flock: bool, start: u64, end: u64 },
    /// What keeps the owner from such a lock → `Reply::Locked`
    GetLock { node: Place, owner: u64, flock: bool, kind: LockKind, start: u64, end: u64 },
    /// A file that was open under this handle when the remote forgot it, opened again; checked as any open
    /// → `Reply::Opened` with the same handle, or `EINVAL` where that one is in use
    Reopen { node: Place, handle: Handle, access: Access },
    /// The inode that has this number, where the session says that the remote finds them so
    /// ([`crate::Session::finds_numbers`]) → `Reply::Found`, or `ESTALE` where there is none. See docs/decisions/0035-file-handles.md.
    LookupNumber { ino: u64 },

    /// A regular file, opened → `Reply::Made` with a handle. Without `exclusive` an existing file is
    /// opened as it is. `mode` is as the application gave it; the server's filesystem applies
    /// `umask` unless a default ACL takes its place. (So for all that make a name.)
    Create { dir: Place, name: Name, mode: u32, umask: u32, exclusive: bool, access: Access },
    /// A regular file without a name, opened → `Reply::Made` with a handle.
    Tmpfile { dir: Place, mode: u32, umask: u32, access: Access },
    /// Anything but a symlink and a directory → `Reply::Made`
    Mknod { dir: Place, name: Name, kind: Kind, mode: u32, umask: u32, rdev: u32 },
    /// → `Reply::Made`
    Mkdir { dir: Place, name: Name, mode: u32, umask: u32 },
    /// → `Reply::Made`
    Symlink { dir: Place, name: Name, target: Vec<u8> },
    /// → `Reply::Made`
    Link { node: Place, dir: Place, name: Name },
    /// Anything but a directory → `Reply::Removed`. With `keep` this client may have that file open without
    /// a handle: if the name leads to it, the remote pins it and answers a handle.
    Unlink { dir: Place, name: Name, keep: Option<NodeId> },
    /// → `Reply::Removed`
    Rmdir { dir: Place, name: Name },
    /// → `Reply::Renamed`. `keep`: as for unlink, of the file that is replaced. `whiteout`: the old name is to lead to a whiteout
    /// (`RENAME_WHITEOUT`, a character device 0:0); `EINVAL` where the filesystem makes none.
    Rename {
        from: Place,
        name: Name,
        to: Place,
        new_name: Name,
        no_replace: bool,
        exchange: bool,
        whiteout: bool,
        keep: Option<NodeId>,
    },
    /// → `Reply::Attr`
    SetAttr { node: Place, handle: Option<Handle>, set: SetAttr },
    /// → `Reply::Written`
    Write { node: Place, handle: Option<Handle>, offset: u64, data: Vec<u8>, flags: WriteFlags },
    /// `mode` as fallocate(2) → `Reply::Attr`
    Fallocate { node: Place, handle: Option<Handle>, mode: u32, offset: u64, length: u64 },
    /// → `Reply::Written` (the offset is the destination's)
    CopyRange {
        from: Place,
        from_handle: Option<Handle>,
        from_offset: u64,
        to: Place,
        to_handle: Option<Handle>,
        to_offset: u64,
        length: u64,
    },
    /// `flags` as setxattr(2). `kill_sgid`: setting an access ACL drops setgid → `Reply::Attr`
    SetXattr { node: Place, name: Vec<u8>, value: Vec<u8>, flags: u32, kill_sgid: bool },
    /// → `Reply::Attr`
    RemoveXattr { node: Place, name: Vec<u8> },
    /// Makes a file or directory durable, with a name that reaches it → `Reply::Done`
    Fsync { node: Place, handle: Option<Handle>, data_only: bool },
}

/// In which order the directories in a directory are walked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Order {
    /// As listings are.
    #[default]
    Cookie,
    /// By the bytes of their names.
    Name,
    /// By the numbers of their inodes.
    Number,
}

impl Call {
    /// Directories that a walk ahead begins with.
    pub const MOST_ROOTS: u32 = 1_024;
    /// Names of a directory that a walk ahead tells without being asked for it.
    pub const MOST_AHEAD: u32 = 16_384;
    /// Names that lead from the root to an inode (Linux's PATH_MAX allows 2,048).
    pub const MOST_NAMES: u32 = 4_096;
    /// Handles that are released at once.
    pub const MOST_HANDLES: u32 = 65_536;

    /// Whether this call changes the export, and so must carry an [`OpName`].
    #[must_use]
    pub fn is_mutation(&self) -> bool {
        match self {
            Call::Lookup { .. }
            | Call::Walk { .. }
            | Call::GetAttr { .. }
            | Call::List { .. }
            | Call::Dirents { .. }
            | Call::Ahead { .. }
            | Call::Steer { .. }
            | Call::ReadLink { .. }
            | Call::Xattrs { .. }
            | Call::Xattr { .. }
            | Call::StatFs { .. }
            | Call::Open { access: Access { truncate: false, .. }, .. }
            | Call::Read { .. }
            | Call::Seek { .. }
            | Call::GetFlags { .. }
            | Call::Release { .. }
            | Call::Keep { .. }
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
    pub fn is_answered(&self) -> bool {
        !matches!(self, Call::Release { .. } | Call::Keep { .. } | Call::Steer { .. })
    }

    /// Whether its answer may wait for what other callers do: such calls do not count among those that a
    /// session may have outstanding, or who waits for a lock could keep its holder from unlocking.
    #[must_use]
    pub fn waits_for_lock(&self) -> bool {
        matches!(self, Call::Lock { wait: true, reclaim: false, .. })
    }

    /// Whether it stores pages of a map that the kernel writes back: what an acknowledgement may wait for.
    #[must_use]
    pub fn is_flush(&self) -> bool {
        matches!(self, Call::Write { flags: WriteFlags { flush: true, .. }, .. })
    }

    /// Whether it claims what a server has forgotten of its session. In the session after it is of no meaning.
    #[must_use]
    pub fn is_claim(&self) -> bool {
        matches!(self, Call::Reopen { .. } | Call::Lock { reclaim: true, .. })
    }

    /// Whether it goes out while others are claimed.
    #[must_use]
    pub fn serves_claiming(&self) -> bool {
        self.is_claim() || matches!(self, Call::Walk { .. })
    }

    /// The name under which `nigh status` counts this call (`remote.by_type`).
    #[must_use]
    pub fn type_name(&self) -> &'static str {
        match self {
            Call::Lookup { .. } => "lookup",
            Call::Walk { .. } => "walk",
            Call::GetAttr { .. } => "getattr",
            Call::List { .. } => "list",
            Call::Dirents { .. } => "dirents",
            Call::Ahead { .. } => "ahead",
            Call::Steer { .. } => "steer",
            Call::ReadLink { .. } => "readlink",
            Call::Xattrs { .. } => "xattrs",
            Call::Xattr { .. } => "xattr",
            Call::StatFs { .. } => "statfs",
            Call::Open { .. } => "open",
            Call::Read { .. } => "read",
            Call::Seek { .. } => "seek",
            Call::GetFlags { .. } => "getflags",
            Call::Release { .. } => "release",
            Call::Keep { .. } => "keep",
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
