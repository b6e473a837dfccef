//! Bound on the inodes that the kernel knows. See docs/decisions/0021-memory.md.

use crate::cache::Cache;
use crate::evict::INODE_BYTES;
use crate::op::Output;
use crate::store::Store;

/// Inodes that the kernel may know in any case.
const FEWEST: u64 = 16;
/// Share of the budget that inode records may have.
const PART: u64 = 2;

/// Returns whether the kernel still knows an inode that was queued with that sequence number.
fn is_known(store: &Store, seq: u32, ino: u64) -> bool {
    store.inode(ino).is_some_and(|inode| inode.nlookup > 0 && inode.queue_seq == seq)
}

impl Cache {
    /// Returns the most inodes that the kernel may know.
    fn most_inodes(&self) -> u64 {
        self.config.kernel_inodes_most.min(self.config.budget_bytes / PART / INODE_BYTES).max(FEWEST)
    }

    /// Returns whether a listing may give the kernel one more inode.
    pub(crate) fn may_reveal(&self) -> bool {
        (self.store.inode_count() as u64) < self.most_inodes()
    }

    /// Adds an inode that the kernel did not know.
    pub(crate) fn note_new_to_kernel(&mut self, ino: u64) {
        if !self.config.prunes {
            return;
        }
        let Some(inode) = self.store.inode_mut(ino) else { return };
        inode.queue_seq = self.kernel.inodes.push(ino);
        let store = &self.store;
        self.kernel.inodes.tidy(store.inode_count(), |seq, ino| is_known(store, seq, ino));
        if self.kernel.inodes.begin_prune(self.store.inode_count() as u64, self.most_inodes()) {
            self.out.push_back(Output::Prune);
        }
    }

    /// Prunes half of the inodes that the kernel knows: memory is short.
    pub(crate) fn prune_half(&mut self) {
        if self.config.prunes && self.kernel.inodes.begin_prune_of_half(self.store.inode_count() as u64) {
            self.out.push_back(Output::Prune);
        }
    }

    /// Returns node ids of some of the oldest inodes, for the kernel to forget; after [`Output::Prune`] until there are
    /// none. The kernel sends a FORGET for each that it drops.
    pub fn poll_prune(&mut self) -> Vec<u64> {
        let store = &self.store;
        let is_open = |ino: u64| store.inode(ino).is_some_and(|inode| inode.opens > 0);
        let may_go = |ino: u64| !is_open(ino) && ino != store.root();
        let chosen = self.kernel.inodes.poll(|seq, ino| is_known(store, seq, ino), may_go);
        self.counters.pruned += chosen.len() as u64;
        chosen.into_iter().map(|ino| self.nodeid_of(ino)).collect()
    }
}
