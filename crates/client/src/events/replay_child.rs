//! Replay child: makes system calls in the mount on command. The daemon recognises its requests by its process id.
//!
//! It reaches nothing but that mount: it opens the mount point, checks the mount's device, and enters no mount below.
//! Between commands it keeps nothing open there.

use super::command::{self, Command};
use nigh_types::{Kind, Name};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, StatxFlags, Timespec, Timestamps, UTIME_OMIT, mkdirat,
    mknodat, open, openat2, renameat, statx, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bytes of a path resolved at once; the kernel accepts 4,095.
const STEP: usize = 3_000;
const PATH: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Executes commands from standard input until it ends. `device`: the mount's device.
pub fn run_replay_child(mountpoint: &Path, device: (u32, u32)) -> io::Result<()> {
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    std::env::set_current_dir("/")?;
    let (mut from, mut to) = (io::stdin().lock(), io::stdout().lock());
    while let Some(command) = Command::read(&mut from)? {
        let done = perform(mountpoint, device, &command);
        command::answer(&mut to, done.err().map_or(0, Errno::raw_os_error))?;
    }
    Ok(())
}

fn perform(mountpoint: &Path, device: (u32, u32), command: &Command) -> Result<(), Errno> {
    let root = open(mountpoint, PATH, Mode::empty())?;
    let is = statx(&root, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    if (is.stx_dev_major, is.stx_dev_minor) != device {
        return Err(Errno::NODEV);
    }
    match command {
        Command::Make { path, kind } => {
            let (dir, name) = parent(&root, path)?;
            make(&dir, name, *kind)
        }
        Command::Remove { path, kind } => {
            let (dir, name) = parent(&root, path)?;
            let flags = if *kind == Kind::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            unlinkat(&dir, name, flags)
        }
        Command::Move { path, new_path } => {
            let ((from, name), (to, new_name)) = (parent(&root, path)?, parent(&root, new_path)?);
            renameat(&from, name, &to, new_name)
        }
        Command::Written { path } => touch(&root, path, false),
        Command::Attributes { path } => touch(&root, path, true),
    }
}

/// Resolves a path's parent directory; returns it with the last name.
fn parent<'a>(root: &OwnedFd, path: &'a [Name]) -> Result<(OwnedFd, &'a OsStr), Errno> {
    let (last, way) = path.split_last().ok_or(Errno::INVAL)?;
    let mut at = rustix::io::fcntl_dupfd_cloexec(root, 0)?;
    let mut step: Vec<u8> = Vec::new();
    for (number, name) in way.iter().enumerate() {
        if !step.is_empty() {
            step.push(b'/');
        }
        step.extend(name.as_bytes());
        if step.len() >= STEP || number + 1 == way.len() {
            let flags = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
            at = openat2(&at, step.as_slice(), PATH, Mode::empty(), flags)?;
            step.clear();
        }
    }
    Ok((at, OsStr::from_bytes(last.as_bytes())))
}

fn make(dir: &OwnedFd, name: &OsStr, kind: Kind) -> Result<(), Errno> {
    let mode = Mode::RUSR | Mode::WUSR;
    let kind = match kind {
        Kind::Directory => return mkdirat(dir, name, mode | Mode::XUSR),
        Kind::Symlink => return symlinkat("?", dir, name),
        Kind::File => FileType::RegularFile,
        Kind::Fifo => FileType::Fifo,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharacterDevice,
        Kind::BlockDevice => FileType::BlockDevice,
    };
    mknodat(dir, name, kind, mode, 0)
}

/// The time values do not matter.
fn touch(root: &OwnedFd, path: &[Name], both: bool) -> Result<(), Errno> {
    let some = Timespec { tv_sec: 1, tv_nsec: 0 };
    let atime = if both { some } else { Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT } };
    let times = Timestamps { last_access: atime, last_modification: some };
    if path.is_empty() {
        return utimensat(root, ".", &times, AtFlags::empty());
    }
    let (dir, name) = parent(root, path)?;
    utimensat(&dir, name, &times, AtFlags::SYMLINK_NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn path(names: &[&str]) -> Vec<Name> {
        names.iter().map(|name| Name::new(name.as_bytes()).unwrap()).collect()
    }

    #[test]
    fn replay_does_not_cross_mounts_or_follow_symlinks() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        let of = std::fs::metadata(at).unwrap();
        let device = (rustix::fs::major(of.dev()), rustix::fs::minor(of.dev()));
        let make = |names: &[&str]| Command::Make { path: path(names), kind: Kind::File };
        assert_eq!(perform(at, (device.0, device.1 + 1), &make(&["x"])), Err(Errno::NODEV));
        assert!(!at.join("x").exists());
        std::fs::create_dir(at.join("real")).unwrap();
        std::os::unix::fs::symlink("real", at.join("link")).unwrap();
        assert_eq!(perform(at, device, &make(&["link", "x"])), Err(Errno::LOOP));
        assert_eq!(perform(Path::new("/"), root_device(), &make(&["proc", "x"])), Err(Errno::XDEV));
        assert_eq!(perform(at, device, &make(&["real", "x"])), Ok(()));
        assert!(at.join("real/x").exists());
        let remove = Command::Remove { path: path(&["real", "x"]), kind: Kind::File };
        assert_eq!(perform(at, device, &remove), Ok(()));
        let long: Vec<Name> = (0..30).map(|_| Name::new("y".repeat(200).as_bytes()).unwrap()).collect();
        for depth in 1..=long.len() {
            let command = Command::Make { path: long[..depth].to_vec(), kind: Kind::Directory };
            assert_eq!(perform(at, device, &command), Ok(()), "{depth}");
        }
        assert_eq!(perform(at, device, &Command::Attributes { path: long.clone() }), Ok(()));
        assert_eq!(perform(at, device, &Command::Written { path: Vec::new() }), Ok(()));
    }

    fn root_device() -> (u32, u32) {
        let of = std::fs::metadata("/").unwrap();
        (rustix::fs::major(of.dev()), rustix::fs::minor(of.dev()))
    }
}
