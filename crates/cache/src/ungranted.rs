//! Pages of replies without a valid grant: how replies and local writes change their records (`pages/ungranted.rs`).

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, attr_after};
use crate::op::{InvalidationId, Op};
use nigh_types::{DataVersion, LeaseScope, NodeId, Response, WriteBackPrecondition};

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
        if !self.store.inode(node.ino).is_some_and(|inode| inode.id == node && inode.writers > 0) {
            return;
        }
        let grant =
            crate::grants::on(&response.grants, node, LeaseScope::Data).filter(|grant| grant.recallable);
        let under = grant.map(|grant| (grant.id, LeaseScope::Data));
        let since = WriteBackPrecondition { stamp: DataVersion::of(&attr), under };
        self.ungranted.add(node, range, since, until);
        self.kernel.note_page_drop(until, node.ino);
    }

    /// Records an invalidation of a range of a file (length 0: to the end), which leaves out pages that local writes
    /// have locked.
    pub(crate) fn leave_out_ungranted(
        &mut self,
        why: InvalidationId,
        ino: u64,
        (offset, length): (u64, u64),
    ) {
        if self.ungranted.has_any(ino) {
            let written = self.written(ino, self.kernel.is_recalled(why));
            self.ungranted.leave_out(why, ino, (offset, length), &written);
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

    /// Records that `until` drops the pages that a request had locked until its reply.
    pub(crate) fn ungranted_behind(&mut self, (ino, range): (u64, (u64, u64)), until: InvalidationId) {
        if self.ungranted.drop_with((ino, range), until) {
            self.kernel.note_page_drop(until, ino);
        }
    }
}
