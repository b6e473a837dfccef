//! `cargo xtask test`: every group of tests that this machine can run.

mod background;
pub mod build;
pub mod clean;
pub mod ending;
pub mod groups;
pub mod mount;
pub mod over;
pub mod packages;
mod reclaim;
pub mod sample;
mod stall_detector;
pub mod table;
pub mod world;

use std::time::Instant;

use anyhow::{Result, bail};

use crate::report::TestReport;
use background::Background;
use world::World;

#[derive(clap::Args)]
pub struct Options {
    /// Install no packages.
    #[arg(long)]
    no_install: bool,
    /// Only these groups, divided by commas.
    #[arg(long, value_delimiter = ',')]
    groups: Vec<String>,
    /// Print the groups and what they need.
    #[arg(long)]
    list: bool,
    /// Only the groups that mount as an ordinary user.
    #[arg(long)]
    as_user: bool,
    /// Over which link mounts reach their servers.
    #[arg(long, value_enum, default_value_t = over::LinkKind::Local)]
    over: over::LinkKind,
    /// Every cell of each matrix, and larger counts.
    #[arg(long)]
    long: bool,
    /// The same, with counts that take hours: 10,000 races of each kind at every notification level.
    #[arg(long, conflicts_with = "long")]
    hours: bool,
    /// Test this binary instead of building one.
    #[arg(long, value_name = "PATH")]
    nigh: Option<std::path::PathBuf>,
}

impl Options {
    fn length(&self) -> world::Length {
        match (self.long, self.hours) {
            (true, _) => world::Length::Long,
            (_, true) => world::Length::Hours,
            _ => world::Length::Short,
        }
    }
}

pub fn run(options: &Options) -> Result<bool> {
    let start = Instant::now();
    let known = groups::all();
    if options.list {
        for group in known {
            println!("{:12} {} ({})", group.name, group.what, group.time);
        }
        return Ok(true);
    }
    if let Some(unknown) = options.groups.iter().find(|name| !known.iter().any(|g| g.name == **name)) {
        bail!("no group {unknown}; `cargo xtask test --list` names them");
    }
    let named = |g: &&groups::Group| options.groups.is_empty() || options.groups.iter().any(|n| n == g.name);
    let wanted: Vec<_> = known.iter().filter(named).filter(|g| g.by_user || !options.as_user).collect();
    let mut tally = TestReport::new();
    let (plain, mounted): (Vec<_>, Vec<_>) =
        wanted.into_iter().partition(|group| matches!(group.run, groups::Run::Plain(_)));
    if mounted.is_empty() {
        packages::prepare(&plain, options.no_install);
        plain
            .iter()
            .for_each(|group| run_group(group, &mut tally, |run, tally| run.plain(options.length(), tally)));
        println!();
        return Ok(tally.close());
    }
    let building = std::thread::spawn(build::programs);
    packages::prepare(&mounted, options.no_install);
    building.join().map_err(|_| anyhow::anyhow!("the build panicked"))??;
    println!("built and installed in {:.0} s", start.elapsed().as_secs_f64());
    let background = Background::start(&plain, options.length())?;
    run_mounted(options, &mounted, &mut tally);
    background.into_iter().for_each(|background| background.finish(&mut tally));
    println!("\nall groups: {:.0} s", start.elapsed().as_secs_f64());
    Ok(tally.close())
}

/// The groups that mount, one after the other.
fn run_mounted(options: &Options, groups: &[&groups::Group], tally: &mut TestReport) {
    let world = match World::new(options.nigh.as_deref(), options.length()) {
        Ok(world) => world,
        Err(e) => return groups.iter().for_each(|group| tally.not_run(group.name, &format!("{e:#}"))),
    };
    world.sample.print();
    let mut exercisers = packages::build_exercisers(groups, options.no_install);
    for group in groups {
        if packages::uses_exercisers(group.name)
            && let Some(building) = exercisers.take()
        {
            let _ = building.join();
        }
        run_group(group, tally, |run, tally| run.mounted(&world, options.over, tally));
    }
}

fn run_group(group: &groups::Group, tally: &mut TestReport, run: impl FnOnce(&groups::Run, &mut TestReport)) {
    println!("\n== {} — {} ({})", group.name, group.what, group.time);
    let start = Instant::now();
    run(&group.run, tally);
    println!("== {}: {:.0} s", group.name, start.elapsed().as_secs_f64());
}
