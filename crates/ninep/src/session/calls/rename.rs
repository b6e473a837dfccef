//! Renames.

use super::super::context::CallContext;
use super::super::fids::Fid;
use super::super::node_ids::is_directory;
use super::super::reply::{CallReply, Outcome};
use super::super::requests::getattr;
use super::remove::{Victim, remaining_attr, victim};
use super::{lookup, open};
use crate::Tmessage;
use nigh_types::{Attr, Call, Errno, Kind, LeaseScope, Name, NodeId, NodeRef, Reply};

pub(super) async fn rename(cx: &CallContext, uid: u32, call: &Call) -> Outcome {
    let Call::Rename { from, name, to, new_name, no_replace, exchange, whiteout, keep } = call else {
        return Err(Errno::NOSYS);
    };
    if *no_replace || *exchange || *whiteout {
        return Err(Errno::INVAL);
    }
    let (from_fid, moved) = victim(cx, uid, from, name).await?;
    let moved = moved.ok_or(Errno::NOENT)?;
    let (to_fid, replaced) = victim(cx, uid, to, new_name).await?;
    let is_file = |victim: &&Victim| victim.attr.kind() == Kind::File;
    let kept = match replaced.as_ref().filter(is_file).filter(|victim| *keep == Some(victim.node)) {
        Some(victim) if victim.node != moved.node => open::pin(cx, uid, &victim.fid, victim.node).await,
        _ => None,
    };
    let done = move_it(cx, (&from_fid, name), (&to_fid, new_name), &moved.fid).await;
    if let Err(errno) = done {
        kept.into_iter().for_each(|handle| open::release(cx, &[handle]));
        return Err(errno);
    }
    let reply = Reply::Renamed {
        moved: moved.node,
        replaced: replaced.as_ref().map(|v| v.node),
        pinned: kept,
        whiteout: None,
    };
    let (asked_from, asked_to) =
        (cx.request(getattr(from_fid.number())), cx.request(getattr(to_fid.number())));
    let mut answer = CallReply::plain(reply).granting([(to.node, LeaseScope::Dentry)]);
    if replaced.as_ref().is_none_or(|replaced| replaced.node != moved.node) {
        answer = answer.granting([(from.node, LeaseScope::NegativeDentry)]);
        {
            let mut shared = cx.shared();
            shared.nodes.note_name_removed(moved.node, (from.node, name));
            if is_directory(moved.node) {
                // Other directories may be below it, and some servers use paths as fids. A file's qid reveals that.
                shared.nodes.forget_nodes(is_directory);
            }
            shared.files.moved(moved.node);
        }
        let own = attr_at_new_name(cx, uid, (to, &to_fid, new_name), &moved).await;
        let gone = match &replaced {
            Some(replaced) => Some(remaining_attr(cx, uid, (to.node, new_name), replaced).await),
            None => None,
        };
        answer = answer.after([own, gone]);
    }
    let from_told = cx.attributes_if_sent(asked_from.await);
    let to_told = cx.attributes_if_sent(asked_to.await).filter(|_| to.node != from.node);
    Ok(answer.after([from_told, to_told]))
}

async fn move_it(
    cx: &CallContext,
    (from, name): (&Fid, &Name),
    (to, new_name): (&Fid, &Name),
    moved: &Fid,
) -> Result<(), Errno> {
    let knows = cx.shared().renameat;
    let text = new_name.as_bytes().to_vec();
    if knows {
        let (name, new_name) = (name.as_bytes().to_vec(), text.clone());
        let message = Tmessage::Renameat { from: from.number(), name, to: to.number(), new_name };
        match cx.request(message).await {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => cx.shared().renameat = false,
            other => return other.map(drop),
        }
    }
    let message = Tmessage::Rename { fid: moved.number(), dir: to.number(), name: text };
    cx.request(message).await.map(drop)
}

/// The attributes of the moved inode, read by its new name.
async fn attr_at_new_name(
    cx: &CallContext,
    uid: u32,
    (to, at, new_name): (&NodeRef, &Fid, &Name),
    moved: &Victim,
) -> Option<(NodeId, Attr)> {
    let (fid, node) = cx.walk_one(at, new_name).await.ok()?;
    cx.shared().nodes.forget(uid, moved.node);
    lookup::note_found(cx, uid, (to.node, new_name), fid, node)
        .await
        .ok()
        .filter(|(node, _)| *node == moved.node)
}
