//! Opening of files, and selection of the descriptor for a call on file data.

use super::write_tracking::TrackedWrite;
use super::{Context, Outcome};
use crate::export::node::{Node, reopen, without_atime};
use crate::export::open_files::OpenRef;
use crate::export::open_handles::OpenFile;
use crate::os::error::{Fault, Result};
use nigh_lease::Object;
use nigh_types::{Access, Errno, Grant, Handle, Kind, LeaseScope, Name, NodeRef, Reply};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(crate) fn open(cx: Context<'_>, place: &NodeRef, access: Access) -> Result<Outcome> {
    match open_once(cx, place, access) {
        // The file just lost the name by which it was resolved; another name may lead to it.
        Err(Fault::STALE) => open_once(cx, place, access),
        other => other,
    }
}

fn open_once(cx: Context<'_>, place: &NodeRef, access: Access) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    only_files(&node)?;
    cx.files.has_room()?;
    // Counted before its name is checked again: a later removal of the name sees the file as open.
    let counted = cx.count(node.object);
    cx.wait_for_unlink(node.object);
    let mut grants = Vec::new();
    if !access.truncate && !grant_open(cx, &mut grants, &node) {
        return Err(Fault::STALE);
    }
    let fd = open_as_caller(cx, &node, access)?;
    cx.resolver().note_handle(&node);
    let handle = insert_open(cx, &node, fd, access, counted)?;
    if access.truncate {
        cx.call_leases.done();
        cx.grant_attr(&mut grants, &node);
        cx.grant(&mut grants, &node, LeaseScope::Data);
    }
    let (_, attr) = cx.attr_now(&node)?;
    Ok(Outcome { reply: Reply::Opened { handle, attr }, after: Vec::new(), grants })
}

/// Reopens a file that the client had open under `handle` before its session was discarded, with the caller's rights
/// as any open.
pub(crate) fn reopen_as(cx: Context<'_>, place: &NodeRef, handle: Handle, access: Access) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    only_files(&node)?;
    let counted = cx.count(node.object);
    cx.wait_for_unlink(node.object);
    let mut grants = Vec::new();
    if !grant_open(cx, &mut grants, &node) {
        return Err(Fault::STALE);
    }
    let fd = open_as_caller(cx, &node, access)?;
    cx.resolver().note_handle(&node);
    cx.files.insert_reopened(handle, open_file(&node, fd, access, counted))?;
    adopt(cx, &node);
    let (_, attr) = cx.attr_now(&node)?;
    Ok(Outcome { reply: Reply::Opened { handle, attr }, after: Vec::new(), grants })
}

fn grant_open(cx: Context<'_>, grants: &mut Vec<Grant>, node: &Node) -> bool {
    let there = cx.grant_attr_to_reader(grants, node);
    cx.grant(grants, node, LeaseScope::Data);
    there
}

/// Opens a resolved regular file with the caller's rights.
pub(crate) fn open_as_caller(cx: Context<'_>, node: &Node, access: Access) -> Result<OwnedFd> {
    only_files(node)?;
    let mut flags = flags_of(access);
    if access.truncate {
        flags |= OFlags::TRUNC;
    }
    let fd = {
        let _change = access.truncate.then(|| TrackedWrite::begin(cx, node.id, &node.fd)).transpose()?;
        let _acting = cx.act_on(node)?;
        match reopen(node, flags) {
            // A file with the append-only flag (`chattr +a`) can be opened for writing only with `O_APPEND`.
            Err(Fault(Errno::PERM)) if access.is_append_only() => reopen(node, flags | OFlags::APPEND)?,
            opened => opened?,
        }
    };
    if access.truncate {
        cx.call_leases.changed((0, u64::MAX));
    }
    buffered(without_atime(fd), access)
}

/// Puts an open file into the session's table.
pub(crate) fn insert_open(
    cx: Context<'_>,
    node: &Node,
    fd: OwnedFd,
    access: Access,
    counted: OpenRef,
) -> Result<Handle> {
    let handle = cx.files.insert(open_file(node, fd, access, counted))?;
    adopt(cx, node);
    Ok(handle)
}

fn open_file(node: &Node, fd: OwnedFd, access: Access, counted: OpenRef) -> OpenFile {
    let (readable, writable) = (access.read || !access.write, access.write);
    let position = Mutex::new(());
    let (node, object) = (node.id, node.object);
    let append_only = writable && rustix::fs::fcntl_getfl(&fd).is_ok_and(|how| how.contains(OFlags::APPEND));
    OpenFile { node, object, fd, readable, writable, append_only, syncs: access.sync, position, counted }
}

/// Hands an orphan of an earlier server to the session that opened it.
fn adopt(cx: Context<'_>, node: &Node) {
    if let Some(orphan) = cx.resolver().orphans.adopt(node.id) {
        cx.files.leases().homes.set_orphan(node.object, orphan);
    }
}

/// Opens a file, under a client-assigned handle, that the client's kernel opened without the server. On failure
/// nothing is kept; the client's later calls resolve the file by its node id.
pub(crate) fn pin_open(cx: Context<'_>, place: &NodeRef, names: &[Name], handle: Handle) -> Result<()> {
    let node = match cx.resolver().node(place, cx.files) {
        Err(Fault::STALE) if !names.is_empty() => {
            cx.resolver().walk(place.node, names)?;
            cx.resolver().node(place, cx.files)?
        }
        found => found?,
    };
    only_files(&node)?;
    let counted = cx.count(node.object);
    cx.wait_for_unlink(node.object);
    let fd = {
        let _acting = cx.act_unless_vouched()?;
        without_atime(reopen(&node, OFlags::RDONLY)?)
    };
    let access =
        Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
    cx.files.insert_as(Some(handle), Arc::new(open_file(&node, fd, access, counted)))?;
    adopt(cx, &node);
    Ok(())
}

/// Opens a file that is about to lose a name, with the widest rights that the server has on it: the client's kernel
/// has checked the open that it represents. Without a vouching kernel the caller's rights are used.
pub(crate) fn pin(cx: Context<'_>, node: &Node) -> Result<Handle> {
    only_files(node)?;
    let attempts = [(OFlags::RDWR, true, true), (OFlags::RDONLY, true, false), (OFlags::WRONLY, false, true)];
    let mut refused = Fault(Errno::ACCES);
    for (flags, read, write) in attempts {
        let opened = cx.act_unless_vouched().and_then(|_acting| reopen(node, flags));
        match opened {
            Ok(fd) => {
                let access =
                    Access { read, write, truncate: false, direct: false, sync: false, append: false };
                return insert_open(cx, node, fd, access, cx.count(node.object));
            }
            Err(fault) => refused = fault,
        }
    }
    Err(refused)
}

/// Clears `O_DIRECT` once the open has shown that the file supports it: replies pass through unaligned buffers.
pub(crate) fn buffered(fd: OwnedFd, access: Access) -> Result<OwnedFd> {
    if access.direct {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags - OFlags::DIRECT)?;
    }
    Ok(fd)
}

pub(crate) fn flags_of(access: Access) -> OFlags {
    let mut flags = match (access.read, access.write) {
        (true, true) => OFlags::RDWR,
        (false, true) => OFlags::WRONLY,
        _ => OFlags::RDONLY,
    };
    if access.direct {
        flags |= OFlags::DIRECT;
    }
    if access.sync {
        flags |= OFlags::DSYNC;
    }
    flags
}

/// A descriptor for file data.
pub(crate) enum DataFile {
    Open(Arc<OpenFile>),
    Temporary(Object, Arc<OwnedFd>),
}

impl DataFile {
    pub(crate) fn fd(&self) -> &OwnedFd {
        match self {
            DataFile::Open(file) => &file.fd,
            DataFile::Temporary(_, fd) => fd,
        }
    }

    pub(crate) fn object(&self) -> Object {
        match self {
            DataFile::Open(file) => file.object,
            DataFile::Temporary(object, _) => *object,
        }
    }

    /// Locks the descriptor's own file position.
    pub(crate) fn lock_position(&self) -> Option<parking_lot::MutexGuard<'_, ()>> {
        match self {
            DataFile::Open(file) => Some(file.position.lock()),
            DataFile::Temporary(..) => None,
        }
    }
}

/// Returns a descriptor for reading: an open file, or one that the server opens itself. The server uses its own
/// rights, because the caller's kernel checked the open. Without a vouching kernel it uses the caller's rights, each
/// time.
pub(crate) fn for_reading(cx: Context<'_>, place: &NodeRef, handle: Option<Handle>) -> Result<DataFile> {
    if let Some(file) = cx.files.find_optional(handle, place.node)? {
        return if file.readable { Ok(DataFile::Open(file)) } else { Err(Fault(Errno::BADF)) };
    }
    if let Some(file) = cx.files.of_node(place.node).filter(|f| f.readable) {
        return Ok(DataFile::Open(file));
    }
    if cx.is_vouched()
        && let Some((object, fd)) = cx.export.read_fds.find(place.node)
    {
        return Ok(DataFile::Temporary(object, fd));
    }
    let node = cx.resolver().node(place, cx.files)?;
    only_files(&node)?;
    let opened = cx.act_unless_vouched().and_then(|_acting| reopen(&node, OFlags::RDONLY))?;
    let fd = Arc::new(without_atime(opened));
    if cx.is_vouched() && cx.resolver().may_cache_fd(&node) {
        cx.export.read_fds.note((node.id, node.object), &fd);
    }
    Ok(DataFile::Temporary(node.object, fd))
}

/// Returns a descriptor for writing. One opened without a handle is not cached, because a file open for writing
/// cannot be executed. `append`: writes go only to the end, the only kind that a file with the append-only flag
/// permits.
pub(crate) fn for_writing(
    cx: Context<'_>,
    place: &NodeRef,
    handle: Option<Handle>,
    append: bool,
) -> Result<DataFile> {
    if let Some(file) = cx.files.find_optional(handle, place.node)? {
        return match (file.writable, append || !file.append_only) {
            (true, true) => Ok(DataFile::Open(file)),
            // fcntl(2) cleared `O_APPEND` on the client; here the kernel would refuse that.
            (true, false) => Err(Fault(Errno::PERM)),
            (false, _) => Err(Fault(Errno::BADF)),
        };
    }
    let fits = |file: &Arc<OpenFile>| file.writable && (append || !file.append_only);
    if let Some(file) = cx.files.of_node(place.node).filter(fits) {
        return Ok(DataFile::Open(file));
    }
    let node = cx.resolver().node(place, cx.files)?;
    only_files(&node)?;
    let opened = cx.act_unless_vouched().and_then(|_acting| match reopen(&node, OFlags::WRONLY) {
        Err(Fault(Errno::PERM)) if append => reopen(&node, OFlags::WRONLY | OFlags::APPEND),
        opened => opened,
    })?;
    Ok(DataFile::Temporary(node.object, Arc::new(opened)))
}

pub(crate) fn only_files(node: &Node) -> Result<()> {
    match node.stat.attr.kind() {
        Kind::File => Ok(()),
        Kind::Directory => Err(Fault(Errno::ISDIR)),
        Kind::Symlink => Err(Fault(Errno::LOOP)),
        _ => Err(Fault(Errno::NXIO)),
    }
}
