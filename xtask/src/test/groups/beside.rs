//! What others change is seen within the documented bound: changes on the server's own disk, and changes
//! through a second mount of the same tree.

use std::time::Duration;

use anyhow::Result;

use crate::tally::Tally;
use crate::test::mount::{How, Mount};
use crate::test::table::{self, Table};
use crate::test::world::World;

/// The bound that these mounts ask for.
const HOST_TIMEOUT: &str = "--host-timeout=1s";
/// The bound, and the time it takes to look.
const WITHIN: Duration = Duration::from_millis(1800);

pub fn shared(world: &World, tally: &mut Tally, name: &str, how: &How) {
    let how = how.clone().with(HOST_TIMEOUT);
    for (what, run) in
        [("changed on disk", on_disk as Test), ("changed through a second mount", by_second as Test)]
    {
        let name = format!("{name}, {what}");
        if let Err(e) = run(world, tally, &name, &how) {
            tally.fail(&name, &format!("{e:#}"));
        }
    }
}

type Test = fn(&World, &mut Tally, &str, &How) -> Result<()>;

fn on_disk(world: &World, tally: &mut Tally, name: &str, how: &How) -> Result<()> {
    let (source, point) = (world.dir("source", how.who)?, world.dir("mnt", how.who)?);
    let mount = Mount::new(world, &source, &point, how)?;
    let table = Table { name: "shared", beside: Some(&source), within: WITHIN };
    let verdicts = table::run(world, &point, how.who, &table, Some(&mount))?;
    table::count_alone(tally, name, &verdicts);
    mount.unmount()
}

fn by_second(world: &World, tally: &mut Tally, name: &str, how: &How) -> Result<()> {
    let source = world.dir("source", how.who)?;
    let (point, second) = (world.dir("mnt", how.who)?, world.dir("mnt-second", how.who)?);
    let mount = Mount::new(world, &source, &point, how)?;
    let other = Mount::new(world, &source, &second, how)?;
    let table = Table { name: "shared", beside: Some(&second), within: WITHIN };
    let verdicts = table::run(world, &point, how.who, &table, Some(&mount))?;
    table::count_alone(tally, name, &verdicts);
    other.unmount()?;
    mount.unmount()
}
