//! What an export keeps open of files for calls to come: a file that has lost its last name takes space until that ends.
//!
//! Where the disk or a quota is full, all of it that no client has open is given back, and the call that was refused is
//! attempted once more. To close a file may wait for its filesystem for ever (a FUSE daemon or an NFS server that does not
//! answer), and the refused call holds locks on places; so each filesystem has a closing thread of its own.

use super::Export;
use crate::error::{Fault, Result};
use crate::ops::Context;
use nigh_types::Errno;
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A refused call waits at most so long for closes on filesystems other than its own, which may share their space with it as
/// subvolumes do.
const PATIENCE: Duration = Duration::from_secs(1);
/// And so long for those on its own, which answered just now.
const OWN_PATIENCE: Duration = Duration::from_secs(10);

/// A descriptor that is kept for calls to come, and the filesystem ([`nigh_native::lease::Object`]) on which it lies.
pub(crate) struct Kept {
    pub(crate) filesystem: u64,
    #[allow(dead_code, reason = "held, not looked at")]
    pub(crate) file: Box<dyn Send>,
}

/// Descriptors that are being given back.
#[derive(Default)]
pub(crate) struct GivenBack {
    state: Mutex<State>,
    /// A filesystem has closed what it was given.
    closed: Condvar,
}

#[derive(Default)]
struct State {
    /// How often a filesystem closed what it was given.
    rounds: u64,
    /// Filesystems that have a closing thread.
    closing: FxHashMap<u64, Closing>,
}

struct Closing {
    since: Instant,
    /// What came since its thread began.
    left: Vec<Kept>,
}

impl GivenBack {
    pub(crate) fn rounds(&self) -> u64 {
        self.state.lock().rounds
    }

    /// Closes what `take` takes out. Waits for those of `own`, the filesystem of a call that was refused, within [`OWN_PATIENCE`], and for
    /// the others within [`PATIENCE`]; those of filesystems that exceeded that before are not waited for. Whether anything was given back since
    /// there were so many rounds.
    pub(crate) fn since(
        self: &Arc<GivenBack>,
        rounds: u64,
        own: Option<u64>,
        take: impl FnOnce() -> Vec<Kept>,
    ) -> bool {
        let begun = Instant::now();
        let mut state = self.state.lock();
        let mut new = Vec::new();
        // Under the lock: another refused call finds each descriptor either kept or being closed.
        for file in take() {
            let closing = state.closing.entry(file.filesystem).or_insert_with(|| {
                new.push(file.filesystem);
                Closing { since: begun, left: Vec::new() }
            });
            closing.left.push(file);
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

    fn start(self: &Arc<GivenBack>, filesystem: u64) {
        let this = Arc::clone(self);
        let thread = std::thread::Builder::new().name("nigh-space".into());
        if thread.spawn(move || this.close(filesystem)).is_err() {
            self.close(filesystem);
        }
    }

    /// Closes what a filesystem is given until nothing is left.
    fn close(&self, filesystem: u64) {
        let mut state = self.state.lock();
        while let Some(closing) = state.closing.get_mut(&filesystem) {
            let files = std::mem::take(&mut closing.left);
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

/// Attempts a call, or a part of one that may be made again; where there is no space on its filesystem, once more after space
/// was given back.
pub(crate) fn with_space<T>(
    cx: Context<'_>,
    filesystem: Option<u64>,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let leases = &cx.files.holding().leases;
    let rounds = leases.given_back.rounds();
    match attempt() {
        Err(Fault(Errno::NOSPC | Errno::DQUOT)) if leases.give_back_space(cx.export, filesystem, rounds) => {
            attempt()
        }
        other => other,
    }
}

impl Export {
    /// Takes out what is kept for calls to come and no client has open.
    pub(crate) fn take_kept(&self) -> Vec<Kept> {
        let mut kept = self.readers.take_all();
        kept.append(&mut self.reach.departed.take_all());
        kept.append(&mut self.reach.removed.take_all());
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    /// A file that is not closed before its other end is dropped.
    struct Hung(Receiver<()>);

    impl Drop for Hung {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    fn plain(filesystem: u64) -> Kept {
        Kept { filesystem, file: Box::new(()) }
    }

    #[test]
    fn file_that_does_not_close_holds_up_no_call_on_another_filesystem() {
        let given_back = Arc::new(GivenBack::default());
        let (release, hung) = channel();
        let hung = Kept { filesystem: 2, file: Box::new(Hung(hung)) };
        let (done, ended) = channel();
        let refused = |own, kept| {
            let (given_back, done) = (Arc::clone(&given_back), done.clone());
            let rounds = given_back.rounds();
            std::thread::spawn(move || done.send(given_back.since(rounds, Some(own), || kept)));
        };
        let begun = Instant::now();
        refused(1, vec![hung, plain(1)]);
        assert_eq!(
            ended.recv_timeout(PATIENCE * 10),
            Ok(true),
            "what is of its own filesystem is given back"
        );
        assert!(begun.elapsed() >= PATIENCE, "the other may share its space");
        // Whatever else hangs there costs no time any more.
        let begun = Instant::now();
        refused(1, vec![plain(2), plain(1)]);
        assert_eq!(ended.recv_timeout(PATIENCE * 10), Ok(true));
        refused(1, vec![plain(2)]);
        assert_eq!(ended.recv_timeout(PATIENCE * 10), Ok(false), "nothing was given back");
        assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
        // A call on that filesystem waits for it, and all that is kept there is closed in the end.
        refused(2, vec![]);
        assert!(ended.recv_timeout(PATIENCE / 5).is_err());
        drop(release);
        assert_eq!(ended.recv_timeout(PATIENCE * 10), Ok(true));
        assert!(given_back.state.lock().closing.is_empty());
    }

    #[test]
    fn call_that_is_refused_while_space_is_given_back_waits_for_it() {
        let given_back = Arc::new(GivenBack::default());
        let (release, slow) = channel();
        let (other, rounds) = (Arc::clone(&given_back), given_back.rounds());
        let kept = vec![Kept { filesystem: 1, file: Box::new(Hung(slow)) }];
        let first = std::thread::spawn(move || other.since(rounds, Some(1), || kept));
        while given_back.state.lock().closing.is_empty() {
            std::thread::yield_now();
        }
        let other = Arc::clone(&given_back);
        let second = std::thread::spawn(move || other.since(rounds, Some(1), Vec::new));
        drop(release);
        assert!(first.join().unwrap() && second.join().unwrap());
    }
}
