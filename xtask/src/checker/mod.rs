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
use soak::MountCounters;
use stage::Stage;
use window::{Plan, WindowResult};

#[derive(clap::Args)]
pub struct Options {
    /// How long, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Kill the server in each window instead of cutting a link.
    #[arg(long)]
    kill_server: bool,
    /// Test this binary instead of building one.
    #[arg(long, value_name = "PATH")]
    nigh: Option<PathBuf>,
}

pub fn run(options: &Options) -> Result<bool> {
    let world = World::new(options.nigh.as_deref(), Length::Long)?;
    let fault = if options.kill_server { Fault::KilledServer } else { Fault::CutLink };
    check(&world, Duration::from_secs(options.seconds), options.seed, fault)?;
    Ok(true)
}

/// The fault that each window has once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    CutLink,
    KilledServer,
}

impl Fault {
    /// Returns the parameters of a window, and its fault. In some windows changes come as fast as possible, in others
    /// they are slow: with few names at full speed every lease is contended, and none is held for long.
    fn window(self, number: u32, dice: &mut Dice) -> Result<(Plan, Faults)> {
        let limit = Duration::from_secs(120);
        match self {
            Fault::CutLink => {
                let mount = u8::try_from(dice.below(u64::from(stage::MOUNTS)))?;
                let at = Duration::from_millis(100 + dice.below(1_500));
                let (calls, change_ms) =
                    if number.is_multiple_of(3) { (200, None) } else { (400, Some(250)) };
                let plan = Plan { number, calls, time: Duration::from_secs(6), change_ms, maps: true, limit };
                Ok((plan, Faults::new(vec![(at, Step::Cut(mount))])))
            }
            Fault::KilledServer => {
                let at = Duration::from_millis(500 + dice.below(1_000));
                let change_ms = (!number.is_multiple_of(2)).then_some(250);
                let time = at + Duration::from_secs(2);
                let plan = Plan { number, calls: 3_000, time, change_ms, maps: false, limit };
                Ok((plan, Faults::new(vec![(at, Step::KillServer)])))
            }
        }
    }

    /// Checks that the run has tested what it is for. Without a killed server the outcome of every change is known, and
    /// every open file stays usable.
    fn floors(self, counts: &Counts, faults: u64, mounts: MountCounters) -> Result<()> {
        counts.check_decided()?;
        if self == Fault::KilledServer {
            ensure!(faults > 0, "no mount held a grant when the server was killed");
            return Ok(());
        }
        let Counts { looks, looks_from_memory, changes, unknown, lost, .. } = *counts;
        ensure!(
            unknown + lost == 0,
            "{unknown} calls are in doubt, {lost} open files lost, and no server died"
        );
        ensure!(
            looks_from_memory * 100 >= looks * FROM_MEMORY,
            "only {looks_from_memory} of {looks} looks came from memory, less than {FROM_MEMORY} %"
        );
        let MountCounters { recalls, contents_used, .. } = mounts;
        ensure!(recalls * CHANGES_A_RECALL >= changes, "only {recalls} recalls at {changes} changes");
        ensure!(contents_used > 0, "no contents came ahead and were read");
        Ok(())
    }
}

/// Minimum share of reads answered from a cache, in percent.
const FROM_MEMORY: u64 = 30;
/// Limit of changes per recall.
const CHANGES_A_RECALL: u64 = 20;

/// Works for this time; an error with the first call that no order explains.
pub fn check(world: &World, time: Duration, seed: u64, fault: Fault) -> Result<()> {
    let mut stage = Stage::new(world, seed)?;
    let mut counts = Counts::default();
    let mut dice = Dice::new(seed);
    let (end, mut counted) = (Instant::now() + time, 0);
    for number in 0.. {
        let (plan, mut faults) = fault.window(number, &mut dice)?;
        let WindowResult { history, report } = window::run(&mut stage, &plan, seed, &mut faults)?;
        counted += faults.occurred.iter().filter(|happened| happened.counts).count() as u64;
        counts.add(&history, &report);
        if Instant::now() > end {
            break;
        }
    }
    let mut mounts = MountCounters::default();
    for seat in &stage.mounts {
        mounts.add(MountCounters::of(seat)?);
    }
    stage.close()?;
    println!(
        "{}",
        serde_json::json!({
            "seed": seed,
            "faults": counted,
            "recalls": mounts.recalls,
            "contents_used": mounts.contents_used,
            "counts": counts.json(),
        })
    );
    fault.floors(&counts, counted, mounts)
}
