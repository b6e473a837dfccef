//! Fixed structures of the kernel interface, in host byte order.
//!
//! Layouts and names follow `include/uapi/linux/fuse.h` at 7.45, without the `fuse_` prefix.

pub mod flags;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The supported major version.
pub const MAJOR: u32 = 7;
/// The newest supported minor version.
pub const MINOR: u32 = 45;
/// The oldest supported minor version.
pub const OLDEST_MINOR: u32 = 31;
/// The node id of the root.
pub const ROOT_ID: u64 = 1;
/// Set in `unique` of a request that the kernel sends again (`FUSE_UNIQUE_RESEND`).
pub const UNIQUE_RESEND: u64 = 1 << 63;
/// The smallest buffer that the kernel accepts for a read of the device (`FUSE_MIN_READ_BUFFER`).
pub const MIN_READ_BUFFER: usize = 8192;
/// Bytes of `setxattr_in` without `SETXATTR_EXT` (`FUSE_COMPAT_SETXATTR_IN_SIZE`).
pub const COMPAT_SETXATTR_IN_SIZE: usize = 8;
/// Bytes of `init_in` before 7.36.
pub const COMPAT_INIT_IN_SIZE: usize = 16;

/// Lengths of records in directory listings and extensions are rounded up to 8 bytes.
#[must_use]
pub const fn record_align(len: usize) -> usize {
    len.next_multiple_of(8)
}

macro_rules! layout {
    ($($name:ident = $size:literal { $($field:ident: $type:ty),* $(,)? })*) => {$(
        #[doc = concat!("`", stringify!($name), "`, ", stringify!($size), " bytes.")]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $(pub $field: $type),* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

layout! {
    InHeader = 40 {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32,
        total_extlen: u16, padding: u16,
    }
    OutHeader = 16 { len: u32, error: i32, unique: u64 }
    RawAttr = 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    SxTime = 16 { secs: i64, nanos: u32, reserved: i32 }
    RawStatx = 256 {
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16, spare0: u16,
        ino: u64, size: u64, blocks: u64, attributes_mask: u64,
        atime: SxTime, btime: SxTime, ctime: SxTime, mtime: SxTime,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    KStatFs = 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64,
        bsize: u32, namelen: u32, frsize: u32, padding: u32, spare: [u32; 6],
    }
    RawFileLock = 24 { start: u64, end: u64, kind: u32, pid: u32 }
    EntryOut = 128 {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64,
        entry_valid_nsec: u32, attr_valid_nsec: u32, attr: RawAttr,
    }
    ForgetIn = 8 { nlookup: u64 }
    ForgetOne = 16 { nodeid: u64, nlookup: u64 }
    BatchForgetIn = 8 { count: u32, dummy: u32 }
    GetAttrIn = 16 { getattr_flags: u32, dummy: u32, fh: u64 }
    AttrOut = 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: RawAttr }
    StatxIn = 24 { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32 }
    StatxOut = 288 { attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: RawStatx }
    MknodIn = 16 { mode: u32, rdev: u32, umask: u32, padding: u32 }
    MkdirIn = 8 { mode: u32, umask: u32 }
    RenameIn = 8 { newdir: u64 }
    Rename2In = 16 { newdir: u64, flags: u32, padding: u32 }
    LinkIn = 8 { oldnodeid: u64 }
    SetAttrIn = 88 {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32,
        uid: u32, gid: u32, unused5: u32,
    }
    OpenIn = 8 { flags: u32, open_flags: u32 }
    CreateIn = 16 { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    OpenOut = 16 { fh: u64, open_flags: u32, backing_id: i32 }
    ReleaseIn = 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    FlushIn = 24 { fh: u64, unused: u32, padding: u32, lock_owner: u64 }
    ReadIn = 40 {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    WriteIn = 40 {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    WriteOut = 8 { size: u32, padding: u32 }
    FsyncIn = 16 { fh: u64, fsync_flags: u32, padding: u32 }
    SetXattrIn = 16 { size: u32, flags: u32, setxattr_flags: u32, padding: u32 }
    GetXattrIn = 8 { size: u32, padding: u32 }
    GetXattrOut = 8 { size: u32, padding: u32 }
    LkIn = 48 { fh: u64, owner: u64, lk: RawFileLock, lk_flags: u32, padding: u32 }
    AccessIn = 8 { mask: u32, padding: u32 }
    InitIn = 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32, unused: [u32; 11],
    }
    InitOut = 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32,
        max_background: u16, congestion_threshold: u16, max_write: u32, time_gran: u32,
        max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32,
        request_timeout: u16, unused: [u16; 11],
    }
    InterruptIn = 8 { unique: u64 }
    IoctlIn = 32 { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32 }
    IoctlOut = 16 { result: i32, flags: u32, in_iovs: u32, out_iovs: u32 }
    PollIn = 24 { fh: u64, kh: u64, flags: u32, events: u32 }
    FallocateIn = 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    LseekIn = 24 { fh: u64, offset: u64, whence: u32, padding: u32 }
    LseekOut = 8 { offset: u64 }
    CopyFileRangeIn = 56 {
        fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64,
    }
    CopyFileRangeOut = 8 { bytes_copied: u64 }
    SyncFsIn = 8 { padding: u64 }
    RawDirent = 24 { ino: u64, off: u64, namelen: u32, kind: u32 }
    NotifyPollOut = 8 { kh: u64 }
    NotifyInvalInodeOut = 24 { ino: u64, off: i64, len: i64 }
    NotifyInvalEntryOut = 16 { parent: u64, namelen: u32, flags: u32 }
    NotifyDeleteOut = 24 { parent: u64, child: u64, namelen: u32, padding: u32 }
    NotifyStoreOut = 24 { nodeid: u64, offset: u64, size: u32, padding: u32 }
    NotifyRetrieveOut = 32 { notify_unique: u64, nodeid: u64, offset: u64, size: u32, padding: u32 }
    NotifyRetrieveIn = 40 { dummy1: u64, offset: u64, size: u32, dummy2: u32, dummy3: u64, dummy4: u64 }
    NotifyPruneOut = 16 { count: u32, padding: u32, spare: u64 }
    ExtHeader = 8 { size: u32, kind: u32 }
    SecCtx = 8 { size: u32, padding: u32 }
}
