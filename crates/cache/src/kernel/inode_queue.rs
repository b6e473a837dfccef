//! Queue of the inodes that the kernel knows, oldest first (docs/decisions/0021-memory.md).

use std::collections::VecDeque;

/// Most inodes of one prune: the kernel's other notifications wait for these, at 10 µs each.
const BATCH: usize = 256;
/// Pruning starts at this many eighths of the bound, and stops at `ASKED_TO` eighths.
const ASKED_FROM: u64 = 7;
const ASKED_TO: u64 = 6;

/// Inodes with a sequence number that the record has too. Otherwise the inode was forgotten since, and may stand here
/// again.
#[derive(Clone, Debug, Default)]
pub(crate) struct KernelInodeQueue {
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

    /// Adds an inode that the kernel did not know. Returns its sequence number.
    pub fn push(&mut self, ino: u64) -> u32 {
        self.count = self.count.wrapping_add(1);
        self.order.push_back((self.count, ino));
        self.added_since_prune += 1;
        self.count
    }

    /// Checks two of the oldest inodes if more than a fifth of the queue is outdated. `known`: number of inodes with a
    /// record.
    pub fn tidy(&mut self, known: usize, is_known: impl Fn(u32, u64) -> bool) {
        if self.order.len() > known / 4 * 5 + BATCH {
            for _ in 0..2 {
                let oldest = self.order.pop_front().filter(|(seq, ino)| is_known(*seq, *ino));
                self.order.extend(oldest);
            }
        }
    }

    /// Returns whether a prune begins, because the kernel knows nearly as many inodes as it may. Inodes that the kernel
    /// keeps in spite of a prune are not asked for again at once.
    pub fn begin_prune(&mut self, known: u64, most: u64) -> bool {
        let begins =
            self.to_prune == 0 && known > most / 8 * ASKED_FROM && self.added_since_prune > most / 16;
        if begins {
            (self.to_prune, self.added_since_prune) = (known - most / 8 * ASKED_TO, 0);
        }
        begins
    }

    /// Begins to prune half of the inodes, unless a prune is going on. Returns whether it does.
    pub fn begin_prune_of_half(&mut self, known: u64) -> bool {
        let begins = self.to_prune == 0 && known > 0;
        if begins {
            self.to_prune = known / 2;
        }
        begins
    }

    /// Returns some of the oldest inodes to prune; none: the prune is over.
    pub fn poll(&mut self, is_known: impl Fn(u32, u64) -> bool, may_go: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut chosen = Vec::new();
        let mut turns = self.order.len();
        while chosen.len() < BATCH && self.to_prune > 0 && turns > 0 {
            turns -= 1;
            let oldest = self.order.pop_front().filter(|(seq, ino)| is_known(*seq, *ino));
            let Some((seq, ino)) = oldest else { continue };
            self.order.push_back((seq, ino));
            if may_go(ino) {
                self.to_prune -= 1;
                chosen.push(ino);
            }
        }
        if chosen.is_empty() {
            self.to_prune = 0;
        }
        chosen
    }
}
