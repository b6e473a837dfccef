//! The server with explicit scheduling, and its state as text, equal for equal states.

use super::{Server, Work};
use nigh_types::Time;
use std::fmt::{self, Write};

impl Server {
    /// Returns the number of tasks that wait for a thread.
    pub(in crate::native) fn due_work(&self, now: Time) -> usize {
        self.work.keys().take_while(|(due, _)| *due <= now).count()
    }

    /// Returns when the next timer is due, other than those tasks.
    pub(in crate::native) fn timer(&self, now: Time) -> Time {
        let later = self.work.keys().map(|(due, _)| *due).find(|due| *due > now).unwrap_or(Time::FAR);
        later.min(self.clock_due())
    }

    pub(in crate::native) fn session_of(&self, link: u64) -> Option<u64> {
        self.sessions.iter().find(|(_, session)| session.link == link).map(|(id, _)| *id)
    }

    /// Writes all state except the tree, the sessions and frames in transit. Waiting tasks are sorted, since any may
    /// be next.
    pub(in crate::native) fn write_leases(&self, out: &mut String) -> fmt::Result {
        let text = |((due, _), work): (&(Time, u64), &Work)| format!("{due:?}{work:?}");
        let mut work: Vec<String> = self.work.iter().map(text).collect();
        work.sort_unstable();
        write!(out, "{:?}{work:?}{:?}{:?}", self.sequencer, self.reply_cache, self.session_registry)?;
        write!(out, "{:?}{:?}{:?}", self.grace, self.forgotten_leases, self.sequencer_due)?;
        write!(out, "{} {} {}", self.effects, self.last_session, self.last_kept)
    }

    pub(in crate::native) fn write_sessions(&self, out: &mut String) -> fmt::Result {
        write!(out, "{:?}{:?}", self.sessions, self.unauthenticated)
    }
}
