//! Resolution of inodes by inode number alone. See docs/decisions/0035-file-handles.md.

use super::{NodeResolver, absent_if_stale, is_reserved};
use crate::export::fd_location::{Location, locate_on_mount};
use crate::export::node::{Node, ResolvedName, current_path};
use crate::os::error::{Fault, Result};
use crate::os::stat::{self, Stat};
use nigh_types::{Errno, Name, NodeId};
use rustix::fs::{Mode, OFlags, RawDir, ResolveFlags};
use std::os::fd::OwnedFd;

impl NodeResolver {
    /// Whether inodes of the root's filesystem can be resolved by number.
    pub(crate) fn resolves_inode_numbers(&self) -> bool {
        self.mount_root.is_some() && self.opener.as_ref().is_some_and(|opener| opener.opens_numbers())
    }

    /// Resolves the current inode with this number, by a name that leads to it inside the export. Fails with `ESTALE`
    /// if there is no such inode, or no known name of it.
    pub(crate) fn by_inode_number(&self, number: u64) -> Result<Node> {
        if let Some(root) = self.cached_directory(self.root.id)?.filter(|root| root.id.ino == number) {
            return Ok(root);
        }
        let (Some(opener), Some((ino, subvolume))) = (&self.opener, self.ids.on_main(number)) else {
            return Err(Fault::STALE);
        };
        let open = |ino| opener.open_number(ino, subvolume).map_err(stale_unless_own);
        let found = self.identify(open(ino)?)?;
        let nlink = found.stat.attr.nlink;
        if found.id.ino != number || nlink == 0 {
            return Err(Fault::STALE);
        }
        let root = self.mount_root(&found.stat).ok_or(Fault::STALE)?;
        if let Location::There(dir, name) = locate_on_mount(root, &found.fd, &found.stat)? {
            match absent_if_stale(self.at_name(&found, dir, &name))? {
                Some(placed) => return Ok(placed),
                // The kernel's path shows its only name, so no directory is searched for another one.
                None if nlink == 1 => return Err(Fault::STALE),
                None => {}
            }
        }
        // The kernel has dropped the file's dentries. For a directory it would restore them (`reconnect_path` in
        // fs/exportfs/expfs.c).
        let parent =
            self.ids.parents.find(number).filter(|_| !found.stat.attr.is_dir()).ok_or(Fault::STALE)?;
        let dir = open(parent)?;
        if !is_visible(root, &dir)? {
            return Err(Fault::STALE);
        }
        let name = named_in(&dir, &found.stat)?.ok_or(Fault::STALE)?;
        self.at_name(&found, dir, &name)
    }

    /// Resolves a node id by its inode number; the inode must still have the id.
    pub(super) fn by_inode_number_of(&self, id: NodeId) -> Result<Node> {
        if !self.resolves_inode_numbers() {
            return Err(Fault::STALE);
        }
        let found = self.by_inode_number(id.ino)?;
        if found.id == id { Ok(found) } else { Err(Fault::STALE) }
    }

    /// Records a file's parent directory for [`NodeResolver::by_inode_number`], which needs it once the server's kernel
    /// has dropped the dentries.
    pub(crate) fn note_parent(&self, id: NodeId, stat: &Stat, dir: &Stat) {
        if !stat.attr.is_dir()
            && stat.mount == dir.mount
            && self.root.stat.mount == dir.mount
            && self.resolves_inode_numbers()
        {
            self.ids.parents.note(id.ino, dir.ino);
        }
    }

    /// Resolves an inode by a name of it, which must lie in the export.
    fn at_name(&self, found: &Node, dir: OwnedFd, name: &Name) -> Result<Node> {
        let dir = self.identify(dir)?;
        if is_reserved(name.as_bytes()) || !self.is_exported(&dir.fd) {
            return Err(Fault::STALE);
        }
        let fd = open_here(&dir.fd, name).map_err(Fault::or_stale)?;
        let mut placed = self.verified(fd, found.id)?;
        (placed.resolved_by, placed.confined_at) = (Some(ResolvedName::new(&dir, name)), dir.confined_at);
        self.remember(dir.id, name, &placed);
        self.note_parent(placed.id, &placed.stat, &dir.stat);
        Ok(placed)
    }

    /// Whether a directory lies in the export and not in the server's own folder there.
    fn is_exported(&self, dir: &OwnedFd) -> bool {
        let (Some(root), Some(path)) = (current_path(&self.root.fd), current_path(dir)) else { return false };
        let below = path.strip_prefix(&root[..]).unwrap_or_default();
        self.is_confined(dir) && !below.split(|&byte| byte == b'/').any(is_reserved)
    }
}

/// Maps the errno of a nonexistent inode number, which differs among filesystems.
fn stale_unless_own(fault: Fault) -> Fault {
    if fault.is_the_servers_own() || fault.0 == Errno::IO { fault } else { Fault::STALE }
}

/// Whether the directory is the root of its mount or lies below it, not hidden by another mount.
fn is_visible(root: &OwnedFd, dir: &OwnedFd) -> Result<bool> {
    let stat = stat::of_fd(dir)?;
    // The number may belong to a file by now.
    Ok(stat.attr.is_dir()
        && (stat.is_same(&stat::of_fd(root)?)
            || matches!(locate_on_mount(root, dir, &stat)?, Location::There(..))))
}

/// Opens a name of a directory. Fails if another mount covers it, since that mount may hang.
fn open_here(dir: &OwnedFd, name: &Name) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(dir, name.as_bytes(), flags, Mode::empty(), resolve) {
        Err(rustix::io::Errno::XDEV) => Err(Fault::STALE),
        opened => Ok(opened?),
    }
}

/// Returns a name of the inode in a directory, found by the d_ino of its entries.
fn named_in(dir: &OwnedFd, stat: &Stat) -> Result<Option<Name>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = rustix::fs::openat(dir, c".", flags, Mode::empty())?;
    let mut buffer = Vec::<u8>::with_capacity(64 << 10);
    let mut entries = RawDir::new(&open, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = match entry {
            Err(rustix::io::Errno::NOENT) => break,
            entry => entry?,
        };
        let Ok(name) = Name::new(entry.file_name().to_bytes()) else { continue };
        if entry.ino() != stat.ino || is_reserved(name.as_bytes()) {
            continue;
        }
        if open_here(dir, &name).and_then(stat::of_fd).is_ok_and(|there| there.is_same(stat)) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}
