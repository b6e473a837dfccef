//! Leases of discarded sessions. They last until they expire, because their clients may still trust them.

use crate::LeaseTable;
use crate::types::Holder;
use nigh_types::Time;
use std::collections::BTreeMap;

/// Holders whose sessions were discarded before their leases expired, each with its client.
#[derive(Clone, Debug)]
pub struct DiscardedLeases<C> {
    clients: BTreeMap<Holder, C>,
}

impl<C> Default for DiscardedLeases<C> {
    fn default() -> DiscardedLeases<C> {
        DiscardedLeases { clients: BTreeMap::new() }
    }
}

impl<C> DiscardedLeases<C> {
    /// Ends a session. `goodbye`: its client has dropped its grants; otherwise they stay until the lease expires.
    pub fn end_session(
        &mut self,
        (table, now): (&mut LeaseTable, Time),
        (holder, client): (Holder, C),
        goodbye: bool,
    ) {
        if goodbye {
            table.handle_goodbye(now, holder);
        } else if table.is_known(holder) {
            table.handle_disconnect(now, holder);
            self.clients.insert(holder, client);
        }
    }

    /// Ends the leases of a client that has dropped all its grants.
    pub fn handle_dropped(&mut self, (table, now): (&mut LeaseTable, Time), is_client: impl Fn(&C) -> bool) {
        let theirs = self.clients.iter().filter(|(_, client)| is_client(client));
        for holder in theirs.map(|(holder, _)| *holder).collect::<Vec<Holder>>() {
            self.clients.remove(&holder);
            table.handle_goodbye(now, holder);
        }
    }

    /// Removes a holder whose lease has expired. Returns whether it was here.
    pub fn handle_fenced(&mut self, holder: Holder) -> bool {
        self.clients.remove(&holder).is_some()
    }

    /// The holders and their clients.
    pub fn iter(&self) -> impl Iterator<Item = (Holder, &C)> {
        self.clients.iter().map(|(holder, client)| (*holder, client))
    }
}
