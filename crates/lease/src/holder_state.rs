//! Lease state of one holder: its grants and the acknowledgements that it owes.

use super::timers::Armed;
use super::types::{ClientOrigin, LeaseConfig, LeaseKey, LeaseReason};
use nigh_types::{GrantId, RecallId, Span, Time};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
pub(super) struct HolderState {
    pub(super) needs_exclusive_dir_lease: bool,
    /// It takes updates in place of recalls.
    pub(super) takes_updates: bool,
    /// Its recalls carry names only of directories that it may list.
    pub(super) confined: bool,
    /// The latest message that renewed its lease.
    pub(super) last_renewed: Time,
    /// Since when it has owed an acknowledgement, while it is suspect.
    pub(super) suspect: Option<Time>,
    /// While it is suspect: a client of another origin waited for it.
    pub(super) delays_others: bool,
    pub(super) client_origin: Option<ClientOrigin>,
    /// Its connection is lost.
    pub(super) disconnected: bool,
    /// The longest life of its grants, as the holder counts.
    pub(super) limit: Span,
    /// That limit does not apply to watched objects.
    pub(super) trusts_watch: bool,
    /// Grants with an end time, recalled or not.
    limited: BTreeSet<(Time, GrantId)>,
    /// Grants that were not recalled, the least recently registered first.
    pub(super) grants: BTreeMap<GrantId, HeldGrant>,
    /// Recalled grants that it still has.
    pub(super) recalled: BTreeMap<GrantId, RecalledGrant>,
    /// Acknowledgements owed, and since when. The grants of some have ended in another way.
    pub(super) owed: BTreeMap<RecallId, Time>,
    /// No later than `due`: a message moves `due` without arming the timer anew.
    pub(super) armed: Armed,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct HeldGrant {
    pub(super) key: LeaseKey,
    /// When it expires.
    pub(super) until: Time,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RecalledGrant {
    pub(super) recall: RecallId,
    pub(super) until: Time,
}

impl HolderState {
    pub(super) fn new(now: Time, needs_exclusive_dir_lease: bool) -> HolderState {
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

    pub(super) fn grant_count(&self) -> u64 {
        (self.grants.len() + self.recalled.len()) as u64
    }

    /// Since when its oldest unacknowledged recall or prepare is owed.
    pub(super) fn owes_since(&self) -> Option<Time> {
        self.owed.first_key_value().map(|(_, since)| *since)
    }

    pub(super) fn has_lapsed(&self, now: Time, config: &LeaseConfig) -> bool {
        self.last_renewed.after(config.lapse()) <= now
    }

    pub(super) fn exceeds_patience(&self, now: Time, config: &LeaseConfig) -> bool {
        self.suspect.is_none() && self.owes_since().is_some_and(|since| since.after(config.patience) <= now)
    }

    /// Adds a grant.
    pub(super) fn begin(&mut self, id: GrantId, held: HeldGrant) {
        if held.until != Time::FAR {
            self.limited.insert((held.until, id));
        }
        self.grants.insert(id, held);
    }

    /// Forgets the end time of a grant that ended or was replaced.
    pub(super) fn end(&mut self, id: GrantId, until: Time) {
        self.limited.remove(&(until, id));
    }

    /// A grant past its end time.
    pub(super) fn first_expired(&self, now: Time) -> Option<GrantId> {
        self.limited.first().filter(|(until, _)| *until <= now).map(|(_, id)| *id)
    }

    pub(super) fn due(&self, config: &LeaseConfig) -> (Time, LeaseReason) {
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
