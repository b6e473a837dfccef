//! Thread pool that executes calls.

mod fair;
pub(crate) mod job;
mod lent;

use crate::lease::holder::{CallExecutor, ParkedCall};
use crate::session::Session;
use fair::FairQueue;
pub(crate) use fair::QueueKey;
use job::Job;
use lent::{Lent, Loans};
use nigh_types::{Call, CallId, Origin};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// A bounded thread pool with two queues. Each queue serves origins round-robin, and the sessions within an origin.
/// Long calls (listings, copies, syncs, closing files) get at most half of the threads, so that they do not delay
/// short ones; they get at least one thread under any load. The limits on a session's outstanding calls and open
/// files bound the queues. A thread whose call does not end is replaced (`lent.rs`).
pub(crate) struct Pool {
    queues: Mutex<Queues>,
    wake: Condvar,
    /// Signals work that waits while all threads are busy, or work held for a hung filesystem.
    backlog: Condvar,
    /// Interrupts the watcher's polling interval on [`Pool::stop`].
    pause: Condvar,
    limits: Limits,
}

/// Limits on the threads of long calls.
#[derive(Clone, Copy)]
struct Limits {
    long: u32,
    /// Includes threads reserved for origins without a running long call, which need not wait for another origin's
    /// long calls.
    long_most: u32,
}

#[derive(Default)]
struct Queues {
    short: FairQueue<Box<Job>>,
    long: FairQueue<Work>,
    long_running: u32,
    /// The number of running long calls, by origin.
    long_of: FxHashMap<Origin, u32>,
    /// Threads that wait for work.
    idle: u32,
    /// The current work of each thread, by thread number.
    running: FxHashMap<u64, Running>,
    last_thread: u64,
    loans: Loans,
    /// Replacement threads that could not be started.
    unstarted: u32,
    /// Work held for hung filesystems, with the time since when.
    held: Vec<(Work, Instant)>,
    /// The watcher is polling.
    watching: bool,
    stopping: bool,
}

/// The current work of a thread.
struct Running {
    since: Instant,
    what: Lent,
    /// Counts as a long call.
    long: bool,
    lent: bool,
}

/// Long work.
enum Work {
    Call(Box<Job>),
    Other(QueueKey, Box<dyn FnOnce() + Send>),
}

impl Work {
    fn share(&self) -> QueueKey {
        match self {
            Work::Call(job) => job.session.queue_key(),
            Work::Other(share, _) => *share,
        }
    }

    fn what(&self) -> Lent {
        let place = match self {
            Work::Call(job) => job.place(),
            Work::Other(..) => None,
        };
        Lent { origin: self.share().0, target: place }
    }
}

/// Minimum size of a pool.
const MIN_THREADS: u32 = 4;

/// Queue key of the server's own work.
pub(crate) const OWN: QueueKey = (Origin { uid: None, host: None }, 0);

impl CallExecutor for Weak<Pool> {
    fn resume(&self, call: Box<dyn ParkedCall>) {
        if let Some(pool) = self.upgrade() {
            pool.submit(Job::of_parked(call));
        }
    }
}

impl Pool {
    pub(crate) fn start(threads: u32) -> std::io::Result<Arc<Pool>> {
        let threads = threads.max(MIN_THREADS);
        let limits = Limits { long: threads / 2, long_most: (threads / 2).max(threads - 2) };
        let pool = Arc::new(Pool {
            queues: Mutex::default(),
            wake: Condvar::new(),
            backlog: Condvar::new(),
            pause: Condvar::new(),
            limits,
        });
        for _ in 0..threads {
            pool.start_thread()?;
        }
        let watcher = Arc::clone(&pool);
        std::thread::Builder::new().name("nigh-pool".into()).spawn(move || watcher.watch())?;
        Ok(pool)
    }

    fn start_thread(self: &Arc<Pool>) -> std::io::Result<()> {
        let worker = Arc::clone(self);
        let number = {
            let mut queues = self.queues.lock();
            queues.last_thread += 1;
            queues.last_thread
        };
        std::thread::Builder::new()
            .name(format!("nigh-serve-{number}"))
            .spawn(move || worker.work(number))?;
        Ok(())
    }

    pub(crate) fn submit(&self, job: Job) {
        let job = Box::new(job);
        let (share, long) = (job.session.queue_key(), is_long(&job));
        let mut queues = self.queues.lock();
        if long {
            queues.long.push(share, Work::Call(job))
        } else {
            queues.short.push(share, job)
        }
        self.wake_worker(queues);
    }

    fn wake_worker(&self, queues: MutexGuard<'_, Queues>) {
        self.call_watcher(&queues);
        drop(queues);
        self.wake.notify_one();
    }

    /// Number of a session's calls that wait for a thread.
    pub(crate) fn queued(&self, session: &Arc<Session>) -> u64 {
        let (queues, share) = (self.queues.lock(), session.queue_key());
        let long = queues.long.count(share, |work| matches!(work, Work::Call(_)));
        let kept = queues.held.iter().filter(|(work, _)| work.share() == share).count();
        (queues.short.count(share, |_| true) + long + kept) as u64
    }

    /// Queues long work, in the session's turn. It is never executed if the server stops first.
    pub(crate) fn later(&self, share: QueueKey, what: impl FnOnce() + Send + 'static) {
        let mut queues = self.queues.lock();
        queues.long.push(share, Work::Other(share, Box::new(what)));
        self.wake_worker(queues);
    }

    /// Number of threads blocked in hung filesystems, and of work items held for these.
    pub(crate) fn lent(&self) -> (usize, usize) {
        let queues = self.queues.lock();
        (queues.loans.count(), queues.held.len())
    }

    /// Removes and returns a call that no thread has begun.
    pub(crate) fn take_back(&self, session: &Arc<Session>, call: CallId) -> Option<Job> {
        let share = session.queue_key();
        let mut queues = self.queues.lock();
        if let Some(job) = queues.short.take(share, |job| job.call == call).pop_front() {
            return Some(*job);
        }
        let is_it = |work: &Work| matches!(work, Work::Call(job) if job.call == call);
        let found = queues.long.take(share, is_it).pop_front().or_else(|| {
            let at = queues.held.iter().position(|(work, _)| work.share() == share && is_it(work))?;
            Some(queues.held.swap_remove(at).0)
        });
        match found {
            Some(Work::Call(job)) => Some(*job),
            _ => None,
        }
    }

    /// Drops all calls of a session that no thread has begun.
    pub(crate) fn forget(&self, session: &Arc<Session>) {
        let share = session.queue_key();
        let mut queues = self.queues.lock();
        let short = queues.short.take(share, |_| true);
        let long = queues.long.take(share, |work| matches!(work, Work::Call(_)));
        let is_theirs =
            |(work, _): &mut (Work, Instant)| matches!(work, Work::Call(_)) && work.share() == share;
        let kept: Vec<_> = queues.held.extract_if(.., is_theirs).collect();
        drop(queues);
        drop((short, long, kept)); // ends their changes, which takes other locks
    }

    /// Makes each thread exit after its current work.
    pub(crate) fn stop(&self) {
        self.queues.lock().stopping = true;
        self.wake.notify_all();
        self.backlog.notify_all();
        self.pause.notify_all();
    }

    fn call_watcher(&self, queues: &Queues) {
        if !queues.watching && (queues.has_backlog(self.limits) || !queues.held.is_empty()) {
            self.backlog.notify_one();
        }
    }

    fn work(&self, number: u64) {
        let mut queues = self.queues.lock();
        loop {
            if queues.stopping {
                return;
            }
            let Some((work, long)) = queues.next(self.limits) else {
                queues.idle += 1;
                self.wake.wait(&mut queues);
                queues.idle -= 1;
                continue;
            };
            let what = work.what();
            // Other clients wait for the end of a change that has begun.
            let has_begun = matches!(&work, Work::Call(job) if job.change.is_some());
            if queues.loans.are_enough_for(what.origin, what.target, has_begun) {
                long.into_iter().for_each(|origin| queues.end_long(origin));
                queues.held.push((work, Instant::now()));
                self.call_watcher(&queues);
                continue;
            }
            let running = Running { since: Instant::now(), what, long: long.is_some(), lent: false };
            queues.running.insert(number, running);
            self.call_watcher(&queues);
            drop(queues);
            match work {
                Work::Call(job) => job.execute(),
                Work::Other(_, what) => what(),
            }
            queues = self.queues.lock();
            let Some(Running { what, long, lent, .. }) = queues.running.remove(&number) else { return };
            if lent {
                // A replacement thread has taken its place.
                queues.loans.end(what);
                queues.requeue_held();
                if queues.unstarted == 0 {
                    return self.wake_worker(queues);
                }
                queues.unstarted -= 1;
                self.wake.notify_one();
                continue;
            }
            if long {
                queues.end_long(what.origin);
                self.wake.notify_one();
            }
        }
    }

    /// Runs the watcher: replaces threads whose calls do not end while work waits, and fails calls that are held for
    /// too long.
    fn watch(self: &Arc<Pool>) {
        let mut queues = self.queues.lock();
        while !queues.stopping {
            queues.watching = queues.has_backlog(self.limits) || !queues.held.is_empty();
            if !queues.watching {
                self.backlog.wait(&mut queues);
                continue;
            }
            self.pause.wait_for(&mut queues, lent::PATIENCE / 4);
            let spares = if queues.has_backlog(self.limits) {
                queues.lend() + std::mem::take(&mut queues.unstarted)
            } else {
                0
            };
            let late = queues.take_overdue();
            let missing = MutexGuard::unlocked(&mut queues, || {
                let missing = (0..spares).filter(|_| self.start_thread().is_err()).count();
                for work in late {
                    match work {
                        Work::Call(job) => job.fail(),
                        Work::Other(_, what) => drop(what),
                    }
                }
                u32::try_from(missing).unwrap_or(u32::MAX)
            });
            queues.unstarted += missing;
        }
    }
}

impl Queues {
    /// Takes the next work. Also returns its origin if it is long.
    fn next(&mut self, limits: Limits) -> Option<(Work, Option<Origin>)> {
        let long_first = self.long_running == 0 && !self.long.is_empty();
        if !long_first && let Some(job) = self.short.pop() {
            return Some((Work::Call(job), None));
        }
        let work = if self.long_running < limits.long {
            self.long.pop()?
        } else if self.long_running < limits.long_most {
            let long_of = &self.long_of;
            self.long.pop_of(|origin| !long_of.contains_key(origin))?
        } else {
            return None;
        };
        let (origin, _) = work.share();
        self.long_running += 1;
        *self.long_of.entry(origin).or_default() += 1;
        Some((work, Some(origin)))
    }

    /// Whether work waits while all threads available to it are busy.
    fn has_backlog(&self, limits: Limits) -> bool {
        let long = !self.long.is_empty();
        self.idle == 0 && (long || !self.short.is_empty()) || long && self.long_running >= limits.long
    }

    /// Marks threads with overlong calls as lent. Returns how many replacements to start.
    fn lend(&mut self) -> u32 {
        let mut spares = 0;
        let mut ended = Vec::new();
        for running in self.running.values_mut() {
            let waits = !running.lent && running.since.elapsed() >= lent::PATIENCE;
            if waits && self.loans.count() < lent::MOST {
                running.lent = true;
                self.loans.add(running.what);
                ended.extend(running.long.then_some(running.what.origin));
                spares += 1;
            }
        }
        ended.into_iter().for_each(|origin| self.end_long(origin));
        if spares > 0 {
            let lent = self.loans.count();
            tracing::warn!(
                lent,
                "calls wait for a filesystem that does not answer: other threads take their places"
            );
        }
        spares
    }

    /// Requeues held work after a lent thread has returned.
    fn requeue_held(&mut self) {
        for (work, _) in std::mem::take(&mut self.held) {
            let share = work.share();
            match work {
                Work::Call(job) if !is_long(&job) => self.short.push(share, job),
                work => self.long.push(share, work),
            }
        }
    }

    /// Takes out work that was held for too long.
    fn take_overdue(&mut self) -> Vec<Work> {
        let late = |(work, since): &mut (Work, Instant)| {
            let may_fail = matches!(work, Work::Call(job) if !reports_data_loss(&job.request.call));
            may_fail && since.elapsed() >= lent::LIMIT
        };
        self.held.extract_if(.., late).map(|(work, _)| work).collect()
    }

    fn end_long(&mut self, origin: Origin) {
        self.long_running -= 1;
        if let Some(count) = self.long_of.get_mut(&origin) {
            *count -= 1;
            if *count == 0 {
                self.long_of.remove(&origin);
            }
        }
    }
}

/// Whether a failure of the call reports the loss of written or mapped data.
fn reports_data_loss(call: &Call) -> bool {
    matches!(call, Call::Fsync { .. }) || call.is_write_back()
}

/// Whether a call may take long: in proportion to entries or bytes, or until a disk has written.
fn is_long(job: &Job) -> bool {
    match &job.request.call {
        Call::List { .. }
        | Call::ListNames { .. }
        | Call::Prefetch { .. }
        // May read the directory that last contained the inode number.
        | Call::LookupNumber { .. }
        | Call::CopyRange { .. }
        | Call::Fsync { .. }
        | Call::Fallocate { .. } => true,
        Call::Write { flags, handle, .. } => {
            let syncs = |handle| job.session.attached().is_some_and(|attached| attached.files.syncs(handle));
            flags.sync || handle.is_some_and(syncs)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::test_session::test_session;
    use nigh_link::Peer;
    use nigh_types::{Credentials, NodeId, NodeRef, Request};

    /// Factory for calls of one session.
    struct Jobs {
        session: Arc<Session>,
        under_way: Arc<crate::limits::inflight_calls::InflightCalls>,
    }

    impl Jobs {
        fn new() -> Jobs {
            Jobs { session: test_session(0, Peer::in_process()), under_way: Arc::default() }
        }

        fn job(&self, number: u64, call: Call) -> Job {
            let request = Request { credentials: Credentials::default(), mutation_id: None, call };
            let (session, taken) = (Arc::clone(&self.session), self.under_way.take().unwrap());
            Job {
                session,
                call: CallId(number),
                request,
                change: None,
                inflight: taken,
                resent: false,
                stream: None,
            }
        }
    }

    #[test]
    fn long_calls_get_at_least_one_and_at_most_half_of_the_threads() {
        let jobs = Jobs::new();
        let mut queues = Queues::default();
        for call in 0..100 {
            let node = NodeRef::without_hint(NodeId { ino: 1, generation: 1 });
            queues.short.push(OWN, Box::new(jobs.job(call, Call::GetAttr { node })));
            queues.long.push(OWN, Work::Other(OWN, Box::new(|| ())));
        }
        let limits = Limits { long: 2, long_most: 3 };
        let mut next = || match queues.next(limits) {
            Some((_, Some(_))) => 'l',
            Some((_, None)) => 's',
            None => '-',
        };
        assert_eq!(next(), 'l', "though there are short ones");
        assert!((0..100).all(|_| next() == 's'));
        assert_eq!([next(), next()], ['l', '-']);
    }

    #[test]
    fn lookup_by_inode_number_counts_as_long_call() {
        let jobs = Jobs::new();
        let is_long = |call: Call| is_long(&jobs.job(1, call));
        assert!(is_long(Call::LookupNumber { ino: 1 }));
        assert!(!is_long(Call::GetAttr { node: NodeRef::without_hint(NodeId { ino: 1, generation: 1 }) }));
    }

    #[test]
    fn calls_held_too_long_for_hung_filesystem_fail_except_fsync() {
        let jobs = Jobs::new();
        let node = NodeRef::without_hint(NodeId { ino: 1, generation: 1 });
        let mut queues = Queues::default();
        let long_ago = Instant::now().checked_sub(lent::LIMIT).unwrap();
        for (number, since) in [(1, long_ago), (2, Instant::now()), (3, long_ago)] {
            let node = node.clone();
            let call = match number {
                3 => Call::Fsync { node, handle: None, data_only: false },
                _ => Call::GetAttr { node },
            };
            queues.held.push((Work::Call(Box::new(jobs.job(number, call))), since));
        }
        let late = queues.take_overdue();
        let numbers: Vec<u64> =
            late.iter().map(|work| if let Work::Call(job) = work { job.call.0 } else { 0 }).collect();
        assert_eq!((numbers, queues.held.len()), (vec![1], 2));
        queues.requeue_held();
        assert_eq!(queues.short.pop().map(|job| job.call), Some(CallId(2)));
        assert!(queues.held.is_empty() && !queues.long.is_empty(), "they take their turn again");
    }

    #[test]
    fn origin_without_running_long_call_gets_reserved_thread() {
        let limits = Limits { long: 2, long_most: 3 };
        let mut queues = Queues::default();
        let share = |uid| (Origin { uid: Some(uid), host: None }, 1);
        let push = |queues: &mut Queues, uid| {
            queues.long.push(share(uid), Work::Other(share(uid), Box::new(|| ())));
        };
        (0..10).for_each(|_| push(&mut queues, 1));
        let next = |queues: &mut Queues| queues.next(limits).and_then(|(_, origin)| origin?.uid);
        assert_eq!([next(&mut queues), next(&mut queues), next(&mut queues)], [Some(1), Some(1), None]);
        (0..2).for_each(|_| push(&mut queues, 2));
        assert_eq!(
            [next(&mut queues), next(&mut queues)],
            [Some(2), None],
            "one more, and no more than three"
        );
        queues.end_long(share(1).0);
        assert_eq!(next(&mut queues), None, "two run, and both have one");
        queues.end_long(share(1).0);
        assert_eq!(next(&mut queues), Some(1), "in turn");
    }
}
