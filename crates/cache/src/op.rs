//! Requests of the kernel, and replies to it.

use nigh_types::{
    Access, Attr, Call, CallId, Cookie, Errno, GrantId, Kind, LockInfo, LockKind, MutationId, Name, NodeId,
    OpId, RecallId, SetAttr, Space, Span, Time, WriteFlags,
};

/// Credentials of the calling thread. `pid` is the thread's id, 0 if not visible.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
    /// A supplementary group that came with the request (`FUSE_CREATE_SUPP_GROUP`: the parent directory's, if the
    /// caller is in it).
    pub group: Option<u32>,
    /// Of a caller that opens or creates a file to read it: its credentials. `None`: unknown, or the remote does not need them.
    pub credentials: Option<CredentialsId>,
}

/// Number that stands for credentials of callers. Equal numbers stand for equal credentials, as long as the mount lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CredentialsId(pub u32);

/// Handle of a file or directory that the kernel holds open, as given in [`Opened`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Fh(pub u64);

/// Byte range of a file lock; both ends are inclusive. With `flock`, an flock(2) lock on the whole file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockSpan {
    /// The kernel's lock owner: for fcntl(2) a process or an open file description, for flock(2) an open file
    /// description.
    pub owner: u64,
    pub flock: bool,
    pub start: u64,
    pub end: u64,
}

/// Request of the kernel. `ino` is the inode number in [`NodeId`] (see [`crate::Cache::resolve_nodeid`]); offsets and sizes are
/// bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    Lookup {
        dir: u64,
        name: Name,
    },
    /// `.` of an inode that a re-exporting server knows by number only.
    LookupSelf {
        ino: u64,
    },
    LookupParent {
        ino: u64,
    },
    GetAttr {
        ino: u64,
    },
    SetAttr {
        ino: u64,
        fh: Option<Fh>,
        set: SetAttr,
    },
    ReadLink {
        ino: u64,
    },
    Symlink {
        dir: u64,
        name: Name,
        target: Vec<u8>,
    },
    Mknod {
        dir: u64,
        name: Name,
        kind: Kind,
        mode: u32,
        umask: u32,
        rdev: u32,
    },
    Mkdir {
        dir: u64,
        name: Name,
        mode: u32,
        umask: u32,
    },
    Unlink {
        dir: u64,
        name: Name,
    },
    Rmdir {
        dir: u64,
        name: Name,
    },
    Rename {
        from: u64,
        name: Name,
        to: u64,
        new_name: Name,
        no_replace: bool,
        exchange: bool,
        whiteout: bool,
    },
    Link {
        ino: u64,
        dir: u64,
        name: Name,
    },
    /// `append`: opened with `O_APPEND`, which fcntl(2) may change later.
    Open {
        ino: u64,
        access: Access,
        append: bool,
    },
    Create {
        dir: u64,
        name: Name,
        mode: u32,
        umask: u32,
        exclusive: bool,
        access: Access,
        append: bool,
    },
    Tmpfile {
        dir: u64,
        mode: u32,
        umask: u32,
        access: Access,
    },
    Read {
        ino: u64,
        fh: Fh,
        offset: u64,
        size: u32,
    },
    Write {
        ino: u64,
        fh: Fh,
        offset: u64,
        data: Vec<u8>,
        /// Each write says whether it appends, since fcntl(2) can change that for an open file. The cache sets `sync`
        /// and `since`.
        flags: WriteFlags,
    },
    /// A process closes a descriptor; `owner` owns its fcntl(2) locks.
    Flush {
        ino: u64,
        owner: u64,
    },
    /// The last descriptor of an open file is closed; `flock`: the owner of its flock(2) locks.
    Release {
        fh: Fh,
        flock: Option<u64>,
    },
    SetLock {
        ino: u64,
        fh: Fh,
        span: LockSpan,
        kind: LockKind,
        /// Process id for `F_GETLK`.
        pid: u32,
        /// Wait until the lock is free, rather than fail with `EAGAIN`.
        wait: bool,
    },
    Unlock {
        ino: u64,
        span: LockSpan,
    },
    /// Returns a lock that conflicts with this one.
    TestLock {
        ino: u64,
        span: LockSpan,
        kind: LockKind,
    },
    Fsync {
        ino: u64,
        fh: Option<Fh>,
        data_only: bool,
    },
    OpenDir {
        ino: u64,
    },
    /// `size`: bytes that the kernel takes; see [`crate::Config::entry_size`].
    ReadDir {
        ino: u64,
        fh: Fh,
        offset: Cookie,
        size: u32,
        plus: bool,
    },
    ReleaseDir {
        fh: Fh,
    },
    /// `size` 0 asks for the length of the value.
    GetXattr {
        ino: u64,
        name: Vec<u8>,
        size: u32,
    },
    ListXattr {
        ino: u64,
        size: u32,
    },
    SetXattr {
        ino: u64,
        name: Vec<u8>,
        value: Vec<u8>,
        flags: u32,
        kill_sgid: bool,
    },
    RemoveXattr {
        ino: u64,
        name: Vec<u8>,
    },
    StatFs {
        ino: u64,
    },
    Fallocate {
        ino: u64,
        fh: Fh,
        mode: u32,
        offset: u64,
        length: u64,
    },
    /// `SEEK_DATA` or `SEEK_HOLE`.
    Seek {
        ino: u64,
        fh: Fh,
        offset: u64,
        data: bool,
    },
    CopyRange {
        ino: u64,
        fh: Fh,
        offset: u64,
        to_ino: u64,
        to_fh: Fh,
        to_offset: u64,
        length: u64,
    },
    GetFlags {
        ino: u64,
    },
}

impl Op {
    /// Returns inode number, open file, offset and size of a read.
    pub(crate) fn as_read(&self) -> Option<(u64, Fh, u64, u32)> {
        match *self {
            Op::Read { ino, fh, offset, size } => Some((ino, fh, offset, size)),
            _ => None,
        }
    }

    /// rename(2), or renameat2(2) without flags.
    #[must_use]
    pub fn rename((from, name): (u64, Name), (to, new_name): (u64, Name)) -> Op {
        Op::Rename { from, name, to, new_name, no_replace: false, exchange: false, whiteout: false }
    }

    /// Returns the inodes that the request means by number alone, not by an open file.
    pub(crate) fn nodes_by_number(&self) -> [Option<u64>; 2] {
        match self {
            Op::Link { ino, dir, .. } => [Some(*ino), Some(*dir)],
            Op::Rename { from, to, .. } => [Some(*from), Some(*to)],
            Op::Lookup { dir, .. }
            | Op::Symlink { dir, .. }
            | Op::Mknod { dir, .. }
            | Op::Mkdir { dir, .. }
            | Op::Unlink { dir, .. }
            | Op::Rmdir { dir, .. }
            | Op::Create { dir, .. }
            | Op::Tmpfile { dir, .. } => [Some(*dir), None],
            Op::GetAttr { ino }
            | Op::LookupSelf { ino }
            | Op::LookupParent { ino }
            | Op::ReadLink { ino }
            | Op::SetLock { ino, .. }
            | Op::TestLock { ino, .. }
            | Op::GetFlags { ino }
            | Op::SetAttr { ino, fh: None, .. }
            | Op::Open { ino, .. }
            | Op::OpenDir { ino }
            | Op::ReadDir { ino, .. }
            | Op::GetXattr { ino, .. }
            | Op::ListXattr { ino, .. }
            | Op::SetXattr { ino, .. }
            | Op::RemoveXattr { ino, .. } => [Some(*ino), None],
            _ => [None, None],
        }
    }

    /// Returns all inode numbers of the request.
    pub(crate) fn inode_numbers(&mut self) -> [Option<&mut u64>; 2] {
        match self {
            Op::Link { ino: one, dir: other, .. }
            | Op::Rename { from: one, to: other, .. }
            | Op::CopyRange { ino: one, to_ino: other, .. } => [Some(one), Some(other)],
            Op::Lookup { dir: one, .. }
            | Op::Symlink { dir: one, .. }
            | Op::Mknod { dir: one, .. }
            | Op::Mkdir { dir: one, .. }
            | Op::Unlink { dir: one, .. }
            | Op::Rmdir { dir: one, .. }
            | Op::Create { dir: one, .. }
            | Op::Tmpfile { dir: one, .. }
            | Op::LookupSelf { ino: one }
            | Op::LookupParent { ino: one }
            | Op::GetAttr { ino: one }
            | Op::SetAttr { ino: one, .. }
            | Op::ReadLink { ino: one }
            | Op::Open { ino: one, .. }
            | Op::Read { ino: one, .. }
            | Op::Write { ino: one, .. }
            | Op::Flush { ino: one, .. }
            | Op::SetLock { ino: one, .. }
            | Op::Unlock { ino: one, .. }
            | Op::TestLock { ino: one, .. }
            | Op::Fsync { ino: one, .. }
            | Op::OpenDir { ino: one }
            | Op::ReadDir { ino: one, .. }
            | Op::GetXattr { ino: one, .. }
            | Op::ListXattr { ino: one, .. }
            | Op::SetXattr { ino: one, .. }
            | Op::RemoveXattr { ino: one, .. }
            | Op::StatFs { ino: one }
            | Op::Fallocate { ino: one, .. }
            | Op::Seek { ino: one, .. }
            | Op::GetFlags { ino: one } => [Some(one), None],
            Op::Release { .. } | Op::ReleaseDir { .. } => [None, None],
        }
    }

    /// Returns the open files through which the request reads, writes or locks.
    pub(crate) fn open_files(&self) -> [Option<Fh>; 2] {
        match self {
            Op::Read { fh, .. }
            | Op::Write { fh, .. }
            | Op::Fallocate { fh, .. }
            | Op::Seek { fh, .. }
            | Op::SetLock { fh, .. }
            | Op::SetAttr { fh: Some(fh), .. }
            | Op::Fsync { fh: Some(fh), .. } => [Some(*fh), None],
            Op::CopyRange { fh, to_fh, .. } => [Some(*fh), Some(*to_fh)],
            _ => [None, None],
        }
    }
}

/// Inode in a reply. A validity of zero makes the kernel ask again each time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Node {
    pub id: NodeId,
    /// FUSE node id: the inode number, unless the kernel still remembers another inode by it.
    pub number: u64,
    /// An earlier reply brought this inode: the kernel may have a dentry whose timeout this reply renews.
    pub known: bool,
    pub attr: Attr,
    pub entry_valid: Span,
    pub attr_valid: Span,
}

/// An open file or directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    pub fh: Fh,
    /// Pages of earlier opens are still true (`FOPEN_KEEP_CACHE`).
    pub keep_cache: bool,
    /// For a directory: the kernel may cache its listing (`FOPEN_CACHE_DIR`).
    pub cache_dir: bool,
    /// No FLUSH is needed when a descriptor is closed (`FOPEN_NOFLUSH`).
    pub no_flush: bool,
    /// The kernel must not cache the file (`FOPEN_DIRECT_IO`).
    pub direct: bool,
}

/// One entry of a [`Page`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageEntry {
    pub ino: u64,
    /// File type bits of `st_mode`.
    pub mode: u32,
    /// Offset after this entry (`d_off`).
    pub next: Cookie,
    /// Length of this entry's name in [`Page::names`].
    pub name_len: u16,
    /// For READDIRPLUS, if known: counts as a lookup.
    pub node: Option<Node>,
}

/// Reply to a READDIR or READDIRPLUS request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Page {
    pub entries: Vec<PageEntry>,
    /// The concatenated names.
    pub names: Vec<u8>,
    /// Directory whose cached listing the kernel must drop before this reply.
    pub drops: Option<u64>,
}

/// Reply to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OpReply {
    Done,
    Node(Node),
    /// The name does not exist; the kernel may keep a negative dentry for this long (zero: only ENOENT).
    Missing(Span),
    Attr(NodeId, Attr, Span),
    Target(Vec<u8>),
    Opened(Opened),
    Created(Node, Opened),
    Data(Vec<u8>),
    Written(u64),
    Page(Page),
    Value(Vec<u8>),
    Size(u32),
    /// NUL-terminated names of xattrs, some of them for callers with `CAP_SYS_ADMIN` only ([`is_privileged`]). `size`
    /// is the request's; 0 asks for the length.
    ///
    /// [`is_privileged`]: crate::is_privileged
    XattrNames {
        names: Vec<u8>,
        size: u32,
    },
    Space(Space),
    Offset(u64),
    Flags(u32),
    /// The first conflicting lock.
    Locked(Option<LockInfo>),
    Failed(Errno),
}

/// Id of one [`Output::Invalidate`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct InvalidationId(pub u64);

/// Kernel invalidation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KernelInvalidation {
    Attr {
        ino: u64,
    },
    /// `length` 0: to the end. For a directory: its cached listing.
    Data {
        ino: u64,
        offset: u64,
        length: u64,
    },
    /// A dentry, positive or negative: the kernel looks the name up again. It is expired, so open files keep it, if the
    /// kernel can (`FUSE_EXPIRE_ONLY`) and no pending reply may revalidate it; otherwise it is invalidated.
    Entry {
        dir: u64,
        name: Name,
    },
    /// A name that other clients removed or bound to another inode. Open files of the old inode are no longer found by
    /// that name.
    RemovedDentry {
        dir: u64,
        name: Name,
    },
    /// All dentries of the mount, positive and negative. The listed names must go: with a mount below, only these are
    /// dropped, one by one.
    AllDentries(Vec<(u64, Name)>),
}

/// Action for the driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Output {
    /// The reply to a request for which `handle_op` returned `None`.
    Answer {
        op: OpId,
        answer: OpReply,
    },
    /// Call to the remote, on behalf of `caller`, or of the mount itself where it is `None`.
    Call {
        id: CallId,
        caller: Option<Caller>,
        mutation_id: Option<MutationId>,
        call: Call,
    },
    Cancel(CallId),
    /// Stores a whole file in the kernel's page cache, before the reply that opens it is sent. No page of the file is locked,
    /// since it is not open; it must stay so: replies that open or truncate it follow later.
    Store {
        ino: u64,
        data: Vec<u8>,
    },
    /// Invalidate in the kernel, without delay for other outputs, then call `handle_invalidated`.
    Invalidate {
        id: InvalidationId,
        stale: Vec<KernelInvalidation>,
        urgency: Urgency,
    },
    /// The kernel is to forget unused inodes: see [`crate::Cache::poll_prune`].
    Prune,
    Acknowledge(RecallId),
    Return(Vec<GrantId>),
    /// All open files and locks have been reclaimed in a session that had forgotten them: for the remote.
    Reclaimed,
    /// Nothing to do until this moment, or until the next input.
    Timeout(Time, Reason),
}

/// When an invalidation is sent, relative to those that are queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// After them.
    Ordinary,
    /// Before all ordinary ones, and the notifier leaves a running one for it. It waits for no reply of the remote.
    First,
    /// As `First`. If dentries are dropped one by one, it is done only when those of the queued ones are dropped too: no
    /// grant covers them any more.
    AllGrantsEnded,
}

/// Reason of a timeout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Nothing is due; the moment is `Time::FAR`.
    Idle,
    /// A grant on something that the kernel holds open ends.
    GrantEnd,
    /// A request has waited for the longest time allowed.
    RequestDeadline,
    /// The kernel has been dropping facts for longer than other clients may wait.
    SlowKernel,
    /// Listings have waited for a remote change for the longest time allowed.
    Commit,
    /// An inotify-watched directory is to be compared.
    Watch,
    /// A queued invalidation has waited for GETATTR replies for the longest time allowed.
    NotifierQueue,
    /// Directories may have been idle for the longest time allowed.
    IdleDirectories,
}
