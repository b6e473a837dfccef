//! What one call asks of the lease table while it is executed.

use crate::files::SessionFiles;
use crate::leases::{Holding, OpenChange};
use nigh_native::lease::{Change, LeaseKey, Object};
use nigh_types::{Covers, Grant, GrantId, Mode, NodeId, Span, Term};
use rustc_hash::FxHashSet;
use std::cell::{Cell, RefCell};

/// Grants that were registered for one call, and the change that it is.
pub(crate) struct Stake<'a> {
    holding: &'a Holding,
    term: Term,
    registered: RefCell<Vec<GrantId>>,
    change: RefCell<Option<OpenChange>>,
    makes_folder: Cell<bool>,
}

impl<'a> Stake<'a> {
    /// `change`: one that this call began when it was executed before.
    pub(crate) fn new(files: &'a SessionFiles, change: Option<OpenChange>) -> Stake<'a> {
        Stake {
            holding: files.holding(),
            term: files.term(),
            registered: RefCell::default(),
            change: RefCell::new(change),
            makes_folder: Cell::new(false),
        }
    }

    /// Registers a grant. What it covers is read *afterwards*. `None`: answer without it.
    pub(crate) fn ask(&self, node: NodeId, object: Object, covers: Covers) -> Option<Grant> {
        if self.term == Term::Limited(Span::ZERO) {
            return None;
        }
        let granted = self.holding.leases.grant(self.holding.holder, LeaseKey { object, covers }, node)?;
        self.registered.borrow_mut().push(granted.id);
        Some(Grant {
            id: granted.id,
            node,
            covers,
            mode: Mode::Read,
            term: self.term,
            recallable: true,
            shared: granted.shared,
        })
    }

    /// Says what the call makes false. True: nobody else holds any of it, nor will until it is done.
    pub(crate) fn begin(&self, changes: &[Change]) -> bool {
        let mut open = self.change.borrow_mut();
        (changes.is_empty() && open.is_none()) || self.holding.change(&mut open, changes)
    }

    /// The call may make the server's own folder: its change says what that makes false.
    pub(crate) fn make_folder(&self) {
        self.makes_folder.set(true);
    }

    /// Whether that was said.
    pub(crate) fn makes_folder(&self) -> bool {
        self.makes_folder.get()
    }

    /// All effects of the call are there: what it changed may be granted again, to its own session too.
    pub(crate) fn done(&self) {
        let change = self.change.take();
        drop(change);
    }

    /// An answer is about to carry these. What no answer carries in the end is withdrawn.
    pub(crate) fn carry(&self, grants: &[Grant]) {
        let mut registered = self.registered.borrow_mut();
        if registered.len() == grants.len() {
            registered.clear();
        } else if !grants.is_empty() {
            let carried: FxHashSet<GrantId> = grants.iter().map(|grant| grant.id).collect();
            registered.retain(|id| !carried.contains(id));
        }
    }

    /// The call is parked: its change goes on.
    pub(crate) fn take_change(&self) -> Option<OpenChange> {
        self.change.take()
    }
}

impl Drop for Stake<'_> {
    fn drop(&mut self) {
        self.holding.leases.withdraw(self.holding.holder, self.registered.get_mut());
    }
}
