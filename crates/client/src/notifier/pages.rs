//! Invalidation of files' pages.
//!
//! Invalidation waits for the reads and writes that have the pages locked. The notifier skips those that the cache
//! knows, since their replies may wait for this client's acknowledgement, or the server may be unreachable. A request
//! unknown at the start may have come since: then the notifier abandons the blocked worker, and another invalidates
//! the rest. So a file counts as invalidated when all pages but the locked ones are gone; a merely slow invalidation
//! does not count.
//!
//! A page that a local write covers in part is skipped too, but need not be locked: if the kernel had the whole page,
//! it is unlocked (`fuse_fill_write_pages`) and would show other clients' changes as they were before. So the
//! notifier tries each such page alone until its worker waits for the page lock. Then the page is partial, and the
//! kernel reads it again after the reply to the write.

use super::thread::{NotifierThread, PATIENCE, Progress};
use crate::worker::{SleepWatch, Worker, WorkerPool};
use nigh_cache::{InvalidationId, KernelInvalidation};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Interval at which to check what blocks an invalidation of pages.
const LOOK_AGAIN: Duration = Duration::from_micros(500);
/// Interval at which to check whether a page under write is locked.
const LOOK_AT_PART: Duration = Duration::from_micros(200);
/// A worker asleep in the kernel for this long waits for a lock that a request holds,
const LOCKED: Duration = Duration::from_millis(1);
/// or for this long if the kernel may first write back a dirty mapping; the write-back would have arrived by then.
const LOCKED_AND_STORED: Duration = Duration::from_millis(5);
/// Most workers that may wait for pages under write.
const MOST_LOCKED: usize = 24;
/// Most unopened files in one batch.
const AT_ONCE: usize = 256;

/// A file's inode number, and the range to invalidate (offset, length); length 0: to the end.
pub(super) type File = (u64, (u64, u64));
/// A file's inode number, and the ranges (offset, length) under invalidation.
pub(super) type Ranges = (u64, Vec<(u64, u64)>);

/// The batch of a worker.
pub(super) struct PageDrop {
    worker: Worker<Vec<Ranges>>,
    files: Vec<File>,
    ranges: Vec<Ranges>,
}

/// Why a wait for a worker ended.
enum WaitEnd {
    Done,
    /// A local request has pages locked.
    Blocked,
    Slow,
    /// An urgent job is waiting, or the mount ends.
    Preempted,
}

/// Result of trying to invalidate one page.
#[derive(PartialEq, Eq)]
enum PageTry {
    Done,
    /// The page is locked: the worker sleeps.
    Locked,
    /// An urgent job is waiting, or the mount ends.
    Preempted,
}

pub(super) fn stale((ino, (offset, length)): File) -> KernelInvalidation {
    KernelInvalidation::Data { ino, offset, length }
}

impl NotifierThread<'_> {
    /// Takes a file; if it is not open, also the unopened files that follow it: none of their pages can be locked now.
    pub(super) fn take_files(&self, first: File, rest: &mut VecDeque<KernelInvalidation>) -> Vec<File> {
        let mut files = vec![first];
        self.driver.with(|core, _| {
            let mut next = first.0;
            while files.len() < AT_ONCE
                && !core.cache.is_open(next)
                && let Some(&KernelInvalidation::Data { ino, offset, length }) = rest.front()
                && !core.cache.is_open(ino)
            {
                rest.pop_front();
                files.push((ino, (offset, length)));
                next = ino;
            }
        });
        files
    }

    /// Invalidates pages of files. Files without a free worker count as unsent. Error: the job must give way, with
    /// these files left.
    pub(super) fn drop_pages(
        &mut self,
        progress: &mut Progress,
        mut files: Vec<File>,
    ) -> Result<(), Vec<File>> {
        let id = progress.id;
        let mut most = progress.most();
        loop {
            let ranges: Vec<Ranges> = self.driver.with(|core, _| {
                let all =
                    files.iter().map(|(ino, range)| (*ino, core.cache.droppable_ranges(id, *ino, *range)));
                all.filter(|(_, ranges)| !ranges.is_empty()).collect()
            });
            if ranges.is_empty() {
                return self.drop_partial_pages(progress, files);
            }
            let idle = self.pages.take_if(|_| self.notifier.crew.is_within(most));
            let Some(worker) = idle.or_else(|| self.start_pages(most)) else {
                progress.untold.extend(files.into_iter().map(stale));
                return Ok(());
            };
            worker.give(ranges.iter().map(|(ino, ranges)| (self.node(*ino), ranges.clone())).collect());
            let dropping = PageDrop { worker, files, ranges };
            match self.wait_for(progress, &dropping, progress.is_urgent.then_some(PATIENCE)) {
                WaitEnd::Done => {
                    self.pages = Some(dropping.worker);
                    return self.drop_partial_pages(progress, dropping.files);
                }
                WaitEnd::Slow => {
                    let files = dropping.files.clone();
                    progress.slow.push_back(dropping);
                    return self.drop_partial_pages(progress, files);
                }
                WaitEnd::Preempted => return Err(dropping.files),
                WaitEnd::Blocked => files = dropping.files,
            }
            // Each dirty mapping that is not written back blocks a worker: keep some for other invalidations.
            most = WorkerPool::FOR_RETRIES;
        }
    }

    /// Invalidates pages that local writes cover in part, except locked ones. Error: the job must give way, with
    /// these files left.
    fn drop_partial_pages(&mut self, progress: &Progress, files: Vec<File>) -> Result<(), Vec<File>> {
        let parts: Vec<File> = self.driver.with(|core, _| {
            let parts = |&(ino, range): &File| {
                core.cache.partial_pages(ino, range).into_iter().map(move |part| (ino, part))
            };
            files.iter().flat_map(parts).collect()
        });
        for part in parts {
            if !self.drop_partial_page(progress, part) {
                return Err(files);
            }
        }
        Ok(())
    }

    /// Invalidates a page unless it is seen to be locked: then its worker invalidates it once the lock is free. Returns
    /// false if the job must give way.
    fn drop_partial_page(&mut self, progress: &Progress, part: File) -> bool {
        self.locked.retain(|(_, worker)| !worker.is_done());
        // A worker of an earlier try may have come too late for what the kernel has read since, and may have been woken
        // without having run: it counts only while it sleeps.
        if let Some(at) = self.locked.iter().position(|(locked, _)| *locked == part) {
            let (_, earlier) = self.locked.swap_remove(at);
            match self.try_partial_page(progress, part, earlier) {
                PageTry::Done => {}
                tried => return tried == PageTry::Locked,
            }
        }
        let idle = self.pages.take();
        let start = || self.start_pages(progress.most()).filter(|_| self.locked.len() < MOST_LOCKED);
        let Some(worker) = idle.or_else(start) else {
            tracing::debug!(target: "nigh::kernel", ino = part.0, "no thread to drop a page with that is being written");
            self.driver.with(|core, _| core.cache.note_not_dropped(part.0));
            return true;
        };
        worker.give(vec![(self.node(part.0), vec![part.1])]);
        self.try_partial_page(progress, part, worker) != PageTry::Preempted
    }

    /// Waits until a worker has invalidated a page or is seen to wait for its lock. A worker that is not done is kept in
    /// `locked`.
    fn try_partial_page(&mut self, progress: &Progress, part: File, worker: Worker<Vec<Ranges>>) -> PageTry {
        let (mut watch, mut is_left) = (SleepWatch::new(), false);
        let is_done = worker.wait(LOOK_AT_PART, || {
            is_left = self.must_yield(progress.is_urgent);
            is_left || self.is_locked(&mut watch, worker.thread(), progress.id, part)
        });
        if is_done {
            self.pages = Some(worker);
            return PageTry::Done;
        }
        self.locked.push((part, worker));
        if is_left { PageTry::Preempted } else { PageTry::Locked }
    }

    /// Whether a worker waits for a local write that has the page locked. A recall's invalidation of a dirty mapped
    /// page sends its write-back to the remote first, and that blocks no other client (0008, rule 10).
    fn is_locked(&self, watch: &mut SleepWatch, thread: u32, id: InvalidationId, (ino, part): File) -> bool {
        let sleeps = watch.sleeps_for(thread);
        if sleeps < LOCKED {
            return false;
        }
        let (is_out, may_be) = self.driver.with(|core, _| core.cache.writeback_overlaps(id, ino, part));
        !is_out && (!may_be || sleeps >= LOCKED_AND_STORED)
    }

    /// Waits for slow invalidations after all others are sent. Those that an urgent job interrupts count as unsent.
    pub(super) fn wait_for_slow(&mut self, progress: &mut Progress) {
        while let Some(dropping) = progress.slow.pop_front() {
            match self.wait_for(progress, &dropping, None) {
                WaitEnd::Done => self.pages = Some(dropping.worker),
                WaitEnd::Blocked => {
                    if let Err(left) = self.drop_pages(progress, dropping.files) {
                        progress.untold.extend(left.into_iter().map(stale));
                    }
                }
                WaitEnd::Slow | WaitEnd::Preempted => {
                    progress.untold.extend(dropping.files.into_iter().map(stale))
                }
            }
        }
    }

    /// Waits for a worker; beyond `limit` it counts as slow.
    fn wait_for(&self, progress: &Progress, dropping: &PageDrop, limit: Option<Duration>) -> WaitEnd {
        let since = Instant::now();
        let mut ended = WaitEnd::Done;
        let look = || {
            let is_left = self.must_yield(limit.is_some());
            ended = match limit {
                _ if is_left => WaitEnd::Preempted,
                _ if self.may_leave(progress) && self.is_in_the_way(progress, dropping) => WaitEnd::Blocked,
                Some(limit) if since.elapsed() >= limit => WaitEnd::Slow,
                _ => return false,
            };
            true
        };
        if dropping.worker.wait(LOOK_AGAIN, look) { WaitEnd::Done } else { ended }
    }

    /// Whether another worker could continue. An urgent job and its rest never wait for a request.
    fn may_leave(&self, progress: &Progress) -> bool {
        progress.is_urgent
            || progress.is_leftover_of_urgent
            || self.notifier.crew.has_room(WorkerPool::FOR_RETRIES)
    }

    fn is_in_the_way(&self, progress: &Progress, dropping: &PageDrop) -> bool {
        self.driver.with(|core, _| {
            // The page of a symlink's target is locked during READLINK, and no symlink is open.
            let locked = |(ino, ranges): &Ranges| core.cache.blocks_drop(progress.id, *ino, ranges);
            dropping.ranges.iter().any(locked)
        })
    }
}
