//! The POSIX table on a mount, against a local directory.

use std::time::Duration;

use crate::report::TestReport;
use crate::root;
use crate::test::mount::{Mount, MountParams};
use crate::test::table::{self, Table};
use crate::test::world::{As, World};

pub fn as_root(world: &World, tally: &mut TestReport) {
    if !root::is_root() {
        return tally.not_run("posix", "needs root");
    }
    all(world, tally, As::Us, ("posix", if world.short { &Table::MEDIUM } else { &Table::EVERYDAY }), 3);
}

pub fn as_user(world: &World, tally: &mut TestReport) {
    let Some(who) = world.tester else {
        return tally.not_run("posix-user", "no ordinary user can be made (useradd)");
    };
    if crate::process::which("fusermount3").is_none() {
        return tally.not_run("posix-user", "fusermount3 is missing: install the package fuse3");
    }
    all(world, tally, who, ("posix-user", &world.table()), 1);
}

fn all(world: &World, tally: &mut TestReport, who: As, (name, table): (&str, &Table<'_>), beside: usize) {
    let source = match world.dir("source", who) {
        Ok(source) => source,
        Err(e) => return tally.fail(name, &format!("{e:#}")),
    };
    table::compare(world, tally, name, &source, &MountParams::new(who), table);
    super::beside::shared(world, tally, name, &MountParams::new(who), beside);
    if let Err(e) = read_only(world, tally, who, name) {
        tally.fail(&format!("{name}: -o ro"), &format!("{e:#}"));
    }
}

fn read_only(world: &World, tally: &mut TestReport, who: As, name: &str) -> anyhow::Result<()> {
    let (source, point) = (world.dir("source", who)?, world.dir("mnt", who)?);
    let how = MountParams::new(who).with("-o").with("ro").with("--host-timeout=500ms");
    let mount = Mount::new(world, &source, &point, &how)?;
    let table =
        Table { name: "read-only", beside: Some(&source), within: Duration::from_secs(3), ..Table::EVERYDAY };
    let verdicts = table::run(world, &point, who, &table, Some(&mount))?;
    table::count_alone(tally, &format!("{name} -o ro"), &verdicts);
    mount.unmount()
}
