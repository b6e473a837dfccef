//! What one call asks of the lease table while it is executed.

use crate::files::SessionFiles;
use crate::holding::{Holding, OpenChange};
use crate::told::Tell;
use nigh_native::lease::{Change, Granted, LeaseKey, MergeBase, Object, WroteBack};
use nigh_types::{Covers, Grant, GrantId, Mode, NodeId, Span, Term};
use rustc_hash::FxHashSet;
use std::cell::{Cell, RefCell};

/// Grants that were registered for one call, and the change that it is.
pub(crate) struct Stake<'a> {
    holding: &'a Holding,
    term: Term,
    registered: RefCell<Vec<GrantId>>,
    change: RefCell<Option<OpenChange>>,
    /// Where it is seen what that has made of what it names.
    tells: RefCell<Vec<Tell>>,
    makes_folder: Cell<bool>,
    /// The client put the call out before, in a session that is forgotten.
    pub(crate) again: bool,
    /// [`Stake::wrote_back`] was called.
    wrote_back: Cell<bool>,
    /// Registered on data before the call was looked into.
    given: Cell<Option<(LeaseKey, Granted)>>,
}

impl<'a> Stake<'a> {
    /// `change`: one that this call began when it was executed before.
    pub(crate) fn new(files: &'a SessionFiles, change: Option<OpenChange>, again: bool) -> Stake<'a> {
        Stake {
            holding: files.holding(),
            term: files.term(),
            registered: RefCell::default(),
            change: RefCell::new(change),
            tells: RefCell::default(),
            makes_folder: Cell::new(false),
            again,
            wrote_back: Cell::new(false),
            given: Cell::new(None),
        }
    }

    /// Registers a grant. What it covers is read *afterwards*. `None`: answer without it.
    pub(crate) fn ask(&self, node: NodeId, object: Object, covers: Covers) -> Option<Grant> {
        let granted = self.register(node, object, covers)?;
        Some(self.grant(granted, node, covers))
    }

    /// The same for names. `may_list` looks at the caller's right to list the directory; it is called only where names
    /// are told by that right and it is not known yet. The second value: whether the recall may carry names.
    pub(crate) fn ask_names(
        &self,
        node: NodeId,
        object: Object,
        may_list: impl FnOnce() -> bool,
    ) -> Option<(Grant, bool)> {
        let granted = self.register(node, object, Covers::Names)?;
        let listed = granted.listed || may_list();
        if listed && !granted.listed {
            self.holding.leases.may_list(self.holding.holder, granted.id);
        }
        Some((self.grant(granted, node, Covers::Names), listed))
    }

    /// Takes back a grant that no answer is to carry.
    pub(crate) fn withdraw(&self, grant: &Grant) {
        self.registered.borrow_mut().retain(|id| *id != grant.id);
        self.holding.leases.withdraw(self.holding.holder, &[grant.id]);
    }

    fn register(&self, node: NodeId, object: Object, covers: Covers) -> Option<Granted> {
        if self.term == Term::Limited(Span::ZERO) {
            return None;
        }
        let key = LeaseKey { object, covers };
        let granted = match self.given.take() {
            Some((of, granted)) if of == key => granted,
            other => {
                self.given.set(other);
                let granted = self.holding.leases.grant(self.holding.holder, key, node)?;
                self.registered.borrow_mut().push(granted.id);
                granted
            }
        };
        Some(granted)
    }

    /// Registers one for a call that reads data. False: the call waits for it.
    pub(crate) fn begin_read(&self, node: NodeId, object: Object) -> bool {
        if self.term == Term::Limited(Span::ZERO) {
            return true;
        }
        let key = LeaseKey { object, covers: Covers::Data };
        let Ok(granted) = self.holding.read(&mut self.change.borrow_mut(), key, node) else { return false };
        if let Some(granted) = granted {
            self.registered.borrow_mut().push(granted.id);
            self.given.set(Some((key, granted)));
        }
        true
    }

    /// Data was changed: the change is done, and what was written granted.
    pub(crate) fn written(&self, node: NodeId, object: Object) -> Option<Grant> {
        let change = self.change.take()?;
        if self.term == Term::Limited(Span::ZERO) {
            change.done(&self.tells.borrow());
            return None;
        }
        let key = LeaseKey { object, covers: Covers::Data };
        let granted = change.written(&self.tells.borrow(), (self.holding.holder, key), node)?;
        self.registered.borrow_mut().push(granted.id);
        Some(self.grant(granted, node, Covers::Data))
    }

    /// Waits until others have given back what they were asked for of this data. True: they have.
    pub(crate) fn settle(&self, object: Object) -> bool {
        self.holding.settle(&mut self.change.borrow_mut(), LeaseKey { object, covers: Covers::Data })
    }

    /// How the pages are to be merged that this call writes back in this range (offset, length). `None`: another client may have changed
    /// them since this grant, and how is not known.
    pub(crate) fn merge_base(&self, under: (GrantId, Covers), range: (u64, u64)) -> Option<MergeBase> {
        self.change.borrow().as_ref()?.merge_base(under, range)
    }

    /// Another client may yet have to merge its pages with what this call writes back.
    pub(crate) fn overtakes(&self) -> bool {
        self.change.borrow().as_ref().is_some_and(OpenChange::overtakes)
    }

    /// Write-back was applied; to be said before [`Stake::written`].
    pub(crate) fn wrote_back(&self, wrote: WroteBack<'_>) {
        self.wrote_back.set(true);
        self.change.borrow().iter().for_each(|change| change.wrote_back(wrote));
    }

    /// Whether an earlier attempt of this call has said what it changed.
    pub(crate) fn has_written_back(&self) -> bool {
        self.wrote_back.get()
    }

    /// Another change of data was applied to this range (offset, length); to be said before the change is done.
    pub(crate) fn changed(&self, range: (u64, u64)) {
        self.change.borrow().iter().for_each(|change| change.changed(range));
    }

    fn grant(&self, granted: Granted, node: NodeId, covers: Covers) -> Grant {
        Grant {
            id: granted.id,
            node,
            covers,
            mode: Mode::Read,
            term: if granted.limit == Span::FOREVER { Term::Session } else { Term::Limited(granted.limit) },
            recallable: true,
            shared: granted.shared,
        }
    }

    /// What is read under the grant on this key is not all that it covers: it is taken out of `grants`, and
    /// recalled where an answer carried it already.
    pub(crate) fn forsake(&self, grants: &mut Vec<Grant>, object: Object, covers: Covers) {
        let before = grants.len();
        grants.retain(|grant| grant.covers != covers);
        if grants.len() == before {
            self.holding.leases.recall(LeaseKey { object, covers });
        }
    }

    /// Says what the call makes false. True: nobody else holds any of it, nor will until it is done.
    /// `flush`: it writes stores into a map back.
    pub(crate) fn begin(&self, changes: &[Change], flush: bool) -> bool {
        let mut open = self.change.borrow_mut();
        (changes.is_empty() && open.is_none()) || self.holding.change(&mut open, changes, flush)
    }

    /// The call may make the server's own folder: its change says what that makes false.
    pub(crate) fn make_folder(&self) {
        self.makes_folder.set(true);
    }

    /// Whether that was said.
    pub(crate) fn makes_folder(&self) -> bool {
        self.makes_folder.get()
    }

    /// The change may be made now: for those who hold it back.
    pub(crate) fn tell(&self, mut tells: Vec<Tell>) {
        if self.change.borrow().as_ref().is_some_and(OpenChange::is_awaited) {
            tells.iter_mut().for_each(Tell::hold);
            *self.tells.borrow_mut() = tells;
        }
    }

    /// All effects of the call are there: what it changed may be granted again, to its own session too.
    pub(crate) fn done(&self) {
        if let Some(change) = self.change.take() {
            change.done(&self.tells.borrow());
        }
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
