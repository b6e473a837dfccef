//! Grace period after a restart: clients of the earlier server may return and reclaim their state.

use crate::pool::job::Job;
use crate::session::Session;
use crate::session::registry::ClientIncarnation;
use nigh_types::{CallId, Time};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The server's grace period ([`nigh_lease::Grace`]). Calls that wait occupy no thread. No other lock is taken under
/// `state`.
pub(crate) struct Grace {
    /// The grace period is not over. Only ever cleared, with `state` held.
    active: Arc<AtomicBool>,
    state: Mutex<nigh_lease::Grace<ClientIncarnation, Job>>,
}

impl std::fmt::Debug for Grace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grace").field("stands", &self.is_active()).finish_non_exhaustive()
    }
}

impl Grace {
    /// A grace period until all of these clients are back, or until `until`.
    pub(crate) fn new(absent: BTreeMap<ClientIncarnation, bool>, until: Time) -> Grace {
        let active = Arc::new(AtomicBool::new(!absent.is_empty()));
        Grace { active, state: Mutex::new(nigh_lease::Grace::new(absent, until)) }
    }

    /// The flag that is set while the grace period lasts.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.active)
    }

    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::SeqCst)
    }

    /// Whether this client may reclaim any lock that it claims to have held: no other client had it since.
    pub(crate) fn may_reclaim_any(&self, who: ClientIncarnation) -> bool {
        self.is_active() && self.state.lock().may_reclaim_any(&who)
    }

    /// Ends the wait for absent clients once `until` is reached. Returns how many did not come back.
    pub(crate) fn expire_absent(&self, now: Time) -> usize {
        self.state.lock().handle_timeout(now)
    }

    /// Parks a call that has to wait. Returns the call if it may run now.
    pub(crate) fn admit(&self, job: Job) -> Option<Job> {
        if !self.is_active() {
            return Some(job);
        }
        let mut state = self.state.lock();
        if !state.must_wait(&job.request.call) {
            return Some(job);
        }
        state.park(job);
        None
    }

    /// Removes a client that has reclaimed its state, or had none left.
    pub(crate) fn returned(&self, who: ClientIncarnation) {
        self.state.lock().handle_return(&who);
    }

    /// Ends the grace period once no client is absent. Returns the parked calls in their order. `record` runs first:
    /// locks of absent clients may now go to others, and the next server has to know that. If it fails, the caller
    /// tries again later.
    pub(crate) fn end(&self, record: impl FnOnce() -> bool) -> Vec<Job> {
        if !self.is_active() {
            return Vec::new();
        }
        let waits = !self.state.lock().can_end();
        // A client that is not awaited any more is never awaited again, so the slow recording needs no lock.
        if waits || !record() {
            return Vec::new();
        }
        let mut state = self.state.lock();
        self.active.store(false, Ordering::SeqCst);
        state.end()
    }

    /// Removes and returns all parked calls.
    pub(crate) fn take_parked(&self) -> Vec<Job> {
        self.state.lock().take_parked(|_| true)
    }

    /// Removes and returns one parked call.
    pub(crate) fn take_back(&self, session: &Arc<Session>, call: CallId) -> Option<Job> {
        let is_it = |job: &Job| job.call == call && Arc::ptr_eq(&job.session, session);
        self.state.lock().take_parked(is_it).pop()
    }

    /// Drops the parked calls of an ended session.
    pub(crate) fn forget(&self, session: &Arc<Session>) {
        let dropped = self.state.lock().take_parked(|job| Arc::ptr_eq(&job.session, session));
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_period_ends_only_after_lost_locks_are_recorded() {
        let grace = Grace::new([((1, 1), true), ((1, 2), true)].into(), Time(5));
        let unasked = || -> bool { panic!("a holder is waited for") };
        grace.returned((1, 2));
        assert_eq!(grace.expire_absent(Time(4)), 0);
        assert!(grace.end(unasked).is_empty() && grace.may_reclaim_any((1, 1)));
        assert_eq!((grace.expire_absent(Time(5)), grace.expire_absent(Time(6))), (1, 0));
        assert!(!grace.may_reclaim_any((1, 1)), "it is too late");
        let fails = || {
            assert!(grace.is_active());
            false
        };
        assert!(grace.end(fails).is_empty() && grace.is_active());
        let recorded = || grace.is_active();
        assert!(grace.end(recorded).is_empty() && !grace.is_active());
    }
}
