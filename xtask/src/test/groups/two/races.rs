//! Races by count, each in a process of its own (`xtask race`): all answers right, no stall, few epochs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{ALL, Deadline, Kind, Mounts, NO_EPOCH, NONE};
use crate::tally::Tally;
use crate::test::world::{As, World};

/// A call that takes as long as a lease has waited for somebody to fall silent.
const TERM_MS: f64 = 15_000.0;
/// Of a hundred operations, so many may make a mount drop all names because one could not be dropped in time.
const FALLBACKS_PERCENT: u64 = 1;
const LIMIT: Duration = Duration::from_secs(90);

/// A race of `xtask race`, and how many changes each side makes.
struct Race {
    name: &'static str,
    count: u64,
    short: u64,
}

const fn race(name: &'static str, count: u64, short: u64) -> Race {
    Race { name, count, short }
}

const RACES: &[Race] = &[
    race("names", 10_000, 1000),
    race("names-spread", 3000, 600),
    race("listing", 2000, 400),
    race("records", 10_000, 1000),
    race("appends", 5000, 1000),
    race("told", 4000, 1000),
    race("told-spread", 3000, 600),
    race("saves", 1000, 200),
    race("mapped", 2000, 400),
    race("mapped-page", 2000, 400),
];

/// The others, shorter, between kernels that can be told less.
const MIXED: &[Race] =
    &[race("names-spread", 600, 300), race("told-spread", 600, 300), race("saves", 200, 100)];

pub fn run(world: &World, tally: &mut Tally, deadline: &Deadline) {
    let kinds: &[(&str, [Kind; 2], &[Race])] = &[
        ("", [ALL, ALL], RACES),
        (", level no-epoch", [NO_EPOCH, NO_EPOCH], MIXED),
        (", levels all and none", [ALL, NONE], MIXED),
    ];
    for (what, kinds, races) in kinds {
        for race in *races {
            let name = format!("two: race {}{what}", race.name);
            if !deadline.is_over(tally, &name) {
                let start = Instant::now();
                let result = try_race(world, race, kinds);
                super::record(tally, &name, start.elapsed(), result);
            }
        }
    }
}

fn try_race(world: &World, race: &Race, kinds: &[Kind]) -> Result<()> {
    let mounts = Mounts::new(world, As::Us, kinds)?;
    let count = if world.short { race.short } else { race.count };
    let mut command = world.command(world.root.join("bin/xtask"), As::Us);
    command.args(["race", race.name, "--count", &count.to_string()]);
    command.arg("--first").arg(mounts.point(0)).arg("--second").arg(mounts.point(1));
    let before = mounts.fallbacks()?;
    let ended = mounts.run(command, LIMIT)?;
    ensure!(ended.ok(), "{} (daemons: {})", ended.tail(8), mounts.said());
    let said: Value = serde_json::from_str(ended.said.lines().last().unwrap_or_default())?;
    let operations = said["operations"].as_u64().context("the race counted no operations")?;
    let longest_ms = said["longest_ms"].as_f64().context("the race took no times")?;
    let fallbacks = mounts.fallbacks()? - before;
    println!(
        "  {}: {operations} operations in {:.1} s, the longest {longest_ms:.1} ms ({}), {fallbacks} epochs instead of a name",
        race.name,
        ended.took.as_secs_f64(),
        said["longest_call"].as_str().unwrap_or("?"),
    );
    ensure!(operations >= count, "only {operations} operations of {count}");
    ensure!(longest_ms < TERM_MS, "a call took {longest_ms:.0} ms");
    // A reader that polls makes many operations that change nothing and must not hide what the others cost.
    let counted = operations.min(count * 10);
    ensure!(
        fallbacks * 100 <= counted * FALLBACKS_PERCENT,
        "{fallbacks} epochs instead of a name in {counted} operations"
    );
    mounts.unmount()
}
