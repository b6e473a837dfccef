//! Opening and closing files.

use super::super::context::CallContext;
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
pub(super) async fn fresh(cx: &CallContext, uid: u32, place: &NodeRef, how: u32) -> Result<Arc<Fid>, Errno> {
    cx.check_file(uid, place).await?;
    opened(cx, uid, place, how).await
}

/// Opens a file for an access. A file with the append-only flag is written by a fid that appends.
async fn fresh_for(cx: &CallContext, uid: u32, place: &NodeRef, access: Access) -> Result<Arc<Fid>, Errno> {
    let how = of_access(access);
    match fresh(cx, uid, place, how).await {
        Err(Errno::PERM) if access.is_append_only() => fresh(cx, uid, place, how | flags::APPEND).await,
        other => other,
    }
}

/// Opens a directory for reading.
pub(super) async fn directory(cx: &CallContext, uid: u32, dir: &NodeRef) -> Result<Arc<Fid>, Errno> {
    // Later requests about the directory use this fid.
    cx.resolve_dir(uid, dir).await?;
    opened(cx, uid, dir, flags::RDONLY | flags::DIRECTORY).await
}

/// Opens a node. If its remembered fid leads nowhere, the node is walked to again, once.
async fn opened(cx: &CallContext, uid: u32, place: &NodeRef, how: u32) -> Result<Arc<Fid>, Errno> {
    let known = cx.shared().nodes.known(uid, place.node).is_some();
    match open_once(cx, uid, place, how).await {
        Err(Errno::NOENT | Errno::STALE) if known => {
            cx.shared().nodes.forget(uid, place.node);
            open_once(cx, uid, place, how).await
        }
        other => other,
    }
    .map_err(stale)
}

async fn open_once(cx: &CallContext, uid: u32, place: &NodeRef, how: u32) -> Result<Arc<Fid>, Errno> {
    let fid = cx.own_fid(uid, place).await?;
    open_fid(cx, &fid, place.node, how).await?;
    Ok(fid)
}

async fn open_fid(cx: &CallContext, fid: &Fid, node: NodeId, how: u32) -> Result<(), Errno> {
    let message = Tmessage::Lopen { fid: fid.number(), flags: how };
    let Rmessage::Lopen { qid, .. } = cx.request(message).await? else { return Err(Errno::PROTO) };
    if cx.shared().node(qid) == node { Ok(()) } else { Err(Errno::STALE) }
}

pub(super) async fn open(cx: &CallContext, uid: u32, place: &NodeRef, access: Access) -> Outcome {
    let fid = fresh_for(cx, uid, place, access).await?;
    let handle = cx.shared().files.add(OpenFile::new(uid, place.node, Arc::clone(&fid)));
    open_reply(cx, &fid, place.node, handle).await
}

pub(super) async fn reopen(
    cx: &CallContext,
    uid: u32,
    place: &NodeRef,
    handle: Handle,
    access: Access,
) -> Outcome {
    if cx.shared().files.is_open(handle) {
        return Err(Errno::INVAL);
    }
    let access = Access { truncate: false, ..access };
    let fid = fresh_for(cx, uid, place, access).await?;
    {
        let mut shared = cx.shared();
        if shared.files.is_open(handle) {
            return Err(Errno::INVAL);
        }
        shared.files.add_as(handle, OpenFile::new(uid, place.node, Arc::clone(&fid)));
    }
    open_reply(cx, &fid, place.node, handle).await
}

/// The reply for an opened file; without its attributes it is closed again.
async fn open_reply(cx: &CallContext, fid: &Fid, node: NodeId, handle: Handle) -> Outcome {
    match cx.attributes_by(fid, node).await {
        Ok(attr) => {
            let grants = [(node, LeaseScope::Attributes), (node, LeaseScope::Data)];
            Ok(CallReply::plain(Reply::Opened { handle, attr }).granting(grants))
        }
        Err(errno) => {
            cx.shared().files.remove(handle);
            Err(errno)
        }
    }
}

/// Keeps a file readable that the client's kernel has open, under a handle that the client chose.
pub(super) async fn pin_open(cx: &CallContext, uid: u32, place: &NodeRef, handle: Handle) -> Outcome {
    cx.shared().files.pin_begins(handle);
    let fid = fresh(cx, uid, place, flags::RDONLY).await;
    let mut shared = cx.shared();
    let is_wanted = shared.files.pin_ends(handle) && !shared.files.is_open(handle);
    if let (Ok(fid), true) = (fid, is_wanted) {
        shared.files.add_as(handle, OpenFile::new(uid, place.node, fid));
    }
    Ok(CallReply::plain(Reply::Done))
}

/// Opens a file that is about to be unlinked, also for writing if permitted.
pub(super) async fn pin(cx: &CallContext, uid: u32, fid: &Fid, node: NodeId) -> Option<Handle> {
    let mut access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    for write in [true, false] {
        let Ok((own, _)) = cx.walk(fid, &[]).await else { continue };
        access.write = write;
        if open_fid(cx, &own, node, of_access(access)).await.is_ok() {
            return Some(cx.shared().files.add(OpenFile::new(uid, node, own)));
        }
    }
    None
}

pub(super) fn release(cx: &CallContext, handles: &[Handle]) {
    let files: Vec<_> = {
        let mut shared = cx.shared();
        handles.iter().filter_map(|handle| shared.files.remove(*handle)).collect()
    };
    drop(files);
}
