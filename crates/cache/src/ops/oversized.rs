//! Directories that do not fit `--cache-size`, and listings that never end: the bound on what a listing in flight may
//! hold (docs/decisions/0021-memory.md).
//!
//! Eviction spares a directory whose listing is in flight. So the size of a listing is bounded here: beyond twice the
//! budget, or beyond the budget once no reader waits for it, the call is cancelled and its entries are dropped. Readers
//! then get names from their offset on by calls of their own, if the remote has names-only listings, else `ENOMEM`.

use crate::calls::CallKind;
use crate::memory::evict;
use crate::op::Output;
use crate::ops::names_only::ALWAYS_KEPT;
use crate::ops::{listings, names_only, prefetching};
use crate::state::State;
use nigh_types::{CallId, Time};

/// Cancels listings in flight, the largest first, until all together keep to their bound. Runs after each chunk.
pub(crate) fn bound_listings(state: &mut State, now: Time) {
    let budget = state.config.budget_bytes;
    let (beyond, alone) = (budget.saturating_mul(2).max(ALWAYS_KEPT), budget.max(ALWAYS_KEPT));
    loop {
        let sizes: Vec<(u64, CallId, u64)> = listing_sizes(state).collect();
        let Some(&(bytes, call, dir)) = sizes.iter().max() else { return };
        let sum: u64 = sizes.iter().map(|(bytes, ..)| bytes).sum();
        if sum <= beyond && (bytes <= alone || is_wanted(state, call, dir)) {
            return;
        }
        abandon_listing(state, now, call, dir);
    }
}

/// Returns the memory of each listing in flight, in bytes: entries of the directory, or detached entries.
fn listing_sizes(state: &State) -> impl Iterator<Item = (u64, CallId, u64)> {
    state.calls.iter().filter_map(|(call, flight)| match flight.purpose {
        CallKind::List { dir } if !flight.abandoned => {
            let kept =
                || state.store.dir(dir).filter(|d| d.listing == Some(call)).map_or(0, |d| d.rows.bytes());
            Some((flight.detached_entries.as_ref().map_or_else(kept, |rows| rows.bytes()), call, dir))
        }
        _ => None,
    })
}

/// Returns whether a request waits for the listing, or an open directory is being read.
fn is_wanted(state: &State, call: CallId, dir: u64) -> bool {
    state.calls.inflight(call).is_some_and(|flight| !flight.waiters.is_empty())
        || state.open.dirs.is_being_read(dir)
}

fn abandon_listing(state: &mut State, now: Time, call: CallId, dir: u64) {
    let Some(flight) = state.calls.inflight_mut(call) else { return };
    tracing::warn!(
        target: "nigh::evict",
        ino = dir,
        "a directory is larger than the cache may be: its names are asked for page by page; raise --cache-size"
    );
    flight.abandoned = true;
    flight.detached_entries = None;
    flight.grants = Vec::new();
    let waiters = std::mem::take(&mut flight.waiters);
    state.store.oversized.insert(now, dir);
    let current = state.store.dir(dir).filter(|d| d.listing == Some(call)).map(|d| d.id);
    listings::end_listing(state, call, dir);
    if let Some(id) = current {
        evict::evict(state, now, id);
    }
    // The remote knows no call for a listing that a prefetch job brings.
    match state.prefetch.job_of(dir, call) {
        Some(walk) => prefetching::cancel_job(state, now, walk),
        None => state.out.push_back(Output::Cancel(call)),
    }
    waiters.into_iter().for_each(|op| names_only::answer_beside_listing(state, now, dir, op));
}

#[cfg(test)]
mod tests;
