//! A large directory is scanned through one mount in small parts while it is changed through another.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::races::{Ran, run_race};
use super::{ALL, Mounts};
use crate::test::groups::Test;
use crate::test::world::{As, World};

/// Limit of all scans of a run.
const LIMIT: Duration = Duration::from_secs(240);
const LONG_LIMIT: Duration = Duration::from_secs(3600);

pub const TEST: Test = ("two: what is there throughout a scan comes once", scan);

fn scan(world: &World) -> Result<()> {
    // Changes in one scan of a directory of twice as many entries, scans, and limit.
    let (changes, scans, limit) = match (world.short, world.hours) {
        (true, _) => (1_500, 1, LIMIT),
        (_, true) => (50_000, 20, LONG_LIMIT),
        _ => (10_000, 2, LIMIT),
    };
    let mounts = Mounts::named(world, "scan-", As::Us, &[ALL, ALL])?;
    let (count, times) = (changes.to_string(), scans.to_string());
    let Ran { operations, longest_ms, longest_call, took } =
        run_race(&mounts, &["scans", "--count", &count, "--scans", &times], limit)?;
    ensure!(operations >= changes * scans, "only {operations} operations");
    println!(
        "  {scans} scans of {} entries under {changes} changes each: {:.0} s, the longest call {longest_ms:.0} ms ({longest_call}); \
         recalls {}, told {}",
        changes * 2,
        took.as_secs_f64(),
        mounts.status(1, ["leases", "recalled"])?,
        mounts.status(1, ["leases", "updated_in_place"])?,
    );
    mounts.unmount()
}
