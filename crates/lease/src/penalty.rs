//! Penalties: a client or origin that delayed others receives no grants for a while (docs/decisions/0008, rule 6).
//!
//! A client that delays only clients of its own origin is penalised alone, so that one sleeping laptop does not affect
//! a user's other machines. The peer chooses its own client number, so a client that delays another origin brings a
//! penalty on its whole origin.

use super::LeaseTable;
use super::holder_state::HolderState;
use super::types::{ChangeId, Client, ClientOrigin, Holder, LeaseConfig};
use nigh_types::{Origin, RecallId, Span, Time};
use std::collections::BTreeMap;

/// The first penalty of a client is this many times as long as it delayed others.
const FIRST_PENALTY_FACTOR: u64 = 4;

/// Clients of one origin whose penalties are kept. Above it the penalty that ends first is dropped.
const CLIENTS_PER_ORIGIN: usize = 1_024;

/// Penalties of clients and origins, over sessions.
#[derive(Clone, Default, Debug)]
pub(super) struct Penalties {
    origins: BTreeMap<Origin, Penalty>,
    clients: BTreeMap<Origin, BTreeMap<Client, Penalty>>,
}

#[derive(Clone, Copy, Debug)]
struct Penalty {
    /// When the penalty was last imposed.
    imposed_at: Time,
    until: Time,
    span: Span,
}

impl Penalty {
    /// The penalty for a delay from `since` to `now`. A delay that began before the last penalty was imposed belongs to
    /// the earlier occasion, such as another mount of a machine that slept. Each further occasion doubles the penalty.
    fn after(before: Option<Penalty>, (now, since): (Time, Time), config: &LeaseConfig) -> Penalty {
        let least = now.since(since).0.saturating_mul(FIRST_PENALTY_FACTOR);
        let span = match before {
            Some(before) if since < before.imposed_at => before.span.0.max(least),
            Some(before) => before.span.0.saturating_mul(2).max(least),
            None => least,
        };
        let span = Span(span.min(config.max_penalty.0));
        Penalty { imposed_at: now, until: now.after(span), span }
    }

    /// Whether a further occasion would still double the penalty.
    fn is_remembered(&self, now: Time, config: &LeaseConfig) -> bool {
        now < self.until.after(config.max_penalty)
    }
}

impl Penalties {
    fn add(&mut self, (now, since): (Time, Time), party: ClientOrigin, whole: bool, config: &LeaseConfig) {
        self.origins.retain(|_, doubt| doubt.is_remembered(now, config));
        if whole {
            let before = self.origins.get(&party.origin).copied();
            self.origins.insert(party.origin, Penalty::after(before, (now, since), config));
            return;
        }
        self.clients.retain(|_, clients| {
            clients.retain(|_, doubt| doubt.is_remembered(now, config));
            !clients.is_empty()
        });
        let clients = self.clients.entry(party.origin).or_default();
        let before = clients.get(&party.client).copied();
        clients.insert(party.client, Penalty::after(before, (now, since), config));
        if clients.len() > CLIENTS_PER_ORIGIN
            && let Some(first) =
                clients.iter().min_by_key(|(_, doubt)| doubt.until).map(|(client, _)| *client)
        {
            clients.remove(&first);
        }
    }

    fn until(&self, party: ClientOrigin) -> Option<Time> {
        let of_client = self.clients.get(&party.origin).and_then(|clients| clients.get(&party.client));
        of_client.into_iter().chain(self.origins.get(&party.origin)).map(|doubt| doubt.until).max()
    }
}

impl LeaseTable {
    /// Sets the client and the origin of this holder's session. Called when the session begins: delays in earlier
    /// sessions count.
    pub fn handle_client(&mut self, now: Time, holder: Holder, party: ClientOrigin) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.client_origin = Some(party);
        }
    }

    /// Until when a holder receives no grants, if it has a penalty now.
    pub(super) fn penalised_until(&self, account: &HolderState) -> Option<Time> {
        self.penalties.until(account.client_origin?).filter(|until| self.now < *until)
    }

    /// Imposes a penalty on a holder that has owed acknowledgements since then, longer than `patience`.
    pub(super) fn penalise(&mut self, party: Option<ClientOrigin>, since: Time, delays_others: bool) {
        if let Some(party) = party {
            self.penalties.add((self.now, since), party, delays_others, &self.config);
        }
    }

    /// Notes whether a client of another origin waits for this holder. `late`: the holder has owed for longer than
    /// `patience`.
    pub(super) fn note_delays(&mut self, holder: Holder, late: bool) {
        let Some(account) = self.accounts.get(&holder) else { return };
        if account.delays_others || !(late || account.suspect.is_some()) {
            return;
        }
        let delays = account.owed.keys().any(|id| self.delays_others(account, *id));
        self.accounts.get_mut(&holder).expect("just seen").delays_others = delays;
    }

    /// Notes whether a client of another origin waits for one acknowledgement that a suspect owes.
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

    /// Whether a change of another origin waits for this acknowledgement, or is queued behind a change that does.
    fn delays_others(&self, account: &HolderState, id: RecallId) -> bool {
        let Some(ClientOrigin { origin, .. }) =
            account.client_origin.filter(|party| !party.origin.is_local_root())
        else {
            return false;
        };
        let is_other = |change: ChangeId| {
            let by = self.changes.get(&change).and_then(|change| change.by);
            let party = by.and_then(|by| self.accounts.get(&by)?.client_origin);
            party.is_some_and(|party| party.origin != origin)
        };
        self.waiting_changes(id).iter().any(|change| {
            let writes = self.changes.get(change).and_then(|change| change.part.writes);
            let mut behind =
                writes.and_then(|key| self.keys.get(&key)).into_iter().flat_map(|key| key.queued());
            is_other(*change) || behind.any(is_other)
        })
    }
}
