//! Use of directories that prefetch jobs brought, and what was fetched in vain.

use crate::out::sending;
use crate::state::State;
use nigh_types::{CallId, Span, Time};

/// A walk stays at a directory that it opened for this time.
const PASSING: Span = Span::from_millis(2_000);

/// Records the use of a directory: it is opened, or a name in it is looked up.
pub(crate) fn use_prefetched(state: &mut State, now: Time, dir: u64) {
    let Some(directory) = state.store.dir_mut(dir) else { return };
    if directory.first_used_at.is_some_and(|passed| now >= passed.after(PASSING)) {
        // A caller came back.
        directory.first_used_at = None;
    }
    let Some((call, cost)) = directory.prefetched_by.take() else { return };
    directory.first_used_at = Some(now);
    if !directory.complete && directory.listing.is_none() {
        // It was evicted meanwhile.
        return count_wasted(state, call, cost);
    }
    state.counters.ahead_used += cost;
    let more = state.prefetch.count_used(now, call, cost);
    if more > 0 {
        sending::send_credit(state, call, more, None);
    }
}

/// Counts prefetched entries that are gone or were never kept as wasted.
pub(crate) fn count_wasted(state: &mut State, call: CallId, cost: u64) {
    state.counters.ahead_wasted += cost;
    state.prefetch.count_wasted(call, cost);
}
