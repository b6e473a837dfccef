//! The nigh command.

mod args;
mod background;
mod demo;
mod identity;
mod invoked;
mod mount;
mod options;
mod output;
mod prefetch;
mod protocol;
mod serve;
mod signals;
mod socket_activation;
mod source;
mod status;
mod units;

use anyhow::Result;
use args::{Args, Command};
use clap::Parser;
use invoked::Invoked;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Invoked { words, is_helper } = Invoked::of(std::env::args_os());
    let codes = if is_helper { &MOUNT_HELPER } else { &OWN };
    let words = match words {
        Ok(words) => words,
        Err(usage) => return finish(Err(usage.into()), codes),
    };
    match Args::try_parse_from(std::iter::once("nigh".into()).chain(words.iter().cloned())) {
        Ok(args) => finish(run(args.command, &words), codes),
        Err(error) => explain(&error, codes),
    }
}

/// Exit codes.
struct Codes {
    usage: u8,
    /// The system has too few processes, descriptors or memory.
    system: u8,
    failed: u8,
}

const OWN: Codes = Codes { usage: 2, system: 1, failed: 1 };
/// Exit codes of mount(8).
const MOUNT_HELPER: Codes = Codes { usage: 1, system: 2, failed: 32 };

fn finish(result: Result<()>, codes: &Codes) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    eprintln!("nigh: {error:#}");
    ExitCode::from(match &error {
        error if error.downcast_ref::<options::Usage>().is_some() => codes.usage,
        error if error.chain().any(|cause| cause.downcast_ref().is_some_and(is_of_system)) => codes.system,
        _ => codes.failed,
    })
}

fn is_of_system(error: &std::io::Error) -> bool {
    let numbers = [libc::ENOMEM, libc::EAGAIN, libc::EMFILE, libc::ENFILE];
    error.raw_os_error().is_some_and(|number| numbers.contains(&number))
}

/// Prints help and version unchanged, and a usage error as one line.
fn explain(error: &clap::Error, codes: &Codes) -> ExitCode {
    if !error.use_stderr() {
        return finish(output::print(&error.to_string()), codes);
    }
    let text = error.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let what: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    let what = what.join(" ");
    eprintln!("nigh: {}; see `nigh --help`", what.trim_start_matches("error: "));
    ExitCode::from(codes.usage)
}

fn run(command: Command, words: &[OsString]) -> Result<()> {
    match command {
        Command::Demo => demo::run(),
        Command::Mount(args) => mount::run(&args, words),
        Command::Umount { mountpoint, lazy, force } => mount::unmount(&mountpoint, lazy, force),
        Command::Status { mountpoint, server: None, json } => status::mounts(mountpoint, json),
        Command::Status { server: Some(socket), json, .. } => status::server(socket.as_deref(), json),
        Command::Prefetch { path, contents } => prefetch::run(&path, contents),
        Command::Serve(args) => serve::run(*args),
        Command::Replay { mountpoint, device } => mount::replay(&mountpoint, &device),
        Command::Watchdog { daemon } => Ok(nigh_client::watchdog::watch(daemon)?),
    }
}

fn log_to_stderr(default: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("NIGH_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    // Colours only on a terminal: log files are searched as text.
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let _ = log.with_ansi(colours).try_init();
}
