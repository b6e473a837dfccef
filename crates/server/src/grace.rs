//! Grace period after a restart: clients of the earlier server may return and reclaim their state.

use crate::pool::Job;
use crate::session::Session;
use crate::session_registry::Who;
use nigh_types::{Call, CallId, Time};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Grace period. A client of the earlier server may still trust the grants of its old session. Until that ends, no
/// mutation is applied, and a lock goes only to the client that held it. Calls that wait occupy no thread. No other
/// lock is taken under `state`.
pub(crate) struct Grace {
    /// The grace period is not over. Only ever cleared, with `state` held.
    stands: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// Clients that have not returned, and whether no other client can have held the locks that they reclaim.
    absent: BTreeMap<Who, bool>,
    until: Time,
    parked: Vec<Job>,
}

impl std::fmt::Debug for Grace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grace").field("stands", &self.stands()).finish_non_exhaustive()
    }
}

impl Grace {
    /// A grace period until all of these clients are back, or until `until`.
    pub(crate) fn new(absent: BTreeMap<Who, bool>, until: Time) -> Grace {
        let stands = AtomicBool::new(!absent.is_empty());
        Grace { stands, state: Mutex::new(State { absent, until, parked: Vec::new() }) }
    }

    pub(crate) fn stands(&self) -> bool {
        self.stands.load(Ordering::SeqCst)
    }

    /// Whether this client may reclaim any lock that it claims to have held: no other client had it since.
    pub(crate) fn believes(&self, who: Who) -> bool {
        self.stands() && self.state.lock().absent.get(&who) == Some(&true)
    }

    /// Ends the wait for absent clients once `until` is reached. Returns how many did not come back.
    pub(crate) fn run_out(&self, now: Time) -> usize {
        let mut state = self.state.lock();
        if state.until <= now { std::mem::take(&mut state.absent).len() } else { 0 }
    }

    /// Parks a call that has to wait. Returns the call if it may run now.
    pub(crate) fn admit(&self, job: Job) -> Option<Job> {
        if !self.stands() || !has_to_wait(&job.request.call) {
            return Some(job);
        }
        let mut state = self.state.lock();
        if !self.stands() {
            return Some(job);
        }
        state.parked.push(job);
        None
    }

    /// Removes a client that has reclaimed its state, or had none left.
    pub(crate) fn returned(&self, who: Who) {
        self.state.lock().absent.remove(&who);
    }

    /// Ends the grace period once no client is absent. Returns the parked calls in their order. `record` runs first:
    /// locks of absent clients may now go to others, and the next server has to know that. If it fails, the caller
    /// tries again later.
    pub(crate) fn end(&self, record: impl FnOnce() -> bool) -> Vec<Job> {
        if !self.stands() {
            return Vec::new();
        }
        let waits = !self.state.lock().absent.is_empty();
        // Clients are only ever removed from `absent`, so the slow recording needs no lock.
        if waits || !record() {
            return Vec::new();
        }
        let mut state = self.state.lock();
        self.stands.store(false, Ordering::SeqCst);
        std::mem::take(&mut state.parked)
    }

    /// Removes and returns all parked calls.
    pub(crate) fn take_parked(&self) -> Vec<Job> {
        std::mem::take(&mut self.state.lock().parked)
    }

    /// Removes and returns one parked call.
    pub(crate) fn take_back(&self, session: &Arc<Session>, call: CallId) -> Option<Job> {
        let mut state = self.state.lock();
        let is_it = |job: &Job| job.call == call && Arc::ptr_eq(&job.session, session);
        let at = state.parked.iter().position(is_it)?;
        Some(state.parked.remove(at))
    }

    /// Drops the parked calls of an ended session.
    pub(crate) fn forget(&self, session: &Arc<Session>) {
        let theirs = |job: &mut Job| Arc::ptr_eq(&job.session, session);
        let dropped: Vec<Job> = self.state.lock().parked.extract_if(.., theirs).collect();
        drop(dropped);
    }
}

fn has_to_wait(call: &Call) -> bool {
    call.is_mutation() || matches!(call, Call::Lock { reclaim: false, .. } | Call::GetLock { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_period_ends_only_after_lost_locks_are_recorded() {
        let grace = Grace::new([((1, 1), true), ((1, 2), true)].into(), Time(5));
        let unasked = || -> bool { panic!("somebody is waited for") };
        grace.returned((1, 2));
        assert_eq!(grace.run_out(Time(4)), 0);
        assert!(grace.end(unasked).is_empty() && grace.believes((1, 1)));
        assert_eq!((grace.run_out(Time(5)), grace.run_out(Time(6))), (1, 0));
        assert!(!grace.believes((1, 1)), "it is too late");
        let fails = || {
            assert!(grace.stands());
            false
        };
        assert!(grace.end(fails).is_empty() && grace.stands());
        let recorded = || grace.stands();
        assert!(grace.end(recorded).is_empty() && !grace.stands());
    }
}
