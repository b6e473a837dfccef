//! Opening files, and finding the descriptor that a call on file data goes to.

use super::own::OwnChange;
use super::{Context, Outcome};
use crate::error::{Fault, Result};
use crate::files::OpenFile;
use crate::homes::Counted;
use crate::reach::{Node, reopen, without_atime};
use nigh_native::lease::Object;
use nigh_types::{Access, Covers, Errno, Grant, Handle, Kind, Name, Place, Reply};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(crate) fn open(cx: Context<'_>, place: &Place, access: Access) -> Result<Outcome> {
    match open_once(cx, place, access) {
        // It lost the name by which it was reached, just now: it may be reached otherwise.
        Err(Fault::STALE) => open_once(cx, place, access),
        other => other,
    }
}

fn open_once(cx: Context<'_>, place: &Place, access: Access) -> Result<Outcome> {
    let node = cx.reach().node(place, cx.files)?;
    only_files(&node)?;
    cx.files.has_room()?;
    // Before its name is looked at again: whoever takes that away from here on sees that it is open.
    let counted = cx.count(node.object);
    cx.wait_while_leaving(node.object);
    let mut grants = Vec::new();
    if !access.truncate && !grant_open(cx, &mut grants, &node) {
        return Err(Fault::STALE);
    }
    let fd = open_as_caller(cx, &node, access)?;
    cx.reach().note_handle(&node);
    let handle = keep(cx, &node, fd, access, counted)?;
    if access.truncate {
        cx.stake.done();
        cx.grant_attr(&mut grants, &node);
        cx.grant(&mut grants, &node, Covers::Data);
    }
    let (_, attr) = cx.attr_now(&node)?;
    Ok(Outcome { reply: Reply::Opened { handle, attr }, after: Vec::new(), grants })
}

/// Opens a file again that the client had open under `handle` before the server forgot it: by the caller's
/// rights, as any open.
pub(crate) fn reopen_as(cx: Context<'_>, place: &Place, handle: Handle, access: Access) -> Result<Outcome> {
    let node = cx.reach().node(place, cx.files)?;
    only_files(&node)?;
    let counted = cx.count(node.object);
    cx.wait_while_leaving(node.object);
    let mut grants = Vec::new();
    if !grant_open(cx, &mut grants, &node) {
        return Err(Fault::STALE);
    }
    let fd = open_as_caller(cx, &node, access)?;
    cx.reach().note_handle(&node);
    cx.files.insert_again(handle, open_file(&node, fd, access, counted))?;
    adopt(cx, &node);
    let (_, attr) = cx.attr_now(&node)?;
    Ok(Outcome { reply: Reply::Opened { handle, attr }, after: Vec::new(), grants })
}

fn grant_open(cx: Context<'_>, grants: &mut Vec<Grant>, node: &Node) -> bool {
    let there = cx.grant_attr_to_reader(grants, node);
    cx.grant(grants, node, Covers::Data);
    there
}

/// Opens a reached regular file with the caller's rights.
pub(crate) fn open_as_caller(cx: Context<'_>, node: &Node, access: Access) -> Result<OwnedFd> {
    only_files(node)?;
    let mut flags = flags_of(access);
    if access.truncate {
        flags |= OFlags::TRUNC;
    }
    let fd = {
        let _change = access.truncate.then(|| OwnChange::begin(cx, node.id, &node.fd)).transpose()?;
        let _acting = cx.act_on(node)?;
        match reopen(node, flags) {
            // So is a file with the append-only flag opened (`chattr +a`), and no other way to write.
            Err(Fault(Errno::PERM)) if access.is_append_only() => reopen(node, flags | OFlags::APPEND)?,
            opened => opened?,
        }
    };
    if access.truncate {
        cx.stake.changed((0, u64::MAX));
    }
    buffered(without_atime(fd), access)
}

/// Puts an open file into the session's table.
pub(crate) fn keep(
    cx: Context<'_>,
    node: &Node,
    fd: OwnedFd,
    access: Access,
    counted: Counted,
) -> Result<Handle> {
    let handle = cx.files.insert(open_file(node, fd, access, counted))?;
    adopt(cx, node);
    Ok(handle)
}

fn open_file(node: &Node, fd: OwnedFd, access: Access, counted: Counted) -> OpenFile {
    let (readable, writable) = (access.read || !access.write, access.write);
    let position = Mutex::new(());
    let (node, object) = (node.id, node.object);
    let append_only = writable && rustix::fs::fcntl_getfl(&fd).is_ok_and(|how| how.contains(OFlags::APPEND));
    OpenFile { node, object, fd, readable, writable, append_only, syncs: access.sync, position, counted }
}

/// An orphan that an earlier server left is somebody's again.
fn adopt(cx: Context<'_>, node: &Node) {
    if let Some(orphan) = cx.reach().orphans.adopt(node.id) {
        cx.files.holding().leases.homes.set_aside(node.object, orphan);
    }
}

/// Opens a file for a client whose kernel has it open without our knowing, under the client's own number. Where
/// that cannot be had nothing is kept: what the client does with it then goes by its place.
pub(crate) fn keep_for(cx: Context<'_>, place: &Place, names: &[Name], handle: Handle) -> Result<()> {
    let node = match cx.reach().node(place, cx.files) {
        Err(Fault::STALE) if !names.is_empty() => {
            cx.reach().walk(place.node, names)?;
            cx.reach().node(place, cx.files)?
        }
        found => found?,
    };
    only_files(&node)?;
    let counted = cx.count(node.object);
    cx.wait_while_leaving(node.object);
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

/// Pins a file that is about to lose a name, with whatever rights the server can have on it: the
/// client's kernel checked the open that it stands for. (Where nobody vouches for that, the caller's.)
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
                return keep(cx, node, fd, access, cx.count(node.object));
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
    Passing(Object, Arc<OwnedFd>),
}

impl DataFile {
    pub(crate) fn fd(&self) -> &OwnedFd {
        match self {
            DataFile::Open(file) => &file.fd,
            DataFile::Passing(_, fd) => fd,
        }
    }

    pub(crate) fn object(&self) -> Object {
        match self {
            DataFile::Open(file) => file.object,
            DataFile::Passing(object, _) => *object,
        }
    }

    /// Held while the descriptor's own position is used.
    pub(crate) fn lock_position(&self) -> Option<parking_lot::MutexGuard<'_, ()>> {
        match self {
            DataFile::Open(file) => Some(file.position.lock()),
            DataFile::Passing(..) => None,
        }
    }
}

/// For reading: the open file, or one that the server opens itself. Not with the caller's own rights:
/// its kernel checked them when it opened the file. (Where nobody vouches for that, with them, each time.)
pub(crate) fn for_reading(cx: Context<'_>, place: &Place, handle: Option<Handle>) -> Result<DataFile> {
    if let Some(file) = cx.files.find_told(handle, place.node)? {
        return if file.readable { Ok(DataFile::Open(file)) } else { Err(Fault(Errno::BADF)) };
    }
    if let Some(file) = cx.files.of_node(place.node).filter(|f| f.readable) {
        return Ok(DataFile::Open(file));
    }
    if cx.is_vouched()
        && let Some((object, fd)) = cx.export.readers.find(place.node)
    {
        return Ok(DataFile::Passing(object, fd));
    }
    let node = cx.reach().node(place, cx.files)?;
    only_files(&node)?;
    let opened = cx.act_unless_vouched().and_then(|_acting| reopen(&node, OFlags::RDONLY))?;
    let fd = Arc::new(without_atime(opened));
    if cx.is_vouched() && cx.reach().may_hold(&node) {
        cx.export.readers.note((node.id, node.object), &fd);
    }
    Ok(DataFile::Passing(node.object, fd))
}

/// The same for writing. Without a handle nothing is kept: a file open for writing cannot be run. `append`: only at the
/// end, which is all that a file with the append-only flag can be opened for.
pub(crate) fn for_writing(
    cx: Context<'_>,
    place: &Place,
    handle: Option<Handle>,
    append: bool,
) -> Result<DataFile> {
    if let Some(file) = cx.files.find_told(handle, place.node)? {
        return match (file.writable, append || !file.append_only) {
            (true, true) => Ok(DataFile::Open(file)),
            // fcntl(2) takes `O_APPEND` away on the client; here the kernel would refuse that.
            (true, false) => Err(Fault(Errno::PERM)),
            (false, _) => Err(Fault(Errno::BADF)),
        };
    }
    let fits = |file: &Arc<OpenFile>| file.writable && (append || !file.append_only);
    if let Some(file) = cx.files.of_node(place.node).filter(fits) {
        return Ok(DataFile::Open(file));
    }
    let node = cx.reach().node(place, cx.files)?;
    only_files(&node)?;
    let opened = cx.act_unless_vouched().and_then(|_acting| match reopen(&node, OFlags::WRONLY) {
        Err(Fault(Errno::PERM)) if append => reopen(&node, OFlags::WRONLY | OFlags::APPEND),
        opened => opened,
    })?;
    Ok(DataFile::Passing(node.object, Arc::new(opened)))
}

pub(crate) fn only_files(node: &Node) -> Result<()> {
    match node.stat.attr.kind() {
        Kind::File => Ok(()),
        Kind::Directory => Err(Fault(Errno::ISDIR)),
        Kind::Symlink => Err(Fault(Errno::LOOP)),
        _ => Err(Fault(Errno::NXIO)),
    }
}
