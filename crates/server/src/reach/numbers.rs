//! Inodes that are reached by their numbers alone. See docs/decisions/0035-file-handles.md.

use super::{Node, Reach, Under, absent_if_stale, hides, link};
use crate::error::{Fault, Result};
use crate::stat::{self, Stat};
use crate::whereabouts::{Told, told_place};
use nigh_types::{Errno, Name, NodeId};
use rustix::fs::{Mode, OFlags, RawDir, ResolveFlags};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

impl Reach {
    /// Whether inodes of the root's filesystem are reached by their numbers.
    pub(crate) fn finds_numbers(&self) -> bool {
        self.mount_root.is_some() && self.opener.as_ref().is_some_and(|opener| opener.opens_numbers())
    }

    /// Whatever has the number now, by a name that leads to it inside the export; `ESTALE` where there is none, or no name of it is known.
    pub(crate) fn by_number(&self, number: u64) -> Result<Node> {
        if let Some(root) = self.held_directory(self.root.id)?.filter(|root| root.id.ino == number) {
            return Ok(root);
        }
        let (Some(opener), Some((ino, subvolume))) = (&self.opener, self.ids.on_main(number)) else {
            return Err(Fault::STALE);
        };
        let open = |ino| opener.open_number(ino, subvolume).map_err(stale_unless_own);
        let found = self.opened(open(ino)?)?;
        let nlink = found.stat.attr.nlink;
        if found.id.ino != number || nlink == 0 {
            return Err(Fault::STALE);
        }
        let root = self.mount_root(&found.stat).ok_or(Fault::STALE)?;
        if let Told::There(dir, name) = told_place(root, &found.fd, &found.stat)? {
            match absent_if_stale(self.placed(&found, dir, &name))? {
                Some(placed) => return Ok(placed),
                // That is its only name: no directory is read for another one.
                None if nlink == 1 => return Err(Fault::STALE),
                None => {}
            }
        }
        // A file whose names the kernel has dropped; of a directory it finds them all again (`reconnect_path` in fs/exportfs/expfs.c).
        let parent =
            self.ids.parents.find(number).filter(|_| !found.stat.attr.is_dir()).ok_or(Fault::STALE)?;
        let dir = open(parent)?;
        if !is_seen(root, &dir)? {
            return Err(Fault::STALE);
        }
        let name = named_in(&dir, &found.stat)?.ok_or(Fault::STALE)?;
        self.placed(&found, dir, &name)
    }

    /// The same where it is that node.
    pub(super) fn by_number_of(&self, id: NodeId) -> Result<Node> {
        if !self.finds_numbers() {
            return Err(Fault::STALE);
        }
        let found = self.by_number(id.ino)?;
        if found.id == id { Ok(found) } else { Err(Fault::STALE) }
    }

    /// For [`Reach::by_number`], so that a file is found whose names the server's kernel has dropped.
    pub(crate) fn note_parent(&self, id: NodeId, stat: &Stat, dir: &Stat) {
        if !stat.attr.is_dir()
            && stat.mount == dir.mount
            && self.root.stat.mount == dir.mount
            && self.finds_numbers()
        {
            self.ids.parents.note(id.ino, dir.ino);
        }
    }

    /// An inode by a name of it, which must be one of the export.
    fn placed(&self, found: &Node, dir: OwnedFd, name: &Name) -> Result<Node> {
        let dir = self.opened(dir)?;
        if hides(name.as_bytes()) || !self.shows(&dir.fd) {
            return Err(Fault::STALE);
        }
        let fd = open_here(&dir.fd, name).map_err(Fault::or_stale)?;
        let mut placed = self.verified(fd, found.id)?;
        (placed.under, placed.checked) = (Some(Under::new(&dir, name)), dir.checked);
        self.remember(dir.id, name, &placed);
        self.note_parent(placed.id, &placed.stat, &dir.stat);
        Ok(placed)
    }

    /// Whether a directory lies in the export, and not in what is the server's own there.
    fn shows(&self, dir: &OwnedFd) -> bool {
        let (Some(root), Some(path)) = (link(&self.root.fd), link(dir)) else { return false };
        let below = path.strip_prefix(&root[..]).unwrap_or_default();
        self.contains(dir) && !below.split(|&byte| byte == b'/').any(hides)
    }
}

/// What a kernel says of a number that nothing has, which differs among filesystems.
fn stale_unless_own(fault: Fault) -> Fault {
    if fault.is_the_servers_own() || fault.0 == Errno::IO { fault } else { Fault::STALE }
}

/// Whether the directory lies below the root of its mount (or is it), and no other mount hides it.
fn is_seen(root: &OwnedFd, dir: &OwnedFd) -> Result<bool> {
    let stat = stat::of_fd(dir)?;
    // It may be a file by now.
    Ok(stat.attr.is_dir()
        && (stat.is_same(&stat::of_fd(root)?) || matches!(told_place(root, dir, &stat)?, Told::There(..))))
}

/// A name of a directory, where no other mount lies over it: that might not answer.
fn open_here(dir: &OwnedFd, name: &Name) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(dir, name.as_bytes(), flags, Mode::empty(), resolve) {
        Err(rustix::io::Errno::XDEV) => Err(Fault::STALE),
        opened => Ok(opened?),
    }
}

/// A name of an inode in a directory, as listings tell its number.
fn named_in(dir: &OwnedFd, stat: &Stat) -> Result<Option<Name>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = rustix::fs::openat(dir, c".", flags, Mode::empty())?;
    let mut buffer = vec![MaybeUninit::uninit(); 64 << 10];
    let mut entries = RawDir::new(&open, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = match entry {
            Err(rustix::io::Errno::NOENT) => break,
            entry => entry?,
        };
        let Ok(name) = Name::new(entry.file_name().to_bytes()) else { continue };
        if entry.ino() != stat.ino || hides(name.as_bytes()) {
            continue;
        }
        if open_here(dir, &name).and_then(stat::of_fd).is_ok_and(|there| there.is_same(stat)) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}
