//! Counters and gauges of a cache for `nigh status`.

use crate::grants::LiveGrant;
use nigh_types::Time;

/// Counters over a cache's life; they only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Requests answered from memory.
    pub hits: u64,
    /// Requests that had to wait.
    pub misses: u64,
    /// Waiting requests that have been answered.
    pub waits: u64,
    /// Of these, the ones that joined a call in flight.
    pub joins: u64,
    pub evictions: u64,
    /// How often memory was short, and half of it was given back.
    pub squeezed: u64,
    /// Inodes that the kernel was asked to forget because it knew too many.
    pub pruned: u64,
    /// Prefetch jobs started; entries that they brought (a directory counts one more than its names); entries used
    /// later; entries dropped unused.
    pub ahead_walks: u64,
    /// Walks of readers of files that began.
    pub file_walks: u64,
    pub ahead_fetched: u64,
    pub ahead_used: u64,
    pub ahead_wasted: u64,
    pub recalled: u64,
    /// Bytes of file contents that were read ahead; of these, bytes that were read; bytes dropped unread.
    pub contents_fetched: u64,
    pub contents_used: u64,
    pub contents_wasted: u64,
    /// Bytes of small files that were stored in the kernel's page cache when they were opened.
    pub contents_stored: u64,
    pub updated_in_place: u64,
    /// Number of invalidations of all dentries at once, without the kernel having been slow to drop one.
    pub epoch_planned: u64,
    /// How often all grants ended because the remote was away for longer than its term.
    pub lapses: u64,
}

/// Current state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Gauges {
    /// Known names that exist.
    pub entries: u64,
    /// Names known not to exist.
    pub negative: u64,
    pub complete_directories: u64,
    pub bytes: u64,
    /// Memory of file contents in bytes, and their files.
    pub contents_bytes: u64,
    pub contents_files: u64,
    pub grants_read: u64,
    /// Of these, grants with a deadline that has not passed.
    pub grants_limited: u64,
    pub pending_operations: u64,
    pub inodes: u64,
    pub open_files: u64,
}

impl Gauges {
    pub(crate) fn count_grant(&mut self, now: Time, held: Option<&LiveGrant>) {
        self.grants_read += u64::from(held.is_some());
        self.grants_limited +=
            u64::from(held.is_some_and(|held| held.deadline != Time::FAR && held.is_live(now)));
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;
    use crate::test_fixtures::{T0, cache};
    use nigh_types::Event;

    #[test]
    fn epoch_is_counted_once_when_all_grants_end() {
        let mut cache = cache(Config::default());
        cache.handle_event(T0, Event::Expired { why: String::new() });
        assert_eq!(cache.counters().epoch_planned, 1);
    }
}
