//! `cargo xtask test`: every group of tests that this machine can run.

pub mod clean;
pub mod ending;
pub mod groups;
pub mod mount;
pub mod over;
pub mod packages;
mod pulse;
mod reclaim;
pub mod table;
pub mod world;

use std::time::Instant;

use anyhow::{Result, bail};

use crate::tally::Tally;
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
    #[arg(long, value_enum, default_value_t = over::Over::Local)]
    over: over::Over,
    /// Shorter forms of the long tests (fsx with 50,000 operations).
    #[arg(long)]
    short: bool,
    /// Longer forms of the races: 10,000 of each kind at every notification level, and with protocol 7.31.
    #[arg(long, conflicts_with = "short")]
    long: bool,
    /// Test this binary instead of building one.
    #[arg(long, value_name = "PATH")]
    nigh: Option<std::path::PathBuf>,
}

impl Options {
    fn length(&self) -> world::Length {
        match (self.short, self.long) {
            (true, _) => world::Length::Short,
            (_, true) => world::Length::Long,
            _ => world::Length::Usual,
        }
    }
}

pub fn run(options: &Options) -> Result<bool> {
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
    let mut tally = Tally::new();
    packages::prepare(&wanted, options.no_install);
    let mut world = None;
    for group in wanted {
        println!("\n== {} — {} ({})", group.name, group.what, group.time);
        let start = Instant::now();
        match &group.run {
            groups::Run::Plain(run) => run(&mut tally),
            groups::Run::Mounted(run) => {
                let made = match world.take() {
                    Some(world) => Ok(world),
                    None => World::new(options.nigh.as_deref(), options.length()),
                };
                match made {
                    Ok(ready) => {
                        ready.over(options.over, || run(&ready, &mut tally));
                        world = Some(ready);
                    }
                    Err(e) => tally.not_run(group.name, &format!("{e:#}")),
                }
            }
        }
        println!("== {}: {:.0} s", group.name, start.elapsed().as_secs_f64());
    }
    drop(world);
    println!();
    Ok(tally.close())
}
