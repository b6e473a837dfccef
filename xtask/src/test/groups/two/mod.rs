//! Several mounts of one tree, each with a daemon of its own, at one server: an operation that starts after another
//! returned, on whichever mount, sees its effect (S1). They mount with `--host-timeout=forever`, so that only recalls
//! can make it true.

mod below;
mod counts;
mod programs;
mod races;
mod scans;
mod stopped;
mod tables;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::process::{self, CommandResult};
use crate::report::TestReport;
use crate::root;
use crate::test::mount::{Mount, MountParams, no_orphans};
use crate::test::world::{As, World};

/// A part that would begin later fails instead: a slow or hanging part must not hold up everything.
const LIMIT: Duration = Duration::from_secs(1_200);
const SHORT_LIMIT: Duration = Duration::from_secs(600);
const LONG_LIMIT: Duration = Duration::from_secs(4 * 3600);

pub fn run(world: &World, tally: &mut TestReport) {
    if !root::is_root() && process::which("fusermount3").is_none() {
        return tally.not_run("two", "fusermount3 is missing: install the package fuse3");
    }
    let limit = match (world.short, world.hours) {
        (true, _) => SHORT_LIMIT,
        (_, true) => LONG_LIMIT,
        _ => LIMIT,
    };
    let deadline = Deadline(Instant::now() + limit);
    let parts: &[(&str, Subgroup)] = &[
        ("tables", tables::run),
        ("counts", counts::run),
        ("races", races::run),
        ("programs", programs::run),
        ("scans, stopped", scans_and_stopped),
        ("below", below::run),
    ];
    for (name, part) in parts {
        let start = Instant::now();
        part(world, tally, &deadline);
        println!("two: {name}: {:.0} s", start.elapsed().as_secs_f64());
    }
}

/// Runs the table and the programs once, over the configured link.
pub fn over_a_link(world: &World, tally: &mut TestReport, name: &str) {
    let deadline = Deadline(Instant::now() + SHORT_LIMIT);
    tables::once(world, tally, &format!("two over {name}"));
    programs::run(world, tally, &deadline);
}

/// The second waits for a lease to expire most of the time.
fn scans_and_stopped(world: &World, tally: &mut TestReport, deadline: &Deadline) {
    let mut tests = vec![scans::TEST, stopped::TEST];
    tests.retain(|(name, _)| !deadline.is_over(tally, name));
    super::at_once(world, tally, &tests);
}

type Subgroup = fn(&World, &mut TestReport, &Deadline);

/// The time by which the group must be done.
struct Deadline(Instant);

impl Deadline {
    /// Returns whether it is too late to begin a part, which then counts as failed.
    fn is_over(&self, tally: &mut TestReport, name: &str) -> bool {
        let over = Instant::now() > self.0;
        if over {
            tally.fail(name, "not begun: what came before took too long");
        }
        over
    }
}

/// An environment variable of a mount's daemon, and its value.
type DaemonVariable = (&'static str, &'static str);

const ALL: DaemonVariable = ("NIGH_NOTIFY_LEVEL", "all");
const NO_EPOCH: DaemonVariable = ("NIGH_NOTIFY_LEVEL", "no-epoch");
const NONE: DaemonVariable = ("NIGH_NOTIFY_LEVEL", "none");
const OLD: DaemonVariable = ("NIGH_FUSE_MINOR", "31");

/// Mounts of one directory. A call that hangs on one may wait for another, so all are aborted together.
struct Mounts<'w> {
    world: &'w World,
    who: As,
    source: PathBuf,
    mounts: Vec<Mount<'w>>,
    aborted: Cell<bool>,
}

impl<'w> Mounts<'w> {
    fn new(world: &'w World, who: As, kinds: &[DaemonVariable]) -> Result<Mounts<'w>> {
        Mounts::named(world, "", who, kinds)
    }

    /// `test` begins the names of the directories.
    fn named(world: &'w World, test: &str, who: As, kinds: &[DaemonVariable]) -> Result<Mounts<'w>> {
        let dir = |name: &str| world.dir(&format!("{test}{name}"), who);
        let source = dir("source")?;
        let mut all = Mounts { world, who, source, mounts: Vec::new(), aborted: Cell::new(false) };
        for (i, (variable, value)) in kinds.iter().enumerate() {
            let point = dir(&format!("mnt-{}", i + 1))?;
            let how = MountParams::new(who).set(variable, value).with("--host-timeout=forever");
            let mount = Mount::new(world, &all.source, &point, &how);
            all.mounts.push(mount.with_context(|| format!("mount {}", i + 1))?);
        }
        Ok(all)
    }

    fn point(&self, number: usize) -> &Path {
        &self.mounts[number].point
    }

    /// Runs a command that uses several mounts. If it does not end in time, all their connections are aborted.
    fn run(&self, command: Command, limit: Duration) -> Result<CommandResult> {
        ensure!(!self.aborted.get(), "the mounts were aborted before");
        let ended = self.world.run(command, limit)?;
        if ended.how == process::ExitKind::TimedOut {
            self.aborted.set(true);
            for mount in &self.mounts {
                mount.abort();
            }
        }
        Ok(ended)
    }

    /// Runs a shell script with the mount points as `$A`, `$B`, `$C`; returns its output.
    fn sh(&self, script: &str, limit: Duration) -> Result<String> {
        let mut command = self.world.command("sh", self.who);
        command.args(["-euc", script]).env("LC_ALL", "C").env("WORK", &self.world.root);
        for (name, mount) in ["A", "B", "C"].iter().zip(&self.mounts) {
            command.env(name, &mount.point);
        }
        let ended = self.run(command, limit)?;
        ensure!(ended.ok(), "{}", ended.tail(6));
        Ok(ended.said)
    }

    /// Returns a number of `nigh status --json`, by its keys.
    fn status(&self, number: usize, keys: [&str; 2]) -> Result<u64> {
        let status: Value = self.mounts[number].status()?;
        let value = status[keys[0]][keys[1]].as_u64();
        value.with_context(|| format!("nigh status has no number {}.{}", keys[0], keys[1]))
    }

    /// Returns how often the mounts dropped all dentries because one could not be dropped in time.
    fn fallbacks(&self) -> Result<u64> {
        (0..self.mounts.len()).map(|number| self.status(number, ["kernel", "epoch_fallbacks"])).sum()
    }

    fn said(&self) -> String {
        let all = self.mounts.iter().map(Mount::said).filter(|said| !said.is_empty());
        all.collect::<Vec<_>>().join(" // ")
    }

    fn unmount(self) -> Result<()> {
        if self.aborted.get() {
            bail!("a mount hung and was aborted");
        }
        for (i, mount) in self.mounts.into_iter().enumerate() {
            mount.unmount().with_context(|| format!("mount {}", i + 1))?;
        }
        no_orphans(&self.source)
    }
}
