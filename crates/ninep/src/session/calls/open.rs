//! Opening and closing files.

use super::super::executor::CallContext;
use super::super::fids::Fid;
use super::super::files::OpenFile;
use super::super::reply::{CallReply, Outcome};
use super::super::resolve::stale;
use crate::{Rmessage, Tmessage, flags};
use nigh_types::{Access, Errno, Handle, LeaseScope, NodeId, NodeRef, Reply};
use std::sync::Arc;

pub(super) fn of_access(access: Access) -> u32 {
    let way = match (access.read, access.write) {
        (true, true) => flags::RDWR,
        (false, true) => flags::WRONLY,
        (_, false) => flags::RDONLY,
    };
    let truncate = if access.truncate { flags::TRUNC } else { 0 };
    let sync = if access.sync { flags::DSYNC } else { 0 };
    // Not `O_DIRECT`: a server's buffers are not aligned.
    way | truncate | sync
}

/// Opens a file by a fid that is not shared.
pub(super) async fn fresh(
    desk: &CallContext,
    uid: u32,
    place: &NodeRef,
    how: u32,
) -> Result<Arc<Fid>, Errno> {
    desk.check_file(uid, place).await?;
    opened(desk, uid, place, how).await
}

/// Opens a file for an access. A file with the append-only flag is written by a fid that appends.
async fn fresh_for(desk: &CallContext, uid: u32, place: &NodeRef, access: Access) -> Result<Arc<Fid>, Errno> {
    let how = of_access(access);
    match fresh(desk, uid, place, how).await {
        Err(Errno::PERM) if access.is_append_only() => fresh(desk, uid, place, how | flags::APPEND).await,
        other => other,
    }
}

/// Opens a directory for reading.
pub(super) async fn directory(desk: &CallContext, uid: u32, dir: &NodeRef) -> Result<Arc<Fid>, Errno> {
    // Later requests about the directory use this fid.
    desk.resolve_dir(uid, dir).await?;
    opened(desk, uid, dir, flags::RDONLY | flags::DIRECTORY).await
}

/// Opens a node. If its remembered fid leads nowhere, the node is walked to again, once.
async fn opened(desk: &CallContext, uid: u32, place: &NodeRef, how: u32) -> Result<Arc<Fid>, Errno> {
    let known = desk.shared().nodes.known(uid, place.node).is_some();
    match open_once(desk, uid, place, how).await {
        Err(Errno::NOENT | Errno::STALE) if known => {
            desk.shared().nodes.forget(uid, place.node);
            open_once(desk, uid, place, how).await
        }
        other => other,
    }
    .map_err(stale)
}

async fn open_once(desk: &CallContext, uid: u32, place: &NodeRef, how: u32) -> Result<Arc<Fid>, Errno> {
    let fid = desk.own_fid(uid, place).await?;
    open_fid(desk, &fid, place.node, how).await?;
    Ok(fid)
}

async fn open_fid(desk: &CallContext, fid: &Fid, node: NodeId, how: u32) -> Result<(), Errno> {
    let message = Tmessage::Lopen { fid: fid.number(), flags: how };
    let Rmessage::Lopen { qid, .. } = desk.request(message).await? else { return Err(Errno::PROTO) };
    if desk.shared().nodes.node(qid) == node { Ok(()) } else { Err(Errno::STALE) }
}

pub(super) async fn open(desk: &CallContext, uid: u32, place: &NodeRef, access: Access) -> Outcome {
    let fid = fresh_for(desk, uid, place, access).await?;
    let handle = desk.shared().files.add(OpenFile::new(uid, place.node, Arc::clone(&fid)));
    open_reply(desk, &fid, place.node, handle).await
}

pub(super) async fn reopen(
    desk: &CallContext,
    uid: u32,
    place: &NodeRef,
    handle: Handle,
    access: Access,
) -> Outcome {
    if desk.shared().files.is_open(handle) {
        return Err(Errno::INVAL);
    }
    let access = Access { truncate: false, ..access };
    let fid = fresh_for(desk, uid, place, access).await?;
    {
        let mut shared = desk.shared();
        if shared.files.is_open(handle) {
            return Err(Errno::INVAL);
        }
        shared.files.add_as(handle, OpenFile::new(uid, place.node, Arc::clone(&fid)));
    }
    open_reply(desk, &fid, place.node, handle).await
}

/// The reply for an opened file; without its attributes it is closed again.
async fn open_reply(desk: &CallContext, fid: &Fid, node: NodeId, handle: Handle) -> Outcome {
    match desk.attributes_by(fid, node).await {
        Ok(attr) => {
            let grants = [(node, LeaseScope::Attributes), (node, LeaseScope::Data)];
            Ok(CallReply::plain(Reply::Opened { handle, attr }).granting(grants))
        }
        Err(errno) => {
            desk.shared().files.remove(handle);
            Err(errno)
        }
    }
}

/// Keeps a file readable that the client's kernel has open, under a handle that the client chose.
pub(super) async fn pin_open(desk: &CallContext, uid: u32, place: &NodeRef, handle: Handle) -> Outcome {
    desk.shared().files.pin_begins(handle);
    let fid = fresh(desk, uid, place, flags::RDONLY).await;
    let mut shared = desk.shared();
    let is_wanted = shared.files.pin_ends(handle) && !shared.files.is_open(handle);
    if let (Ok(fid), true) = (fid, is_wanted) {
        shared.files.add_as(handle, OpenFile::new(uid, place.node, fid));
    }
    Ok(CallReply::plain(Reply::Done))
}

/// Opens a file that is about to be unlinked, also for writing if permitted.
pub(super) async fn pin(desk: &CallContext, uid: u32, fid: &Fid, node: NodeId) -> Option<Handle> {
    let mut access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    for write in [true, false] {
        let Ok((own, _)) = desk.walk(fid, &[]).await else { continue };
        access.write = write;
        if open_fid(desk, &own, node, of_access(access)).await.is_ok() {
            return Some(desk.shared().files.add(OpenFile::new(uid, node, own)));
        }
    }
    None
}

pub(super) fn release(desk: &CallContext, handles: &[Handle]) {
    let files: Vec<_> = {
        let mut shared = desk.shared();
        handles.iter().filter_map(|handle| shared.files.remove(*handle)).collect()
    };
    drop(files);
}
