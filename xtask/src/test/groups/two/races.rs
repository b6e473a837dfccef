//! Races by count, each in a process of its own (`xtask race`): all results right, no stall, few epochs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{ALL, DaemonVariable, Deadline, Mounts, NO_EPOCH, NONE, OLD};
use crate::report::TestReport;
use crate::test::world::{As, World};

/// A call of this duration has waited for a silent client's lease to expire.
const TERM_MS: f64 = 15_000.0;
/// Limit of operations, in percent, at which a mount dropped all dentries because one could not be dropped in time.
const FALLBACKS_PERCENT: u64 = 1;
const LIMIT: Duration = Duration::from_secs(90);
const LONG_LIMIT: Duration = Duration::from_secs(1800);

/// A race of `xtask race`, and the number of changes per side.
struct Race {
    name: &'static str,
    count: u64,
    short: u64,
}

const fn race(name: &'static str, count: u64, short: u64) -> Race {
    Race { name, count, short }
}

const RACES: &[Race] = &[
    race("names", 10_000, 500),
    race("names-spread", 3000, 300),
    race("listing", 2000, 200),
    race("halves", 200, 30),
    race("records", 10_000, 500),
    race("appends", 5000, 500),
    race("appends-seen", 2000, 250),
    race("told", 4000, 500),
    race("told-spread", 3000, 300),
    race("sizes", 4000, 500),
    race("grows", 3000, 300),
    race("saves", 1000, 100),
    race("mapped", 2000, 200),
    race("mapped-page", 2000, 200),
    race("stored", 1000, 150),
    race("stored-page", 1000, 150),
];

/// Shorter races, between kernels of different notification levels.
const MIXED: &[Race] =
    &[race("names-spread", 600, 200), race("told-spread", 600, 200), race("saves", 200, 100)];

/// With `--hours`, at every level and with the oldest protocol: both change names of one directory, one writes and the
/// other reads, both write in place, both append, one stores into a map and the other writes or stores too.
const LONG: &[Race] = &[
    race("mapped", 10_000, 0),
    race("mapped-page", 10_000, 0),
    race("stored-page", 10_000, 0),
    race("names", 10_000, 0),
    race("told", 10_000, 0),
    race("records", 10_000, 0),
    race("appends", 10_000, 0),
    race("appends-seen", 10_000, 0),
];

pub fn run(world: &World, tally: &mut TestReport, deadline: &Deadline) {
    let usual: &[(&str, [DaemonVariable; 2], &[Race])] = &[
        ("", [ALL, ALL], RACES),
        (", level no-epoch", [NO_EPOCH, NO_EPOCH], MIXED),
        (", levels all and none", [ALL, NONE], MIXED),
    ];
    let long: &[(&str, [DaemonVariable; 2], &[Race])] = &[
        (", 10,000 at level all", [ALL, ALL], LONG),
        (", 10,000 at level no-epoch", [NO_EPOCH, NO_EPOCH], LONG),
        // Without notifications a kernel keeps mapped pages (docs/semantics.md, S1).
        (", 10,000 at level none", [NONE, NONE], &LONG[3..]),
        // This protocol shows an append for a moment at the end that the kernel knew (docs/semantics.md, "O_APPEND").
        (", 10,000 with protocol 7.31", [OLD, OLD], &LONG[..7]),
    ];
    let kinds = if world.hours { long } else { usual };
    for (what, kinds, races) in kinds {
        for race in *races {
            let name = format!("two: race {}{what}", race.name);
            if !deadline.is_over(tally, &name) {
                let start = Instant::now();
                match try_race(world, race, kinds) {
                    Err(error) if maps_nothing(&error) => {
                        tally.skip(&name, "the kernel makes no shared map of a file of such a mount");
                    }
                    result => tally.record(&name, start.elapsed(), result),
                }
            }
        }
    }
}

/// Before protocol 7.39, a file in direct I/O mode cannot be mapped for stores.
fn maps_nothing(error: &anyhow::Error) -> bool {
    let said = format!("{error:#}");
    said.contains("mmap") && said.contains("os error 19")
}

fn try_race(world: &World, race: &Race, kinds: &[DaemonVariable]) -> Result<()> {
    let mounts = Mounts::new(world, As::Us, kinds)?;
    let count = if world.short { race.short } else { race.count };
    let before = mounts.fallbacks()?;
    let limit = if world.hours { LONG_LIMIT } else { LIMIT };
    let Ran { operations, longest_ms, longest_call, took } =
        run_race(&mounts, &[race.name, "--count", &count.to_string()], limit)?;
    let fallbacks = mounts.fallbacks()? - before;
    println!(
        "  {}: {operations} operations in {:.1} s, the longest {longest_ms:.1} ms ({longest_call}), {fallbacks} epochs instead of a name",
        race.name,
        took.as_secs_f64(),
    );
    ensure!(operations >= count, "only {operations} operations of {count}");
    ensure!(longest_ms < TERM_MS, "a call took {longest_ms:.0} ms");
    // A reader that polls makes many operations without changes, which must not hide the cost of the changes.
    let counted = operations.min(count * 10);
    ensure!(
        fallbacks * 100 <= counted * FALLBACKS_PERCENT,
        "{fallbacks} epochs instead of a name in {counted} operations"
    );
    mounts.unmount()
}

/// What `xtask race` reports.
pub struct Ran {
    pub operations: u64,
    pub longest_ms: f64,
    pub longest_call: String,
    pub took: Duration,
}

/// Runs `xtask race` between two mounts.
pub fn run_race(mounts: &Mounts<'_>, arguments: &[&str], limit: Duration) -> Result<Ran> {
    let mut command = mounts.world.command(mounts.world.xtask(), As::Us);
    command.arg("race").args(arguments);
    command.arg("--first").arg(mounts.point(0)).arg("--second").arg(mounts.point(1));
    let ended = mounts.run(command, limit)?;
    ensure!(ended.ok(), "{} (daemons: {})", ended.tail(8), mounts.said());
    let said = ended.json()?;
    Ok(Ran {
        operations: said["operations"].as_u64().context("the race counted no operations")?,
        longest_ms: said["longest_ms"].as_f64().context("the race took no times")?,
        longest_call: said["longest_call"].as_str().unwrap_or("?").to_owned(),
        took: ended.took,
    })
}
