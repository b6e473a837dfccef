//! Dropping pages of files.
//!
//! Dropping waits for the reads and writes that have these pages locked; those that we know of are left out, since their
//! answers may wait for our acknowledgement, and nobody may answer them while the remote is away. One may have come that we did
//! not know of: then the worker that is stuck is left behind, and the rest dropped by another. A file's pages are told when they
//! are gone but for such; what is only slow is not.
//!
//! A page that an own write brings in part is left out too, but need not be locked: where the kernel had it whole it is not
//! (`fuse_fill_write_pages`), and would show what others change of it as it was. So each of these is tried by itself, until its worker
//! is seen to wait for the lock: then the page is not whole, and is read anew once the write is answered.

use super::teller::{PATIENCE, Progress, Teller};
use crate::worker::{Crew, Watch, Worker};
use nigh_cache::{Invalidation, Stale};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long dropping pages may take before it is asked what is in its way.
const LOOK_AGAIN: Duration = Duration::from_micros(500);
/// How often it is asked whether a page that is being written is locked.
const LOOK_AT_PART: Duration = Duration::from_micros(200);
/// Who sleeps in the kernel for so long waits for a lock that a request holds,
const LOCKED: Duration = Duration::from_millis(1);
/// and where stores into a map may be written back first, after so long, as those were heard of by then.
const LOCKED_AND_STORED: Duration = Duration::from_millis(5);
/// So many workers may wait for pages that are being written.
const MOST_LOCKED: usize = 24;
/// So many files that are not open are dropped together.
const AT_ONCE: usize = 256;

/// A file and what is to be dropped of it: its number, (offset, length); a length of 0: to the end.
pub(super) type File = (u64, (u64, u64));
/// Ranges of a file that are being dropped: its number, and (offset, length).
pub(super) type Ranges = (u64, Vec<(u64, u64)>);

/// What a worker is dropping.
pub(super) struct Dropping {
    worker: Worker<Vec<Ranges>>,
    files: Vec<File>,
    ranges: Vec<Ranges>,
}

/// Why a worker is waited for no more.
enum Ended {
    Done,
    /// A request of our own has pages locked.
    InTheWay,
    Slow,
    /// Something goes first, or all ends.
    Left,
}

pub(super) fn stale((ino, (offset, length)): File) -> Stale {
    Stale::Data { ino, offset, length }
}

impl Teller<'_> {
    /// A file, and with one that is not open those that come next and are not either: nothing of these can be locked now.
    pub(super) fn take_files(&self, first: File, rest: &mut VecDeque<Stale>) -> Vec<File> {
        let mut files = vec![first];
        self.driver.with(|core, _| {
            let mut next = first.0;
            while files.len() < AT_ONCE
                && !core.cache.is_open(next)
                && let Some(&Stale::Data { ino, offset, length }) = rest.front()
                && !core.cache.is_open(ino)
            {
                rest.pop_front();
                files.push((ino, (offset, length)));
                next = ino;
            }
        });
        files
    }

    /// Drops pages of files. Those for which there is no worker are noted as untold. An error: the job is left, with these.
    pub(super) fn drop_pages(
        &mut self,
        progress: &mut Progress,
        mut files: Vec<File>,
    ) -> Result<(), Vec<File>> {
        let id = progress.id;
        let mut most = progress.most();
        loop {
            let ranges: Vec<Ranges> = self.driver.with(|core, _| {
                let all = files.iter().map(|(ino, range)| (*ino, core.cache.droppable(id, *ino, *range)));
                all.filter(|(_, ranges)| !ranges.is_empty()).collect()
            });
            if ranges.is_empty() {
                return self.drop_parts(progress, files);
            }
            let idle = self.pages.take_if(|_| self.notifier.crew.holds_to(most));
            let Some(worker) = idle.or_else(|| self.start_pages(most)) else {
                progress.untold.extend(files.into_iter().map(stale));
                return Ok(());
            };
            worker.give(ranges.iter().map(|(ino, ranges)| (self.node(*ino), ranges.clone())).collect());
            let dropping = Dropping { worker, files, ranges };
            match self.wait_for(progress, &dropping, progress.first.then_some(PATIENCE)) {
                Ended::Done => {
                    self.pages = Some(dropping.worker);
                    return self.drop_parts(progress, dropping.files);
                }
                Ended::Slow => {
                    let files = dropping.files.clone();
                    progress.slow.push_back(dropping);
                    return self.drop_parts(progress, files);
                }
                Ended::Left => return Err(dropping.files),
                Ended::InTheWay => files = dropping.files,
            }
            // Each store into a map that is not written back stops one: others need some too.
            most = Crew::COMMON;
        }
    }

    /// Drops pages that own writes bring in part, but for those that are locked. An error: the job is left, with these.
    fn drop_parts(&mut self, progress: &Progress, files: Vec<File>) -> Result<(), Vec<File>> {
        let parts: Vec<File> = self.driver.with(|core, _| {
            let parts = |&(ino, range): &File| {
                core.cache.partly_written(ino, range).into_iter().map(move |part| (ino, part))
            };
            files.iter().flat_map(parts).collect()
        });
        for part in parts {
            // Who waits for its lock since an earlier try drops it as soon as that is free.
            self.locked.retain(|(_, worker)| !worker.is_done());
            if self.locked.iter().any(|(locked, _)| *locked == part) {
                continue;
            }
            let idle = self.pages.take();
            let start = || self.start_pages(progress.most()).filter(|_| self.locked.len() < MOST_LOCKED);
            let Some(worker) = idle.or_else(start) else {
                tracing::debug!(target: "nigh::kernel", ino = part.0, "no thread to drop a page with that is being written");
                self.driver.with(|core, _| core.cache.keeps_part(part.0));
                continue;
            };
            let (ino, range) = part;
            worker.give(vec![(self.node(ino), vec![range])]);
            let (mut watch, mut is_left) = (Watch::new(), false);
            let is_done = worker.wait(LOOK_AT_PART, || {
                is_left = self.is_wanted(progress.first);
                is_left || self.is_locked(&mut watch, worker.thread(), progress.id, part)
            });
            match is_done {
                true => self.pages = Some(worker),
                false => self.locked.push((part, worker)),
            }
            if is_left {
                return Err(files);
            }
        }
        Ok(())
    }

    /// Whether a thread that drops a part waits for an own write that has it locked. What was stored into a map of it goes to the remote
    /// before it is dropped for a recall, and holds nobody up (0008, rule 10).
    fn is_locked(&self, watch: &mut Watch, thread: u32, id: Invalidation, (ino, part): File) -> bool {
        let sleeps = watch.sleeps_for(thread);
        if sleeps < LOCKED {
            return false;
        }
        let (is_out, may_be) = self.driver.with(|core, _| core.cache.stores_into(id, ino, part));
        !is_out && (!may_be || sleeps >= LOCKED_AND_STORED)
    }

    /// Waits for what was slow, all else being told. What is left for something else that goes first counts as untold.
    pub(super) fn wait_for_slow(&mut self, progress: &mut Progress) {
        while let Some(dropping) = progress.slow.pop_front() {
            match self.wait_for(progress, &dropping, None) {
                Ended::Done => self.pages = Some(dropping.worker),
                Ended::InTheWay => {
                    if let Err(left) = self.drop_pages(progress, dropping.files) {
                        progress.untold.extend(left.into_iter().map(stale));
                    }
                }
                Ended::Slow | Ended::Left => progress.untold.extend(dropping.files.into_iter().map(stale)),
            }
        }
    }

    /// With a `limit` it is slow beyond that.
    fn wait_for(&self, progress: &Progress, dropping: &Dropping, limit: Option<Duration>) -> Ended {
        let since = Instant::now();
        let mut ended = Ended::Done;
        let look = || {
            let is_left = self.is_wanted(limit.is_some());
            ended = match limit {
                _ if is_left => Ended::Left,
                _ if self.may_leave(progress) && self.is_in_the_way(progress, dropping) => Ended::InTheWay,
                Some(limit) if since.elapsed() >= limit => Ended::Slow,
                _ => return false,
            };
            true
        };
        if dropping.worker.wait(LOOK_AGAIN, look) { Ended::Done } else { ended }
    }

    /// Whether another worker could go on. What goes first, and what is left of it, waits for no request in any case.
    fn may_leave(&self, progress: &Progress) -> bool {
        progress.first || progress.behind || self.notifier.crew.has_room(Crew::COMMON)
    }

    fn is_in_the_way(&self, progress: &Progress, dropping: &Dropping) -> bool {
        self.driver.with(|core, _| {
            // The page of a symlink's target is locked while that is asked for, and no symlink is open.
            let locked = |(ino, ranges): &Ranges| core.cache.is_in_the_way(progress.id, *ino, ranges);
            dropping.ranges.iter().any(locked)
        })
    }
}
