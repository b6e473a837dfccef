//! A load on a directory that continues while the server or the link fails. Each worker has files of its own, so it
//! knows the required result of each call, and reports at the end (docs/decisions/0009).
//!
//! Runs in a process of its own, which the caller may give up. It works until its standard input, which carries the
//! times of server kills, ends; then it checks everything once more, and prints one line of JSON. It fails with the
//! first wrong result.

mod locks;
mod names;
mod records;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

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

/// Number of names that each listing of `fixed` must have.
const FIXED: u64 = 200;
/// Size of the file that is only read.
const GIVEN: u64 = 1 << 20;

/// Creates a load's files, without the mount.
pub fn prepare(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir.join("fixed"))?;
    for n in 0..FIXED {
        fs::write(dir.join("fixed").join(fixed(n)), b"")?;
    }
    for name in ["lock-flock", "lock-range"] {
        fs::write(dir.join(name), b"")?;
    }
    fs::write(
        dir.join("given"),
        (0..GIVEN / 8).flat_map(|word| (word * 8).to_le_bytes()).collect::<Vec<u8>>(),
    )
}

fn fixed(n: u64) -> String {
    format!("entry-{n:03}")
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
    longest: AtomicU64,
    /// Calls whose outcome was unknown after a server kill, and which did not take effect exactly once.
    doubts: AtomicU64,
}

/// One worker's calls.
pub struct Calls<'a> {
    shared: &'a Shared,
    done: &'a AtomicU64,
    began: u64,
}

impl Calls<'_> {
    /// Makes a call and records its time; any result is allowed.
    fn make<T>(&mut self, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.began = moment();
        let result = call();
        self.shared.longest.fetch_max(moment() - self.began, Ordering::Relaxed);
        self.done.fetch_add(1, Ordering::Relaxed);
        result
    }

    /// Makes a call that must succeed.
    fn must<T>(&mut self, what: &str, call: impl FnOnce() -> io::Result<T>) -> Result<T> {
        self.make(call).with_context(|| what.to_owned())
    }

    /// Makes a change of names that must take effect once. If the server died meanwhile it may have applied the change
    /// before, and the retry fails with `again`: no other errno, and only then.
    fn once(&mut self, what: &str, again: i32, call: impl FnOnce() -> io::Result<()>) -> Result<()> {
        match self.make(call) {
            Err(error) if error.raw_os_error() == Some(again) => {
                let (began, ended) = (self.began, moment());
                ensure!(self.shared.was_killed(began, ended)?, "{what}: {error}, and nobody was killed");
                self.shared.doubts.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            result => result.with_context(|| what.to_owned()),
        }
    }

    fn goes_on(&self) -> bool {
        std::thread::sleep(Duration::from_millis(1));
        !self.shared.stop.load(Ordering::SeqCst)
    }
}

impl Shared {
    /// Returns whether a server was killed between these times. The kill is reported a moment later.
    fn was_killed(&self, began: u64, ended: u64) -> Result<bool> {
        let give_up = Instant::now() + Duration::from_secs(5);
        loop {
            let kills = self.kills.lock().map_err(|_| anyhow::anyhow!("a worker died"))?;
            if kills.iter().any(|(from, to)| began <= *to && ended >= *from) {
                return Ok(true);
            }
            drop(kills);
            if Instant::now() > give_up {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Reads the reported kills until the end of standard input.
    fn hear_of_kills(&self) -> Result<()> {
        for line in io::stdin().lines() {
            let line = line?;
            let (from, to) = line.split_once(' ').context("not two moments")?;
            let kill = (from.parse()?, to.parse()?);
            self.kills.lock().map_err(|_| anyhow::anyhow!("a worker died"))?.push(kill);
        }
        self.stop.store(true, Ordering::SeqCst);
        Ok(())
    }
}

type Worker = fn(&Path, &mut Calls<'_>) -> Result<()>;

const WORKERS: [(&str, Worker); 7] = [
    ("appends", |dir, calls| records::appends(&dir.join("appended-1"), calls)),
    ("appends too", |dir, calls| records::appends(&dir.join("appended-2"), calls)),
    ("writes in place", records::in_place),
    ("reads", records::reads),
    ("makes, renames and removes", names::changes),
    ("lists", names::lists),
    ("looks at files", names::looks),
];

pub fn run(options: &Options) -> Result<bool> {
    if options.try_locks {
        println!("{}", serde_json::to_string(&locks::free(&options.dir)?)?);
        return Ok(true);
    }
    let held = locks::hold(&options.dir)?;
    let shared = Shared::default();
    let done: [AtomicU64; 7] = Default::default();
    let over = AtomicBool::new(false);
    let failed = std::thread::scope(|scope| {
        scope.spawn(|| {
            if shared.hear_of_kills().is_err() {
                shared.stop.store(true, Ordering::SeqCst);
            }
        });
        scope.spawn(|| tell(options.progress.as_deref(), &done, &over));
        let workers = WORKERS.iter().zip(&done).map(|((name, worker), done)| {
            let (shared, dir) = (&shared, options.dir.as_path());
            scope.spawn(move || {
                let result = worker(dir, &mut Calls { shared, done, began: 0 });
                if let Err(error) = &result {
                    // Reported at once: the other workers may wait for a long time.
                    eprintln!("{name}: {error:#}");
                    std::process::exit(1);
                }
            })
        });
        let workers: Vec<_> = workers.collect();
        let died = workers.into_iter().any(|worker| worker.join().is_err());
        over.store(true, Ordering::SeqCst);
        died
    });
    ensure!(!failed, "a worker died");
    drop(held);
    let calls: u64 = done.iter().map(|done| done.load(Ordering::Relaxed)).sum();
    let longest_ms = shared.longest.load(Ordering::Relaxed) / 1_000_000;
    let doubts = shared.doubts.load(Ordering::Relaxed);
    println!("{}", serde_json::json!({ "calls": calls, "longest_ms": longest_ms, "doubts": doubts }));
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

/// Returns the sorted names in a directory.
fn listing(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}
