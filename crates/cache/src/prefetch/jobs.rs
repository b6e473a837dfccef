//! Records of prefetch jobs: what the server may still send, what came, and how much of it was used.

use super::FileWalks;
use nigh_types::{CallId, Span, Time};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most running jobs.
const MAX_JOBS: usize = 4;
/// Entries that may be prefetched in vain, beside a tenth of the useful ones.
const FREE_WASTE: u64 = 2_048;
const USED_SHARE: u64 = 10;
/// A walk that has not used a prefetched entry in this time has gone elsewhere.
const PATIENCE: Span = Span::from_millis(1_000);
/// Most directories that a job was asked to send first and has not sent: a server ends a session at 1,024.
const MOST_REQUESTED: usize = 512;
/// Most ended jobs with unused entries.
const MOST_ENDED: usize = 16;

/// Entries over a cache's life; a directory counts one more than its names.
#[derive(Clone, Copy, Debug, Default)]
struct PrefetchStats {
    /// Fetched on demand.
    demanded: u64,
    /// Prefetched, and used later.
    used: u64,
    /// Prefetched, and dropped before any use.
    wasted: u64,
}

/// Prefetch job that is running, or whose entries have not all been used.
#[derive(Clone, Debug, Default)]
struct PrefetchJob {
    ended: bool,
    /// Listings in progress: directory and call.
    listings: BTreeMap<u64, CallId>,
    /// Of these, the directories that the remote was asked to send first.
    requested: BTreeSet<u64>,
    /// Most entries that may be fetched and unused.
    window: u64,
    /// Entries that the server may still send.
    credit: i64,
    /// Entries that came and were not used.
    unused: u64,
    /// Time of the last use.
    last_used: Time,
}

impl PrefetchJob {
    /// Returns the additional credit that the server may have.
    fn additional_credit(&mut self) -> u64 {
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

/// Prefetch jobs of one mount.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefetchJobs {
    /// The remote supports them.
    is_possible: bool,
    jobs: BTreeMap<CallId, PrefetchJob>,
    /// Directories that a job will bring, with its call.
    expected: FxHashMap<u64, CallId>,
    /// Prefetched directories in order of arrival. A tree walk visits each once, so these are evicted first.
    arrived: VecDeque<u64>,
    stats: PrefetchStats,
    /// Walks of readers of files.
    pub files: FileWalks,
}

/// Jobs.
impl PrefetchJobs {
    pub fn is_possible(&self) -> bool {
        self.is_possible
    }

    pub fn set_possible(&mut self, is_possible: bool) {
        self.is_possible = is_possible;
    }

    /// Returns whether another job may start.
    pub fn may_start(&self, now: Time) -> bool {
        let idle = self.jobs.values().filter(|job| job.ended || now >= job.last_used.after(PATIENCE));
        let unused: u64 = idle.map(|job| job.unused).sum();
        let PrefetchStats { demanded, used, wasted } = self.stats;
        wasted + unused <= FREE_WASTE + (demanded + used) / USED_SHARE
    }

    /// Returns the jobs to be cancelled before another one starts: those used longest ago.
    pub fn beyond_limit(&self) -> Vec<CallId> {
        let running = self.jobs.iter().filter(|(_, job)| !job.ended);
        let mut by_use: Vec<(Time, CallId)> = running.map(|(call, job)| (job.last_used, *call)).collect();
        by_use.sort_unstable();
        let beyond = (by_use.len() + 1).saturating_sub(MAX_JOBS);
        by_use.into_iter().take(beyond).map(|(_, call)| call).collect()
    }

    /// Records a job that was sent.
    pub fn begin(&mut self, now: Time, call: CallId, window: u64, roots: impl Iterator<Item = u64>) {
        let credit = i64::from(u32::try_from(window).unwrap_or(u32::MAX));
        self.jobs.insert(call, PrefetchJob { window, credit, last_used: now, ..PrefetchJob::default() });
        self.expected.extend(roots.map(|dir| (dir, call)));
    }

    /// Ends a job: nothing more comes of it. Returns its listings in progress, and the directories that it was to bring.
    pub fn end(&mut self, call: CallId) -> (BTreeMap<u64, CallId>, Vec<u64>) {
        let mut unsent: Vec<u64> =
            self.expected.extract_if(|_, job| *job == call).map(|(dir, _)| dir).collect();
        unsent.sort_unstable();
        let Some(job) = self.jobs.get_mut(&call) else { return (BTreeMap::new(), unsent) };
        (job.ended, job.credit) = (true, 0);
        (std::mem::take(&mut job.listings), unsent)
    }

    /// Forgets ended jobs without unused entries, and the earliest of the others, whose rest counts as wasted.
    pub fn drop_ended(&mut self) {
        self.jobs.retain(|_, job| !job.ended || job.unused > 0);
        while self.jobs.values().filter(|job| job.ended).count() > MOST_ENDED {
            let first = self.jobs.iter().find(|(_, job)| job.ended).map(|(call, job)| (*call, job.unused));
            let Some((call, unused)) = first else { return };
            self.stats.wasted += unused;
            self.jobs.remove(&call);
        }
    }

    /// Forgets all jobs: the session is lost.
    pub fn forget(&mut self) {
        *self = PrefetchJobs { stats: self.stats, ..PrefetchJobs::default() };
    }

    pub fn running(&self) -> Vec<CallId> {
        self.jobs.iter().filter(|(_, job)| !job.ended).map(|(call, _)| *call).collect()
    }

    pub fn is_running(&self, call: CallId) -> bool {
        self.jobs.get(&call).is_some_and(|job| !job.ended)
    }
}

/// Directories of jobs.
impl PrefetchJobs {
    /// Returns the job that will bring a directory.
    pub fn expected_by(&self, dir: u64) -> Option<CallId> {
        self.expected.get(&dir).copied()
    }

    pub fn expect(&mut self, dir: u64, call: CallId) {
        self.expected.insert(dir, call);
    }

    pub fn no_longer_expect(&mut self, dir: u64) {
        self.expected.remove(&dir);
    }

    /// Returns the job that brings this listing.
    pub fn job_of(&self, dir: u64, listing: CallId) -> Option<CallId> {
        let brings = |job: &PrefetchJob| job.listings.get(&dir) == Some(&listing);
        self.jobs.iter().find(|(_, job)| brings(job)).map(|(call, _)| *call)
    }

    /// Returns the listing of a directory by a job (`Some(None)`: it has not begun). `None`: the job is not known.
    pub fn listing(&self, call: CallId, dir: u64) -> Option<Option<CallId>> {
        self.jobs.get(&call).map(|job| job.listings.get(&dir).copied())
    }

    pub fn add_listing(&mut self, call: CallId, dir: u64, listing: CallId) {
        if let Some(job) = self.jobs.get_mut(&call) {
            job.listings.insert(dir, listing);
        }
    }

    /// Removes the listing of a directory that the server did not list after all.
    pub fn remove_listing(&mut self, call: CallId, dir: u64) -> Option<CallId> {
        let job = self.jobs.get_mut(&call)?;
        job.requested.remove(&dir);
        job.listings.remove(&dir)
    }

    /// Returns the calls of a job's listings.
    pub fn listings(&self, call: CallId) -> Vec<CallId> {
        self.jobs.get(&call).into_iter().flat_map(|job| job.listings.values().copied()).collect()
    }

    /// Returns the listings of a job that the server was not asked to send first.
    pub fn unrequested_listings(&self, call: CallId) -> Vec<(u64, CallId)> {
        let Some(job) = self.jobs.get(&call) else { return Vec::new() };
        let unrequested = job.listings.iter().filter(|(dir, _)| !job.requested.contains(dir));
        unrequested.map(|(dir, listing)| (*dir, *listing)).collect()
    }
}

/// Credit.
impl PrefetchJobs {
    /// Widens the window of a job that has no credit left, up to `largest`. Returns whether it had none.
    pub fn widen_if_out_of_credit(&mut self, call: CallId, largest: u64) -> bool {
        let Some(job) = self.jobs.get_mut(&call).filter(|job| job.credit <= 0) else { return false };
        job.window = (job.window * 4).min(largest);
        true
    }

    /// Records that the server is asked to send a directory first. Returns the additional credit; `None`: it was asked
    /// before, the job is not known, or it has as many requests as it may have: a later reply makes room.
    pub fn request(&mut self, now: Time, call: CallId, dir: u64) -> Option<u64> {
        let job = self.jobs.get_mut(&call).filter(|job| job.requested.len() < MOST_REQUESTED)?;
        job.requested.insert(dir).then(|| {
            job.last_used = now;
            job.additional_credit()
        })
    }

    /// Counts entries of a directory that came; `last`: the directory is complete. Returns false if the job is not known.
    pub fn count_arrived(&mut self, call: CallId, dir: u64, cost: u64, last: bool) -> bool {
        let Some(job) = self.jobs.get_mut(&call) else { return false };
        // Wanted directories count too: the server may have begun one before it got the request. So the server has at
        // least the credit counted here, and a caller that waits while there is some waits for a reply that is under
        // way.
        job.credit = job.credit.saturating_sub_unsigned(cost);
        if last {
            job.listings.remove(&dir);
            job.requested.remove(&dir);
        }
        job.unused += cost;
        true
    }

    /// Counts entries that were fetched on demand.
    pub fn count_demanded(&mut self, cost: u64) {
        self.stats.demanded += cost;
    }

    /// Counts prefetched entries as used. Returns the additional credit of their job.
    pub fn count_used(&mut self, now: Time, call: CallId, cost: u64) -> u64 {
        self.stats.used += cost;
        let Some(job) = self.jobs.get_mut(&call) else { return 0 };
        job.unused = job.unused.saturating_sub(cost);
        job.last_used = now;
        job.additional_credit()
    }

    /// Counts prefetched entries that are gone or were never kept as wasted.
    pub fn count_wasted(&mut self, call: CallId, cost: u64) {
        self.stats.wasted += cost;
        if let Some(job) = self.jobs.get_mut(&call) {
            job.unused = job.unused.saturating_sub(cost);
        }
    }
}

/// Queue of prefetched directories.
impl PrefetchJobs {
    /// Adds a directory that came.
    pub fn push_arrived(&mut self, dir: u64) {
        self.arrived.push_back(dir);
    }

    pub fn pop_arrived(&mut self) -> Option<u64> {
        self.arrived.pop_front()
    }

    pub fn arrived(&self) -> usize {
        self.arrived.len()
    }

    /// Bounds the queue: drops duplicates and directories that are gone.
    pub fn tidy_arrived(&mut self, known: usize, is_known: impl Fn(u64) -> bool) {
        if self.arrived.len() > 1_024 + 2 * known {
            let mut noted = BTreeSet::new();
            self.arrived.retain(|dir| is_known(*dir) && noted.insert(*dir));
        }
    }
}
