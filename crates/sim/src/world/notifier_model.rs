//! Model of a notifier and its kernel: the order of notifications ([`NotifierQueue`], which the real notifier uses
//! too), and what each one waits for.

use super::{Backend, Client, World, name_of, words};
use nigh_cache::{InvalidationId, KernelInvalidation, NotifierJob, NotifierQueue, NotifyLevel, Op, Urgency};
use nigh_types::{OpId, WriteFlags};
use std::collections::VecDeque;

/// The job in progress.
#[derive(Clone, Debug)]
struct Current {
    job: NotifierJob,
    /// Page invalidations of an urgent job for which no worker was free.
    untold: VecDeque<KernelInvalidation>,
}

/// A page range that a worker is invalidating.
#[derive(Clone, Debug)]
struct BlockedInvalidation {
    ino: u64,
    range: (u64, u64),
    ranges: Vec<(u64, u64)>,
    /// The write-back of dirty pages that must end first.
    flush: Option<OpId>,
}

/// Notifications queued for a kernel.
#[derive(Clone, Default, Debug)]
pub(super) struct NotifierModel {
    queue: NotifierQueue,
    current: Option<Current>,
    /// The blocked page invalidation that the current job waits for.
    stuck: Option<BlockedInvalidation>,
    /// Blocked page invalidations that the current job waits for at its end.
    blocked: Vec<BlockedInvalidation>,
    /// Page invalidations without a waiting job, because a local request blocks them.
    detached: Vec<BlockedInvalidation>,
}

impl NotifierModel {
    pub fn is_idle(&self) -> bool {
        self.count() == 0
    }

    fn count(&self) -> usize {
        self.queue.jobs().count() + usize::from(self.current.is_some())
    }

    fn job(&mut self) -> &mut NotifierJob {
        &mut self.current.as_mut().expect("a job is in progress").job
    }

    /// Returns whether an invalidation of an inode's data or listing is queued.
    pub fn has_queued_invalidation(&self, ino: u64) -> bool {
        let about = |stale: &KernelInvalidation| matches!(stale, KernelInvalidation::Data { ino: i, .. } if *i == ino);
        let current = self.current.iter().flat_map(|current| current.job.stale.iter().chain(&current.untold));
        self.queue.jobs().flat_map(|job| &job.stale).chain(current).any(about)
            || self.stuck.iter().chain(&self.blocked).any(|stuck| stuck.ino == ino)
    }

    fn has_worker(&self, workers: u32) -> bool {
        ((self.blocked.len() + self.detached.len()) as u64) < u64::from(workers)
    }
}

impl<B: Backend> World<B> {
    /// Returns whether a client's kernel must be coherent now; the kernel of a sleeping machine need not be.
    pub(super) fn must_be_coherent(&self, at: usize, client: &Client<B>) -> bool {
        let sleeps = client.asleep && client.cache.is_flushing_all() || !self.server.runs(at);
        let sleeps = sleeps || !self.server.is_faithful(at);
        !(client.cache.is_stale() || sleeps)
    }

    /// Mounts another filesystem below a client's mount, and informs its daemon.
    pub fn add_submount(&mut self, at: usize) {
        let client = &mut self.clients[at];
        client.kernel.has_submounts = true;
        if let Some((id, names)) = client.cache.handle_mounted_below() {
            let stale = names.into_iter().map(|(dir, name)| KernelInvalidation::Entry { dir, name });
            let NotifierModel { queue, current, stuck, .. } = &mut client.notifier;
            // An ordinary job that waits for a worker is behind them.
            let waits = |current: &mut Current| stuck.is_none() && !current.job.is_urgent();
            if let Some(Current { job, .. }) = current.take_if(waits) {
                let done = queue.finish(job);
                assert_eq!(done, None, "it waits");
            }
            queue.push_first(id, stale.collect());
        }
        self.settle();
    }

    /// Delivers the kernel notifications that were held back.
    pub fn release_notifications(&mut self, at: usize) {
        let client = &mut self.clients[at];
        (client.hold_invalidations, client.asleep) = (false, false);
        self.settle();
    }

    /// Writes back stores into maps, as at msync(2).
    pub fn write_back(&mut self, at: usize, ino: u64) {
        if let Some(op) = self.clients[at].kernel.page_cache.write_back(ino) {
            self.put(at, op);
        }
        self.settle();
    }

    /// Returns whether a kernel with held-back notifications has some queued.
    pub(crate) fn has_held_notifications(&self, at: usize) -> bool {
        self.clients[at].hold_invalidations && !self.clients[at].notifier.is_idle()
    }

    /// Delivers the first queued job only.
    pub(crate) fn deliver_first(&mut self, at: usize) {
        let before = self.clients[at].notifier.count();
        self.clients[at].hold_invalidations = false;
        while self.clients[at].notifier.count() == before && self.deliver_one(at) {}
        self.clients[at].hold_invalidations = true;
        self.settle();
    }

    /// Ends the blocking of page invalidations.
    pub fn end_slow_invalidation(&mut self, at: usize) {
        self.clients[at].invalidates_slowly = false;
        self.settle();
    }

    /// Returns whether a client's kernel has received and executed all notifications.
    #[must_use]
    pub fn has_drained_notifications(&self, at: usize) -> bool {
        let telling = &self.clients[at].notifier;
        telling.is_idle() && telling.detached.is_empty()
    }

    pub(super) fn queue(
        &mut self,
        at: usize,
        id: InvalidationId,
        stale: Vec<KernelInvalidation>,
        urgency: Urgency,
    ) {
        let first = urgency != Urgency::Ordinary;
        let client = &mut self.clients[at];
        if client.hold_invalidations && (client.asleep || !first) {
            self.trace.push(format!("{}'s kernel is slow to forget", name_of(at)));
        }
        client.notifier.queue.push(id, stale, urgency);
        if !first {
            return;
        }
        // A blocked invalidation in progress no longer delays the queue; it is repeated after this job.
        let mut left: Vec<BlockedInvalidation> = client.notifier.stuck.take().into_iter().collect();
        let NotifierModel { queue, current, blocked, .. } = &mut client.notifier;
        if let Some(current) = current {
            for stuck in blocked.drain(..) {
                current.untold.push_back(stuck.stale());
                left.push(stuck);
            }
        }
        if let Some(Current { job, .. }) = current.take_if(|current| !current.job.is_urgent()) {
            let done = queue.finish(job);
            assert_eq!(done, None, "it was interrupted");
        }
        for stuck in left {
            self.trace.push(format!("{}'s kernel is left writing back {}", name_of(at), stuck.ino));
            self.clients[at].notifier.detached.push(stuck);
        }
    }

    /// Delivers the due notifications, as far as possible; returns whether there were any.
    pub(super) fn deliver(&mut self, at: usize) -> bool {
        let mut moved = self.end_detached(at);
        let mut told = 0;
        while self.deliver_one(at) {
            moved = true;
            told += 1;
            let last = self.trace.len().saturating_sub(20);
            assert!(told < 10_000, "it tells without an end:\n{}", self.trace[last..].join("\n"));
        }
        moved
    }

    /// Invalidates pages of detached invalidations as soon as their write-back has ended.
    fn end_detached(&mut self, at: usize) -> bool {
        let left = std::mem::take(&mut self.clients[at].notifier.detached);
        let (over, left): (Vec<_>, Vec<_>) = left.into_iter().partition(|stuck| self.is_over(at, stuck));
        self.clients[at].notifier.detached = left;
        for stuck in &over {
            self.drop_pages(at, stuck.ino, &stuck.ranges);
        }
        !over.is_empty()
    }

    fn is_over(&self, at: usize, stuck: &BlockedInvalidation) -> bool {
        let client = &self.clients[at];
        !client.invalidates_slowly && stuck.flush.is_none_or(|flush| !client.ops.contains_key(&flush))
    }

    fn deliver_one(&mut self, at: usize) -> bool {
        if let Some(stuck) = self.clients[at].notifier.stuck.take() {
            return self.wait_for(at, stuck);
        }
        let client = &mut self.clients[at];
        let NotifierModel { queue, current, .. } = &mut client.notifier;
        let Some(is_urgent) =
            current.as_ref().map(|current| &current.job).or(queue.jobs().next()).map(NotifierJob::is_urgent)
        else {
            return false;
        };
        if client.hold_invalidations && (client.asleep || !is_urgent) {
            return false;
        }
        if current.is_none() {
            let next = queue.take_next(|| client.cache.level() == NotifyLevel::All);
            *current = next.map(|job| Current { job, untold: VecDeque::new() });
        }
        let job = client.notifier.job();
        match job.stale.front().or(job.copies.front()).cloned() {
            Some(one) => self.deliver_invalidation(at, one),
            None => self.end_job(at),
        }
    }

    /// Blocks the first job until the page invalidation ends; an urgent job waits for it at its end.
    fn wait_for(&mut self, at: usize, stuck: BlockedInvalidation) -> bool {
        let over = self.is_over(at, &stuck);
        if over && let Some(stuck) = self.launder(at, &stuck) {
            self.clients[at].notifier.stuck = Some(stuck);
            return true;
        }
        let client = &mut self.clients[at];
        let telling = &mut client.notifier;
        let job = telling.job();
        if over {
            job.stale.pop_front();
            self.drop_stuck(at, &stuck);
        } else if client.cache.blocks_drop(job.id, stuck.ino, &stuck.ranges) {
            telling.detached.push(stuck);
        } else if job.is_urgent() {
            job.stale.pop_front();
            telling.blocked.push(stuck);
        } else {
            telling.stuck = Some(stuck);
            return false;
        }
        true
    }

    /// Writes back stores that were made while a page waited for its invalidation (`invalidate_inode_pages2`).
    fn launder(&mut self, at: usize, stuck: &BlockedInvalidation) -> Option<BlockedInvalidation> {
        let locks = stuck.ranges.iter().any(|range| range.0 == 0);
        if !locks {
            return None;
        }
        let op = self.clients[at].kernel.page_cache.write_back(stuck.ino)?;
        self.trace.push(format!("{}'s kernel writes back {}", name_of(at), stuck.ino));
        let flush = Some(self.put(at, op));
        Some(BlockedInvalidation { ino: stuck.ino, range: stuck.range, ranges: stuck.ranges.clone(), flush })
    }

    /// Ends the first job, except for blocked page invalidations and those for which no worker was free.
    fn end_job(&mut self, at: usize) -> bool {
        let mut moved = false;
        for stuck in std::mem::take(&mut self.clients[at].notifier.blocked) {
            let over = self.is_over(at, &stuck);
            let again = if over { self.launder(at, &stuck) } else { None };
            let client = &mut self.clients[at];
            let job = client.notifier.job();
            if let Some(stuck) = again {
                client.notifier.blocked.push(stuck);
            } else if over {
                self.drop_stuck(at, &stuck);
            } else if client.cache.blocks_drop(job.id, stuck.ino, &stuck.ranges) {
                job.stale.push_back(stuck.stale());
                client.notifier.detached.push(stuck);
            } else {
                client.notifier.blocked.push(stuck);
                continue;
            }
            moved = true;
        }
        let telling = &mut self.clients[at].notifier;
        if moved || !telling.blocked.is_empty() {
            return moved;
        }
        let Some(Current { mut job, mut untold }) = telling.current.take() else { return false };
        job.stale.append(&mut untold);
        if let Some(id) = telling.queue.finish(job) {
            let now = self.time(at);
            self.clients[at].cache.handle_invalidated(now, id);
        }
        true
    }

    /// Postpones a page invalidation of the first job, because no worker is free.
    fn postpone(&mut self, at: usize, one: KernelInvalidation) -> bool {
        let NotifierModel { queue, current, .. } = &mut self.clients[at].notifier;
        let Some(Current { mut job, mut untold }) = current.take() else { return false };
        if job.is_urgent() {
            job.stale.pop_front();
            untold.push_back(one);
        } else if job.is_leftover_of_urgent() && queue.jobs().any(|job| !job.is_leftover_of_urgent()) {
            // The job goes behind the others.
            return queue.finish(job).is_none();
        } else {
            *current = Some(Current { job, untold });
            return false;
        }
        *current = Some(Current { job, untold });
        true
    }

    fn deliver_invalidation(&mut self, at: usize, one: KernelInvalidation) -> bool {
        let client = &mut self.clients[at];
        let job = client.notifier.job();
        let KernelInvalidation::Data { ino, offset, length } = one else {
            if job.stale.pop_front().is_none() {
                job.copies.pop_front();
            }
            self.trace.push(format!("{}'s kernel forgets {}", name_of(at), words(&one)));
            client.kernel.invalidate(&one);
            return true;
        };
        // As a notifier does: page ranges that the kernel has locked for local requests are left out.
        let id = job.id;
        let ranges = client.cache.droppable_ranges(id, ino, (offset, length));
        if !ranges.is_empty() && !client.notifier.has_worker(client.workers) {
            return self.postpone(at, one);
        }
        // The kernel writes dirty pages back before it drops them.
        let locks = ranges.iter().any(|range| range.0 == 0);
        let is_flush = |op: &Op| matches!(op, Op::Write { ino: i, flags: WriteFlags { write_back: true, .. }, .. } if *i == ino);
        let out = client.ops.iter().find(|(_, op)| is_flush(op)).map(|(id, _)| *id);
        let flush = match out {
            None if locks => client.kernel.page_cache.write_back(ino).map(|op| {
                self.trace.push(format!("{}'s kernel writes back {ino}", name_of(at)));
                self.put(at, op)
            }),
            out => out.filter(|_| locks),
        };
        let client = &mut self.clients[at];
        if flush.is_some() || client.invalidates_slowly && !ranges.is_empty() {
            client.notifier.stuck = Some(BlockedInvalidation { ino, range: (offset, length), ranges, flush });
        } else {
            client.notifier.job().stale.pop_front();
            self.drop_stuck(at, &BlockedInvalidation { ino, range: (offset, length), ranges, flush: None });
        }
        true
    }

    /// Also drops pages that a local write fills in part, if the kernel has not locked them.
    fn drop_stuck(&mut self, at: usize, stuck: &BlockedInvalidation) {
        self.drop_pages(at, stuck.ino, &stuck.ranges);
        let Client { cache, kernel, .. } = &self.clients[at];
        if !kernel.page_cache.is_locked(stuck.ino) {
            let parts = cache.partial_pages(stuck.ino, stuck.range);
            self.drop_pages(at, stuck.ino, &parts);
        }
    }

    fn drop_pages(&mut self, at: usize, ino: u64, ranges: &[(u64, u64)]) {
        for &(offset, length) in ranges {
            let part = KernelInvalidation::Data { ino, offset, length };
            self.trace.push(format!("{}'s kernel forgets {}", name_of(at), words(&part)));
            self.clients[at].kernel.invalidate(&part);
        }
    }
}

impl BlockedInvalidation {
    fn stale(&self) -> KernelInvalidation {
        KernelInvalidation::Data { ino: self.ino, offset: self.range.0, length: self.range.1 }
    }
}
