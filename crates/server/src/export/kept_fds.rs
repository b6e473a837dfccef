//! Descriptors that an export keeps open for later calls. A file without a name occupies space while one is open.
//!
//! When a disk or quota is full, the server closes all of them that no client has open and retries the refused call
//! once. Closing a file may wait without bound for its filesystem (a hung FUSE daemon or NFS server), and the refused
//! call holds inode locks. So each filesystem has a closing thread of its own.

use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a refused call waits for closes on other filesystems, which may share its space as subvolumes do.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long it waits for closes on its own filesystem, which answered just now.
const OWN_PATIENCE: Duration = Duration::from_secs(10);

/// A descriptor kept for later calls, with the id of its filesystem ([`nigh_lease::Object`]).
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
    /// How often a filesystem has closed all its files.
    rounds: u64,
    /// Filesystems with a closing thread.
    closing: FxHashMap<u64, Closing>,
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

    /// Closes the files returned by `take`. Waits up to [`OWN_PATIENCE`] for `own`, the filesystem of the refused
    /// call, and up to [`PATIENCE`] for others; a filesystem that exceeded its time earlier is not waited for.
    /// Returns whether any file was closed since round `rounds`.
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
        for file in take() {
            let closing = state.closing.entry(file.filesystem).or_insert_with(|| {
                new.push(file.filesystem);
                Closing { since: begun, pending: Vec::new() }
            });
            closing.pending.push(file);
        }
        drop(state);
        new.into_iter().for_each(|filesystem| self.start(filesystem));
        let mut state = self.state.lock();
        loop {
            let until = |(filesystem, closing): (&u64, &Closing)| match Some(*filesystem) == own {
                true => begun + OWN_PATIENCE,
                false => begun.min(closing.since) + PATIENCE,
            };
            let Some(until) = state.closing.iter().map(until).max() else { break };
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
