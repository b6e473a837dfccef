//! Opening files, and finding the descriptor that a call on file data goes to.

use super::{Context, Outcome, attr_now};
use crate::error::{Fault, Result};
use crate::files::OpenFile;
use crate::reach::{Node, reopen, without_atime};
use nigh_types::{Access, Covers, Errno, Handle, Kind, NodeId, Place, Reply};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(crate) fn open(cx: Context<'_>, place: &Place, access: Access) -> Result<Outcome> {
    let node = cx.reach().node(place, cx.files)?;
    only_files(&node)?;
    cx.files.has_room()?;
    let grants = vec![cx.attr_grant(&node), cx.grant(node.id, Covers::Data)];
    let fd = open_as_caller(cx, &node, access)?;
    cx.reach().note_handle(&node);
    let handle = keep(cx, node.id, fd, access)?;
    let (_, attr) = attr_now(&node)?;
    Ok(Outcome { reply: Reply::Opened { handle, attr }, after: Vec::new(), grants })
}

/// Opens a reached regular file with the caller's rights.
pub(crate) fn open_as_caller(cx: Context<'_>, node: &Node, access: Access) -> Result<OwnedFd> {
    only_files(node)?;
    let mut flags = flags_of(access);
    if access.truncate {
        flags |= OFlags::TRUNC;
    }
    let fd = {
        let _acting = cx.act()?;
        reopen(node, flags)?
    };
    buffered(without_atime(fd), access)
}

/// Puts an open file into the session's table.
pub(crate) fn keep(cx: Context<'_>, node: NodeId, fd: OwnedFd, access: Access) -> Result<Handle> {
    let (readable, writable) = (access.read || !access.write, access.write);
    cx.files.insert(OpenFile { node, fd, readable, writable, position: Mutex::new(()) })
}

/// Pins a file that is about to lose a name, with whatever rights the server can have on it: the
/// client's kernel checked the open that it stands for.
pub(crate) fn pin(cx: Context<'_>, node: &Node) -> Result<Handle> {
    only_files(node)?;
    let attempts = [(OFlags::RDWR, true, true), (OFlags::RDONLY, true, false), (OFlags::WRONLY, false, true)];
    let mut refused = Fault(Errno::ACCES);
    for (flags, readable, writable) in attempts {
        match reopen(node, flags) {
            Ok(fd) => {
                let position = Mutex::new(());
                return cx.files.insert(OpenFile { node: node.id, fd, readable, writable, position });
            }
            Err(fault) => refused = fault,
        }
    }
    Err(refused)
}

/// `O_DIRECT` is proved to be possible, then left to the client: answers pass through buffers that
/// keep no alignment.
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
    Passing(Arc<OwnedFd>),
}

impl DataFile {
    pub(crate) fn fd(&self) -> &OwnedFd {
        match self {
            DataFile::Open(file) => &file.fd,
            DataFile::Passing(fd) => fd,
        }
    }

    /// Held while the descriptor's own position is used.
    pub(crate) fn lock_position(&self) -> Option<parking_lot::MutexGuard<'_, ()>> {
        match self {
            DataFile::Open(file) => Some(file.position.lock()),
            DataFile::Passing(_) => None,
        }
    }
}

/// For reading: the open file, or one that the server opens itself. Not for the caller's own rights:
/// its kernel checked them when it opened the file.
pub(crate) fn for_reading(cx: Context<'_>, place: &Place, handle: Option<Handle>) -> Result<DataFile> {
    if let Some(handle) = handle {
        let file = cx.files.find(handle, place.node)?;
        return if file.readable { Ok(DataFile::Open(file)) } else { Err(Fault(Errno::BADF)) };
    }
    if let Some(file) = cx.files.of_node(place.node).filter(|f| f.readable) {
        return Ok(DataFile::Open(file));
    }
    if let Some(fd) = cx.export.passing_reader(place.node) {
        return Ok(DataFile::Passing(fd));
    }
    let node = cx.reach().node(place, cx.files)?;
    only_files(&node)?;
    let fd = Arc::new(without_atime(reopen(&node, OFlags::RDONLY)?));
    cx.export.note_passing_reader(&node, &fd);
    Ok(DataFile::Passing(fd))
}

/// The same for writing. Without a handle nothing is kept: a file open for writing cannot be run.
pub(crate) fn for_writing(cx: Context<'_>, place: &Place, handle: Option<Handle>) -> Result<DataFile> {
    if let Some(handle) = handle {
        let file = cx.files.find(handle, place.node)?;
        return if file.writable { Ok(DataFile::Open(file)) } else { Err(Fault(Errno::BADF)) };
    }
    if let Some(file) = cx.files.of_node(place.node).filter(|f| f.writable) {
        return Ok(DataFile::Open(file));
    }
    let node = cx.reach().node(place, cx.files)?;
    only_files(&node)?;
    Ok(DataFile::Passing(Arc::new(reopen(&node, OFlags::WRONLY)?)))
}

fn only_files(node: &Node) -> Result<()> {
    match node.stat.attr.kind() {
        Kind::File => Ok(()),
        Kind::Directory => Err(Fault(Errno::ISDIR)),
        Kind::Symlink => Err(Fault(Errno::LOOP)),
        _ => Err(Fault(Errno::NXIO)),
    }
}
