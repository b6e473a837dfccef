//! Prefetch budget: the cost of jobs, and the share that was used.

use super::Walk;
use crate::cache::Cache;
use nigh_types::{CallId, Span, Time};

/// Entries over a cache's life; a directory counts one more than its names.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Account {
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

impl Walk {
    /// Returns the additional credit that the server may have.
    pub(super) fn more(&mut self) -> u64 {
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
    pub(super) fn may_walk(&self, now: Time) -> bool {
        let walks = &self.walks;
        let idle = walks.going.values().filter(|walk| walk.ended || now >= walk.last_used.after(PATIENCE));
        let unused: u64 = idle.map(|walk| walk.unused).sum();
        let Account { demanded, used, wasted, .. } = walks.account;
        wasted + unused <= FREE_WASTE + (demanded + used) / USED_SHARE
    }

    /// Records the use of a directory: it is opened, or a name in it is looked up.
    pub(crate) fn use_ahead(&mut self, now: Time, dir: u64) {
        let Some(directory) = self.dirs.get_mut(&dir) else { return };
        if directory.passed.is_some_and(|passed| now >= passed.after(PASSING)) {
            // A caller came back.
            directory.passed = None;
        }
        let Some((call, cost)) = directory.ahead.take() else { return };
        directory.passed = Some(now);
        if !directory.complete && directory.listing.is_none() {
            // It was evicted meanwhile.
            return self.waste(call, cost);
        }
        self.walks.account.used += cost;
        self.counters.ahead_used += cost;
        let Some(walk) = self.walks.going.get_mut(&call) else { return };
        walk.unused = walk.unused.saturating_sub(cost);
        walk.last_used = now;
        let more = walk.more();
        if more > 0 {
            self.steer(call, more, None);
        }
    }

    /// Counts prefetched entries that are gone or were never kept as wasted.
    pub(crate) fn waste(&mut self, call: CallId, cost: u64) {
        self.walks.account.wasted += cost;
        self.counters.ahead_wasted += cost;
        if let Some(walk) = self.walks.going.get_mut(&call) {
            walk.unused = walk.unused.saturating_sub(cost);
        }
    }

    /// Forgets ended jobs without unused entries, and the earliest of the others, whose rest counts as wasted.
    pub(super) fn fold_walks(&mut self) {
        self.walks.going.retain(|_, walk| !walk.ended || walk.unused > 0);
        while self.walks.going.values().filter(|walk| walk.ended).count() > MOST_ENDED {
            let first =
                self.walks.going.iter().find(|(_, walk)| walk.ended).map(|(call, walk)| (*call, walk.unused));
            let Some((call, unused)) = first else { return };
            self.walks.account.wasted += unused;
            self.walks.going.remove(&call);
        }
    }
}
