//! Threads that were sent attributes and have not applied them yet.
//!
//! The calling thread itself applies a reply when it runs again; an invalidation may reach the kernel in between. A
//! reader of a file then ignores the reply's size (`fi->attr_version` in `fuse_change_attributes`) and uses a size
//! cached before its request. A thread that changed attributes or added a link applies them even then
//! (`fuse_do_setattr`, `create_new_entry`), so the kernel would cache recalled attributes. The host shows whether a
//! thread has run.

use crate::host::Host;
use crate::thread_state::ThreadState;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Assumed time until a thread has run if the host does not show it.
const BLINDLY: Duration = Duration::from_millis(5);
/// Longest wait for a thread.
const MOST: Duration = Duration::from_millis(100);
const AGAIN: Duration = Duration::from_micros(100);
/// Most remembered replies.
const READERS: usize = 1_024;

struct UnappliedReply {
    ino: u64,
    /// Of the thread; 0: of another pid namespace.
    pid: u32,
    since: Instant,
}

/// The threads with unapplied attributes, and the host that shows whether they have run.
pub(crate) struct ReplyBarrier {
    host: Arc<dyn Host>,
    /// In the order of their replies.
    unapplied: Mutex<Vec<UnappliedReply>>,
}

impl ReplyBarrier {
    pub fn new(host: Arc<dyn Host>) -> ReplyBarrier {
        ReplyBarrier { host, unapplied: Mutex::default() }
    }

    /// Records that attributes were just written to the kernel for this thread.
    pub fn note(&self, ino: u64, pid: u32) {
        let mut readers = self.unapplied.lock();
        if readers.len() == READERS {
            readers.drain(..READERS / 2);
        }
        readers.push(UnappliedReply { ino, pid, since: Instant::now() });
    }

    /// Waits until all threads with such replies for an inode have applied them. `asks` has, since it sends another
    /// request.
    pub fn wait(&self, ino: u64, asks: u32) {
        self.wait_for(asks, |reader| reader.ino == ino);
    }

    /// As `wait`, for all files.
    pub fn wait_for_all(&self, asks: u32) {
        self.wait_for(asks, |_| true);
    }

    fn wait_for(&self, asks: u32, is_meant: impl Fn(&UnappliedReply) -> bool) {
        let theirs: Vec<UnappliedReply> =
            self.unapplied.lock().extract_if(.., |reader| is_meant(reader)).collect();
        theirs
            .iter()
            .filter(|reader| reader.pid == 0 || reader.pid != asks)
            .for_each(|reader| reader.wait(&*self.host));
    }
}

impl UnappliedReply {
    fn wait(&self, host: &dyn Host) {
        if self.since.elapsed() > MOST {
            return;
        }
        let Some(first) = host.thread_state(self.pid).filter(ThreadState::has_schedstat) else {
            return std::thread::sleep(BLINDLY.saturating_sub(self.since.elapsed()));
        };
        let mut now = first.clone();
        while now.is_runnable() && now == first && self.since.elapsed() < MOST {
            std::thread::sleep(AGAIN);
            let Some(next) = host.thread_state(self.pid) else { return };
            now = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::test_host::{absent, local};
    use std::sync::mpsc;

    fn waited(readers: &ReplyBarrier, ino: u64) -> Duration {
        let since = Instant::now();
        readers.wait(ino, 1);
        since.elapsed()
    }

    fn own_pid() -> u32 {
        rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()
    }

    #[test]
    fn thread_that_sleeps_runs_or_has_ended_counts_as_having_applied_its_reply() {
        let readers = ReplyBarrier::new(local());
        let (say, told) = mpsc::channel::<u32>();
        let (end, ended) = mpsc::channel::<()>();
        let sleeper = std::thread::spawn(move || {
            say.send(own_pid()).unwrap();
            ended.recv().unwrap();
        });
        let pid = told.recv().unwrap();
        std::thread::sleep(BLINDLY);
        readers.note(7, pid);
        assert!(waited(&readers, 7) < MOST / 2);
        end.send(()).unwrap();
        sleeper.join().unwrap();
        readers.note(7, pid);
        assert!(waited(&readers, 7) < MOST / 2);
        readers.note(7, own_pid());
        assert!(waited(&readers, 7) < MOST / 2);
    }

    #[test]
    fn invisible_thread_is_waited_for_once_for_a_fixed_time() {
        let readers = ReplyBarrier::new(local());
        readers.note(7, 0);
        assert!(waited(&readers, 8) < BLINDLY);
        readers.note(8, 0);
        assert!(waited(&readers, 8) >= BLINDLY / 2);
        readers.note(9, 0);
        assert!(waited(&readers, 9) >= BLINDLY / 2);
        assert!(waited(&readers, 9) < BLINDLY);
    }

    /// A guest's thread may have the number of a thread that sleeps on this machine.
    #[test]
    fn thread_is_waited_for_once_for_a_fixed_time_without_a_host() {
        let (say, told) = mpsc::channel::<u32>();
        let sleeper = std::thread::spawn(move || {
            say.send(own_pid()).unwrap();
            std::thread::park();
        });
        let pid = told.recv().unwrap();
        let readers = ReplyBarrier::new(absent());
        readers.note(7, pid);
        assert!(waited(&readers, 7) >= BLINDLY / 2);
        assert!(waited(&readers, 7) < BLINDLY, "once");
        sleeper.thread().unpark();
        sleeper.join().unwrap();
    }

    #[test]
    fn unlink_waits_for_unapplied_replies_of_all_files() {
        let readers = ReplyBarrier::new(local());
        readers.note(7, 0);
        readers.note(8, 0);
        readers.wait_for_all(1);
        assert!(readers.unapplied.lock().is_empty());
        assert!(waited(&readers, 8) < BLINDLY);
    }

    #[test]
    fn no_more_are_remembered_than_so_many() {
        let readers = ReplyBarrier::new(local());
        (0..3_000).for_each(|ino| readers.note(ino, 0));
        assert!(readers.unapplied.lock().len() <= READERS);
    }
}
