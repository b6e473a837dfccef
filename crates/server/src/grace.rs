//! The time after a restart in which clients of the server before may come back and claim what they had.

use crate::pool::Job;
use crate::register::Who;
use crate::session::Session;
use nigh_types::{Call, CallId, Time};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// While a client that had a session may still believe what the server before granted it, nobody changes
/// anything, and nobody takes a lock but who had it. Calls that have to wait for that occupy no thread. Under its
/// lock no other is taken.
pub(crate) struct Grace {
    /// Not over. Only ever cleared, with `state` held.
    stands: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// Who is waited for, and whether what they claim to have locked can have been nobody else's meanwhile.
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
    /// Until all of them are back, or it is that late.
    pub(crate) fn new(absent: BTreeMap<Who, bool>, until: Time) -> Grace {
        let stands = AtomicBool::new(!absent.is_empty());
        Grace { stands, state: Mutex::new(State { absent, until, parked: Vec::new() }) }
    }

    pub(crate) fn stands(&self) -> bool {
        self.stands.load(Ordering::SeqCst)
    }

    /// Whether this client may claim what it had locked, whatever that is: nobody else had it since.
    pub(crate) fn believes(&self, who: Who) -> bool {
        self.stands() && self.state.lock().absent.get(&who) == Some(&true)
    }

    /// Once it is that late nobody is waited for any more. How many did not come back.
    pub(crate) fn run_out(&self, now: Time) -> usize {
        let mut state = self.state.lock();
        if state.until <= now { std::mem::take(&mut state.absent).len() } else { 0 }
    }

    /// Keeps a call that has to wait; `None`: it is kept.
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

    /// This client has claimed what it had, or had nothing left.
    pub(crate) fn returned(&self, who: Who) {
        self.state.lock().absent.remove(&who);
    }

    /// Ends it when nobody is waited for any more: the calls that may go on now, in their order. `record` is said
    /// before: others may have then what was locked by those who are not back, and the next server is to know.
    /// Where that cannot be recorded this is to be asked again.
    pub(crate) fn end(&self, record: impl FnOnce() -> bool) -> Vec<Job> {
        if !self.stands() {
            return Vec::new();
        }
        let waits = !self.state.lock().absent.is_empty();
        // Nobody is absent who was not before, so it need not be locked while that is recorded, which takes time.
        if waits || !record() {
            return Vec::new();
        }
        let mut state = self.state.lock();
        self.stands.store(false, Ordering::SeqCst);
        std::mem::take(&mut state.parked)
    }

    /// Takes out all calls that wait.
    pub(crate) fn take_parked(&self) -> Vec<Job> {
        std::mem::take(&mut self.state.lock().parked)
    }

    /// Takes back a call that waits.
    pub(crate) fn take_back(&self, session: &Arc<Session>, call: CallId) -> Option<Job> {
        let mut state = self.state.lock();
        let is_it = |job: &Job| job.call == call && Arc::ptr_eq(&job.session, session);
        let at = state.parked.iter().position(is_it)?;
        Some(state.parked.remove(at))
    }

    /// Drops the calls of a session that is over.
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
    fn nobody_has_what_was_anothers_before_the_next_server_would_know() {
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
