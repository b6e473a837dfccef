//! Attributes of an inode, and of its filesystem.

use super::super::context::CallContext;
use super::super::node_ids::is_directory;
use super::super::reply::{CallReply, Outcome};
use super::super::requests::setattr;
use super::data;
use crate::{Rmessage, Tmessage};
use nigh_types::{Attr, Errno, Handle, LeaseScope, NodeId, NodeRef, Reply, SetAttr, Space};

pub(super) async fn get(cx: &CallContext, uid: u32, place: &NodeRef) -> Outcome {
    cx.attributes_of(uid, place).await.map(answer)
}

fn answer((node, attr): (NodeId, Attr)) -> CallReply {
    CallReply::plain(Reply::Attr(node, attr)).granting([(node, LeaseScope::Attributes)])
}

pub(super) async fn space(cx: &CallContext, uid: u32, place: &NodeRef) -> Outcome {
    let (answer, _) = cx.request_of(uid, place, |fid| Tmessage::Statfs { fid }).await?;
    let Rmessage::Statfs { space } = answer else { return Err(Errno::PROTO) };
    Ok(CallReply::plain(Reply::Space(Space {
        blocks: space.blocks,
        blocks_free: space.free,
        blocks_available: space.available,
        files: space.files,
        files_free: space.files_free,
        block_size: space.block_bytes,
        fragment_size: space.block_bytes,
        name_max: space.longest_name,
    })))
}

/// Finds data or a hole. 9P has no holes: all of a file is data.
pub(super) async fn seek(cx: &CallContext, uid: u32, place: &NodeRef, offset: u64, data: bool) -> Outcome {
    let (_, attr) = cx.attributes_of(uid, place).await?;
    match (offset < attr.size, data) {
        (false, _) => Err(Errno::NXIO),
        (true, true) => Ok(CallReply::plain(Reply::Offset(offset))),
        (true, false) => Ok(CallReply::plain(Reply::Offset(attr.size))),
    }
}

pub(super) async fn set(
    cx: &CallContext,
    uid: u32,
    place: &NodeRef,
    handle: Option<Handle>,
    set: &SetAttr,
) -> Outcome {
    if set.size.is_some() && is_directory(place.node) {
        return Err(Errno::ISDIR);
    }
    let open = handle.and_then(|handle| cx.shared().files.fid(handle, place.node));
    if let Some(fid) = open {
        cx.request(setattr(fid.number(), set)).await?;
        let attr = data::attributes(cx, uid, &fid, place).await?;
        return Ok(answer((place.node, attr)));
    }
    let changed = cx.request_of(uid, place, |fid| setattr(fid, set)).await;
    if changed.as_ref().err() == Some(&Errno::STALE) {
        // The file was moved, and no name is known for it: the handle's own fid is used if it still refers to this
        // file.
        let moved = cx.shared().files.fid_moved(handle, place.node).ok().flatten();
        let fid = moved.ok_or(Errno::STALE)?;
        cx.attributes_by(&fid, place.node).await?;
        cx.request(setattr(fid.number(), set)).await?;
    } else {
        changed?;
    }
    get(cx, uid, place).await
}
