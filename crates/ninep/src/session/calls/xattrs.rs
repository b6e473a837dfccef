//! Extended attributes: each is read or written through a fid of its own.

use super::super::context::CallContext;
use super::super::fids::Fid;
use super::super::reply::{CallReply, Outcome};
use super::{attrs, data};
use crate::{Data, Rmessage, Tmessage};
use nigh_types::{Errno, LeaseScope, NodeRef, Reply, XattrSet};
use std::sync::Arc;

/// The longest value or list that Linux takes (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const LONGEST: u64 = 65_536;
/// `XATTR_REPLACE`: without a value, 9P interprets it as a removal.
const REPLACE: u32 = 2;

/// The value of an xattr, or, without a name, the list of all names.
async fn bytes(cx: &CallContext, uid: u32, place: &NodeRef, name: &[u8]) -> Result<Vec<u8>, Errno> {
    let reached = cx.resolve(uid, place).await?;
    match bytes_by(cx, &reached.fid, name).await {
        Err(Errno::NOENT | Errno::STALE) if reached.remembered => {
            let at = cx.resolve_again(uid, place).await?;
            bytes_by(cx, &at, name).await
        }
        bytes => bytes,
    }
}

async fn bytes_by(cx: &CallContext, at: &Fid, name: &[u8]) -> Result<Vec<u8>, Errno> {
    let fid = cx.new_fid();
    let message = Tmessage::Xattrwalk { fid: at.number(), new: fid.number(), name: name.to_vec() };
    let Rmessage::Xattrwalk { size } = cx.request_fid(message, &fid).await? else {
        return Err(Errno::PROTO);
    };
    fid.mark_live();
    if size > LONGEST {
        return Err(Errno::TOOBIG);
    }
    let size = u32::try_from(size).map_err(|_| Errno::TOOBIG)?;
    let bytes = data::bytes(cx, &fid, (0, size), Some(u64::from(size))).await?;
    if bytes.len() == size as usize { Ok(bytes) } else { Err(Errno::IO) }
}

/// Lists all names; values are read one by one.
pub(super) async fn list(cx: &CallContext, uid: u32, place: &NodeRef) -> Outcome {
    let names = match bytes(cx, uid, place, b"").await {
        // There are none, and none can be created.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Vec::new(),
        names => names?,
    };
    let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let items = names.map(|name| (name.into(), None)).collect();
    let grants = [(place.node, LeaseScope::Attributes)];
    Ok(CallReply::plain(Reply::Xattrs(XattrSet { items })).granting(grants))
}

pub(super) async fn get(cx: &CallContext, uid: u32, place: &NodeRef, name: &[u8]) -> Outcome {
    if name.is_empty() {
        return Err(Errno::RANGE);
    }
    bytes(cx, uid, place, name).await.map(|value| CallReply::plain(Reply::Value(value)))
}

pub(super) async fn remove(cx: &CallContext, uid: u32, place: &NodeRef, name: &[u8]) -> Outcome {
    change(cx, uid, place, name, &[], REPLACE).await
}

pub(super) async fn set(
    cx: &CallContext,
    uid: u32,
    place: &NodeRef,
    name: &[u8],
    value: &[u8],
    flags: u32,
) -> Outcome {
    if value.is_empty() {
        // A server would remove the xattr.
        return Err(Errno::OPNOTSUPP);
    }
    change(cx, uid, place, name, value, flags).await
}

async fn change(
    cx: &CallContext,
    uid: u32,
    place: &NodeRef,
    name: &[u8],
    value: &[u8],
    flags: u32,
) -> Outcome {
    let reached = cx.resolve(uid, place).await?;
    match change_by(cx, uid, (place, &reached.fid), name, value, flags).await {
        Err(Errno::NOENT | Errno::STALE) if reached.remembered => {
            let at = cx.resolve_again(uid, place).await?;
            change_by(cx, uid, (place, &at), name, value, flags).await?;
        }
        changed => changed?,
    }
    attrs::get(cx, uid, place).await
}

async fn change_by(
    cx: &CallContext,
    uid: u32,
    (place, at): (&NodeRef, &Arc<Fid>),
    name: &[u8],
    value: &[u8],
    flags: u32,
) -> Result<(), Errno> {
    let fid = unopened(cx, uid, place, at).await?;
    let name = name.to_vec();
    let message = Tmessage::Xattrcreate { fid: fid.number(), name, size: value.len() as u64, flags };
    cx.request(message).await?;
    let most = cx.shared().most_data() as usize;
    for (offset, part) in (0u64..).step_by(most).zip(value.chunks(most)) {
        let message = Tmessage::Write { fid: fid.number(), offset, data: Data(part.to_vec()) };
        let Rmessage::Write { count } = cx.request(message).await? else { return Err(Errno::PROTO) };
        if count as usize != part.len() {
            return Err(Errno::IO);
        }
    }
    // The change takes effect with the clunk, and an error is reported here.
    let asked = cx.request(Tmessage::Clunk { fid: fid.number() });
    fid.mark_ended();
    asked.await.map(drop)
}

/// Another fid of the node, which becomes the xattr.
async fn unopened(cx: &CallContext, uid: u32, place: &NodeRef, at: &Arc<Fid>) -> Result<Arc<Fid>, Errno> {
    match cx.walk(at, &[]).await {
        Ok((fid, _)) => Ok(fid),
        // The fid is open, and an open fid cannot be walked from.
        Err(_) => {
            cx.shared().nodes.forget(uid, place.node);
            cx.own_fid(uid, place).await
        }
    }
}
