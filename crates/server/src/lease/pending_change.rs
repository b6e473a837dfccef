//! Pending changes of the lease table.

use crate::lease::change_result::ChangeProbe;
use crate::lease::leases::Leases;
use nigh_lease::{ChangeId, Granted, Holder, LeaseKey, MergeBase, WroteBack};
use nigh_types::{GrantId, LeaseScope, NodeId};
use std::sync::Arc;

/// A pending change in the lease table. Dropping it ends the change.
pub(crate) struct PendingChange {
    leases: Arc<Leases>,
    pub(crate) id: ChangeId,
    is_over: bool,
}

impl PendingChange {
    pub(crate) fn new(leases: &Arc<Leases>, id: ChangeId) -> PendingChange {
        PendingChange { leases: Arc::clone(leases), id, is_over: false }
    }

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
