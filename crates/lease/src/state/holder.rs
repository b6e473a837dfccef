//! Lease state of one holder: its grants and the acknowledgements that it owes.

use super::timers::Armed;
use crate::types::{ClientOrigin, LeaseConfig, LeaseKey, LeaseReason};
use nigh_types::{GrantId, RecallId, Span, Time};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
pub(crate) struct HolderState {
    pub(crate) needs_exclusive_dir_lease: bool,
    /// It takes updates in place of recalls.
    pub(crate) takes_updates: bool,
    /// Its recalls carry names only of directories that it may list.
    pub(crate) confined: bool,
    /// The latest message that renewed its lease.
    pub(crate) last_renewed: Time,
    /// Since when it has owed an acknowledgement, while it is suspect.
    pub(crate) suspect: Option<Time>,
    /// While it is suspect: a client of another origin waited for it.
    pub(crate) delays_others: bool,
    pub(crate) client_origin: Option<ClientOrigin>,
    /// Its connection is lost.
    pub(crate) disconnected: bool,
    /// The longest life of its grants, as the holder counts.
    pub(crate) limit: Span,
    /// That limit does not apply to watched objects.
    pub(crate) trusts_watch: bool,
    /// Grants with an end time, recalled or not.
    limited: BTreeSet<(Time, GrantId)>,
    /// Grants that were not recalled, the least recently registered first.
    pub(crate) grants: BTreeMap<GrantId, HeldGrant>,
    /// Recalled grants that it still has.
    pub(crate) recalled: BTreeMap<GrantId, RecalledGrant>,
    /// Acknowledgements owed, and since when. The grants of some have ended in another way.
    pub(crate) owed: BTreeMap<RecallId, Time>,
    /// No later than `due`: a message moves `due` without arming the timer anew.
    pub(crate) armed: Armed,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldGrant {
    pub(crate) key: LeaseKey,
    /// When it expires.
    pub(crate) until: Time,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RecalledGrant {
    pub(crate) recall: RecallId,
    pub(crate) until: Time,
}

impl HolderState {
    pub(crate) fn new(now: Time, needs_exclusive_dir_lease: bool) -> HolderState {
        HolderState {
            needs_exclusive_dir_lease,
            takes_updates: false,
            confined: false,
            last_renewed: now,
            suspect: None,
            delays_others: false,
            client_origin: None,
            disconnected: false,
            limit: Span::FOREVER,
            trusts_watch: false,
            limited: BTreeSet::new(),
            grants: BTreeMap::new(),
            recalled: BTreeMap::new(),
            owed: BTreeMap::new(),
            armed: Armed::default(),
        }
    }

    pub(crate) fn grant_count(&self) -> u64 {
        (self.grants.len() + self.recalled.len()) as u64
    }

    /// Since when its oldest unacknowledged recall or prepare is owed.
    pub(crate) fn owes_since(&self) -> Option<Time> {
        self.owed.first_key_value().map(|(_, since)| *since)
    }

    pub(crate) fn has_lapsed(&self, now: Time, config: &LeaseConfig) -> bool {
        self.last_renewed.after(config.lapse()) <= now
    }

    pub(crate) fn exceeds_patience(&self, now: Time, config: &LeaseConfig) -> bool {
        self.suspect.is_none() && self.owes_since().is_some_and(|since| since.after(config.patience) <= now)
    }

    /// Adds a grant.
    pub(crate) fn begin(&mut self, id: GrantId, held: HeldGrant) {
        if held.until != Time::FAR {
            self.limited.insert((held.until, id));
        }
        self.grants.insert(id, held);
    }

    /// Forgets the end time of a grant that ended or was replaced.
    pub(crate) fn end(&mut self, id: GrantId, until: Time) {
        self.limited.remove(&(until, id));
    }

    /// A grant past its end time.
    pub(crate) fn first_expired(&self, now: Time) -> Option<GrantId> {
        self.limited.first().filter(|(until, _)| *until <= now).map(|(_, id)| *id)
    }

    pub(crate) fn due(&self, config: &LeaseConfig) -> (Time, LeaseReason) {
        let lapse = (self.last_renewed.after(config.lapse()), LeaseReason::Lapse);
        let owes = self.owes_since().filter(|_| self.suspect.is_none());
        let patience = owes.map(|since| (since.after(config.patience), LeaseReason::Patience));
        let limit = self.limited.first().map(|(until, _)| (*until, LeaseReason::Limit));
        limit
            .into_iter()
            .chain(patience)
            .fold(lapse, |first, other| if other.0 < first.0 { other } else { first })
    }
}
