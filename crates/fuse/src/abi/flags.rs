//! Bits of the kernel interface, named as in `fuse.h`.

/// `setattr_in.valid`.
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const LOCKOWNER: u32 = 1 << 9;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Flags in a reply to OPEN, OPENDIR or CREATE.
pub mod fopen {
    /// Reads and writes bypass the page cache.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// Pages cached from an earlier open stay.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// The kernel caches this directory's listing.
    pub const CACHE_DIR: u32 = 1 << 3;
    pub const STREAM: u32 = 1 << 4;
    /// No FLUSH at close.
    pub const NOFLUSH: u32 = 1 << 5;
}

pub const GETATTR_FH: u32 = 1 << 0;
pub const LK_FLOCK: u32 = 1 << 0;
pub const RELEASE_FLUSH: u32 = 1 << 0;
pub const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
pub const WRITE_CACHE: u32 = 1 << 0;
pub const WRITE_LOCKOWNER: u32 = 1 << 1;
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
pub const READ_LOCKOWNER: u32 = 1 << 1;
pub const FSYNC_FDATASYNC: u32 = 1 << 0;
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
pub const EXPIRE_ONLY: u32 = 1 << 0;
/// Types below this are security contexts, and the type is their number.
pub const EXT_MAX_NR_SECCTX: u32 = 31;
pub const EXT_GROUPS: u32 = 32;

macro_rules! init_flags {
    ($($name:ident = $bit:literal since $minor:literal),* $(,)?) => {
        /// INIT flags; bits 32 and up travel in `flags2` under `INIT_EXT`.
        pub mod init {
            $(pub const $name: u64 = 1 << $bit;)*
            /// All known flags: name, bit, and the minor version that introduced it.
            pub const ALL: &[(&str, u64, u32)] = &[$((stringify!($name), $name, $minor)),*];
        }
    };
}

init_flags! {
    ASYNC_READ = 0 since 6, POSIX_LOCKS = 1 since 7, ATOMIC_O_TRUNC = 3 since 9, EXPORT_SUPPORT = 4 since 9,
    BIG_WRITES = 5 since 9, DONT_MASK = 6 since 12, SPLICE_WRITE = 7 since 14, SPLICE_MOVE = 8 since 14,
    SPLICE_READ = 9 since 14, FLOCK_LOCKS = 10 since 17, HAS_IOCTL_DIR = 11 since 18,
    AUTO_INVAL_DATA = 12 since 20, DO_READDIRPLUS = 13 since 21, READDIRPLUS_AUTO = 14 since 21,
    ASYNC_DIO = 15 since 22, WRITEBACK_CACHE = 16 since 23, NO_OPEN_SUPPORT = 17 since 23,
    PARALLEL_DIROPS = 18 since 25, HANDLE_KILLPRIV = 19 since 26, POSIX_ACL = 20 since 26,
    ABORT_ERROR = 21 since 27, MAX_PAGES = 22 since 28, CACHE_SYMLINKS = 23 since 28,
    NO_OPENDIR_SUPPORT = 24 since 29, EXPLICIT_INVAL_DATA = 25 since 30, MAP_ALIGNMENT = 26 since 31,
    SUBMOUNTS = 27 since 32, HANDLE_KILLPRIV_V2 = 28 since 33, SETXATTR_EXT = 29 since 33,
    INIT_EXT = 30 since 36, SECURITY_CTX = 32 since 36, HAS_INODE_DAX = 33 since 36,
    CREATE_SUPP_GROUP = 34 since 38, HAS_EXPIRE_ONLY = 35 since 38, DIRECT_IO_ALLOW_MMAP = 36 since 39,
    PASSTHROUGH = 37 since 40, NO_EXPORT_SUPPORT = 38 since 40, HAS_RESEND = 39 since 40,
    ALLOW_IDMAP = 40 since 41, OVER_IO_URING = 41 since 42, REQUEST_TIMEOUT = 42 since 43,
}
