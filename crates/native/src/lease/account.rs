//! What one holder has, and what it owes.

use super::timers::Armed;
use super::words::{Client, LeaseConfig, LeaseKey, LeaseReason};
use nigh_types::{GrantId, RecallId, Span, Time};
use std::collections::BTreeMap;

pub(super) struct Account {
    pub(super) names_alone: bool,
    /// The latest hearing that counts.
    pub(super) heard: Time,
    /// Whoever is suspect has owed since then.
    pub(super) suspect: Option<Time>,
    pub(super) client: Option<Client>,
    /// Its connection is lost.
    pub(super) cut: bool,
    /// How long grants to it live at the most, as it counts.
    pub(super) limit: Span,
    /// What was not recalled, the least recently registered first.
    pub(super) grants: BTreeMap<GrantId, Held>,
    /// What it has although it was recalled.
    pub(super) recalled: BTreeMap<GrantId, Recalled>,
    /// Acknowledgements owed, and since when. Of some the grant has ended in another way.
    pub(super) owed: BTreeMap<RecallId, Time>,
    /// No later than `due`: a hearing moves that without a word to the timers.
    pub(super) armed: Armed,
}

#[derive(Clone, Copy)]
pub(super) struct Held {
    pub(super) key: LeaseKey,
    /// When it ends of itself.
    pub(super) until: Time,
}

#[derive(Clone, Copy)]
pub(super) struct Recalled {
    pub(super) recall: RecallId,
    pub(super) until: Time,
}

impl Account {
    pub(super) fn new(now: Time, names_alone: bool) -> Account {
        Account {
            names_alone,
            heard: now,
            suspect: None,
            client: None,
            cut: false,
            limit: Span::FOREVER,
            grants: BTreeMap::new(),
            recalled: BTreeMap::new(),
            owed: BTreeMap::new(),
            armed: Armed::default(),
        }
    }

    pub(super) fn held(&self) -> u64 {
        (self.grants.len() + self.recalled.len()) as u64
    }

    /// Since when the oldest acknowledgement is owed.
    pub(super) fn owes_since(&self) -> Option<Time> {
        self.owed.first_key_value().map(|(_, since)| *since)
    }

    pub(super) fn has_lapsed(&self, now: Time, config: &LeaseConfig) -> bool {
        self.heard.after(config.lapse()) <= now
    }

    pub(super) fn tries_patience(&self, now: Time, config: &LeaseConfig) -> bool {
        self.suspect.is_none() && self.owes_since().is_some_and(|since| since.after(config.patience) <= now)
    }

    /// A grant that has reached its end. Limits of one holder are all alike, so the first registered
    /// ends first.
    pub(super) fn outlived(&self, now: Time) -> Option<GrantId> {
        let held = self.grants.first_key_value().map(|(id, held)| (*id, held.until));
        let recalled = self.recalled.first_key_value().map(|(id, recalled)| (*id, recalled.until));
        held.into_iter().chain(recalled).find(|(_, until)| *until <= now).map(|(id, _)| id)
    }

    pub(super) fn due(&self, config: &LeaseConfig) -> (Time, LeaseReason) {
        let lapse = (self.heard.after(config.lapse()), LeaseReason::Lapse);
        let owes = self.owes_since().filter(|_| self.suspect.is_none());
        let patience = owes.map(|since| (since.after(config.patience), LeaseReason::Patience));
        let limits = [
            self.grants.first_key_value().map(|(_, held)| held.until),
            self.recalled.first_key_value().map(|(_, recalled)| recalled.until),
        ];
        let limits = limits.into_iter().flatten().map(|until| (until, LeaseReason::Limit));
        limits.chain(patience).fold(lapse, |first, other| if other.0 < first.0 { other } else { first })
    }
}
