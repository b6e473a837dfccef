//! File data: several messages in flight for a request that one message cannot carry.

use super::super::context::CallContext;
use super::super::fids::Fid;
use super::super::node_ids::is_directory;
use super::super::reply::{CallReply, Outcome};
use super::super::requests::setattr;
use super::open;
use crate::{Data, Rmessage, Tmessage, flags};
use nigh_types::{Attr, DataVersion, Errno, Handle, LeaseScope, NodeId, NodeRef, Reply, SetAttr, WriteFlags};
use std::sync::Arc;

/// A fid to read from: that of the handle, if the user has opened it, else one that is kept open and shared by all readers of
/// that user. The fid of another user is for a file that is gone otherwise.
async fn readable(
    cx: &CallContext,
    uid: u32,
    place: &NodeRef,
    handle: Option<Handle>,
) -> Result<Arc<Fid>, Errno> {
    let open = cx.shared().files.opened_by(handle, place.node)?;
    match open {
        Some((fid, opener)) if opener == uid => Ok(fid),
        None => shared_readable(cx, uid, place).await,
        Some((fid, _)) => match shared_readable(cx, uid, place).await {
            Err(Errno::STALE | Errno::NOENT) => Ok(fid),
            own => own,
        },
    }
}

async fn shared_readable(cx: &CallContext, uid: u32, place: &NodeRef) -> Result<Arc<Fid>, Errno> {
    let known = cx.shared().nodes.known(uid, place.node).filter(|known| known.open);
    if let Some(known) = known {
        return Ok(known.fid);
    }
    let home = place.path_hint.clone();
    let fid = open::fresh(cx, uid, place, flags::RDONLY).await?;
    cx.shared().nodes.note_known(uid, place.node, Arc::clone(&fid), home, true);
    Ok(fid)
}

pub(super) async fn read(
    cx: &CallContext,
    uid: u32,
    place: &NodeRef,
    handle: Option<Handle>,
    (offset, length): (u64, u32),
) -> Outcome {
    let fid = readable(cx, uid, place, handle).await?;
    // The data read is of this version or of a later one.
    let before = cx.shared().nodes.attr(place.node);
    let data = match bytes(cx, &fid, (offset, length), before.map(|attr| attr.size)).await {
        Err(Errno::STALE | Errno::BADF | Errno::NOENT) if handle.is_none() => {
            cx.shared().nodes.forget(uid, place.node);
            return Err(Errno::STALE);
        }
        read => read?,
    };
    let answer = CallReply::plain(Reply::Data(data)).granting([(place.node, LeaseScope::Data)]);
    Ok(CallReply { after: before.map(|attr| (place.node, attr)).into_iter().collect(), ..answer })
}

/// Reads so many bytes; fewer only at the end of the file, which is where the server says so, or at `end` if that is
/// known.
pub(super) async fn bytes(
    cx: &CallContext,
    fid: &Fid,
    (offset, length): (u64, u32),
    end: Option<u64>,
) -> Result<Vec<u8>, Errno> {
    let most = cx.shared().most_data();
    let ask = |from: u32| {
        let message = Tmessage::Read {
            fid: fid.number(),
            offset: offset + u64::from(from),
            count: most.min(length - from),
        };
        (from, cx.request(message))
    };
    let asked: Vec<_> = (0..length).step_by(most as usize).map(ask).collect();
    let mut data = Vec::new();
    let mut is_short = false;
    for (from, answer) in asked {
        let Rmessage::Read { data: Data(part) } = answer.await? else { return Err(Errno::PROTO) };
        // Behind a short chunk there may be more data, or a hole in the data that was read.
        if !is_short {
            is_short = part.len() < most.min(length - from) as usize;
            data.extend_from_slice(&part);
        }
    }
    let is_end = |data: &Vec<u8>| end.is_some_and(|end| offset + data.len() as u64 >= end);
    while is_short && !data.is_empty() && data.len() < length as usize && !is_end(&data) {
        let have = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let Rmessage::Read { data: Data(part) } = ask(have).1.await? else { return Err(Errno::PROTO) };
        if part.is_empty() {
            break;
        }
        data.extend_from_slice(&part);
    }
    Ok(data)
}

pub(super) async fn write(
    cx: &CallContext,
    uid: u32,
    (place, handle): (&NodeRef, Option<Handle>),
    (offset, data): (u64, &[u8]),
    flags: WriteFlags,
) -> Outcome {
    let fid = writable(cx, uid, place, handle).await?;
    let mut before = cx.shared().nodes.attr(place.node);
    if let Some(since) = flags.since.filter(|_| flags.write_back) {
        let now = attributes(cx, uid, &fid, place).await?;
        before = Some(now);
        let is_own = cx.shared().files.is_own(place.node, since.stamp, DataVersion::of(&now));
        if !is_own {
            return write_if_unchanged(cx, uid, place, handle, (offset, data)).await;
        }
    }
    let (offset, count) = match flags.append {
        true => append(cx, uid, (place, handle), &fid, data).await?,
        false => (offset, put(cx, &fid, offset, data, false).await?),
    };
    if flags.sync && count > 0 {
        cx.request(Tmessage::Fsync { fid: fid.number(), data_only: 1 }).await?;
    }
    let is_followed = cx.shared().files.tracks_own_writes(place.node);
    if !is_followed && needs_no_attributes(flags, before.as_ref()) {
        // A later call reads the attributes if they are needed: a message for each write, and a wait, would cost more
        // than the write.
        note_end(cx, place.node, offset + u64::from(count));
        return Ok(CallReply::plain(Reply::Written { offset, count: u64::from(count) }));
    }
    let mut attr = match attributes(cx, uid, &fid, place).await {
        // The data was written all the same.
        Err(Errno::STALE) => return Ok(unlinked_write_reply(cx, uid, place.node, (offset, count))),
        told => told?,
    };
    if attr.nlink == 0 {
        return Ok(unlinked_write_reply(cx, uid, place.node, (offset, count)));
    }
    if flags.kill_suidgid && count > 0 {
        attr = without_suid(cx, uid, place, attr).await?;
    }
    if let Some(then) = before {
        cx.shared().files.note_own_write(place.node, DataVersion::of(&then), DataVersion::of(&attr));
    }
    let reply = Reply::Written { offset, count: u64::from(count) };
    Ok(CallReply::plain(reply).after([Some((place.node, attr))]))
}

/// Whether a write needs no attributes of the file.
fn needs_no_attributes(flags: WriteFlags, known: Option<&Attr>) -> bool {
    let may_have_suid = known.is_none_or(|attr| attr.mode & 0o6000 != 0);
    !(flags.append || flags.write_back || flags.kill_suidgid && may_have_suid)
}

/// Notes that a file is at least that long. The noted attributes are no data version that the file had, and are never
/// compared as one.
fn note_end(cx: &CallContext, node: NodeId, end: u64) {
    let mut shared = cx.shared();
    if let Some(attr) = shared.nodes.attr(node).filter(|attr| attr.size < end) {
        shared.nodes.note_attr(node, Attr { size: end, ..attr });
    }
}

/// Attributes of an open file: by its fid, unless that may be a path to another file; then by its name.
pub(super) async fn attributes(
    cx: &CallContext,
    uid: u32,
    fid: &Fid,
    place: &NodeRef,
) -> Result<Attr, Errno> {
    match cx.attributes_by(fid, place.node).await {
        Err(Errno::STALE) => cx.attributes_of(uid, place).await.map(|(_, attr)| attr),
        told => told,
    }
}

/// Appends, and returns where and how much.
async fn append(
    cx: &CallContext,
    uid: u32,
    (place, handle): (&NodeRef, Option<Handle>),
    fid: &Fid,
    data: &[u8],
) -> Result<(u64, u32), Errno> {
    if let Ok(appends) = appending(cx, uid, place, handle).await {
        // A server that ignores O_APPEND must not overwrite data.
        let known = cx.shared().nodes.attr(place.node).map(|attr| attr.size);
        let end = match known {
            Some(end) => end,
            None => attributes(cx, uid, &appends, place).await?.size,
        };
        let count = put(cx, &appends, end, data, true).await?;
        let size = attributes(cx, uid, &appends, place).await?.size;
        return Ok((size.saturating_sub(u64::from(count)), count));
    }
    // It cannot be opened again: the data goes to the file's present end.
    let offset = attributes(cx, uid, fid, place).await?.size;
    Ok((offset, put(cx, fid, offset, data, true).await?))
}

/// The reply to a write to an unlinked file for which the server returns no attributes: its size is derived from the
/// write.
fn unlinked_write_reply(cx: &CallContext, uid: u32, node: NodeId, (offset, count): (u64, u32)) -> CallReply {
    let answer = CallReply::plain(Reply::Written { offset, count: u64::from(count) });
    let Some(attr) = cx.unlinked_attr(uid, node) else { return answer };
    let attr = Attr { size: attr.size.max(offset + u64::from(count)), ..attr };
    cx.shared().nodes.note_attr(node, attr);
    CallReply { after: vec![(node, attr)], ..answer }
}

/// Write-back of mmap stores into another version of the file: it succeeds only if the file already holds these bytes.
async fn write_if_unchanged(
    cx: &CallContext,
    uid: u32,
    place: &NodeRef,
    handle: Option<Handle>,
    (offset, data): (u64, &[u8]),
) -> Outcome {
    let fid = readable(cx, uid, place, handle).await?;
    let length = u32::try_from(data.len()).map_err(|_| Errno::INVAL)?;
    if bytes(cx, &fid, (offset, length), None).await? != data {
        return Err(Errno::CANCELED);
    }
    let attr = attributes(cx, uid, &fid, place).await?;
    let reply = Reply::Written { offset, count: data.len() as u64 };
    Ok(CallReply::plain(reply).after([Some((place.node, attr))]))
}

/// Drops setuid and setgid bits that the server's kernel left, if it does not treat the server as an ordinary writer.
async fn without_suid(cx: &CallContext, uid: u32, place: &NodeRef, attr: Attr) -> Result<Attr, Errno> {
    let mut mode = attr.mode & 0o7777;
    mode &= !0o4000;
    if mode & 0o2010 == 0o2010 {
        mode &= !0o2000;
    }
    if mode == attr.mode & 0o7777 {
        return Ok(attr);
    }
    let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
    cx.request_of(uid, place, |fid| setattr(fid, &set)).await?;
    cx.attributes_of(uid, place).await.map(|(_, attr)| attr)
}

async fn writable(
    cx: &CallContext,
    uid: u32,
    place: &NodeRef,
    handle: Option<Handle>,
) -> Result<Arc<Fid>, Errno> {
    let open = cx.shared().files.fid_moved(handle, place.node)?;
    match open {
        Some(fid) => Ok(fid),
        None => open::fresh(cx, uid, place, flags::RDWR).await,
    }
}

/// A fid of the file that is open for append: the server finds the file's end.
async fn appending(
    cx: &CallContext,
    uid: u32,
    place: &NodeRef,
    handle: Option<Handle>,
) -> Result<Arc<Fid>, Errno> {
    let open = |cx: &CallContext| {
        let mut shared = cx.shared();
        let file = handle.and_then(|handle| shared.files.get(handle, place.node).ok().flatten());
        file.and_then(|file| file.appends.clone())
    };
    if let Some(fid) = open(cx) {
        return Ok(fid);
    }
    let fid = open::fresh(cx, uid, place, flags::WRONLY | flags::APPEND).await?;
    let mut shared = cx.shared();
    if let Some(Ok(Some(file))) = handle.map(|handle| shared.files.get(handle, place.node)) {
        file.appends = Some(Arc::clone(&fid));
    }
    Ok(fid)
}

/// Writes, and returns how much was written from the beginning on. With `in_order`, one message at a time (for
/// appending).
async fn put(cx: &CallContext, fid: &Fid, offset: u64, data: &[u8], in_order: bool) -> Result<u32, Errno> {
    let most = cx.shared().most_data() as usize;
    let ask = |at: usize, part: &[u8]| {
        let (fid, data) = (fid.number(), Data(part.to_vec()));
        cx.request(Tmessage::Write { fid, offset: offset + at as u64, data })
    };
    let parts: Vec<(usize, &[u8])> =
        (0..data.len()).step_by(most).map(|at| (at, &data[at..data.len().min(at + most)])).collect();
    let mut written = 0;
    let mut failed = None;
    let mut take = |answer: Result<Rmessage, Errno>, part: &[u8]| match answer {
        Ok(Rmessage::Write { count }) if failed.is_none() => {
            written += count;
            if (count as usize) < part.len() {
                failed = Some(Errno::NOSPC);
            }
        }
        Ok(Rmessage::Write { .. }) => {}
        Ok(_) => failed = failed.or(Some(Errno::PROTO)),
        Err(errno) => failed = failed.or(Some(errno)),
    };
    if in_order {
        for (at, part) in parts {
            let answer = ask(at, part).await;
            let is_whole = matches!(answer, Ok(Rmessage::Write { count }) if count as usize == part.len());
            take(answer, part);
            if !is_whole {
                break;
            }
        }
    } else {
        let asked: Vec<_> = parts.into_iter().map(|(at, part)| (ask(at, part), part)).collect();
        for (answer, part) in asked {
            take(answer.await, part);
        }
    }
    match failed {
        Some(errno) if written == 0 => Err(errno),
        _ => Ok(written),
    }
}

pub(super) async fn sync(
    cx: &CallContext,
    uid: u32,
    place: &NodeRef,
    handle: Option<Handle>,
    data_only: bool,
) -> Outcome {
    let fid = if is_directory(place.node) {
        open::directory(cx, uid, place).await?
    } else {
        readable(cx, uid, place, handle).await?
    };
    cx.request(Tmessage::Fsync { fid: fid.number(), data_only: u32::from(data_only) }).await?;
    Ok(CallReply::plain(Reply::Done))
}
