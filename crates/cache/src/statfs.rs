//! statfs: no grant covers free space, and every change moves it, so a reply is cached for a limited time.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::op::{Caller, OpReply};
use nigh_types::{Call, Errno, OpId, Reply, Response, Span, Term, Time};

/// Longest time that a reply is cached.
const OLDEST: Span = Span::from_secs(60);

impl Cache {
    pub(crate) fn stat_fs(&mut self, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<OpReply> {
        if let Some((of, space, until)) = self.statfs_cache
            && of == ino
            && now < until
        {
            return Some(OpReply::Space(space));
        }
        let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        self.send_for(now, op, caller, CallKind::StatFs { ino }, Call::StatFs { node })
    }

    pub(crate) fn on_statfs_reply(
        &mut self,
        flight: &InflightCall,
        ino: u64,
        response: &Response,
    ) -> OpReply {
        match response.result {
            Ok(Reply::Space(space)) => {
                let oldest = match self.session.term() {
                    Term::Session => OLDEST,
                    Term::Limited(span) => span.min(OLDEST),
                };
                if flight.race_log.is_empty() {
                    self.statfs_cache = Some((ino, space, flight.sent.after(oldest)));
                }
                OpReply::Space(space)
            }
            Ok(_) => OpReply::Failed(Errno::PROTO),
            Err(errno) => OpReply::Failed(errno),
        }
    }
}
