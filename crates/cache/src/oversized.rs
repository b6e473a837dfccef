//! Directories that do not fit `--cache-size`, and listings that never end: the bound on what a listing in flight may
//! hold (docs/decisions/0021-memory.md).
//!
//! Eviction spares a directory whose listing is in flight. So the size of a listing is bounded here: beyond twice the
//! budget, or beyond the budget once no reader waits for it, the call is cancelled and its entries are dropped. Readers
//! then get names from their offset on by calls of their own, if the remote has names-only listings, else `ENOMEM`.

use crate::cache::Cache;
use crate::calls::{CallKind, ReplyKind};
use crate::op::{OpReply, Output};
use nigh_types::{CallId, Errno, OpId, Time};

/// A listing of this size is kept however small the budget is, in bytes.
pub(crate) const ALWAYS_KEPT: u64 = 4 << 20;

impl Cache {
    /// Cancels listings in flight, the largest first, until all together keep to their bound. Runs after each chunk.
    pub(crate) fn bound_listings(&mut self, now: Time) {
        let budget = self.config.budget_bytes;
        let (beyond, alone) = (budget.saturating_mul(2).max(ALWAYS_KEPT), budget.max(ALWAYS_KEPT));
        loop {
            let sizes: Vec<(u64, CallId, u64)> = self.listing_sizes().collect();
            let Some(&(bytes, call, dir)) = sizes.iter().max() else { return };
            let sum: u64 = sizes.iter().map(|(bytes, ..)| bytes).sum();
            if sum <= beyond && (bytes <= alone || self.is_wanted(call, dir)) {
                return;
            }
            self.abandon_listing(now, call, dir);
        }
    }

    /// Returns the memory of each listing in flight, in bytes: entries of the directory, or detached entries.
    fn listing_sizes(&self) -> impl Iterator<Item = (u64, CallId, u64)> {
        self.calls.iter().filter_map(|(call, flight)| match flight.purpose {
            CallKind::List { dir } if !flight.abandoned => {
                let kept =
                    || self.store.dir(dir).filter(|d| d.listing == Some(call)).map_or(0, |d| d.rows.bytes());
                Some((flight.detached_entries.as_ref().map_or_else(kept, |rows| rows.bytes()), call, dir))
            }
            _ => None,
        })
    }

    /// Returns whether a request waits for the listing, or an open directory is being read.
    fn is_wanted(&self, call: CallId, dir: u64) -> bool {
        self.calls.get(call).is_some_and(|flight| !flight.waiters.is_empty())
            || self.open.dirs.is_being_read(dir)
    }

    fn abandon_listing(&mut self, now: Time, call: CallId, dir: u64) {
        let Some(flight) = self.calls.get_mut(call) else { return };
        tracing::warn!(
            target: "nigh::evict",
            ino = dir,
            "a directory is larger than the cache may be: its names are asked for page by page; raise --cache-size"
        );
        flight.abandoned = true;
        flight.detached_entries = None;
        flight.grants = Vec::new();
        let waiters = std::mem::take(&mut flight.waiters);
        self.store.oversized.insert(now, dir);
        let current = self.store.dir(dir).filter(|d| d.listing == Some(call)).map(|d| d.id);
        self.end_listing(call, dir);
        if let Some(id) = current {
            self.evict(now, id);
        }
        // The remote knows no call for a listing that a prefetch job brings.
        match self.prefetch.job_of(dir, call) {
            Some(walk) => self.cancel_job(now, walk),
            None => self.out.push_back(Output::Cancel(call)),
        }
        waiters.into_iter().for_each(|op| self.answer_beside_listing(now, dir, op));
    }

    /// Answers a request that waited for a listing of a directory that is too large.
    pub(crate) fn answer_beside_listing(&mut self, now: Time, dir: u64, op: OpId) {
        let Some((caller, want)) = self.calls.waiter(op).map(|w| (w.caller, w.want.clone())) else { return };
        match want {
            ReplyKind::OpenDir { ino } => {
                let opened = self.opened_dir(now, ino, caller.pid);
                self.reply_to(op, OpReply::Opened(opened));
            }
            ReplyKind::Page { .. } => match self.read_names_only(now, (op, caller), dir, &want) {
                Some(Some(answer)) => self.reply_to(op, answer),
                Some(None) => {}
                None => self.reply_to(op, OpReply::Failed(Errno::NOMEM)),
            },
            _ => self.reply_to(op, OpReply::Failed(Errno::NOMEM)),
        }
    }
}

#[cfg(test)]
mod tests;
