//! Tells the kernel to forget. See "Recall → invalidate → acknowledge" in docs/semantics.md.
//!
//! Dropping a name can wait for a request in its directory that we have not answered, so it is done by
//! a thread of its own; if that is stuck for more than [`PATIENCE`] all names are dropped at once, which
//! never waits, and the stuck call ends later, harmlessly.

use crate::driver::Driver;
use nigh_cache::{Invalidation, Stale};
use nigh_fuse::{Level, Notification, NotifyOutcome};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_millis(5);
const ROOT: u64 = nigh_fuse::abi::ROOT_ID;

type Job = (Invalidation, Vec<Stale>);

/// What the kernel is yet to be told.
#[derive(Default)]
pub(crate) struct Notifier {
    jobs: Mutex<VecDeque<Job>>,
    arrived: Condvar,
    stopped: AtomicBool,
    /// Something is mounted below: names may not be dropped all at once.
    beside_mounts: AtomicBool,
    /// How often names were dropped all at once because one could not be dropped alone.
    pub epoch_fallbacks: AtomicU64,
}

/// A thread that drops names one by one, and its answers.
struct Names {
    todo: Sender<(u64, Vec<u8>)>,
    done: Receiver<()>,
}

impl Notifier {
    pub fn queue(&self, id: Invalidation, stale: Vec<Stale>) {
        self.jobs.lock().push_back((id, stale));
        self.arrived.notify_one();
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.arrived.notify_one();
    }

    /// Works off what is queued until stopped.
    pub fn run(&self, driver: &Arc<Driver>) {
        let mut names = None;
        while let Some((id, stale)) = self.next() {
            driver.pass_gate();
            let root = driver.root();
            let nested = driver.nested_mounts();
            self.beside_mounts.store(!nested.is_empty(), Ordering::Relaxed);
            for one in stale {
                if self.stopped.load(Ordering::Relaxed) {
                    return;
                }
                match one {
                    _ if nested.is_empty() => self.tell(driver, root, one, &mut names),
                    Stale::Epoch => {
                        for (dir, name) in driver.with(|core, _| core.cache.kernel_names()) {
                            self.tell_beside(driver, &nested, (dir, name), &mut names);
                        }
                    }
                    Stale::Entry { dir, name } => self.tell_beside(driver, &nested, (dir, name), &mut names),
                    one => self.tell(driver, root, one, &mut names),
                }
            }
            driver.with(|core, _| core.cache.handle_invalidated(id));
        }
    }

    fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        loop {
            if self.stopped.load(Ordering::Relaxed) {
                return None;
            }
            if let Some(job) = jobs.pop_front() {
                return Some(job);
            }
            self.arrived.wait(&mut jobs);
        }
    }

    fn tell(&self, driver: &Arc<Driver>, root: u64, stale: Stale, names: &mut Option<Names>) {
        let node = |ino: u64| if ino == root { ROOT } else { ino };
        match stale {
            Stale::Attr { ino } => self.tell_attributes(driver, root, ino, names),
            Stale::Data { ino, offset, length } => {
                let (offset, len) = (clamp(offset), clamp(length));
                send(driver, &Notification::InvalInode { ino: node(ino), offset, len });
            }
            Stale::Epoch => {
                send(driver, &Notification::IncEpoch);
            }
            Stale::Entry { dir, name } => self.drop_name(driver, node(dir), name.as_bytes(), names),
        }
    }

    /// Drops a name unless something is mounted at it or below it: that would be detached (measured). Such a name goes with its timeout.
    fn tell_beside(
        &self,
        driver: &Arc<Driver>,
        nested: &[Vec<Vec<u8>>],
        (dir, name): (u64, nigh_types::Name),
        names: &mut Option<Names>,
    ) {
        let path = driver.with(|core, _| core.cache.path_of(dir, &name));
        let leads_to_mount = path.is_none_or(|path| {
            nested.iter().any(|mount| {
                mount.len() >= path.len() && path.iter().zip(mount).all(|(a, b)| a.as_bytes() == b.as_slice())
            })
        });
        if !leads_to_mount {
            self.tell(driver, driver.root(), Stale::Entry { dir, name }, names);
        }
    }

    /// If the kernel does not know the inode, an answer that brings it may still be on its way inside the
    /// kernel: dropping its name waits for that.
    fn tell_attributes(&self, driver: &Arc<Driver>, root: u64, ino: u64, names: &mut Option<Names>) {
        let node = |ino: u64| if ino == root { ROOT } else { ino };
        let attributes = Notification::attributes(node(ino));
        if send(driver, &attributes) == Some(NotifyOutcome::Unknown)
            && let Some((dir, name)) = driver.home_of(ino)
        {
            self.drop_name(driver, node(dir), name.as_bytes(), names);
            send(driver, &attributes);
        }
    }

    fn drop_name(&self, driver: &Arc<Driver>, dir: u64, name: &[u8], names: &mut Option<Names>) {
        let worker = names.get_or_insert_with(|| start_names(driver));
        if worker.todo.send((dir, name.to_vec())).is_err() {
            return;
        }
        let epoch = driver.transport.level() == Level::All && !self.beside_mounts.load(Ordering::Relaxed);
        let in_time =
            if epoch { worker.done.recv_timeout(PATIENCE).is_ok() } else { worker.done.recv().is_ok() };
        if !in_time {
            self.epoch_fallbacks.fetch_add(1, Ordering::Relaxed);
            send(driver, &Notification::IncEpoch);
            send(driver, &Notification::contents(dir));
            *names = None;
        }
    }
}

fn start_names(driver: &Arc<Driver>) -> Names {
    let (todo, jobs) = channel::<(u64, Vec<u8>)>();
    let (finished, done) = channel();
    let driver = Arc::clone(driver);
    thread::spawn(move || {
        for (dir, name) in jobs {
            send(&driver, &Notification::entry(dir, &name));
            if finished.send(()).is_err() {
                return;
            }
        }
    });
    Names { todo, done }
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
