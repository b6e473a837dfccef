//! The POSIX table and the changes of others, as an ordinary user, at each notification level and negotiated
//! down to the oldest protocol.

use crate::report::TestReport;
use crate::test::mount::MountParams;
use crate::test::table;
use crate::test::world::World;

pub fn run(world: &World, tally: &mut TestReport) {
    let Some(who) = world.tester else {
        return tally.not_run("levels", "no ordinary user can be made (useradd)");
    };
    if crate::process::which("fusermount3").is_none() {
        return tally.not_run("levels", "fusermount3 is missing: install the package fuse3");
    }
    let variants = [
        ("level all", "NIGH_NOTIFY_LEVEL", "all"),
        ("level no-epoch", "NIGH_NOTIFY_LEVEL", "no-epoch"),
        ("level none", "NIGH_NOTIFY_LEVEL", "none"),
        ("protocol 7.31", "NIGH_FUSE_MINOR", "31"),
    ];
    for (name, variable, value) in world.sample.of("levels", &variants, 1) {
        let how = MountParams::new(who).set(variable, value);
        match world.dir("source", who) {
            Ok(source) => table::compare(world, tally, name, &source, &how, &world.table()),
            Err(e) => tally.fail(name, &format!("{e:#}")),
        }
    }
    for (name, variable, value) in world.sample.of("levels beside", &variants, 2) {
        super::beside::shared(world, tally, name, &MountParams::new(who).set(variable, value), 1);
    }
}
