//! The nigh command.

mod args;
mod background;
mod demo;
mod identity;
mod mount;
mod ninep;
mod options;
mod output;
mod passed;
mod prefetch;
mod serve;
mod source;
mod status;
mod units;

use anyhow::Result;
use args::{Args, Command};
use clap::Parser;
use std::io::IsTerminal;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return explain(&error),
    };
    finish(run(args.command))
}

fn finish(result: Result<()>) -> ExitCode {
    match result {
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
        return finish(output::print(&error.to_string()));
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
        Command::Status { mountpoint, server: None, json } => status::mounts(mountpoint, json),
        Command::Status { server: Some(socket), json, .. } => status::server(socket.as_deref(), json),
        Command::Prefetch { path } => prefetch::run(&path),
        Command::Serve(args) => serve::run(*args),
        Command::Replay { mountpoint, device } => mount::replay(&mountpoint, &device),
    }
}

fn log_to_stderr(default: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("NIGH_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    // Colours are for people: a log is searched.
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let _ = log.with_ansi(colours).try_init();
}
