//! Resolution of a bare descriptor to the directory and name of its file.

use crate::export::node::current_path;
use crate::os::error::{Fault, Result};
use crate::os::stat::{self, Stat};
use nigh_types::Name;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// Bound on the depth of a directory.
const MAX_DEPTH: u32 = 1 << 20;

/// Returns the root of the mount on which a directory lies, or the root of this process's view of the mount.
pub(crate) fn mount_root(dir: &OwnedFd) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = rustix::io::fcntl_dupfd_cloexec(dir, 0)?;
    for _ in 0..MAX_DEPTH {
        let above = match rustix::fs::openat2(&at, c"..", flags, Mode::empty(), ResolveFlags::NO_XDEV) {
            Err(Errno::XDEV) => return Ok(at),
            above => above?,
        };
        if stat::of_fd(&above)?.is_same(&stat::of_fd(&at)?) {
            return Ok(at);
        }
        at = above;
    }
    Err(Fault(nigh_types::Errno::LOOP))
}

/// Location of a file according to the kernel.
pub(crate) enum Location {
    /// The file is a name of this directory.
    There(OwnedFd, Name),
    /// The file is no longer at the kernel's path, or that path is not visible on its mount, or the kernel has no
    /// name of the file cached.
    Elsewhere,
}

/// Resolves a descriptor below the root of its mount. The lookup enters no other mount, which any user may have
/// placed over a directory, so it waits only for the mount's own disk.
pub(crate) fn locate_on_mount(root: &OwnedFd, fd: impl AsFd, stat: &Stat) -> Result<Location> {
    // The path is too long for readlink(2) on /proc/self/fd.
    let (Some(base), Some(path)) = (current_path(root), current_path(fd)) else {
        return Ok(Location::Elsewhere);
    };
    let base = if base == b"/" { &base[..0] } else { &base[..] };
    let below = path.strip_prefix(base).and_then(|path| path.strip_prefix(b"/"));
    let Some(below) = below.filter(|below| !below.is_empty()) else { return Ok(Location::Elsewhere) };
    let (parent, name) = match below.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => (&below[..slash], &below[slash + 1..]),
        None => (&b"."[..], below),
    };
    let look = |dir: &OwnedFd, path: &[u8]| {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
        match rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve) {
            Ok(fd) => Ok(Some(fd)),
            // The suffix " (deleted)" may make a name longer than `NAME_MAX`.
            Err(Errno::XDEV | Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG) => Ok(None),
            Err(errno) => Err(Fault::from(errno)),
        }
    };
    let Some(dir) = look(root, parent)? else { return Ok(Location::Elsewhere) };
    let Some(there) = look(&dir, name)? else { return Ok(Location::Elsewhere) };
    let is_it = stat::of_fd(there)?.is_same(stat);
    match Name::new(name) {
        Ok(name) if is_it => Ok(Location::There(dir, name)),
        _ => Ok(Location::Elsewhere),
    }
}

/// Resolves a descriptor along its whole path, on a mount whose root is not open.
pub(crate) fn locate_by_path(fd: impl AsFd, stat: &Stat) -> Option<(OwnedFd, Name)> {
    let path = current_path(fd)?;
    let slash = path.iter().rposition(|&byte| byte == b'/')?;
    let name = Name::new(&path[slash + 1..]).ok()?;
    let parent = if slash == 0 { &b"/"[..] } else { &path[..slash] };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(CWD, parent, flags, Mode::empty()).ok()?;
    let there = stat::of_name(&dir, name.as_bytes()).ok()?;
    there.is_same(stat).then_some((dir, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_is_located_only_on_its_own_mount() {
        let dir = tempfile::tempdir().unwrap();
        let a = dir.path().join("a");
        std::fs::create_dir(&a).unwrap();
        std::fs::write(a.join("f"), "").unwrap();
        let open = |path: &std::path::Path| {
            rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
        };
        let (root, fd) = (mount_root(&open(dir.path())).unwrap(), open(&a.join("f")));
        let stat = stat::of_fd(&fd).unwrap();
        let is_there = || matches!(locate_on_mount(&root, &fd, &stat).unwrap(), Location::There(_, name) if name.as_bytes() == b"f");
        assert!(is_there());
        let run = |program: &str, args: &[&std::path::Path]| {
            std::process::Command::new(program).args(args).output().is_ok_and(|done| done.status.success())
        };
        if run("mount", &[std::path::Path::new("--bind"), &a, &a]) {
            let covered = locate_on_mount(&root, &fd, &stat);
            assert!(run("umount", &[&a]));
            assert!(matches!(covered, Ok(Location::Elsewhere)), "something else could be mounted there");
        }
        assert!(is_there());
        std::fs::hard_link(a.join("f"), dir.path().join("g")).unwrap();
        std::fs::remove_file(a.join("f")).unwrap();
        assert!(matches!(locate_on_mount(&root, &fd, &stat), Ok(Location::Elsewhere)));
    }
    #[test]
    fn removed_file_with_longest_name_is_not_located() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n".repeat(255));
        std::fs::write(&path, "").unwrap();
        let open = |path: &std::path::Path| {
            rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
        };
        let (root, fd) = (mount_root(&open(dir.path())).unwrap(), open(&path));
        std::fs::remove_file(&path).unwrap();
        let told = locate_on_mount(&root, &fd, &stat::of_fd(&fd).unwrap());
        assert!(matches!(told, Ok(Location::Elsewhere)), "it is gone, and nothing failed");
    }
}
