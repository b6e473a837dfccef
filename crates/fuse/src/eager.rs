//! How long a reader thread polls for the next request before it sleeps.
//!
//! Waking a sleeping processor takes longer than a reply from memory. A walk that opens directories sends its
//! requests a few microseconds apart. So after requests in quick succession the reader polls for a moment, yields the
//! processor to other threads, and only then sleeps.

use crate::Transport;
use std::time::{Duration, Instant};

/// How long it polls.
const LOOK: Duration = Duration::from_micros(50);
/// Number of requests in quick succession before it polls.
const RUN: u32 = 4;
/// Requests between two checks of how many processors this thread may use.
const EVERY: u32 = 1024;

/// Polling state of one reader thread.
#[derive(Debug)]
pub struct Eager {
    /// Requests that each came soon after the one before.
    run: u32,
    slept: Option<Instant>,
    /// Requests until the next check of the number of processors.
    until_count: u32,
    /// Whether this thread may use only one processor: then polling would only keep the caller off it.
    alone: bool,
}

impl Default for Eager {
    fn default() -> Eager {
        Eager { run: 0, slept: None, until_count: 0, alone: true }
    }
}

impl Eager {
    /// Call before a blocking receive: returns when a request is ready, or when it is time to sleep.
    pub fn look(&mut self, transport: &dyn Transport) {
        if self.until_count == 0 {
            self.until_count = EVERY;
            self.alone = std::thread::available_parallelism().is_ok_and(|count| count.get() == 1);
        }
        self.until_count -= 1;
        if self.alone {
            return;
        }
        let start = Instant::now();
        if self.run >= RUN {
            while start.elapsed() < LOOK {
                if transport.is_ready() {
                    return;
                }
                std::thread::yield_now();
            }
            self.run = 0;
        }
        self.slept = Some(start);
    }

    /// A request was received.
    pub fn received(&mut self) {
        if let Some(since) = self.slept.take() {
            self.run = if since.elapsed() < 2 * LOOK { self.run + 1 } else { 0 };
        }
    }
}
