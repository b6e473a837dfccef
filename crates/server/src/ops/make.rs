//! Creation of inodes and names.

use super::open::{buffered, flags_of, insert_open, open_as_caller};
use super::{Context, Outcome, entry_of};
use crate::export::node::{Node, proc_path, reopen};
use crate::export::node_resolver::is_reserved;
use crate::os::error::{Fault, Result};
use crate::os::impersonate::use_umask;
use nigh_types::{Access, Errno, Handle, Kind, LeaseScope, Name, NodeRef, Reply};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A name to be created. `mode` is unmasked: with `umask` set on the thread, the kernel masks it or applies the
/// directory's default ACL.
pub(crate) struct New<'a> {
    pub(crate) name: &'a Name,
    pub(crate) mode: u32,
    pub(crate) umask: u32,
}

pub(crate) fn create(
    cx: Context<'_>,
    dir: &NodeRef,
    new: &New<'_>,
    exclusive: bool,
    access: Access,
) -> Result<Outcome> {
    let dir = parent(cx, dir, new.name)?;
    cx.files.has_room()?;
    let flags = flags_of(access) | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // Other calls may create and remove the name between the two attempts.
    for _ in 0..16 {
        let made = {
            let _acting = cx.act_in(&[&dir], &[])?;
            use_umask(new.umask)?;
            rustix::fs::openat(&dir.fd, new.name.as_bytes(), flags, permissions(new.mode))
        };
        match made {
            Ok(fd) => return opened(cx, &dir, buffered(fd, access)?, access),
            Err(rustix::io::Errno::EXIST) if !exclusive => {}
            Err(errno) => return Err(errno.into()),
        }
        match open_existing(cx, &dir, new.name, access) {
            Err(Fault(Errno::NOENT)) => {}
            done => return done,
        }
    }
    Err(Fault(Errno::AGAIN))
}

fn open_existing(cx: Context<'_>, dir: &Node, name: &Name, access: Access) -> Result<Outcome> {
    let node = cx.resolver().child(dir, name)?;
    match node.stat.attr.kind() {
        Kind::File => {}
        Kind::Directory => return Err(Fault(Errno::ISDIR)),
        // The caller's kernel must follow or open it itself, so it has to look the name up again.
        _ => return Err(Fault::STALE),
    }
    let fd = open_as_caller(cx, &node, access)?;
    cx.resolver().note_handle(&node);
    let handle = insert_open(cx, &node, fd, access, cx.count(node.object))?;
    made(cx, dir, node, Some(handle), true)
}

pub(crate) fn tmpfile(
    cx: Context<'_>,
    dir: &NodeRef,
    mode: u32,
    umask: u32,
    access: Access,
) -> Result<Outcome> {
    let dir = cx.resolver().directory(dir, cx.files)?;
    cx.files.has_room()?;
    let flags = flags_of(access) | OFlags::TMPFILE | OFlags::CLOEXEC;
    let fd = {
        let _acting = cx.act_in(&[&dir], &[])?;
        use_umask(umask)?;
        rustix::fs::openat(&dir.fd, c".", flags, permissions(mode))?
    };
    let node = cx.resolver().identify(rustix::io::fcntl_dupfd_cloexec(&fd, 0)?)?;
    let handle = insert_open(cx, &node, buffered(fd, access)?, access, cx.count(node.object))?;
    cx.call_leases.done();
    let mut grants = Vec::new();
    let node = cx.grant_child(&mut grants, node)?;
    cx.grant(&mut grants, &node, LeaseScope::Data);
    let reply = Reply::Created { entry: entry_of(cx, &node)?, handle: Some(handle), existed: false };
    Ok(Outcome { reply, after: vec![cx.attr_now(&dir)?], grants })
}

pub(crate) fn mknod(cx: Context<'_>, dir: &NodeRef, new: &New<'_>, kind: Kind, rdev: u32) -> Result<Outcome> {
    let file_type = match kind {
        Kind::File => FileType::RegularFile,
        Kind::Fifo => FileType::Fifo,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharacterDevice,
        Kind::BlockDevice => FileType::BlockDevice,
        Kind::Directory | Kind::Symlink => return Err(Fault(Errno::INVAL)),
    };
    make(cx, dir, new, |dir, name| {
        let dev = crate::os::stat::decode_dev(rdev);
        rustix::fs::mknodat(dir, name, file_type, permissions(new.mode), dev)
    })
}

pub(crate) fn mkdir(cx: Context<'_>, dir: &NodeRef, new: &New<'_>) -> Result<Outcome> {
    make(cx, dir, new, |dir, name| rustix::fs::mkdirat(dir, name, permissions(new.mode)))
}

pub(crate) fn symlink(cx: Context<'_>, dir: &NodeRef, name: &Name, target: &[u8]) -> Result<Outcome> {
    let new = New { name, mode: 0o777, umask: 0 };
    make(cx, dir, &new, |dir, name| rustix::fs::symlinkat(target, dir, name))
}

pub(crate) fn link(cx: Context<'_>, place: &NodeRef, dir: &NodeRef, name: &Name) -> Result<Outcome> {
    let dir = parent(cx, dir, name)?;
    let node = cx.resolver().node(place, cx.files)?;
    if node.stat.attr.is_dir() {
        return Err(Fault(Errno::PERM));
    }
    if node.stat.attr.nlink > 0 && cx.attr_now(&node)?.1.nlink == 0 {
        return Err(Fault(Errno::NOENT)); // as link(2) for a file that lost its last name
    }
    // A file that never had a name can be linked only through its open descriptor.
    let open = if node.stat.attr.nlink == 0 { cx.files.of_node(node.id) } else { None };
    let path = open.as_ref().map_or_else(|| proc_path(&node.fd), |file| proc_path(&file.fd));
    {
        let _acting = cx.act_in(&[&dir], &[&node])?;
        rustix::fs::linkat(CWD, path, &dir.fd, name.as_bytes(), AtFlags::SYMLINK_FOLLOW)?;
    }
    cx.files.leases().homes.note_name_in(node.object, dir.object);
    made(cx, &dir, node, None, false)
}

/// Creates a name as the caller, then resolves it.
fn make(
    cx: Context<'_>,
    dir: &NodeRef,
    new: &New<'_>,
    how: impl FnOnce(&Arc<OwnedFd>, &[u8]) -> rustix::io::Result<()>,
) -> Result<Outcome> {
    let dir = parent(cx, dir, new.name)?;
    {
        let _acting = cx.act_in(&[&dir], &[])?;
        use_umask(new.umask)?;
        how(&dir.fd, new.name.as_bytes())?;
    }
    let node = cx.resolver().child(&dir, new.name)?;
    made(cx, &dir, node, None, false)
}

fn opened(cx: Context<'_>, dir: &Node, fd: OwnedFd, access: Access) -> Result<Outcome> {
    let node = cx.resolver().identify(rustix::io::fcntl_dupfd_cloexec(&fd, 0)?)?;
    cx.resolver().note_handle(&node);
    let handle = insert_open(cx, &node, fd, access, cx.count(node.object))?;
    made(cx, dir, node, Some(handle), false)
}

/// Builds the reply for a new name, which cannot vanish while its directory is locked: first the grants, then the
/// covered facts.
fn made(cx: Context<'_>, dir: &Node, node: Node, handle: Option<Handle>, existed: bool) -> Result<Outcome> {
    cx.call_leases.done();
    cx.note_parent(node.id, &node.stat, dir);
    let mut grants = Vec::new();
    cx.grant(&mut grants, dir, LeaseScope::Directory);
    let mut node = Node { stat: crate::os::stat::of_fd(&node.fd)?, ..node };
    if !node.stat.attr.covered_by_parent() && cx.grant(&mut grants, &node, LeaseScope::Attributes) {
        node.stat = crate::os::stat::of_fd(&node.fd)?;
    }
    if handle.is_some() {
        cx.grant(&mut grants, &node, LeaseScope::Data);
    }
    if node.stat.attr.is_dir() {
        // The creator may cache the directory as empty, unless another process has created an entry already.
        cx.watch(node.object, &node.fd);
        let one_spelling = cx.resolver().case_folding.is_case_sensitive(node.directory());
        let names = one_spelling
            .then(|| {
                cx.call_leases.request_grant(
                    node.id,
                    node.object,
                    LeaseScope::Directory,
                    nigh_types::Mode::Read,
                )
            })
            .flatten();
        grants.extend(names.filter(|_| is_empty(&node)));
    }
    let reply = Reply::Created { entry: entry_of(cx, &node)?, handle, existed };
    Ok(Outcome { reply, after: vec![cx.attr_now(dir)?], grants })
}

fn is_empty(dir: &Node) -> bool {
    let Ok(open) = reopen(dir, OFlags::RDONLY) else { return false };
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut entries = RawDir::new(&open, &mut buffer);
    while let Some(entry) = entries.next() {
        let Ok(entry) = entry else { return false };
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return false;
        }
    }
    true
}

/// Resolves the directory in which a name is to be changed.
pub(super) fn parent(cx: Context<'_>, dir: &NodeRef, name: &Name) -> Result<Node> {
    let dir = cx.resolver().directory(dir, cx.files)?;
    if is_reserved(name.as_bytes()) {
        return Err(Fault(Errno::PERM));
    }
    if !cx.is_vouched() {
        // Before the name is looked up: only callers that may search the directory may learn whether it exists.
        let _acting = cx.act_unless_vouched()?;
        cx.search_unless_vouched(&dir.fd)?;
    }
    Ok(dir)
}

fn permissions(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & 0o7777)
}
