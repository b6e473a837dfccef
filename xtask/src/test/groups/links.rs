//! The same over every link: a socket of another server, TCP with TLS, and a real sshd.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use super::two;
use crate::bench::places::Distant;
use crate::process;
use crate::tally::Tally;
use crate::test::mount::{How, Mount};
use crate::test::over::Over;
use crate::test::table;
use crate::test::world::{As, World};

pub fn run(world: &World, tally: &mut Tally) {
    for over in Over::LINKS {
        if over == Over::Ssh && !Path::new("/usr/sbin/sshd").exists() {
            tally.not_run("links: ssh", "sshd is missing: install the package openssh-server");
            continue;
        }
        world.over(over, || over_one(world, tally, over));
        if over != Over::Unix {
            let start = Instant::now();
            let quiet = warm_is_quiet(world, over);
            tally.record(&format!("links: warm over {} at 10 ms", over.name()), start.elapsed(), quiet);
        }
    }
}

fn over_one(world: &World, tally: &mut Tally, over: Over) {
    let mut users = vec![As::Us];
    if process::which("fusermount3").is_some() {
        users.extend(world.tester.filter(|who| *who != As::Us));
    }
    for who in users.into_iter().filter(|who| *who == As::Us || over == Over::Ssh || !world.short) {
        let name = format!("links: {} as {}", over.name(), who.name());
        match world.dir("source", who) {
            Ok(source) => table::compare(world, tally, &name, &source, &How::new(who)),
            Err(e) => tally.fail(&name, &format!("{e:#}")),
        }
    }
    two::over_a_link(world, tally, over.name());
}

/// How long bytes are counted: two renewals of a session, which come every third of its term.
const WINDOW: Duration = Duration::from_secs(11);
/// What a renewal more or less in the window may weigh: its frames, TLS or ssh around them, and their
/// answers.
const RENEWAL_BYTES: u64 = 600;

const TREE: &str = "mkdir -p d1/d2/d3; for d in d1 d1/d2 d1/d2/d3; do i=0; while [ $i -lt 40 ]; do i=$((i+1)); \
                    echo $i > $d/f$i; ln -s f$i $d/l$i; done; done";
/// What workloads.md reads: listings, attributes, targets, what is not there, contents.
const WALK: &str = "ls -R > /dev/null; ls -lR > /dev/null; find . -ls > /dev/null; du -s . > /dev/null; \
                    find . -type l -exec readlink {} + > /dev/null; find . -type f -exec cat {} + > /dev/null; \
                    for i in 1 2 3 4 5 6 7 8 9; do test ! -e d1/none$i; test ! -e d1/d2/same; done";

/// What was touched once makes neither requests nor bytes: in the same time the link carries what it carries
/// when nobody does anything.
fn warm_is_quiet(world: &World, over: Over) -> Result<()> {
    let source = world.dir("source", As::Us)?;
    shell(world, None, &source, TREE)?;
    let distant = Distant::start(world, &source, over, ("10ms", "1Gbit"), "forever")?;
    let mount = distant.mount(world)?;
    for _ in 0..2 {
        shell(world, Some(&mount), &mount.point, WALK)?;
    }
    let idle = window(&distant, || {
        std::thread::sleep(WINDOW);
        Ok(())
    })?;
    let before = mount.status()?;
    let mut rounds = 0;
    let busy = window(&distant, || {
        let end = Instant::now() + WINDOW;
        while Instant::now() < end {
            shell(world, Some(&mount), &mount.point, WALK)?;
            rounds += 1;
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok(())
    })?;
    let after = mount.status()?;
    let grown = |key: &str| -> u64 {
        let number = |status: &Value| status["remote"][key].as_u64().unwrap_or(u64::MAX);
        number(&after).saturating_sub(number(&before))
    };
    println!("  {}: {busy} bytes while walking warm {rounds} times, {idle} while idle", over.name());
    ensure!(grown("requests") == 0, "{} requests: {}", grown("requests"), after["remote"]["by_type"]);
    ensure!(grown("waits") == 0, "{} waits", grown("waits"));
    ensure!(busy <= idle + RENEWAL_BYTES, "{busy} bytes while walking warm, {idle} while idle");
    mount.unmount()
}

/// Bytes that passed the link meanwhile, both ways.
fn window(distant: &Distant<'_>, act: impl FnOnce() -> Result<()>) -> Result<u64> {
    let bytes = || -> Result<u64> {
        let counts = distant.link.counts()?;
        Ok(["to_server", "to_client"].iter().filter_map(|way| counts[*way]["bytes"].as_u64()).sum())
    };
    let before = bytes()?;
    act()?;
    Ok(bytes()? - before)
}

fn shell(world: &World, mount: Option<&Mount<'_>>, dir: &Path, script: &str) -> Result<()> {
    let mut command = world.command("sh", As::Us);
    command.args(["-euc", script]).current_dir(dir);
    let limit = Duration::from_secs(60);
    let ended = match mount {
        Some(mount) => mount.run(command, limit)?,
        None => world.run(command, limit)?,
    };
    ensure!(ended.ok(), "{}", ended.tail(5));
    Ok(())
}
