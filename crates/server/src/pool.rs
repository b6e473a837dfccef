//! The threads that execute calls.

use crate::holding::OpenChange;
use crate::ops::ahead::Begun;
use crate::session::Session;
use crate::work::Taken;
use nigh_types::{Call, CallId, Errno, Request, Response};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;

/// One call waiting for a thread.
pub(crate) struct Job {
    pub(crate) session: Arc<Session>,
    pub(crate) call: CallId,
    pub(crate) request: Request,
    /// The change that it began when it was executed before.
    pub(crate) change: Option<OpenChange>,
    pub(crate) taken: Taken,
    /// How far a call came that answers in parts, when it was executed before.
    pub(crate) begun: Option<Begun>,
}

impl Job {
    /// Nobody waits for it, and it changed nothing.
    pub(crate) fn give_up(self) {
        drop(self.change);
        if matches!(self.begun, Some(Begun::Listing(_))) {
            self.session.outbox.done(&self.request.call);
        }
        self.session.walks.forget(self.call);
        if self.request.call.waits_for_lock()
            && let Some(attached) = self.session.attached()
        {
            attached.locks.forget(self.session.id, self.call);
        }
        self.session.answer(self.call, Response::plain(Err(Errno::INTR)));
        drop(self.taken);
    }
}

impl Job {
    fn execute(self) {
        let session = Arc::clone(&self.session);
        session.execute(self);
    }
}

/// A bounded number of threads and two queues. What may take long (listings, copies, syncs, closing files)
/// never has more than half of the threads, so that others are not kept waiting by it; and it has one
/// whatever else there is to do. The queues are bounded by the calls that each session may have outstanding,
/// and the files that it may have open.
pub(crate) struct Pool {
    queues: Mutex<Queues>,
    wake: Condvar,
    long_limit: u32,
}

#[derive(Default)]
struct Queues {
    short: VecDeque<Box<Job>>,
    long: VecDeque<Work>,
    long_running: u32,
    stopping: bool,
}

/// What may take long.
enum Work {
    Call(Box<Job>),
    Other(Box<dyn FnOnce() + Send>),
}

/// The fewest threads a pool has.
const MIN_THREADS: u32 = 4;

impl Pool {
    pub(crate) fn start(threads: u32) -> std::io::Result<Arc<Pool>> {
        let threads = threads.max(MIN_THREADS);
        let pool = Arc::new(Pool { queues: Mutex::default(), wake: Condvar::new(), long_limit: threads / 2 });
        for number in 0..threads {
            let worker = Arc::clone(&pool);
            std::thread::Builder::new().name(format!("nigh-serve-{number}")).spawn(move || worker.work())?;
        }
        Ok(pool)
    }

    pub(crate) fn submit(&self, job: Job) {
        let job = Box::new(job);
        let mut queues = self.queues.lock();
        if is_long(&job.request.call) {
            queues.long.push_back(Work::Call(job))
        } else {
            queues.short.push_back(job)
        }
        drop(queues);
        self.wake.notify_one();
    }

    /// How many calls of a session wait for a thread.
    pub(crate) fn queued(&self, session: &Arc<Session>) -> u64 {
        let queues = self.queues.lock();
        let long = queues.long.iter().filter_map(|work| match work {
            Work::Call(job) => Some(job),
            Work::Other(_) => None,
        });
        let jobs = queues.short.iter().chain(long);
        jobs.filter(|job| Arc::ptr_eq(&job.session, session)).count() as u64
    }

    /// Does something that may take long on a thread of the pool, or never if the server stops before.
    pub(crate) fn later(&self, what: impl FnOnce() + Send + 'static) {
        self.queues.lock().long.push_back(Work::Other(Box::new(what)));
        self.wake.notify_one();
    }

    /// Takes back a call that no thread has begun.
    pub(crate) fn take_back(&self, session: &Arc<Session>, call: CallId) -> Option<Job> {
        let is_it = |job: &Job| job.call == call && Arc::ptr_eq(&job.session, session);
        let mut queues = self.queues.lock();
        if let Some(at) = queues.short.iter().position(|job| is_it(job)) {
            return queues.short.remove(at).map(|job| *job);
        }
        let at = queues.long.iter().position(|work| matches!(work, Work::Call(job) if is_it(job)))?;
        match queues.long.remove(at) {
            Some(Work::Call(job)) => Some(*job),
            _ => None,
        }
    }

    /// Drops all calls of a session that no thread has begun.
    pub(crate) fn forget(&self, session: &Arc<Session>) {
        let mut queues = self.queues.lock();
        let is_theirs = |job: &Job| Arc::ptr_eq(&job.session, session);
        let dropped = (
            take_all(&mut queues.short, |job| is_theirs(job)),
            take_all(&mut queues.long, |work| matches!(work, Work::Call(job) if is_theirs(job))),
        );
        drop(queues);
        drop(dropped); // ends their changes, which takes other locks
    }

    /// The threads end when they have done what they are at.
    pub(crate) fn stop(&self) {
        self.queues.lock().stopping = true;
        self.wake.notify_all();
    }

    fn work(&self) {
        let mut queues = self.queues.lock();
        loop {
            if queues.stopping {
                return;
            }
            let Some((work, long)) = queues.next(self.long_limit) else {
                self.wake.wait(&mut queues);
                continue;
            };
            drop(queues);
            match work {
                Work::Call(job) => job.execute(),
                Work::Other(what) => what(),
            }
            queues = self.queues.lock();
            if long {
                queues.long_running -= 1;
                self.wake.notify_one();
            }
        }
    }
}

impl Queues {
    /// What the next thread does, and whether that may take long.
    fn next(&mut self, long_limit: u32) -> Option<(Work, bool)> {
        let long_first = self.long_running == 0 && !self.long.is_empty();
        if !long_first && let Some(job) = self.short.pop_front() {
            return Some((Work::Call(job), false));
        }
        if self.long_running >= long_limit {
            return None;
        }
        let work = self.long.pop_front()?;
        self.long_running += 1;
        Some((work, true))
    }
}

/// Takes out those of which that is so.
fn take_all<T>(queue: &mut VecDeque<T>, is_so: impl Fn(&T) -> bool) -> VecDeque<T> {
    let (taken, left) = queue.drain(..).partition(is_so);
    *queue = left;
    taken
}

fn is_long(call: &Call) -> bool {
    matches!(
        call,
        Call::List { .. }
            | Call::Dirents { .. }
            | Call::Ahead { .. }
            | Call::CopyRange { .. }
            | Call::Fsync { .. }
            | Call::Fallocate { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leases::Leases;
    use nigh_link::Peer;
    use nigh_native::lease::LeaseConfig;
    use nigh_native::{ServerConfig, ServerConnection};
    use nigh_types::{Credentials, NodeId, Place};
    use std::os::unix::net::UnixStream;

    #[test]
    fn short_calls_leave_a_thread_to_long_ones_and_long_ones_leave_half_to_them() {
        let (link, _theirs) = UnixStream::pair().unwrap();
        let leases = Leases::new(LeaseConfig::default(), None);
        let story = crate::events::Story::new(&Arc::default(), nigh_link::Kind::Unix);
        let connection = ServerConnection::new(crate::session::now(), ServerConfig::default());
        let of = (link.into(), Peer::in_process(), 0);
        let session = Session::new(connection, of, story, &leases, &Arc::default());
        let under_way = Arc::new(crate::work::Work::default());
        let session = Arc::new(session);
        let mut queues = Queues::default();
        for call in 0..100 {
            let node = Place::bare(NodeId { ino: 1, generation: 1 });
            let call_id = CallId(call);
            let request =
                Request { credentials: Credentials::default(), name: None, call: Call::GetAttr { node } };
            let session = Arc::clone(&session);
            let taken = under_way.take().unwrap();
            let job = Job { session, call: call_id, request, change: None, taken, begun: None };
            queues.short.push_back(Box::new(job));
            queues.long.push_back(Work::Other(Box::new(|| ())));
        }
        let mut next = || match queues.next(2) {
            Some((_, true)) => 'l',
            Some((_, false)) => 's',
            None => '-',
        };
        assert_eq!(next(), 'l', "though there are short ones");
        assert!((0..100).all(|_| next() == 's'));
        assert_eq!([next(), next()], ['l', '-']);
    }
}
