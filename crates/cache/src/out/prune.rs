//! Bound on the inodes that the kernel knows. See docs/decisions/0021-memory.md.

use crate::op::Output;
use crate::state::State;
use crate::store::INODE_BYTES;
use crate::store::Store;

/// Inodes that the kernel may know in any case.
const FEWEST: u64 = 16;

/// Share of the budget that inode records may have.
pub(crate) const PART: u64 = 2;

/// Returns whether the kernel still knows an inode that was queued with that sequence number.
pub(crate) fn is_known(store: &Store, seq: u32, ino: u64) -> bool {
    store.inode(ino).is_some_and(|inode| inode.kernel.is_queued_as(seq))
}

/// Returns the most inodes that the kernel may know.
fn most_inodes(state: &State) -> u64 {
    state.config.kernel_inodes_most.min(state.config.budget_bytes / PART / INODE_BYTES).max(FEWEST)
}

/// Returns whether a listing may give the kernel one more inode.
pub(crate) fn may_reveal(state: &State) -> bool {
    (state.store.inode_count() as u64) < most_inodes(state)
}

/// Adds an inode that the kernel did not know.
pub(crate) fn note_new_to_kernel(state: &mut State, ino: u64) {
    if !state.config.prunes {
        return;
    }
    let Some(inode) = state.store.inode_mut(ino) else { return };
    inode.kernel.note_queued(state.kernel.inodes.push(ino));
    let store = &state.store;
    state.kernel.inodes.tidy(store.inode_count(), |seq, ino| is_known(store, seq, ino));
    if state.kernel.inodes.begin_prune(state.store.inode_count() as u64, most_inodes(state)) {
        state.out.push_back(Output::Prune);
    }
}

/// Prunes half of the inodes that the kernel knows: memory is short.
pub(crate) fn prune_half(state: &mut State) {
    if state.config.prunes && state.kernel.inodes.begin_prune_of_half(state.store.inode_count() as u64) {
        state.out.push_back(Output::Prune);
    }
}

/// Returns node ids of some of the oldest inodes, for the kernel to forget; after [`Output::Prune`] until there are
/// none. The kernel sends a FORGET for each that it drops.
pub(crate) fn poll_prune(state: &mut State) -> Vec<u64> {
    let store = &state.store;
    let is_open = |ino: u64| store.inode(ino).is_some_and(|inode| inode.opens().is_open());
    let may_go = |ino: u64| !is_open(ino) && ino != store.root();
    let chosen = state.kernel.inodes.poll(|seq, ino| is_known(store, seq, ino), may_go);
    state.counters.pruned += chosen.len() as u64;
    chosen.into_iter().map(|ino| state.kernel.nodeids.nodeid(ino)).collect()
}
