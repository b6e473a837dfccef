//! Notifies the kernel of a file's size before the reply to a caller that reads the file.
//!
//! The kernel ignores attributes of a file that a local request is extending, and attributes older than those already
//! applied (`fuse_change_attributes_i`). The caller would then use the old cached size. So the driver first sends a
//! notification that the kernel always applies ([`Notification::Lengthen`]). It does so too for a caller that sets
//! the size or looks the file up, because the kernel applies the attribute timeout before the size, and another
//! caller may read between. A file shorter than the cached size needs no notification: the read finds its end.

use crate::thread_state::ThreadState;
use crate::worker::{Worker, WorkerPool};
use nigh_fuse::{Level, Notification, Transport};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// Longest wait.
const MOST: Duration = Duration::from_millis(100);

/// Threads that send size notifications; a thread may wait for a page that is locked until another request has its
/// reply.
#[derive(Default)]
pub(crate) struct SizeNotifier {
    crew: WorkerPool,
    idle: Mutex<Vec<SizeNotifyThread>>,
    pending: Mutex<PendingSizes>,
    notified: Condvar,
}

/// Pending size notifications, in the order of their replies.
#[derive(Default)]
struct PendingSizes {
    next: u64,
    files: Vec<(ReplySequence, u64)>,
}

/// Position of a reply in the order of replies that report sizes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct ReplySequence(u64);

/// A thread that sends size notifications.
struct SizeNotifyThread {
    worker: Worker<(u64, u64)>,
    state: Arc<NotifyState>,
}

/// State of its thread.
#[derive(Default)]
struct NotifyState {
    thread: AtomicU32,
    /// Whether it is in the kernel, or about to enter it.
    in_kernel: AtomicBool,
}

impl SizeNotifier {
    /// Takes a place in the order for a reply composed now; `tells`: the file whose size it notifies.
    pub fn next_sequence(&self, tells: Option<u64>) -> ReplySequence {
        let mut yet = self.pending.lock();
        let turn = ReplySequence(yet.next);
        yet.next += 1;
        yet.files.extend(tells.map(|ino| (turn, ino)));
        turn
    }

    /// Notifies the kernel; on return the kernel's size of the file is at least `size`.
    pub fn notify(&self, transport: &Arc<dyn Transport>, turn: ReplySequence, (ino, size): (u64, u64)) {
        if size > 0 && transport.level() != Level::None {
            let idle = self.idle.lock().pop();
            if let Some(teller) = idle.or_else(|| self.start(transport))
                && teller.notify(ino, size)
            {
                self.idle.lock().push(teller);
            }
        }
        self.pending.lock().files.retain(|(other, _)| *other != turn);
        self.notified.notify_all();
    }

    /// Waits for earlier notifications for a file: a late one would undo a truncation.
    pub fn wait(&self, turn: ReplySequence, ino: u64) {
        let mut yet = self.pending.lock();
        let is_out =
            |yet: &mut PendingSizes| yet.files.iter().any(|(other, file)| *other < turn && *file == ino);
        self.notified.wait_while_for(&mut yet, is_out, MOST);
    }

    fn start(&self, transport: &Arc<dyn Transport>) -> Option<SizeNotifyThread> {
        let at = Arc::new(NotifyState::default());
        let theirs = Arc::clone(&at);
        let worker = self.crew.start(WorkerPool::ALL, transport, move |transport, (ino, size)| {
            let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            theirs.thread.store(thread, Ordering::SeqCst);
            theirs.in_kernel.store(true, Ordering::SeqCst);
            if let Err(error) = transport.notify(&Notification::Lengthen { ino, size }) {
                tracing::debug!(target: "nigh::kernel", %error, ino, size, "the length is not told");
            }
            theirs.in_kernel.store(false, Ordering::SeqCst);
        });
        worker.map(|worker| SizeNotifyThread { worker, state: at })
    }
}

impl SizeNotifyThread {
    /// Sends one notification. Returns whether the thread has finished and can take more.
    fn notify(&self, ino: u64, size: u64) -> bool {
        let since = Instant::now();
        self.worker.give((ino, size));
        self.worker.wait(LOOK_AGAIN, || self.is_blocked() || since.elapsed() >= MOST)
    }

    /// Whether it waits for a page lock; the kernel sets the size before that.
    fn is_blocked(&self) -> bool {
        let sleeps = |thread: ThreadState| thread.has_schedstat() && !thread.is_runnable();
        self.state.in_kernel.load(Ordering::SeqCst)
            && ThreadState::of_own(self.state.thread.load(Ordering::SeqCst)).is_some_and(sleeps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_fuse::MemoryTransport;
    use std::thread;

    type Gate = (Mutex<bool>, Condvar);

    /// A kernel in which every notification waits until the gate is opened.
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
    fn one_thread_sends_size_notifications_in_turn_and_none_for_empty_files() {
        let memory = Arc::new(MemoryTransport::new(Level::All));
        let transport: Arc<dyn Transport> = Arc::<MemoryTransport>::clone(&memory);
        let lengths = SizeNotifier::default();
        for size in [8, 0, 9] {
            lengths.notify(&transport, lengths.next_sequence(Some(7)), (7, size));
        }
        let told = [8, 9].map(|size| Notification::Lengthen { ino: 7, size });
        assert_eq!(memory.notifications(), told);
        assert!(lengths.crew.is_within(1));
        assert!(lengths.pending.lock().files.is_empty());
    }

    #[test]
    fn size_notification_blocked_on_a_page_lock_is_abandoned() {
        let (transport, gate) = gated();
        let lengths = SizeNotifier::default();
        let since = Instant::now();
        for size in 1..=WorkerPool::ALL + 5 {
            lengths.notify(&transport, lengths.next_sequence(Some(7)), (7, size));
        }
        assert!(lengths.idle.lock().is_empty(), "no caller is done");
        assert!(!lengths.crew.has_room(WorkerPool::ALL) && lengths.crew.is_within(WorkerPool::ALL));
        assert!(since.elapsed() < MOST * 20, "it is seen that they wait");
        open(&gate);
        let give_up = Instant::now() + Duration::from_secs(20);
        while !lengths.crew.has_room(1) {
            assert!(Instant::now() < give_up, "they end");
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Otherwise the kernel would keep the old size.
    #[test]
    fn truncation_reply_waits_for_earlier_size_notifications_only() {
        let lengths = SizeNotifier::default();
        let waited = |turn: ReplySequence| {
            let since = Instant::now();
            lengths.wait(turn, 7);
            since.elapsed()
        };
        let before = lengths.next_sequence(Some(7));
        let cuts = lengths.next_sequence(None);
        let after = lengths.next_sequence(Some(7));
        assert!(waited(cuts) >= MOST, "before: no caller is waited for without limit");
        let transport: Arc<dyn Transport> = Arc::new(MemoryTransport::new(Level::All));
        thread::scope(|scope| {
            let told = scope.spawn(|| waited(cuts));
            lengths.notify(&transport, before, (7, 8));
            assert!(told.join().unwrap() < MOST);
        });
        assert!(waited(cuts) < MOST, "after");
        assert!(waited(ReplySequence(after.0 + 1)) >= MOST);
    }
}
