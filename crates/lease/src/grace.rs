//! Grace period after a restart: clients of the earlier server may return and reclaim their state.

use nigh_types::{Call, Time};
use std::collections::BTreeMap;

/// Grace period. A client of the earlier server may still trust the grants of its old session. Until that ends, no
/// mutation is applied, and a lock goes only to the client that held it. `C` names a client, `J` is a call that waits.
#[derive(Clone, Debug)]
pub struct Grace<C, J> {
    /// Clients that have not returned, and whether no other client can have held the locks that they reclaim.
    awaited: BTreeMap<C, bool>,
    until: Time,
    parked: Vec<J>,
    is_active: bool,
}

impl<C: Ord, J> Default for Grace<C, J> {
    /// A grace period that is over.
    fn default() -> Grace<C, J> {
        Grace::new(BTreeMap::new(), Time(0))
    }
}

impl<C: Ord, J> Grace<C, J> {
    /// A grace period until all of these clients are back, or until `until`.
    #[must_use]
    pub fn new(awaited: BTreeMap<C, bool>, until: Time) -> Grace<C, J> {
        Grace { is_active: !awaited.is_empty(), awaited, until, parked: Vec::new() }
    }

    #[must_use]
    pub fn is_active(&self) -> bool {
        self.is_active
    }

    /// When [`Grace::handle_timeout`] is due; `Time::FAR` if the period is over.
    #[must_use]
    pub fn due(&self) -> Time {
        if self.is_active { self.until } else { Time::FAR }
    }

    /// Whether this client may reclaim any lock that it claims to have held: no other client had it since.
    #[must_use]
    pub fn may_reclaim_any(&self, client: &C) -> bool {
        self.is_active && self.awaited.get(client) == Some(&true)
    }

    /// Whether a call has to wait for the end of the period.
    #[must_use]
    pub fn must_wait(&self, call: &Call) -> bool {
        let needs_end =
            call.is_mutation() || matches!(call, Call::Lock { reclaim: false, .. } | Call::GetLock { .. });
        self.is_active && needs_end
    }

    /// Parks a call that [must wait](Grace::must_wait).
    pub fn park(&mut self, job: J) {
        self.parked.push(job);
    }

    /// Removes and returns the parked calls that satisfy `is_such`.
    pub fn take_parked(&mut self, is_such: impl Fn(&J) -> bool) -> Vec<J> {
        self.parked.extract_if(.., |job| is_such(job)).collect()
    }

    /// Removes a client that has reclaimed its state, or had none left.
    pub fn handle_return(&mut self, client: &C) {
        self.awaited.remove(client);
    }

    /// Ends the wait for absent clients once `until` is reached. Returns how many did not come back.
    pub fn handle_timeout(&mut self, now: Time) -> usize {
        if self.until <= now { std::mem::take(&mut self.awaited).len() } else { 0 }
    }

    /// Whether no client is awaited any more, so that the period can be ended.
    #[must_use]
    pub fn can_end(&self) -> bool {
        self.is_active && self.awaited.is_empty()
    }

    /// Ends the period. Returns the parked calls in their order.
    pub fn end(&mut self) -> Vec<J> {
        (self.is_active, self.until) = (false, Time(0));
        std::mem::take(&mut self.parked)
    }
}
