//! The server dies, or the link is cut, again and again under a load of readers and writers (`xtask load`), with locks
//! held throughout: no hang, no error, no loss, no duplicates except appends in flight at a kill, and a waiting process
//! can be killed. Changes of names under the same faults are in group `checker`.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{disconnect, kill_server, stall};
use crate::bench::places::Distant;
use crate::load;
use crate::process;
use crate::test::mount::{Mount, MountParams, no_orphans};
use crate::test::over::{self, LinkKind};
use crate::test::world::{As, World};

const WHO: As = As::Us;
/// Limit until every worker has made calls again. A restarted server holds changes back until its clients have
/// returned, at most for 1.1 of a session's term.
const GOES_ON_WITHIN: Duration = Duration::from_secs(20);
/// How long after its SIGKILL a server may still execute something.
const DYING: Duration = Duration::from_millis(100);

fn rounds(world: &World) -> u64 {
    if world.short { 5 } else { 100 }
}

pub fn killed_servers(world: &World) -> Result<()> {
    let source = world.dir("source", WHO)?;
    load::prepare(&source)?;
    let point = world.dir("mnt", WHO)?;
    let mount = Mount::new(world, &source, &point, &MountParams::new(WHO).with("--host-timeout=forever"))?;
    let mut under = LoadedMount::start(world, mount, LinkKind::Local, source)?;
    for round in 0..rounds(world) {
        let began = load::moment();
        kill_server(world)?;
        let ended = load::moment() + u64::try_from(DYING.as_nanos())?;
        under.work.tell(&load::kill_line(began, ended))?;
        under.locks_are_free([false, false]).with_context(|| format!("kill {round}"))?;
        under.goes_on().with_context(|| format!("kill {round}"))?;
        std::thread::sleep(Duration::from_millis(round * 7 % 50));
    }
    under.finish().map(drop)
}

pub fn cut_links(world: &World) -> Result<()> {
    cut_over(world, LinkKind::Local)
}

pub fn cut_links_by_tcp(world: &World) -> Result<()> {
    cut_over(world, LinkKind::Nigh)
}

fn cut_over(world: &World, over: LinkKind) -> Result<()> {
    let source = world.dir("source", WHO)?;
    load::prepare(&source)?;
    if over == LinkKind::Nigh {
        // A user has one server; the mount beside must find this one.
        over::serve(world, WHO)?;
    }
    let distant = Distant::start(world, &source, over, ("1ms", "1Gbit"), "forever")?;
    let mount = distant.mount(world)?;
    let mut under = LoadedMount::start(world, mount, over, source)?;
    for round in 0..rounds(world) {
        if round.is_multiple_of(2) {
            distant.link.cut()?;
        } else {
            distant.link.down()?;
            under.one_is_killed(round)?;
            distant.link.up()?;
        }
        under.locks_are_free([false, false]).with_context(|| format!("cut {round}"))?;
        under.goes_on().with_context(|| format!("cut {round}"))?;
        std::thread::sleep(Duration::from_millis(round * 7 % 50));
    }
    let doubts = under.finish()?;
    ensure!(doubts == 0, "{doubts} calls were in doubt although no server died");
    Ok(())
}

/// The load process; ended when dropped.
struct LoadProcess {
    child: Child,
    input: Option<ChildStdin>,
    log: PathBuf,
    progress: PathBuf,
}

impl LoadProcess {
    fn start(world: &World, mount: &Mount<'_>) -> Result<LoadProcess> {
        let (log, progress) = (world.log(), world.in_memory().join("progress"));
        let _ = fs::remove_file(&progress);
        let mut command = world.command(world.xtask(), WHO);
        command.arg("load").arg(&mount.point).arg("--progress").arg(&progress).process_group(0);
        let file = File::create(&log)?;
        command.stdin(Stdio::piped()).stdout(file.try_clone()?).stderr(file);
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        Ok(LoadProcess { child, input, log, progress })
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        Ok(self.input.as_mut().context("it was told to end")?.write_all(line.as_bytes())?)
    }

    fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).trim().to_owned()
    }

    /// Returns how many calls each worker has made; an error if a worker found a wrong result.
    fn progress(&mut self) -> Result<Vec<u64>> {
        ensure!(self.child.try_wait()?.is_none(), "the load: {}", self.said());
        if self.progress.exists() { load::progress(&self.progress) } else { Ok(vec![]) }
    }
}

impl Drop for LoadProcess {
    fn drop(&mut self) {
        process::end(&mut self.child, Duration::ZERO);
    }
}

/// A load on a mount, and another mount of the directory.
struct LoadedMount<'w> {
    work: LoadProcess,
    world: &'w World,
    mount: Mount<'w>,
    beside: Mount<'w>,
    source: PathBuf,
}

impl<'w> LoadedMount<'w> {
    fn start(world: &'w World, mount: Mount<'w>, over: LinkKind, source: PathBuf) -> Result<LoadedMount<'w>> {
        let mut how = MountParams::new(WHO).with("--host-timeout=forever");
        how.over = Some((over, None));
        let beside = Mount::new(world, &source, &world.dir("mnt-2", WHO)?, &how)?;
        let work = LoadProcess::start(world, &mount)?;
        let mut under = LoadedMount { work, world, mount, beside, source };
        under.goes_on()?;
        Ok(under)
    }

    /// Waits until each worker has made some more calls.
    fn goes_on(&mut self) -> Result<()> {
        let before = self.work.progress()?;
        let end = Instant::now() + GOES_ON_WITHIN;
        loop {
            let now = self.work.progress()?;
            let more = |(at, now): (usize, &u64)| *now >= before.get(at).unwrap_or(&0) + 3;
            if !now.is_empty() && now.iter().enumerate().all(more) {
                return Ok(());
            }
            if Instant::now() > end {
                let problem = match self.mount.status() {
                    Ok(status) => status["remote"]["problem"].to_string(),
                    Err(error) => error.to_string(),
                };
                bail!(
                    "after {GOES_ON_WITHIN:?} a worker still waits: {before:?}, {now:?}; problem: {problem}; daemon: {}\n  {}",
                    self.mount.said(),
                    stall::picture(self.world, &self.mount, &self.source)
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Checks whether the other mount can take the load's flock and range lock.
    fn locks_are_free(&self, expected: [bool; 2]) -> Result<()> {
        let mut command = self.world.command(self.world.xtask(), WHO);
        command.arg("load").arg(&self.beside.point).arg("--try-locks");
        let ended = self.beside.run(command, GOES_ON_WITHIN)?;
        ensure!(ended.ok(), "trying locks: {}", ended.tail(3));
        let free: [bool; 2] = serde_json::from_str(ended.said.trim())?;
        ensure!(free == expected, "flock and range lock are free: {free:?}, not {expected:?}");
        Ok(())
    }

    /// A process that waits for the link exits within a second of its SIGKILL.
    fn one_is_killed(&self, round: u64) -> Result<()> {
        let at = |name: &str| self.mount.point.join(name).display().to_string();
        let new = at(&format!("killed-{round}"));
        match round / 2 % 3 {
            0 => disconnect::killed(&["mkdir", &new], &self.mount),
            1 => disconnect::killed(&["touch", &new], &self.mount),
            _ => disconnect::killed(&["flock", &at("lock-flock"), "true"], &self.mount),
        }
    }

    /// Ends the load, which checks everything once more; returns the number of calls with an unknown outcome after a
    /// kill that did not take effect exactly once.
    fn finish(mut self) -> Result<u64> {
        self.work.progress()?;
        drop(self.work.input.take());
        let status = process::wait(&mut self.work.child, Duration::from_secs(60))?;
        let said = self.work.said();
        ensure!(status.context("the load does not end")?.success(), "the load: {said}");
        self.locks_are_free([true, true])?;
        for name in ["appended-1", "appended-2", "in-place"] {
            let there = fs::read(self.source.join(name))?;
            ensure!(there == fs::read(self.mount.point.join(name))?, "{name} on the mount is another");
            ensure!(
                there == fs::read(self.beside.point.join(name))?,
                "{name} on the mount beside is another"
            );
        }
        let said: Value = serde_json::from_str(said.lines().last().unwrap_or_default())?;
        let number = |key: &str| said[key].as_u64().with_context(|| format!("{key} is not said: {said}"));
        let (longest_ms, doubts) = (number("longest_ms")?, number("doubts")?);
        let longest_call = said["longest_call"].as_str().unwrap_or("?");
        println!(
            "  {} calls, the longest {longest_ms} ms ({longest_call}), {doubts} in doubt",
            number("calls")?
        );
        ensure!(u128::from(longest_ms) < GOES_ON_WITHIN.as_millis(), "a call took {longest_ms} ms");
        let LoadedMount { work, mount, beside, source, .. } = self;
        drop(work);
        mount.unmount()?;
        beside.unmount()?;
        no_orphans(&source)?;
        Ok(doubts)
    }
}
