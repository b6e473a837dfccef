//! Prefetch budget: the use of directories that jobs brought, and what was fetched in vain.

use crate::cache::Cache;
use nigh_types::{CallId, Span, Time};

/// A walk stays at a directory that it opened for this time.
const PASSING: Span = Span::from_millis(2_000);

impl Cache {
    /// Records the use of a directory: it is opened, or a name in it is looked up.
    pub(crate) fn use_prefetched(&mut self, now: Time, dir: u64) {
        let Some(directory) = self.store.dir_mut(dir) else { return };
        if directory.first_used_at.is_some_and(|passed| now >= passed.after(PASSING)) {
            // A caller came back.
            directory.first_used_at = None;
        }
        let Some((call, cost)) = directory.prefetched_by.take() else { return };
        directory.first_used_at = Some(now);
        if !directory.complete && directory.listing.is_none() {
            // It was evicted meanwhile.
            return self.count_wasted(call, cost);
        }
        self.counters.ahead_used += cost;
        let more = self.prefetch.count_used(now, call, cost);
        if more > 0 {
            self.send_credit(call, more, None);
        }
    }

    /// Counts prefetched entries that are gone or were never kept as wasted.
    pub(crate) fn count_wasted(&mut self, call: CallId, cost: u64) {
        self.counters.ahead_wasted += cost;
        self.prefetch.count_wasted(call, cost);
    }
}
