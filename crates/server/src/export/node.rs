//! Resolved inodes, and access to them by descriptor.

use crate::os::error::{Fault, Result};
use crate::os::stat::{self, Dev, Stat};
use nigh_lease::Object;
use nigh_types::{Errno, Kind, Name, NodeId};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// A resolved inode: verified to lie in the export and to have the requested id.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) id: NodeId,
    /// `O_PATH`, or a file open in the session.
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) stat: Stat,
    /// Lease identity of the inode, equal through every export.
    pub(crate) object: Object,
    /// The name by which it was resolved just now.
    pub(crate) resolved_by: Option<ResolvedName>,
    /// When the inode, or the directory through which it was resolved, was last found to lie in the export.
    pub(crate) confined_at: Instant,
}

/// A directory entry: a directory and a name in it.
#[derive(Clone, Debug)]
pub(crate) struct ResolvedName {
    pub(crate) dir: NodeId,
    pub(crate) object: Object,
    fd: Arc<OwnedFd>,
    /// Device of the directory, as in [`Directory`].
    device: (Dev, u64, bool),
    name: Name,
}

/// The inode behind a name, without a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) object: Object,
    pub(crate) stat: Stat,
}

/// The inode behind a name that is to be changed.
pub(crate) enum LookupOutcome {
    Nothing,
    Found(Found),
    /// A mount point. The mounted filesystem was not accessed, since it may hang.
    MountPoint,
}

/// A directory: a descriptor (`O_PATH` is enough), with its device, mount, and [`crate::os::stat::Stat::known_anew`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Directory<'a> {
    pub(crate) fd: &'a OwnedFd,
    pub(crate) device: (Dev, u64, bool),
}

/// Attempts of a lookup that races with renames.
const ATTEMPTS: u32 = 32;

impl Node {
    /// Returns the inode itself as a [`Directory`]; it must be one.
    pub(crate) fn directory(&self) -> Directory<'_> {
        Directory { fd: &self.fd, device: (self.stat.dev, self.stat.mount, self.stat.known_anew) }
    }
}

impl ResolvedName {
    pub(crate) fn new(dir: &Node, name: &Name) -> ResolvedName {
        let device = dir.directory().device;
        ResolvedName { dir: dir.id, object: dir.object, fd: Arc::clone(&dir.fd), device, name: name.clone() }
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    pub(crate) fn directory(&self) -> Directory<'_> {
        Directory { fd: &self.fd, device: self.device }
    }

    /// Returns the inode's current attributes, if the name still leads to it.
    pub(crate) fn current_stat(&self, node: &Node) -> Option<Stat> {
        stat::of_name(&self.fd, self.name.as_bytes()).ok().filter(|stat| stat.is_same(&node.stat))
    }
}

/// `/proc/self/fd/N`, the path by which an `O_PATH` descriptor is opened, changed or linked.
pub(crate) fn proc_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Reopens a resolved regular file or directory; other types are never opened.
pub(crate) fn reopen(node: &Node, flags: OFlags) -> Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    match node.stat.attr.kind() {
        Kind::File => Ok(rustix::fs::open(proc_path(&node.fd), flags, Mode::empty())?),
        Kind::Directory => {
            let flags = flags | OFlags::DIRECTORY;
            match rustix::fs::openat(&node.fd, c".", flags, Mode::empty()) {
                // Opening "." needs search permission on the directory, which a plain open for reading does not.
                Err(rustix::io::Errno::ACCESS) => {
                    Ok(rustix::fs::open(proc_path(&node.fd), flags, Mode::empty())?)
                }
                opened => Ok(opened?),
            }
        }
        Kind::Symlink => Err(Fault(Errno::LOOP)),
        _ => Err(Fault(Errno::NXIO)),
    }
}

/// Sets `O_NOATIME` on a descriptor, as far as the server (not the caller) may.
pub(crate) fn without_atime(fd: OwnedFd) -> OwnedFd {
    if let Ok(flags) = rustix::fs::fcntl_getfl(&fd) {
        // Only the owner and CAP_FOWNER may; otherwise reads update the access time as usual.
        let _ = rustix::fs::fcntl_setfl(&fd, flags | OFlags::NOATIME);
    }
    fd
}

/// Returns the inode's current absolute path from the kernel, with the suffix " (deleted)" if its name was removed.
pub(crate) fn current_path(fd: impl AsFd) -> Option<Vec<u8>> {
    let path = rustix::fs::readlink(proc_path(fd), Vec::with_capacity(256)).ok()?;
    Some(path.into_bytes())
}

pub(crate) fn is_deleted(fd: &OwnedFd) -> bool {
    current_path(fd).is_none_or(|path| path.ends_with(b" (deleted)"))
}

/// Opens `path` below a directory as `O_PATH`. `path` consists of names joined by `/`.
pub(crate) fn open_beneath(dir: impl AsFd, path: &[u8]) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..ATTEMPTS {
        match rustix::fs::openat2(&dir, path, flags, Mode::empty(), resolve) {
            // The lookup raced with a mount or a rename. No path here contains `..`, so an escape means that the
            // directory was moved during the lookup (`complete_walk` in fs/namei.c).
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::XDEV) => {}
            other => return Ok(other?),
        }
    }
    Err(Fault(Errno::AGAIN))
}
