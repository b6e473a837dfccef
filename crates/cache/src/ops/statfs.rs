//! statfs: no grant covers free space, and every change moves it, so a reply is cached for a limited time.

use crate::calls::{CallKind, InflightCall};
use crate::op::{Caller, OpReply};
use crate::out::sending;
use crate::state::State;
use crate::view::paths;
use nigh_types::{Call, Errno, OpId, Reply, Response, Span, Term, Time};

/// Longest time that a reply is cached.
const OLDEST: Span = Span::from_secs(60);

pub(crate) fn stat_fs(state: &mut State, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<OpReply> {
    if let Some((of, space, until)) = state.statfs_cache
        && of == ino
        && now < until
    {
        return Some(OpReply::Space(space));
    }
    let Some(node) = paths::node_ref(state, ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    sending::send_for(state, now, op, caller, CallKind::StatFs { ino }, Call::StatFs { node })
}

pub(crate) fn on_statfs_reply(
    state: &mut State,
    flight: &InflightCall,
    ino: u64,
    response: &Response,
) -> OpReply {
    match response.result {
        Ok(Reply::Space(space)) => {
            let oldest = match state.session.term() {
                Term::Session => OLDEST,
                Term::Limited(span) => span.min(OLDEST),
            };
            if flight.race_log.is_empty() {
                state.statfs_cache = Some((ino, space, flight.sent.after(oldest)));
            }
            OpReply::Space(space)
        }
        Ok(_) => OpReply::Failed(Errno::PROTO),
        Err(errno) => OpReply::Failed(errno),
    }
}
