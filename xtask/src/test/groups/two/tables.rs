//! The table `two` of `nigh-posix`: every kind of change is visible on the other mounts at once.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{ALL, DaemonVariable, Deadline, Mounts, NO_EPOCH, NONE, OLD};
use crate::process::{self, CommandResult};
use crate::report::TestReport;
use crate::test::table::{self, Verdict, Verdicts};
use crate::test::world::{As, World};

/// Limits of one run of the table, and of one case.
const LIMIT: Duration = Duration::from_secs(120);
const CASE_LIMIT_S: &str = "20";

/// The kinds of the three mounts, and the order in which they take the roles: the first makes changes, the second is
/// read first, the last is only read.
struct Variant {
    name: &'static str,
    kinds: [DaemonVariable; 3],
    orders: &'static [[usize; 3]],
}

const THERE: [usize; 3] = [0, 1, 2];
const BACK: [usize; 3] = [1, 0, 2];

const VARIANTS: &[Variant] = &[
    Variant { name: "level all", kinds: [ALL, ALL, ALL], orders: &[THERE, BACK] },
    Variant { name: "level no-epoch", kinds: [NO_EPOCH, NO_EPOCH, NO_EPOCH], orders: &[THERE] },
    Variant { name: "level none", kinds: [NONE, NONE, NONE], orders: &[THERE] },
    Variant { name: "protocol 7.31", kinds: [OLD, OLD, OLD], orders: &[THERE] },
    Variant { name: "levels mixed", kinds: [ALL, NO_EPOCH, NONE], orders: &[THERE, BACK, [2, 0, 1]] },
];

/// The cases of a shorter pass, with kernels of other kinds and over other links: their names contain one of these.
const SMALLER: &[&str] = &[
    "created", "unlinked", "removed", "renamed", "mode", "xattr", "written", "turns", "mapped", "while",
    "again", "closed",
];

pub fn run(world: &World, tally: &mut TestReport, deadline: &Deadline) {
    for who in world.mounting_users().into_iter().filter(|who| *who == As::Us || !world.short) {
        let control = match control(world, who) {
            Ok(control) => control,
            Err(e) => return tally.fail("two: the table on a local directory", &format!("{e:#}")),
        };
        // As another user once: only the credentials of requests differ.
        let others = if who == As::Us { world.sample.of("two", &VARIANTS[1..], 1) } else { Vec::new() };
        for variant in std::iter::once(&VARIANTS[0]).chain(others) {
            let name = format!("two as {}, {}", who.name(), variant.name);
            if deadline.is_over(tally, &name) {
                continue;
            }
            let start = Instant::now();
            let smaller = world.short && variant.name != VARIANTS[0].name;
            let control = if smaller { some_of(&control) } else { control.clone() };
            let result = run_variant(world, tally, &name, variant, who, &control);
            tally.record(&format!("{name}, as a whole and unmounted"), start.elapsed(), result);
        }
    }
}

/// Runs the first variant only, for any link.
pub fn once(world: &World, tally: &mut TestReport, name: &str) {
    let start = Instant::now();
    let result = control(world, As::Us).and_then(|control| {
        let control = if world.short { some_of(&control) } else { control };
        run_variant(world, tally, name, &VARIANTS[0], As::Us, &control)
    });
    tally.record(&format!("{name}, as a whole and unmounted"), start.elapsed(), result);
}

/// The cases of a shorter pass.
fn some_of(control: &Verdicts) -> Verdicts {
    let is_chosen = |case: &str| SMALLER.iter().any(|part| case.contains(part));
    control
        .iter()
        .filter(|(case, _)| is_chosen(case))
        .map(|(case, how)| (case.clone(), how.clone()))
        .collect()
}

/// Runs the table with one local directory instead of all mounts.
fn control(world: &World, who: As) -> Result<Verdicts> {
    let local = world.dir("local", who)?;
    let command = command(world, who, &[&local, &local, &local, &local]);
    let verdicts = table::parse(&world.run(command, LIMIT)?);
    let failed = verdicts.iter().find(|(_, verdict)| matches!(verdict, Verdict::Failed(_)));
    ensure!(failed.is_none(), "{failed:?}");
    ensure!(verdicts.len() > 50, "only {} cases ran", verdicts.len());
    Ok(verdicts)
}

/// Builds the command: changes on the first path, reads on the second, and on the others.
fn command(world: &World, who: As, ways: &[&Path; 4]) -> std::process::Command {
    let mut command = world.command(world.root.join("bin/nigh-posix"), who);
    command.args(["--table", "two", "--limit-s", CASE_LIMIT_S]);
    command.arg("--dir").arg(ways[0]).arg("--beside").arg(ways[1]);
    command.arg("--others").arg(ways[2]).arg("--others").arg(ways[3]);
    command
}

fn run_variant(
    world: &World,
    tally: &mut TestReport,
    name: &str,
    variant: &Variant,
    who: As,
    control: &Verdicts,
) -> Result<()> {
    let mounts = Mounts::new(world, who, &variant.kinds)?;
    let orders = if world.short { 1 } else { variant.orders.len() };
    for order in variant.orders.iter().take(orders) {
        let [first, second, third] = order.map(|number| mounts.point(number));
        // The export itself comes last: it shows the true state.
        let mut command = command(world, who, &[first, second, third, &mounts.source]);
        command.arg("--filter").arg(control.keys().cloned().collect::<Vec<_>>().join(","));
        let ended = mounts.run(command, LIMIT)?;
        let name = format!("{name}, by mount {}", order[0] + 1);
        let failed = tally.failed;
        count(tally, &name, variant, control, &ended);
        if tally.failed > failed {
            println!("  the daemons said: {}", mounts.said());
        }
    }
    mounts.unmount()
}

fn count(tally: &mut TestReport, name: &str, variant: &Variant, control: &Verdicts, ended: &CommandResult) {
    let verdicts = table::parse(ended);
    let mut passed = 0;
    for (case, local) in control {
        let full = format!("{name}: {case}");
        match (local, verdicts.get(case)) {
            (_, Some(Verdict::Passed)) => passed += 1,
            (_, Some(Verdict::Failed(why))) => match beyond(variant, case) {
                Some(reason) => tally.skip(&full, reason),
                None => tally.fail(&full, why),
            },
            (Verdict::Skipped(_), Some(Verdict::Skipped(why))) => tally.skip(&full, why),
            (_, Some(Verdict::Skipped(why))) if lacks(variant, case) => tally.skip(&full, why),
            (_, Some(Verdict::Skipped(why))) => tally.fail(&full, &format!("only skipped on mounts: {why}")),
            (_, None) => tally.fail(&full, "did not run"),
        }
    }
    println!("{passed} of {} cases pass: {name} ({:.1} s)", control.len(), ended.took.as_secs_f64());
    if ended.how == process::ExitKind::TimedOut {
        println!("  it did not end in time: {}", ended.tail(3));
    }
    tally.passed_quietly(passed);
}

/// Returns why a case may fail with such a kernel.
fn beyond(variant: &Variant, case: &str) -> Option<&'static str> {
    match case {
        "two_mapped_alone" if variant.kinds.contains(&NONE) => {
            Some("pages under a map cannot be recalled from this kernel")
        }
        "two_in_use_and_changed" if variant.kinds.contains(&OLD) => {
            Some("without FUSE_EXPIRE_ONLY a dentry in use can only be dropped")
        }
        _ => None,
    }
}

/// `O_TMPFILE` came with protocol 7.37.
fn lacks(variant: &Variant, case: &str) -> bool {
    case == "two_unnamed_linked" && variant.kinds.contains(&OLD)
}
