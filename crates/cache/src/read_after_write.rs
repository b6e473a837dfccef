//! Read-after-write order: reads of pages that a local write is bringing to the remote.
//!
//! The kernel keeps a page locked until the reply to a write, except a page that it had in full. Such a page may be
//! dropped meanwhile, for an open or a recall, and is then read from a remote that does not have the written data yet
//! (`fuse_fill_write_pages`). The old data would stay in the page after the write. So such a read is sent after the
//! reply to the write, and sent again if it went out first, as requests arrive in another order than they were made.

use crate::cache::Cache;
use crate::calls::CallKind;
use crate::op::{Caller, Fh, Op};
use crate::recall::pages_overlap;
use nigh_types::{OpId, Time};
use std::collections::BTreeMap;

impl Cache {
    /// Queues a read until the writes of its pages have replies. Returns whether there are any.
    pub(crate) fn queue_behind_write(
        &mut self,
        op: OpId,
        caller: Caller,
        (ino, fh): (u64, Fh),
        range: (u64, u32),
    ) -> bool {
        let (offset, size) = range;
        let pages = (offset, u64::from(size));
        let is_met = self.flights.values().any(|flight| match flight.purpose {
            CallKind::Write { ino: file, offset, size, writeback: false, .. } => {
                file == ino && pages_overlap((offset, size), pages)
            }
            _ => false,
        });
        if is_met {
            self.queued_ops.insert(op, (caller, Op::Read { ino, fh, offset, size }));
        }
        is_met
    }

    /// Records a write for reads of its pages in flight: their replies may lack it.
    pub(crate) fn mark_reads_before_write(&mut self, ino: u64, range: (u64, u64)) {
        for flight in self.flights.values_mut() {
            if let CallKind::Read { ino: file, offset, size, .. } = flight.purpose
                && file == ino
                && pages_overlap((offset, u64::from(size)), range)
            {
                flight.read_before_write = true;
            }
        }
    }

    /// Starts the reads that waited for the reply to a write.
    pub(crate) fn start_queued_reads(&mut self, now: Time, ino: u64) {
        let waits =
            |(_, (_, op)): &(OpId, (Caller, Op))| matches!(op, Op::Read { ino: file, .. } if *file == ino);
        let (reads, rest): (BTreeMap<_, _>, _) =
            std::mem::take(&mut self.queued_ops).into_iter().partition(waits);
        self.queued_ops = rest;
        for (op, (caller, what)) in reads {
            self.restart_request(now, op, caller, what);
        }
    }

    /// Restarts reads whose reply was composed before a write that is done or in flight.
    pub(crate) fn resend_reads(
        &mut self,
        now: Time,
        ops: &[OpId],
        fh: Fh,
        (ino, offset, size): (u64, u64, u32),
    ) {
        for op in ops {
            if let Some(waiting) = self.waiting.remove(op) {
                self.restart_request(now, *op, waiting.caller, Op::Read { ino, fh, offset, size });
            }
        }
    }

    fn restart_request(&mut self, now: Time, op: OpId, caller: Caller, what: Op) {
        let pages = what.pages();
        if let Some(answer) = self.start(now, op, caller, what) {
            self.reply(op, answer);
            return self.drop_after_reply(&[op], pages);
        }
        // An invalidation may have left out its pages meanwhile.
        if let Some(waiting) = self.waiting.get(&op)
            && let Some(flight) = self.flights.get_mut(&waiting.call)
        {
            flight.drop_data = true;
        }
    }
}
