//! What follows a chunk of a listing or of a names-only listing: other readers go on, and memory is bounded.

use crate::calls::InflightCall;
use crate::memory::evict;
use crate::op::Fh;
use crate::ops::{names_only, oversized};
use crate::state::State;
use nigh_types::{CallId, Reply, Response, Time};

/// Handles a chunk, or the end.
pub(crate) fn on_names_reply(
    state: &mut State,
    now: Time,
    call: CallId,
    (dir, fh): (u64, Fh),
    mut flight: InflightCall,
    response: Response,
) {
    let names = match response.result {
        Ok(Reply::Dirents(names)) => Some(names),
        _ => None,
    };
    let goes_on =
        state.open.names.take((fh, call), names, state.store.key(), response.last) && !response.last;
    let waiters = std::mem::take(&mut flight.waiters);
    if goes_on {
        state.calls.insert(call, flight);
    }
    names_only::truncate_name_stream(state, fh, call);
    names_only::serve_names_only(state, now, dir, waiters);
    evict::trim(state, now);
}

/// Handles a chunk of a listing: it may answer names-only readers of the directory.
pub(crate) fn after_listing_chunk(state: &mut State, now: Time, dir: u64) {
    let calls = state.open.names.receiving(dir);
    calls.into_iter().for_each(|call| names_only::serve_waiting(state, now, call, dir));
    oversized::bound_listings(state, now);
    evict::trim(state, now);
}
