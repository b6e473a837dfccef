//! Locks, appends and writes by open descriptors, on a directory that continues while the server or the link fails:
//! what the checker's calls do not include (docs/decisions/0037-one-load.md). Each worker has files of its own, so it
//! knows the required result of each call, and reports at the end (docs/decisions/0009).
//!
//! Runs in a process of its own, which the caller may give up. It works until its standard input, which carries the
//! times of server kills, ends; then it checks everything once more, and prints one line of JSON. It fails with the
//! first wrong result.

mod locks;
mod records;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::race::stage::CallTimes;

#[derive(clap::Args)]
pub struct Options {
    /// The directory, as [`prepare`] made it.
    dir: PathBuf,
    /// Where the workers report their progress, on another filesystem.
    #[arg(long)]
    progress: Option<PathBuf>,
    /// Only report whether the locks of a load can be taken, from another mount of the directory.
    #[arg(long)]
    try_locks: bool,
}

/// Size of the file that is only read.
const GIVEN: u64 = 1 << 20;

/// Creates a load's files, without the mount.
pub fn prepare(dir: &Path) -> io::Result<()> {
    for name in ["lock-flock", "lock-range"] {
        fs::write(dir.join(name), b"")?;
    }
    fs::write(
        dir.join("given"),
        (0..GIVEN / 8).flat_map(|word| (word * 8).to_le_bytes()).collect::<Vec<u8>>(),
    )
}

/// Returns the time, in ns since boot.
#[must_use]
pub fn moment() -> u64 {
    let at = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(at.tv_sec * 1_000_000_000 + at.tv_nsec).unwrap_or(0)
}

/// The line for a kill on the load's standard input; two values of [`moment`].
#[must_use]
pub fn kill_line(began: u64, ended: u64) -> String {
    format!("{began} {ended}\n")
}

/// State shared by all workers.
#[derive(Default)]
pub struct Shared {
    stop: AtomicBool,
    kills: Mutex<Vec<(u64, u64)>>,
    /// Calls whose outcome was unknown after a server kill, and which did not take effect exactly once.
    doubts: AtomicU64,
}

/// One worker's calls.
pub struct Calls<'a> {
    shared: &'a Shared,
    done: &'a AtomicU64,
    /// When the latest call began.
    began: u64,
    meter: CallTimes,
}

impl Calls<'_> {
    /// Makes a call that must succeed.
    fn must<T>(&mut self, what: &'static str, call: impl FnOnce() -> io::Result<T>) -> Result<T> {
        self.began = moment();
        let result = self.meter.call(what, call);
        self.done.store(self.meter.operations, Ordering::Relaxed);
        result
    }

    fn goes_on(&self) -> bool {
        std::thread::sleep(Duration::from_millis(1));
        !self.shared.stop.load(Ordering::SeqCst)
    }
}

impl Shared {
    /// Returns whether a server was killed between these times. All kills are known when the workers have stopped.
    fn was_killed(&self, began: u64, ended: u64) -> Result<bool> {
        let kills = self.kills.lock().map_err(|_| anyhow!("a worker died"))?;
        Ok(kills.iter().any(|(from, to)| began <= *to && ended >= *from))
    }

    /// Reads the reported kills until the end of standard input.
    fn hear_of_kills(&self) -> Result<()> {
        for line in io::stdin().lines() {
            let line = line?;
            let (from, to) = line.split_once(' ').context("not two moments")?;
            let kill = (from.parse()?, to.parse()?);
            self.kills.lock().map_err(|_| anyhow!("a worker died"))?.push(kill);
        }
        self.stop.store(true, Ordering::SeqCst);
        Ok(())
    }
}

type Worker = fn(&Path, &mut Calls<'_>) -> Result<()>;

const WORKERS: [(&str, Worker); 4] = [
    ("appends", |dir, calls| records::appends(&dir.join("appended-1"), calls)),
    ("appends too", |dir, calls| records::appends(&dir.join("appended-2"), calls)),
    ("writes in place", records::in_place),
    ("reads", records::reads),
];

pub fn run(options: &Options) -> Result<bool> {
    if options.try_locks {
        println!("{}", serde_json::to_string(&locks::free(&options.dir)?)?);
        return Ok(true);
    }
    let held = locks::hold(&options.dir)?;
    let shared = Shared::default();
    let done: [AtomicU64; 4] = Default::default();
    let over = AtomicBool::new(false);
    let mut meter = CallTimes::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if shared.hear_of_kills().is_err() {
                shared.stop.store(true, Ordering::SeqCst);
            }
        });
        scope.spawn(|| tell(options.progress.as_deref(), &done, &over));
        let workers = WORKERS.iter().zip(&done).map(|((name, worker), done)| {
            let (shared, dir) = (&shared, options.dir.as_path());
            scope.spawn(move || {
                let mut calls = Calls { shared, done, began: 0, meter: CallTimes::default() };
                if let Err(error) = worker(dir, &mut calls) {
                    // Reported at once: the other workers may wait for a long time.
                    eprintln!("{name}: {error:#}");
                    std::process::exit(1);
                }
                calls.meter
            })
        });
        let workers: Vec<_> = workers.collect();
        let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        over.store(true, Ordering::SeqCst);
        for worker in ended {
            meter.add(&worker.map_err(|_| anyhow!("a worker died"))?);
        }
        anyhow::Ok(())
    })?;
    drop(held);
    let (longest_ms, doubts) = (meter.longest.as_millis(), shared.doubts.load(Ordering::Relaxed));
    println!(
        "{}",
        serde_json::json!({
            "calls": meter.operations,
            "longest_ms": u64::try_from(longest_ms)?,
            "longest_call": meter.longest_call,
            "doubts": doubts,
        })
    );
    Ok(true)
}

/// Reports each worker's number of calls, repeatedly.
fn tell(progress: Option<&Path>, done: &[AtomicU64], over: &AtomicBool) {
    let Some(path) = progress else { return };
    let aside = path.with_extension("new");
    while !over.load(Ordering::SeqCst) {
        let counts: Vec<u64> = done.iter().map(|done| done.load(Ordering::Relaxed)).collect();
        let _ = fs::write(&aside, format!("{counts:?}")).and_then(|()| fs::rename(&aside, path));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns each worker's reported number of calls.
pub fn progress(path: &Path) -> Result<Vec<u64>> {
    Ok(serde_json::from_str(&fs::read_to_string(path)?)?)
}
