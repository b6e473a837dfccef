//! Free space: no grant covers it, and every change anywhere moves it; a limit in time bounds how old
//! an answer can be.

use crate::cache::Cache;
use crate::flight::{Flight, Purpose};
use crate::op::{Answer, Caller};
use nigh_types::{Call, Errno, OpId, Reply, Response, Span, Term, Time};

/// However long facts may be believed, free space is asked again after this.
const OLDEST: Span = Span::from_secs(60);

impl Cache {
    pub(crate) fn stat_fs(&mut self, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<Answer> {
        if let Some((space, until)) = self.space
            && now < until
        {
            return Some(Answer::Space(space));
        }
        // Of the root: nested filesystems are not told apart, as df asks by mount point.
        let Some(node) = self.place(if self.root == 0 { ino } else { self.root }) else {
            return Some(Answer::Failed(Errno::STALE));
        };
        self.ask(now, op, caller, Purpose::Space, Call::StatFs { node })
    }

    pub(crate) fn space_arrived(&mut self, flight: &Flight, response: &Response) -> Answer {
        match response.result {
            Ok(Reply::Space(space)) => {
                let oldest = match self.term {
                    Term::Session => OLDEST,
                    Term::Limited(span) => span.min(OLDEST),
                };
                if flight.seen.is_empty() {
                    self.space = Some((space, flight.sent.after(oldest)));
                }
                Answer::Space(space)
            }
            Ok(_) => Answer::Failed(Errno::PROTO),
            Err(errno) => Answer::Failed(errno),
        }
    }
}
