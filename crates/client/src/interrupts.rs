//! Signals to callers that wait (S8).
//!
//! The kernel sends INTERRUPT once per request, for the first signal, and a caller whose request was read cannot even
//! be killed until its reply. So this module checks the caller's pending signals then, and again while the caller
//! waits: only a fatal signal ends the wait. Any signal ends a wait for a lock, as on a local disk, without these
//! checks (`Driver::note_signal`).

use crate::driver::Driver;
use crate::host::Host;
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
                    Some(pid) if is_doomed(&*driver.host, pid) => {
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

/// Whether a thread has a fatal signal pending. A thread whose signals are unknown counts as doomed: it must never be
/// left unkillable.
fn is_doomed(host: &dyn Host, thread: u32) -> bool {
    host.has_fatal_signal(thread).unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::tests::DriverHarness;
    use crate::host::NoHost;
    use crate::host::test_host::TestHost;
    use crate::reply::ReplyFormat;
    use nigh_cache::{Caller, Op};

    const SOON: Duration = EVERY.saturating_mul(5);
    const LIMIT: Duration = Duration::from_secs(20);

    /// Interrupts a GETATTR that waits for the server, while `check` runs with a wait for its reply.
    fn interrupt(host: Arc<dyn Host>, check: impl FnOnce(&dyn Fn(Duration) -> Option<i32>)) {
        let stage = DriverHarness::on(host);
        let (driver, op) = (&stage.driver, OpId(1002));
        let caller = Caller { pid: std::process::id(), ..Caller::default() };
        driver.operate(op.0, op, caller, ReplyFormat::Natural, Op::GetAttr { ino: driver.root() });
        let interrupts = Interrupts::default();
        std::thread::scope(|scope| {
            scope.spawn(|| interrupts.run(driver));
            interrupts.watch(op);
            check(&|limit| stage.kernel.take_reply(op.0, limit).map(|(errno, _)| errno));
            interrupts.stop();
        });
    }

    #[test]
    fn wait_ends_when_the_host_shows_a_fatal_signal() {
        let host = Arc::new(TestHost::default());
        interrupt(Arc::<TestHost>::clone(&host), |reply| {
            assert_eq!(reply(SOON), None, "another signal does not end it");
            host.has_fatal_signal.store(true, Ordering::SeqCst);
            assert_eq!(reply(LIMIT), Some(libc::EINTR));
        });
    }

    /// A program of this machine with the caller's number has no signal pending.
    #[test]
    fn interrupt_without_a_host_ends_the_wait() {
        interrupt(Arc::new(NoHost), |reply| assert_eq!(reply(LIMIT), Some(libc::EINTR)));
    }
}
