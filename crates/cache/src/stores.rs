//! Stores into maps, which a kernel writes back when it likes (docs/decisions/0008-leases.md, rule 12).
//!
//! A page that was stored into holds more bytes than were stored: those that were there when it was read. It must not be
//! written over what somebody else has written since. While the grant on the data stands nobody has, and a recall is
//! acknowledged when the pages are gone. A grant that ends in another way (its time, the session's) leaves them behind:
//! the file is *old* until the kernel has dropped them all.
//!
//! So each write-back says of which state of the file its pages are ([`Since`]), and the remote does it only if nobody else has changed
//! that. Which state that is:
//!
//! ```text
//!                   a grant lives: the latest that was told
//!   base (none) ──────────────────────────────────────────▶ base ── dropped for a recall ──▶ base (none)
//!                                                            │ the grant ends otherwise
//!                                                            ▼
//!                                                    old: as it was then ── all pages dropped ──▶ not old
//! ```
//!
//! What is read or written while a file is old begins another base beside it, and pages of replies under no grant have a state of their
//! own (`ungranted.rs`). Pages that own requests have locked are left out when
//! all are dropped, and go behind the answers: of requests that are out by then, not of later ones, which would never end.

use crate::cache::Cache;
use crate::flight::{Flight, attr_after};
use crate::grants::Held;
use crate::locked::Pages;
use crate::op::{Invalidation, Output, Stale};
use nigh_types::{Attr, CallId, Covers, DataStamp, Errno, GrantId, NodeId, OpId, Response, Since, Time};
use std::collections::BTreeSet;

/// A state of a file of which its kernel has pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base {
    pub stamp: DataStamp,
    /// The grant under which they stand.
    pub under: (GrantId, Covers),
}

/// The kernel may have pages of a time whose grant has ended.
#[derive(Clone, Debug)]
pub(crate) struct Old {
    pub stamp: DataStamp,
    /// What write-backs have made of that.
    tip: DataStamp,
    /// All of them, until it was told to drop all by a later one than this.
    all_until: Option<Invalidation>,
    /// Then those which that left out: of these requests, until they are answered,
    left_out: BTreeSet<OpId>,
    /// and until the last drop behind such an answer was told.
    behind: Option<Invalidation>,
    /// The grant lived when its session was forgotten.
    unbroken: bool,
    /// Somebody else has changed the file since.
    lost: bool,
}

impl Cache {
    /// A file's data was told to be so, under a grant if one lives: by the answer to that call, or by what was known.
    pub(crate) fn note_base(&mut self, now: Time, flight: Option<&Flight>, ino: u64, stamp: DataStamp) {
        if !self.config.level.may_keep_pages() {
            return;
        }
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        let Some(held) = inode.data.held.filter(|h| h.lives(now) && h.recallable && !h.stale) else { return };
        let (node, covers) = held.on;
        if flight.is_some_and(|flight| flight.recalled(node, covers)) {
            return;
        }
        let under = (held.id, covers);
        // Own changes were answered since it was asked. One that crossed them may be the last; others know nothing newer.
        let crossed = flight.is_none_or(|flight| flight.seen.inodes.contains(&ino));
        let is_own = flight.is_some_and(|flight| flight.sequence.is_some());
        let order = |stamp: DataStamp| (stamp.mtime.pair(), stamp.size);
        match &mut inode.more().base {
            Some(base) if crossed && !(is_own && order(stamp) > order(base.stamp)) => base.under = under,
            base => *base = Some(Base { stamp, under }),
        }
    }

    /// The same from a reply to a write or a read.
    pub(crate) fn note_base_after(&mut self, now: Time, flight: &Flight, ino: u64, response: &Response) {
        if let Some(attr) = attr_after(response, ino) {
            self.note_base(now, Some(flight), ino, DataStamp::of(&attr));
        }
    }

    /// What is said of the pages of a file whose stores are written back (offset, length): the oldest state of which the kernel may have
    /// them. `EIO`: another client has written the file since.
    pub(crate) fn since(&self, ino: u64, range: (u64, u64)) -> Result<Option<Since>, Errno> {
        let Some(inode) = self.inodes.get(&ino) else { return Ok(None) };
        let ungranted: Vec<Since> = self.ungranted_in(inode.id, range).collect();
        let kept = match (&inode.old, &inode.base) {
            (Some(old), _) if old.lost => return Err(Errno::IO),
            (Some(old), _) => Some(Since { stamp: old.stamp, under: None }),
            (None, base) => base.as_ref().map(|base| Since { stamp: base.stamp, under: Some(base.under) }),
        };
        // A file's times may be set back; the numbers of grants on it ascend.
        let grant = |since: &Since| since.under.map(|(grant, _)| grant);
        let before = |since: &&Since| grant(since) < kept.as_ref().and_then(grant) && grant(since).is_some();
        if let Some(earlier) = ungranted.iter().filter(before).min_by_key(|since| grant(since)) {
            return Ok(Some(*earlier));
        }
        Ok(kept.into_iter().chain(ungranted).min_by_key(|since| since.stamp.mtime.pair()))
    }

    /// The grant on a file's data ends, and its pages are about to be dropped. `unbroken`: with the session that gave it, before its
    /// time. Without an open file that may be written there are no stores.
    pub(crate) fn grow_old(&mut self, ino: u64, unbroken: bool) {
        let after = Invalidation(self.next_invalidation);
        let Some(more) = self.inodes.get_mut(&ino).and_then(|inode| inode.more_if_any()) else { return };
        let base = more.base.take();
        if more.writers == 0 {
            return;
        }
        match (&mut more.old, base) {
            (Some(old), base) => {
                old.unbroken = false;
                if base.is_some() {
                    old.all_until = Some(after);
                }
            }
            (old, Some(Base { stamp, .. })) => {
                let (all_until, left_out, behind) = (Some(after), BTreeSet::new(), None);
                *old = Some(Old { stamp, tip: stamp, all_until, left_out, behind, unbroken, lost: false });
            }
            (None, None) => {}
        }
    }

    /// The kernel was told to drop pages of a file, `all` of them or some, and has; but for those that own requests had locked.
    pub(crate) fn dropped(&mut self, id: Invalidation, ino: u64, all: bool) {
        self.ungranted_dropped(id, ino, all);
        let left_out = if all { self.left_out(ino) } else { BTreeSet::new() };
        let Some(more) = self.inodes.get_mut(&ino).and_then(|inode| inode.more_if_any()) else { return };
        if let Some(old) = &mut more.old {
            if all && old.all_until.is_some_and(|after| after < id) {
                (old.all_until, old.left_out) = (None, left_out);
            }
            let is_untold = old.behind.is_some_and(|behind| self.untold.contains(&behind));
            if old.all_until.is_some() || !old.left_out.is_empty() || is_untold {
                return;
            }
            more.old = None;
        }
        // What a recall left out is not of that state either, or no more.
        if all && more.data.held.is_none() {
            more.base = None;
        }
    }

    /// Requests that have pages of a file locked which the kernel was told to drop.
    fn left_out(&self, ino: u64) -> BTreeSet<OpId> {
        let locks = |(_, length): (u64, u64)| length > 0;
        let out = self.flights.values().filter(|flight| flight.drop_data);
        let out = out.filter(|flight| flight.purpose.locks_pages(ino, false).is_some_and(locks));
        let parked = self.parked_pages(ino, false).filter(|(_, range)| locks(*range)).map(|(op, _)| op);
        out.flat_map(|flight| flight.waiters.iter().copied()).chain(parked).collect()
    }

    /// Requests were answered: the kernel drops what it had locked for them. What they show may be old, and it may have been told to
    /// drop it before.
    pub(crate) fn drop_behind(&mut self, ops: &[OpId], pages: Option<Pages>) {
        self.drop_pages_behind(ops, pages);
    }

    /// The same; answers with the invalidation that drops them.
    pub(crate) fn drop_pages_behind(&mut self, ops: &[OpId], pages: Option<Pages>) -> Option<Invalidation> {
        let (ino, (offset, length)) = pages.filter(|(_, (_, length))| *length > 0)?;
        if !self.config.level.may_keep_pages() {
            return None;
        }
        let id = self.invalidate(vec![Stale::Data { ino, offset, length }], None);
        self.goes_behind(ops, ino, id);
        self.ungranted_behind((ino, (offset, length)), id);
        Some(id)
    }

    /// What requests that were answered may have kept of a file is dropped by that.
    pub(crate) fn goes_behind(&mut self, ops: &[OpId], ino: u64, id: Invalidation) {
        let Some(old) = self.inodes.get_mut(&ino).and_then(|inode| inode.more_if_any()?.old.as_mut()) else {
            return;
        };
        let were_left_out = ops.iter().filter(|op| old.left_out.remove(op)).count() > 0;
        // While all are to go it is not told yet which are left out.
        if old.all_until.is_some() || were_left_out {
            old.behind = Some(id);
        }
    }

    /// A session stands, so writing back waits for nobody any more: now all old pages can go.
    pub(crate) fn drop_old(&mut self) {
        let is_old = |ino: &u64| self.inodes.get(ino).is_some_and(|inode| inode.old.is_some());
        let open: BTreeSet<u64> = self.files.values().map(|file| file.ino).filter(is_old).collect();
        if self.config.level.may_keep_pages() {
            for ino in open {
                self.invalidate(vec![Stale::Data { ino, offset: 0, length: 0 }], None);
            }
        }
    }

    /// A file was opened again in a new session. Its pages go on if they stand under a grant of that, and nobody can have changed it
    /// meanwhile, or nobody has.
    pub(crate) fn pages_go_on(
        &mut self,
        now: Time,
        flight: &Flight,
        (id, attr): (NodeId, &Attr),
        response: &Response,
    ) {
        let granted = flight.granted(&response.grants, id, Covers::Data);
        let Some(grant) = granted.filter(|grant| Held::begin(grant, flight.sent).lives(now)) else { return };
        let stamp = DataStamp::of(attr);
        let inode = self.inode(id);
        let is_own = |old: &Old| !old.lost && (old.unbroken || old.stamp == stamp || old.tip == stamp);
        if inode.old.as_ref().is_some_and(is_own) {
            inode.more().old = None;
            inode.more().base = Some(Base { stamp, under: (grant.id, Covers::Data) });
        }
    }

    /// A session was forgotten: what was being written back is written in the next one, with what is known then of its pages.
    pub(crate) fn park_flushes(&mut self) {
        // What the server knew of our own writes is forgotten with the session.
        let old = self.inodes.values_mut().filter_map(|inode| inode.more_if_any()?.old.as_mut());
        old.for_each(|old| old.stamp = old.tip);
        let flushes = self.flights.iter().filter(|(_, flight)| flight.purpose.is_flush());
        let calls: Vec<CallId> = flushes.map(|(call, _)| *call).collect();
        for call in calls {
            let Some(flight) = self.flights.remove(&call) else { continue };
            if let Some(sequence) = flight.sequence {
                self.overlay.finish(sequence);
            }
            self.out.push_back(Output::Cancel(call));
            let waiting = flight.waiters.first().and_then(|op| Some((*op, self.waiting.remove(op)?)));
            if let (Some((op, waiting)), Some(what)) = (waiting, flight.flush) {
                self.parked.insert(op, (waiting.caller, *what));
            }
        }
    }

    /// Stores were written back.
    pub(crate) fn flushed(&mut self, ino: u64, response: &Response) {
        let old = self.inodes.get_mut(&ino).and_then(|inode| inode.more_if_any()?.old.as_mut());
        if let (Some(old), Some(attr)) = (old, attr_after(response, ino))
            && old.tip.mtime.pair() <= attr.mtime.pair()
        {
            old.tip = DataStamp::of(&attr);
        }
    }

    /// The remote has refused them: somebody else has changed the file.
    pub(crate) fn lose_stores(&mut self, ino: u64) {
        let old = self.inodes.get_mut(&ino).and_then(|inode| inode.more_if_any()?.old.as_mut());
        if !old.is_some_and(|old| std::mem::replace(&mut old.lost, true)) {
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
