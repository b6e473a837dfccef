//! Runs the POSIX table and compares what it says on a mount with what it says on a local directory.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::mount::{Mount, MountParams, no_orphans};
use super::world::{As, World};
use crate::process::CommandResult;
use crate::report::TestReport;

const LIMIT: Duration = Duration::from_secs(600);

/// Cases that no FUSE filesystem has: `fuse_file_fallocate` refuses these modes before any daemon is asked.
const INHERENT: &[&str] = &["space_collapse_range", "space_insert_range"];

/// Cases that need a later protocol: the prefix of their names, and the first minor version that has it.
const SINCE: &[(&str, u32)] = &[("create_tmpfile", 37), ("attributes_birth_time", 39)];

/// Cases that may fail with an older protocol. `rename_in_use`: without `FUSE_EXPIRE_ONLY` a dentry in use can only be dropped.
const FAILS_BEFORE: &[(&str, u32)] = &[("rename_in_use", 38)];

/// Cases that an export on that filesystem does not have.
const NOT_ON: &[(&str, &str)] = &[];

/// Whether a case may be skipped with that protocol though the local directory passes it.
#[must_use]
pub fn lacks(case: &str, minor: u32) -> bool {
    INHERENT.contains(&case) || SINCE.iter().any(|(name, since)| case.starts_with(name) && minor < *since)
}

fn fails(case: &str, minor: u32) -> bool {
    FAILS_BEFORE.iter().any(|(name, since)| case == *name && minor < *since)
}

/// One case's verdict.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    Passed,
    Skipped(String),
    Failed(String),
}

pub type Verdicts = BTreeMap<String, Verdict>;

/// Which table to run, and how.
#[derive(Clone)]
pub struct Table<'a> {
    pub name: &'a str,
    pub beside: Option<&'a Path>,
    pub within: Duration,
    /// How many entries the largest directory of a case gets.
    pub entries: u32,
    /// Parts of names of cases, divided by commas; empty: all cases.
    pub cases: &'a str,
    /// How many cases run at a time.
    pub jobs: u32,
}

impl Table<'_> {
    pub const EVERYDAY: Table<'static> =
        Table { name: "everyday", beside: None, within: Duration::ZERO, entries: 10_000, cases: "", jobs: 1 };
    /// A large directory of a short run, which has some pages of names in each buffer of the kernel.
    pub const MEDIUM: Table<'static> = Table { entries: 4_000, jobs: 2, ..Table::EVERYDAY };
    /// Large directories are listed once in a short run; elsewhere some pages of names will do.
    pub const SMALL: Table<'static> = Table { entries: 1_000, jobs: 2, ..Table::EVERYDAY };
    /// Whether names lead to the right inodes.
    pub const NAMES: Table<'static> = Table { cases: "create,links,rename,paths,kinds", ..Table::SMALL };

    /// Whether changes on another path show within a limit. Its cases wait most of the time.
    #[must_use]
    pub fn shared(beside: &Path, within: Duration) -> Table<'_> {
        Table { name: "shared", beside: Some(beside), within, jobs: 4, ..Table::EVERYDAY }
    }
}

/// Runs a table in a directory; `guard` frees what hangs.
pub fn run(
    world: &World,
    dir: &Path,
    who: As,
    table: &Table<'_>,
    guard: Option<&Mount<'_>>,
) -> Result<Verdicts> {
    let mut command = world.command(world.root.join("bin/nigh-posix"), who);
    command.arg("--dir").arg(dir).args(["--table", table.name, "--entries", &table.entries.to_string()]);
    command.args(["--filter", table.cases, "--jobs", &table.jobs.to_string()]);
    if let Some(beside) = table.beside {
        command.arg("--beside").arg(beside);
        command.arg("--within-ms").arg(table.within.as_millis().to_string());
    }
    let ended = match guard {
        Some(mount) => mount.run(command, LIMIT)?,
        None => world.run(command, LIMIT)?,
    };
    let verdicts = parse(&ended);
    if verdicts.is_empty() {
        bail!("the table said nothing: {}", ended.tail(5));
    }
    Ok(verdicts)
}

/// The verdicts that a table printed.
#[must_use]
pub fn parse(ended: &CommandResult) -> Verdicts {
    let mut verdicts = Verdicts::new();
    for line in ended.said.lines() {
        let named = |rest: &str| {
            let (name, why) = rest.split_once(": ").unwrap_or((rest, ""));
            (name.to_owned(), why.to_owned())
        };
        if let Some(rest) = line.strip_prefix("ok ") {
            verdicts.insert(rest.to_owned(), Verdict::Passed);
        } else if let Some(rest) = line.strip_prefix("skip ") {
            let (name, why) = named(rest);
            verdicts.insert(name, Verdict::Skipped(why));
        } else if let Some(rest) = line.strip_prefix("FAILED ") {
            let (name, why) = named(rest);
            verdicts.insert(name, Verdict::Failed(why));
        }
    }
    verdicts
}

/// Runs the table in a local directory, and at the same time on a mount of `source`, and counts each case. A case that
/// passes in the local directory may not be skipped on the mount. The local directory is made beside `source`.
pub fn compare(
    world: &World,
    tally: &mut TestReport,
    name: &str,
    source: &Path,
    how: &MountParams,
    table: &Table<'_>,
) {
    if let Err(e) = try_compare(world, tally, name, (source, how), table) {
        tally.fail(name, &format!("{e:#}"));
    }
}

fn try_compare(
    world: &World,
    tally: &mut TestReport,
    name: &str,
    (source, how): (&Path, &MountParams),
    table: &Table<'_>,
) -> Result<()> {
    let start = Instant::now();
    let point = world.dir("mnt", how.who)?;
    let mount = Mount::new(world, source, &point, how)?;
    let (local, mounted) = std::thread::scope(|scope| {
        let local = scope.spawn(|| control(world, source, how.who, table));
        let mounted = run(world, &point, how.who, table, Some(&mount));
        (local.join(), mounted)
    });
    let (local, mounted) = (local.map_err(|_| anyhow::anyhow!("the local run panicked"))??, mounted?);
    count(tally, name, &local, &mounted, how.minor());
    if mounted.values().any(|verdict| matches!(verdict, Verdict::Failed(_))) {
        println!("  the daemon said: {}", mount.said());
    }
    let unmounted = mount.unmount().and_then(|()| no_orphans(source));
    tally.record(&format!("{name} as a whole, and unmounted"), start.elapsed(), unmounted);
    Ok(())
}

/// What the table gives in a local directory: once for each user and size on the filesystem of the tests, each time on another one.
fn control(world: &World, source: &Path, who: As, table: &Table<'_>) -> Result<Verdicts> {
    let is_ours = table.cases.is_empty() && source.metadata()?.dev() == world.root.metadata()?.dev();
    let mut known = world.controls.lock().map_err(|_| anyhow::anyhow!("a test died"))?;
    if let Some(verdicts) = known.get(&(who.name(), table.entries)).filter(|_| is_ours) {
        return Ok(verdicts.clone());
    }
    let inner = source.with_file_name("control");
    std::fs::create_dir_all(&inner)?;
    world.give(&inner, who)?;
    ensure!(inner.metadata()?.dev() == source.metadata()?.dev(), "{} is another filesystem", inner.display());
    let verdicts = run(world, &inner, who, table, None)?;
    std::fs::remove_dir_all(&inner)?;
    if is_ours {
        known.insert((who.name(), table.entries), verdicts.clone());
    }
    Ok(verdicts)
}

/// Counts a table's cases against its control.
pub fn count(tally: &mut TestReport, name: &str, local: &Verdicts, mounted: &Verdicts, minor: u32) {
    let mut passed = 0;
    for (case, expected) in local {
        let not_there = NOT_ON.contains(&(name, case.as_str()));
        let name = format!("{name}: {case}");
        match (expected, mounted.get(case)) {
            (_, Some(Verdict::Passed)) => passed += 1,
            (Verdict::Failed(why), _) => tally.fail(&name, &format!("on the local directory too: {why}")),
            (Verdict::Skipped(_), Some(Verdict::Skipped(why))) => tally.skip(&name, why),
            (_, Some(Verdict::Skipped(why))) if not_there || lacks(case, minor) => tally.skip(&name, why),
            (_, Some(Verdict::Skipped(why))) => {
                tally.fail(&name, &format!("only skipped on the mount: {why}"))
            }
            (_, Some(Verdict::Failed(why))) if fails(case, minor) => tally.skip(&name, why),
            (_, Some(Verdict::Failed(why))) => tally.fail(&name, why),
            (_, None) => tally.fail(&name, "did not run on the mount"),
        }
    }
    println!("{passed} of {} cases pass: {name}", local.len());
    tally.passed_quietly(passed);
}

/// Counts a table without a control.
pub fn count_alone(tally: &mut TestReport, name: &str, verdicts: &Verdicts) {
    let mut passed = 0;
    for (case, verdict) in verdicts {
        match verdict {
            Verdict::Passed => passed += 1,
            Verdict::Skipped(why) => tally.skip(&format!("{name}: {case}"), why),
            Verdict::Failed(why) => tally.fail(&format!("{name}: {case}"), why),
        }
    }
    println!("{passed} of {} cases pass: {name}", verdicts.len());
    tally.passed_quietly(passed);
}
