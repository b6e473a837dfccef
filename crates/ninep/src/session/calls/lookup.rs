//! Names and symlink targets.

use super::super::context::CallContext;
use super::super::fids::Fid;
use super::super::node_ids::SYMLINK;
use super::super::reply::{CallReply, Outcome, entry};
use crate::{Rmessage, Tmessage};
use nigh_types::{Attr, Errno, LeaseScope, Name, NodeId, NodeRef, Reply};
use std::sync::Arc;

/// Looks up a name: one message for a missing name, two for one that exists.
pub(super) async fn look_up(cx: &CallContext, uid: u32, dir: &NodeRef, name: &Name) -> Outcome {
    let at = cx.resolve_dir(uid, dir).await?;
    let found = match cx.walk_one(&at, name).await {
        Ok((fid, node)) => note_found(cx, uid, (dir.node, name), fid, node).await,
        Err(errno) => Err(errno),
    };
    match found {
        Ok((node, attr)) => {
            let grants = [(dir.node, LeaseScope::Dentry), (node, LeaseScope::Attributes)];
            Ok(CallReply::plain(Reply::Entry(Some(entry(node, attr)))).granting(grants))
        }
        Err(Errno::NOENT) => {
            Ok(CallReply::plain(Reply::Entry(None)).granting([(dir.node, LeaseScope::NegativeDentry)]))
        }
        Err(errno) => Err(errno),
    }
}

/// Notes the result of a walk: the node is reached by this fid from now on, unless it is known by that name already.
pub(super) async fn note_found(
    cx: &CallContext,
    uid: u32,
    (dir, name): (NodeId, &Name),
    fid: Arc<Fid>,
    node: NodeId,
) -> Result<(NodeId, Attr), Errno> {
    let told = cx.attributes(&fid).await?;
    Ok(note_attributes(cx, uid, (dir, name), (fid, node), told))
}

/// As [`note_found`], once the attributes have been told.
pub(super) fn note_attributes(
    cx: &CallContext,
    uid: u32,
    (dir, name): (NodeId, &Name),
    (fid, node): (Arc<Fid>, NodeId),
    (told, attr): (NodeId, Attr),
) -> (NodeId, Attr) {
    if told != node {
        // Another node replaced it between the two messages: the later reply counts.
        cx.shared().nodes.forget(uid, node);
    }
    let home = Some((dir, name.clone()));
    let mut shared = cx.shared();
    if attr.nlink > 1 && !attr.is_dir() {
        shared.nodes.note_link(told, dir, name);
    }
    // The older fid may be a path that leads elsewhere by now; an open fid stays with its file.
    if shared.nodes.known(uid, told).is_none_or(|known| !known.open || known.parent_entry != home) {
        shared.nodes.note_known(uid, told, fid, home, false);
    }
    (told, attr)
}

pub(super) async fn read_link(cx: &CallContext, uid: u32, node: &NodeRef) -> Outcome {
    if node.node.generation != SYMLINK {
        return Err(Errno::INVAL);
    }
    let (answer, _) = cx.request_of(uid, node, |fid| Tmessage::Readlink { fid }).await?;
    let Rmessage::Readlink { target } = answer else { return Err(Errno::PROTO) };
    Ok(CallReply::plain(Reply::Target(target.into())))
}
