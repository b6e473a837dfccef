//! Detects whether this machine pauses at times, as a virtual one does while its host is busy: tests that count
//! requests without a lease must know.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The duration of each sleep.
const BEAT: Duration = Duration::from_millis(20);

/// A thread that only sleeps, and measures the duration of each sleep.
pub struct StallDetector {
    stop: Sender<()>,
    thread: JoinHandle<Duration>,
}

impl StallDetector {
    pub fn start() -> StallDetector {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            loop {
                let before = now();
                let ended = stopped.recv_timeout(BEAT) != Err(RecvTimeoutError::Timeout);
                longest = longest.max(now().saturating_sub(before).saturating_sub(BEAT));
                if ended {
                    return longest;
                }
            }
        });
        StallDetector { stop, thread }
    }

    /// Returns the longest delay of a sleep.
    pub fn stop(self) -> Duration {
        drop(self.stop);
        self.thread.join().unwrap_or_default()
    }
}

/// Returns the time on the leases' clock, which also counts while the machine is suspended.
fn now() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::try_from(now).unwrap_or_default()
}
