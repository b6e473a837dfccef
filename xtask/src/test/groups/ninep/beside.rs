//! Changes on the server's disk, or on a second mount, are visible within the configured staleness bound.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::test::mount::{Mount, MountParams};
use crate::test::over::LinkKind;
use crate::test::table::{self, Table, Verdict};
use crate::test::world::{As, World};

/// The default bound of all facts, and the time of a check.
const WITHIN: Duration = Duration::from_millis(1_800);

fn how() -> MountParams {
    MountParams { over: Some((LinkKind::Ninep, None)), ..MountParams::new(As::Us) }
}

pub fn on_disk(world: &World) -> Result<()> {
    let (source, point) = (world.dir("disk-nine", As::Us)?, world.dir("disk-mnt", As::Us)?);
    let mount = Mount::new(world, &source, &point, &how())?;
    let table = Table::shared(&source, WITHIN);
    judge(&table::run(world, &point, As::Us, &table, Some(&mount))?)?;
    mount.unmount()
}

pub fn second_mount(world: &World) -> Result<()> {
    let dir = |name: &str| world.dir(&format!("second-{name}"), As::Us);
    let (source, point, second) = (dir("nine")?, dir("mnt")?, dir("mnt-second")?);
    let mount = Mount::new(world, &source, &point, &how())?;
    let other = Mount::new(world, &source, &second, &how())?;
    let table = Table::shared(&second, WITHIN);
    judge(&table::run(world, &point, As::Us, &table, Some(&mount))?)?;
    other.unmount()?;
    mount.unmount()
}

fn judge(verdicts: &table::Verdicts) -> Result<()> {
    let failed = verdicts.iter().filter_map(|(case, verdict)| match verdict {
        Verdict::Failed(why) => Some(format!("{case}: {why}")),
        _ => None,
    });
    let failed: Vec<String> = failed.collect();
    let passed = verdicts.values().filter(|verdict| **verdict == Verdict::Passed).count();
    println!("others' changes: {passed} of {} cases are seen within {WITHIN:?}", verdicts.len());
    ensure!(failed.is_empty() && passed >= 15, "{} cases failed:\n  {}", failed.len(), failed.join("\n  "));
    Ok(())
}
