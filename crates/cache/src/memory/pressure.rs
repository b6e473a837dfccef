//! Memory that other programs need. See docs/decisions/0021-memory.md.

use crate::memory::evict;
use crate::ops::names_only;
use crate::out::prune;
use crate::state::State;
use crate::view;
use nigh_types::Time;

/// Gives all contents of files back. If these were the lesser part of the memory in use, also halves the rest, except for
/// directories that are being read, and the number of inodes that the kernel knows.
pub(crate) fn handle_pressure(state: &mut State, now: Time) {
    state.clock = now;
    state.counters.squeezed += 1;
    let contents = state.contents.bytes();
    state.drop_all_contents();
    if contents > state.bytes() {
        return;
    }
    let (half, spared) = (state.bytes() / 2, view::being_read(state));
    evict::evict_while(state, now, &spared, |cache| cache.bytes() > half);
    state.open.dirs.drop_snapshots();
    names_only::drop_name_streams(state, now);
    prune::prune_half(state);
}
