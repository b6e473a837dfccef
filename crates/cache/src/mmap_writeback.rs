//! Write-back of mmap stores, at a time that the kernel chooses (docs/decisions/0008-leases.md, rule 12).
//!
//! A page with an mmap store also holds the bytes that were there when the page was read. It must not overwrite what
//! another client has written since. While the data grant lives no other client has, and a recall is acknowledged after
//! the pages are gone. A grant that ends otherwise (deadline, end of session) leaves pages behind: the file has *stale
//! pages* until the kernel has dropped all pages.
//!
//! Each write-back therefore carries a precondition ([`WriteBackPrecondition`]): the data version of its pages. The
//! remote writes only if no other client has changed that version. The version follows from the grant:
//!
//! ```text
//!                   a grant lives: the latest version in a reply
//!   base (none) ──────────────────────────────────────────▶ base ── dropped for a recall ──▶ base (none)
//!                                                            │ the grant ends otherwise
//!                                                            ▼
//!                                                    old: the version then ── all pages dropped ──▶ not old
//! ```
//!
//! Reads and writes while a file has stale pages begin another page base beside them. Pages of replies without a grant
//! have a version of their own (`ungranted.rs`). An invalidation of all pages leaves out the pages that local requests
//! have locked. These are dropped after the replies: of requests in flight at that moment, not of later ones, or the
//! stale state would never end.

use crate::cache::Cache;
use crate::calls::{InflightCall, PageRange, attr_after};
use crate::grants::LiveGrant;
use crate::op::{InvalidationId, KernelInvalidation, Output};
use crate::pages::{PageBase, StalePages};
use nigh_types::{
    Attr, CallId, DataVersion, Errno, LeaseScope, NodeId, OpId, Response, Time, WriteBackPrecondition,
};
use std::collections::BTreeSet;

impl Cache {
    /// Records the data version of a file under a live grant, from the reply to that call or from the cache.
    pub(crate) fn note_page_base(
        &mut self,
        now: Time,
        flight: Option<&InflightCall>,
        ino: u64,
        stamp: DataVersion,
    ) {
        if !self.kernel.can_notify() {
            return;
        }
        let Some(inode) = self.store.inode_mut(ino) else { return };
        let Some(held) = inode.data.held.filter(|h| h.is_live(now) && h.recallable && !h.stale) else {
            return;
        };
        let (node, covers) = held.on;
        if flight.is_some_and(|flight| flight.recalled(node, covers)) {
            return;
        }
        let under = (held.id, covers);
        // Replies to local changes came after the call was sent. The reply to a concurrent change may be the last; no
        // other reply is newer.
        let crossed = flight.is_none_or(|flight| flight.race_log.local_inodes.contains(&ino));
        let is_own = flight.is_some_and(|flight| flight.is_mutation());
        let order = |stamp: DataVersion| (stamp.mtime.pair(), stamp.size);
        match &mut inode.ext_mut().base {
            Some(base) if crossed && !(is_own && order(stamp) > order(base.stamp)) => base.under = under,
            base => *base = Some(PageBase { stamp, under, full_drop: None }),
        }
    }

    /// Records the data version in a reply to a write or a read.
    pub(crate) fn note_page_base_after(
        &mut self,
        now: Time,
        flight: &InflightCall,
        ino: u64,
        response: &Response,
    ) {
        if let Some(attr) = attr_after(response, ino) {
            self.note_page_base(now, Some(flight), ino, DataVersion::of(&attr));
        }
    }

    /// Returns the precondition of a write-back (offset, length): the oldest version of which the kernel may have pages
    /// there. `EIO`: another client has written the file since.
    pub(crate) fn writeback_precondition(
        &self,
        ino: u64,
        range: (u64, u64),
    ) -> Result<Option<WriteBackPrecondition>, Errno> {
        let Some(inode) = self.store.inode(ino) else { return Ok(None) };
        let ungranted: Vec<WriteBackPrecondition> = self.ungranted.versions_in(inode.id, range).collect();
        let kept = match (&inode.old, &inode.base) {
            (Some(old), _) => Some(old.precondition().ok_or(Errno::IO)?),
            (None, base) => base.as_ref().map(PageBase::precondition),
        };
        // A file's times may be set back; grant ids on a file ascend.
        let grant = |since: &WriteBackPrecondition| since.under.map(|(grant, _)| grant);
        let before = |since: &&WriteBackPrecondition| {
            grant(since) < kept.as_ref().and_then(grant) && grant(since).is_some()
        };
        if let Some(earlier) = ungranted.iter().filter(before).min_by_key(|since| grant(since)) {
            return Ok(Some(*earlier));
        }
        Ok(kept.into_iter().chain(ungranted).min_by_key(|since| since.stamp.mtime.pair()))
    }

    /// Marks a file's pages as stale: the data grant ends, and an invalidation of the pages follows. `unbroken`: the
    /// grant ends before its time, with its session. A file that is not open for writing has no stores.
    pub(crate) fn mark_pages_stale(&mut self, ino: u64, unbroken: bool) {
        let after = self.kernel.last_invalidation();
        let Some(more) = self.store.inode_mut(ino).and_then(|inode| inode.ext_if_any()) else { return };
        let base = more.base.take();
        if more.writers == 0 {
            return;
        }
        match (&mut more.old, base) {
            (Some(old), base) => old.add(base.is_some().then_some(after)),
            (old, Some(PageBase { stamp, .. })) => *old = Some(StalePages::new(stamp, after, unbroken)),
            (None, None) => {}
        }
    }

    /// Handles a done invalidation of pages, of `all` pages or of some. Pages locked by local requests were left out.
    pub(crate) fn on_pages_dropped(&mut self, id: InvalidationId, ino: u64, all: bool) {
        self.ungranted.dropped(id, ino, all);
        let left_out = if all { self.requests_with_locked_pages(ino) } else { BTreeSet::new() };
        let Some(more) = self.store.inode_mut(ino).and_then(|inode| inode.ext_if_any()) else { return };
        let kernel = &self.kernel;
        if let Some(old) = &mut more.old {
            if !old.note_drop(id, all, left_out, |drop| kernel.is_pending(drop)) {
                return;
            }
            more.old = None;
        }
        // Pages that a recall left out are not of that version either, or no more. An invalidation that was sent before
        // the recall has left out the pages of the reply that brought the grant.
        if all && more.data.held.is_none() {
            more.base.take_if(|base| base.full_drop.is_none_or(|last| last <= id));
        }
    }

    /// Returns the requests that have pages locked which the kernel was to drop.
    fn requests_with_locked_pages(&self, ino: u64) -> BTreeSet<OpId> {
        let locks = |(_, length): (u64, u64)| length > 0;
        let out = self.calls.values().filter(|flight| flight.drop_data);
        let out = out.filter(|flight| flight.purpose.locks_pages(ino, false).is_some_and(locks));
        let parked = self.queued_pages(ino, false).filter(|(_, range)| locks(*range)).map(|(op, _)| op);
        out.flat_map(|flight| flight.waiters.iter().copied()).chain(parked).collect()
    }

    /// Has the kernel drop the pages that it had locked for requests with replies. They may be stale, and an earlier
    /// invalidation may have left them out.
    pub(crate) fn drop_after_reply(&mut self, ops: &[OpId], pages: Option<PageRange>) {
        self.drop_pages_after_reply(ops, pages);
    }

    /// Does so, and returns the invalidation.
    pub(crate) fn drop_pages_after_reply(
        &mut self,
        ops: &[OpId],
        pages: Option<PageRange>,
    ) -> Option<InvalidationId> {
        let (ino, (offset, length)) = pages.filter(|(_, (_, length))| *length > 0)?;
        if !self.kernel.can_notify() {
            return None;
        }
        let id = self.invalidate(vec![KernelInvalidation::Data { ino, offset, length }], None);
        self.note_drop_after_reply(ops, ino, id);
        self.ungranted_behind((ino, (offset, length)), id);
        Some(id)
    }

    /// Records the invalidation that drops the pages of answered requests.
    pub(crate) fn note_drop_after_reply(&mut self, ops: &[OpId], ino: u64, id: InvalidationId) {
        let old = self.store.inode_mut(ino).and_then(|inode| inode.ext_if_any()?.old.as_mut());
        old.into_iter().for_each(|old| old.note_drop_after_reply(ops, id));
    }

    /// Drops all stale pages: with an active session, write-back no longer blocks.
    pub(crate) fn drop_stale_pages(&mut self) {
        let is_old = |ino: &u64| self.store.inode(*ino).is_some_and(|inode| inode.old.is_some());
        let open: BTreeSet<u64> = self.open.files.values().map(|file| file.ino).filter(is_old).collect();
        if self.kernel.can_notify() {
            for ino in open {
                self.invalidate(vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }], None);
            }
        }
    }

    /// Keeps the pages of a file that was reopened in a new session, if they are under a grant of that session, and no
    /// other client could change the file meanwhile or none did.
    pub(crate) fn keep_pages_in_new_session(
        &mut self,
        now: Time,
        flight: &InflightCall,
        (id, attr): (NodeId, &Attr),
        response: &Response,
    ) {
        let granted = flight.granted(&response.grants, id, LeaseScope::Data);
        let Some(grant) = granted.filter(|grant| LiveGrant::begin(grant, flight.sent).is_live(now)) else {
            return;
        };
        let stamp = DataVersion::of(attr);
        let inode = self.inode(id);
        if inode.old.as_ref().is_some_and(|old| old.is_own(stamp)) {
            inode.ext_mut().old = None;
            inode.ext_mut().base =
                Some(PageBase { stamp, under: (grant.id, LeaseScope::Data), full_drop: None });
        }
    }

    /// Queues write-backs of a lost session for the next one, with a precondition computed then.
    pub(crate) fn requeue_writebacks(&mut self) {
        // The server forgot with the session which versions are local writes.
        let old = self.store.inodes_mut().filter_map(|inode| inode.ext_if_any()?.old.as_mut());
        old.for_each(StalePages::forget_write_backs);
        let flushes = self.calls.iter().filter(|(_, flight)| flight.purpose.is_writeback());
        let calls: Vec<CallId> = flushes.map(|(call, _)| call).collect();
        for call in calls {
            let Some(flight) = self.calls.remove(call) else { continue };
            if let Some(sequence) = flight.sequence {
                self.calls.finish_mutation(sequence);
            }
            self.out.push_back(Output::Cancel(call));
            let waiting = flight.waiters.first().and_then(|op| Some((*op, self.calls.remove_waiter(*op)?)));
            if let (Some((op, waiting)), Some(what)) = (waiting, flight.writeback_op) {
                self.calls.queue(op, waiting.caller, *what);
            }
        }
    }

    /// Records the data version after a write-back.
    pub(crate) fn on_writeback_reply(&mut self, ino: u64, response: &Response) {
        let old = self.store.inode_mut(ino).and_then(|inode| inode.ext_if_any()?.old.as_mut());
        if let (Some(old), Some(attr)) = (old, attr_after(response, ino)) {
            old.note_write_back(DataVersion::of(&attr));
        }
    }

    /// Fails write-back: the remote refused it because another client has changed the file.
    pub(crate) fn fail_writeback(&mut self, ino: u64) {
        let old = self.store.inode_mut(ino).and_then(|inode| inode.ext_if_any()?.old.as_mut());
        if !old.is_some_and(StalePages::note_overwritten) {
            let path = self.shown_path(ino);
            tracing::error!(
                target: "nigh::stores",
                path,
                "stores into a map are lost: another client, or the server's own disk, changed the file before they were written back"
            );
        }
    }
}

#[cfg(test)]
mod tests;
