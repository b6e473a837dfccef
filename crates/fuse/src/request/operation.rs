//! The typed operations.

use crate::abi::{ForgetOne, InitIn};
use crate::{Extensions, FileLock, opcode};
use zerocopy::FromBytes;

/// Seconds and nanoseconds since 1970.
pub type Time = (i64, u32);

/// A timestamp to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    Now,
    At(Time),
}

/// Attributes to change; `None` fields stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Handle of an open file, if the change goes through one.
    pub fh: Option<u64>,
    /// Type and permission bits.
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
    /// Sent only under WRITEBACK_CACHE.
    pub ctime: Option<Time>,
    pub lock_owner: Option<u64>,
    /// Under HANDLE_KILLPRIV_V2: drop setuid and setgid as Linux does.
    pub kill_suidgid: bool,
}

/// A byte-range lock, or with `flock` a lock on the whole open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRequest {
    pub fh: u64,
    pub owner: u64,
    pub lock: FileLock,
    /// flock(2) rather than fcntl(2).
    pub flock: bool,
}

/// copy_file_range(2) between two open files of the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    pub fh_in: u64,
    pub offset_in: u64,
    pub node_out: u64,
    pub fh_out: u64,
    pub offset_out: u64,
    pub length: u64,
    pub flags: u64,
}

/// A batch of FORGETs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgets<'a> {
    bytes: &'a [u8],
}

impl<'a> Forgets<'a> {
    /// Takes an array of [`ForgetOne`]; an incomplete last element is ignored.
    #[must_use]
    pub fn of(bytes: &'a [u8]) -> Forgets<'a> {
        let whole = bytes.len() / size_of::<ForgetOne>() * size_of::<ForgetOne>();
        Forgets { bytes: &bytes[..whole] }
    }

    #[must_use]
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Nodeids, and how many lookups of each to forget.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        self.bytes
            .chunks_exact(size_of::<ForgetOne>())
            .filter_map(|one| ForgetOne::read_from_bytes(one).ok())
            .map(|one| (one.nodeid, one.nlookup))
    }
}

/// A request's operation on the header's node. Names point into the received buffer, without terminator.
/// `flags` of files are `O_…` of open(2); sizes, offsets and lengths are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation<'a> {
    Init(InitIn),
    Destroy,
    Lookup {
        name: &'a [u8],
    },
    Forget {
        nlookup: u64,
    },
    BatchForget(Forgets<'a>),
    GetAttr {
        fh: Option<u64>,
    },
    /// `flags`, `mask` as statx(2).
    Statx {
        fh: Option<u64>,
        flags: u32,
        mask: u32,
    },
    SetAttr(SetAttr),
    ReadLink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
        extensions: Extensions<'a>,
    },
    /// `rdev` in the kernel's 32-bit encoding.
    Mknod {
        name: &'a [u8],
        mode: u32,
        rdev: u32,
        umask: u32,
        extensions: Extensions<'a>,
    },
    Mkdir {
        name: &'a [u8],
        mode: u32,
        umask: u32,
        extensions: Extensions<'a>,
    },
    Unlink {
        name: &'a [u8],
    },
    Rmdir {
        name: &'a [u8],
    },
    /// RENAME (flags 0) and RENAME2 (`RENAME_NOREPLACE`, `RENAME_EXCHANGE`, `RENAME_WHITEOUT`).
    Rename {
        name: &'a [u8],
        new_dir: u64,
        new_name: &'a [u8],
        flags: u32,
    },
    /// A new name for `node`, in the directory of the header.
    Link {
        node: u64,
        name: &'a [u8],
    },
    /// With `kill_suidgid` (and O_TRUNC) the server clears setuid and setgid bits.
    Open {
        flags: u32,
        kill_suidgid: bool,
    },
    Create {
        name: &'a [u8],
        flags: u32,
        mode: u32,
        umask: u32,
        kill_suidgid: bool,
        extensions: Extensions<'a>,
    },
    /// A file without a name in the directory of the header.
    Tmpfile {
        flags: u32,
        mode: u32,
        umask: u32,
        extensions: Extensions<'a>,
    },
    Read {
        fh: u64,
        offset: u64,
        size: u32,
        flags: u32,
        lock_owner: Option<u64>,
    },
    /// `cached`: a write-back from the page cache (shared mappings); the file handle is any open one, and the
    /// header's ids are not the writer's.
    Write {
        fh: u64,
        offset: u64,
        data: &'a [u8],
        flags: u32,
        cached: bool,
        kill_suidgid: bool,
        lock_owner: Option<u64>,
    },
    Flush {
        fh: u64,
        lock_owner: u64,
    },
    /// `lock_owner` is meaningful if `flush` (POSIX locks) or `flock_unlock` is set.
    Release {
        fh: u64,
        flags: u32,
        flush: bool,
        flock_unlock: bool,
        lock_owner: u64,
    },
    Fsync {
        fh: u64,
        data_only: bool,
    },
    OpenDir {
        flags: u32,
    },
    /// Entries after the cookie `offset`, at most `size` bytes of them.
    ReadDir {
        fh: u64,
        offset: u64,
        size: u32,
    },
    ReadDirPlus {
        fh: u64,
        offset: u64,
        size: u32,
    },
    ReleaseDir {
        fh: u64,
        flags: u32,
    },
    FsyncDir {
        fh: u64,
        data_only: bool,
    },
    StatFs,
    SyncFs,
    /// `flags` as setxattr(2). `acl_kill_sgid`: setting an access ACL drops setgid.
    SetXattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: u32,
        acl_kill_sgid: bool,
    },
    /// With size 0 the reply is the value's size.
    GetXattr {
        name: &'a [u8],
        size: u32,
    },
    ListXattr {
        size: u32,
    },
    RemoveXattr {
        name: &'a [u8],
    },
    /// `mask` as access(2).
    Access {
        mask: u32,
    },
    GetLk(LockRequest),
    SetLk(LockRequest),
    SetLkW(LockRequest),
    /// The caller of the request with this [`crate::Header::id`] has a signal pending.
    Interrupt {
        id: u64,
    },
    Ioctl {
        fh: u64,
        flags: u32,
        cmd: u32,
        arg: u64,
        data: &'a [u8],
        out_size: u32,
    },
    Poll {
        fh: u64,
        kh: u64,
        flags: u32,
        events: u32,
    },
    /// Pages requested by `Notification::Retrieve`, whose `id` is the header's `unique`.
    NotifyReply {
        offset: u64,
        data: &'a [u8],
    },
    /// `mode` as fallocate(2).
    Fallocate {
        fh: u64,
        mode: u32,
        offset: u64,
        length: u64,
    },
    /// `whence` as lseek(2): SEEK_DATA or SEEK_HOLE.
    Lseek {
        fh: u64,
        offset: u64,
        whence: u32,
    },
    /// Answered with `Reply::written`.
    CopyFileRange(CopyRange),
    /// Answered with `Reply::copied`.
    CopyFileRange64(CopyRange),
    /// Answered ENOSYS.
    Unknown {
        opcode: u32,
    },
}

impl<'a> Operation<'a> {
    /// Its opcode. An [`Operation::Rename`] with flags is RENAME2.
    #[must_use]
    pub fn opcode(&self) -> u32 {
        match self {
            Operation::Init(_) => opcode::INIT,
            Operation::Destroy => opcode::DESTROY,
            Operation::Lookup { .. } => opcode::LOOKUP,
            Operation::Forget { .. } => opcode::FORGET,
            Operation::BatchForget(_) => opcode::BATCH_FORGET,
            Operation::GetAttr { .. } => opcode::GETATTR,
            Operation::Statx { .. } => opcode::STATX,
            Operation::SetAttr(_) => opcode::SETATTR,
            Operation::ReadLink => opcode::READLINK,
            Operation::Symlink { .. } => opcode::SYMLINK,
            Operation::Mknod { .. } => opcode::MKNOD,
            Operation::Mkdir { .. } => opcode::MKDIR,
            Operation::Unlink { .. } => opcode::UNLINK,
            Operation::Rmdir { .. } => opcode::RMDIR,
            Operation::Rename { flags: 0, .. } => opcode::RENAME,
            Operation::Rename { .. } => opcode::RENAME2,
            Operation::Link { .. } => opcode::LINK,
            Operation::Open { .. } => opcode::OPEN,
            Operation::Create { .. } => opcode::CREATE,
            Operation::Tmpfile { .. } => opcode::TMPFILE,
            Operation::Read { .. } => opcode::READ,
            Operation::Write { .. } => opcode::WRITE,
            Operation::Flush { .. } => opcode::FLUSH,
            Operation::Release { .. } => opcode::RELEASE,
            Operation::Fsync { .. } => opcode::FSYNC,
            Operation::OpenDir { .. } => opcode::OPENDIR,
            Operation::ReadDir { .. } => opcode::READDIR,
            Operation::ReadDirPlus { .. } => opcode::READDIRPLUS,
            Operation::ReleaseDir { .. } => opcode::RELEASEDIR,
            Operation::FsyncDir { .. } => opcode::FSYNCDIR,
            Operation::StatFs => opcode::STATFS,
            Operation::SyncFs => opcode::SYNCFS,
            Operation::SetXattr { .. } => opcode::SETXATTR,
            Operation::GetXattr { .. } => opcode::GETXATTR,
            Operation::ListXattr { .. } => opcode::LISTXATTR,
            Operation::RemoveXattr { .. } => opcode::REMOVEXATTR,
            Operation::Access { .. } => opcode::ACCESS,
            Operation::GetLk(_) => opcode::GETLK,
            Operation::SetLk(_) => opcode::SETLK,
            Operation::SetLkW(_) => opcode::SETLKW,
            Operation::Interrupt { .. } => opcode::INTERRUPT,
            Operation::Ioctl { .. } => opcode::IOCTL,
            Operation::Poll { .. } => opcode::POLL,
            Operation::NotifyReply { .. } => opcode::NOTIFY_REPLY,
            Operation::Fallocate { .. } => opcode::FALLOCATE,
            Operation::Lseek { .. } => opcode::LSEEK,
            Operation::CopyFileRange(_) => opcode::COPY_FILE_RANGE,
            Operation::CopyFileRange64(_) => opcode::COPY_FILE_RANGE_64,
            Operation::Unknown { opcode } => *opcode,
        }
    }

    /// Extensions of a request that creates an inode; empty for others.
    #[must_use]
    pub fn extensions(&self) -> Extensions<'a> {
        match *self {
            Operation::Symlink { extensions, .. }
            | Operation::Mknod { extensions, .. }
            | Operation::Mkdir { extensions, .. }
            | Operation::Create { extensions, .. }
            | Operation::Tmpfile { extensions, .. } => extensions,
            _ => Extensions::default(),
        }
    }
}
