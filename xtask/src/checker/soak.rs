//! `cargo xtask soak`: windows one after the other, each with faults; the counts are summed up over runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nigh_sim::history;
use nigh_sim::random::Dice;
use serde_json::{Value, json};

use super::counts::{Counts, longest_ms};
use super::faults::{FaultRecord, Faults, Kind, Step, WaitKind};
use super::stage::{CheckedMount, MOUNTS, Stage, WORKERS};
use super::sums::Sums;
use super::window::{self, Plan, WindowResult};
use crate::process;
use crate::root;
use crate::test::world::{Length, World};

#[derive(clap::Args)]
pub struct Options {
    /// How long; parts of an hour too.
    #[arg(long, default_value_t = 2.0)]
    hours: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A trial run: it is not added up, and has no minimum counts.
    #[arg(long)]
    short: bool,
    /// Where runs are added up; by default `soak.json` in cargo's target directory.
    #[arg(long, value_name = "FILE")]
    sums: Option<PathBuf>,
    /// With --short: only windows with such faults, by their number (0 cuts, 1 down, 2 and 3 kills, 4 stops).
    #[arg(long, requires = "short", value_parser = clap::value_parser!(u32).range(0..5))]
    only: Option<u32>,
    /// Check a stored history, and do nothing else.
    #[arg(long, value_name = "FILE")]
    judge: Option<PathBuf>,
    /// Test this binary instead of building one.
    #[arg(long, value_name = "PATH")]
    nigh: Option<PathBuf>,
}

/// A shorter run is not added up.
const LEAST: Duration = Duration::from_secs(20 * 60);

pub fn run(options: &Options) -> Result<bool> {
    if let Some(path) = &options.judge {
        return judge(path);
    }
    let time = Duration::from_secs_f64(options.hours.clamp(0.0, 1000.0) * 3600.0);
    ensure!(options.short || time >= LEAST, "a run of less than 20 minutes is not added up; say --short");
    let world = World::new(options.nigh.as_deref(), Length::Long)?;
    let mut soak = Soak::new(&world, options.seed)?;
    let start = Instant::now();
    let result = soak.work(start + time, options.only);
    let run = soak.ended(start.elapsed(), result.is_ok());
    println!("{}", serde_json::to_string(&run)?);
    result?;
    soak.counts.check_decided()?;
    soak.stage.close()?;
    if options.short {
        return Ok(true);
    }
    let path = options.sums.clone().unwrap_or_else(|| root::target().join("soak.json"));
    let sums = Sums::add(&path, &run)?;
    println!("in {}: {}", path.display(), serde_json::to_string(&sums.0)?);
    for missing in sums.missing() {
        println!("missing yet: {missing}");
    }
    Ok(true)
}

fn judge(path: &Path) -> Result<bool> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    match history::judge_mounted(&history::parse(&text)?) {
        Ok(report) => println!("{report:?}"),
        Err(violation) => {
            println!("{violation}");
            return Ok(false);
        }
    }
    Ok(true)
}

/// A run, and its counts.
struct Soak<'w> {
    stage: Stage<'w>,
    dice: Dice,
    seed: u64,
    counts: Counts,
    faults: BTreeMap<&'static str, u64>,
    /// Faults without calls in flight, or on a mount without grants.
    idle: u64,
    /// Kill times in µs of workers that waited for a reply; for a stopped daemon's reply; for a lock in the kernel.
    killed_us: [Vec<u64>; 3],
    longest_ms: [u64; 2],
    /// Counts of ended mounts.
    ended_mounts: MountCounters,
    memory: [Value; 2],
}

/// Counters of mounts over their lifetime.
#[derive(Clone, Copy, Default)]
pub struct MountCounters {
    pub recalls: u64,
    epochs: u64,
    lapses: u64,
    /// Bytes of files that were read ahead, and then read.
    pub contents_used: u64,
}

impl MountCounters {
    pub fn of(seat: &CheckedMount<'_>) -> Result<MountCounters> {
        let status = seat.mount.status()?;
        let number = |part: &str, key: &str| status[part][key].as_u64().unwrap_or(0);
        Ok(MountCounters {
            recalls: number("leases", "recalled") + number("leases", "updated_in_place"),
            epochs: number("kernel", "epoch_planned") + number("kernel", "epoch_fallbacks"),
            lapses: number("remote", "lapses"),
            contents_used: status["cache"]["contents"]["used"].as_u64().unwrap_or(0),
        })
    }

    pub fn add(&mut self, other: MountCounters) {
        self.recalls += other.recalls;
        self.epochs += other.epochs;
        self.lapses += other.lapses;
        self.contents_used += other.contents_used;
    }
}

impl<'w> Soak<'w> {
    fn new(world: &'w World, seed: u64) -> Result<Soak<'w>> {
        let stage = Stage::new(world, seed)?;
        let memory = [memory(&stage), Value::Null];
        Ok(Soak {
            stage,
            dice: Dice::new(seed),
            seed,
            counts: Counts::default(),
            faults: Kind::ALL.iter().map(|(_, name)| (*name, 0)).collect(),
            idle: 0,
            killed_us: Default::default(),
            longest_ms: [0; 2],
            ended_mounts: MountCounters::default(),
            memory,
        })
    }

    fn work(&mut self, end: Instant, only: Option<u32>) -> Result<()> {
        for number in 0.. {
            if Instant::now() > end {
                break;
            }
            let (steps, change_ms) = self.round(only.unwrap_or(number % 5));
            let mut faults = Faults::new(steps);
            // After the last recovery the workers continue for a while.
            let time = faults.end() + Duration::from_secs(3);
            let limit = time + Duration::from_secs(60);
            let plan = Plan { number, calls: 3_000, time, change_ms, maps: false, limit };
            let WindowResult { history, report } =
                window::run(&mut self.stage, &plan, self.seed, &mut faults)?;
            self.counts.add(&history, &report);
            self.count(&faults);
            let longest = &mut self.longest_ms[usize::from(!faults.occurred.is_empty())];
            *longest = longest_ms(&history).max(*longest);
            let parted = &mut self.ended_mounts;
            self.stage.renew(|seat| {
                parted.add(MountCounters::of(seat)?);
                Ok(())
            })?;
        }
        Ok(())
    }

    fn count(&mut self, faults: &Faults) {
        for FaultRecord { kind, counts } in &faults.occurred {
            let name = Kind::ALL.iter().find(|(known, _)| known == kind).map_or("", |(_, name)| *name);
            *self.faults.entry(name).or_default() += u64::from(*counts);
            self.idle += u64::from(!counts);
        }
        for killed in &faults.killed {
            let at = match killed.wait {
                WaitKind::Runs => continue,
                WaitKind::Answer => 0,
                WaitKind::Stopped => 1,
                WaitKind::Lock => 2,
            };
            self.killed_us[at].push(u64::try_from(killed.took.as_micros()).unwrap_or(u64::MAX));
        }
    }

    fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.dice.below(to - from))
    }

    fn mount(&mut self) -> u8 {
        u8::try_from(self.dice.below(u64::from(MOUNTS))).unwrap_or(0)
    }

    /// Returns a window's faults, and the interval of its changes.
    fn round(&mut self, kind: u32) -> (Vec<(Duration, Step)>, Option<u64>) {
        let mut steps = Vec::new();
        let mount = self.mount();
        let other = (mount + 1) % MOUNTS;
        let mut change_ms = Some(250);
        match kind {
            // Every other time there is no fault.
            0 => {
                change_ms = None;
                let cuts = self.dice.below(2) * 3;
                if cuts == 0 {
                    return (steps, change_ms);
                }
                for _ in 0..cuts {
                    let mount = self.mount();
                    steps.push((self.ms(200, 3_000), Step::Cut(mount)));
                }
            }
            1 => {
                for mount in [mount, other] {
                    let down = self.ms(500, 2_000);
                    steps.push((down, Step::Down(mount)));
                    steps.push((down + self.ms(200, 5_000), Step::Up(mount)));
                }
                let third = (mount + 2) % MOUNTS;
                steps.push((self.ms(200, 5_000), Step::Cut(third)));
                steps.push((self.ms(200, 5_000), Step::Cut(third)));
            }
            2 | 3 => {
                let kill = self.ms(500, 4_000);
                steps.push((kill, Step::KillServer));
                if kind == 3 {
                    change_ms = None;
                    steps.push((kill + self.ms(0, 200), Step::Cut(other)));
                }
            }
            _ => {
                let stop = self.ms(1_500, 4_000);
                // Mostly almost at once: while one mount does not reply, the others soon hold no grants that a fault
                // could affect.
                let down =
                    if self.dice.below(4) == 0 { self.ms(1_500, 6_000) } else { stop + self.ms(0, 20) };
                steps.push((stop, Step::Stop(mount)));
                steps.push((stop + self.ms(20_000, 22_000), Step::Continue(mount)));
                steps.push((down, Step::Down(other)));
                steps.push((down + self.ms(17_500, 21_000), Step::Up(other)));
                if self.dice.below(4) == 0 {
                    steps.push((self.ms(3_000, 20_000), Step::KillServer));
                }
            }
        }
        let (end, workers) =
            (steps.iter().map(|(at, _)| at.as_millis()).max().unwrap_or(3_000), MOUNTS * WORKERS);
        let end = u64::try_from(end).unwrap_or(3_000).max(1_500);
        let one = u8::try_from(self.dice.below(u64::from(workers))).unwrap_or(0);
        for worker in [one, (one + WORKERS) % workers] {
            steps.push((self.ms(1_000, end + 500), Step::KillWorker(worker)));
        }
        (steps, change_ms)
    }

    fn ended(&mut self, took: Duration, well: bool) -> Value {
        let mut kernel = self.ended_mounts;
        for seat in &self.stage.mounts {
            kernel.add(MountCounters::of(seat).unwrap_or_default());
        }
        self.memory[1] = memory(&self.stage);
        self.killed_us.iter_mut().for_each(|all| all.sort_unstable());
        json!({
            "seed": self.seed,
            "seconds": took.as_secs(),
            "without_violation": well,
            "counts": self.counts.json(),
            "faults": self.faults,
            "faults_while_idle": self.idle,
            "recalls": kernel.recalls,
            "epochs": kernel.epochs,
            "lapses": kernel.lapses,
            "contents_used": kernel.contents_used,
            "fences": self.stage.server.fences(),
            "longest_ms": { "without_faults": self.longest_ms[0], "with_faults": self.longest_ms[1] },
            "killed_us": self.killed_us[0],
            "killed_while_stopped_us": self.killed_us[1],
            "killed_while_locked_us": self.killed_us[2],
            "memory_first": self.memory[0],
            "memory_last": self.memory[1],
        })
    }
}

/// Returns the resident memory, in KiB, of each daemon and of the server.
fn memory(stage: &Stage<'_>) -> Value {
    let resident = |pid: u32| process::memory_kib(pid, "VmRSS:").ok();
    let daemons: Vec<_> = stage.mounts.iter().map(|seat| resident(seat.mount.daemon())).collect();
    json!({ "daemons_kib": daemons, "server_kib": resident(stage.server.pid()) })
}
