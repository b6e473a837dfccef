//! One session's access to the lease table.

use crate::lease::leases::Leases;
use crate::lease::pending_change::PendingChange;
use nigh_lease::{Change, Granted, Holder, LeaseConfig, LeaseKey, ReadGrant};
use nigh_types::{NodeId, Span, Term};
use std::sync::Arc;

/// One session's leases in the lease table.
#[derive(Clone)]
pub(crate) struct SessionLeases {
    pub(crate) table: Arc<Leases>,
    pub(crate) holder: Holder,
}

impl SessionLeases {
    /// A session with its own lease table.
    pub(crate) fn unshared(term: Term) -> SessionLeases {
        let table = Leases::new(LeaseConfig { term: Span(u64::MAX / 2), ..LeaseConfig::default() }, None);
        let holder = Holder(1);
        table.attach_unconnected(holder, term);
        SessionLeases { table, holder }
    }

    /// Begins a change, or extends `open`. Returns true if the change may be applied now.
    pub(crate) fn change(&self, open: &mut Option<PendingChange>, changes: &[Change], flush: bool) -> bool {
        let begun = open.as_ref().map(|change| change.id);
        let (id, ready) = self.table.change(self.holder, begun, changes, flush);
        open.get_or_insert_with(|| PendingChange::new(&self.table, id));
        ready
    }

    /// Registers a data grant for a read. `Err`: the read waits until `open` is ready, and then calls this again.
    pub(crate) fn read(
        &self,
        open: &mut Option<PendingChange>,
        key: LeaseKey,
        node: NodeId,
    ) -> Result<Option<Granted>, ()> {
        if let Some(waited) = open.take() {
            return Ok(self.table.take_grant(waited.id));
        }
        match self.table.read((self.holder, key), node) {
            ReadGrant::Granted(granted) => Ok(Some(granted)),
            ReadGrant::Refused => Ok(None),
            ReadGrant::Waits(id) => {
                *open = Some(PendingChange::new(&self.table, id));
                Err(())
            }
        }
    }

    /// Waits until other holders have returned the recalled leases. Returns true if they have.
    pub(crate) fn wait_for_acknowledgements(&self, open: &mut Option<PendingChange>, key: LeaseKey) -> bool {
        let id = match open {
            Some(open) => open.id,
            None => self.table.wait_for_acknowledgements(self.holder, key),
        };
        open.get_or_insert_with(|| PendingChange::new(&self.table, id));
        self.table.is_ready(id)
    }
}

impl std::fmt::Debug for SessionLeases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.holder.fmt(f)
    }
}
