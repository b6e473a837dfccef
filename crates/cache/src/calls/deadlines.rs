//! Request deadlines, if the mount has any ([`crate::OnDisconnect::Fail`]).

use nigh_types::{OpId, Time};
use std::collections::{BTreeMap, BTreeSet};

/// Waiting requests by deadline.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestDeadlines {
    due: BTreeSet<(Time, OpId)>,
    of: BTreeMap<OpId, Time>,
}

impl RequestDeadlines {
    pub fn begin(&mut self, op: OpId, due: Time) {
        self.of.insert(op, due);
        self.due.insert((due, op));
    }

    /// Removes a request that was answered.
    pub fn end(&mut self, op: OpId) {
        if let Some(due) = self.of.remove(&op) {
            self.due.remove(&(due, op));
        }
    }

    pub fn next(&self) -> Option<Time> {
        self.due.first().map(|(due, _)| *due)
    }

    /// Takes a request whose deadline has passed.
    pub fn take_expired(&mut self, now: Time) -> Option<OpId> {
        let (_, op) = *self.due.first().filter(|(due, _)| *due <= now)?;
        self.end(op);
        Some(op)
    }
}
