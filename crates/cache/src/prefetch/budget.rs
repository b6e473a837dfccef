//! Prefetch budget: the cost of jobs, and the share that was used.

use super::PrefetchJob;
use crate::cache::Cache;
use nigh_types::{CallId, Span, Time};

/// Entries over a cache's life; a directory counts one more than its names.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PrefetchStats {
    /// Fetched on demand.
    pub demanded: u64,
    /// Prefetched, and used later.
    pub used: u64,
    /// Prefetched, and dropped before any use.
    pub wasted: u64,
}

/// Entries that may be prefetched in vain, beside a tenth of the useful ones.
const FREE_WASTE: u64 = 2_048;
const USED_SHARE: u64 = 10;
/// A walk that has not used a prefetched entry in this time has gone elsewhere.
const PATIENCE: Span = Span::from_millis(1_000);
/// A walk stays at a directory that it opened for this time.
const PASSING: Span = Span::from_millis(2_000);
/// Most ended jobs with unused entries.
const MOST_ENDED: usize = 16;

impl PrefetchJob {
    /// Returns the additional credit that the server may have.
    pub(super) fn additional_credit(&mut self) -> u64 {
        if self.ended {
            return 0;
        }
        let outstanding = self.unused.saturating_add_signed(self.credit.max(0));
        let more = self.window.saturating_sub(outstanding);
        if more < self.window / 2 {
            return 0;
        }
        self.credit = self.credit.saturating_add_unsigned(more);
        more
    }
}

impl Cache {
    /// Returns whether another job may start.
    pub(super) fn may_start_job(&self, now: Time) -> bool {
        let walks = &self.walks;
        let idle = walks.jobs.values().filter(|walk| walk.ended || now >= walk.last_used.after(PATIENCE));
        let unused: u64 = idle.map(|walk| walk.unused).sum();
        let PrefetchStats { demanded, used, wasted, .. } = walks.stats;
        wasted + unused <= FREE_WASTE + (demanded + used) / USED_SHARE
    }

    /// Records the use of a directory: it is opened, or a name in it is looked up.
    pub(crate) fn use_prefetched(&mut self, now: Time, dir: u64) {
        let Some(directory) = self.dirs.get_mut(&dir) else { return };
        if directory.first_used_at.is_some_and(|passed| now >= passed.after(PASSING)) {
            // A caller came back.
            directory.first_used_at = None;
        }
        let Some((call, cost)) = directory.prefetched_by.take() else { return };
        directory.first_used_at = Some(now);
        if !directory.complete && directory.listing.is_none() {
            // It was evicted meanwhile.
            return self.count_wasted(call, cost);
        }
        self.walks.stats.used += cost;
        self.counters.ahead_used += cost;
        let Some(walk) = self.walks.jobs.get_mut(&call) else { return };
        walk.unused = walk.unused.saturating_sub(cost);
        walk.last_used = now;
        let more = walk.additional_credit();
        if more > 0 {
            self.send_credit(call, more, None);
        }
    }

    /// Counts prefetched entries that are gone or were never kept as wasted.
    pub(crate) fn count_wasted(&mut self, call: CallId, cost: u64) {
        self.walks.stats.wasted += cost;
        self.counters.ahead_wasted += cost;
        if let Some(walk) = self.walks.jobs.get_mut(&call) {
            walk.unused = walk.unused.saturating_sub(cost);
        }
    }

    /// Forgets ended jobs without unused entries, and the earliest of the others, whose rest counts as wasted.
    pub(super) fn drop_ended_jobs(&mut self) {
        self.walks.jobs.retain(|_, walk| !walk.ended || walk.unused > 0);
        while self.walks.jobs.values().filter(|walk| walk.ended).count() > MOST_ENDED {
            let first =
                self.walks.jobs.iter().find(|(_, walk)| walk.ended).map(|(call, walk)| (*call, walk.unused));
            let Some((call, unused)) = first else { return };
            self.walks.stats.wasted += unused;
            self.walks.jobs.remove(&call);
        }
    }
}
