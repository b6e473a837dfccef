//! The nigh command.

mod args;
mod background;
mod demo;
mod identity;
mod mount;
mod options;
mod serve;
mod source;
mod units;

use anyhow::{Result, bail};
use args::{Args, Command};
use clap::Parser;
use nigh_server::Places;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return explain(&error),
    };
    match run(args.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let usage = error.downcast_ref::<options::Usage>().is_some();
            eprintln!("nigh: {error:#}");
            ExitCode::from(if usage { 2 } else { 1 })
        }
    }
}

/// Help and version as they are; a mistake in one line.
fn explain(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let what: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    let what = what.join(" ");
    eprintln!("nigh: {}; see `nigh --help`", what.trim_start_matches("error: "));
    ExitCode::from(2)
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Demo => demo::run(),
        Command::Mount(args) => mount::run(&args),
        Command::Umount { mountpoint, lazy } => Ok(nigh_client::fuse::mount::unmount(&mountpoint, lazy)?),
        Command::Status { mountpoint, json } => status(mountpoint, json),
        Command::Serve(args) => serve::run(*args),
    }
}

fn status(mountpoint: Option<PathBuf>, json: bool) -> Result<()> {
    let places = Places::of_user()?;
    places.make_runtime()?;
    let mut statuses = nigh_client::control::statuses(&places.runtime)?;
    if let Some(wanted) = &mountpoint {
        let absolute = absolute(wanted);
        statuses.retain(|status| status["mountpoint"].as_str().map(Path::new) == Some(&absolute));
        if statuses.is_empty() {
            bail!("{}: no mount of yours answers there; `nigh status` lists them", wanted.display());
        }
    }
    if json {
        let value = match (mountpoint, statuses) {
            (Some(_), mut one) => one.remove(0),
            (None, all) => serde_json::Value::Array(all),
        };
        println!("{value:#}");
    } else if statuses.is_empty() {
        println!("nothing is mounted");
    } else {
        for status in statuses {
            print!("{}", nigh_client::status::page(&status));
        }
    }
    Ok(())
}

/// An absolute path without asking what is mounted there: it may not answer.
fn absolute(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let (Some(parent), Some(name)) = (whole.parent(), whole.file_name()) else { return whole };
    parent.canonicalize().map_or(whole.clone(), |parent| parent.join(name))
}

fn log_to_stderr(default: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("NIGH_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
}
