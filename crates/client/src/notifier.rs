//! Sends invalidations to the kernel. See "Recall → invalidate → acknowledge" in docs/semantics.md.
//!
//! Invalidation of a dentry can wait for an unanswered request in its directory, and invalidation of pages for reads
//! and writes of them. So worker threads send both; a worker may block, and is then abandoned (`thread.rs`).
//!
//! Invalidations for the end of all grants are urgent and go first. They wait for no request, since the server may be
//! unreachable. An invalidation that blocks at that time is left to its worker and repeated behind the urgent one. So
//! even a kernel with blocked requests drops its facts while the server is disconnected. The notifier waits for
//! invalidations that are merely slow; those for which no worker was free stay pending.
//!
//! Invalidation of all dentries (epoch) would detach mounts below the mount. So when the first such mount appears, the
//! cache stops giving the kernel entry timeouts under leases, and the kernel's dentries are invalidated once
//! (docs/decisions/0006-notification-levels.md). An overlay with a layer in the mount has this effect too: it keeps its
//! dentries while it is mounted, and for the kernel they stay stale after an epoch (`fuse_dentry_revalidate`).

mod pages;
#[cfg(test)]
mod tests;
mod thread;

use crate::driver::Driver;
use crate::worker::WorkerPool;
use nigh_cache::{InvalidationId, KernelInvalidation, NotifierJob, NotifierQueue, Op, Urgency};
use nigh_fuse::Notification;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use thread::NotifierThread;

/// Pending invalidations of the kernel.
pub(crate) struct Notifier {
    jobs: Mutex<NotifierQueue>,
    /// Readable when a job was queued or on stop, until it is read.
    wake: OwnedFd,
    stopped: AtomicBool,
    /// Readable on stop.
    ended: OwnedFd,
    crew: WorkerPool,
    /// Whether an overlay may have its upper layer here.
    has_overlay: AtomicBool,
    /// Number of epoch invalidations sent because a single dentry could not be invalidated in time.
    pub epoch_fallbacks: AtomicU64,
}

impl Notifier {
    pub fn new() -> io::Result<Notifier> {
        Ok(Notifier {
            jobs: Mutex::default(),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stopped: AtomicBool::new(false),
            ended: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            crew: WorkerPool::default(),
            has_overlay: AtomicBool::new(false),
            epoch_fallbacks: AtomicU64::new(0),
        })
    }

    /// Queues a job.
    pub fn queue(&self, id: InvalidationId, stale: Vec<KernelInvalidation>, urgency: Urgency) {
        self.jobs.lock().push(id, stale, urgency);
        self.wake();
    }

    /// The kernel caches too many inodes; the cache selects those to prune.
    pub fn prune(&self) {
        self.wake();
    }

    /// A rename with a whiteout. Overlayfs tries one when it is mounted with its upper layer here, in any mount
    /// namespace.
    pub fn note_overlay(&self, op: &Op) {
        if matches!(op, Op::Rename { whiteout: true, .. }) && !self.has_overlay.swap(true, Ordering::SeqCst) {
            self.wake();
        }
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.ended, &1_u64.to_ne_bytes());
        self.wake();
    }

    /// For other waiting threads that are to stop with the notifier.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Fails only if the counter is at its maximum; then it is readable anyway.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Processes the queue until stopped. `expires`: the kernel supports expiry of a dentry without invalidation
    /// (`FUSE_HAS_EXPIRE_ONLY`, 7.38).
    pub fn run(&self, driver: &Arc<Driver>, expires: bool) {
        let mut teller = NotifierThread::new(self, driver, expires);
        loop {
            // Before the queue is read: later jobs make it readable again.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            loop {
                if let Some(job) = self.next(&mut teller) {
                    driver.drain_replies();
                    self.process(&mut teller, job);
                } else if !self.prune_some(driver) {
                    break;
                }
            }
            if self.is_stopped() {
                return;
            }
            teller.submounts.wait(self.wake.as_fd());
        }
    }

    /// Processes one job; its rest continues after all urgent jobs.
    fn process(&self, teller: &mut NotifierThread<'_>, job: NotifierJob) {
        let left = teller.process(job);
        if self.is_stopped() {
            return;
        }
        let done = self.jobs.lock().finish(left);
        if let Some(id) = done {
            teller.driver.with(|core, now| core.cache.handle_invalidated(now, id));
        }
    }

    /// Prunes some kernel inodes when no invalidation is pending, since no acknowledgement waits for that. Returns
    /// whether there may be more.
    fn prune_some(&self, driver: &Driver) -> bool {
        if self.is_stopped() {
            return false;
        }
        let inos = driver.with(|core, _| core.cache.poll_prune());
        if inos.is_empty() {
            return false;
        }
        if let Err(error) = driver.transport.notify(&Notification::Prune { inos: inos.into() }) {
            tracing::debug!(target: "nigh::kernel", %error, "inodes are not pruned");
        }
        true
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Whether the current job must give way to an urgent one.
    fn must_yield(&self) -> bool {
        self.is_stopped() || self.jobs.lock().has_urgent()
    }

    fn next(&self, teller: &mut NotifierThread<'_>) -> Option<NotifierJob> {
        if self.is_stopped() {
            return None;
        }
        teller.submounts.refresh();
        let given_up = teller.invalidate_names_once();
        let mut jobs = self.jobs.lock();
        if let Some((id, stale)) = given_up {
            jobs.push_first(id, stale);
        }
        jobs.take_next(|| teller.can_use_epoch())
    }
}
