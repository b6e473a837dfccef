//! Descriptors that an export keeps open for later calls, and those that a client has released and that wait to be
//! closed. A file without a name occupies space while one is open.
//!
//! When a disk or quota is full, the server closes all of them that no client has open and retries the refused call
//! once. Closing a file may wait without bound for its filesystem (a hung FUSE daemon or NFS server), and the refused
//! call holds inode locks. So each filesystem has a closing thread of its own.

use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a refused call waits for closes on other filesystems, which may share its space as subvolumes do.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long it waits for closes on its own filesystem, which answered just now.
const OWN_PATIENCE: Duration = Duration::from_secs(10);

/// Files that no client has open any more, a descriptor kept for later calls or released ones, with the id of their
/// filesystem ([`nigh_lease::Object`]).
pub(crate) struct KeptFd {
    pub(crate) filesystem: u64,
    #[allow(dead_code, reason = "held, not looked at")]
    pub(crate) file: Box<dyn Send>,
}

/// Descriptors that are being closed.
#[derive(Default)]
pub(crate) struct SpaceReclaimer {
    state: Mutex<State>,
    /// Signals that a filesystem has closed its files.
    closed: Condvar,
}

#[derive(Default)]
struct State {
    /// How often a filesystem has closed all its files, or released ones were closed.
    rounds: u64,
    /// Filesystems with a closing thread.
    closing: FxHashMap<u64, Closing>,
    /// Released files that are not closed yet, by number.
    released: BTreeMap<u64, Released>,
    last_released: u64,
}

/// Released files of one filesystem.
enum Released {
    /// They wait for a thread.
    Waiting(KeptFd),
    /// A thread is closing them: the filesystem, and since when.
    Closing(u64, Instant),
}

/// Released files that wait to be closed; closed at the latest when this is dropped.
pub(crate) struct ReleasedFiles {
    reclaimer: Arc<SpaceReclaimer>,
    number: u64,
}

impl Drop for ReleasedFiles {
    fn drop(&mut self) {
        self.reclaimer.close_released(self.number);
    }
}

struct Closing {
    since: Instant,
    /// Files added since the thread began.
    pending: Vec<KeptFd>,
}

impl SpaceReclaimer {
    pub(crate) fn rounds(&self) -> u64 {
        self.state.lock().rounds
    }

    /// Notes files that a client has released. They are closed when the returned value is dropped, or earlier for a call
    /// that is refused for want of space.
    pub(crate) fn release(self: &Arc<SpaceReclaimer>, files: KeptFd) -> ReleasedFiles {
        let mut state = self.state.lock();
        state.last_released += 1;
        let number = state.last_released;
        state.released.insert(number, Released::Waiting(files));
        ReleasedFiles { reclaimer: Arc::clone(self), number }
    }

    fn close_released(&self, number: u64) {
        let mut state = self.state.lock();
        let Some(slot) = state.released.get_mut(&number) else { return };
        let Released::Waiting(KeptFd { filesystem, .. }) = *slot else { return };
        let files = std::mem::replace(slot, Released::Closing(filesystem, Instant::now()));
        drop(state);
        drop(files);
        let mut state = self.state.lock();
        state.released.remove(&number);
        state.rounds += 1;
        self.closed.notify_all();
    }

    /// Closes the files returned by `take`, and all released ones. Waits up to [`OWN_PATIENCE`] for `own`, the filesystem
    /// of the refused call, and up to [`PATIENCE`] for others; a filesystem that exceeded its time earlier is not waited
    /// for. Returns whether any file was closed since round `rounds`.
    pub(crate) fn reclaim(
        self: &Arc<SpaceReclaimer>,
        rounds: u64,
        own: Option<u64>,
        take: impl FnOnce() -> Vec<KeptFd>,
    ) -> bool {
        let begun = Instant::now();
        let mut state = self.state.lock();
        let mut new = Vec::new();
        // Under the lock, so that another refused call finds each descriptor either kept or being closed.
        let mut files = take();
        for (number, released) in std::mem::take(&mut state.released) {
            match released {
                Released::Waiting(waiting) => files.push(waiting),
                closing => drop(state.released.insert(number, closing)),
            }
        }
        for file in files {
            let closing = state.closing.entry(file.filesystem).or_insert_with(|| {
                new.push(file.filesystem);
                Closing { since: begun, pending: Vec::new() }
            });
            closing.pending.push(file);
        }
        let last = state.last_released;
        drop(state);
        new.into_iter().for_each(|filesystem| self.start(filesystem));
        let mut state = self.state.lock();
        loop {
            let until = |filesystem: u64, since: Instant| match Some(filesystem) == own {
                true => begun + OWN_PATIENCE,
                false => begun.min(since) + PATIENCE,
            };
            let kept = state.closing.iter().map(|(filesystem, closing)| until(*filesystem, closing.since));
            // Those that were released before, and that a thread had begun to close.
            let released = state.released.range(..=last).filter_map(|(_, released)| match released {
                Released::Closing(filesystem, since) => Some(until(*filesystem, *since)),
                Released::Waiting(_) => None,
            });
            let Some(until) = kept.chain(released).max() else { break };
            if self.closed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.rounds != rounds
    }

    fn start(self: &Arc<SpaceReclaimer>, filesystem: u64) {
        let this = Arc::clone(self);
        let thread = std::thread::Builder::new().name("nigh-space".into());
        if thread.spawn(move || this.close(filesystem)).is_err() {
            self.close(filesystem);
        }
    }

    /// Closes a filesystem's files until none is left.
    fn close(&self, filesystem: u64) {
        let mut state = self.state.lock();
        while let Some(closing) = state.closing.get_mut(&filesystem) {
            let files = std::mem::take(&mut closing.pending);
            if files.is_empty() {
                state.closing.remove(&filesystem);
                state.rounds += 1;
                self.closed.notify_all();
                return;
            }
            drop(state);
            drop(files);
            state = self.state.lock();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    /// A file whose close blocks until the sender is dropped.
    struct Hung(Receiver<()>);

    impl Drop for Hung {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    fn plain(filesystem: u64) -> KeptFd {
        KeptFd { filesystem, file: Box::new(()) }
    }

    #[test]
    fn hanging_close_does_not_delay_calls_on_other_filesystems() {
        let given_back = Arc::new(SpaceReclaimer::default());
        let (release, hung) = channel();
        let hung = KeptFd { filesystem: 2, file: Box::new(Hung(hung)) };
        let (done, ended) = channel();
        let refused = |own, kept| {
            let (given_back, done) = (Arc::clone(&given_back), done.clone());
            let rounds = given_back.rounds();
            std::thread::spawn(move || done.send(given_back.reclaim(rounds, Some(own), || kept)));
        };
        let begun = Instant::now();
        refused(1, vec![hung, plain(1)]);
        assert_eq!(
            ended.recv_timeout(PATIENCE * 10),
            Ok(true),
            "what is of its own filesystem is given back"
        );
        assert!(begun.elapsed() >= PATIENCE, "the other may share its space");
        // Further files that hang there cost no more time.
        let begun = Instant::now();
        refused(1, vec![plain(2), plain(1)]);
        assert_eq!(ended.recv_timeout(PATIENCE * 10), Ok(true));
        refused(1, vec![plain(2)]);
        assert_eq!(ended.recv_timeout(PATIENCE * 10), Ok(false), "nothing was given back");
        assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
        // A call on the hung filesystem waits for it, and all its kept files are closed in the end.
        refused(2, vec![]);
        assert!(ended.recv_timeout(PATIENCE / 5).is_err());
        drop(release);
        assert_eq!(ended.recv_timeout(PATIENCE * 10), Ok(true));
        assert!(given_back.state.lock().closing.is_empty());
    }

    /// Sets a flag when it is closed.
    struct Noted(Arc<std::sync::atomic::AtomicBool>);

    impl Drop for Noted {
        fn drop(&mut self) {
            self.0.store(true, std::sync::atomic::Ordering::SeqCst);
        }
    }

    #[test]
    fn released_files_that_wait_for_a_thread_are_closed_for_refused_call() {
        let given_back = Arc::new(SpaceReclaimer::default());
        let closed = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let noted = KeptFd { filesystem: 1, file: Box::new(Noted(Arc::clone(&closed))) };
        let waits = given_back.release(noted);
        let rounds = given_back.rounds();
        assert!(given_back.reclaim(rounds, Some(1), Vec::new));
        assert!(closed.load(std::sync::atomic::Ordering::SeqCst));
        drop(waits);
        assert!(given_back.state.lock().released.is_empty());
        let rounds = given_back.rounds();
        assert!(!given_back.reclaim(rounds, Some(1), Vec::new), "nothing was given back");
    }

    #[test]
    fn refused_call_waits_for_released_files_that_are_being_closed() {
        let given_back = Arc::new(SpaceReclaimer::default());
        let (release, slow) = channel();
        let rounds = given_back.rounds();
        let closing = given_back.release(KeptFd { filesystem: 1, file: Box::new(Hung(slow)) });
        let closes = std::thread::spawn(move || drop(closing));
        let is_closing = |released: &Released| matches!(released, Released::Closing(1, _));
        while !given_back.state.lock().released.values().any(is_closing) {
            std::thread::yield_now();
        }
        let (other, (done, ended)) = (Arc::clone(&given_back), channel());
        let refused = std::thread::spawn(move || done.send(other.reclaim(rounds, Some(1), Vec::new)));
        assert!(ended.recv_timeout(PATIENCE / 5).is_err(), "it waits");
        drop(release);
        assert_eq!(ended.recv_timeout(OWN_PATIENCE), Ok(true));
        closes.join().unwrap();
        refused.join().unwrap().unwrap();
    }

    #[test]
    fn call_refused_for_space_waits_for_reclaim_under_way() {
        let given_back = Arc::new(SpaceReclaimer::default());
        let (release, slow) = channel();
        let (other, rounds) = (Arc::clone(&given_back), given_back.rounds());
        let kept = vec![KeptFd { filesystem: 1, file: Box::new(Hung(slow)) }];
        let first = std::thread::spawn(move || other.reclaim(rounds, Some(1), || kept));
        while given_back.state.lock().closing.is_empty() {
            std::thread::yield_now();
        }
        let other = Arc::clone(&given_back);
        let second = std::thread::spawn(move || other.reclaim(rounds, Some(1), Vec::new));
        drop(release);
        assert!(first.join().unwrap() && second.join().unwrap());
    }
}
