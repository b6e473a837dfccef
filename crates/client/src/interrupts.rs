//! Signals to callers that wait (S8).
//!
//! The kernel sends INTERRUPT once per request, for the first signal, and a caller whose request was read cannot even
//! be killed until its reply. So this module checks the caller's pending signals then, and again while the caller
//! waits: only a fatal signal ends the wait. Any signal ends a wait for a lock, as on a local disk, without these
//! checks (`Driver::note_signal`).

use crate::driver::Driver;
use crate::host::signals::is_fatal;
use nigh_types::OpId;
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Interval at which callers with a signal are checked.
const EVERY: Duration = Duration::from_millis(10);

/// Requests whose callers have a signal pending.
#[derive(Default)]
pub(crate) struct Interrupts {
    watched: Mutex<BTreeSet<OpId>>,
    changed: Condvar,
    stopped: AtomicBool,
}

impl Interrupts {
    /// The kernel reported a pending signal of the caller of `op`.
    pub fn watch(&self, op: OpId) {
        self.watched.lock().insert(op);
        self.changed.notify_one();
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Checks watched callers until stopped.
    pub fn run(&self, driver: &Arc<Driver>) {
        while !self.stopped.load(Ordering::Relaxed) {
            let ops: Vec<OpId> = {
                let mut watched = self.watched.lock();
                if watched.is_empty() {
                    self.changed.wait_for(&mut watched, Duration::from_secs(1));
                }
                watched.iter().copied().collect()
            };
            for op in ops {
                let over = match driver.caller_of(op) {
                    None => true,
                    Some(pid) if is_doomed(pid) => {
                        driver.end_wait(op);
                        true
                    }
                    Some(_) => false,
                };
                if over {
                    self.watched.lock().remove(&op);
                }
            }
            if !self.watched.lock().is_empty() {
                std::thread::sleep(EVERY);
            }
        }
    }
}

/// Whether a thread has a fatal signal pending. A thread whose state is invisible counts as doomed: it must never be
/// left unkillable.
fn is_doomed(pid: u32) -> bool {
    if pid == 0 {
        return true;
    }
    match std::fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(status) => is_fatal(&status),
        Err(_) => true,
    }
}
