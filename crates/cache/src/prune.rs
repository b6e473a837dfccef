//! Bound on the inodes that the kernel knows. See docs/decisions/0021-memory.md.

use crate::cache::Cache;
use crate::evict::INODE_BYTES;
use crate::op::Output;
use std::collections::VecDeque;

/// Most inodes of one prune: the kernel's other notifications wait for these, at 10 µs each.
const BATCH: usize = 256;
/// Inodes that the kernel may know in any case.
const FEWEST: u64 = 16;
/// Share of the budget that inode records may have.
const PART: u64 = 2;
/// Pruning starts at this many eighths of the bound, and stops at `ASKED_TO` eighths.
const ASKED_FROM: u64 = 7;
const ASKED_TO: u64 = 6;

/// Queue of the inodes that the kernel knows, oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct KernelInodeQueue {
    /// Inodes with a sequence number that the record has too. Otherwise the inode was forgotten since, and may stand
    /// here again.
    order: VecDeque<(u32, u64)>,
    count: u32,
    /// Number of inodes still to prune.
    to_prune: u64,
    /// Inodes added since the last prune.
    added_since_prune: u64,
}

impl KernelInodeQueue {
    /// Returns the memory in use, in bytes.
    pub fn bytes(&self) -> u64 {
        (self.order.capacity() * size_of::<(u32, u64)>()) as u64
    }
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
        self.told.count = self.told.count.wrapping_add(1);
        inode.queue_seq = self.told.count;
        self.told.order.push_back((inode.queue_seq, ino));
        self.told.added_since_prune += 1;
        // If more than a fifth are outdated, two of them are checked for each new one.
        if self.told.order.len() > self.store.inode_count() / 4 * 5 + BATCH {
            for _ in 0..2 {
                self.next_known().into_iter().for_each(|one| self.told.order.push_back(one));
            }
        }
        let (known, most) = (self.store.inode_count() as u64, self.most_inodes());
        // Inodes that the kernel keeps in spite of a prune are not asked for again at once.
        if self.told.to_prune == 0 && known > most / 8 * ASKED_FROM && self.told.added_since_prune > most / 16
        {
            (self.told.to_prune, self.told.added_since_prune) = (known - most / 8 * ASKED_TO, 0);
            self.out.push_back(Output::Prune);
        }
    }

    /// Takes the oldest inode, if the kernel still knows it.
    fn next_known(&mut self) -> Option<(u32, u64)> {
        let (count, ino) = self.told.order.pop_front()?;
        self.store.inode(ino).filter(|inode| inode.nlookup > 0 && inode.queue_seq == count)?;
        Some((count, ino))
    }

    /// Prunes half of the inodes that the kernel knows: memory is short.
    pub(crate) fn prune_half(&mut self) {
        if self.config.prunes && self.told.to_prune == 0 && !self.store.inode_count() == 0 {
            self.told.to_prune = self.store.inode_count() as u64 / 2;
            self.out.push_back(Output::Prune);
        }
    }

    /// Returns node ids of some of the oldest inodes, for the kernel to forget; after [`Output::Prune`] until there are
    /// none. The kernel sends a FORGET for each that it drops.
    pub fn poll_prune(&mut self) -> Vec<u64> {
        let mut chosen = Vec::new();
        let mut turns = self.told.order.len();
        while chosen.len() < BATCH && self.told.to_prune > 0 && turns > 0 {
            turns -= 1;
            let Some((count, ino)) = self.next_known() else { continue };
            self.told.order.push_back((count, ino));
            let is_open = self.store.inode(ino).is_some_and(|inode| inode.opens > 0);
            if !is_open && ino != self.store.root() {
                self.told.to_prune -= 1;
                chosen.push(self.nodeid_of(ino));
            }
        }
        self.counters.pruned += chosen.len() as u64;
        if chosen.is_empty() {
            self.told.to_prune = 0;
        }
        chosen
    }
}
