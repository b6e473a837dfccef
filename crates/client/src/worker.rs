//! Threads for kernel notifications that may block.

use crate::thread_state::ThreadState;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// They need little stack, and many may exist.
const STACK_BYTES: usize = 512 << 10;
/// If `/proc` does not show a thread's state, it counts as waiting after this time.
const BLINDLY: Duration = Duration::from_millis(100);

/// Pool of worker threads.
pub(crate) struct WorkerPool {
    count: Arc<AtomicU64>,
    stack_bytes: usize,
}

/// A worker thread and its channels. When abandoned, it ends after its queued jobs.
pub(crate) struct Worker<T> {
    todo: Sender<T>,
    done: Receiver<()>,
    /// Thread id, once it runs.
    thread: Arc<AtomicU32>,
}

/// Observes whether a thread of this process waits for a kernel lock.
pub(crate) struct SleepWatch {
    since: Instant,
    /// Scheduler state at the last observed sleep, and when that sleep began.
    asleep: Option<(ThreadState, Instant)>,
}

impl SleepWatch {
    pub fn new() -> SleepWatch {
        SleepWatch { since: Instant::now(), asleep: None }
    }

    /// How long the thread has slept without a break. If its state is unknown, unlimited after some time.
    pub fn sleeps_for(&mut self, thread: u32) -> Duration {
        let now = ThreadState::of_own(thread);
        if now.as_ref().is_some_and(ThreadState::is_runnable) {
            *self = SleepWatch::new();
            return Duration::ZERO;
        }
        let Some(now) = now.filter(ThreadState::is_uninterruptible) else {
            self.asleep = None;
            return if self.since.elapsed() < BLINDLY { Duration::ZERO } else { Duration::MAX };
        };
        match &self.asleep {
            Some((before, since)) if *before == now => since.elapsed(),
            _ => {
                self.asleep = Some((now, Instant::now()));
                Duration::ZERO
            }
        }
    }
}

/// Decrements the count when a worker ends.
struct CountGuard(Arc<AtomicU64>);

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Default for WorkerPool {
    fn default() -> WorkerPool {
        WorkerPool { count: Arc::default(), stack_bytes: STACK_BYTES }
    }
}

impl WorkerPool {
    /// Most workers at a time, blocked ones included.
    pub const ALL: u64 = 64;
    /// Most workers for retried jobs. The others are reserved for first attempts.
    pub const FOR_RETRIES: u64 = 48;

    /// Whether there are fewer than `most` workers.
    pub fn has_room(&self, most: u64) -> bool {
        self.count.load(Ordering::SeqCst) < most
    }

    /// Whether there are no more than `most` workers, idle ones included.
    pub fn is_within(&self, most: u64) -> bool {
        self.has_room(most + 1)
    }

    /// Starts a worker. `None` if there are `most`, or no thread can be created now.
    pub fn start<C: Send + Sync + ?Sized + 'static, T: Send + 'static>(
        &self,
        most: u64,
        with: &Arc<C>,
        tell: impl Fn(&C, T) + Send + 'static,
    ) -> Option<Worker<T>> {
        if !self.has_room(most) {
            return None;
        }
        self.count.fetch_add(1, Ordering::SeqCst);
        let leaving = CountGuard(Arc::clone(&self.count));
        let (todo, jobs) = channel::<T>();
        let (finished, done) = channel();
        let with = Arc::clone(with);
        let thread = Arc::new(AtomicU32::new(0));
        let own = Arc::clone(&thread);
        let work = move || {
            let _leaving = leaving;
            own.store(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned(), Ordering::SeqCst);
            for job in jobs {
                tell(&with, job);
                // The receiver may have abandoned this worker.
                let _ = finished.send(());
            }
        };
        match thread::Builder::new().stack_size(self.stack_bytes).spawn(work) {
            Ok(_) => Some(Worker { todo, done, thread }),
            Err(error) => {
                tracing::debug!(target: "nigh::kernel", %error, "no thread to tell the kernel with");
                None
            }
        }
    }
}

impl<T> Worker<T> {
    pub fn give(&self, job: T) {
        // The worker thread outlives this sender.
        let _ = self.todo.send(job);
    }

    /// Thread id; 0 until it runs.
    pub fn thread(&self) -> u32 {
        self.thread.load(Ordering::SeqCst)
    }

    /// Whether it has finished one more job.
    pub fn is_done(&self) -> bool {
        self.done.try_recv().is_ok()
    }

    /// Waits until one job is done. Asks `give_up` at intervals; returns false if it gave up.
    pub fn wait(&self, every: Duration, mut give_up: impl FnMut() -> bool) -> bool {
        loop {
            match self.done.recv_timeout(every) {
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return true,
                Err(RecvTimeoutError::Timeout) if give_up() => return false,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(1);

    /// Simulates a limit on processes.
    #[test]
    fn failed_thread_creation_gives_no_worker_and_is_not_counted() {
        let with = Arc::new(());
        let crew = WorkerPool { stack_bytes: 1 << 60, ..WorkerPool::default() };
        assert!(crew.start(WorkerPool::ALL, &with, |(), ()| ()).is_none());
        assert!(crew.has_room(1), "it is not counted");
        let crew = WorkerPool { stack_bytes: STACK_BYTES, ..crew };
        let worker = crew.start(1, &with, |(), ()| ()).expect("there is room");
        worker.give(());
        assert!(worker.wait(Duration::from_secs(20), || true));
        assert!(crew.start(1, &with, |(), ()| ()).is_none(), "that was all");
    }

    /// A `CLONE_VFORK` parent sleeps like a thread that waits for a kernel lock; a thread in nanosleep does not.
    #[test]
    fn thread_blocked_in_the_kernel_is_distinguished_from_a_slow_one() {
        let crew = WorkerPool::default();
        let worker = crew.start(9, &Arc::new(()), |(), ()| thread::sleep(Duration::from_millis(50))).unwrap();
        worker.give(());
        let mut watch = SleepWatch::new();
        assert!(worker.wait(Duration::from_micros(200), || watch.sleeps_for(worker.thread()) >= SHORT));
        let waits = crew
            .start(9, &Arc::new(()), |(), ()| {
                let flags = libc::CLONE_VFORK | libc::SIGCHLD;
                // SAFETY: like fork(2); the child only sleeps and exits.
                unsafe {
                    if libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) == 0 {
                        libc::usleep(300_000);
                        libc::_exit(0);
                    }
                }
            })
            .unwrap();
        waits.give(());
        let (since, mut watch) = (Instant::now(), SleepWatch::new());
        let ended = waits.wait(Duration::from_micros(200), || watch.sleeps_for(waits.thread()) >= SHORT);
        assert!(!ended && since.elapsed() >= SHORT, "it is given up");
        assert!(since.elapsed() < Duration::from_millis(300), "while it waits");
        assert!(ThreadState::of_own(waits.thread()).is_some_and(|thread| thread.is_uninterruptible()));
    }
}
