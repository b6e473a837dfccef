//! Changes on a server's own disk, and how soon another path to the directory shows them (S9).
//!
//! Runs in a process of its own, which the caller may give up. It makes changes in one directory and reads the other
//! path until each change is visible there; at the end both trees must be equal. It fails with the differences;
//! otherwise it prints one line of JSON.

mod changes;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use changes::{Plan, compare};

#[derive(clap::Args)]
pub struct Options {
    /// An empty directory on the server's disk.
    #[arg(long)]
    source: PathBuf,
    /// The same directory, as a mount shows it.
    #[arg(long)]
    point: PathBuf,
    #[arg(long, default_value_t = 1000)]
    count: u64,
    /// Changes a second; 0: one after the other.
    #[arg(long, default_value_t = 1000)]
    rate: u64,
    /// Directories in which changes are made in turn.
    #[arg(long, default_value_t = 1000)]
    dirs: u64,
}

/// A change that is not visible after this time is missed.
const PATIENCE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_micros(100);
/// Changes that are waited for at a time.
const WATCHERS: usize = 4;

/// When each change was made, in ns since the beginning; 0: not yet.
struct Made {
    began: Instant,
    at: Vec<AtomicU64>,
    count: AtomicU64,
    /// The first change that no watcher has taken.
    taken: AtomicU64,
    over: AtomicBool,
}

impl Made {
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
    }

    fn of(&self, nth: u64) -> Option<u64> {
        let at = self.at.get(usize::try_from(nth).ok()?)?.load(Ordering::Acquire);
        (at > 0).then_some(at)
    }
}

pub fn run(options: &Options) -> Result<bool> {
    let plan = Plan { dirs: options.dirs, all_kinds: options.rate > 0 };
    plan.prepare(&options.source).context("prepare the server's disk")?;
    look_at_all(&options.point, options.dirs)?;
    let made = Made {
        began: Instant::now(),
        at: (0..options.count).map(|_| AtomicU64::new(0)).collect(),
        count: AtomicU64::new(0),
        taken: AtomicU64::new(0),
        over: AtomicBool::new(false),
    };
    let (changed, seen) = std::thread::scope(|scope| {
        let changer = scope.spawn(|| {
            let changed = change(options, &plan, &made);
            made.over.store(true, Ordering::SeqCst);
            changed
        });
        // Keeps everything cached in its old state.
        let lister = scope.spawn(|| {
            while !made.over.load(Ordering::SeqCst) {
                look_at_all(&options.point, options.dirs)?;
            }
            Ok(())
        });
        let watchers: Vec<_> = (0..WATCHERS).map(|_| scope.spawn(|| latest(options, &plan, &made))).collect();
        let mut seen: Result<Vec<u64>> = Ok(Vec::new());
        for watcher in watchers {
            let some = watcher.join().unwrap_or_else(|_| bail!("a watcher panicked"));
            seen = seen.and_then(|all| Ok([all, some?].concat()));
        }
        let join = |side: std::thread::ScopedJoinHandle<'_, Result<()>>| {
            side.join().unwrap_or_else(|_| bail!("a side panicked"))
        };
        (join(changer).and(join(lister)), seen)
    });
    changed?;
    let seconds = made.began.elapsed().as_secs_f64();
    // A change whose recall has not come by then is missed.
    std::thread::sleep(Duration::from_millis(500));
    let entries = compare(&options.source, &options.point)?;
    println!("{}", figures(options, seen?, seconds, entries));
    Ok(true)
}

fn change(options: &Options, plan: &Plan, made: &Made) -> Result<()> {
    for nth in 0..options.count {
        if let Some(ns) = (nth * 1_000_000_000).checked_div(options.rate) {
            let due = made.began + Duration::from_nanos(ns);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        plan.change(&options.source, nth).with_context(|| format!("change {nth}"))?;
        made.at[usize::try_from(nth)?].store(made.now(), Ordering::Release);
        made.count.store(nth + 1, Ordering::Release);
    }
    Ok(())
}

/// Waits for the latest change that no other watcher has taken, again and again.
fn latest(options: &Options, plan: &Plan, made: &Made) -> Result<Vec<u64>> {
    let mut took = Vec::new();
    loop {
        let over = made.over.load(Ordering::SeqCst);
        let count = made.count.load(Ordering::Acquire);
        if made.taken.fetch_max(count, Ordering::SeqCst) < count {
            took.push(until_seen(options, plan, made, count - 1)?);
        } else if over {
            return Ok(took);
        } else {
            std::thread::sleep(PAUSE);
        }
    }
}

fn until_seen(options: &Options, plan: &Plan, made: &Made, nth: u64) -> Result<u64> {
    let at = made.of(nth).context("it was made")?;
    let give_up = Instant::now() + PATIENCE;
    loop {
        // A later change may have undone this one: then it took at least until now.
        if plan.shows(&options.point, nth) || !plan.shows(&options.source, nth) {
            return Ok(made.now().saturating_sub(at));
        }
        if Instant::now() > give_up {
            let what = plan.what(nth);
            bail!("not seen after {} ms: change {nth}, {what}", made.now().saturating_sub(at) / 1_000_000);
        }
        std::thread::sleep(PAUSE);
    }
}

fn look_at_all(point: &Path, dirs: u64) -> Result<()> {
    for dir in 0..dirs {
        let dir = point.join(format!("d{dir}"));
        for entry in fs::read_dir(&dir).with_context(|| format!("open {}", dir.display()))? {
            // An entry may be gone by now.
            drop(fs::metadata(entry.with_context(|| format!("list {}", dir.display()))?.path()));
        }
    }
    Ok(())
}

fn figures(options: &Options, mut took: Vec<u64>, seconds: f64, entries: u64) -> Value {
    took.sort_unstable();
    let ms = |ns: u64| (ns as f64 / 1e4).round() / 100.0;
    let at =
        |percent: usize| ms(took.get((took.len() * percent / 100).min(took.len() - 1)).copied().unwrap_or(0));
    json!({
        "changes": options.count,
        "per_second": (options.count as f64 / seconds).round(),
        "seen": took.len(),
        "p50_ms": at(50),
        "p99_ms": at(99),
        "longest_ms": at(100),
        "entries": entries,
    })
}
