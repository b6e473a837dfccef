//! Penalties of clients and origins for delaying others.

use crate::types::{Client, ClientOrigin, LeaseConfig};
use nigh_types::{Origin, Span, Time};
use std::collections::BTreeMap;

/// The first penalty of a client is this many times as long as it delayed others.
const FIRST_PENALTY_FACTOR: u64 = 4;

/// Clients of one origin whose penalties are kept. Above it the penalty that ends first is dropped.
const CLIENTS_PER_ORIGIN: usize = 1_024;

/// Penalties of clients and origins, over sessions.
#[derive(Clone, Default, Debug)]
pub(crate) struct Penalties {
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
    pub(crate) fn add(
        &mut self,
        (now, since): (Time, Time),
        party: ClientOrigin,
        whole: bool,
        config: &LeaseConfig,
    ) {
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

    pub(crate) fn until(&self, party: ClientOrigin) -> Option<Time> {
        let of_client = self.clients.get(&party.origin).and_then(|clients| clients.get(&party.client));
        of_client.into_iter().chain(self.origins.get(&party.origin)).map(|doubt| doubt.until).max()
    }
}
