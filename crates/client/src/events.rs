//! inotify(7) events for changes by other clients: replays them in the mount. See docs/decisions/0017-events.md.
//!
//! | module | contents |
//! | --- | --- |
//! | `scheduler` | scheduling of replays, and their results |
//! | `replay_process`, `command`, `replay_child` | child processes that make the system calls, and their protocol |
//! | `replay_filter` | replies to the requests of replays |

mod command;
mod replay_child;
mod replay_filter;
mod replay_process;
mod scheduler;

use crate::driver::Driver;
use nigh_cache::RemoteChange;
use parking_lot::{Condvar, Mutex};
pub use replay_child::run_replay_child;
#[cfg(test)]
pub(crate) use replay_filter::ReplayedChange;
pub(crate) use replay_filter::{ReplayFilter, ReplayReply};
pub use replay_process::Program;
use rustix::event::EventfdFlags;
use scheduler::Scheduler;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Most changes that wait for replay.
const MOST_WAITING: usize = 65_536;
/// Interval of the search for watches, longer if the search would take more than 1/`SHARE` of a processor.
const LOOK: Duration = Duration::from_secs(1);
const LOOK_AT_LEAST: Duration = Duration::from_secs(15);
const SHARE: u32 = 100;

/// Configuration of inotify events.
#[derive(Clone, Debug)]
pub struct EventsConfig {
    /// In every directory with a complete listing in memory, not only in watched ones.
    pub all: bool,
    /// This program; with a mount point and `MAJOR:MINOR` of its device behind the arguments it must call
    /// [`run_replay_child`].
    pub program: Program,
}

/// Counters of replays.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Changes that were replayed.
    pub replayed: AtomicU64,
    /// Not replayed: the user of the mount has no permission to change the directory.
    pub refused: AtomicU64,
    /// Not replayed, for any other reason.
    pub lost: AtomicU64,
    /// Replays repeated because another lookup interfered.
    pub repeated: AtomicU64,
    /// Children that wait for a lock or reply in the mount.
    pub stuck: AtomicU64,
}

/// inotify events of one mount.
pub(crate) struct Events {
    pub replay_filter: ReplayFilter,
    pub counts: Counts,
    mode: Mutex<&'static str>,
    /// Queued changes, each with its number.
    waiting: Mutex<VecDeque<(u64, RemoteChange)>>,
    /// Readable when a change was queued or on stop.
    wake: OwnedFd,
    stopped: AtomicBool,
    looks: (Mutex<()>, Condvar),
}

impl Events {
    pub fn new() -> io::Result<Events> {
        Ok(Events {
            replay_filter: ReplayFilter::default(),
            counts: Counts::default(),
            mode: Mutex::new("off"),
            waiting: Mutex::default(),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stopped: AtomicBool::new(false),
            looks: (Mutex::default(), Condvar::new()),
        })
    }

    /// For `nigh status`.
    pub fn mode(&self) -> &'static str {
        *self.mode.lock()
    }

    /// Queues changes for replay in this order.
    pub fn queue(&self, changes: Vec<(u64, RemoteChange)>) {
        if changes.is_empty() {
            return;
        }
        self.waiting.lock().extend(changes);
        self.wake();
    }

    #[cfg(test)]
    pub fn queued(&self) -> usize {
        self.waiting.lock().len()
    }

    pub fn stop(&self) {
        let _looks = self.looks.0.lock();
        self.stopped.store(true, Ordering::SeqCst);
        self.looks.1.notify_all();
        self.wake();
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Fails only if the counter is at its maximum; then it is readable anyway.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Replays queued changes until stopped.
    pub fn run(&self, driver: &Arc<Driver>, mountpoint: &Path, device: (u32, u32), config: EventsConfig) {
        let mut program = config.program;
        program.arguments.push(mountpoint.as_os_str().to_owned());
        program.arguments.push(format!("{}:{}", device.0, device.1).into());
        let mut stage = Scheduler::new(self, driver, program);
        while !self.is_stopped() {
            // Before the queue is read: later changes make it readable again.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            let queued = std::mem::take(&mut *self.waiting.lock());
            stage.enqueue(queued);
            let played = stage.run_due();
            stage.wait(played);
        }
        stage.end();
    }

    /// Searches for watches until stopped.
    pub fn look(&self, driver: &Arc<Driver>, device: (u32, u32), all: bool) {
        *self.mode.lock() = if all { "on" } else { "auto" };
        let mut watched = std::collections::BTreeSet::new();
        while !self.is_stopped() {
            let begun = Instant::now();
            let now_watched = driver.host.watched_inodes(device);
            // A parent may be known by now that was unknown before; without watches that does not matter.
            if all || !now_watched.is_empty() || now_watched != watched {
                watched = now_watched;
                driver.with(|core, now| core.cache.handle_watch(now, &watched, all));
            }
            let pause = begun.elapsed().saturating_mul(SHARE).clamp(LOOK, LOOK_AT_LEAST);
            let mut looks = self.looks.0.lock();
            if !self.is_stopped() {
                self.looks.1.wait_for(&mut looks, pause);
            }
        }
    }
}
