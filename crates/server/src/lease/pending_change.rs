//! The pending change of a call.

use crate::lease::leases::Leases;
use nigh_lease::ChangeId;
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

    /// The id of a change that the caller ends.
    pub(crate) fn into_id(mut self) -> ChangeId {
        self.is_over = true;
        self.id
    }
}

impl Drop for PendingChange {
    fn drop(&mut self) {
        if !self.is_over {
            self.leases.end(self.id);
        }
    }
}
