//! Accepted calls that are not finished, and whether the server accepts more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counter of calls from acceptance until they are answered or dropped: queued, executing or parked.
///
/// A call is counted before the stop flag is read, and the flag is set before the count is read. So once the server
/// has stopped and counts no calls, none will be executed.
#[derive(Debug, Default)]
pub(crate) struct InflightCalls {
    under_way: AtomicU64,
    stopping: AtomicBool,
}

/// An accepted call, counted until dropped.
#[derive(Debug)]
pub(crate) struct InflightCall(Arc<InflightCalls>);

impl InflightCalls {
    /// Accepts a call; `None` if the server stops and the call must not be executed.
    pub(crate) fn take(self: &Arc<InflightCalls>) -> Option<InflightCall> {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let taken = InflightCall(Arc::clone(self));
        (!self.is_stopping()).then_some(taken)
    }

    /// Accepts no more calls.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    pub(crate) fn under_way(&self) -> u64 {
        self.under_way.load(Ordering::SeqCst)
    }
}

impl Drop for InflightCall {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_is_accepted_after_stop_and_accepted_ones_stay_counted() {
        let work = Arc::new(InflightCalls::default());
        let (one, two) = (work.take().unwrap(), work.take().unwrap());
        work.stop();
        assert!(work.take().is_none());
        assert_eq!(work.under_way(), 2);
        drop(one);
        assert_eq!(work.under_way(), 1);
        drop(two);
        assert_eq!(work.under_way(), 0);
    }
}
