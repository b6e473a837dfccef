//! What the kernel asks, and what it is answered.

use nigh_types::{
    Access, Attr, Call, CallId, Cookie, Errno, GrantId, Kind, LockInfo, LockKind, Name, NodeId, OpId, OpName,
    RecallId, SetAttr, Space, Span, Time, WriteFlags,
};

/// Who asked: for calls made on an application's behalf. `pid` is the thread's, 0 if not visible.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
    /// A supplementary group that came with the request (`FUSE_CREATE_SUPP_GROUP`: the parent's, if the caller is
    /// in it).
    pub group: Option<u32>,
}

/// A file or directory that the kernel holds open, as it was numbered in [`Opened`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Fh(pub u64);

/// Bytes of a file that somebody locks; both ends are inclusive. With `flock`, an flock(2) lock: all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockSpan {
    /// The kernel's number: for fcntl(2) of a process or an open file description, for flock(2) of an
    /// open file description.
    pub owner: u64,
    pub flock: bool,
    pub start: u64,
    pub end: u64,
}

/// One request. Inodes are named by `ino`, the number in [`NodeId`] (see [`crate::Cache::meant`]); offsets and sizes are bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    Lookup {
        dir: u64,
        name: Name,
    },
    /// `.` of an inode that an exporting server knows only by number.
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
    /// `append`: what is written through it goes to the end, until fcntl(2) says otherwise.
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
        /// Whether it appends is of each write, since fcntl(2) changes that of what is open. `sync` and `since` are the cache's to say.
        flags: WriteFlags,
    },
    /// A descriptor is closed by the process whose fcntl(2) locks are `owner`'s.
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
        /// The process, for those who ask who holds it.
        pid: u32,
        /// Until it can be had, rather than `EAGAIN`.
        wait: bool,
    },
    Unlock {
        ino: u64,
        span: LockSpan,
    },
    /// What keeps the owner from such a lock?
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
    /// rename(2), or renameat2(2) without flags.
    #[must_use]
    pub fn rename((from, name): (u64, Name), (to, new_name): (u64, Name)) -> Op {
        Op::Rename { from, name, to, new_name, no_replace: false, exchange: false, whiteout: false }
    }

    /// The inodes that are meant by their numbers alone.
    pub(crate) fn nodes(&self) -> [Option<u64>; 2] {
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

    /// All that stand for inodes.
    pub(crate) fn numbers(&mut self) -> [Option<&mut u64>; 2] {
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

    /// The open files through which something is read, written or locked.
    pub(crate) fn through(&self) -> [Option<Fh>; 2] {
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

/// An inode as the kernel is told of it. A validity of zero: ask again each time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Node {
    pub id: NodeId,
    /// By which the kernel is to know it: its own, unless another inode had that, which the kernel remembers.
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
    /// Of a directory: the kernel may keep its listing (`FOPEN_CACHE_DIR`).
    pub cache_dir: bool,
    /// Nothing needs to be told when a descriptor is closed (`FOPEN_NOFLUSH`).
    pub no_flush: bool,
    /// Nothing of the file may be cached (`FOPEN_DIRECT_IO`).
    pub direct: bool,
}

/// One entry of a [`Page`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageEntry {
    pub ino: u64,
    /// File type bits of `st_mode`.
    pub mode: u32,
    /// Where reading goes on behind this entry (`d_off`).
    pub next: Cookie,
    /// How many bytes of [`Page::names`] are this entry's name.
    pub name_len: u16,
    /// Of READDIRPLUS, where known: counts as a lookup.
    pub node: Option<Node>,
}

/// A part of a directory as the kernel asked for it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Page {
    pub entries: Vec<PageEntry>,
    /// The names, one behind the other.
    pub names: Vec<u8>,
    /// What the kernel keeps of a listing of that directory is to be dropped before this is answered.
    pub drops: Option<u64>,
}

/// What an application is answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    Done,
    Node(Node),
    /// The name does not exist; the kernel may believe so for a while (zero: only ENOENT).
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
    /// Names of xattrs, each ended by a NUL, of which some are for callers with `CAP_SYS_ADMIN` only ([`is_privileged`]).
    /// `size` is that of the request; 0 asks for the length.
    ///
    /// [`is_privileged`]: crate::is_privileged
    XattrNames {
        names: Vec<u8>,
        size: u32,
    },
    Space(Space),
    Offset(u64),
    Flags(u32),
    /// The first lock in the way.
    Locked(Option<LockInfo>),
    Failed(Errno),
}

/// Names one [`Output::Invalidate`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Invalidation(pub u64);

/// Something that the kernel must forget.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stale {
    Attr {
        ino: u64,
    },
    /// `length` 0: to the end. Of a directory: its cached listing.
    Data {
        ino: u64,
        offset: u64,
        length: u64,
    },
    /// A name, present or absent: it is looked up again. Whatever has it open keeps it (`FUSE_EXPIRE_ONLY`).
    Entry {
        dir: u64,
        name: Name,
    },
    /// A name that others removed or gave to another inode. What has the old inode open is no longer found by that name.
    Gone {
        dir: u64,
        name: Name,
    },
    /// Every name of the mount, present or absent. These are the ones that must go: where something is mounted
    /// below, only they do, one by one.
    Epoch(Vec<(u64, Name)>),
}

/// What the cache wants done by whoever drives it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Output {
    /// An answer that had to wait.
    Answer {
        op: OpId,
        answer: Answer,
    },
    /// For the remote. On behalf of `caller`, or of the mount itself where it is `None`.
    Call {
        id: CallId,
        caller: Option<Caller>,
        name: Option<OpName>,
        call: Call,
    },
    Cancel(CallId),
    /// Tell the kernel, without holding up anything else, then call `handle_invalidated`.
    Invalidate {
        id: Invalidation,
        stale: Vec<Stale>,
        /// All grants have ended: before whatever else the kernel is yet to be told, and what is being told is left for it. It
        /// waits for nothing that the remote has to answer.
        first: bool,
    },
    /// The kernel is to forget inodes that it does not use: see [`crate::Cache::poll_prune`].
    Prune,
    Acknowledge(RecallId),
    Return(Vec<GrantId>),
    /// Open files and locks have been claimed from a session that had forgotten them: for the remote.
    Reclaimed,
    /// Nothing until then, or until the next input.
    Timeout(Time, Reason),
}

/// Why a timeout was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Nothing is due; the moment is `Time::FAR`.
    Idle,
    /// A grant on what the kernel holds open ends.
    GrantEnd,
    /// A request has waited for as long as it may.
    RequestLimit,
    /// The kernel has been forgetting for as long as others may wait for that.
    SlowKernel,
    /// Listings have waited for a change of others to be done for as long as they may.
    Commit,
    /// A watched directory is to be looked at again.
    Watch,
    /// Those who read have been waited for as long as they may, by what the kernel is to forget.
    Behind,
    /// Directories may have been idle for as long as they may.
    Idleness,
}
