//! `nigh demo`: under a minute, exit 0, nothing left behind.

use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::report::TestReport;
use crate::test::world::{As, World};

pub fn run(world: &World, tally: &mut TestReport) {
    for who in world.users() {
        tally.test(&format!("demo as {}", who.name()), || demo(world, who));
    }
}

fn demo(world: &World, who: As) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let temporary = world.dir("demo-tmp", who)?;
    let mut command = world.command(world.nigh(), who);
    command.arg("demo").env("TMPDIR", &temporary);
    let ended = world.run(command, Duration::from_secs(60))?;
    ensure!(ended.ok(), "exit {:?}: {}", ended.code(), ended.tail(8));
    ensure!(!ended.said.trim().is_empty(), "it shows nothing");
    ensure!(fs::read_to_string("/proc/self/mountinfo")? == mounts, "something is still mounted");
    let left: Vec<_> = fs::read_dir(&temporary)?.flatten().map(|e| e.file_name()).collect();
    ensure!(left.is_empty(), "left in the temporary directory: {left:?}");
    Ok(())
}
