//! Replies: encoding of results for the kernel.

use crate::abi::{self, OutHeader, RawAttr, SxTime};
use crate::{Time, Transport};
use std::io::{self, IoSlice};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Attributes of an inode, as stat(2) reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attr {
    /// `st_ino`.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Units of 512 bytes.
    pub blocks: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    /// Type and permission bits.
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    /// In the kernel's 32-bit encoding.
    pub rdev: u32,
    /// `st_blksize`, a power of two of at least 512; 0 lets the kernel choose.
    pub blksize: u32,
    /// `FUSE_ATTR_…`; 0 as a rule.
    pub flags: u32,
}

/// The inode of a name. Each one sent (other than for `nodeid` 0) counts as one lookup of `nodeid` until FORGET.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// 0: there is no such name.
    pub nodeid: u64,
    /// Distinguishes inodes that reuse one `nodeid` (for NFS file handles).
    pub generation: u64,
    /// How long the kernel may use the name, or its absence, without a LOOKUP.
    pub entry_valid: Duration,
    /// How long it may use the attributes.
    pub attr_valid: Duration,
    pub attr: Attr,
}

/// A lock as in fcntl(2); `kind` is F_RDLCK, F_WRLCK or F_UNLCK, `end` is inclusive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileLock {
    pub start: u64,
    pub end: u64,
    pub kind: u32,
    pub pid: u32,
}

/// Filesystem statistics, as statfs(2) reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatFs {
    pub blocks: u64,
    pub bfree: u64,
    pub bavail: u64,
    pub files: u64,
    pub ffree: u64,
    /// Bytes.
    pub bsize: u32,
    pub namelen: u32,
    /// Bytes.
    pub frsize: u32,
}

/// Result of statx(2). The kernel uses the birth time and, if `mask` has them, the basic attributes (which must then
/// be all of `STATX_BASIC_STATS`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statx {
    /// `STATX_…`: which fields are filled in.
    pub mask: u32,
    pub attributes: u64,
    pub attributes_mask: u64,
    pub btime: Time,
    pub attr: Attr,
}

/// The largest reply without payload: STATX.
const FIXED: usize = size_of::<OutHeader>() + size_of::<abi::StatxOut>();
/// The kernel refuses a reply with a larger errno (`fuse_dev_do_write`).
const MAX_ERRNO: i32 = 511;

/// A reply: a small head, and a payload that is not copied. `unique` is [`crate::Header::unique`].
pub struct Reply<'a> {
    fixed: [u8; FIXED],
    used: usize,
    payload: &'a [u8],
}

impl Reply<'static> {
    /// Failure. A number that no kernel accepts (0, negative, above 511) is sent as EIO, since a refused reply would
    /// leave the caller waiting for ever.
    #[must_use]
    pub fn error(unique: u64, errno: i32) -> Reply<'static> {
        let errno = if (1..=MAX_ERRNO).contains(&errno) { errno } else { libc::EIO };
        Reply::build(unique, -errno, &[], &[])
    }

    /// Success without data.
    #[must_use]
    pub fn empty(unique: u64) -> Reply<'static> {
        Reply::build(unique, 0, &[], &[])
    }

    /// To LOOKUP, MKNOD, MKDIR, SYMLINK, LINK.
    #[must_use]
    pub fn entry(unique: u64, entry: &Entry) -> Reply<'static> {
        Reply::build(unique, 0, &[entry_out(entry).as_bytes()], &[])
    }

    /// To LOOKUP: no such name; the kernel may cache that for `valid`. (It does not cache ENOENT.)
    #[must_use]
    pub fn negative(unique: u64, valid: Duration) -> Reply<'static> {
        Reply::entry(unique, &Entry { entry_valid: valid, ..Entry::default() })
    }

    /// To GETATTR and SETATTR.
    #[must_use]
    pub fn attr(unique: u64, attr: &Attr, valid: Duration) -> Reply<'static> {
        let out = abi::AttrOut {
            attr_valid: valid.as_secs(),
            attr_valid_nsec: valid.subsec_nanos(),
            dummy: 0,
            attr: raw_attr(attr),
        };
        Reply::build(unique, 0, &[out.as_bytes()], &[])
    }

    /// To STATX.
    #[must_use]
    pub fn statx(unique: u64, stat: &Statx, valid: Duration) -> Reply<'static> {
        let out = abi::StatxOut {
            attr_valid: valid.as_secs(),
            attr_valid_nsec: valid.subsec_nanos(),
            flags: 0,
            spare: [0; 2],
            stat: raw_statx(stat),
        };
        Reply::build(unique, 0, &[out.as_bytes()], &[])
    }

    /// To OPEN and OPENDIR. `flags`: [`abi::flags::fopen`].
    #[must_use]
    pub fn open(unique: u64, fh: u64, flags: u32) -> Reply<'static> {
        Reply::build(unique, 0, &[open_out(fh, flags).as_bytes()], &[])
    }

    /// To CREATE and TMPFILE. `flags`: [`abi::flags::fopen`].
    #[must_use]
    pub fn create(unique: u64, entry: &Entry, fh: u64, flags: u32) -> Reply<'static> {
        Reply::build(unique, 0, &[entry_out(entry).as_bytes(), open_out(fh, flags).as_bytes()], &[])
    }

    /// To WRITE and COPY_FILE_RANGE: bytes written.
    #[must_use]
    pub fn written(unique: u64, size: u32) -> Reply<'static> {
        Reply::build(unique, 0, &[abi::WriteOut { size, padding: 0 }.as_bytes()], &[])
    }

    /// To COPY_FILE_RANGE_64: bytes copied.
    #[must_use]
    pub fn copied(unique: u64, bytes_copied: u64) -> Reply<'static> {
        Reply::build(unique, 0, &[abi::CopyFileRangeOut { bytes_copied }.as_bytes()], &[])
    }

    /// To STATFS.
    #[must_use]
    pub fn statfs(unique: u64, space: &StatFs) -> Reply<'static> {
        let out = abi::KStatFs {
            blocks: space.blocks,
            bfree: space.bfree,
            bavail: space.bavail,
            files: space.files,
            ffree: space.ffree,
            bsize: space.bsize,
            namelen: space.namelen,
            frsize: space.frsize,
            ..abi::KStatFs::default()
        };
        Reply::build(unique, 0, &[out.as_bytes()], &[])
    }

    /// To GETXATTR and LISTXATTR with size 0: the size of the value in bytes.
    #[must_use]
    pub fn xattr_size(unique: u64, size: u32) -> Reply<'static> {
        Reply::build(unique, 0, &[abi::GetXattrOut { size, padding: 0 }.as_bytes()], &[])
    }

    /// To LSEEK.
    #[must_use]
    pub fn lseek(unique: u64, offset: u64) -> Reply<'static> {
        Reply::build(unique, 0, &[abi::LseekOut { offset }.as_bytes()], &[])
    }

    /// To GETLK.
    #[must_use]
    pub fn lock(unique: u64, lock: &FileLock) -> Reply<'static> {
        let out = abi::RawFileLock { start: lock.start, end: lock.end, kind: lock.kind, pid: lock.pid };
        Reply::build(unique, 0, &[out.as_bytes()], &[])
    }

    /// To INIT.
    pub(crate) fn init(unique: u64, out: &abi::InitOut) -> Reply<'static> {
        Reply::build(unique, 0, &[out.as_bytes()], &[])
    }
}

impl<'a> Reply<'a> {
    /// To READ, READDIR, READDIRPLUS, READLINK (no terminator), GETXATTR and LISTXATTR with a size. Must not exceed
    /// the requested size: the kernel turns that into EIO.
    #[must_use]
    pub fn data(unique: u64, data: &'a [u8]) -> Reply<'a> {
        Reply::build(unique, 0, &[], data)
    }

    /// To IOCTL: the result of ioctl(2), and at most `out_size` bytes for the caller.
    #[must_use]
    pub fn ioctl(unique: u64, result: i32, data: &'a [u8]) -> Reply<'a> {
        Reply::build(unique, 0, &[abi::IoctlOut { result, ..abi::IoctlOut::default() }.as_bytes()], data)
    }

    fn build(unique: u64, error: i32, body: &[&[u8]], payload: &'a [u8]) -> Reply<'a> {
        let mut reply = Reply { fixed: [0; FIXED], used: size_of::<OutHeader>(), payload };
        for part in body {
            reply.fixed[reply.used..reply.used + part.len()].copy_from_slice(part);
            reply.used += part.len();
        }
        let len = u32::try_from(reply.used + payload.len()).expect("an answer below 4 GiB");
        let header = OutHeader { len, error, unique };
        reply.fixed[..size_of::<OutHeader>()].copy_from_slice(header.as_bytes());
        reply
    }

    /// The head, then the payload if there is one.
    pub fn with_parts<R>(&self, send: impl FnOnce(&[IoSlice<'_>]) -> R) -> R {
        let parts = [IoSlice::new(&self.fixed[..self.used]), IoSlice::new(self.payload)];
        send(if self.payload.is_empty() { &parts[..1] } else { &parts })
    }

    /// Sends it in one write, as the kernel requires.
    pub fn send(&self, transport: &(impl Transport + ?Sized)) -> io::Result<()> {
        self.with_parts(|parts| transport.send(parts))
    }

    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        [&self.fixed[..self.used], self.payload].concat()
    }
}

pub(crate) fn entry_out(entry: &Entry) -> abi::EntryOut {
    abi::EntryOut {
        nodeid: entry.nodeid,
        generation: entry.generation,
        entry_valid: entry.entry_valid.as_secs(),
        attr_valid: entry.attr_valid.as_secs(),
        entry_valid_nsec: entry.entry_valid.subsec_nanos(),
        attr_valid_nsec: entry.attr_valid.subsec_nanos(),
        attr: raw_attr(&entry.attr),
    }
}

fn open_out(fh: u64, flags: u32) -> abi::OpenOut {
    abi::OpenOut { fh, open_flags: flags, backing_id: 0 }
}

fn raw_attr(attr: &Attr) -> RawAttr {
    RawAttr {
        ino: attr.ino,
        size: attr.size,
        blocks: attr.blocks,
        atime: attr.atime.0.cast_unsigned(),
        mtime: attr.mtime.0.cast_unsigned(),
        ctime: attr.ctime.0.cast_unsigned(),
        atimensec: attr.atime.1,
        mtimensec: attr.mtime.1,
        ctimensec: attr.ctime.1,
        mode: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: attr.blksize,
        flags: attr.flags,
    }
}

fn raw_statx(stat: &Statx) -> abi::RawStatx {
    let time = |(secs, nanos): Time| SxTime { secs, nanos, reserved: 0 };
    let attr = &stat.attr;
    abi::RawStatx {
        mask: stat.mask,
        blksize: attr.blksize,
        attributes: stat.attributes,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        // All mode bits are in the lower half.
        mode: (attr.mode & 0xffff) as u16,
        ino: attr.ino,
        size: attr.size,
        blocks: attr.blocks,
        attributes_mask: stat.attributes_mask,
        atime: time(attr.atime),
        btime: time(stat.btime),
        ctime: time(attr.ctime),
        mtime: time(attr.mtime),
        // new_encode_dev: 12 bits of major between 8 and 12 bits of minor.
        rdev_major: attr.rdev >> 8 & 0xfff,
        rdev_minor: attr.rdev & 0xff | attr.rdev >> 12 & 0xfff00,
        ..abi::RawStatx::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    fn header(reply: &Reply<'_>) -> (OutHeader, Vec<u8>) {
        let bytes = reply.to_vec();
        let (header, rest) = OutHeader::read_from_prefix(&bytes).unwrap();
        assert_eq!(usize::try_from(header.len), Ok(bytes.len()));
        (header, rest.to_vec())
    }

    #[test]
    fn each_reply_has_the_size_that_the_kernel_expects() {
        let (entry, attr, second) = (Entry::default(), Attr::default(), Duration::from_secs(1));
        for (reply, size) in [
            (Reply::empty(1), 0),
            (Reply::entry(1, &entry), 128),
            (Reply::negative(1, second), 128),
            (Reply::attr(1, &attr, second), 104),
            (Reply::statx(1, &Statx::default(), second), 288),
            (Reply::open(1, 1, 0), 16),
            (Reply::create(1, &entry, 1, 0), 144),
            (Reply::written(1, 9), 8),
            (Reply::copied(1, 1 << 40), 8),
            (Reply::statfs(1, &StatFs::default()), 80),
            (Reply::xattr_size(1, 9), 8),
            (Reply::lseek(1, 9), 8),
            (Reply::lock(1, &FileLock::default()), 24),
            (Reply::data(1, b"abc"), 3),
            (Reply::ioctl(1, 0, b"four"), 20),
            (Reply::init(1, &abi::InitOut::default()), 64),
        ] {
            let (header, rest) = header(&reply);
            assert_eq!((header.unique, header.error, rest.len()), (1, 0, size));
        }
    }

    #[test]
    fn error_reply_always_has_an_errno_that_the_kernel_accepts() {
        for (said, sent) in [(2, -2), (95, -95), (511, -511), (512, -5), (0, -5), (-2, -5), (i32::MIN, -5)] {
            let (header, rest) = header(&Reply::error(7, said));
            assert_eq!((header.error, rest.len()), (sent, 0));
        }
    }

    #[test]
    fn reply_fields_are_at_the_offsets_that_the_kernel_reads() {
        let attr = Attr {
            ino: 1 << 62,
            size: 5,
            blocks: 8,
            atime: (-1, 1),
            mtime: (2, 2),
            ctime: (3, 999_999_999),
            mode: 0o100_644,
            nlink: 2,
            uid: 3,
            gid: 4,
            rdev: 0x12_3456,
            blksize: 4096,
            flags: 0,
        };
        let valid = Duration::new(10, 500);
        let entry = Entry { nodeid: 9, generation: 1 << 63, entry_valid: valid, attr_valid: valid, attr };
        let out = abi::EntryOut::read_from_bytes(&header(&Reply::entry(1, &entry)).1).unwrap();
        assert_eq!(
            (out.nodeid, out.generation, out.entry_valid, out.entry_valid_nsec),
            (9, 1 << 63, 10, 500)
        );
        assert_eq!((out.attr_valid, out.attr_valid_nsec), (10, 500));
        assert_eq!((out.attr.ino, out.attr.atime, out.attr.atimensec), (1 << 62, u64::MAX, 1));
        assert_eq!((out.attr.mode, out.attr.nlink, out.attr.rdev), (0o100_644, 2, 0x12_3456));

        let negative = abi::EntryOut::read_from_bytes(&header(&Reply::negative(1, valid)).1).unwrap();
        assert_eq!((negative.nodeid, negative.entry_valid, negative.attr_valid), (0, 10, 0));

        let stat = Statx { mask: 0xfff, btime: (4, 5), attr, ..Statx::default() };
        let out = abi::StatxOut::read_from_bytes(&header(&Reply::statx(1, &stat, valid)).1).unwrap();
        assert_eq!((out.stat.btime.secs, out.stat.btime.nanos, out.stat.mode), (4, 5, 0o100_644));
        let device = rustix::fs::makedev(out.stat.rdev_major, out.stat.rdev_minor);
        assert_eq!((rustix::fs::major(device), rustix::fs::minor(device)), (0x234, 0x156));
    }

    #[test]
    fn reply_payload_is_sent_without_a_copy() {
        let data = [7; 100];
        Reply::data(1, &data).with_parts(|parts| {
            assert_eq!(parts.len(), 2);
            assert_eq!(parts[1].as_ptr(), data.as_ptr());
        });
        Reply::data(1, &[]).with_parts(|parts| assert_eq!(parts.len(), 1));
    }
}
