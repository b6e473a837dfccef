//! Clients that let others wait, which are granted nothing for a while (page 0008, rule 6).

use super::LeaseTable;
use super::account::Account;
use super::words::{Client, Holder, LeaseConfig};
use nigh_types::{Span, Time};
use std::collections::BTreeMap;

/// The first time a client is doubted for so many times as long as it let others wait.
const FIRST: u64 = 4;

/// Those who let others wait, over their sessions.
#[derive(Clone, Default, Debug)]
pub(super) struct Doubts(BTreeMap<Client, Doubt>);

#[derive(Clone, Copy, Debug)]
struct Doubt {
    until: Time,
    span: Span,
}

impl Doubts {
    /// It let others wait for so long: each time that this comes again soon it is doubted for twice as long.
    fn add(&mut self, now: Time, client: Client, waited: Span, config: &LeaseConfig) {
        self.0.retain(|_, doubt| now < doubt.until.after(config.most_doubt));
        let before = self.0.get(&client).map_or(0, |doubt| doubt.span.0);
        let span = before.saturating_mul(2).max(waited.0.saturating_mul(FIRST)).min(config.most_doubt.0);
        self.0.insert(client, Doubt { until: now.after(Span(span)), span: Span(span) });
    }
}

impl LeaseTable {
    /// Whose session this holder is. Said when the session begins: what it did in sessions before counts.
    pub fn handle_client(&mut self, now: Time, holder: Holder, client: Client) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.client = Some(client);
        }
    }

    /// Until when a holder is granted nothing, if it is so now.
    pub(super) fn doubted_until(&self, account: &Account) -> Option<Time> {
        let doubt = self.doubts.0.get(&account.client?)?;
        (self.now < doubt.until).then_some(doubt.until)
    }

    /// It has owed since then, for longer than the patience of those who waited for it.
    pub(super) fn doubt(&mut self, client: Option<Client>, since: Time) {
        if let Some(client) = client {
            self.doubts.add(self.now, client, self.now.since(since), &self.config);
        }
    }
}
