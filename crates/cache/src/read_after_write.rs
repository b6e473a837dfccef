//! Read-after-write order: reads of pages that a local write is bringing to the remote.
//!
//! The kernel keeps a page locked until the reply to a write, except a page that it had in full. Such a page may be
//! dropped meanwhile, for an open or a recall, and is then read from a remote that does not have the written data yet
//! (`fuse_fill_write_pages`). The old data would stay in the page after the write. So such a read is sent after the
//! reply to the write, and sent again if it went out first, as requests arrive in another order than they were made.

use crate::cache::Cache;
use crate::op::{Caller, Fh, Op};
use nigh_types::{OpId, Time};

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
        let is_met = self.calls.is_being_written(ino, pages);
        if is_met {
            self.calls.queue(op, caller, Op::Read { ino, fh, offset, size });
        }
        is_met
    }

    /// Starts the reads that waited for the reply to a write.
    pub(crate) fn start_queued_reads(&mut self, now: Time, ino: u64) {
        for (op, (caller, what)) in self.calls.take_queued_reads(ino) {
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
            if let Some(waiting) = self.calls.remove_waiter(*op) {
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
        if let Some(waiting) = self.calls.waiter(op)
            && let Some(flight) = self.calls.get_mut(waiting.call)
        {
            flight.drop_data = true;
        }
    }
}
