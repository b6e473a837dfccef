//! Calls that create a name.

use super::super::context::CallContext;
use super::super::fids::Fid;
use super::super::files::OpenFile;
use super::super::node_ids::is_directory;
use super::super::reply::{CallReply, Outcome, entry};
use super::super::requests::getattr;
use super::super::resolve::stale;
use super::{lookup, open};
use crate::{Rmessage, Tmessage, flags};
use nigh_types::{Access, Call, Entry, Errno, Kind, LeaseScope, Name, NodeRef, Reply};
use std::sync::Arc;

/// The group of a new inode: the directory's if that has setgid (as `v9fs_get_fsgid_for_create`).
async fn group(cx: &CallContext, uid: u32, dir: &NodeRef, gid: u32) -> u32 {
    let known = cx.shared().nodes.attr(dir.node);
    let attr = match known {
        Some(attr) => Some(attr),
        None => cx.attributes_of(uid, dir).await.ok().map(|(_, attr)| attr),
    };
    attr.filter(|attr| attr.mode & 0o2000 != 0).map_or(gid, |attr| attr.gid)
}

/// Sends a message that creates a name in a directory. `ENOENT` then means that the directory is gone, since the name
/// need not exist.
async fn in_dir(
    cx: &CallContext,
    uid: u32,
    dir: &NodeRef,
    message: impl Fn(u32) -> Tmessage + Send,
) -> Result<(Rmessage, Arc<Fid>), Errno> {
    let fid = cx.resolve_dir(uid, dir).await?;
    match cx.request(message(fid.number())).await {
        Err(Errno::NOENT | Errno::STALE) if !cx.is_root(dir.node) => {}
        other => return other.map(|answer| (answer, fid)),
    }
    let fid = cx.resolve_again(uid, dir).await?;
    let answer = cx.request(message(fid.number())).await.map_err(stale)?;
    Ok((answer, fid))
}

pub(super) async fn create_name(cx: &CallContext, uid: u32, gid: u32, call: &Call) -> Outcome {
    match call {
        Call::Create { dir, name, mode, umask, exclusive, access } => {
            let how =
                CreateParams { mode: mode & !umask, gid: group(cx, uid, dir, gid).await, access: *access };
            create(cx, uid, (dir, name), &how, *exclusive).await
        }
        Call::Mknod { dir, name, kind, mode, umask, rdev } => {
            let gid = group(cx, uid, dir, gid).await;
            let (major, minor) = ((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00));
            let mode = kind.mode_bits() | (mode & !umask & 0o7777);
            let message = |at| Tmessage::Mknod { dir: at, name: text(name), mode, major, minor, gid };
            let (answer, at) = in_dir(cx, uid, dir, message).await?;
            create_reply(cx, uid, (dir, &at, name), &answer, None).await
        }
        Call::Mkdir { dir, name, mode, umask } => {
            let gid = group(cx, uid, dir, gid).await;
            let mode = mode & !umask & 0o7777;
            let message = |at| Tmessage::Mkdir { dir: at, name: text(name), mode, gid };
            let (answer, at) = in_dir(cx, uid, dir, message).await?;
            create_reply(cx, uid, (dir, &at, name), &answer, None).await
        }
        Call::Symlink { dir, name, target } => {
            let gid = group(cx, uid, dir, gid).await;
            let message = |at| Tmessage::Symlink { dir: at, name: text(name), target: target.clone(), gid };
            let (answer, at) = in_dir(cx, uid, dir, message).await?;
            create_reply(cx, uid, (dir, &at, name), &answer, Some(target)).await
        }
        Call::Link { node, dir, name } => link(cx, uid, node, dir, name).await,
        _ => Err(Errno::NOSYS),
    }
}

fn text(name: &Name) -> Vec<u8> {
    name.as_bytes().to_vec()
}

/// The reply for a name that was just created.
async fn create_reply(
    cx: &CallContext,
    uid: u32,
    (dir, at, name): (&NodeRef, &Fid, &Name),
    answer: &Rmessage,
    target: Option<&[u8]>,
) -> Outcome {
    let (Rmessage::Mkdir { qid } | Rmessage::Mknod { qid } | Rmessage::Symlink { qid }) = answer else {
        return Err(Errno::PROTO);
    };
    let (fid, node) = cx.walk_one(at, name).await?;
    let is_it = {
        let mut shared = cx.shared();
        let is_it = shared.node(*qid) == node;
        if is_it {
            shared.nodes.reset_reused(node);
        }
        is_it
    };
    let own = cx.request(getattr(at.number()));
    let (node, attr) = lookup::note_found(cx, uid, (dir.node, name), fid, node).await?;
    let mut entry = entry(node, attr);
    entry.target = target.filter(|_| is_it).map(Into::into);
    // Another client may have put another inode there.
    let reply = Reply::Created { entry, handle: None, existed: !is_it };
    let mut grants = vec![(dir.node, LeaseScope::Dentry), (node, LeaseScope::Attributes)];
    if is_directory(node) && is_it {
        grants.push((node, LeaseScope::Directory));
    }
    let told = cx.attributes_if_sent(own.await);
    Ok(CallReply::plain(reply).granting(grants).after([told]))
}

struct CreateParams {
    mode: u32,
    gid: u32,
    access: Access,
}

async fn create(
    cx: &CallContext,
    uid: u32,
    (dir, name): (&NodeRef, &Name),
    how: &CreateParams,
    exclusive: bool,
) -> Outcome {
    // If the file is removed while it is opened, it is created instead, and the other way round.
    for _ in 0..8 {
        match create_new(cx, uid, (dir, name), how).await {
            Err(Errno::EXIST) if !exclusive => {}
            other => return other,
        }
        match open_existing(cx, uid, (dir, name), how.access).await {
            Err(Errno::NOENT) => {}
            other => return other,
        }
    }
    Err(Errno::IO)
}

async fn create_new(
    cx: &CallContext,
    uid: u32,
    (dir, name): (&NodeRef, &Name),
    how: &CreateParams,
) -> Outcome {
    let at = cx.resolve_dir(uid, dir).await?;
    let cloned = match cx.walk(&at, &[]).await {
        Err(Errno::NOENT | Errno::STALE) => None,
        cloned => Some(cloned?.0),
    };
    let ask = |fid: &Fid| {
        cx.request(Tmessage::Lcreate {
            fid: fid.number(),
            name: text(name),
            flags: open::of_access(how.access) | flags::CREATE | flags::EXCL,
            mode: how.mode & 0o7777,
            gid: how.gid,
        })
    };
    let first = match &cloned {
        Some(fid) => ask(fid).await,
        None => Err(Errno::NOENT),
    };
    let (fid, answer, at) = match (cloned, first) {
        (Some(fid), Ok(answer)) => (fid, answer, at),
        (_, Err(Errno::NOENT | Errno::STALE)) => {
            // The directory was moved or removed.
            let at = if cx.is_root(dir.node) { at } else { cx.resolve_again(uid, dir).await? };
            let fid = cx.walk(&at, &[]).await.map_err(stale)?.0;
            let answer = ask(&fid).await.map_err(stale)?;
            (fid, answer, at)
        }
        (_, answer) => return Err(answer.err().unwrap_or(Errno::IO)),
    };
    let Rmessage::Lcreate { qid, .. } = answer else { return Err(Errno::PROTO) };
    let own = cx.request(getattr(at.number()));
    let node = {
        let mut shared = cx.shared();
        let node = shared.node(qid);
        shared.nodes.reset_reused(node);
        node
    };
    let attr = cx.attributes_by(&fid, node).await?;
    let handle = Some(cx.shared().files.add(OpenFile::new(uid, node, fid)));
    let entry = Entry { no_xattrs: true, ..entry(node, attr) };
    let reply = Reply::Created { entry, handle, existed: false };
    let grants = [(dir.node, LeaseScope::Dentry), (node, LeaseScope::Attributes), (node, LeaseScope::Data)];
    let told = cx.attributes_if_sent(own.await);
    Ok(CallReply::plain(reply).granting(grants).after([told]))
}

async fn open_existing(
    cx: &CallContext,
    uid: u32,
    (dir, name): (&NodeRef, &Name),
    access: Access,
) -> Outcome {
    let at = cx.resolve_dir(uid, dir).await?;
    let (fid, node) = cx.walk_one(&at, name).await?;
    let (node, _) = lookup::note_found(cx, uid, (dir.node, name), fid, node).await?;
    let place = NodeRef { node, path_hint: Some((dir.node, name.clone())) };
    let outcome = open::open(cx, uid, &place, access).await;
    let answer = outcome.map_err(|errno| if errno == Errno::STALE { Errno::NOENT } else { errno })?;
    let Reply::Opened { handle, attr } = answer.reply else { return Err(Errno::PROTO) };
    let reply = Reply::Created { entry: entry(node, attr), handle: Some(handle), existed: true };
    let grants = [(dir.node, LeaseScope::Dentry), (node, LeaseScope::Attributes), (node, LeaseScope::Data)];
    let told = cx.attributes_if_sent(cx.request(getattr(at.number())).await);
    Ok(CallReply::plain(reply).granting(grants).after([told]))
}

async fn link(cx: &CallContext, uid: u32, place: &NodeRef, dir: &NodeRef, name: &Name) -> Outcome {
    if !is_directory(dir.node) {
        return Err(Errno::NOTDIR);
    }
    if cx.kind(uid, place).await? == Kind::Directory {
        return Err(Errno::PERM);
    }
    // The remembered fid may lead nowhere: it is checked before the file gets another name.
    let fid = match cx.request_of(uid, place, getattr).await {
        Ok((_, fid)) => fid,
        // Some servers return no attributes for an open file without a name.
        Err(Errno::STALE) => cx.resolve(uid, place).await?.fid,
        Err(errno) => return Err(errno),
    };
    let number = fid.number();
    let message = |at| Tmessage::Link { dir: at, fid: number, name: text(name) };
    let (_, at) = in_dir(cx, uid, dir, message).await?;
    {
        let mut shared = cx.shared();
        let first = place.path_hint.clone();
        for (dir, name) in first.into_iter().chain([(dir.node, name.clone())]) {
            shared.nodes.note_link(place.node, dir, &name);
        }
    }
    let own = cx.request(getattr(at.number()));
    let (node, attr) = match cx.attributes(&fid).await {
        Ok(told) => told,
        Err(_) => {
            let (fid, node) = cx.walk_one(&at, name).await?;
            lookup::note_found(cx, uid, (dir.node, name), fid, node).await?
        }
    };
    let reply = Reply::Created { entry: entry(node, attr), handle: None, existed: false };
    let told = cx.attributes_if_sent(own.await);
    Ok(CallReply::plain(reply)
        .granting([(dir.node, LeaseScope::Dentry), (node, LeaseScope::Attributes)])
        .after([told]))
}
