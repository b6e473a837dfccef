//! Calls that remove a name.

use super::super::context::CallContext;
use super::super::fids::Fid;
use super::super::node_ids::is_directory;
use super::super::reply::{CallReply, Outcome};
use super::super::requests::getattr;
use super::super::resolve::ResolvedFid;
use super::open;
use crate::{Tmessage, flags};
use nigh_types::{Attr, Errno, Kind, LeaseScope, Name, NodeId, NodeRef, Reply};
use std::sync::Arc;

/// The inode at a name that is about to be removed or replaced.
pub(super) struct Victim {
    pub fid: Arc<Fid>,
    pub node: NodeId,
    pub attr: Attr,
}

/// Looks up the victim at a name; `None`: there is none.
pub(super) async fn victim(
    cx: &CallContext,
    uid: u32,
    dir: &NodeRef,
    name: &Name,
) -> Result<(Arc<Fid>, Option<Victim>), Errno> {
    if !is_directory(dir.node) {
        return Err(Errno::NOTDIR);
    }
    let ResolvedFid { fid: mut at, remembered } = cx.resolve(uid, dir).await?;
    let mut walked = cx.walk_one(&at, name).await;
    if matches!(walked, Err(Errno::NOENT | Errno::STALE)) && remembered {
        // The directory itself may have been moved.
        at = cx.resolve_again(uid, dir).await?;
        walked = cx.walk_one(&at, name).await;
    }
    let (fid, node) = match walked {
        Err(Errno::NOENT) => return Ok((at, None)),
        walked => walked?,
    };
    match cx.attributes(&fid).await {
        Ok((told, attr)) if told == node => Ok((at, Some(Victim { fid, node, attr }))),
        Ok(_) | Err(Errno::NOENT) => Ok((at, None)),
        Err(errno) => Err(errno),
    }
}

pub(super) async fn unlink(
    cx: &CallContext,
    uid: u32,
    dir: &NodeRef,
    name: &Name,
    keep: Option<NodeId>,
) -> Outcome {
    let (at, victim) = victim(cx, uid, dir, name).await?;
    let victim = victim.ok_or(Errno::NOENT)?;
    if victim.attr.is_dir() {
        return Err(Errno::ISDIR);
    }
    let keeps = keep == Some(victim.node) && victim.attr.kind() == Kind::File;
    let kept = if keeps { open::pin(cx, uid, &victim.fid, victim.node).await } else { None };
    if let Err(errno) = remove(cx, &at, name, &victim.fid, 0).await {
        kept.into_iter().for_each(|handle| open::release(cx, &[handle]));
        return Err(errno);
    }
    removed(cx, uid, (dir, &at, name), &victim, kept).await
}

pub(super) async fn rmdir(cx: &CallContext, uid: u32, dir: &NodeRef, name: &Name) -> Outcome {
    let (at, victim) = victim(cx, uid, dir, name).await?;
    let victim = victim.ok_or(Errno::NOENT)?;
    if !victim.attr.is_dir() {
        return Err(Errno::NOTDIR);
    }
    remove(cx, &at, name, &victim.fid, flags::REMOVE_DIRECTORY).await?;
    removed(cx, uid, (dir, &at, name), &victim, None).await
}

/// Removes by name if the server can, else by the fid that the name led to a moment ago.
async fn remove(cx: &CallContext, at: &Fid, name: &Name, fid: &Fid, how: u32) -> Result<(), Errno> {
    let knows = cx.shared().unlinkat;
    if knows {
        let (dir, name) = (at.number(), name.as_bytes().to_vec());
        match cx.request(Tmessage::Unlinkat { dir, name, flags: how }).await {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => cx.shared().unlinkat = false,
            other => return other.map(drop),
        }
    }
    // The server clunks the fid even if this fails.
    let asked = cx.request(Tmessage::Remove { fid: fid.number() });
    fid.mark_ended();
    asked.await.map(drop)
}

async fn removed(
    cx: &CallContext,
    uid: u32,
    (dir, at, name): (&NodeRef, &Fid, &Name),
    victim: &Victim,
    kept: Option<nigh_types::Handle>,
) -> Outcome {
    let own = cx.request(getattr(at.number()));
    let left = remaining_attr(cx, uid, (dir.node, name), victim).await;
    let told = cx.attributes_if_sent(own.await);
    let grants = [(dir.node, LeaseScope::NegativeDentry)];
    let reply = Reply::Removed { node: victim.node, pinned: kept };
    Ok(CallReply::plain(reply).granting(grants).after([told, Some(left)]))
}

/// The attributes of an inode that has lost a name, read by another name if one is known. Else nothing is known of it,
/// and it is reported as unlinked.
pub(super) async fn remaining_attr(
    cx: &CallContext,
    uid: u32,
    (dir, name): (NodeId, &Name),
    victim: &Victim,
) -> (NodeId, Attr) {
    let others = {
        let mut shared = cx.shared();
        shared.nodes.note_name_removed(victim.node, (dir, name));
        // If the server cannot return attributes of an open file, it keeps the known ones with one link less.
        let nlink = victim.attr.nlink.saturating_sub(1);
        shared.nodes.note_attr(victim.node, Attr { nlink, ..victim.attr });
        shared.nodes.links(victim.node)
    };
    if victim.attr.nlink > 1 && !victim.attr.is_dir() {
        for hint in others {
            let place = NodeRef { node: victim.node, path_hint: Some(hint) };
            if let Ok(told) = cx.attributes_of(uid, &place).await {
                return told;
            }
        }
    }
    (victim.node, Attr { nlink: 0, ..victim.attr })
}
