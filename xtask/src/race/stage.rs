//! Common parts of the races: two sides, the durations of their calls, and numbers that one side announces to the
//! other.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

/// Statistics of one side's calls.
#[derive(Default)]
pub struct CallTimes {
    pub operations: u64,
    pub longest: Duration,
    pub longest_call: &'static str,
}

impl CallTimes {
    /// Makes a call and records its time.
    pub fn time<T>(&mut self, what: &'static str, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = call();
        let took = start.elapsed();
        self.operations += 1;
        if took > self.longest {
            self.longest = took;
            self.longest_call = what;
        }
        result
    }

    /// Makes a call that must succeed.
    pub fn call<T>(&mut self, what: &'static str, call: impl FnOnce() -> io::Result<T>) -> Result<T> {
        self.time(what, call).context(what)
    }

    /// Makes a call that must fail with ENOENT.
    pub fn absent<T>(&mut self, what: &'static str, call: impl FnOnce() -> io::Result<T>) -> Result<()> {
        match self.time(what, call) {
            Ok(_) => bail!("{what}: it is there"),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            Err(e) => Err(e).context(what),
        }
    }

    pub fn add(&mut self, other: &CallTimes) {
        self.operations += other.operations;
        if other.longest > self.longest {
            self.longest = other.longest;
            self.longest_call = other.longest_call;
        }
    }
}

/// Ends the other side when one has failed.
#[derive(Default)]
pub struct Stage {
    failed: AtomicBool,
}

impl Stage {
    /// Waits until the condition holds; an error if the other side has failed.
    pub fn wait_until(&self, is_so: impl Fn() -> bool) -> Result<()> {
        while !is_so() {
            ensure!(!self.failed.load(Ordering::SeqCst), "(the other side failed)");
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    }

    /// Returns whether the other side has failed.
    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// Runs both sides to their end; the first error counts.
    pub fn both(
        &self,
        first: impl FnOnce(&mut CallTimes) -> Result<()> + Send,
        second: impl FnOnce(&mut CallTimes) -> Result<()> + Send,
    ) -> Result<CallTimes> {
        let (one, two) = std::thread::scope(|scope| {
            let other = scope.spawn(|| self.side(second));
            (self.side(first), other.join())
        });
        let two = two.map_err(|_| anyhow!("the second side panicked"))?;
        let mut meter = one.meter;
        meter.add(&two.meter);
        match (one.result, two.result) {
            (Ok(()), Ok(())) => Ok(meter),
            (Err(e), Ok(())) => Err(e.context("on the first side")),
            (Err(e), Err(_)) if one.failed_first => Err(e.context("on the first side")),
            (_, Err(e)) => Err(e.context("on the second side")),
        }
    }

    fn side(&self, body: impl FnOnce(&mut CallTimes) -> Result<()>) -> Side {
        let mut meter = CallTimes::default();
        let result = body(&mut meter);
        let failed_first = result.is_err() && !self.failed.swap(true, Ordering::SeqCst);
        Side { meter, result, failed_first }
    }
}

/// The result of a side. The side that fails second may only report that the other has failed.
struct Side {
    meter: CallTimes,
    result: Result<()>,
    failed_first: bool,
}

/// An increasing number that one side is about to make visible, and then announces to the other side.
#[derive(Default)]
pub struct Announced {
    begun: AtomicU64,
    announced: AtomicU64,
}

impl Announced {
    /// To be called before the call that makes it visible.
    pub fn begin(&self, value: u64) {
        self.begun.store(value, Ordering::SeqCst);
    }

    /// To be called after that call has returned.
    pub fn announce(&self, value: u64) {
        self.announced.store(value, Ordering::SeqCst);
    }

    pub fn announced(&self) -> u64 {
        self.announced.load(Ordering::SeqCst)
    }

    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }
}
