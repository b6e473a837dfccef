//! State of one key: the changes in progress, the outstanding recalls, and how often it was recalled.

use super::timers::Armed;
use crate::types::{ChangeId, Holder, LeaseConfig, LeaseReason};
use nigh_types::{RecallId, Time};
use std::collections::{BTreeMap, VecDeque};

/// Write queue of a key: the present writer and the waiting changes.
#[derive(Clone, Default, Debug)]
pub(crate) struct WriteQueue {
    /// The writing session (`None`: the server's own disk), and the number of its changes.
    pub(crate) writer: Option<(Option<Holder>, u64)>,
    /// Changes, and reads that wait for a grant.
    pub(crate) queue: VecDeque<ChangeId>,
    /// Reads that wait for write-back outside the queue.
    pub(crate) write_back_waiters: Vec<ChangeId>,
    /// The present writer waits for a suspect holder: no read waits.
    pub(crate) blocked_by_suspect: bool,
    /// The server's own disk may have changed the data since the present writer began, possibly after its effect.
    pub(crate) host_changed: bool,
}

impl WriteQueue {
    pub(crate) fn is_free(&self) -> bool {
        self.writer.is_none() && self.queue.is_empty() && self.write_back_waiters.is_empty()
    }

    /// Whether a reader has to wait in the queue.
    pub(crate) fn must_wait(&self, reader: Holder) -> bool {
        self.writer.is_some_and(|(writer, _)| writer != Some(reader) || !self.queue.is_empty())
    }
}

/// State of one key, kept only while it differs from the default.
#[derive(Clone, Default, Debug)]
pub(crate) struct KeyState {
    /// Changes in progress, by initiator.
    initiators: BTreeMap<Option<Holder>, u64>,
    pub(crate) turn: WriteQueue,
    /// Recalls whose acknowledgement is owed, at most one per holder.
    pub(crate) recalls: BTreeMap<Holder, RecallId>,
    /// Changes within the window that recalled the key soon after it was granted; the latest last.
    recalled_at: VecDeque<Time>,
    /// The latest change, while the key is contended.
    contended: Option<Time>,
    shared: Option<Shared>,
    pub(crate) armed: Armed,
}

/// Several holders had the directory, one of which needs exclusive directory leases.
#[derive(Clone, Debug)]
struct Shared {
    /// Since when there is at most one holder.
    single_since: Option<Time>,
}

impl KeyState {
    /// Changes and reads that wait in this key's queue.
    pub(crate) fn queued(&self) -> impl Iterator<Item = ChangeId> + '_ {
        self.turn.queue.iter().copied()
    }

    pub(crate) fn is_contended(&self) -> bool {
        self.contended.is_some()
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// While this is true, no grant is given.
    pub(crate) fn is_changing(&self) -> bool {
        !self.initiators.is_empty() || !self.recalls.is_empty()
    }

    /// While this is true, `holder` is granted no data. Its own changes do not count: its kernel keeps its pages up to
    /// date with its own writes.
    pub(crate) fn is_changing_for(&self, holder: Holder) -> bool {
        self.initiators.keys().any(|maker| *maker != Some(holder)) || self.recalls.contains_key(&holder)
    }

    /// Begins a change. `recalls`: it had to recall a young grant, which counts towards contention.
    pub(crate) fn begin_change(
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

    pub(crate) fn end_change(&mut self, now: Time, by: Option<Holder>) {
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
    pub(crate) fn share(&mut self) {
        self.shared.get_or_insert(Shared { single_since: None });
    }

    pub(crate) fn note_holders(&mut self, now: Time, alone: bool) {
        if let Some(shared) = &mut self.shared {
            shared.single_since = if alone { shared.single_since.or(Some(now)) } else { None };
        }
    }

    /// Ends states that have been quiet for long enough. Returns true if the key has no state left to keep.
    pub(crate) fn end_expired_states(&mut self, now: Time, config: &LeaseConfig) -> bool {
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

    pub(crate) fn due(&self, config: &LeaseConfig) -> (Time, LeaseReason) {
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
