//! Lookups of names and reads of inodes.

use super::{Context, Outcome, entry_of};
use crate::export::entry::{SELINUX, target};
use crate::export::node::{proc_path, reopen};
use crate::os::error::{Fault, Result};
use nigh_types::{Errno, Kind, LeaseScope, Name, NodeRef, Reply, Space, XattrSet};
use rustix::fs::OFlags;

pub(crate) fn lookup(cx: Context<'_>, dir: &NodeRef, name: &Name) -> Result<Outcome> {
    let dir = cx.resolver().directory(dir, cx.files)?;
    if !cx.is_vouched() {
        // A recall on a directory without search permission would reveal its changes.
        let _acting = cx.act_unless_vouched()?;
        cx.search_unless_vouched(&dir.fd)?;
    }
    // Before the lookup, so that concurrent changes cause a recall.
    let mut grants = Vec::new();
    cx.grant(&mut grants, &dir, LeaseScope::Directory);
    let opened = {
        let _acting = cx.act_on(&dir)?;
        cx.resolver().open_child(&dir, name)
    };
    let looked = match opened.and_then(|fd| cx.resolver().adopt(&dir, name, fd)) {
        Ok(child) => {
            cx.note_parent(child.id, &child.stat, &dir);
            let child = cx.grant_child(&mut grants, child)?;
            Some(entry_of(cx, &child)?)
        }
        Err(Fault(Errno::NOENT)) => None,
        Err(fault) => return Err(fault),
    };
    Ok(Outcome { reply: Reply::Entry(looked), after: Vec::new(), grants })
}

pub(crate) fn getattr(cx: Context<'_>, place: &NodeRef) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    let mut grants = Vec::new();
    cx.grant_attr_to_reader(&mut grants, &node);
    let (id, attr) = cx.attr_unlocked(&node)?;
    Ok(Outcome { reply: Reply::Attr(id, attr), after: Vec::new(), grants })
}

/// Resolves an inode number for a vouched peer, without a check of the caller's path. The peer's kernel passes the
/// number of a file handle only for a process with CAP_DAC_READ_SEARCH or for its own NFS server, and compares the
/// generation.
pub(crate) fn by_number(cx: Context<'_>, ino: u64) -> Result<Outcome> {
    if !cx.files.is_vouched() {
        return Err(Fault::STALE);
    }
    let node = cx.resolver().by_inode_number(ino)?;
    let home = node.resolved_by.as_ref().map(|under| (under.dir, under.name().clone()));
    let mut grants = Vec::new();
    cx.grant_attr_to_reader(&mut grants, &node);
    let (node, attr) = cx.attr_unlocked(&node)?;
    Ok(Outcome { reply: Reply::Found { node, attr, parent_entry: home }, after: Vec::new(), grants })
}

pub(crate) fn readlink(cx: Context<'_>, place: &NodeRef) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    if node.stat.attr.kind() != Kind::Symlink {
        return Err(Fault(Errno::INVAL));
    }
    let mut grants = Vec::new();
    cx.grant_attr_to_reader(&mut grants, &node);
    Ok(Outcome { reply: Reply::Target(target(&node)?), after: Vec::new(), grants })
}

/// Limit on the total length of the values in [`Reply::Xattrs`].
const XATTR_BUDGET: usize = 64 << 10;

/// Returns all names visible to the peer, and the values that the caller may read. The value is `None` for others,
/// which the client requests individually.
pub(crate) fn xattrs(cx: Context<'_>, place: &NodeRef) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    let mut grants = Vec::new();
    cx.grant_attr_to_reader(&mut grants, &node);
    let path = proc_path(&node.fd);
    let mut left = XATTR_BUDGET;
    let mut set = XattrSet::default();
    let names = {
        // Root sees names that others do not (`trusted.`). Without a vouching kernel the caller's rights decide.
        let _acting = cx.act_unless_vouched()?;
        names(&path)?
    };
    let _acting = cx.act_on_xattrs(&node)?;
    for name in names.split(|&b| b == 0).filter(|name| !name.is_empty() && *name != SELINUX) {
        let value = match value(&path, name) {
            Ok(value) if value.len() <= left => {
                left -= value.len();
                Some(value.into())
            }
            // Removed since the names were listed. (For `trusted.` names NODATA may mean that the caller may not see
            // the value.)
            Err(Fault(Errno::NODATA)) if !name.starts_with(b"trusted.") => continue,
            _ => None,
        };
        set.items.push((name.into(), value));
    }
    Ok(Outcome { reply: Reply::Xattrs(set), after: Vec::new(), grants })
}

pub(crate) fn xattr(cx: Context<'_>, place: &NodeRef, name: &[u8]) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    let mut grants = Vec::new();
    cx.grant_attr_to_reader(&mut grants, &node);
    let _acting = cx.act_on_xattrs(&node)?;
    let value = value(&proc_path(&node.fd), name)?;
    Ok(Outcome { reply: Reply::Value(value), after: Vec::new(), grants })
}

pub(crate) fn statfs(cx: Context<'_>, place: &NodeRef) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    let said = rustix::fs::fstatvfs(&node.fd)?;
    let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    Ok(Outcome::plain(Reply::Space(Space {
        blocks: said.f_blocks,
        blocks_free: said.f_bfree,
        blocks_available: said.f_bavail,
        files: said.f_files,
        files_free: said.f_ffree,
        block_size: narrow(said.f_bsize),
        fragment_size: narrow(said.f_frsize),
        name_max: narrow(said.f_namemax),
    })))
}

pub(crate) fn flags(cx: Context<'_>, place: &NodeRef) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    if !matches!(node.stat.attr.kind(), Kind::File | Kind::Directory) {
        return Err(Fault(Errno::NOTTY));
    }
    // FS_IOC_GETFLAGS needs an open file, which a vouching kernel has opened already.
    let open = cx.act_unless_vouched().and_then(|_acting| reopen(&node, OFlags::RDONLY))?;
    let flags = rustix::fs::ioctl_getflags(&open)?;
    Ok(Outcome::plain(Reply::Flags(flags.bits())))
}

/// Returns the names from listxattr(2), each terminated by NUL.
fn names(path: &str) -> Result<Vec<u8>> {
    let mut size = 256;
    loop {
        let mut buffer = Vec::with_capacity(size);
        match rustix::fs::listxattr(path, rustix::buffer::spare_capacity(&mut buffer)) {
            Ok(_) => return Ok(buffer),
            Err(rustix::io::Errno::RANGE) if size < XATTR_BUDGET => size = XATTR_BUDGET,
            Err(rustix::io::Errno::OPNOTSUPP) => return Ok(Vec::new()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn value(path: &str, name: &[u8]) -> Result<Vec<u8>> {
    let mut size = 256;
    loop {
        let mut buffer = Vec::with_capacity(size);
        match rustix::fs::getxattr(path, name, rustix::buffer::spare_capacity(&mut buffer)) {
            Ok(_) => return Ok(buffer),
            Err(rustix::io::Errno::RANGE) if size < XATTR_BUDGET => size = XATTR_BUDGET,
            Err(errno) => return Err(errno.into()),
        }
    }
}
