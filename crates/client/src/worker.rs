//! Threads that tell the kernel what may get stuck.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// They do next to nothing, and many may hang about.
const STACK_BYTES: usize = 512 << 10;

/// How many there are.
pub(crate) struct Crew {
    count: Arc<AtomicU64>,
    stack_bytes: usize,
}

/// A thread, and its answers. Left behind, it ends when it has done all that it was given.
pub(crate) struct Worker<T> {
    todo: Sender<T>,
    done: Receiver<()>,
}

/// One that ends.
struct Leaving(Arc<AtomicU64>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Default for Crew {
    fn default() -> Crew {
        Crew { count: Arc::default(), stack_bytes: STACK_BYTES }
    }
}

impl Crew {
    /// So many at the same time, the stuck ones with them.
    pub const ALL: u64 = 64;
    /// Of these, so many for whatever is stuck again. The others are kept for what is told for the first time.
    pub const COMMON: u64 = 48;

    /// Whether there are fewer than `most`.
    pub fn has_room(&self, most: u64) -> bool {
        self.count.load(Ordering::SeqCst) < most
    }

    /// Whether there are no more than `most`, counting those that have nothing to do.
    pub fn holds_to(&self, most: u64) -> bool {
        self.has_room(most + 1)
    }

    /// `None` if there are `most`, or this machine has no thread for us now.
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
        let leaving = Leaving(Arc::clone(&self.count));
        let (todo, jobs) = channel::<T>();
        let (finished, done) = channel();
        let with = Arc::clone(with);
        let work = move || {
            let _leaving = leaving;
            for job in jobs {
                tell(&with, job);
                // Nobody may wait for it any more.
                let _ = finished.send(());
            }
        };
        match thread::Builder::new().stack_size(self.stack_bytes).spawn(work) {
            Ok(_) => Some(Worker { todo, done }),
            Err(error) => {
                tracing::debug!(target: "nigh::kernel", %error, "no thread to tell the kernel with");
                None
            }
        }
    }
}

impl<T> Worker<T> {
    pub fn give(&self, job: T) {
        // It ends after us.
        let _ = self.todo.send(job);
    }

    /// Waits until one job is done; every so often it is asked whether to give that up. False: it was.
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

    /// As where a limit of processes is reached.
    #[test]
    fn where_no_thread_is_to_be_had_there_is_no_worker_and_no_harm() {
        let with = Arc::new(());
        let crew = Crew { stack_bytes: 1 << 60, ..Crew::default() };
        assert!(crew.start(Crew::ALL, &with, |(), ()| ()).is_none());
        assert!(crew.has_room(1), "it is not counted");
        let crew = Crew { stack_bytes: STACK_BYTES, ..crew };
        let worker = crew.start(1, &with, |(), ()| ()).expect("there is room");
        worker.give(());
        assert!(worker.wait(Duration::from_secs(20), || true));
        assert!(crew.start(1, &with, |(), ()| ()).is_none(), "that was all");
    }
}
