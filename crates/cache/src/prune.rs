//! Holding down how many inodes the kernel knows because of us. See docs/decisions/0021-memory.md.

use crate::cache::Cache;
use crate::evict::INODE_BYTES;
use crate::op::Output;
use std::collections::VecDeque;

/// Whatever else the kernel is to be told waits for so many, at 10 µs each.
const BATCH: usize = 256;
/// So many it may know in any case.
const FEWEST: u64 = 16;
/// The part of the budget that records of inodes may have.
const PART: u64 = 2;
/// The kernel is asked to forget when there are so many eighths of what may be, until there are so many.
const ASKED_FROM: u64 = 7;
const ASKED_TO: u64 = 6;

/// What the kernel was told of, in that order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    /// Each with its count, which its record has too; else it was forgotten since, and maybe told again.
    order: VecDeque<(u32, u64)>,
    count: u32,
    /// So many are yet to be given back.
    left: u64,
    /// How many were told since.
    since: u64,
}

impl Told {
    /// Memory held, in bytes.
    pub fn bytes(&self) -> u64 {
        (self.order.capacity() * size_of::<(u32, u64)>()) as u64
    }
}

impl Cache {
    /// How many inodes the kernel may know.
    fn most_inodes(&self) -> u64 {
        self.config.kernel_inodes_most.min(self.config.budget_bytes / PART / INODE_BYTES).max(FEWEST)
    }

    /// Whether a listing may tell the kernel of one more.
    pub(crate) fn may_tell(&self) -> bool {
        (self.inodes.len() as u64) < self.most_inodes()
    }

    /// The kernel did not know that one.
    pub(crate) fn note_new_to_kernel(&mut self, ino: u64) {
        if !self.config.prunes {
            return;
        }
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        self.told.count = self.told.count.wrapping_add(1);
        inode.told_as = self.told.count;
        self.told.order.push_back((inode.told_as, ino));
        self.told.since += 1;
        // Where more than a fifth are of no use, two of them are looked at for each that comes.
        if self.told.order.len() > self.inodes.len() / 4 * 5 + BATCH {
            for _ in 0..2 {
                self.next_told().into_iter().for_each(|one| self.told.order.push_back(one));
            }
        }
        let (known, most) = (self.inodes.len() as u64, self.most_inodes());
        // What it keeps nevertheless is not asked for again at once.
        if self.told.left == 0 && known > most / 8 * ASKED_FROM && self.told.since > most / 16 {
            (self.told.left, self.told.since) = (known - most / 8 * ASKED_TO, 0);
            self.out.push_back(Output::Prune);
        }
    }

    /// Takes out the one that was told longest ago, if the kernel knows it still.
    fn next_told(&mut self) -> Option<(u32, u64)> {
        let (count, ino) = self.told.order.pop_front()?;
        self.inodes.get(&ino).filter(|inode| inode.lookups > 0 && inode.told_as == count)?;
        Some((count, ino))
    }

    /// Memory is short: half of what the kernel knows is to go.
    pub(crate) fn prune_half(&mut self) {
        if self.config.prunes && self.told.left == 0 && !self.inodes.is_empty() {
            self.told.left = self.inodes.len() as u64 / 2;
            self.out.push_back(Output::Prune);
        }
    }

    /// Numbers of some inodes that the kernel may as well forget, of those that it has known longest; after
    /// [`Output::Prune`] until there are none. Forgetting them is up to it: what it forgets, it says.
    pub fn poll_prune(&mut self) -> Vec<u64> {
        let mut chosen = Vec::new();
        let mut turns = self.told.order.len();
        while chosen.len() < BATCH && self.told.left > 0 && turns > 0 {
            turns -= 1;
            let Some((count, ino)) = self.next_told() else { continue };
            self.told.order.push_back((count, ino));
            let is_open = self.inodes.get(&ino).is_some_and(|inode| inode.opens > 0);
            if !is_open && ino != self.root {
                self.told.left -= 1;
                chosen.push(self.number_of(ino));
            }
        }
        self.counters.pruned += chosen.len() as u64;
        if chosen.is_empty() {
            self.told.left = 0;
        }
        chosen
    }
}
