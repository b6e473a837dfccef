//! How long a reader looks for the next request before it sleeps.
//!
//! Waking a sleeping processor takes longer than answering from memory does. A walk that opens directories
//! sends its requests a few microseconds apart, so a reader that was given work in quick succession looks
//! again for a moment, gives way to whoever else wants to run, and only then sleeps.

use crate::Transport;
use std::time::{Duration, Instant};

/// For how long it looks.
const LOOK: Duration = Duration::from_micros(50);
/// After this many requests in quick succession.
const RUN: u32 = 4;
/// Requests between two looks at how many processors this thread may use.
const EVERY: u32 = 1024;

/// One reader's patience.
#[derive(Debug)]
pub struct Eager {
    /// Requests that each came soon after the last.
    run: u32,
    slept: Option<Instant>,
    /// Requests until the processors are counted again.
    until_count: u32,
    /// Whether this thread may use more than one: on a single one looking would only keep the caller off it.
    alone: bool,
}

impl Default for Eager {
    fn default() -> Eager {
        Eager { run: 0, slept: None, until_count: 0, alone: true }
    }
}

impl Eager {
    /// Before a blocking receive: returns when a request is there, or when it is time to sleep.
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
