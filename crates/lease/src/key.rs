//! State of one key: the changes in progress, the outstanding recalls, and how often it was recalled.

use super::timers::Armed;
use super::types::{Holder, LeaseConfig, LeaseReason};
use super::write_queue::WriteQueue;
use nigh_types::{RecallId, Time};
use std::collections::{BTreeMap, VecDeque};

/// State of one key, kept only while it differs from the default.
#[derive(Clone, Default, Debug)]
pub(super) struct KeyState {
    /// Changes in progress, by initiator.
    initiators: BTreeMap<Option<Holder>, u64>,
    pub(super) turn: WriteQueue,
    /// Recalls whose acknowledgement is owed, at most one per holder.
    pub(super) recalls: BTreeMap<Holder, RecallId>,
    /// Changes within the window that recalled the key soon after it was granted; the latest last.
    recalled_at: VecDeque<Time>,
    /// The latest change, while the key is contended.
    contended: Option<Time>,
    shared: Option<Shared>,
    pub(super) armed: Armed,
}

/// Several holders had the directory, one of which needs exclusive directory leases.
#[derive(Clone, Debug)]
struct Shared {
    /// Since when there is at most one holder.
    single_since: Option<Time>,
}

impl KeyState {
    pub(super) fn is_contended(&self) -> bool {
        self.contended.is_some()
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// While this is true, no grant is given.
    pub(super) fn is_changing(&self) -> bool {
        !self.initiators.is_empty() || !self.recalls.is_empty()
    }

    /// While this is true, `holder` is granted no data. Its own changes do not count: its kernel keeps its pages up to
    /// date with its own writes.
    pub(super) fn is_changing_for(&self, holder: Holder) -> bool {
        self.initiators.keys().any(|maker| *maker != Some(holder)) || self.recalls.contains_key(&holder)
    }

    /// Begins a change. `recalls`: it had to recall a young grant, which counts towards contention.
    pub(super) fn begin_change(
        &mut self,
        now: Time,
        by: Option<Holder>,
        recalls: bool,
        config: &LeaseConfig,
    ) {
        *self.initiators.entry(by).or_default() += 1;
        if let Some(latest) = &mut self.contended {
            *latest = now;
        } else if recalls {
            self.forget_recalls(now, config);
            self.recalled_at.push_back(now);
            if self.recalled_at.len() as u64 >= u64::from(config.contention_recalls) {
                self.contended = Some(now);
                self.recalled_at = VecDeque::new();
            }
        }
    }

    pub(super) fn end_change(&mut self, now: Time, by: Option<Holder>) {
        let count = self.initiators.get_mut(&by).expect("it has begun");
        *count -= 1;
        if *count == 0 {
            self.initiators.remove(&by);
        }
        if let Some(latest) = &mut self.contended {
            *latest = now;
        }
    }

    /// Marks later grants as shared.
    pub(super) fn share(&mut self) {
        self.shared.get_or_insert(Shared { single_since: None });
    }

    pub(super) fn note_holders(&mut self, now: Time, alone: bool) {
        if let Some(shared) = &mut self.shared {
            shared.single_since = if alone { shared.single_since.or(Some(now)) } else { None };
        }
    }

    /// Ends states that have been quiet for long enough. Returns true if the key has no state left to keep.
    pub(super) fn end_expired_states(&mut self, now: Time, config: &LeaseConfig) -> bool {
        self.forget_recalls(now, config);
        self.contended =
            self.contended.filter(|at| !self.initiators.is_empty() || now < at.after(config.cooldown));
        if let Some(Shared { single_since: Some(since) }) = self.shared
            && since.after(config.cooldown) <= now
        {
            self.shared = None;
        }
        !self.is_changing()
            && !self.is_contended()
            && !self.is_shared()
            && self.recalled_at.is_empty()
            && self.turn.is_free()
    }

    pub(super) fn due(&self, config: &LeaseConfig) -> (Time, LeaseReason) {
        let recalled = self.recalled_at.back().map(|at| at.after(config.contention_window));
        let contended =
            self.contended.filter(|_| self.initiators.is_empty()).map(|at| at.after(config.cooldown));
        let shared = self.shared.as_ref().and_then(|shared| shared.single_since);
        let shared = shared.map(|since| since.after(config.cooldown));
        match [recalled, contended, shared].into_iter().flatten().min() {
            Some(moment) => (moment, LeaseReason::Cooldown),
            None => (Time::FAR, LeaseReason::Idle),
        }
    }

    fn forget_recalls(&mut self, now: Time, config: &LeaseConfig) {
        while self.recalled_at.front().is_some_and(|at| at.after(config.contention_window) <= now) {
            self.recalled_at.pop_front();
        }
    }
}
