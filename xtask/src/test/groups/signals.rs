//! S8: a fatal signal ends any wait within 50 ms; other signals interrupt only blocking locks.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::link::client::Emulator;
use crate::process;
use crate::report::TestReport;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};

/// The limit of S8.
const FATAL_LIMIT: Duration = Duration::from_millis(50);
/// The limit that a busy machine may reach once. A reply would take longer.
const FATAL_LIMIT_ONCE: Duration = Duration::from_secs(1);

const ROUNDS: u32 = 8;

pub fn run(world: &World, tally: &mut TestReport) {
    let tests: &[super::Test] = &[
        ("a build at 50 ms under 1,000 alarms a second", build_under_alarms),
        ("SIGKILL ends a wait for a slow answer", killed_while_slow),
        ("SIGKILL ends a wait for a link that is silent", killed_while_silent),
        ("SIGTERM ends a process that does not catch it", terminated_while_silent),
    ];
    for (name, test) in tests {
        tally.test(name, || test(world));
    }
}

/// A mount over an emulated link. A second mount without the link keeps the server running.
struct Distant<'w> {
    link: Emulator,
    mount: Mount<'w>,
    _keeper: Mount<'w>,
}

fn distant<'w>(world: &'w World, rtt: &str) -> Result<Distant<'w>> {
    let who = As::Us;
    let (idle, keep) = (world.dir("keeper-source", who)?, world.dir("keeper", who)?);
    let keeper = Mount::new(world, &idle, &keep, &MountParams::new(who))?;
    let link = world.link(rtt)?;
    let (source, point) = (world.dir("source", who)?, world.dir("mnt", who)?);
    // Made before mounting: a cached absence would need no wait.
    for round in 0..ROUNDS {
        fs::create_dir(source.join(format!("d{round}")))?;
    }
    let how = MountParams::new(who).through(&link);
    let mount = Mount::new(world, &source, &point, &how)?;
    Ok(Distant { link, mount, _keeper: keeper })
}

fn build_under_alarms(world: &World) -> Result<()> {
    let distant = distant(world, "50ms")?;
    let mut command = world.command(world.root.join("bin/nigh-posix"), As::Us);
    command.args(["--table", "signals", "--dir"]).arg(&distant.mount.point).args(["--limit-s", "100"]);
    let ended = distant.mount.run(command, Duration::from_secs(120))?;
    ensure!(ended.ok(), "{}", ended.tail(6));
    let counted = distant.link.counts()?;
    let bytes = counted["to_server"]["bytes"].as_u64().context("the emulator counts no bytes")?;
    ensure!(bytes > 0, "nothing went over the link: NIGH_LINK was not used");
    distant.mount.unmount()
}

fn killed_while_slow(world: &World) -> Result<()> {
    let distant = distant(world, "2s")?;
    all_end(&distant, libc::SIGKILL)?;
    drop(distant);
    Ok(())
}

fn killed_while_silent(world: &World) -> Result<()> {
    let distant = distant(world, "10ms")?;
    distant.link.pause()?;
    all_end(&distant, libc::SIGKILL)?;
    distant.link.resume()?;
    distant.mount.unmount()
}

fn terminated_while_silent(world: &World) -> Result<()> {
    let distant = distant(world, "10ms")?;
    distant.link.pause()?;
    all_end(&distant, libc::SIGTERM)?;
    distant.link.resume()?;
    distant.mount.unmount()
}

/// Processes that wait for a reply end at once after the signal.
fn all_end(distant: &Distant<'_>, signal: i32) -> Result<()> {
    let mut times =
        (0..ROUNDS).map(|round| time_to_end(distant, round, signal)).collect::<Result<Vec<_>>>()?;
    times.sort_unstable();
    println!("  from signal to end: {times:.1?}");
    let [others @ .., worst] = &times[..] else { bail!("nothing was measured") };
    let others = others.last().context("one was measured")?;
    ensure!(*others <= FATAL_LIMIT && *worst <= FATAL_LIMIT_ONCE, "it took {others:?}, and {worst:?} once");
    Ok(())
}

/// Returns the time from a signal to the end of a process that waits for a reply.
fn time_to_end(distant: &Distant<'_>, round: u32, signal: i32) -> Result<Duration> {
    let at = distant.mount.point.join(format!("d{round}"));
    let words: Vec<String> = match round % 4 {
        0 => vec!["stat".into(), at.join("missing").display().to_string()],
        1 => vec!["ls".into(), at.display().to_string()],
        2 => vec!["mkdir".into(), at.join("new").display().to_string()],
        _ => vec!["sh".into(), "-c".into(), format!("exec cat {}/*", at.display())],
    };
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    std::thread::sleep(Duration::from_millis(150));
    ensure!(child.try_wait()?.is_none(), "{} did not wait for the link", words.join(" "));
    let start = Instant::now();
    process::signal(child.id(), signal);
    let ended = ends(&mut child)?;
    let took = start.elapsed();
    if !ended {
        distant.mount.abort();
        let _ = process::wait(&mut child, Duration::from_secs(5));
        bail!("{} lives 5 s after signal {signal}", words.join(" "));
    }
    Ok(took)
}

fn ends(child: &mut Child) -> Result<bool> {
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        if child.try_wait()?.is_some() {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(false)
}
