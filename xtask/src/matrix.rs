//! `cargo xtask matrix`: the POSIX table in every combination of user, notification level, protocol minor and
//! masked features. Answers must be the same in every cell, and so must the number of remote requests.

use std::time::Instant;

use anyhow::{Result, bail};
use serde_json::Value;

use crate::report::TestReport;
use crate::root;
use crate::test::mount::{Mount, MountParams};
use crate::test::table::{self, Table, Verdict, Verdicts};
use crate::test::world::{As, Length, World};

#[derive(clap::Args)]
pub struct Options {
    /// Who mounts, divided by commas.
    #[arg(long, value_delimiter = ',', default_value = "root,user")]
    users: Vec<String>,
    /// Notification levels, divided by commas. Whichever these are, answers are compared with a first cell at
    /// the level `all`, so that several runs at one time share the work.
    #[arg(long, value_delimiter = ',', default_value = "all,no-epoch,none")]
    levels: Vec<String>,
    /// Protocol minors, divided by commas.
    #[arg(long, value_delimiter = ',', default_value = "31,34,36,38,40,45")]
    minors: Vec<u32>,
    /// INIT flags to do without, one at a time, divided by commas; `none` masks nothing.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "none,DO_READDIRPLUS,CACHE_SYMLINKS,HANDLE_KILLPRIV_V2,EXPLICIT_INVAL_DATA"
    )]
    masks: Vec<String>,
    /// Test this binary instead of building one.
    #[arg(long, value_name = "PATH")]
    nigh: Option<std::path::PathBuf>,
    /// Remote requests may differ from the first cell's by this many in a hundred: what is asked again
    /// depends on when deadlines pass.
    #[arg(long, default_value_t = 2)]
    request_slack_percent: u64,
}

/// What one cell showed.
#[derive(Clone)]
struct Cell {
    minor: u32,
    verdicts: Verdicts,
    requests: u64,
}

pub fn run(options: &Options) -> Result<bool> {
    if !root::is_root() {
        bail!("the matrix needs root: it mounts as root and as an ordinary user");
    }
    let world = World::new(options.nigh.as_deref(), Length::Short)?;
    let mut users = world.mounting_users();
    users.retain(|who| options.users.iter().any(|name| name == who.name()));
    let mut tally = TestReport::new();
    println!(
        "{:6} {:9} {:>5} {:20} {:>6} {:>6} {:>9} {:>7}",
        "user", "level", "minor", "masked", "passed", "failed", "requests", "time"
    );
    for who in users {
        let mut model = None;
        for (level, minor, mask) in cells(options) {
            let start = Instant::now();
            let name = format!("{} {level} 7.{minor} without {mask}", who.name());
            match cell(&world, who, level, minor, mask) {
                Ok(cell) => {
                    print_cell(who, (level, minor, mask), &cell, start);
                    let first = model.get_or_insert_with(|| cell.clone());
                    let result = same(first, &cell, options.request_slack_percent);
                    tally.record(&name, start.elapsed(), result);
                }
                Err(e) => tally.fail(&name, &format!("{e:#}")),
            }
        }
    }
    drop(world);
    Ok(tally.close())
}

/// Level, minor and mask of each; first the one with which the others are compared.
fn cells(options: &Options) -> Vec<(&str, u32, &str)> {
    let minor = options.minors.first().copied().unwrap_or(31);
    let mut cells = vec![("all", minor, "none")];
    for level in &options.levels {
        for minor in &options.minors {
            for mask in &options.masks {
                let cell = (level.as_str(), *minor, mask.as_str());
                if cells.first() != Some(&cell) {
                    cells.push(cell);
                }
            }
        }
    }
    cells
}

fn print_cell(who: As, (level, minor, mask): (&str, u32, &str), cell: &Cell, start: Instant) {
    let count = |f: fn(&Verdict) -> bool| cell.verdicts.values().filter(|v| f(v)).count();
    let passed = count(|v| *v == Verdict::Passed);
    let failed = count(|v| matches!(v, Verdict::Failed(_)));
    println!(
        "{:6} {level:9} {minor:>5} {mask:20} {passed:>6} {failed:>6} {:>9} {:>6.1}s",
        who.name(),
        cell.requests,
        start.elapsed().as_secs_f64()
    );
    for (case, verdict) in &cell.verdicts {
        if let Verdict::Failed(why) = verdict {
            println!("       {case}: {why}");
        }
    }
}

fn cell(world: &World, who: As, level: &str, minor: u32, mask: &str) -> Result<Cell> {
    let (source, point) = (world.dir("source", who)?, world.dir("mnt", who)?);
    let mut how = MountParams::new(who).with("--host-timeout=forever");
    how = how.set("NIGH_NOTIFY_LEVEL", level).set("NIGH_FUSE_MINOR", &minor.to_string());
    if mask != "none" {
        how = how.set("NIGH_FUSE_WITHOUT", mask);
    }
    let mount = Mount::new(world, &source, &point, &how)?;
    let verdicts = table::run(world, &point, who, &Table::EVERYDAY, Some(&mount))?;
    let requests = requests(&mount.status()?);
    mount.unmount()?;
    Ok(Cell { minor, verdicts, requests })
}

fn requests(status: &Value) -> u64 {
    status["remote"]["requests"].as_u64().unwrap_or(0)
}

fn same(model: &Cell, cell: &Cell, slack_percent: u64) -> Result<()> {
    let oldest = model.minor.min(cell.minor);
    for (case, verdict) in &model.verdicts {
        if cell.verdicts.get(case) != Some(verdict) && !table::lacks(case, oldest) {
            bail!("{case}: {:?}, in the first cell {verdict:?}", cell.verdicts.get(case));
        }
    }
    let apart = model.requests.abs_diff(cell.requests);
    if apart * 100 > model.requests * slack_percent {
        bail!("{} remote requests, {} in the first cell", cell.requests, model.requests);
    }
    Ok(())
}
