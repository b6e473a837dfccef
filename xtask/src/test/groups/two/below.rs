//! Another filesystem is mounted below each of two mounts: dentries cannot be dropped by the epoch, and each is
//! dropped only when no local request holds its directory's lock. Two mounts that create names in one directory must
//! not wait for each other.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{ALL, Deadline, Mounts};
use crate::process;
use crate::report::TestReport;
use crate::root;
use crate::test::groups::filesystems::Disk;
use crate::test::world::{As, World};
use crate::wait;

const ROUNDS: u64 = 100;
/// Rounds in one directory: a contended directory is not recalled any more.
const EACH: u64 = 4;
const LONGEST: Duration = Duration::from_secs(1);
const SHORT: Duration = Duration::from_secs(20);

pub fn run(world: &World, tally: &mut TestReport, deadline: &Deadline) {
    let name = "two: mounts below two mounts that make names in one directory";
    if !root::is_root() {
        return tally.not_run(name, "needs root");
    }
    if !deadline.is_over(tally, name) {
        tally.test(name, || below(world));
    }
}

fn below(world: &World) -> Result<()> {
    let mounts = Mounts::new(world, As::Us, &[ALL, ALL])?;
    mounts.sh("mkdir -p $A/m/n", SHORT)?;
    // Both kernels cache this without a limit.
    mounts.sh("for m in $A $B; do ls -l $m $m/m; test ! -e $m/none; test ! -e $m/m/none; done", SHORT)?;
    let mut disks = Vec::new();
    for number in 0..2 {
        let point = mounts.point(number).join("m/n");
        process::output(Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(&point))?;
        disks.push(Disk { point });
        is_noticed(&mounts, number)?;
    }
    mounts.sh("touch $A/m/n/inside $B/m/n/inside; touch $A/none $B/m/none", SHORT)?;
    mounts.sh("test -e $B/none; test -e $A/m/none", SHORT).context("what did not exist before the mount")?;
    let mut longest = Duration::ZERO;
    for round in 0..ROUNDS {
        let dir = round / EACH;
        if round % EACH == 0 {
            mounts.sh(&format!("mkdir $A/d{dir}; ls -l $A/d{dir}; ls -l $B/d{dir}"), SHORT)?;
        }
        let begun = Instant::now();
        mounts.sh(&format!("touch $A/d{dir}/a{round} & touch $B/d{dir}/b{round}; wait"), SHORT)?;
        longest = longest.max(begun.elapsed());
        ensure!(begun.elapsed() < LONGEST, "round {round} took {:.1?}", begun.elapsed());
        let both = format!("test -e $A/d{dir}/b{round}; test -e $B/d{dir}/a{round}");
        mounts.sh(&both, SHORT).with_context(|| format!("round {round}"))?;
    }
    println!("  the longest of {ROUNDS} rounds took {:.0} ms", longest.as_secs_f64() * 1000.0);
    mounts.sh("test -e $A/m/n/inside; test -e $B/m/n/inside", SHORT).context("what is mounted below")?;
    drop(disks);
    mounts.unmount()
}

fn is_noticed(mounts: &Mounts<'_>, number: usize) -> Result<()> {
    let lowered = || Ok(mounts.mounts[number].status()?["kernel"]["notifications"] != "all");
    ensure!(wait::holds(SHORT, lowered)?, "mount {} does not notice what is mounted below it", number + 1);
    Ok(())
}
