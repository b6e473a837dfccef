//! The calls that a server has taken and not finished, and whether it takes more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts calls from before they are taken until they are answered or dropped: queued, executed or parked.
///
/// Counting comes before looking whether the server stops, and stopping before looking at the count; so
/// once it has stopped and counts none, nothing is done any more.
#[derive(Debug, Default)]
pub(crate) struct Work {
    under_way: AtomicU64,
    stopping: AtomicBool,
}

/// One call that was taken.
#[derive(Debug)]
pub(crate) struct Taken(Arc<Work>);

impl Work {
    /// Takes a call; `None`: the server stops, and it is not to be done.
    pub(crate) fn take(self: &Arc<Work>) -> Option<Taken> {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let taken = Taken(Arc::clone(self));
        (!self.is_stopping()).then_some(taken)
    }

    /// No calls are taken from now on.
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

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_taken_after_stopping_and_what_was_is_counted_to_its_end() {
        let work = Arc::new(Work::default());
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
