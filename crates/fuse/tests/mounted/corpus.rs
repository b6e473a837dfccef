//! Every request that ordinary programs can cause, with the programs' values.

use crate::tiny::{ROOT_GID, Tiny, mounted};
use nigh_fuse::abi::flags::init;
use nigh_fuse::*;
use rustix::fs::{self, AtFlags, CWD, Mode, OFlags, RenameFlags, XattrFlags};
use std::fmt::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;

fn open(tiny: &Tiny, name: &str, flags: OFlags) -> OwnedFd {
    fs::open(tiny.path(name), flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o640)).unwrap()
}

#[test]
fn every_request_is_understood() {
    for max_minor in [45, 38, 31] {
        let wanted = RequestedFeatures::default();
        let wanted = RequestedFeatures { max_minor, flags: wanted.flags | init::READDIRPLUS_AUTO, ..wanted };
        mounted(wanted, |tiny| {
            rustix::process::umask(Mode::from_raw_mode(0o022));
            names(tiny);
            files(tiny);
            locks(tiny);
            rare(tiny);
            groups(tiny);
            save(tiny);
        });
    }
}

macro_rules! saw {
    ($tiny:expr, $pattern:pat $(if $guard:expr)?) => {
        let seen = $tiny.count(|_, operation| matches!(operation, $pattern $(if $guard)?));
        assert!(seen > 0, "no request like {}", stringify!($pattern $(if $guard)?));
    };
}

fn names(tiny: &Tiny) {
    fs::mkdir(tiny.path("d"), Mode::from_raw_mode(0o777)).unwrap();
    saw!(tiny, Operation::Mkdir { name: b"d", mode: 0o777, umask: 0o022, .. });
    fs::symlink("to/where", tiny.path("s")).unwrap();
    saw!(tiny, Operation::Symlink { name: b"s", target: b"to/where", .. });
    assert_eq!(fs::readlink(tiny.path("s"), Vec::new()).unwrap().as_bytes(), b"hello");
    saw!(tiny, Operation::ReadLink);
    fs::mknodat(CWD, tiny.path("p"), fs::FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    saw!(tiny, Operation::Mknod { name: b"p", mode: 0o010_600, rdev: 0, umask: 0o022, .. });
    fs::link(tiny.path("hello"), tiny.path("l")).unwrap();
    saw!(tiny, Operation::Link { node: 2, name: b"l" });
    fs::rename(tiny.path("l"), tiny.path("m")).unwrap();
    saw!(tiny, Operation::Rename { name: b"l", new_dir: 1, new_name: b"m", flags: 0 });
    fs::renameat_with(CWD, tiny.path("m"), CWD, tiny.path("n"), RenameFlags::NOREPLACE).unwrap();
    saw!(tiny, Operation::Rename { name: b"m", new_dir: 1, new_name: b"n", flags: 1 });
    fs::unlink(tiny.path("n")).unwrap();
    saw!(tiny, Operation::Unlink { name: b"n" });
    fs::rmdir(tiny.path("d")).unwrap();
    saw!(tiny, Operation::Rmdir { name: b"d" });
    let dir = open(tiny, ".", OFlags::DIRECTORY);
    fs::fsync(&dir).unwrap();
    saw!(tiny, Operation::FsyncDir { data_only: false, .. });
    drop(dir);
    tiny.wait_for(|_, operation| matches!(operation, Operation::ReleaseDir { .. }));
    saw!(tiny, Operation::OpenDir { .. });
    let hello = tiny.path("hello");
    fs::setxattr(&hello, "user.x", b"val", XattrFlags::CREATE).unwrap();
    saw!(tiny, Operation::SetXattr { name: b"user.x", value: b"val", flags: 1, .. });
    let mut value = [0; 16];
    assert_eq!(fs::getxattr(&hello, "user.x", &mut value).unwrap(), 5);
    saw!(tiny, Operation::GetXattr { name: b"user.x", size: 16 });
    assert_eq!(fs::listxattr(&hello, &mut value).unwrap(), 7);
    saw!(tiny, Operation::ListXattr { size: 16 });
    fs::removexattr(&hello, "user.x").unwrap();
    saw!(tiny, Operation::RemoveXattr { name: b"user.x" });
}

fn files(tiny: &Tiny) {
    let file = open(tiny, "made", OFlags::RDWR | OFlags::CREATE | OFlags::EXCL);
    saw!(tiny, Operation::Create { name: b"made", mode: 0o100_640, umask: 0o022, flags, .. } if flags & 0o302 == 0o302);
    assert_eq!(rustix::io::pwrite(&file, b"data", 3).unwrap(), 4);
    saw!(tiny, Operation::Write { offset: 3, data: b"data", cached: false, .. });
    fs::fdatasync(&file).unwrap();
    saw!(tiny, Operation::Fsync { data_only: true, .. });
    fs::fallocate(&file, fs::FallocateFlags::KEEP_SIZE, 4096, 8192).unwrap();
    saw!(tiny, Operation::Fallocate { mode: 1, offset: 4096, length: 8192, .. });
    assert_eq!(fs::seek(&file, fs::SeekFrom::Data(2)).unwrap(), 3);
    saw!(tiny, Operation::Lseek { offset: 2, whence: 3, .. });
    let from = open(tiny, "hello", OFlags::RDONLY);
    assert_eq!(fs::copy_file_range(&from, Some(&mut 1), &file, Some(&mut 7), 6).unwrap(), 6);
    let copied =
        CopyRange { fh_in: 2, offset_in: 1, node_out: 0, fh_out: 0, offset_out: 7, length: 6, flags: 0 };
    let like = |range: &CopyRange| CopyRange { node_out: 0, fh_out: 0, ..*range } == copied;
    if tiny.agreed.minor >= 45 {
        saw!(tiny, Operation::CopyFileRange64(range) if like(range));
    } else {
        saw!(tiny, Operation::CopyFileRange(range) if like(range));
    }
    fs::ftruncate(&file, 5).unwrap();
    saw!(tiny, Operation::SetAttr(SetAttr { size: Some(5), fh: Some(_), .. }));
    fs::chmod(tiny.path("made"), Mode::from_raw_mode(0o600)).unwrap();
    saw!(tiny, Operation::SetAttr(SetAttr { mode: Some(0o100_600), .. }));
    let times = fs::Timestamps {
        last_access: fs::Timespec { tv_sec: 0, tv_nsec: fs::UTIME_NOW },
        last_modification: fs::Timespec { tv_sec: -5, tv_nsec: 6 },
    };
    fs::utimensat(CWD, tiny.path("made"), &times, AtFlags::empty()).unwrap();
    saw!(
        tiny,
        Operation::SetAttr(SetAttr { atime: Some(SetTime::Now), mtime: Some(SetTime::At((-5, 6))), .. })
    );
    drop(file);
    tiny.wait_for(|_, operation| matches!(operation, Operation::Release { flush: false, .. }));
    saw!(tiny, Operation::Flush { .. });
    drop(open(tiny, "made", OFlags::WRONLY | OFlags::TRUNC));
    // The kernel truncates by a SETATTR of its own, so that it can first refuse a running program.
    saw!(tiny, Operation::Open { flags, .. } if flags & 0o1001 == 1);
    saw!(tiny, Operation::SetAttr(SetAttr { size: Some(0), .. }));
}

fn locks(tiny: &Tiny) {
    let file = open(tiny, "hello", OFlags::RDWR);
    fs::flock(&file, fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    saw!(tiny, Operation::SetLk(LockRequest { flock: true, lock: FileLock { kind: 1, .. }, .. }));
    fs::flock(&file, fs::FlockOperation::LockShared).unwrap();
    saw!(tiny, Operation::SetLkW(LockRequest { flock: true, lock: FileLock { kind: 0, .. }, .. }));
    let mut lock = libc::flock { l_type: libc::F_WRLCK as i16, l_whence: 0, l_start: 10, l_len: 5, l_pid: 0 };
    for command in [libc::F_GETLK, libc::F_SETLK] {
        // SAFETY: the descriptor is open and the lock lives for the call.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
        assert_eq!(result, 0);
        lock.l_type = libc::F_WRLCK as i16;
        (lock.l_start, lock.l_len) = (10, 5);
    }
    let range = |lock: &FileLock| (lock.start, lock.end) == (10, 14);
    saw!(tiny, Operation::GetLk(LockRequest { flock: false, lock, .. }) if range(lock));
    saw!(tiny, Operation::SetLk(LockRequest { flock: false, lock, .. }) if range(lock));
    drop(file);
    tiny.wait_for(|_, operation| matches!(operation, Operation::Release { flock_unlock: true, .. }));
}

fn rare(tiny: &Tiny) {
    let file = open(tiny, "hello", OFlags::RDONLY);
    let mut flags: libc::c_int = 0;
    // SAFETY: FS_IOC_GETFLAGS writes one int, though its number encodes a long.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::FS_IOC_GETFLAGS as _, &raw mut flags) };
    assert_eq!((result, flags), (0, 0x10));
    saw!(tiny, Operation::Ioctl { cmd: 0x8008_6601, out_size: 4, .. });
    let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut poll = [rustix::event::PollFd::from_borrowed_fd(file.as_fd(), rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut poll, Some(&timeout)).unwrap();
    saw!(tiny, Operation::Poll { events: 1.., .. });
    let statx = fs::statx(CWD, tiny.path("hello"), AtFlags::STATX_FORCE_SYNC, fs::StatxFlags::BTIME).unwrap();
    let since = |minor: u32| tiny.agreed.minor >= minor;
    if since(39) {
        assert_eq!((statx.stx_btime.tv_sec, statx.stx_btime.tv_nsec), (1_234, 5));
        saw!(tiny, Operation::Statx { mask, .. } if mask & 0x800 != 0);
    }
    let tmpfile = fs::open(&tiny.mountpoint, OFlags::TMPFILE | OFlags::RDWR, Mode::from_raw_mode(0o644));
    assert_eq!(tmpfile.is_ok(), since(37));
    if since(37) {
        saw!(tiny, Operation::Tmpfile { mode: 0o100_644, umask: 0o022, .. });
    } else {
        saw!(tiny, Operation::Unknown { opcode: opcode::TMPFILE });
    }
    assert_eq!(tiny.agreed.has(init::SETXATTR_EXT), since(33));
    fs::statvfs(&tiny.mountpoint).unwrap();
    saw!(tiny, Operation::StatFs);
    assert_eq!(std::fs::read(tiny.path("hello")).unwrap().len(), 13);
    saw!(tiny, Operation::Read { offset: 0, size: 4096.., .. });
    assert!(std::fs::read_dir(&tiny.mountpoint).unwrap().count() > 3);
    saw!(tiny, Operation::ReadDirPlus { offset: 0, size: 4096.., .. });
    saw!(tiny, Operation::ReadDir { offset: 3.., .. });
}

/// The kernel sends the parent's group if it is a supplementary group of the caller.
fn groups(tiny: &Tiny) {
    let mut mkdir = std::process::Command::new("mkdir");
    mkdir.arg(tiny.path("grouped"));
    // SAFETY: setgroups is safe between fork and exec.
    unsafe {
        mkdir.pre_exec(|| match libc::setgroups(1, &ROOT_GID) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    match mkdir.status() {
        Ok(status) => assert!(status.success()),
        Err(error) => {
            eprintln!("SKIPPED: only root may choose groups: {error}");
            return;
        }
    }
    let expected = if tiny.agreed.has(init::CREATE_SUPP_GROUP) { &[ROOT_GID][..] } else { &[] };
    saw!(tiny, Operation::Mkdir { name: b"grouped", extensions, .. } if extensions.groups().eq(expected.iter().copied()));
}

/// With `NIGH_SAVE_REQUESTS=DIR` each kind of request is written there, for the fuzzing corpus.
fn save(tiny: &Tiny) {
    let Some(dir) = std::env::var_os("NIGH_SAVE_REQUESTS") else { return };
    for bytes in tiny.requests() {
        let (_, operation) = decode(&bytes, &tiny.agreed).unwrap();
        let hex = bytes.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        });
        let name = format!("kernel-7.{}-{}.hex", tiny.agreed.minor, opcode_name(operation.opcode()));
        std::fs::write(std::path::Path::new(&dir).join(name), hex + "\n").unwrap();
    }
}
