//! Directory listings: read whole, and sorted into the order of this mount's cookies.

use super::super::context::{CallContext, PendingReply};
use super::super::fids::Fid;
use super::super::reply::CallReply;
use super::open;
use crate::values::{Qid, QidKind};
use crate::{Dirent, ProtocolError, Rmessage, Tmessage, dirents};
use nigh_remote::Event;
use nigh_types::{CallId, Cookie, Errno, Kind, LeaseScope, Name, NodeId, NodeRef, Reply};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most names in a chunk of a reply.
const PART: usize = 4_096;

type Found = (Name, NodeId, Option<Kind>);
type Names = Vec<Found>;

pub(super) async fn list(cx: &CallContext, id: CallId, uid: u32, dir: &NodeRef) {
    let say = |response| cx.emit(Event::Response { call: id, response });
    let names = match names(cx, uid, dir).await {
        Ok(names) => names,
        Err(errno) => return say(cx.respond(Err(errno), true)),
    };
    let own = cx.attributes_of(uid, dir).await.ok();
    let key = cx.shared().config.cookie_key;
    let mut rest: Vec<(Cookie, Found)> =
        names.into_iter().map(|one| (key.cookie(one.0.as_bytes()), one)).collect();
    rest.sort_unstable_by(|a, b| (a.0, &a.1.0).cmp(&(b.0, &b.1.0)));
    let mut rest = rest.into_iter().peekable();
    let mut granted = Some((dir.node, LeaseScope::Directory));
    loop {
        let mut part: Names = Vec::new();
        let mut at = None;
        while let Some((_, one)) = rest.next_if(|(cookie, _)| part.len() < PART || at == Some(*cookie)) {
            at = Some(key.cookie(one.0.as_bytes()));
            part.push(one);
        }
        let last = rest.peek().is_none();
        let answer = CallReply::plain(Reply::Names(part)).granting(granted.take());
        let answer = if last { answer.after([own]) } else { answer };
        say(cx.respond(Ok(answer), last));
        if last {
            return;
        }
    }
}

async fn names(cx: &CallContext, uid: u32, dir: &NodeRef) -> Result<Names, Errno> {
    let mut reader = NameReader::new(open::directory(cx, uid, dir).await?);
    loop {
        let answer = reader.request(cx).await;
        if !reader.take(cx, answer)? {
            break;
        }
    }
    Ok(reader.found.into_iter().map(|(name, (node, kind))| (name, node, kind)).collect())
}

/// Reads the names of an open directory, message by message.
pub(super) struct NameReader {
    fid: Arc<Fid>,
    offset: u64,
    /// Entries that the server sent.
    told: u64,
    /// A server may send a name twice while other clients change the directory.
    pub found: BTreeMap<Name, (NodeId, Option<Kind>)>,
}

impl NameReader {
    pub fn new(fid: Arc<Fid>) -> NameReader {
        NameReader { fid, offset: 0, told: 0, found: BTreeMap::new() }
    }

    /// Requests the next entries.
    pub fn request(&self, cx: &CallContext) -> PendingReply {
        let count = cx.shared().most_data();
        cx.request(Tmessage::Readdir { fid: self.fid.number(), offset: self.offset, count })
    }

    /// Takes the reply to [`NameReader::request`]. Returns whether more entries may follow.
    pub fn take(&mut self, cx: &CallContext, answer: Result<Rmessage, Errno>) -> Result<bool, Errno> {
        let Rmessage::Readdir { entries } = answer? else { return Err(Errno::PROTO) };
        let entries = dirents(&entries).map_err(|error| cx.abort(error))?;
        let Some(last) = entries.last() else { return Ok(false) };
        if last.offset == self.offset {
            return Err(cx.abort(ProtocolError::Malformed("a listing does not go on")));
        }
        self.offset = last.offset;
        self.told += entries.len() as u64;
        let shared = cx.shared();
        if self.told > shared.config.most_names {
            return Err(Errno::OVERFLOW);
        }
        for Dirent { qid, kind, name, .. } in entries {
            if let Ok(name) = Name::new(&name) {
                self.found.insert(name, (shared.node(qid), kind_of(qid, kind)));
            }
        }
        Ok(true)
    }
}

/// The file type as far as the server says; `kind` is that of readdir(3).
fn kind_of(qid: Qid, kind: u8) -> Option<Kind> {
    match (qid.kind(), kind) {
        (QidKind::Directory, _) => Some(Kind::Directory),
        (QidKind::Symlink, _) => Some(Kind::Symlink),
        (QidKind::Other, 1) => Some(Kind::Fifo),
        (QidKind::Other, 2) => Some(Kind::CharDevice),
        (QidKind::Other, 6) => Some(Kind::BlockDevice),
        (QidKind::Other, 8) => Some(Kind::File),
        (QidKind::Other, 12) => Some(Kind::Socket),
        (QidKind::Other, _) => None,
    }
}
