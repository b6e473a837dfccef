//! What a call comes to, and what may be kept of it.

use super::desk::Desk;
use crate::Attributes;
use nigh_types::{
    Attr, Covers, Entry, Errno, Grant, Kind, Mode, NodeId, Reply, Response, Span, Term, Timestamp,
};

/// What a call came to.
pub(super) struct Answer {
    pub reply: Reply,
    pub after: Vec<(NodeId, Attr)>,
    pub grants: Vec<(NodeId, Covers)>,
}

pub(super) type Outcome = Result<Answer, Errno>;

impl Answer {
    pub fn plain(reply: Reply) -> Answer {
        Answer { reply, after: Vec::new(), grants: Vec::new() }
    }

    pub fn granting(mut self, grants: impl IntoIterator<Item = (NodeId, Covers)>) -> Answer {
        self.grants.extend(grants);
        self
    }

    /// Attributes of others, if they could be had.
    pub fn after(mut self, told: impl IntoIterator<Item = Option<(NodeId, Attr)>>) -> Answer {
        for (node, attr) in told.into_iter().flatten() {
            self.grants.push((node, Covers::Inode));
            self.after.push((node, attr));
        }
        self
    }
}

/// The end of a kind of facts is the same for all of them: so many grants are one.
impl Desk {
    pub fn respond(&self, outcome: Outcome, last: bool) -> Response {
        let Answer { reply, after, mut grants } = match outcome {
            Ok(answer) => answer,
            Err(errno) => return Response::plain(Err(errno)),
        };
        let mut shared = self.shared();
        let times = shared.config.times;
        let gone = |node: &NodeId| after.iter().any(|(n, attr)| n == node && attr.nlink == 0);
        grants.retain(|(node, covers)| *covers == Covers::Data || !gone(node));
        let mut given: Vec<Grant> = Vec::new();
        for (node, covers) in grants {
            let term = match covers {
                Covers::Names => times.listing(),
                Covers::Entry => times.names,
                Covers::Absence => times.absent,
                Covers::Inode | Covers::Data => times.attributes,
            };
            let twice = given.iter().any(|grant| (grant.node, grant.covers) == (node, covers));
            if term != Term::Limited(Span::ZERO) && !twice {
                let id = shared.new_grant();
                let mode = Mode::Read;
                given.push(Grant { id, node, covers, mode, term, recallable: false, shared: false });
            }
        }
        Response { result: Ok(reply), after, grants: given, last }
    }
}

/// A moment of the server's, which are seconds and nanoseconds without a sign.
fn moment((secs, nanos): (u64, u64)) -> Timestamp {
    let nanos = u32::try_from(nanos).ok().filter(|nanos| *nanos < 1_000_000_000).unwrap_or(0);
    Timestamp { secs: secs.cast_signed(), nanos }
}

/// As Linux has them; `EPROTO` of what Linux does not have.
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
        // makedev(3) of glibc is `new_encode_dev` where both numbers are as large as that can have them.
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
