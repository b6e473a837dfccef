//! What one session has of the lease table, and its changes under way.

use crate::leases::Leases;
use crate::told::Tell;
use nigh_native::lease::{
    Change, ChangeId, Granted, Holder, LeaseConfig, LeaseKey, MergeBase, Reading, WroteBack,
};
use nigh_types::{Covers, GrantId, NodeId, Span, Term};
use std::sync::Arc;

/// A change under way, until this is dropped.
pub(crate) struct OpenChange {
    leases: Arc<Leases>,
    pub(crate) id: ChangeId,
    is_over: bool,
}

impl OpenChange {
    /// Whether somebody holds back what it changes.
    pub(crate) fn is_awaited(&self) -> bool {
        self.leases.is_awaited(self.id)
    }

    /// It has had its effect.
    pub(crate) fn done(mut self, tells: &[Tell]) {
        self.is_over = true;
        self.leases.done(self.id, tells);
    }

    /// The same of a change of data, which its maker is granted.
    pub(crate) fn written(
        mut self,
        tells: &[Tell],
        seat: (Holder, LeaseKey),
        node: NodeId,
    ) -> Option<Granted> {
        self.is_over = true;
        self.leases.written(self.id, tells, seat, node)
    }

    /// [`LeaseTable::merge_base`](nigh_native::LeaseTable::merge_base).
    pub(crate) fn merge_base(&self, under: (GrantId, Covers), range: (u64, u64)) -> Option<MergeBase> {
        self.leases.merge_base(self.id, under, range)
    }

    /// Another client may yet have to merge its pages with what this writes back.
    pub(crate) fn overtakes(&self) -> bool {
        self.leases.overtakes(self.id)
    }

    /// Write-back was applied.
    pub(crate) fn wrote_back(&self, wrote: WroteBack<'_>) {
        self.leases.wrote_back(self.id, wrote);
    }

    /// Another change of data was applied to this range (offset, length).
    pub(crate) fn changed(&self, range: (u64, u64)) {
        self.leases.changed(self.id, range);
    }
}

impl Drop for OpenChange {
    fn drop(&mut self) {
        if !self.is_over {
            self.leases.end(self.id);
        }
    }
}

/// One session's part in the table.
#[derive(Clone)]
pub(crate) struct Holding {
    pub(crate) leases: Arc<Leases>,
    pub(crate) holder: Holder,
}

impl Holding {
    /// Of a table of its own.
    pub(crate) fn alone(term: Term) -> Holding {
        let leases = Leases::new(LeaseConfig { term: Span(u64::MAX / 2), ..LeaseConfig::default() }, None);
        let holder = Holder(1);
        leases.attach_alone(holder, term);
        Holding { leases, holder }
    }

    /// Begins a change, or adds to one. True: it may be made now.
    pub(crate) fn change(&self, open: &mut Option<OpenChange>, changes: &[Change], flush: bool) -> bool {
        let begun = open.as_ref().map(|change| change.id);
        let (id, ready) = self.leases.change(self.holder, begun, changes, flush);
        open.get_or_insert_with(|| self.opened(id));
        ready
    }

    /// A grant for a call that reads data; `Err`: it waits until `open` is ready, and then asks again.
    pub(crate) fn read(
        &self,
        open: &mut Option<OpenChange>,
        key: LeaseKey,
        node: NodeId,
    ) -> Result<Option<Granted>, ()> {
        if let Some(waited) = open.take() {
            return Ok(self.leases.claim(waited.id));
        }
        match self.leases.read((self.holder, key), node) {
            Reading::Granted(granted) => Ok(Some(granted)),
            Reading::Refused => Ok(None),
            Reading::Waits(id) => {
                *open = Some(self.opened(id));
                Err(())
            }
        }
    }

    /// Waits until what was asked of others is given back. True: it is.
    pub(crate) fn settle(&self, open: &mut Option<OpenChange>, key: LeaseKey) -> bool {
        let id = match open {
            Some(open) => open.id,
            None => self.leases.settle(self.holder, key),
        };
        open.get_or_insert_with(|| self.opened(id));
        self.leases.is_ready(id)
    }

    fn opened(&self, id: ChangeId) -> OpenChange {
        OpenChange { leases: Arc::clone(&self.leases), id, is_over: false }
    }
}

impl std::fmt::Debug for Holding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.holder.fmt(f)
    }
}
