//! Tells the kernel to forget. See "Recall → invalidate → acknowledge" in docs/semantics.md.
//!
//! Dropping a name can wait for a request in its directory that we have not answered, so it is done by
//! a thread of its own; if that is stuck for more than [`PATIENCE`] all names are dropped at once, which
//! never waits, and the stuck call ends later, harmlessly.
//!
//! That would detach what is mounted below. So when the first such mount appears, the cache is told to let the
//! kernel hold no names under leases any more, and those that it holds are dropped once
//! (docs/decisions/0006-notification-levels.md).

#[cfg(test)]
mod tests;

use crate::below::Below;
use crate::driver::Driver;
use nigh_cache::{Invalidation, Stale};
use nigh_fuse::{Level, Notification, NotifyOutcome};
use nigh_types::Name;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_millis(5);
/// How long dropping data may take before it is asked what is in its way.
const LOOK_AGAIN: Duration = Duration::from_micros(500);
const ROOT: u64 = nigh_fuse::abi::ROOT_ID;

type Job = (Invalidation, Vec<Stale>);

/// What the kernel is yet to be told.
pub(crate) struct Notifier {
    jobs: Mutex<VecDeque<Job>>,
    /// Can be read from when something was queued or it is to stop, until that was seen.
    wake: OwnedFd,
    stopped: AtomicBool,
    /// How often names were dropped all at once because one could not be dropped alone.
    pub epoch_fallbacks: AtomicU64,
}

impl Notifier {
    pub fn new() -> io::Result<Notifier> {
        Ok(Notifier {
            jobs: Mutex::default(),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stopped: AtomicBool::new(false),
            epoch_fallbacks: AtomicU64::new(0),
        })
    }

    pub fn queue(&self, id: Invalidation, stale: Vec<Stale>) {
        self.jobs.lock().push_back((id, stale));
        self.wake();
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Fails only where the count is at its end: then it can be read from anyway.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Works off what is queued until stopped. `expires`: the kernel can be told to look a name up again without
    /// dropping it (`FUSE_HAS_EXPIRE_ONLY`, 7.38).
    pub fn run(&self, driver: &Arc<Driver>, expires: bool) {
        let below = Below::new(driver.mountpoint.get().cloned());
        let mut teller = Teller { notifier: self, driver, below, expires, names: None, pages: None };
        loop {
            // Before what is queued is looked at: what comes later can be read from again.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            teller.below.look();
            teller.give_up_names();
            while let Some((id, stale)) = self.next() {
                teller.below.look();
                teller.give_up_names();
                driver.pass_gate();
                teller.tell_all(id, stale);
                if !self.is_stopped() {
                    driver.with(|core, _| core.cache.handle_invalidated(id));
                }
            }
            if self.is_stopped() {
                return;
            }
            teller.below.wait(self.wake.as_fd());
        }
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    fn next(&self) -> Option<Job> {
        if self.is_stopped() { None } else { self.jobs.lock().pop_front() }
    }
}

/// A thread that tells the kernel what may get stuck, and its answers.
struct Worker<T> {
    todo: Sender<T>,
    done: Receiver<()>,
}

/// Drops names one by one.
type Names = Worker<(u64, Vec<u8>)>;

/// Drops ranges of a file: its number, and (offset, length).
type Pages = Worker<(u64, Vec<(u64, u64)>)>;

/// What the notifier's thread knows.
struct Teller<'a> {
    notifier: &'a Notifier,
    driver: &'a Arc<Driver>,
    below: Below,
    expires: bool,
    names: Option<Names>,
    pages: Option<Pages>,
}

impl Teller<'_> {
    /// Where something is mounted below: what the kernel holds of names goes, once.
    fn give_up_names(&mut self) {
        if self.below.is_empty() {
            return;
        }
        let Some((id, names)) = self.driver.with(|core, _| core.cache.handle_mounted_below()) else { return };
        self.driver.pass_gate();
        self.tell_all(id, names.into_iter().map(|(dir, name)| Stale::Entry { dir, name }).collect());
        if !self.notifier.is_stopped() {
            self.driver.with(|core, _| core.cache.handle_invalidated(id));
        }
    }

    fn tell_all(&mut self, id: Invalidation, stale: Vec<Stale>) {
        for one in stale {
            if self.notifier.is_stopped() {
                return;
            }
            match one {
                Stale::Attr { ino } => self.tell_attributes(ino),
                Stale::Data { ino, offset, length } => {
                    drop_data(self.driver, (id, ino), (offset, length), &mut self.pages);
                }
                Stale::Epoch(_) if self.below.is_empty() => {
                    self.send(&Notification::IncEpoch);
                }
                Stale::Epoch(names) => {
                    for (dir, name) in names {
                        self.tell_name(dir, &name);
                    }
                }
                Stale::Entry { dir, name } => self.tell_name(dir, &name),
            }
        }
    }

    /// Drops a name unless something is mounted at it or below it: that would be detached (measured). Such a
    /// name is looked up again, or goes with its timeout.
    fn tell_name(&mut self, dir: u64, name: &Name) {
        let stays = !self.below.is_empty() && {
            let path = self.driver.with(|core, _| core.cache.path_of(dir, name));
            path.is_none_or(|path| self.below.is_on_the_way(&path))
        };
        let parent = self.node(dir);
        if !stays {
            self.drop_name(parent, name.as_bytes());
        } else if self.expires {
            self.send(&Notification::InvalEntry { parent, name: name.as_bytes().into(), expire_only: true });
        }
    }

    /// If the kernel does not know the inode, an answer that brings it may still be on its way inside the
    /// kernel: dropping its name waits for that.
    fn tell_attributes(&mut self, ino: u64) {
        let attributes = Notification::attributes(self.node(ino));
        if self.send(&attributes) == Some(NotifyOutcome::Unknown)
            && let Some((dir, name)) = self.driver.home_of(ino)
        {
            self.drop_name(self.node(dir), name.as_bytes());
            self.send(&attributes);
        }
    }

    fn drop_name(&mut self, dir: u64, name: &[u8]) {
        let driver = self.driver;
        let worker = self.names.get_or_insert_with(|| {
            start(driver, |driver, (dir, name): (u64, Vec<u8>)| {
                send(driver, &Notification::entry(dir, &name));
            })
        });
        if worker.todo.send((dir, name.to_vec())).is_err() {
            return;
        }
        let epoch = driver.transport.level() == Level::All && self.below.is_empty();
        let in_time =
            if epoch { worker.done.recv_timeout(PATIENCE).is_ok() } else { worker.done.recv().is_ok() };
        if !in_time {
            self.notifier.epoch_fallbacks.fetch_add(1, Ordering::Relaxed);
            self.send(&Notification::IncEpoch);
            self.send(&Notification::contents(dir));
            self.names = None;
        }
    }

    fn node(&self, ino: u64) -> u64 {
        if ino == self.driver.root() { ROOT } else { ino }
    }

    fn send(&self, notification: &Notification<'_>) -> Option<NotifyOutcome> {
        send(self.driver, notification)
    }
}

/// Drops pages of a file. Dropping waits for the reads and writes that have these pages locked; those that we
/// know of are left out, since their answers may wait for our acknowledgement. One may have come that we did
/// not know of: then the call that is stuck is left behind, and the rest dropped by another.
fn drop_data(
    driver: &Arc<Driver>,
    (why, ino): (Invalidation, u64),
    range: (u64, u64),
    pages: &mut Option<Pages>,
) {
    let node = if ino == driver.root() { ROOT } else { ino };
    loop {
        let (open, (ranges, looked)) =
            driver.with(|core, _| (core.cache.is_open(ino), core.cache.droppable(why, ino, range)));
        if !open {
            return drop_ranges(driver, node, &ranges);
        }
        let worker = pages.get_or_insert_with(|| {
            start(driver, |driver, (node, ranges): (u64, Vec<_>)| drop_ranges(driver, node, &ranges))
        });
        if ranges.is_empty() || worker.todo.send((node, ranges)).is_err() {
            return;
        }
        let in_time = loop {
            match worker.done.recv_timeout(LOOK_AGAIN) {
                Ok(()) | Err(RecvTimeoutError::Disconnected) => break true,
                Err(RecvTimeoutError::Timeout)
                    if driver.with(|core, _| core.cache.is_in_the_way(why, ino, looked)) =>
                {
                    break false;
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        if in_time {
            return;
        }
        *pages = None;
    }
}

fn drop_ranges(driver: &Driver, node: u64, ranges: &[(u64, u64)]) {
    for &(offset, length) in ranges {
        let (offset, len) = (clamp(offset), clamp(length));
        send(driver, &Notification::InvalInode { ino: node, offset, len });
    }
}

fn start<T: Send + 'static>(driver: &Arc<Driver>, tell: impl Fn(&Driver, T) + Send + 'static) -> Worker<T> {
    let (todo, jobs) = channel::<T>();
    let (finished, done) = channel();
    let driver = Arc::clone(driver);
    thread::spawn(move || {
        for job in jobs {
            tell(&driver, job);
            if finished.send(()).is_err() {
                return;
            }
        }
    });
    Worker { todo, done }
}

fn send(driver: &Driver, notification: &Notification<'_>) -> Option<NotifyOutcome> {
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
