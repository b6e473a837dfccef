//! The threads that execute calls.

use crate::leases::OpenChange;
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
}

impl Job {
    /// Nobody waits for it, and it did nothing.
    pub(crate) fn give_up(self) {
        drop(self.change);
        self.session.answer(self.call, Response::plain(Err(Errno::INTR)));
        drop(self.taken);
    }
}

/// A bounded number of threads and two queues. Calls that may take long (listings, copies, syncs) never
/// have more than half of the threads, so that others are not kept waiting by them. The queues are
/// bounded by the calls that each session may have outstanding.
pub(crate) struct Pool {
    queues: Mutex<Queues>,
    wake: Condvar,
    long_limit: u32,
}

#[derive(Default)]
struct Queues {
    short: VecDeque<Job>,
    long: VecDeque<Job>,
    long_running: u32,
    stopping: bool,
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
        let mut queues = self.queues.lock();
        if is_long(&job.request.call) {
            queues.long.push_back(job)
        } else {
            queues.short.push_back(job)
        }
        drop(queues);
        self.wake.notify_one();
    }

    /// How many calls of a session wait for a thread.
    pub(crate) fn queued(&self, session: &Arc<Session>) -> u64 {
        let queues = self.queues.lock();
        let jobs = queues.short.iter().chain(&queues.long);
        jobs.filter(|job| Arc::ptr_eq(&job.session, session)).count() as u64
    }

    /// Takes back a call that no thread has begun.
    pub(crate) fn take_back(&self, session: &Arc<Session>, call: CallId) -> Option<Job> {
        let is_it = |job: &Job| job.call == call && Arc::ptr_eq(&job.session, session);
        let mut queues = self.queues.lock();
        let Queues { short, long, .. } = &mut *queues;
        for queue in [short, long] {
            if let Some(at) = queue.iter().position(is_it) {
                return queue.remove(at);
            }
        }
        None
    }

    /// Drops all calls of a session that no thread has begun.
    pub(crate) fn forget(&self, session: &Arc<Session>) {
        let mut queues = self.queues.lock();
        let Queues { short, long, .. } = &mut *queues;
        let mut dropped = Vec::new();
        for queue in [short, long] {
            let (theirs, others): (VecDeque<Job>, VecDeque<Job>) =
                queue.drain(..).partition(|job: &Job| Arc::ptr_eq(&job.session, session));
            *queue = others;
            dropped.push(theirs);
        }
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
            let long_allowed = queues.long_running < self.long_limit;
            let (job, long) = match queues.short.pop_front() {
                Some(job) => (Some(job), false),
                None if long_allowed => (queues.long.pop_front(), true),
                None => (None, false),
            };
            let Some(job) = job else {
                self.wake.wait(&mut queues);
                continue;
            };
            queues.long_running += u32::from(long);
            drop(queues);
            let session = Arc::clone(&job.session);
            session.execute(job);
            drop(session);
            queues = self.queues.lock();
            if long {
                queues.long_running -= 1;
                self.wake.notify_one();
            }
        }
    }
}

fn is_long(call: &Call) -> bool {
    matches!(call, Call::List { .. } | Call::CopyRange { .. } | Call::Fsync { .. } | Call::Fallocate { .. })
}
