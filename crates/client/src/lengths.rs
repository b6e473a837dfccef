//! Tells the kernel how long a file is, before who reads it is answered that.
//!
//! The kernel leaves out attributes of a file that an own request is making longer, and of one of which it has taken in something later
//! (`fuse_change_attributes_i`): who asked would go on by the size known before, however old that is. So it is told first, in a way that it
//! always takes in ([`Notification::Lengthen`]). So is who sets how long a file is or looks: for how long attributes may be believed the kernel
//! takes in before the size, and another one may read just then. A file that is shorter than the kernel knows needs none of this: the read finds its end.

use crate::scheduled::Scheduled;
use crate::worker::{Crew, Worker};
use nigh_fuse::{Level, Notification, Transport};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// Nobody waits any longer.
const MOST: Duration = Duration::from_millis(100);

/// Threads that tell, as one may have to wait for a page that is locked until something else is answered.
#[derive(Default)]
pub(crate) struct Lengths {
    crew: Crew,
    idle: Mutex<Vec<Teller>>,
    yet: Mutex<Yet>,
    told: Condvar,
}

/// Lengths of files that are yet to be told, by the order in which they were answered.
#[derive(Default)]
struct Yet {
    next: u64,
    files: Vec<(Turn, u64)>,
}

/// Where an answer stands in the order of those that say how long files are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Turn(u64);

/// One of them.
struct Teller {
    worker: Worker<(u64, u64)>,
    at: Arc<At>,
}

/// Where its thread is.
#[derive(Default)]
struct At {
    thread: AtomicU32,
    /// It is in the kernel, or about to be.
    tells: AtomicBool,
}

impl Lengths {
    /// A file is to be told to be as long as an answer says that is composed now, or to be set so.
    pub fn turn(&self, tells: Option<u64>) -> Turn {
        let mut yet = self.yet.lock();
        let turn = Turn(yet.next);
        yet.next += 1;
        yet.files.extend(tells.map(|ino| (turn, ino)));
        turn
    }

    /// When it returns the kernel knows that the file is so long at least.
    pub fn tell(&self, transport: &Arc<dyn Transport>, turn: Turn, (ino, size): (u64, u64)) {
        if size > 0 && transport.level() != Level::None {
            let idle = self.idle.lock().pop();
            if let Some(teller) = idle.or_else(|| self.start(transport))
                && teller.tell(ino, size)
            {
                self.idle.lock().push(teller);
            }
        }
        self.yet.lock().files.retain(|(other, _)| *other != turn);
        self.told.notify_all();
    }

    /// Waits until what was answered before of a file is told: else that would undo it if somebody makes the file shorter.
    pub fn wait(&self, turn: Turn, ino: u64) {
        let mut yet = self.yet.lock();
        let is_out = |yet: &mut Yet| yet.files.iter().any(|(other, file)| *other < turn && *file == ino);
        self.told.wait_while_for(&mut yet, is_out, MOST);
    }

    fn start(&self, transport: &Arc<dyn Transport>) -> Option<Teller> {
        let at = Arc::new(At::default());
        let theirs = Arc::clone(&at);
        let worker = self.crew.start(Crew::ALL, transport, move |transport, (ino, size)| {
            let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            theirs.thread.store(thread, Ordering::SeqCst);
            theirs.tells.store(true, Ordering::SeqCst);
            if let Err(error) = transport.notify(&Notification::Lengthen { ino, size }) {
                tracing::debug!(target: "nigh::kernel", %error, ino, size, "the length is not told");
            }
            theirs.tells.store(false, Ordering::SeqCst);
        });
        worker.map(|worker| Teller { worker, at })
    }
}

impl Teller {
    /// Whether it may be given more: it is done.
    fn tell(&self, ino: u64, size: u64) -> bool {
        let since = Instant::now();
        self.worker.give((ino, size));
        self.worker.wait(LOOK_AGAIN, || self.waits() || since.elapsed() >= MOST)
    }

    /// It waits for the page: the length was set before.
    fn waits(&self) -> bool {
        let sleeps = |thread: Scheduled| thread.is_counted() && !thread.wants();
        self.at.tells.load(Ordering::SeqCst)
            && Scheduled::of_own(self.at.thread.load(Ordering::SeqCst)).is_some_and(sleeps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_fuse::MemoryTransport;
    use std::thread;

    type Gate = (Mutex<bool>, Condvar);

    /// A kernel in which whoever tells waits until the gate is opened.
    fn gated() -> (Arc<dyn Transport>, Arc<Gate>) {
        let gate = Arc::new((Mutex::new(false), Condvar::new()));
        let theirs = Arc::clone(&gate);
        let memory = MemoryTransport::new(Level::All).judging(move |_| {
            theirs.1.wait_while(&mut theirs.0.lock(), |open| !*open);
            Ok(nigh_fuse::NotifyOutcome::Done)
        });
        (Arc::new(memory), gate)
    }

    fn open((is_open, opened): &Gate) {
        *is_open.lock() = true;
        opened.notify_all();
    }

    #[test]
    fn one_thread_tells_one_after_the_other_and_nothing_of_what_is_empty() {
        let memory = Arc::new(MemoryTransport::new(Level::All));
        let transport: Arc<dyn Transport> = Arc::<MemoryTransport>::clone(&memory);
        let lengths = Lengths::default();
        for size in [8, 0, 9] {
            lengths.tell(&transport, lengths.turn(Some(7)), (7, size));
        }
        let told = [8, 9].map(|size| Notification::Lengthen { ino: 7, size });
        assert_eq!(memory.notifications(), told);
        assert!(lengths.crew.holds_to(1));
        assert!(lengths.yet.lock().files.is_empty());
    }

    #[test]
    fn one_that_waits_for_a_page_is_left_behind() {
        let (transport, gate) = gated();
        let lengths = Lengths::default();
        let since = Instant::now();
        for size in 1..=Crew::ALL + 5 {
            lengths.tell(&transport, lengths.turn(Some(7)), (7, size));
        }
        assert!(lengths.idle.lock().is_empty(), "nobody is done");
        assert!(!lengths.crew.has_room(Crew::ALL) && lengths.crew.holds_to(Crew::ALL));
        assert!(since.elapsed() < MOST * 20, "it is seen that they wait");
        open(&gate);
        let give_up = Instant::now() + Duration::from_secs(20);
        while !lengths.crew.has_room(1) {
            assert!(Instant::now() < give_up, "they end");
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Else the kernel would take the file for as long as it was.
    #[test]
    fn who_makes_a_file_shorter_waits_for_who_was_answered_before_and_for_no_other() {
        let lengths = Lengths::default();
        let waited = |turn: Turn| {
            let since = Instant::now();
            lengths.wait(turn, 7);
            since.elapsed()
        };
        let before = lengths.turn(Some(7));
        let cuts = lengths.turn(None);
        let after = lengths.turn(Some(7));
        assert!(waited(cuts) >= MOST, "before: nobody is waited for for ever");
        let transport: Arc<dyn Transport> = Arc::new(MemoryTransport::new(Level::All));
        thread::scope(|scope| {
            let told = scope.spawn(|| waited(cuts));
            lengths.tell(&transport, before, (7, 8));
            assert!(told.join().unwrap() < MOST);
        });
        assert!(waited(cuts) < MOST, "after");
        assert!(waited(Turn(after.0 + 1)) >= MOST);
    }
}
