//! The same over every link: a socket of another server, TCP with TLS, and a real sshd.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use serde_json::Value;

use super::two;
use crate::bench::places::Distant;
use crate::report::TestReport;
use crate::test::mount::{Mount, MountParams};
use crate::test::over::{self, LinkKind};
use crate::test::reclaim::Reclaim;
use crate::test::stall_detector::StallDetector;
use crate::test::table::{self, Table};
use crate::test::world::{As, World};

pub fn run(world: &World, tally: &mut TestReport) {
    let tables = world.sample.of("links: tables", &CELLS, 1);
    let two = world.sample.of("links: two mounts", &LinkKind::LINKS, 1);
    let quiet = world.sample.of("links: warm", &[LinkKind::Nigh, LinkKind::Ssh], 1);
    let has_sshd = Path::new("/usr/sbin/sshd").exists();
    if !has_sshd {
        tally.not_run("links: ssh", "sshd is missing: install the package openssh-server");
    }
    let is_here = |over: &LinkKind| has_sshd || *over != LinkKind::Ssh;
    // Before all mounts: it ends the server that serves local mounts, and takes its place.
    if let Err(e) = over::serve(world, As::Us) {
        return tally.fail("links: a server for all links", &format!("{e:#}"));
    }
    std::thread::scope(|scope| {
        // Mostly waits, and counts the bytes of a link of its own.
        let warm = scope.spawn(|| {
            let over = quiet.into_iter().copied().filter(is_here);
            over.map(|over| (over, Instant::now(), warm_is_quiet(world, over), Instant::now()))
                .collect::<Vec<_>>()
        });
        for over in LinkKind::LINKS.into_iter().filter(is_here) {
            world.over(over, || {
                over_one(world, tally, over, &tables);
                if two.contains(&&over) {
                    two::over_a_link(world, tally, over.name());
                }
            });
        }
        let Ok(warm) = warm.join() else { return tally.fail("links: warm", "it panicked") };
        for (over, begun, quiet, ended) in warm {
            let name = format!("links: warm over {} at 10 ms", over.name());
            match quiet {
                Ok(Some(disturbed)) => tally.skip(&name, &disturbed),
                quiet => tally.record(&name, ended - begun, quiet.map(drop)),
            }
        }
    });
}

/// Each link, as root and as an ordinary user.
const CELLS: [(LinkKind, bool); 6] = [
    (LinkKind::Unix, false),
    (LinkKind::Nigh, false),
    (LinkKind::Ssh, false),
    (LinkKind::Unix, true),
    (LinkKind::Nigh, true),
    (LinkKind::Ssh, true),
];

fn over_one(world: &World, tally: &mut TestReport, over: LinkKind, cells: &[&(LinkKind, bool)]) {
    for who in world.mounting_users().into_iter().filter(|who| cells.contains(&&(over, *who != As::Us))) {
        let name = format!("links: {} as {}", over.name(), who.name());
        match world.dir("source", who) {
            Ok(source) => {
                let table = if world.short { Table::NAMES } else { world.table() };
                table::compare(world, tally, &name, &source, &MountParams::new(who), &table)
            }
            Err(e) => tally.fail(&name, &format!("{e:#}")),
        }
    }
}

/// How long bytes are counted: two renewals of a session, which come every third of its term.
const WINDOW: Duration = Duration::from_secs(11);
/// What a renewal more or less in the window may weigh: its frames, TLS or ssh around them, and their
/// answers.
const RENEWAL_BYTES: u64 = 600;

const TREE: &str = "mkdir -p d1/d2/d3; for d in d1 d1/d2 d1/d2/d3; do i=0; while [ $i -lt 40 ]; do i=$((i+1)); \
                    echo $i > $d/f$i; ln -s f$i $d/l$i; done; done";
/// Reads every kind of fact: listings, attributes, symlink targets, absent names, contents.
const WALK: &str = "ls -R > /dev/null; ls -lR > /dev/null; find . -ls > /dev/null; du -s . > /dev/null; \
                    find . -type l -exec readlink {} + > /dev/null; find . -type f -exec cat {} + > /dev/null; \
                    for i in 1 2 3 4 5 6 7 8 9; do test ! -e d1/none$i; test ! -e d1/d2/same; done";

/// How often it is tried where something is asked: this machine may have taken pages away.
const TRIES: u32 = 4;
/// A lease that is renewed every third of its term may lapse where the machine stands still for so long.
const MOST_STILL: Duration = Duration::from_secs(5);
/// What a read and its answer may weigh.
const READ_BYTES: u64 = 600;

/// What was touched once makes neither requests nor bytes: in the same time the link carries what it carries
/// when nobody does anything. Where this machine takes pages away they are read again, and where it stands still for longer than a
/// lease all is asked again: says so if it never stopped, and anything else must be so in one of a few windows. Nor is a read excused where
/// anything was recalled.
fn warm_is_quiet(world: &World, over: LinkKind) -> Result<Option<String>> {
    let source = world.dir("warm-source", As::Us)?;
    shell(world, None, &source, TREE)?;
    let distant = Distant::start(world, &source, over, ("10ms", "1Gbit"), "forever")?;
    let mount = distant.mount(world)?;
    shell(world, Some(&mount), &mount.point, WALK)?;
    let mut since = Seen::now(&mount)?;
    shell(world, Some(&mount), &mount.point, WALK)?;
    let idle = window(&distant, || {
        std::thread::sleep(WINDOW);
        Ok(())
    })?;
    let mut seen = Err(anyhow!("no window"));
    for _ in 0..TRIES {
        let warm = walk_warm(world, &distant, &mount, &mut since)?;
        println!("  {}: {warm}, {idle} bytes while idle", over.name());
        // Pages are not taken away in each window.
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
    lapses: u64,
    /// For how long this machine stood still at the most.
    stood_still: Duration,
    by_type: Value,
    /// Pages that this machine had taken away and that were read again, at the most: of whichever filesystem.
    read_again: u64,
}

/// How it was when all had been touched last.
struct Seen {
    status: Value,
    reclaim: Reclaim,
}

impl Seen {
    fn now(mount: &Mount<'_>) -> Result<Seen> {
        Ok(Seen { status: mount.status()?, reclaim: Reclaim::now()? })
    }
}

fn walk_warm(world: &World, distant: &Distant<'_>, mount: &Mount<'_>, since: &mut Seen) -> Result<Warm> {
    let Seen { status: before, reclaim: from } = Seen::now(mount)?;
    let pulse = StallDetector::start();
    let mut rounds = 0;
    let bytes = window(distant, || {
        let end = Instant::now() + WINDOW;
        while Instant::now() < end {
            shell(world, Some(mount), &mount.point, WALK)?;
            rounds += 1;
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok(())
    })?;
    let stood_still = pulse.stop();
    let last = std::mem::replace(since, Seen::now(mount)?);
    let Seen { status: after, reclaim: to } = since;
    let since_then = |path: &str, then: &Value| -> u64 {
        let number = |status: &Value| status.pointer(path).and_then(Value::as_u64);
        number(after).unwrap_or(u64::MAX).saturating_sub(number(then).unwrap_or(0))
    };
    let grown = |path: &str| since_then(path, &before);
    // There is no such line before the first.
    let of_type = |kind: &str| {
        if after["remote"]["by_type"][kind].is_null() { 0 } else { grown(&format!("/remote/by_type/{kind}")) }
    };
    let (reads, space) = (of_type("read"), of_type("statfs"));
    let kinds = after["remote"]["by_type"].as_object().into_iter().flatten();
    let by_type = kinds.map(|(kind, _)| (kind.clone(), Value::from(of_type(kind)))).collect();
    let (requests, waits) = (grown("/remote/requests"), grown("/remote/waits"));
    let (recalled, lapses) = (since_then("/leases/recalled", &last.status), grown("/remote/lapses"));
    let read_again = Reclaim::read_again(last.reclaim, from, *to);
    Ok(Warm {
        rounds,
        bytes,
        requests,
        reads,
        waits,
        space,
        recalled,
        lapses,
        stood_still,
        by_type,
        read_again,
    })
}

impl Warm {
    /// Why it does not count, if nothing but that is wrong.
    fn judge(&self, idle: u64) -> Result<Option<String>> {
        if self.lapses > 0 {
            let stood = self.stood_still;
            ensure!(
                stood >= MOST_STILL,
                "the lease lapsed, though the machine stood still for {stood:?} only"
            );
            return Ok(Some(format!(
                "SKIPPED: this machine stood still for {stood:?}, and the lease lapsed"
            )));
        }
        let excused = if self.recalled == 0 { self.reads.min(self.read_again) } else { 0 };
        // A window is shorter than a minute.
        let foreseen = excused + self.space.min(1);
        let Warm { requests, waits, bytes, recalled, by_type, .. } = self;
        ensure!(
            *requests == foreseen,
            "{requests} requests, {foreseen} excused, {recalled} recalls: {by_type}"
        );
        ensure!(*waits <= foreseen, "{waits} waits, {foreseen} excused");
        let most = idle + RENEWAL_BYTES + foreseen * READ_BYTES;
        ensure!(
            *bytes <= most,
            "{bytes} bytes while walking warm, {idle} while idle, {excused} reads excused"
        );
        let why = "this machine takes clean pages away by itself";
        let again = self.read_again;
        Ok((excused > 0)
            .then(|| format!("SKIPPED: {why}: {again} were read again, {excused} of the mount's")))
    }
}

impl std::fmt::Display for Warm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Warm { rounds, bytes, requests, by_type, lapses, recalled, stood_still, read_again, .. } = self;
        write!(f, "{bytes} bytes and {requests} requests while walking warm {rounds} times, ")?;
        write!(
            f,
            "{read_again} pages that were taken away read again, still for {stood_still:?}, {recalled} recalls, {lapses} lapses: \
             {by_type}"
        )
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

    fn warm(requests: u64, reads: u64, read_again: u64) -> Warm {
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
            lapses: 0,
            stood_still: Duration::ZERO,
            by_type,
            read_again,
        }
    }

    #[test]
    fn reads_are_excused_only_where_as_many_pages_were_taken_away() {
        assert_eq!(warm(0, 0, 0).judge(1000).unwrap(), None);
        assert_eq!(warm(0, 0, 3).judge(1000).unwrap(), None, "none of the mount's were taken");
        assert!(warm(1, 1, 0).judge(1000).is_err(), "it was not this machine");
        assert!(warm(4, 4, 3).judge(1000).is_err(), "one of them was not");
        assert!(Warm { recalled: 1, ..warm(1, 1, 3) }.judge(1000).is_err(), "nor was it this");
        let why = warm(2, 2, 3).judge(1000).unwrap().unwrap();
        assert!(why.contains("3 were read again, 2 of the mount's"), "{why}");
    }

    #[test]
    fn a_lapse_is_excused_only_where_the_machine_stood_still() {
        let lapsed = |stood_still| Warm { lapses: 1, stood_still, ..warm(5, 0, 0) }.judge(1000);
        assert!(lapsed(MOST_STILL / 2).is_err(), "it was not renewed");
        assert!(lapsed(MOST_STILL * 3).unwrap().unwrap().contains("stood still"));
        assert!(Warm { stood_still: MOST_STILL * 3, ..warm(1, 0, 0) }.judge(1000).is_err(), "it held");
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
