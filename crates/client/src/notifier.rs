//! Tells the kernel to forget. See "Recall → invalidate → acknowledge" in docs/semantics.md.
//!
//! Dropping a name can wait for a request in its directory that we have not answered, and dropping pages for reads and
//! writes of them. So both are done by workers, which may get stuck and are left behind (`teller.rs`).
//!
//! What is told when all grants have ended goes first. It waits for no request, since nobody may answer any: what
//! is being told then, and waits, is left to its workers and told again behind it. So however a kernel is stuck while the
//! server is away, it forgets what it held. What is merely slow is waited for, and what no worker was left for is not told.
//!
//! Dropping all names would detach what is mounted below. So when the first such mount appears, the cache is told to let the
//! kernel hold no names under leases any more, and those that it holds are dropped once
//! (docs/decisions/0006-notification-levels.md). So it is when an overlay has a layer in the mount: it keeps dentries for as long as it
//! is mounted, and to the kernel each of them is stale after an epoch (`fuse_dentry_revalidate`), for good.

mod pages;
mod teller;
#[cfg(test)]
mod tests;

use crate::driver::Driver;
use crate::worker::Crew;
use nigh_cache::{Invalidation, Op, Stale};
use nigh_fuse::Notification;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use teller::Teller;

/// Something that the kernel is to forget for one reason.
struct Job {
    id: Invalidation,
    stale: VecDeque<Stale>,
    /// All grants have ended.
    first: bool,
    /// What is left of one that went first. Others need not wait for it: nobody counts on what it is about any more.
    behind: bool,
}

/// Two rows; the first goes first.
#[derive(Default)]
struct Jobs {
    first: VecDeque<Job>,
    rest: VecDeque<Job>,
}

/// What the kernel is yet to be told.
pub(crate) struct Notifier {
    jobs: Mutex<Jobs>,
    /// Can be read from when something was queued or it is to stop, until that was seen.
    wake: OwnedFd,
    stopped: AtomicBool,
    /// Can be read from when it is to stop.
    ended: OwnedFd,
    crew: Crew,
    /// An overlay may have its upper layer here.
    layered: AtomicBool,
    /// How often names were dropped all at once because one could not be dropped alone.
    pub epoch_fallbacks: AtomicU64,
}

fn is_named(stale: &Stale) -> bool {
    matches!(stale, Stale::Entry { .. } | Stale::Epoch(_))
}

impl Notifier {
    pub fn new() -> io::Result<Notifier> {
        Ok(Notifier {
            jobs: Mutex::default(),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stopped: AtomicBool::new(false),
            ended: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            crew: Crew::default(),
            layered: AtomicBool::new(false),
            epoch_fallbacks: AtomicU64::new(0),
        })
    }

    /// `first`: before all else that is yet to be told.
    pub fn queue(&self, id: Invalidation, stale: Vec<Stale>, first: bool) {
        let job = Job { id, stale: stale.into(), first, behind: false };
        let mut jobs = self.jobs.lock();
        if first {
            jobs.first.push_back(job);
        } else {
            jobs.rest.push_back(job);
        }
        drop(jobs);
        self.wake();
    }

    /// The kernel knows too many inodes: the cache says which it need not know.
    pub fn prune(&self) {
        self.wake();
    }

    /// A rename is to leave a whiteout. Overlayfs tries that when it is mounted with its upper layer here, in whatever mount namespace.
    pub fn note_layer(&self, op: &Op) {
        if matches!(op, Op::Rename { whiteout: true, .. }) && !self.layered.swap(true, Ordering::SeqCst) {
            self.wake();
        }
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.ended, &1_u64.to_ne_bytes());
        self.wake();
    }

    /// For others who wait for something, and are to stop when this does.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Fails only where the count is at its end: then it can be read from anyway.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Works off what is queued until stopped. `expires`: the kernel can be told to look a name up again without
    /// dropping it (`FUSE_HAS_EXPIRE_ONLY`, 7.38).
    pub fn run(&self, driver: &Arc<Driver>, expires: bool) {
        let mut teller = Teller::new(self, driver, expires);
        loop {
            // Before what is queued is looked at: what comes later can be read from again.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            loop {
                if let Some(job) = self.next(&mut teller) {
                    driver.pass_gate();
                    self.tell(&mut teller, job);
                } else if !self.tell_to_prune(driver) {
                    break;
                }
            }
            if self.is_stopped() {
                return;
            }
            teller.below.wait(self.wake.as_fd());
        }
    }

    /// One job; what is left of it goes on when there is nothing that goes first.
    fn tell(&self, teller: &mut Teller<'_>, job: Job) {
        let (id, behind) = (job.id, job.first || job.behind);
        let stale = teller.tell(job);
        if self.is_stopped() {
            return;
        }
        if stale.is_empty() {
            teller.driver.with(|core, now| core.cache.handle_invalidated(now, id));
            return;
        }
        let left = Job { id, stale, first: false, behind };
        let mut jobs = self.jobs.lock();
        if behind {
            jobs.rest.push_back(left);
        } else {
            jobs.rest.push_front(left);
        }
    }

    /// Has the kernel forget some inodes, when there is nothing else to tell, since nobody waits for that; whether there may be
    /// more.
    fn tell_to_prune(&self, driver: &Driver) -> bool {
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

    /// Whether what is being told is to be left.
    fn is_wanted(&self) -> bool {
        self.is_stopped() || !self.jobs.lock().first.is_empty()
    }

    fn next(&self, teller: &mut Teller<'_>) -> Option<Job> {
        if self.is_stopped() {
            return None;
        }
        teller.below.look();
        let given_up = teller.give_up_names();
        let mut jobs = self.jobs.lock();
        if let Some((id, stale)) = given_up {
            jobs.rest.push_front(Job { id, stale, first: false, behind: false });
        }
        let Some(mut first) = jobs.first.pop_front() else { return jobs.rest.pop_front() };
        if !teller.drops_all() {
            // No epoch drops what the others were to drop, and they may wait.
            first
                .stale
                .extend(jobs.rest.iter().flat_map(|job| &job.stale).filter(|one| is_named(one)).cloned());
        }
        Some(first)
    }
}
