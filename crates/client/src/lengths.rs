//! Tells the kernel how long a file is, before who reads it is answered that.
//!
//! The kernel leaves out attributes of a file that an own request is making longer, and of one of which it has taken in something later
//! (`fuse_change_attributes_i`): who asked would go on by the size known before, however old that is. So it is told first, in a way that it
//! always takes in ([`Notification::Lengthen`]). So is who sets how long a file is or looks: for how long attributes may be believed the kernel
//! takes in before the size, and another one may read just then. A file that is shorter than the kernel knows needs none of this: the read finds its end.

use crate::readers;
use nigh_fuse::{Level, Notification, Transport};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

const STACK_BYTES: usize = 256 << 10;
/// At the same time, those that wait for a page with them.
const THREADS: u64 = 64;
const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// Nobody waits any longer.
const MOST: Duration = Duration::from_millis(100);

/// Threads that tell, as one may have to wait for a page that is locked until something else is answered.
#[derive(Default)]
pub(crate) struct Lengths {
    idle: Mutex<Vec<Teller>>,
    count: Arc<AtomicU64>,
}

/// One of them. Left behind, it ends when it has told what it was given.
struct Teller {
    todo: Sender<(u64, u64)>,
    done: Receiver<()>,
    tells: Arc<Tells>,
}

#[derive(Default)]
struct Tells {
    thread: AtomicU32,
    /// It is in the kernel, or about to be.
    now: AtomicBool,
}

struct Leaving(Arc<AtomicU64>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Lengths {
    /// When it returns the kernel knows that the file is so long at least.
    pub fn tell(&self, transport: &Arc<dyn Transport>, ino: u64, size: u64) {
        if size == 0 || transport.level() == Level::None {
            return;
        }
        let idle = self.idle.lock().pop();
        let Some(teller) = idle.or_else(|| self.start(transport)) else { return };
        if teller.tell(ino, size) {
            self.idle.lock().push(teller);
        }
    }

    fn start(&self, transport: &Arc<dyn Transport>) -> Option<Teller> {
        if self.count.fetch_add(1, Ordering::SeqCst) >= THREADS {
            self.count.fetch_sub(1, Ordering::SeqCst);
            return None;
        }
        let leaving = Leaving(Arc::clone(&self.count));
        let (todo, jobs) = channel::<(u64, u64)>();
        let (finished, done) = channel();
        let tells = Arc::new(Tells::default());
        let (ours, transport) = (Arc::clone(&tells), Arc::clone(transport));
        let work = move || {
            let _leaving = leaving;
            let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            ours.thread.store(thread, Ordering::SeqCst);
            for (ino, size) in jobs {
                ours.now.store(true, Ordering::SeqCst);
                if let Err(error) = transport.notify(&Notification::Lengthen { ino, size }) {
                    tracing::debug!(target: "nigh::kernel", %error, ino, size, "the length is not told");
                }
                ours.now.store(false, Ordering::SeqCst);
                let _ = finished.send(());
            }
        };
        let thread = thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
        thread.ok().map(|_| Teller { todo, done, tells })
    }
}

impl Teller {
    /// Whether it may be given more: it is done.
    fn tell(&self, ino: u64, size: u64) -> bool {
        let since = Instant::now();
        let _ = self.todo.send((ino, size));
        loop {
            match self.done.recv_timeout(LOOK_AGAIN) {
                Ok(()) => return true,
                Err(RecvTimeoutError::Timeout) if !self.waits() && since.elapsed() < MOST => {}
                Err(_) => return false,
            }
        }
    }

    /// It waits for the page: the length was set before.
    fn waits(&self) -> bool {
        self.tells.now.load(Ordering::SeqCst) && readers::sleeps(self.tells.thread.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_fuse::MemoryTransport;
    use std::sync::Condvar;
    use std::sync::Mutex as Plain;

    #[test]
    fn one_thread_tells_one_after_the_other_and_nothing_of_what_is_empty() {
        let memory = Arc::new(MemoryTransport::new(Level::All));
        let transport: Arc<dyn Transport> = Arc::<MemoryTransport>::clone(&memory);
        let lengths = Lengths::default();
        for size in [8, 0, 9] {
            lengths.tell(&transport, 7, size);
        }
        let told = [8, 9].map(|size| Notification::Lengthen { ino: 7, size });
        assert_eq!(memory.notifications(), told);
        assert_eq!(lengths.count.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn one_that_waits_for_a_page_is_left_behind() {
        let gate = Arc::new((Plain::new(false), Condvar::new()));
        let theirs = Arc::clone(&gate);
        let memory = MemoryTransport::new(Level::All).judging(move |_| {
            let open = theirs.0.lock().unwrap();
            drop(theirs.1.wait_while(open, |open| !*open).unwrap());
            Ok(nigh_fuse::NotifyOutcome::Done)
        });
        let transport: Arc<dyn Transport> = Arc::new(memory);
        let lengths = Lengths::default();
        let since = Instant::now();
        for size in 1..=THREADS + 5 {
            lengths.tell(&transport, 7, size);
        }
        assert!(lengths.idle.lock().is_empty(), "nobody is done");
        assert_eq!(lengths.count.load(Ordering::SeqCst), THREADS);
        assert!(since.elapsed() < MOST * 20, "it is seen that they wait");
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        let give_up = Instant::now() + Duration::from_secs(20);
        while lengths.count.load(Ordering::SeqCst) > 0 {
            assert!(Instant::now() < give_up, "they end");
            thread::sleep(LOOK_AGAIN);
        }
    }
}
