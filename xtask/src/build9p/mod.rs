//! Times and messages of a build on a 9P server: `cargo xtask build9p`, in the form of the published table of v9fs.

mod build;
pub mod source;
mod stats;

use anyhow::{Context, Result, ensure};
use std::path::Path;

use crate::test::world::{Length, World};

#[derive(clap::Args)]
pub struct Options {
    /// Round trip time of the link, as `1ms`.
    #[arg(long, default_value = "0ms")]
    rtt: String,
    /// The target: `all` (hostapd and wpa_supplicant) or `wpa_cli` alone.
    #[arg(long, default_value = "all", value_parser = ["all", "wpa_cli"])]
    what: String,
    /// The workload: `build`, or 10,000 `stats` of one missing name by a shell loop.
    #[arg(long, default_value = "build", value_parser = ["build", "stats"])]
    work: String,
    /// The program to measure; built by default.
    #[arg(long)]
    nigh: Option<std::path::PathBuf>,
}

/// Prints the table; an error if the message counts do not fall from line to line.
pub fn run(options: &Options) -> Result<bool> {
    ensure!(crate::root::is_root(), "it needs root, for a diod that acts as everybody");
    source::prepare()?;
    let world = World::new(options.nigh.as_deref(), Length::Long)?;
    let result = match options.work.as_str() {
        "stats" => stats::run(&world, &options.rtt),
        _ => build::run(&world, &options.rtt, &options.what),
    };
    drop(world);
    result.map(|()| true)
}

/// Copies a tree.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status()?;
    ensure!(status.success(), "cannot copy {}", from.display());
    Ok(())
}

fn ended(ended: &crate::process::CommandResult, what: &str) -> Result<()> {
    ensure!(ended.ok(), "{what}: {}", ended.tail(6));
    Ok(())
}

fn path(text: &Path) -> Result<&str> {
    text.to_str().context("a path that is text")
}
