//! The mounted checker: several mounts of one directory, processes that make all kinds of calls on a few names, and a
//! linearizability check of their results (docs/decisions/0016-checkers.md).

mod calls;
mod counts;
mod faults;
pub mod soak;
mod stage;
mod sums;
mod window;
pub mod worker;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nigh_sim::random::Dice;

use crate::test::world::{Length, World};
use counts::Counts;
use faults::{Faults, Step};
use stage::Stage;
use window::{Done, Plan};

#[derive(clap::Args)]
pub struct Options {
    /// How long, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Test this binary instead of building one.
    #[arg(long, value_name = "PATH")]
    nigh: Option<PathBuf>,
}

pub fn run(options: &Options) -> Result<bool> {
    let world = World::new(options.nigh.as_deref(), Length::Long)?;
    check(&world, Duration::from_secs(options.seconds), options.seed)?;
    Ok(true)
}

/// Minimum share of reads answered from a cache, in percent.
const FROM_MEMORY: u64 = 30;
/// Limit of changes per recall.
const CHANGES_A_RECALL: u64 = 20;

/// Works for this time; an error with the first call that no order explains.
pub fn check(world: &World, time: Duration, seed: u64) -> Result<()> {
    let mut stage = Stage::new(world, seed)?;
    let mut counts = Counts::default();
    let mut dice = Dice::new(seed);
    let (end, mut cuts) = (Instant::now() + time, 0);
    for number in 0.. {
        let mount = u8::try_from(dice.below(u64::from(stage::MOUNTS)))?;
        let at = Duration::from_millis(100 + dice.below(1_500));
        let mut faults = Faults::new(vec![(at, Step::Cut(mount))]);
        let Done { history, report } = window::run(&mut stage, &plan(number), seed, &mut faults)?;
        cuts += faults.happened.iter().filter(|happened| happened.counts).count();
        counts.add(&history, &report);
        if Instant::now() > end {
            break;
        }
    }
    let recalls = recalls(&stage)?;
    stage.close()?;
    println!(
        "{}",
        serde_json::json!({ "seed": seed, "cuts": cuts, "recalls": recalls, "counts": counts.json() })
    );
    floors(&counts, recalls)
}

/// Two of three windows are slow: with few names at full speed every lease is contended, and none is held for long.
fn plan(number: u32) -> Plan {
    let (time, limit) = (Duration::from_secs(6), Duration::from_secs(120));
    match number % 3 {
        0 => Plan { number, calls: 200, time, change_ms: None, maps: true, limit },
        _ => Plan { number, calls: 400, time, change_ms: Some(250), maps: true, limit },
    }
}

fn recalls(stage: &Stage<'_>) -> Result<u64> {
    let mut recalls = 0;
    for seat in &stage.seats {
        let status = seat.mount.status()?;
        let leases = |key: &str| status["leases"][key].as_u64().unwrap_or(0);
        recalls += leases("recalled") + leases("updated_in_place");
    }
    Ok(recalls)
}

/// Checks that the run has tested caches and recalls at all.
fn floors(counts: &Counts, recalls: u64) -> Result<()> {
    let Counts { looks, looks_from_memory, changes, .. } = *counts;
    ensure!(
        looks_from_memory * 100 >= looks * FROM_MEMORY,
        "only {looks_from_memory} of {looks} looks came from memory, less than {FROM_MEMORY} %"
    );
    ensure!(recalls * CHANGES_A_RECALL >= changes, "only {recalls} recalls at {changes} changes");
    Ok(())
}
