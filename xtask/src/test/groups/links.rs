//! The same over every link: a socket of another server, TCP with TLS, and a real sshd.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use serde_json::Value;

use super::two;
use crate::bench::places::Distant;
use crate::process;
use crate::tally::Tally;
use crate::test::mount::{How, Mount};
use crate::test::over::Over;
use crate::test::pages::LocalPages;
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
            let name = format!("links: warm over {} at 10 ms", over.name());
            let start = Instant::now();
            match warm_is_quiet(world, over) {
                Ok(Some(disturbed)) => tally.skip(&name, &disturbed),
                quiet => tally.record(&name, start.elapsed(), quiet.map(drop)),
            }
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

/// Files on the local disk, ten for each that the walk reads: where one of those goes, so do some of these.
const FILES: usize = 1_200;
/// How often it is tried where something is asked: this machine may have taken pages away.
const TRIES: u32 = 4;
/// What a read and its answer may weigh.
const READ_BYTES: u64 = 600;

/// What was touched once makes neither requests nor bytes: in the same time the link carries what it carries
/// when nobody does anything. Where this machine takes pages of local files away meanwhile, it takes those of mounts too, which are
/// read again: says so if it never stopped, and anything else must be so in one of a few windows. Nor is a read excused where anything was recalled.
fn warm_is_quiet(world: &World, over: Over) -> Result<Option<String>> {
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
    let mut seen = Err(anyhow!("no window"));
    for _ in 0..TRIES {
        let warm = walk_warm(world, &distant, &mount)?;
        println!("  {}: {warm}, {idle} bytes while idle", over.name());
        // Inodes go with pages, and of a mount sooner than of the disk: but not in each window.
        match warm.judge(idle) {
            Ok(None) => {
                seen = Ok(None);
                break;
            }
            Ok(excused) => seen = Ok(excused),
            Err(error) if seen.is_err() => seen = Err(error),
            Err(error) => println!("  not so: {error:#}"),
        }
    }
    mount.unmount()?;
    seen
}

/// A window in which a warm tree was walked.
struct Warm {
    rounds: u32,
    bytes: u64,
    requests: u64,
    reads: u64,
    waits: u64,
    /// Of [`Warm::requests`], for free space: what was told of that is told for a minute.
    space: u64,
    recalled: u64,
    by_type: Value,
    /// Pages of local files that were taken away, of how many.
    lost: (usize, usize),
}

fn walk_warm(world: &World, distant: &Distant<'_>, mount: &Mount<'_>) -> Result<Warm> {
    let mut local = LocalPages::new(world, FILES)?;
    let before = mount.status()?;
    let mut rounds = 0;
    let bytes = window(distant, || {
        let end = Instant::now() + WINDOW;
        while Instant::now() < end {
            shell(world, Some(mount), &mount.point, WALK)?;
            local.look()?;
            rounds += 1;
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok(())
    })?;
    let after = mount.status()?;
    let grown = |path: &str| -> u64 {
        let number = |status: &Value| status.pointer(path).and_then(Value::as_u64);
        number(&after).unwrap_or(u64::MAX).saturating_sub(number(&before).unwrap_or(0))
    };
    // There is no such line before the first.
    let of_type = |kind: &str| {
        if after["remote"]["by_type"][kind].is_null() { 0 } else { grown(&format!("/remote/by_type/{kind}")) }
    };
    let (reads, space) = (of_type("read"), of_type("statfs"));
    let by_type = after["remote"]["by_type"].clone();
    let (requests, waits) = (grown("/remote/requests"), grown("/remote/waits"));
    let recalled = grown("/leases/recalled");
    Ok(Warm { rounds, bytes, requests, reads, waits, space, recalled, by_type, lost: local.lost() })
}

impl Warm {
    /// Why it does not count, if nothing but that is wrong.
    fn judge(&self, idle: u64) -> Result<Option<String>> {
        let (lost, of) = self.lost;
        let excused = if lost > 0 && self.recalled == 0 { self.reads } else { 0 };
        // A window is shorter than a minute.
        let foreseen = excused + self.space.min(1);
        let Warm { requests, waits, bytes, by_type, .. } = self;
        ensure!(*requests == foreseen, "{requests} requests, {foreseen} excused: {by_type}");
        ensure!(*waits <= foreseen, "{waits} waits, {foreseen} excused");
        let most = idle + RENEWAL_BYTES + foreseen * READ_BYTES;
        ensure!(
            *bytes <= most,
            "{bytes} bytes while walking warm, {idle} while idle, {excused} reads excused"
        );
        let why = "this machine takes clean pages away by itself";
        Ok((excused > 0)
            .then(|| format!("SKIPPED: {why}: {lost} of {of} pages of local files, {excused} reads")))
    }
}

impl std::fmt::Display for Warm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Warm { rounds, bytes, requests, lost: (lost, of), .. } = self;
        write!(f, "{bytes} bytes and {requests} requests while walking warm {rounds} times, ")?;
        write!(f, "{lost} of {of} local pages taken away")
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn warm(requests: u64, reads: u64, lost: usize) -> Warm {
        let by_type = serde_json::json!({ "read": reads });
        let bytes = 1000 + reads * READ_BYTES;
        Warm {
            rounds: 1,
            bytes,
            requests,
            reads,
            waits: reads,
            space: 0,
            recalled: 0,
            by_type,
            lost: (lost, FILES),
        }
    }

    #[test]
    fn reads_are_excused_only_where_pages_of_local_files_go_too() {
        assert_eq!(warm(0, 0, 0).judge(1000).unwrap(), None);
        assert_eq!(warm(0, 0, 3).judge(1000).unwrap(), None, "none of the mount's were taken");
        assert!(warm(1, 1, 0).judge(1000).is_err(), "it was not this machine");
        assert!(Warm { recalled: 1, ..warm(1, 1, 3) }.judge(1000).is_err(), "nor was it this");
        let why = warm(2, 2, 3).judge(1000).unwrap().unwrap();
        assert!(why.contains("3 of 1200 pages"), "{why}");
    }

    #[test]
    fn what_is_no_read_is_never_excused() {
        assert!(warm(3, 2, 3).judge(1000).is_err(), "a lookup besides");
        assert!(Warm { waits: 3, ..warm(2, 2, 3) }.judge(1000).is_err());
        assert!(Warm { space: 1, ..warm(3, 2, 3) }.judge(1000).is_ok(), "free space is asked once a minute");
        assert!(Warm { space: 2, ..warm(4, 2, 3) }.judge(1000).is_err());
        let most = RENEWAL_BYTES + 2 * READ_BYTES + 1000;
        assert!(Warm { bytes: most, ..warm(2, 2, 3) }.judge(1000).is_ok());
        assert!(Warm { bytes: most + 1, ..warm(2, 2, 3) }.judge(1000).is_err());
    }
}
