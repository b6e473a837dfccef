//! Whether this machine stands still at times, as a virtual one does while its host is busy: whoever counts what a lease makes needless
//! has to know.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// So long it sleeps each time.
const BEAT: Duration = Duration::from_millis(20);

/// A thread that does nothing but sleep, and looks each time how long that took.
pub struct Pulse {
    stop: Sender<()>,
    thread: JoinHandle<Duration>,
}

impl Pulse {
    pub fn start() -> Pulse {
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
        Pulse { stop, thread }
    }

    /// By how much it overslept at the most.
    pub fn stop(self) -> Duration {
        drop(self.stop);
        self.thread.join().unwrap_or_default()
    }
}

/// By the clock of leases, which goes on while the machine is asleep.
fn now() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::try_from(now).unwrap_or_default()
}
