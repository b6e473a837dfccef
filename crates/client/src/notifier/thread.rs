//! The notifier's thread: the order of invalidations, and the limits on waiting for them.
//!
//! An invalidation counts as done when the facts are gone from the kernel, or when it waits for a local request that
//! waits for the remote: then its worker finishes it after the reply.
//!
//! | invalidation | longest wait |
//! | --- | --- |
//! | a dentry, with epochs | [`PATIENCE`] while its directory is locked, [`STARVED`] otherwise; then an epoch |
//! | a dentry, without epochs | [`PATIENCE`]; then its worker also gets the later dentries of that directory, and the
//! job waits for all such workers at its end, unless an urgent job comes |
//! | pages (`pages.rs`) | until a local read or write is seen to hold them locked, or an urgent job comes; then the
//! worker finishes alone |
//! | an urgent one | [`PATIENCE`] each; the job waits at its end for those that do not wait for the remote |
//!
//! Invalidations without a free worker are sent later, and stay unacknowledged until then.

use super::Notifier;
use super::pages::{File, PageDrop, Ranges};
use crate::driver::Driver;
use crate::host::Submounts;
use crate::revalidations::{NameKey, Revalidation};
use crate::worker::{SleepWatch, Worker, WorkerPool};
use nigh_cache::{InvalidationId, KernelInvalidation, NotifierJob};
use nigh_fuse::{Level, Notification, NotifyOutcome};
use nigh_types::{Bug, Name, planted};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub(super) const PATIENCE: Duration = Duration::from_millis(5);
/// Longest wait, and interval of checks, for a worker that does not sleep in the kernel.
const STARVED: Duration = Duration::from_millis(50);
const STARVED_IN_ALL: Duration = Duration::from_millis(200);
const LOOK: Duration = Duration::from_millis(1);
/// An urgent job waits no longer than this for a directory with lookups that a rename(2) may have locked.
const RENAMES: Duration = Duration::from_millis(100);
/// Interval at which to look for free workers.
const AGAIN: Duration = Duration::from_millis(20);
/// Longest wait of one job for GETATTR replies.
const ANSWERS: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// A number that no thread has.
const NO_THREAD: u32 = u32::MAX;
pub(super) const ROOT: u64 = nigh_fuse::abi::ROOT_ID;

/// A dentry to invalidate, and the inode whose attributes are invalidated after it; with the time until which to wait
/// for GETATTR requests on this inode.
struct DentryJob {
    parent: u64,
    name: Vec<u8>,
    /// Expire the dentry: open files under it stay reachable, and the kernel looks it up again.
    expire_only: bool,
    then: Option<(u64, Instant)>,
}

/// State of the notifier's thread.
pub(super) struct NotifierThread<'a> {
    pub(super) notifier: &'a Notifier,
    pub driver: &'a Arc<Driver>,
    pub submounts: Submounts,
    expires: bool,
    names: Option<Worker<DentryJob>>,
    pub(super) pages: Option<Worker<Vec<Ranges>>>,
    /// Pages that were locked by local writes when their invalidation was tried, and the workers that wait for them.
    pub(super) locked: Vec<(File, Worker<Vec<Ranges>>)>,
}

/// Progress of one job.
pub(super) struct Progress {
    pub id: InvalidationId,
    pub is_urgent: bool,
    pub is_leftover_of_urgent: bool,
    /// End of the wait for callers of GETATTR; one for the whole job, because others wait for its invalidations.
    until: Instant,
    /// Whether the invalidation being sent is a copy of another job's.
    is_copy: bool,
    /// Remaining time to wait for threads that apply LOOKUP replies.
    patience: Duration,
    /// Remaining time to wait for workers that wait for a processor, over all names.
    starved: Duration,
    /// Whether an epoch was sent in place of a dentry invalidation that would have blocked.
    epoch_sent: bool,
    /// Directories with blocked dentry invalidations: the worker, and how many it has.
    blocked: BTreeMap<u64, (Worker<DentryJob>, u64)>,
    /// The names given to these workers; and the copies.
    late_names: Vec<KernelInvalidation>,
    late_copies: Vec<KernelInvalidation>,
    /// Inodes unknown to the kernel; a reply with the inode may still be in flight inside the kernel.
    unknown: Vec<u64>,
    /// In an urgent job: slow page invalidations.
    pub slow: VecDeque<PageDrop>,
    /// Invalidations without a free worker; and copies.
    pub untold: VecDeque<KernelInvalidation>,
    untold_copies: VecDeque<KernelInvalidation>,
}

impl Progress {
    /// Most workers that may exist when this job starts one for an invalidation that may block.
    pub fn most(&self) -> u64 {
        if self.is_leftover_of_urgent { WorkerPool::FOR_RETRIES } else { WorkerPool::ALL }
    }

    /// Records a name that was given to the worker of a locked directory.
    fn note_late(&mut self, one: KernelInvalidation) {
        if self.is_copy { self.late_copies.push(one) } else { self.late_names.push(one) }
    }
}

impl NotifierThread<'_> {
    pub fn new<'a>(notifier: &'a Notifier, driver: &'a Arc<Driver>, expires: bool) -> NotifierThread<'a> {
        let submounts = driver.submounts();
        NotifierThread { notifier, driver, submounts, expires, names: None, pages: None, locked: Vec::new() }
    }

    /// Whether the kernel can invalidate all dentries at once.
    pub fn can_use_epoch(&self) -> bool {
        self.driver.transport.level() == Level::All && !self.has_submount_or_overlay()
    }

    /// Returns whether an epoch would detach mount points, or dentries that an overlay keeps.
    fn has_submount_or_overlay(&self) -> bool {
        !self.submounts.is_empty()
            || self.submounts.has_layer()
            || self.notifier.has_overlay.load(Ordering::SeqCst)
    }

    /// If dentries are in use: invalidates the kernel's names one by one, once.
    pub fn invalidate_names_once(&mut self) -> Option<(InvalidationId, VecDeque<KernelInvalidation>)> {
        if !self.has_submount_or_overlay() {
            return None;
        }
        let (id, names) = self.driver.with(|core, _| core.cache.handle_mounted_below())?;
        Some((id, names.into_iter().map(|(dir, name)| KernelInvalidation::Entry { dir, name }).collect()))
    }

    /// Sends what it can. Returns the job with what is left to send; after an interruption by an urgent job that includes
    /// what was not tried.
    pub fn process(&mut self, mut job: NotifierJob) -> NotifierJob {
        let mut progress = Progress {
            id: job.id,
            is_urgent: job.is_urgent(),
            is_leftover_of_urgent: job.is_leftover_of_urgent(),
            until: Instant::now() + ANSWERS,
            is_copy: false,
            patience: PATIENCE,
            starved: STARVED_IN_ALL,
            epoch_sent: false,
            blocked: BTreeMap::new(),
            late_names: Vec::new(),
            late_copies: Vec::new(),
            unknown: Vec::new(),
            slow: VecDeque::new(),
            untold: VecDeque::new(),
            untold_copies: VecDeque::new(),
        };
        while let Some(one) = job.stale.pop_front() {
            if self.must_yield(progress.is_urgent) {
                job.stale.push_front(one);
                break;
            }
            if let (KernelInvalidation::Attr { ino } | KernelInvalidation::Data { ino, .. }, false) =
                (&one, progress.is_urgent)
            {
                wait_for_readers(self.driver, *ino, progress.until, || self.notifier.must_yield());
            }
            if let KernelInvalidation::Data { ino, offset, length } = one {
                let files = self.take_files((ino, (offset, length)), &mut job.stale);
                if let Err(left) = self.drop_pages(&mut progress, files) {
                    left.into_iter().rev().for_each(|file| job.stale.push_front(super::pages::stale(file)));
                    break;
                }
            } else {
                self.invalidate(&mut progress, &one);
            }
        }
        self.invalidate_unknown(&mut progress);
        self.send_copies(&mut progress, &mut job.copies);
        self.wait_for_slow(&mut progress);
        if !self.wait_for_blocked(&progress) {
            job.stale.extend(std::mem::take(&mut progress.late_names));
            job.copies.extend(std::mem::take(&mut progress.late_copies));
        }
        job.stale.append(&mut progress.untold);
        job.copies.append(&mut progress.untold_copies);
        let is_done = job.stale.is_empty() && job.copies.is_empty();
        if !is_done && !self.notifier.must_yield() {
            std::thread::sleep(AGAIN);
        }
        job
    }

    fn send_copies(&mut self, progress: &mut Progress, copies: &mut VecDeque<KernelInvalidation>) {
        progress.is_copy = true;
        while !self.must_yield(progress.is_urgent)
            && let Some(one) = copies.pop_front()
        {
            self.invalidate(progress, &one);
        }
    }

    /// Whether the job must give way.
    pub(super) fn must_yield(&self, first: bool) -> bool {
        if first { self.notifier.is_stopped() } else { self.notifier.must_yield() }
    }

    fn invalidate(&mut self, progress: &mut Progress, one: &KernelInvalidation) {
        match one {
            KernelInvalidation::Attr { ino } => self.invalidate_attrs(progress, *ino),
            KernelInvalidation::AllDentries(_) if !self.has_submount_or_overlay() => {
                self.send(&Notification::IncEpoch);
            }
            KernelInvalidation::AllDentries(names) => {
                names.iter().for_each(|(dir, name)| self.invalidate_name(progress, *dir, name));
            }
            KernelInvalidation::Entry { dir, name } => self.invalidate_name(progress, *dir, name),
            KernelInvalidation::RemovedDentry { dir, name } => self.drop_removed_name(progress, *dir, name),
            // See `pages.rs`.
            KernelInvalidation::Data { .. } => {}
        }
    }

    /// Invalidates a dentry unless it is a mount point or leads to one: the invalidation would detach that mount
    /// (measured). Such a dentry is expired, or its timeout ends it.
    fn invalidate_name(&mut self, progress: &mut Progress, dir: u64, name: &Name) {
        let parent = self.node(dir);
        if !self.leads_to_mount(dir, name) {
            self.drop_name(progress, (dir, name), None);
        } else if self.expires {
            self.send(&Notification::InvalEntry { parent, name: name.as_bytes().into(), expire_only: true });
        }
    }

    /// Nothing depends on this invalidation, since the dentry is already expired. If the directory is locked, its
    /// worker does it, or it is skipped.
    fn drop_removed_name(&mut self, progress: &mut Progress, dir: u64, name: &Name) {
        if self.leads_to_mount(dir, name)
            || progress.blocked.contains_key(&dir)
            || !self.driver.with(|core, _| core.cache.is_dentry_removed(dir, name))
        {
            return;
        }
        let (parent, name) = (self.node(dir), name.as_bytes().to_vec());
        let Some(worker) = self.worker(progress) else { return };
        worker.give(DentryJob { parent, name, expire_only: false, then: None });
        if is_done_in_time(&worker, &mut progress.starved) {
            self.names = Some(worker);
        }
    }

    /// Whether a name is a mount point or leads to one.
    fn leads_to_mount(&self, dir: u64, name: &Name) -> bool {
        !self.submounts.is_empty() && {
            let path = self.driver.with(|core, _| core.cache.path_of(dir, name));
            path.is_none_or(|path| self.submounts.leads_to_mount(&path))
        }
    }

    fn worker(&mut self, progress: &Progress) -> Option<Worker<DentryJob>> {
        let most = progress.most();
        let idle = self.names.take_if(|_| self.notifier.crew.is_within(most));
        idle.or_else(|| self.start_names(most))
    }

    /// If the kernel does not know the inode, a reply with the inode may still be in flight inside the kernel. An
    /// invalidation of its dentry waits for this reply.
    fn invalidate_attrs(&mut self, progress: &mut Progress, ino: u64) {
        let attributes = Notification::attributes(self.node(ino));
        if self.send(&attributes) != Some(NotifyOutcome::Unknown) {
            return;
        }
        if progress.is_urgent {
            progress.unknown.push(ino);
        } else if let Some((dir, name)) = self.driver.parent_entry_of(ino) {
            self.drop_name(progress, (dir, &name), Some(ino));
            self.send(&attributes);
        }
    }

    /// `invalidate_attrs` for unknown inodes of an urgent job, after all that cannot block.
    fn invalidate_unknown(&mut self, progress: &mut Progress) {
        for ino in std::mem::take(&mut progress.unknown) {
            match self.driver.parent_entry_of(ino) {
                Some((dir, name)) => self.drop_name(progress, (dir, &name), Some(ino)),
                None => {
                    self.send(&Notification::attributes(self.node(ino)));
                }
            }
        }
    }

    /// Returns whether to expire the dentry instead of invalidating it; waits until pending revalidations are applied. A process that has it open, executes it or has it as
    /// its working directory still finds it by path. Otherwise the dentry would be detached for good
    /// (`d_invalidate`).
    fn may_expire(&self, progress: &mut Progress, dir: u64, name: &Name) -> bool {
        if !self.expires {
            return false;
        }
        let key = NameKey::of(dir, name);
        let since = Instant::now();
        let is_meant = |reply: &Revalidation| {
            reply.name == key
                || self.driver.parent_entry_of(reply.ino).is_some_and(|(d, n)| d == dir && n == *name)
        };
        let applied = self.driver.revalidations.are_applied(since + progress.patience, is_meant);
        progress.patience = progress.patience.saturating_sub(since.elapsed());
        applied
    }

    fn drop_name(&mut self, progress: &mut Progress, (dir, name): (u64, &Name), then: Option<u64>) {
        let node = self.node(dir);
        let at_once = self.can_use_epoch() && !progress.is_urgent;
        if at_once && progress.epoch_sent {
            return;
        }
        let named = DentryJob {
            parent: node,
            name: name.as_bytes().to_vec(),
            expire_only: self.may_expire(progress, dir, name),
            then: then.map(|ino| (self.node(ino), progress.until)),
        };
        let entry = || KernelInvalidation::Entry { dir, name: name.clone() };
        let again = then.map_or_else(entry, |ino| KernelInvalidation::Attr { ino });
        if let Some((worker, waiting)) = progress.blocked.get_mut(&dir) {
            worker.give(named);
            *waiting += 1;
            return progress.note_late(again);
        }
        let worker = self.worker(progress);
        let in_time = worker.as_ref().is_some_and(|worker| {
            worker.give(named);
            is_done_in_time(worker, &mut progress.starved)
        });
        if in_time {
            self.names = worker;
        } else if at_once {
            progress.epoch_sent = true;
            self.notifier.epoch_fallbacks.fetch_add(1, Ordering::Relaxed);
            self.send(&Notification::IncEpoch);
            self.send(&Notification::contents(node));
        } else if let Some(worker) = worker {
            progress.blocked.insert(dir, (worker, 1));
            progress.note_late(again);
        } else if progress.is_copy {
            progress.untold_copies.push_back(again);
        } else {
            progress.untold.push_back(again);
        }
    }

    /// Waits for names of locked directories. An urgent job leaves them to their workers if a local request holds the
    /// lock, or may hold it. Returns false if another urgent job interrupts this one.
    fn wait_for_blocked(&self, progress: &Progress) -> bool {
        let since = Instant::now();
        let is_ours = |dir| {
            let is_late = since.elapsed() > RENAMES;
            self.driver
                .with(|core, _| core.cache.is_locked(dir) || is_late && core.cache.has_waiting_lookup())
        };
        progress.blocked.iter().all(|(dir, (worker, waiting))| {
            let give_up = || self.notifier.must_yield() || progress.is_urgent && is_ours(*dir);
            (0..*waiting).all(|_| worker.wait(PATIENCE, give_up)) || !self.notifier.must_yield()
        })
    }

    fn start_names(&self, most: u64) -> Option<Worker<DentryJob>> {
        self.notifier.crew.start(
            most,
            self.driver,
            |driver, DentryJob { parent, name, expire_only, then }: DentryJob| {
                send(driver, &Notification::InvalEntry { parent, name: name.into(), expire_only });
                if let Some((ino, until)) = then {
                    wait_for_readers(driver, ino, until, || false);
                    send(driver, &Notification::attributes(ino));
                }
            },
        )
    }

    pub(super) fn start_pages(&self, most: u64) -> Option<Worker<Vec<Ranges>>> {
        self.notifier.crew.start(most, self.driver, |driver, files: Vec<Ranges>| {
            files.iter().for_each(|(node, ranges)| drop_ranges(driver, *node, ranges));
        })
    }

    pub(super) fn node(&self, ino: u64) -> u64 {
        if ino == self.driver.root() { ROOT } else { ino }
    }

    fn send(&self, notification: &Notification<'_>) -> Option<NotifyOutcome> {
        send(self.driver, notification)
    }
}

/// Whether a worker has invalidated a dentry within [`PATIENCE`] of lock wait. On a busy machine the worker may only
/// wait for a processor, and an epoch instead would detach submounts.
fn is_done_in_time(worker: &Worker<DentryJob>, starved: &mut Duration) -> bool {
    let (since, mut watch) = (Instant::now(), SleepWatch::new());
    let most = STARVED.min(*starved);
    let done = worker.wait(LOOK, || {
        let is_late =
            watch.sleeps_for(worker.thread()).saturating_add(LOOK) >= PATIENCE || since.elapsed() >= most;
        is_late && !planted(Bug::WaitsForName)
    });
    *starved = starved.saturating_sub(since.elapsed());
    done
}

/// Waits for callers of GETATTR on a file. The queue has waited for those that asked before the job was queued;
/// others may have asked since, while earlier jobs ran.
fn wait_for_readers(driver: &Driver, ino: u64, until: Instant, give_up: impl Fn() -> bool) {
    let asked = || driver.with(|core, _| core.cache.has_size_waiter(ino));
    while Instant::now() < until && asked() && !give_up() {
        std::thread::sleep(LOOK_AGAIN);
    }
    driver.reply_barrier.wait(ino, NO_THREAD);
}

fn drop_ranges(driver: &Driver, node: u64, ranges: &[(u64, u64)]) {
    for &(offset, length) in ranges {
        let (offset, len) = (clamp(offset), clamp(length));
        send(driver, &Notification::InvalInode { ino: node, offset, len });
    }
}

/// Notifies the kernel for the inode's current nodeid and for former nodeids of its number, since either may be meant.
/// Unknown if one of them is unknown: a reply with it may be in flight inside the kernel.
fn send(driver: &Driver, notification: &Notification<'_>) -> Option<NotifyOutcome> {
    let numbers = notification.node().and_then(|ino| driver.nodeids_of(ino));
    let Some(numbers) = numbers else { return send_one(driver, notification) };
    let outcomes = numbers.iter().map(|number| send_one(driver, &notification.clone().of_node(*number)));
    of_all(&outcomes.flatten().collect::<Vec<_>>())
}

pub(super) fn of_all(outcomes: &[NotifyOutcome]) -> Option<NotifyOutcome> {
    outcomes.iter().find(|outcome| **outcome == NotifyOutcome::Unknown).or(outcomes.first()).copied()
}

fn send_one(driver: &Driver, notification: &Notification<'_>) -> Option<NotifyOutcome> {
    match driver.transport.notify(notification) {
        Ok(outcome) => Some(outcome),
        Err(error) => {
            tracing::debug!(target: "nigh::kernel", %error, ?notification, "not told");
            None
        }
    }
}

fn clamp(offset: u64) -> i64 {
    i64::try_from(offset).unwrap_or(i64::MAX)
}
