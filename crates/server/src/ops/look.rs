//! Calls that look at names and inodes.

use super::{Context, Outcome, SELINUX, entry_of};
use crate::error::{Fault, Result};
use crate::reach::{Node, proc_path, reopen};
use nigh_types::{Covers, Errno, Kind, Name, Place, Reply, Space, XattrSet};
use rustix::fs::OFlags;

pub(crate) fn lookup(cx: Context<'_>, dir: &Place, name: &Name) -> Result<Outcome> {
    let dir = cx.reach().directory(dir, cx.files)?;
    if !cx.is_vouched() {
        // A recall would tell it that the directory changes.
        let _acting = cx.act_unless_vouched()?;
        cx.search_unless_vouched(&dir.fd)?;
    }
    // Before looking: what changes meanwhile is recalled.
    let mut grants = Vec::new();
    cx.grant(&mut grants, &dir, Covers::Names);
    let opened = {
        let _acting = cx.act_on(&dir)?;
        cx.reach().open_child(&dir, name)
    };
    let looked = match opened.and_then(|fd| cx.reach().adopt(&dir, name, fd)) {
        Ok(child) => {
            cx.note_parent(child.id, &child.stat, &dir);
            let child = cx.grant_child(&mut grants, child)?;
            Some(entry_of(cx, &child)?)
        }
        Err(Fault(Errno::NOENT)) => None,
        Err(fault) => return Err(fault),
    };
    Ok(Outcome { reply: Reply::Looked(looked), after: Vec::new(), grants })
}

pub(crate) fn getattr(cx: Context<'_>, place: &Place) -> Result<Outcome> {
    let node = cx.reach().node(place, cx.files)?;
    let mut grants = Vec::new();
    cx.grant_attr_to_reader(&mut grants, &node);
    let (id, attr) = cx.attr_beside(&node)?;
    Ok(Outcome { reply: Reply::Attr(id, attr), after: Vec::new(), grants })
}

/// For a peer that is believed to have checked what its callers may do, as the caller has shown no right to walk there: its kernel gives a file
/// handle's number only on behalf of a process with CAP_DAC_READ_SEARCH or its own NFS server, and compares the generation.
pub(crate) fn by_number(cx: Context<'_>, ino: u64) -> Result<Outcome> {
    if !cx.files.is_vouched() {
        return Err(Fault::STALE);
    }
    let node = cx.reach().by_number(ino)?;
    let home = node.under.as_ref().map(|under| (under.dir, under.name().clone()));
    let mut grants = Vec::new();
    cx.grant_attr_to_reader(&mut grants, &node);
    let (node, attr) = cx.attr_beside(&node)?;
    Ok(Outcome { reply: Reply::Found { node, attr, home }, after: Vec::new(), grants })
}

pub(crate) fn readlink(cx: Context<'_>, place: &Place) -> Result<Outcome> {
    let node = cx.reach().node(place, cx.files)?;
    if node.stat.attr.kind() != Kind::Symlink {
        return Err(Fault(Errno::INVAL));
    }
    let mut grants = Vec::new();
    cx.grant_attr_to_reader(&mut grants, &node);
    Ok(Outcome { reply: Reply::Target(target(&node)?), after: Vec::new(), grants })
}

/// Where a symlink leads, as it is written.
pub(crate) fn target(node: &Node) -> Result<Box<[u8]>> {
    let target = rustix::fs::readlinkat(&node.fd, c"", Vec::with_capacity(256))?;
    Ok(target.into_bytes().into())
}

/// Bytes of values that go along with [`Reply::Xattrs`].
const XATTR_BUDGET: usize = 64 << 10;

/// All names are told that the peer may know, and the values that the caller may read; `None` for others, which are
/// asked for one by one.
pub(crate) fn xattrs(cx: Context<'_>, place: &Place) -> Result<Outcome> {
    let node = cx.reach().node(place, cx.files)?;
    let mut grants = Vec::new();
    cx.grant_attr_to_reader(&mut grants, &node);
    let path = proc_path(&node.fd);
    let mut left = XATTR_BUDGET;
    let mut set = XattrSet::default();
    let names = {
        // Root is told names that others are not (`trusted.`): where nobody vouches for the caller, the caller's.
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
            // Removed since the names were listed, unless the caller is merely not allowed to see it.
            Err(Fault(Errno::NODATA)) if !name.starts_with(b"trusted.") => continue,
            _ => None,
        };
        set.items.push((name.into(), value));
    }
    Ok(Outcome { reply: Reply::Xattrs(set), after: Vec::new(), grants })
}

pub(crate) fn xattr(cx: Context<'_>, place: &Place, name: &[u8]) -> Result<Outcome> {
    let node = cx.reach().node(place, cx.files)?;
    let mut grants = Vec::new();
    cx.grant_attr_to_reader(&mut grants, &node);
    let _acting = cx.act_on_xattrs(&node)?;
    let value = value(&proc_path(&node.fd), name)?;
    Ok(Outcome { reply: Reply::Value(value), after: Vec::new(), grants })
}

pub(crate) fn statfs(cx: Context<'_>, place: &Place) -> Result<Outcome> {
    let node = cx.reach().node(place, cx.files)?;
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

pub(crate) fn flags(cx: Context<'_>, place: &Place) -> Result<Outcome> {
    let node = cx.reach().node(place, cx.files)?;
    if !matches!(node.stat.attr.kind(), Kind::File | Kind::Directory) {
        return Err(Fault(Errno::NOTTY));
    }
    // FS_IOC_GETFLAGS wants an open file, which the client's kernel has where it is vouched for.
    let open = cx.act_unless_vouched().and_then(|_acting| reopen(&node, OFlags::RDONLY))?;
    let flags = rustix::fs::ioctl_getflags(&open)?;
    Ok(Outcome::plain(Reply::Flags(flags.bits())))
}

/// The names that listxattr(2) tells, each ended by NUL.
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
