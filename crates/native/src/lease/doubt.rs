//! Clients and origins that let others wait, which are granted nothing for a while (page 0008, rule 6).
//!
//! A client that delays only clients of its own origin is doubted by itself, so that one laptop that sleeps costs a
//! user's other machines nothing. A client number is the peer's own choice, so a client that delays another origin puts
//! its whole origin in doubt.

use super::LeaseTable;
use super::account::Account;
use super::words::{ChangeId, Client, Holder, LeaseConfig, Party};
use nigh_types::{Origin, RecallId, Span, Time};
use std::collections::BTreeMap;

/// The first time a client is doubted for so many times as long as it let others wait.
const FIRST: u64 = 4;

/// Clients of one origin of which doubts are kept. Above it the doubt goes that ends first.
const CLIENTS_PER_ORIGIN: usize = 1_024;

/// Doubts, over sessions.
#[derive(Clone, Default, Debug)]
pub(super) struct Doubts {
    origins: BTreeMap<Origin, Doubt>,
    clients: BTreeMap<Origin, BTreeMap<Client, Doubt>>,
}

#[derive(Clone, Copy, Debug)]
struct Doubt {
    /// When it was last put in doubt.
    noted: Time,
    until: Time,
    span: Span,
}

impl Doubt {
    /// It let others wait from `since` to `now`. A wait that began before the last one was over, such as that of another
    /// mount of a machine that slept, belongs to the same occasion. Each further occasion doubles the doubt.
    fn after(before: Option<Doubt>, (now, since): (Time, Time), config: &LeaseConfig) -> Doubt {
        let least = now.since(since).0.saturating_mul(FIRST);
        let span = match before {
            Some(before) if since < before.noted => before.span.0.max(least),
            Some(before) => before.span.0.saturating_mul(2).max(least),
            None => least,
        };
        let span = Span(span.min(config.most_doubt.0));
        Doubt { noted: now, until: now.after(span), span }
    }

    /// Whether a further occasion would still count as one.
    fn counts(&self, now: Time, config: &LeaseConfig) -> bool {
        now < self.until.after(config.most_doubt)
    }
}

impl Doubts {
    fn add(&mut self, (now, since): (Time, Time), party: Party, whole: bool, config: &LeaseConfig) {
        self.origins.retain(|_, doubt| doubt.counts(now, config));
        if whole {
            let before = self.origins.get(&party.origin).copied();
            self.origins.insert(party.origin, Doubt::after(before, (now, since), config));
            return;
        }
        self.clients.retain(|_, clients| {
            clients.retain(|_, doubt| doubt.counts(now, config));
            !clients.is_empty()
        });
        let clients = self.clients.entry(party.origin).or_default();
        let before = clients.get(&party.client).copied();
        clients.insert(party.client, Doubt::after(before, (now, since), config));
        if clients.len() > CLIENTS_PER_ORIGIN
            && let Some(first) =
                clients.iter().min_by_key(|(_, doubt)| doubt.until).map(|(client, _)| *client)
        {
            clients.remove(&first);
        }
    }

    fn until(&self, party: Party) -> Option<Time> {
        let of_client = self.clients.get(&party.origin).and_then(|clients| clients.get(&party.client));
        of_client.into_iter().chain(self.origins.get(&party.origin)).map(|doubt| doubt.until).max()
    }
}

impl LeaseTable {
    /// The client and the origin of this holder's session. Said when the session begins: what they did in sessions
    /// before counts.
    pub fn handle_client(&mut self, now: Time, holder: Holder, party: Party) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.party = Some(party);
        }
    }

    /// Until when a holder is granted nothing, if it is so now.
    pub(super) fn doubted_until(&self, account: &Account) -> Option<Time> {
        self.doubts.until(account.party?).filter(|until| self.now < *until)
    }

    /// It has owed since then, for longer than the patience of those who waited for it.
    pub(super) fn doubt(&mut self, party: Option<Party>, since: Time, delays_others: bool) {
        if let Some(party) = party {
            self.doubts.add((self.now, since), party, delays_others, &self.config);
        }
    }

    /// Notes whether a client of another origin waits for what this holder owes. `late`: it has owed for too long.
    pub(super) fn note_delays(&mut self, holder: Holder, late: bool) {
        let Some(account) = self.accounts.get(&holder) else { return };
        if account.delays_others || !(late || account.suspect.is_some()) {
            return;
        }
        let delays = account.owed.keys().any(|id| self.delays_others(account, *id));
        self.accounts.get_mut(&holder).expect("just seen").delays_others = delays;
    }

    /// The same for one acknowledgement that a suspect owes.
    pub(super) fn note_delay(&mut self, holder: Holder, id: RecallId) {
        let Some(account) = self.accounts.get(&holder) else { return };
        if account.suspect.is_some()
            && !account.delays_others
            && account.owed.contains_key(&id)
            && self.delays_others(account, id)
        {
            self.accounts.get_mut(&holder).expect("just seen").delays_others = true;
        }
    }

    /// Whether a change of another origin waits for this acknowledgement, or behind a change that does.
    fn delays_others(&self, account: &Account, id: RecallId) -> bool {
        let Some(Party { origin, .. }) = account.party.filter(|party| !party.origin.is_local_root()) else {
            return false;
        };
        let is_other = |change: ChangeId| {
            let by = self.changes.get(&change).and_then(|change| change.by);
            let party = by.and_then(|by| self.accounts.get(&by)?.party);
            party.is_some_and(|party| party.origin != origin)
        };
        self.awaits(id).iter().any(|change| {
            let writes = self.changes.get(change).and_then(|change| change.part.writes);
            let mut behind =
                writes.and_then(|key| self.keys.get(&key)).into_iter().flat_map(|key| key.queued());
            is_other(*change) || behind.any(is_other)
        })
    }
}
