//! Changes on the server's own disk are visible at once on watched filesystems (S9): counts and times.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::restart::end_server;
use crate::process;
use crate::report::TestReport;
use crate::root;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};

/// Limit of the 99th percentile of the time until a change is visible, which `bench --host` checks: other work on the machine
/// adds to it.
pub const P99_MS: f64 = 50.0;
const LIMIT: Duration = Duration::from_secs(60);
/// Mounts that begin while their root changes.
const MOUNTS: u32 = 15;
const LONG_LIMIT: Duration = Duration::from_secs(500);

pub fn run(world: &World, tally: &mut TestReport) {
    for who in world.users() {
        for (what, rate) in [("1,000 a second", 1000), ("one after the other", 0)] {
            let name = format!("host: changes on the server's disk, {what}, as {}", who.name());
            tally.test(&name, || changes(world, who, rate));
        }
    }
    // Root passes permission checks whatever the kernel has cached.
    for who in world.users().into_iter().filter(|who| *who != As::Us || !root::is_root()) {
        let name = format!("host: a root that changes while its mount begins, as {}", who.name());
        tally.test(&name, || root_that_changes(world, who));
    }
}

/// The first caller on a mount gets access, though the root directory changes all the while.
fn root_that_changes(world: &World, who: As) -> Result<()> {
    let (source, point) = (world.dir("source", who)?, world.dir("mnt", who)?);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let _ = fs::create_dir(source.join("x")).and_then(|()| fs::remove_dir(source.join("x")));
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let result = (0..MOUNTS).try_for_each(|nth| first_in(world, &source, &point, who, nth));
        stop.store(true, Ordering::Relaxed);
        result
    })
}

fn first_in(world: &World, source: &Path, point: &Path, who: As, nth: u32) -> Result<()> {
    // A server that has just been started sends more at first.
    end_server(world, who)?;
    let mut first = world.command("sh", who);
    let script = "until grep -q \" $1 \" /proc/self/mountinfo; do :; done; exec ls \"$1\"";
    first.args(["-c", script, "sh"]).arg(point).stdin(Stdio::null()).stdout(Stdio::null());
    let mut first = first.stderr(Stdio::piped()).spawn()?;
    let mount = Mount::new(world, source, point, &MountParams::new(who));
    let status = process::wait(&mut first, Duration::from_secs(20))?;
    if status.is_none() {
        // It waits for a mount that does not come, or on one that does not respond.
        mount.iter().for_each(Mount::abort);
        first.kill()?;
    }
    let mount = mount?;
    let ended = first.wait_with_output()?;
    ensure!(
        status.is_some_and(|status| status.success()),
        "mount {nth}: {} (daemon: {})",
        String::from_utf8_lossy(&ended.stderr).trim(),
        mount.said()
    );
    mount.unmount()
}

fn changes(world: &World, who: As, rate: u64) -> Result<()> {
    let (count, dirs) = match (world.short, world.hours) {
        (true, _) => (2000, 100),
        (_, true) => (100_000, 1000),
        _ => (10_000, 1000),
    };
    let figures = change_and_look(world, who, Changes { count, dirs, rate })?;
    println!("  {figures}");
    Ok(())
}

/// A run of `xtask host`.
pub struct Changes {
    pub count: u64,
    pub dirs: u64,
    /// Changes a second; 0: one after the other.
    pub rate: u64,
}

/// Makes changes on the server's disk while a mount reads them. Returns times and recalls; fails unless each change
/// becomes visible.
pub fn change_and_look(world: &World, who: As, changes: Changes) -> Result<Value> {
    let Changes { count, dirs, rate } = changes;
    let (source, point) = (world.dir("source", who)?, world.dir("mnt", who)?);
    let mount = Mount::new(world, &source, &point, &MountParams::new(who))?;
    let mut command = world.command(world.xtask(), who);
    command.args(["host", "--count", &count.to_string(), "--rate", &rate.to_string()]);
    command.args(["--dirs", &dirs.to_string()]).arg("--source").arg(&source).arg("--point").arg(&point);
    let ended = mount.run(command, if world.hours { LONG_LIMIT } else { LIMIT })?;
    ensure!(ended.ok(), "{} (daemon: {})", ended.tail(8), mount.said());
    let mut said: Value = ended.json()?;
    let status = mount.status()?;
    let recalled = status["leases"]["recalled"].as_u64().context("recalls are counted")?;
    let promised = &status["guarantees"]["S9"];
    ensure!(*promised == true, "S9: {promised} (daemon: {})", mount.said());
    ensure!(recalled >= dirs, "only {recalled} recalls: nothing was held");
    said["recalls"] = recalled.into();
    mount.unmount()?;
    Ok(said)
}
