//! What others change is seen within the documented bound: changes on the server's own disk, and changes
//! through a second mount of the same tree.

use std::time::Duration;

use anyhow::Result;

use crate::report::TestReport;
use crate::test::mount::{Mount, MountParams};
use crate::test::table::{self, Table};
use crate::test::world::World;

/// What a server that watches its disk takes, and the time it takes to look.
const AT_ONCE: Duration = Duration::from_millis(800);
/// The bound that these mounts ask for.
const HOST_TIMEOUT: &str = "--host-timeout=1s";
/// The bound, and the time it takes to look.
const WITHIN: Duration = Duration::from_millis(1800);

/// In a short run so many of the three ways.
pub fn shared(world: &World, tally: &mut TestReport, name: &str, how: &MountParams, ways: usize) {
    let limited = how.clone().with(HOST_TIMEOUT);
    let tests = [
        ("changed on disk", on_disk as Test, &limited, WITHIN),
        ("changed on disk that is watched", on_disk as Test, how, AT_ONCE),
        ("changed through a second mount", by_second as Test, &limited, WITHIN),
    ];
    for (what, run, how, within) in world.sample.of(name, &tests, ways) {
        let name = format!("{name}, {what}");
        if let Err(e) = run(world, tally, &name, (how, *within)) {
            tally.fail(&name, &format!("{e:#}"));
        }
    }
}

type Test = fn(&World, &mut TestReport, &str, (&MountParams, Duration)) -> Result<()>;

fn on_disk(
    world: &World,
    tally: &mut TestReport,
    name: &str,
    (how, within): (&MountParams, Duration),
) -> Result<()> {
    let (source, point) = (world.dir("source", how.who)?, world.dir("mnt", how.who)?);
    let mount = Mount::new(world, &source, &point, how)?;
    let table = Table::shared(&source, within);
    let verdicts = table::run(world, &point, how.who, &table, Some(&mount))?;
    table::count_alone(tally, name, &verdicts);
    mount.unmount()
}

fn by_second(
    world: &World,
    tally: &mut TestReport,
    name: &str,
    (how, within): (&MountParams, Duration),
) -> Result<()> {
    let source = world.dir("source", how.who)?;
    let (point, second) = (world.dir("mnt", how.who)?, world.dir("mnt-second", how.who)?);
    let mount = Mount::new(world, &source, &point, how)?;
    let other = Mount::new(world, &source, &second, how)?;
    let table = Table::shared(&second, within);
    let verdicts = table::run(world, &point, how.who, &table, Some(&mount))?;
    table::count_alone(tally, name, &verdicts);
    other.unmount()?;
    mount.unmount()
}
