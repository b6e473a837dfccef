//! Reads of pages that an own write is bringing to the remote.
//!
//! A page that is written to stays locked until the write is answered, but for one that the kernel had whole: this one may be dropped
//! meanwhile, for an open or a recall, and is then read from a remote that does not have yet what was written
//! (`fuse_fill_write_pages`). That would stand there when the write has been answered. So such a read is asked when
//! it has; and asked again if it went out first, as requests reach us in another order than that in which they were made.

use crate::cache::Cache;
use crate::flight::Purpose;
use crate::op::{Caller, Fh, Op};
use crate::recall::meet;
use nigh_types::{OpId, Time};
use std::collections::BTreeMap;

impl Cache {
    /// Keeps a read until the writes of its pages are answered; whether there are any.
    pub(crate) fn waits_for_write(
        &mut self,
        op: OpId,
        caller: Caller,
        (ino, fh): (u64, Fh),
        range: (u64, u32),
    ) -> bool {
        let (offset, size) = range;
        let pages = (offset, u64::from(size));
        let is_met = self.flights.values().any(|flight| match flight.purpose {
            Purpose::Write { ino: file, offset, size, flush: false, .. } => {
                file == ino && meet((offset, size), pages)
            }
            _ => false,
        });
        if is_met {
            self.parked.insert(op, (caller, Op::Read { ino, fh, offset, size }));
        }
        is_met
    }

    /// A write was asked: reads of its pages that are out may be answered without it.
    pub(crate) fn overtake_reads(&mut self, ino: u64, range: (u64, u64)) {
        for flight in self.flights.values_mut() {
            if let Purpose::Read { ino: file, offset, size, .. } = flight.purpose
                && file == ino
                && meet((offset, u64::from(size)), range)
            {
                flight.overtaken = true;
            }
        }
    }

    /// A write was answered: reads that waited for that begin.
    pub(crate) fn start_reads(&mut self, now: Time, ino: u64) {
        let waits =
            |(_, (_, op)): &(OpId, (Caller, Op))| matches!(op, Op::Read { ino: file, .. } if *file == ino);
        let (reads, rest): (BTreeMap<_, _>, _) =
            std::mem::take(&mut self.parked).into_iter().partition(waits);
        self.parked = rest;
        for (op, (caller, what)) in reads {
            self.start_late(now, op, caller, what);
        }
    }

    /// An answer was composed before a write that is done, or yet to be: those that wait for it ask again.
    pub(crate) fn read_again(
        &mut self,
        now: Time,
        ops: &[OpId],
        fh: Fh,
        (ino, offset, size): (u64, u64, u32),
    ) {
        for op in ops {
            if let Some(waiting) = self.waiting.remove(op) {
                self.start_late(now, *op, waiting.caller, Op::Read { ino, fh, offset, size });
            }
        }
    }

    fn start_late(&mut self, now: Time, op: OpId, caller: Caller, what: Op) {
        let pages = what.pages();
        if let Some(answer) = self.start(now, op, caller, what) {
            self.say(op, answer);
            return self.drop_behind(&[op], pages);
        }
        // Its pages may have been left out of what was dropped meanwhile.
        if let Some(waiting) = self.waiting.get(&op)
            && let Some(flight) = self.flights.get_mut(&waiting.call)
        {
            flight.drop_data = true;
        }
    }
}
