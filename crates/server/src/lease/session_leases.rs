//! One session's access to the lease table, and its pending changes.

use crate::lease::change_result::ChangeProbe;
use crate::lease::leases::Leases;
use nigh_lease::{Change, ChangeId, Granted, Holder, LeaseConfig, LeaseKey, MergeBase, ReadGrant, WroteBack};
use nigh_types::{GrantId, LeaseScope, NodeId, Span, Term};
use std::sync::Arc;

/// A pending change in the lease table. Dropping it ends the change.
pub(crate) struct PendingChange {
    leases: Arc<Leases>,
    pub(crate) id: ChangeId,
    is_over: bool,
}

impl PendingChange {
    /// Whether another holder has suspended the facts that this change affects.
    pub(crate) fn has_suspended_holders(&self) -> bool {
        self.leases.has_suspended_holders(self.id)
    }

    /// Ends the change after its effect.
    pub(crate) fn done(mut self, tells: &[ChangeProbe]) {
        self.is_over = true;
        self.leases.done(self.id, tells);
    }

    /// Ends a change of data after its effect and grants the written data to the writer.
    pub(crate) fn written(
        mut self,
        tells: &[ChangeProbe],
        seat: (Holder, LeaseKey),
        node: NodeId,
    ) -> Option<Granted> {
        self.is_over = true;
        self.leases.written(self.id, tells, seat, node)
    }

    /// [`LeaseTable::merge_base`](nigh_lease::LeaseTable::merge_base).
    pub(crate) fn merge_base(&self, under: (GrantId, LeaseScope), range: (u64, u64)) -> Option<MergeBase> {
        self.leases.merge_base(self.id, under, range)
    }

    /// Whether another client may still have to merge its pages with the data written back by this change.
    pub(crate) fn may_need_merge(&self) -> bool {
        self.leases.may_need_merge(self.id)
    }

    /// Records applied write-back.
    pub(crate) fn wrote_back(&self, wrote: WroteBack<'_>) {
        self.leases.wrote_back(self.id, wrote);
    }

    /// Records another change of data in this range (offset, length).
    pub(crate) fn changed(&self, range: (u64, u64)) {
        self.leases.changed(self.id, range);
    }
}

impl Drop for PendingChange {
    fn drop(&mut self) {
        if !self.is_over {
            self.leases.end(self.id);
        }
    }
}

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
        open.get_or_insert_with(|| self.opened(id));
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
                *open = Some(self.opened(id));
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
        open.get_or_insert_with(|| self.opened(id));
        self.table.is_ready(id)
    }

    fn opened(&self, id: ChangeId) -> PendingChange {
        PendingChange { leases: Arc::clone(&self.table), id, is_over: false }
    }
}

impl std::fmt::Debug for SessionLeases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.holder.fmt(f)
    }
}
