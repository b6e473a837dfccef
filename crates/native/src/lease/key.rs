//! What goes on at one key: who changes it, who was asked for it, and how often.

use super::timers::Armed;
use super::turns::Turn;
use super::words::{Holder, LeaseConfig, LeaseReason};
use nigh_types::{RecallId, Time};
use std::collections::{BTreeMap, VecDeque};

/// A key about which there is nothing to say has none.
#[derive(Clone, Default, Debug)]
pub(super) struct KeyState {
    /// Changes under way, by maker.
    makers: BTreeMap<Option<Holder>, u64>,
    pub(super) turn: Turn,
    /// Recalls whose acknowledgement is owed, at most one for each holder.
    pub(super) recalls: BTreeMap<Holder, RecallId>,
    /// Changes that had to recall it soon after it was granted, within the window; the latest last.
    recalled_at: VecDeque<Time>,
    /// The latest change, while it is contended.
    contended: Option<Time>,
    shared: Option<Shared>,
    pub(super) armed: Armed,
}

/// More than one holder was there, of whom one wants names alone.
#[derive(Clone, Debug)]
struct Shared {
    /// Since when there is at most one.
    lone_since: Option<Time>,
}

impl KeyState {
    pub(super) fn is_contended(&self) -> bool {
        self.contended.is_some()
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// While this holds nothing is granted.
    pub(super) fn is_changing(&self) -> bool {
        !self.makers.is_empty() || !self.recalls.is_empty()
    }

    /// While this holds no data is granted to `holder`. What it changes itself does not count: its own kernel
    /// keeps its pages in step with its own writes.
    pub(super) fn is_changing_for(&self, holder: Holder) -> bool {
        self.makers.keys().any(|maker| *maker != Some(holder)) || self.recalls.contains_key(&holder)
    }

    /// A change begins. `recalls`: somebody had to be asked who had not been asked, which counts.
    pub(super) fn begin_change(
        &mut self,
        now: Time,
        by: Option<Holder>,
        recalls: bool,
        config: &LeaseConfig,
    ) {
        *self.makers.entry(by).or_default() += 1;
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
        let count = self.makers.get_mut(&by).expect("it has begun");
        *count -= 1;
        if *count == 0 {
            self.makers.remove(&by);
        }
        if let Some(latest) = &mut self.contended {
            *latest = now;
        }
    }

    /// From now on grants say that they are shared.
    pub(super) fn share(&mut self) {
        self.shared.get_or_insert(Shared { lone_since: None });
    }

    pub(super) fn note_holders(&mut self, now: Time, alone: bool) {
        if let Some(shared) = &mut self.shared {
            shared.lone_since = if alone { shared.lone_since.or(Some(now)) } else { None };
        }
    }

    /// Lets end what has been quiet for long enough. True: there is nothing more to say.
    pub(super) fn calm(&mut self, now: Time, config: &LeaseConfig) -> bool {
        self.forget_recalls(now, config);
        self.contended = self.contended.filter(|at| !self.makers.is_empty() || now < at.after(config.quiet));
        if let Some(Shared { lone_since: Some(since) }) = self.shared
            && since.after(config.quiet) <= now
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
        let contended = self.contended.filter(|_| self.makers.is_empty()).map(|at| at.after(config.quiet));
        let shared = self.shared.as_ref().and_then(|shared| shared.lone_since);
        let shared = shared.map(|since| since.after(config.quiet));
        match [recalled, contended, shared].into_iter().flatten().min() {
            Some(moment) => (moment, LeaseReason::Quiet),
            None => (Time::FAR, LeaseReason::Idle),
        }
    }

    fn forget_recalls(&mut self, now: Time, config: &LeaseConfig) {
        while self.recalled_at.front().is_some_and(|at| at.after(config.contention_window) <= now) {
            self.recalled_at.pop_front();
        }
    }
}
