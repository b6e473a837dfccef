//! The grants and the lease change of one call while it is executed.

use crate::lease::change_result::ChangeProbe;
use crate::lease::leases::Leases;
use crate::lease::pending_change::PendingChange;
use crate::lease::session_files::SessionFiles;
use nigh_lease::{
    Change, ChangeId, GrantRequest, Granted, Holder, LeaseKey, MergeBase, Object, ReadGrant, WroteBack,
};
use nigh_types::{Grant, GrantId, LeaseScope, Mode, NodeId, Span, Term};
use rustc_hash::FxHashSet;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// Grants registered for one call, and its pending change.
pub(crate) struct CallLeases<'a> {
    leases: &'a Arc<Leases>,
    holder: Holder,
    term: Term,
    uncarried: RefCell<Vec<GrantId>>,
    change: RefCell<Option<PendingChange>>,
    /// Probes that read the changed facts after the change.
    tells: RefCell<Vec<ChangeProbe>>,
    may_make_orphan_folder: Cell<bool>,
    /// The client resends the call, which it first sent in a session that the server has discarded.
    pub(crate) again: bool,
    /// [`CallLeases::wrote_back`] was called.
    wrote_back: Cell<bool>,
    /// A data grant registered by [`CallLeases::begin_read`], before the call was executed.
    read_grant: Cell<Option<(LeaseKey, Granted)>>,
}

impl<'a> CallLeases<'a> {
    /// `change`: the pending change that an earlier attempt of this call began.
    pub(crate) fn new(files: &'a SessionFiles, change: Option<PendingChange>, again: bool) -> CallLeases<'a> {
        CallLeases {
            leases: files.leases(),
            holder: files.holder(),
            term: files.term(),
            uncarried: RefCell::default(),
            change: RefCell::new(change),
            tells: RefCell::default(),
            may_make_orphan_folder: Cell::new(false),
            again,
            wrote_back: Cell::new(false),
            read_grant: Cell::new(None),
        }
    }

    /// Registers a grant. The caller reads the covered facts only *afterwards*. Returns `None` if the call is to be
    /// answered without a grant.
    pub(crate) fn request_grant(
        &self,
        node: NodeId,
        object: Object,
        covers: LeaseScope,
        mode: Mode,
    ) -> Option<Grant> {
        let request = self.request(node, LeaseKey { object, covers }, mode);
        Some(grant(self.register(request)?, &request))
    }

    /// Registers a read grant on a directory. `may_list` checks the caller's right to list the directory. It is called
    /// only if a recall may carry names only with that right, and the right is not yet known. The second value: whether
    /// the recall may carry names.
    pub(crate) fn request_dir_grant(
        &self,
        node: NodeId,
        object: Object,
        may_list: impl FnOnce() -> bool,
    ) -> Option<(Grant, bool)> {
        let request = self.request(node, LeaseKey { object, covers: LeaseScope::Directory }, Mode::Read);
        let granted = self.register(request)?;
        let listed = granted.listed || may_list();
        if listed && !granted.listed {
            self.leases.may_list(self.holder, granted.id);
        }
        Some((grant(granted, &request), listed))
    }

    /// Withdraws a grant that no reply will carry.
    pub(crate) fn withdraw(&self, grant: &Grant) {
        self.uncarried.borrow_mut().retain(|id| *id != grant.id);
        self.leases.withdraw(self.holder, &[grant.id]);
    }

    fn request(&self, node: NodeId, key: LeaseKey, mode: Mode) -> GrantRequest {
        GrantRequest { holder: self.holder, key, node, mode }
    }

    fn register(&self, request: GrantRequest) -> Option<Granted> {
        if self.term == Term::Limited(Span::ZERO) {
            return None;
        }
        let granted = match self.read_grant.take() {
            Some((key, granted)) if key == request.key && granted.mode == request.mode => granted,
            other => {
                self.read_grant.set(other);
                let granted = self.leases.grant(request)?;
                self.uncarried.borrow_mut().push(granted.id);
                granted
            }
        };
        Some(granted)
    }

    /// Registers a data grant for a read. Returns false if the read has to wait for a conflicting change.
    pub(crate) fn begin_read(&self, node: NodeId, object: Object) -> bool {
        if self.term == Term::Limited(Span::ZERO) {
            return true;
        }
        let key = LeaseKey { object, covers: LeaseScope::Data };
        let mut change = self.change.borrow_mut();
        let granted = if let Some(waited) = change.take() {
            self.leases.take_grant(waited.id)
        } else {
            match self.leases.read(self.request(node, key, Mode::Read)) {
                ReadGrant::Granted(granted) => Some(granted),
                ReadGrant::Refused => None,
                ReadGrant::Waits(id) => {
                    *change = Some(PendingChange::new(self.leases, id));
                    return false;
                }
            }
        };
        if let Some(granted) = granted {
            self.uncarried.borrow_mut().push(granted.id);
            self.read_grant.set(Some((key, granted)));
        }
        true
    }

    /// Ends a change of data and grants the written data to the writer.
    pub(crate) fn written(&self, node: NodeId, object: Object) -> Option<Grant> {
        let id = self.change.take()?.into_id();
        if self.term == Term::Limited(Span::ZERO) {
            self.leases.done(id, &self.tells.borrow());
            return None;
        }
        let key = LeaseKey { object, covers: LeaseScope::Data };
        let request = self.request(node, key, Mode::Read);
        let granted = self.leases.written(id, &self.tells.borrow(), request)?;
        self.uncarried.borrow_mut().push(granted.id);
        Some(grant(granted, &request))
    }

    /// Waits until other holders have returned the recalled leases on this data. Returns true if they have.
    pub(crate) fn wait_for_acknowledgements(&self, object: Object) -> bool {
        let key = LeaseKey { object, covers: LeaseScope::Data };
        let mut change = self.change.borrow_mut();
        let waits = change.get_or_insert_with(|| {
            PendingChange::new(self.leases, self.leases.wait_for_acknowledgements(self.holder, key))
        });
        self.leases.is_ready(waits.id)
    }

    /// Returns how to merge the pages that this call writes back to this range (offset, length). Returns `None` if
    /// another client may have changed those pages since this grant and the changes are not known.
    pub(crate) fn merge_base(&self, under: (GrantId, LeaseScope), range: (u64, u64)) -> Option<MergeBase> {
        self.leases.merge_base(self.change_id()?, under, range)
    }

    /// Whether another client may still have to merge its pages with the data that this call writes back.
    pub(crate) fn may_need_merge(&self) -> bool {
        self.change_id().is_some_and(|id| self.leases.may_need_merge(id))
    }

    /// Records applied write-back. Must be called before [`CallLeases::written`].
    pub(crate) fn wrote_back(&self, wrote: WroteBack<'_>) {
        self.wrote_back.set(true);
        if let Some(id) = self.change_id() {
            self.leases.wrote_back(id, wrote);
        }
    }

    /// Whether an earlier attempt of this call has recorded its write-back.
    pub(crate) fn has_written_back(&self) -> bool {
        self.wrote_back.get()
    }

    /// Records another change of data in this range (offset, length). Must be called before the change ends.
    pub(crate) fn changed(&self, range: (u64, u64)) {
        if let Some(id) = self.change_id() {
            self.leases.changed(id, range);
        }
    }

    /// Handles a grant on this key whose facts were read only in part: removes it from `grants`, or recalls it if an
    /// earlier part of the reply carried it already.
    pub(crate) fn revoke_partial(&self, grants: &mut Vec<Grant>, object: Object, covers: LeaseScope) {
        let before = grants.len();
        grants.retain(|grant| grant.covers != covers);
        if grants.len() == before {
            self.leases.recall(LeaseKey { object, covers });
        }
    }

    /// Begins the call's change. Returns true if all other sessions have dropped or suspended the facts, which are
    /// not granted until the change ends. `flush`: the call writes back a shared mapping.
    pub(crate) fn begin(&self, changes: &[Change], flush: bool) -> bool {
        let mut open = self.change.borrow_mut();
        if changes.is_empty() && open.is_none() {
            return true;
        }
        let begun = open.as_ref().map(|change| change.id);
        let (id, ready) = self.leases.change(self.holder, begun, changes, flush);
        open.get_or_insert_with(|| PendingChange::new(self.leases, id));
        ready
    }

    /// Notes that this call may make the orphan folder, because its change covers the folder's parent directory.
    pub(crate) fn allow_orphan_folder(&self) {
        self.may_make_orphan_folder.set(true);
    }

    /// Whether the call may make the orphan folder.
    pub(crate) fn may_make_orphan_folder(&self) -> bool {
        self.may_make_orphan_folder.get()
    }

    /// Installs the probes. The change may be applied now, and other holders wait for its result.
    pub(crate) fn set_probes(&self, mut tells: Vec<ChangeProbe>) {
        if self.change_id().is_some_and(|id| self.leases.has_suspended_holders(id)) {
            tells.iter_mut().for_each(ChangeProbe::open_target);
            *self.tells.borrow_mut() = tells;
        }
    }

    /// Ends the change after all effects of the call: the changed facts may be granted again, also to the call's own
    /// session.
    pub(crate) fn done(&self) {
        if let Some(change) = self.change.take() {
            self.leases.done(change.into_id(), &self.tells.borrow());
        }
    }

    /// Marks grants that a reply is about to carry. The remaining ones are withdrawn when this value is dropped.
    pub(crate) fn mark_carried(&self, grants: &[Grant]) {
        let mut registered = self.uncarried.borrow_mut();
        if registered.len() == grants.len() {
            registered.clear();
        } else if !grants.is_empty() {
            let carried: FxHashSet<GrantId> = grants.iter().map(|grant| grant.id).collect();
            registered.retain(|id| !carried.contains(id));
        }
    }

    fn change_id(&self) -> Option<ChangeId> {
        self.change.borrow().as_ref().map(|change| change.id)
    }

    /// Takes the pending change out of a call that is being parked.
    pub(crate) fn take_change(&self) -> Option<PendingChange> {
        self.change.take()
    }
}

/// A registered grant as a reply carries it.
fn grant(granted: Granted, request: &GrantRequest) -> Grant {
    let term = if granted.limit == Span::FOREVER { Term::Session } else { Term::Limited(granted.limit) };
    granted.into_grant(request, term)
}

impl Drop for CallLeases<'_> {
    fn drop(&mut self) {
        self.leases.withdraw(self.holder, self.uncarried.get_mut());
    }
}
