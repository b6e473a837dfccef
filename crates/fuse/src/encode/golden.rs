//! One example of each operation.

use crate::abi::{self, flags::init};
use crate::{CopyRange, Extensions, FileLock, Forgets, LockRequest, Operation, SetAttr, SetTime};
use zerocopy::IntoBytes;

const FORGETS: [abi::ForgetOne; 3] = [
    abi::ForgetOne { nodeid: 2, nlookup: 1 },
    abi::ForgetOne { nodeid: 1 << 62, nlookup: 7 },
    abi::ForgetOne { nodeid: u64::MAX, nlookup: u64::MAX },
];

/// Every operation, with unusual values in all variable fields.
pub(crate) fn golden(groups: &[u8]) -> Vec<Operation<'_>> {
    let extensions = Extensions::parse(groups).expect("whole records");
    let mut all = meta(extensions);
    all.extend(data());
    all.extend(rare());
    all
}

fn meta(extensions: Extensions<'_>) -> Vec<Operation<'_>> {
    let name: &[u8] = b"caf\xe9 \xff";
    vec![
        Operation::Init(abi::InitIn {
            major: 7,
            minor: 45,
            max_readahead: 131_072,
            flags: u32::MAX,
            flags2: 2047,
            unused: [0; 11],
        }),
        Operation::Destroy,
        Operation::Lookup { name },
        Operation::Lookup { name: b"." },
        Operation::Forget { nlookup: 3 },
        Operation::BatchForget(Forgets::of(FORGETS.as_bytes())),
        Operation::GetAttr { fh: None },
        Operation::GetAttr { fh: Some(u64::MAX) },
        Operation::Statx { fh: Some(3), flags: 0x2000, mask: 0xfff },
        Operation::SetAttr(SetAttr { size: Some(0), kill_suidgid: true, fh: Some(1), ..SetAttr::default() }),
        Operation::SetAttr(SetAttr {
            mode: Some(0o104_755),
            uid: Some(1),
            gid: Some(u32::MAX - 1),
            atime: Some(SetTime::Now),
            mtime: Some(SetTime::At((-1, 999_999_999))),
            ctime: Some((1 << 40, 1)),
            lock_owner: Some(9),
            ..SetAttr::default()
        }),
        Operation::ReadLink,
        Operation::Symlink { name, target: b"../else/where", extensions },
        Operation::Mknod { name, mode: 0o020_644, rdev: 0x0103, umask: 0o022, extensions },
        Operation::Mkdir { name, mode: 0o755, umask: 0o077, extensions },
        Operation::Unlink { name },
        Operation::Rmdir { name: b"d" },
        Operation::Rename { name, new_dir: 1 << 40, new_name: b"new", flags: 0 },
        Operation::Rename { name, new_dir: 1, new_name: b"new", flags: 3 },
        Operation::Link { node: 77, name },
        Operation::Create { name, flags: 0o100_102, mode: 0o644, umask: 0, kill_suidgid: true, extensions },
        Operation::Tmpfile { flags: 0o20_200_002, mode: 0o600, umask: 0o022, extensions },
        Operation::StatFs,
        Operation::SyncFs,
        Operation::SetXattr { name: b"user.x", value: b"a\0b", flags: 2, acl_kill_sgid: true },
        Operation::GetXattr { name: b"security.capability", size: 24 },
        Operation::ListXattr { size: 65_536 },
        Operation::RemoveXattr { name: b"user.x" },
        Operation::Access { mask: 4 },
    ]
}

fn data() -> Vec<Operation<'static>> {
    vec![
        Operation::Open { flags: 0o100_000, kill_suidgid: false },
        Operation::Open { flags: 0o1001, kill_suidgid: true },
        Operation::Read { fh: 5, offset: u64::MAX / 2, size: 1 << 20, flags: 0, lock_owner: Some(6) },
        Operation::Read { fh: 5, offset: 0, size: 4096, flags: 0o40_000, lock_owner: None },
        Operation::Write {
            fh: 5,
            offset: 1 << 40,
            data: b"some data",
            flags: 0o2001,
            cached: true,
            kill_suidgid: true,
            lock_owner: Some(8),
        },
        Operation::Flush { fh: 5, lock_owner: 8 },
        Operation::Release { fh: 5, flags: 2, flush: true, flock_unlock: true, lock_owner: 8 },
        Operation::Fsync { fh: 5, data_only: true },
        Operation::OpenDir { flags: 0o200_000 },
        Operation::ReadDir { fh: 6, offset: i64::MAX.cast_unsigned(), size: 32_768 },
        Operation::ReadDirPlus { fh: 6, offset: 16, size: 4096 },
        Operation::ReleaseDir { fh: 6, flags: 0o200_000 },
        Operation::FsyncDir { fh: 6, data_only: false },
    ]
}

fn rare() -> Vec<Operation<'static>> {
    let lock = FileLock { start: 10, end: i64::MAX.cast_unsigned(), kind: 1, pid: 99 };
    let range = LockRequest { fh: 5, owner: 1 << 60, lock, flock: false };
    let copy = CopyRange {
        fh_in: 1,
        offset_in: 2,
        node_out: 3,
        fh_out: 4,
        offset_out: 5,
        length: 1 << 33,
        flags: 0,
    };
    vec![
        Operation::GetLk(range),
        Operation::SetLk(LockRequest { flock: true, ..range }),
        Operation::SetLkW(range),
        Operation::Interrupt { id: 42 },
        Operation::Ioctl { fh: 5, flags: 16, cmd: 0x8008_6601, arg: 1 << 47, data: b"in", out_size: 8 },
        Operation::Poll { fh: 5, kh: 2, flags: 1, events: 1 },
        Operation::NotifyReply { offset: 4096, data: b"page" },
        Operation::Fallocate { fh: 5, mode: 3, offset: 1, length: 2 },
        Operation::Lseek { fh: 5, offset: 1 << 35, whence: 4 },
        Operation::CopyFileRange(copy),
        Operation::CopyFileRange64(copy),
    ]
}

#[test]
fn a_few_requests_have_the_bytes_that_the_kernel_sends() {
    let header = crate::Header { unique: 4, nodeid: 1, uid: 0, gid: 0, pid: 2, resent: false };
    let agreed = crate::Negotiated { minor: 45, flags: init::SETXATTR_EXT, ..crate::Negotiated::default() };
    let hex = |operation: &Operation<'_>| {
        let bytes = crate::encode(&header, operation, &agreed);
        bytes[40..].iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    if cfg!(target_endian = "little") {
        assert_eq!(hex(&Operation::Lookup { name: b"ab" }), "616200");
        assert_eq!(
            hex(&Operation::Mkdir {
                name: b"d",
                mode: 0o755,
                umask: 0o22,
                extensions: Extensions::default()
            }),
            "ed010000120000006400"
        );
        assert_eq!(
            hex(&Operation::SetXattr { name: b"n", value: b"v", flags: 1, acl_kill_sgid: true }),
            "010000000100000001000000000000006e0076"
        );
    }
}
