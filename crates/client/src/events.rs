//! What others change is told to programs that watch by inotify(7): see docs/decisions/0017-events.md.
//!
//! | room | what lives there |
//! | --- | --- |
//! | `watchers` | who watches what |
//! | `stage` | which change is told next, by whom, and what came of it |
//! | `player`, `command`, `play` | children that make the system calls, and what they are told to |
//! | `pretence` | what the kernel is told when such a call asks |

mod command;
mod play;
mod player;
mod pretence;
mod stage;
mod watchers;

use crate::driver::Driver;
use nigh_cache::Change;
use parking_lot::{Condvar, Mutex};
pub use play::play;
pub use player::Program;
#[cfg(test)]
pub(crate) use pretence::Part;
pub(crate) use pretence::{Pretence, Said};
use rustix::event::EventfdFlags;
use stage::Stage;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Changes that wait to be told.
const MOST_WAITING: usize = 65_536;
/// Who watches is looked at so often, or as seldom as makes it cost no more than one part in `SHARE` of a processor.
const LOOK: Duration = Duration::from_secs(1);
const LOOK_AT_LEAST: Duration = Duration::from_secs(15);
const SHARE: u32 = 100;

/// How watchers are told.
#[derive(Clone, Debug)]
pub struct EventsConfig {
    /// In every directory of which all names are in memory, not only in those that are watched.
    pub all: bool,
    /// This program, such that with a mount point and `MAJOR:MINOR` of its device behind the arguments it calls [`play`].
    pub program: Program,
}

/// What came of telling so far.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Changes that were told.
    pub replayed: AtomicU64,
    /// Not told: whoever mounted may not change that directory.
    pub refused: AtomicU64,
    /// Not told, for whatever other reason.
    pub lost: AtomicU64,
    /// Made again, since somebody had looked meanwhile.
    pub repeated: AtomicU64,
    /// Children that wait for something in the mount.
    pub stuck: AtomicU64,
}

/// One mount's telling.
pub(crate) struct Events {
    pub pretence: Pretence,
    pub counts: Counts,
    mode: Mutex<&'static str>,
    /// Each with its number.
    waiting: Mutex<VecDeque<(u64, Change)>>,
    /// Can be read from when something was queued or it is to stop.
    wake: OwnedFd,
    stopped: AtomicBool,
    looks: (Mutex<()>, Condvar),
}

impl Events {
    pub fn new() -> io::Result<Events> {
        Ok(Events {
            pretence: Pretence::default(),
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

    /// To be told in this order.
    pub fn queue(&self, changes: Vec<(u64, Change)>) {
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

    /// Fails only where the count is at its end: then it can be read from anyway.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Tells what is queued, until stopped.
    pub fn run(&self, driver: &Arc<Driver>, mountpoint: &Path, device: (u32, u32), config: EventsConfig) {
        let mut program = config.program;
        program.arguments.push(mountpoint.as_os_str().to_owned());
        program.arguments.push(format!("{}:{}", device.0, device.1).into());
        let mut stage = Stage::new(self, driver, program);
        while !self.is_stopped() {
            // Before what is queued is looked at: what comes later can be read from again.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            let queued = std::mem::take(&mut *self.waiting.lock());
            stage.take_in(queued);
            let played = stage.play();
            stage.wait(played);
        }
        stage.end();
    }

    /// Looks at who watches, until stopped.
    pub fn look(&self, driver: &Arc<Driver>, device: (u32, u32), all: bool) {
        *self.mode.lock() = if all { "on" } else { "auto" };
        let mut watched = std::collections::BTreeSet::new();
        while !self.is_stopped() {
            let begun = Instant::now();
            let now_watched = watchers::watched(device);
            // Where an inode lies may be known by now, and was not before; but nobody watched.
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
