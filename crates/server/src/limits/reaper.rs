//! Session reaper: expiry of sessions with disconnected clients (docs/decisions/0009-sessions-over-connections.md).

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// How long a courtesy session keeps its open files, locks and stream for its client.
pub(crate) const COURTESY_TIME: Duration = Duration::from_secs(600);
/// Interval of the checks while a client is disconnected.
const TICK: Duration = Duration::from_secs(1);

/// Phase of a session. In the courtesy phase its lease has expired, but its files and locks are kept for its client.
///
/// ```text
///            lease expired
///   active ────────────────────▶ courtesy ── conflict, ten minutes ──▶ expiring ── discarded
///      ▲                            │                                     ▲
///      └───────── resumed ──────────┘          memory limit exceeded ─────┘ (from every phase)
/// ```
#[derive(Default)]
pub(crate) struct SessionPhase(AtomicU8);

const ACTIVE: u8 = 0;
const COURTESY: u8 = 1;
const EXPIRING: u8 = 2;

impl SessionPhase {
    pub(crate) fn is_courtesy(&self) -> bool {
        self.0.load(Ordering::SeqCst) == COURTESY
    }

    pub(crate) fn is_expiring(&self) -> bool {
        self.0.load(Ordering::SeqCst) == EXPIRING
    }

    pub(crate) fn lapse(&self) {
        let _ = self.0.compare_exchange(ACTIVE, COURTESY, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Makes a courtesy session active again. Returns false if it is too late.
    pub(crate) fn resume(&self) -> bool {
        self.0.compare_exchange(COURTESY, ACTIVE, Ordering::SeqCst, Ordering::SeqCst) != Err(EXPIRING)
    }

    /// Marks a courtesy session for removal, unless its client has returned. Returns whether it did.
    pub(crate) fn expire_courtesy(&self) -> bool {
        self.0.compare_exchange(COURTESY, EXPIRING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    pub(crate) fn expire(&self) {
        self.0.store(EXPIRING, Ordering::SeqCst);
    }
}

/// Wakes the reaper thread, and accounts the memory of all sessions.
#[derive(Default)]
pub(crate) struct SessionReaper {
    state: Mutex<State>,
    wake: Condvar,
    /// Memory of all sessions in bytes, and its limit.
    charged: AtomicU64,
    most: u64,
}

#[derive(Default)]
struct State {
    notified: bool,
    stopping: bool,
}

impl SessionReaper {
    /// A reaper for sessions with at most `most` bytes of memory.
    pub(crate) fn new(most: u64) -> SessionReaper {
        SessionReaper { most, ..SessionReaper::default() }
    }

    /// Changes the memory of a session from `before` to `now` bytes.
    pub(crate) fn note_charge(&self, before: u64, now: u64) {
        // A decrease wraps around.
        self.charged.fetch_add(now.wrapping_sub(before), Ordering::SeqCst);
        if now > before && self.is_over_limit() {
            self.notify();
        }
    }

    /// Memory of all sessions in bytes.
    pub(crate) fn charged_bytes(&self) -> u64 {
        self.charged.load(Ordering::SeqCst)
    }

    pub(crate) fn is_over_limit(&self) -> bool {
        self.charged_bytes() > self.most
    }

    /// Wakes the reaper thread.
    pub(crate) fn notify(&self) {
        self.state.lock().notified = true;
        self.wake.notify_one();
    }

    pub(crate) fn stop(&self) {
        self.state.lock().stopping = true;
        self.wake.notify_one();
    }

    /// Waits for a wake-up, or if `busy` for the next tick. Returns false if the server stops.
    pub(crate) fn wait(&self, busy: bool) -> bool {
        let mut state = self.state.lock();
        while !state.notified && !state.stopping {
            if !busy {
                self.wake.wait(&mut state);
            } else if self.wake.wait_for(&mut state, TICK).timed_out() {
                break;
            }
        }
        state.notified = false;
        !state.stopping
    }
}

/// Memory account of one session, also counted in the server's total.
pub(crate) struct MemoryAccount {
    reaper: Arc<SessionReaper>,
    bytes: AtomicU64,
}

impl MemoryAccount {
    pub(crate) fn new(reaper: &Arc<SessionReaper>) -> Arc<MemoryAccount> {
        Arc::new(MemoryAccount { reaper: Arc::clone(reaper), bytes: AtomicU64::new(0) })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }
}

/// A charge on a memory account, released when dropped.
pub(crate) struct Charge {
    account: Arc<MemoryAccount>,
    bytes: u64,
}

impl Charge {
    pub(crate) fn new(account: &Arc<MemoryAccount>, bytes: u64) -> Charge {
        let mut held = Charge { account: Arc::clone(account), bytes: 0 };
        held.set(bytes);
        held
    }

    pub(crate) fn set(&mut self, bytes: u64) {
        // A decrease wraps around.
        self.account.bytes.fetch_add(bytes.wrapping_sub(self.bytes), Ordering::SeqCst);
        self.account.reaper.note_charge(self.bytes, bytes);
        self.bytes = bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_account_is_the_sum_of_its_charges() {
        let reaper = Arc::new(SessionReaper::new(10));
        let (account, other) = (MemoryAccount::new(&reaper), MemoryAccount::new(&reaper));
        let mut first = Charge::new(&account, 5);
        let second = Charge::new(&account, 4);
        let third = Charge::new(&other, 2);
        assert_eq!((account.bytes(), other.bytes(), reaper.charged_bytes()), (9, 2, 11));
        assert!(reaper.is_over_limit());
        first.set(1);
        drop(second);
        assert_eq!((account.bytes(), reaper.charged_bytes()), (1, 3));
        drop((first, third));
        assert_eq!((account.bytes(), other.bytes(), reaper.charged_bytes()), (0, 0, 0));
    }

    #[test]
    fn courtesy_session_resumes_unless_it_is_expiring() {
        let standing = SessionPhase::default();
        assert!(!standing.expire_courtesy(), "it stands");
        standing.lapse();
        assert!(standing.is_courtesy() && standing.resume() && !standing.is_courtesy());
        assert!(standing.resume(), "it need not have lapsed");
        standing.lapse();
        assert!(standing.expire_courtesy() && standing.is_expiring() && !standing.resume());
        standing.lapse();
        assert!(standing.is_expiring());
    }
}
