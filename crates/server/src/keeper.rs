//! What becomes of sessions whose client is away (docs/decisions/0009-sessions-over-connections.md).

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// How long a session that lapsed keeps its open files, locks and stream for its client.
pub(crate) const DORMANCY: Duration = Duration::from_secs(600);
/// How often sessions are looked at while a client is away.
const TICK: Duration = Duration::from_secs(1);

/// Whether a session is still what its client believes it to be.
///
/// ```text
///            its lease ran out
///   Stands ────────────────────▶ Dormant ── in the way, ten minutes ──▶ Doomed ── forgotten
///      ▲                            │                                      ▲
///      └───────── resumed ──────────┘          too much is kept for it ────┘ (from everywhere)
/// ```
#[derive(Default)]
pub(crate) struct Standing(AtomicU8);

const STANDS: u8 = 0;
const DORMANT: u8 = 1;
const DOOMED: u8 = 2;

impl Standing {
    pub(crate) fn is_dormant(&self) -> bool {
        self.0.load(Ordering::SeqCst) == DORMANT
    }

    pub(crate) fn is_doomed(&self) -> bool {
        self.0.load(Ordering::SeqCst) == DOOMED
    }

    pub(crate) fn lapse(&self) {
        let _ = self.0.compare_exchange(STANDS, DORMANT, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// False: it is too late.
    pub(crate) fn resume(&self) -> bool {
        self.0.compare_exchange(DORMANT, STANDS, Ordering::SeqCst, Ordering::SeqCst) != Err(DOOMED)
    }

    /// It is to be forgotten if its client is not back. True: so it is.
    pub(crate) fn doom_dormant(&self) -> bool {
        self.0.compare_exchange(DORMANT, DOOMED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    pub(crate) fn doom(&self) {
        self.0.store(DOOMED, Ordering::SeqCst);
    }
}

/// Wakes the thread that looks after sessions whose client is away, and when too much is kept for all of them.
#[derive(Default)]
pub(crate) struct Keeper {
    state: Mutex<State>,
    wake: Condvar,
    /// Bytes kept for all sessions, and how many there may be.
    held: AtomicU64,
    most: u64,
}

#[derive(Default)]
struct State {
    called: bool,
    stopping: bool,
}

impl Keeper {
    /// For a server that keeps up to `most` bytes for its sessions.
    pub(crate) fn new(most: u64) -> Keeper {
        Keeper { most, ..Keeper::default() }
    }

    /// For one session so many bytes are kept now, not as many as before.
    pub(crate) fn note_held(&self, before: u64, now: u64) {
        // It wraps around where less is kept.
        self.held.fetch_add(now.wrapping_sub(before), Ordering::SeqCst);
        if now > before && self.is_crowded() {
            self.call();
        }
    }

    /// Bytes kept for all sessions.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held.load(Ordering::SeqCst)
    }

    pub(crate) fn is_crowded(&self) -> bool {
        self.held_bytes() > self.most
    }

    /// There is something to look at.
    pub(crate) fn call(&self) {
        self.state.lock().called = true;
        self.wake.notify_one();
    }

    pub(crate) fn stop(&self) {
        self.state.lock().stopping = true;
        self.wake.notify_one();
    }

    /// Waits for a call, or if `busy` for the next tick. False: the server stops.
    pub(crate) fn wait(&self, busy: bool) -> bool {
        let mut state = self.state.lock();
        while !state.called && !state.stopping {
            if !busy {
                self.wake.wait(&mut state);
            } else if self.wake.wait_for(&mut state, TICK).timed_out() {
                break;
            }
        }
        state.called = false;
        !state.stopping
    }
}

/// Bytes kept for one session, as the keeper is told.
pub(crate) struct Tally {
    keeper: Arc<Keeper>,
    bytes: AtomicU64,
}

impl Tally {
    pub(crate) fn new(keeper: &Arc<Keeper>) -> Arc<Tally> {
        Arc::new(Tally { keeper: Arc::clone(keeper), bytes: AtomicU64::new(0) })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }
}

/// A part of them, until it is dropped.
pub(crate) struct Held {
    tally: Arc<Tally>,
    bytes: u64,
}

impl Held {
    pub(crate) fn new(tally: &Arc<Tally>, bytes: u64) -> Held {
        let mut held = Held { tally: Arc::clone(tally), bytes: 0 };
        held.set(bytes);
        held
    }

    pub(crate) fn set(&mut self, bytes: u64) {
        // It wraps around where less is kept.
        self.tally.bytes.fetch_add(bytes.wrapping_sub(self.bytes), Ordering::SeqCst);
        self.tally.keeper.note_held(self.bytes, bytes);
        self.bytes = bytes;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_for_a_session_is_the_sum_of_its_parts() {
        let keeper = Arc::new(Keeper::new(10));
        let (tally, other) = (Tally::new(&keeper), Tally::new(&keeper));
        let mut first = Held::new(&tally, 5);
        let second = Held::new(&tally, 4);
        let third = Held::new(&other, 2);
        assert_eq!((tally.bytes(), other.bytes(), keeper.held_bytes()), (9, 2, 11));
        assert!(keeper.is_crowded());
        first.set(1);
        drop(second);
        assert_eq!((tally.bytes(), keeper.held_bytes()), (1, 3));
        drop((first, third));
        assert_eq!((tally.bytes(), other.bytes(), keeper.held_bytes()), (0, 0, 0));
    }

    #[test]
    fn who_comes_back_in_time_is_not_forgotten_and_who_is_too_late_is() {
        let standing = Standing::default();
        assert!(!standing.doom_dormant(), "it stands");
        standing.lapse();
        assert!(standing.is_dormant() && standing.resume() && !standing.is_dormant());
        assert!(standing.resume(), "it need not have lapsed");
        standing.lapse();
        assert!(standing.doom_dormant() && standing.is_doomed() && !standing.resume());
        standing.lapse();
        assert!(standing.is_doomed());
    }
}
