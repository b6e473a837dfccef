//! Memory pressure: directories that were not used for a while, and memory that other programs need. See
//! docs/decisions/0021-memory.md.

use crate::cache::Cache;
use nigh_types::{Span, Time};
use std::collections::BTreeSet;

/// Searches for idle directories within one idle time.
const LOOKS: u64 = 4;

impl Cache {
    /// Evicts directories that were not used for `--dir-timeout`.
    pub(crate) fn evict_idle(&mut self, now: Time) {
        let Some(limit) = self.config.dir_timeout.filter(|_| self.idle_due.is_some_and(|due| due <= now))
        else {
            return;
        };
        let spared = self.being_read();
        let idle = |ino: u64| {
            let directory = self.store.dir(ino).filter(|d| d.listing.is_none() && !spared.contains(&ino))?;
            (directory.used_at.after(limit) <= now).then_some(directory.id)
        };
        let idle: Vec<_> = self.store.in_eviction_order().filter_map(idle).collect();
        idle.into_iter().for_each(|id| self.evict(now, id));
        self.store.tidy_eviction_order();
        let next = Span(limit.0 / LOOKS).max(Span::from_millis(100));
        self.idle_due = (self.store.evictable() > 0).then(|| now.after(next));
    }

    /// Halves the memory in use, except for directories that are being read, and the number of inodes that the kernel
    /// knows.
    pub fn handle_pressure(&mut self, now: Time) {
        self.clock = now;
        self.counters.squeezed += 1;
        let (half, spared) = (self.bytes() / 2, self.being_read());
        self.evict_while(now, &spared, |cache| cache.bytes() > half);
        self.open.dirs.drop_snapshots();
        self.drop_name_streams(now);
        self.prune_half();
    }

    /// Returns the directories that are being read or watched.
    pub(crate) fn being_read(&self) -> BTreeSet<u64> {
        self.open.dirs.being_read().chain(self.watches.dirs()).collect()
    }
}
