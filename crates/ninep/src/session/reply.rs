//! The result of a call, and the grants that come with it.

use super::context::CallContext;
use crate::Attributes;
use nigh_types::{
    Attr, Entry, Errno, Grant, Kind, LeaseScope, Mode, NodeId, Reply, Response, Span, Term, Timestamp,
};
use std::collections::BTreeSet;

/// The reply of a call, with attributes and grants.
pub(super) struct CallReply {
    pub reply: Reply,
    pub after: Vec<(NodeId, Attr)>,
    pub grants: Vec<(NodeId, LeaseScope)>,
}

pub(super) type Outcome = Result<CallReply, Errno>;

impl CallReply {
    pub fn plain(reply: Reply) -> CallReply {
        CallReply { reply, after: Vec::new(), grants: Vec::new() }
    }

    pub fn granting(mut self, grants: impl IntoIterator<Item = (NodeId, LeaseScope)>) -> CallReply {
        self.grants.extend(grants);
        self
    }

    /// Adds attributes of other inodes, if the server sent them.
    pub fn after(mut self, told: impl IntoIterator<Item = Option<(NodeId, Attr)>>) -> CallReply {
        for (node, attr) in told.into_iter().flatten() {
            self.grants.push((node, LeaseScope::Attributes));
            self.after.push((node, attr));
        }
        self
    }
}

/// Response encoding. All grants of one kind have one term, so duplicates are merged.
impl CallContext {
    pub fn respond(&self, outcome: Outcome, last: bool) -> Response {
        let CallReply { reply, after, mut grants } = match outcome {
            Ok(answer) => answer,
            Err(errno) => return Response::plain(Err(errno)),
        };
        let mut shared = self.shared();
        let times = shared.config.times;
        // A prefetched listing covers attributes too.
        let listing = match reply {
            Reply::Prefetched(_) => times.prefetched(),
            _ => times.listing(),
        };
        let gone: BTreeSet<NodeId> =
            after.iter().filter(|(_, attr)| attr.nlink == 0).map(|(node, _)| *node).collect();
        grants.retain(|(node, covers)| *covers == LeaseScope::Data || !gone.contains(node));
        let (mut given, mut scopes): (Vec<Grant>, BTreeSet<(NodeId, LeaseScope)>) = Default::default();
        for (node, covers) in grants {
            let term = match covers {
                LeaseScope::Directory => listing,
                LeaseScope::Dentry => times.names,
                LeaseScope::NegativeDentry => times.absent,
                LeaseScope::Attributes | LeaseScope::Data => times.attributes,
            };
            if term != Term::Limited(Span::ZERO) && scopes.insert((node, covers)) {
                let id = shared.new_grant();
                let mode = Mode::Read;
                given.push(Grant { id, node, covers, mode, term, recallable: false, shared: false });
            }
        }
        Response { result: Ok(reply), after, grants: given, last }
    }
}

/// Converts a server's time, which is unsigned seconds and nanoseconds.
fn moment((secs, nanos): (u64, u64)) -> Timestamp {
    let nanos = u32::try_from(nanos).ok().filter(|nanos| *nanos < 1_000_000_000).unwrap_or(0);
    Timestamp { secs: secs.cast_signed(), nanos }
}

/// Converts attributes to those of Linux; `EPROTO` for a file type that Linux does not have.
pub(super) fn attr(told: &Attributes) -> Result<Attr, Errno> {
    Kind::of_mode(told.mode)?;
    let births = told.valid & crate::mask::BIRTH != 0;
    Ok(Attr {
        size: told.size,
        blocks: told.blocks,
        mode: told.mode,
        nlink: u32::try_from(told.nlink).unwrap_or(u32::MAX),
        uid: told.uid,
        gid: told.gid,
        // makedev(3) of glibc equals `new_encode_dev` as long as both numbers fit into the latter.
        rdev: u32::try_from(told.rdev).unwrap_or(0),
        atime: moment(told.atime),
        mtime: moment(told.mtime),
        ctime: moment(told.ctime),
        birth_ns: if births {
            told.birth.0.saturating_mul(1_000_000_000).saturating_add(told.birth.1)
        } else {
            0
        },
    })
}

pub(super) fn entry(id: NodeId, attr: Attr) -> Entry {
    Entry { id, attr, target: None, no_xattrs: false }
}
