//! Pages of replies without a valid grant: the reply carried none, or a recall has passed it.
//!
//! The kernel drops such pages right after the reply. In between a process may store into them through an mmap, and the
//! kernel writes them back. That write-back names the data version of the pages, and the grant under which the remote
//! read them if the reply had one. So it does not undo what another client has stored since
//! (docs/decisions/0028-merging-write-back.md).

use crate::byte_ranges::pages_overlap;
use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, attr_after};
use crate::op::{InvalidationId, Op};
use nigh_types::{DataVersion, LeaseScope, NodeId, Response, WriteBackPrecondition};
use std::collections::BTreeMap;

/// Pages of one reply, until the kernel has dropped them.
#[derive(Clone, Debug)]
pub(crate) struct Ungranted {
    node: NodeId,
    range: (u64, u64),
    since: WriteBackPrecondition,
    /// The invalidation that drops the pages: at the time of the reply, and now.
    first: InvalidationId,
    until: InvalidationId,
    /// Last invalidation that left them out, because a local write had them locked. They are dropped after its reply.
    left_out: Option<InvalidationId>,
}

/// By inode number.
pub(crate) type UngrantedPages = BTreeMap<u64, Vec<Ungranted>>;

impl Cache {
    /// Drops the pages of a file (offset, length) that a reply has brought.
    pub(crate) fn drop_ungranted(
        &mut self,
        flight: &InflightCall,
        (node, range): (NodeId, (u64, u64)),
        response: &Response,
    ) {
        if let Some(until) = self.drop_pages_after_reply(&flight.waiters, Some((node.ino, range))) {
            self.note_ungranted((node, range), until, response);
        }
    }

    /// Records such pages, which `until` drops. A file that is not open for writing has no stores.
    pub(crate) fn note_ungranted(
        &mut self,
        (node, range): (NodeId, (u64, u64)),
        until: InvalidationId,
        response: &Response,
    ) {
        let Some(attr) = attr_after(response, node.ino) else { return };
        if !self.inodes.get(&node.ino).is_some_and(|inode| inode.id == node && inode.writers > 0) {
            return;
        }
        let grant =
            crate::grants::on(&response.grants, node, LeaseScope::Data).filter(|grant| grant.recallable);
        let under = grant.map(|grant| (grant.id, LeaseScope::Data));
        let since = WriteBackPrecondition { stamp: DataVersion::of(&attr), under };
        self.ungranted.entry(node.ino).or_default().push(Ungranted {
            node,
            range,
            since,
            first: until,
            until,
            left_out: None,
        });
        self.note_dropping(until, node.ino);
    }

    fn note_dropping(&mut self, id: InvalidationId, ino: u64) {
        let dropping = self.page_drops.entry(id).or_default();
        if !dropping.iter().any(|(of, _)| *of == ino) {
            dropping.push((ino, false));
        }
    }

    /// Returns the data versions of such pages that the kernel may have in a range of a file.
    pub(crate) fn ungranted_in(
        &self,
        node: NodeId,
        range: (u64, u64),
    ) -> impl Iterator<Item = WriteBackPrecondition> + '_ {
        let of_file = self.ungranted.get(&node.ino).into_iter().flatten();
        of_file
            .filter(move |pages| pages.node == node && pages_overlap(pages.range, range))
            .map(|pages| pages.since)
    }

    /// Records an invalidation of a range of a file (length 0: to the end), which leaves out pages that local writes
    /// have locked.
    pub(crate) fn leave_out_ungranted(
        &mut self,
        why: InvalidationId,
        ino: u64,
        (offset, length): (u64, u64),
    ) {
        if !self.ungranted.contains_key(&ino) {
            return;
        }
        let written = self.written(ino, self.is_recalled(why));
        let range = (offset, if length == 0 { u64::MAX - offset } else { length });
        let of_file = self.ungranted.get_mut(&ino).into_iter().flatten();
        for pages in of_file.filter(|pages| pages_overlap(pages.range, range)) {
            if written.iter().any(|written| pages_overlap(*written, pages.range)) {
                pages.left_out = Some(why);
            }
        }
    }

    /// Returns the pages that local writes have locked; `but_flushes`: except write-back, for which the invalidation
    /// waits.
    fn written(&self, ino: u64, but_flushes: bool) -> Vec<(u64, u64)> {
        let of_flight = |flight: &InflightCall| match flight.purpose {
            CallKind::Write { .. } => flight.purpose.locks_pages(ino, but_flushes),
            _ => None,
        };
        let of_parked = |op: &Op| match op {
            Op::Write { .. } if !self.is_direct(op) => op.locks_pages(ino, but_flushes),
            _ => None,
        };
        let out = self.calls.values().filter_map(of_flight);
        out.chain(self.calls.queued().filter_map(|(_, op)| of_parked(op))).collect()
    }

    /// Handles a done invalidation, of `all` pages of a file or of some. Later replies have brought other pages.
    pub(crate) fn ungranted_dropped(&mut self, id: InvalidationId, ino: u64, all: bool) {
        let Some(of_file) = self.ungranted.get_mut(&ino) else { return };
        of_file.retain(|pages| {
            let goes = pages.until == id || all && pages.first < id;
            !goes || pages.left_out == Some(id)
        });
        if of_file.is_empty() {
            self.ungranted.remove(&ino);
        }
    }

    /// Records that `until` drops the pages that a request had locked until its reply.
    pub(crate) fn ungranted_behind(&mut self, (ino, range): (u64, (u64, u64)), until: InvalidationId) {
        let of_file = self.ungranted.get_mut(&ino).into_iter().flatten();
        let mut is_any = false;
        let waits = |pages: &&mut Ungranted| pages.left_out.is_some_and(|last| last >= pages.until);
        for pages in of_file.filter(waits).filter(|pages| pages_overlap(pages.range, range)) {
            (pages.until, is_any) = (until, true);
        }
        if is_any {
            self.note_dropping(until, ino);
        }
    }

    /// Removes grants from the records: they ended with the session, and another session may give others with the same
    /// ids.
    pub(crate) fn end_ungranted(&mut self) {
        self.ungranted.values_mut().flatten().for_each(|pages| pages.since.under = None);
    }
}
