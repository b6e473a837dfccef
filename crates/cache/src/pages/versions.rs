//! Data versions of the kernel's pages, for the write-back of mmap stores.

use crate::op::InvalidationId;
use nigh_types::{DataVersion, GrantId, LeaseScope, OpId, WriteBackPrecondition};
use std::collections::BTreeSet;

/// Data version of the kernel's pages under a live grant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageBase {
    stamp: DataVersion,
    /// Grant of the pages.
    under: (GrantId, LeaseScope),
    /// The last invalidation of all pages that was sent since.
    full_drop: Option<InvalidationId>,
}

/// Stale pages: the kernel may have pages under a grant that has ended.
#[derive(Clone, Debug)]
pub(crate) struct StalePages {
    stamp: DataVersion,
    /// Data version after write-backs of stale pages.
    tip: DataVersion,
    /// All pages are stale until the kernel has done an invalidation of all pages later than this one.
    full_drop_after: Option<InvalidationId>,
    /// Then the pages that it left out: those of these requests, until their replies,
    left_out: BTreeSet<OpId>,
    /// and until the kernel has done the last invalidation after such a reply.
    last_drop: Option<InvalidationId>,
    /// The grant lived when the server forgot its session.
    ended_with_session: bool,
    /// Another client has changed the file since.
    overwritten: bool,
}

impl PageBase {
    pub fn new(stamp: DataVersion, under: (GrantId, LeaseScope)) -> PageBase {
        PageBase { stamp, under, full_drop: None }
    }

    pub fn stamp(&self) -> DataVersion {
        self.stamp
    }

    /// Returns whether this version is older than another one of the file.
    pub fn is_before(&self, later: DataVersion) -> bool {
        (self.stamp.mtime.pair(), self.stamp.size) < (later.mtime.pair(), later.size)
    }

    /// Records that another grant covers the pages.
    pub fn prolong(&mut self, under: (GrantId, LeaseScope)) {
        self.under = under;
    }

    /// Records that an invalidation of all pages was sent.
    pub fn note_full_drop(&mut self, id: InvalidationId) {
        self.full_drop = Some(id);
    }

    /// Returns whether no page is left after an invalidation of all pages: none was sent later.
    pub fn is_gone_after(&self, id: InvalidationId) -> bool {
        self.full_drop.is_none_or(|last| last <= id)
    }

    /// Returns the precondition of a write-back of such pages.
    pub fn precondition(&self) -> WriteBackPrecondition {
        WriteBackPrecondition { stamp: self.stamp, under: Some(self.under) }
    }
}

impl StalePages {
    /// The kernel drops them with an invalidation after `after`.
    pub fn new(stamp: DataVersion, after: InvalidationId, ended_with_session: bool) -> StalePages {
        StalePages {
            stamp,
            tip: stamp,
            full_drop_after: Some(after),
            left_out: BTreeSet::new(),
            last_drop: None,
            ended_with_session,
            overwritten: false,
        }
    }

    /// Records the end of another grant; `after`: with pages, which an invalidation after this one drops.
    pub fn add(&mut self, after: Option<InvalidationId>) {
        self.ended_with_session = false;
        if after.is_some() {
            self.full_drop_after = after;
        }
    }

    /// Records a done invalidation of `all` pages or of some, which left out those of these requests. Returns whether
    /// no stale page is left.
    pub fn note_drop(
        &mut self,
        id: InvalidationId,
        all: bool,
        left_out: BTreeSet<OpId>,
        is_pending: impl Fn(InvalidationId) -> bool,
    ) -> bool {
        if all && self.full_drop_after.is_some_and(|after| after < id) {
            (self.full_drop_after, self.left_out) = (None, left_out);
        }
        self.full_drop_after.is_none() && self.left_out.is_empty() && !self.last_drop.is_some_and(is_pending)
    }

    /// Records the invalidation that drops the pages of answered requests.
    pub fn note_drop_after_reply(&mut self, ops: &[OpId], id: InvalidationId) {
        let were_left_out = ops.iter().filter(|op| self.left_out.remove(op)).count() > 0;
        // While an invalidation of all pages is queued it is unknown which pages it leaves out.
        if self.full_drop_after.is_some() || were_left_out {
            self.last_drop = Some(id);
        }
    }

    /// Returns the precondition of a write-back; `None`: another client has changed the file since.
    pub fn precondition(&self) -> Option<WriteBackPrecondition> {
        (!self.overwritten).then_some(WriteBackPrecondition { stamp: self.stamp, under: None })
    }

    /// Records the data version after a write-back.
    pub fn note_write_back(&mut self, stamp: DataVersion) {
        if self.tip.mtime.pair() <= stamp.mtime.pair() {
            self.tip = stamp;
        }
    }

    /// Records a write-back that was refused: another client has changed the file. Returns whether that was known.
    pub fn note_overwritten(&mut self) -> bool {
        std::mem::replace(&mut self.overwritten, true)
    }

    /// Forgets which versions are local writes: the server has, with the session.
    pub fn forget_write_backs(&mut self) {
        self.stamp = self.tip;
    }

    /// Returns whether pages of a file in this version, in a new session, are those of this mount.
    pub fn is_own(&self, stamp: DataVersion) -> bool {
        !self.overwritten && (self.ended_with_session || self.stamp == stamp || self.tip == stamp)
    }
}
