//! statfs: no grant covers free space, and every change moves it, so a reply is cached for a limited time.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::op::{Answer, Caller};
use nigh_types::{Call, Errno, OpId, Reply, Response, Span, Term, Time};

/// Longest time that a reply is cached.
const OLDEST: Span = Span::from_secs(60);

impl Cache {
    pub(crate) fn stat_fs(&mut self, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<Answer> {
        if let Some((of, space, until)) = self.space
            && of == ino
            && now < until
        {
            return Some(Answer::Space(space));
        }
        let Some(node) = self.node_ref(ino) else { return Some(Answer::Failed(Errno::STALE)) };
        self.send_for(now, op, caller, CallKind::Space { ino }, Call::StatFs { node })
    }

    pub(crate) fn space_arrived(&mut self, flight: &InflightCall, ino: u64, response: &Response) -> Answer {
        match response.result {
            Ok(Reply::Space(space)) => {
                let oldest = match self.term {
                    Term::Session => OLDEST,
                    Term::Limited(span) => span.min(OLDEST),
                };
                if flight.seen.is_empty() {
                    self.space = Some((ino, space, flight.sent.after(oldest)));
                }
                Answer::Space(space)
            }
            Ok(_) => Answer::Failed(Errno::PROTO),
            Err(errno) => Answer::Failed(errno),
        }
    }
}
