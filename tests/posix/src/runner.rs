//! Runs cases, each in a process of its own under a limit.

use std::io::Read;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::Options;
use crate::cases::{Case, Table};
use crate::room::{Room, Skip};
use crate::sys;

const SKIPPED: u8 = 77;

/// Runs the table, a process for each case. The lines come in the order in which the cases end.
pub fn run_each(table: &[Case], dir: &Path, options: &Options) -> ExitCode {
    let filters: Vec<&str> = options.filter.split(',').map(str::trim).collect();
    let is_wanted = |case: &&Case| filters.iter().any(|f| case.name.contains(f));
    let cases = Mutex::new(table.iter().filter(is_wanted));
    let next = || cases.lock().ok()?.next();
    let (passed, failed, skipped) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
    let work = || {
        while let Some(case) = next() {
            let (count, line) = match run_one(case.name, dir, options) {
                Ended::Passed => (&passed, format!("ok {}", case.name)),
                Ended::Skipped(why) => (&skipped, format!("skip {}: {why}", case.name)),
                Ended::Failed(why) => (&failed, format!("FAILED {}: {why}", case.name)),
            };
            count.fetch_add(1, Ordering::Relaxed);
            println!("{line}");
        }
    };
    std::thread::scope(|scope| (0..options.jobs.max(1)).for_each(|_| drop(scope.spawn(work))));
    let (passed, failed, skipped) = (passed.into_inner(), failed.into_inner(), skipped.into_inner());
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

enum Ended {
    Passed,
    Skipped(String),
    Failed(String),
}

fn run_one(name: &str, dir: &Path, options: &Options) -> Ended {
    let mut command = Command::new("/proc/self/exe");
    command.arg("--case").arg(name).arg("--dir").arg(dir);
    command.arg("--table").arg(options.table.name()).arg("--within-ms").arg(options.within_ms.to_string());
    command.arg("--entries").arg(options.entries.to_string());
    if let Some(beside) = &options.beside {
        command.arg("--beside").arg(beside);
    }
    for other in &options.others {
        command.arg("--others").arg(other);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(e) => return Ended::Failed(format!("cannot start: {e}")),
    };
    let end = Instant::now() + Duration::from_secs(options.limit_s);
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
            Ok(None) => {
                // A process stuck in the kernel is left behind: the calling test run aborts the mount.
                sys::kill_group(child.id());
                return Ended::Failed(format!("not done after {} s", options.limit_s));
            }
            Err(e) => return Ended::Failed(format!("cannot wait: {e}")),
        }
    };
    let mut said = String::new();
    if let Some(out) = child.stdout.take() {
        let _ = out.take(8192).read_to_string(&mut said);
    }
    let said = said.trim().replace('\n', " / ");
    match status.code() {
        Some(0) => Ended::Passed,
        Some(code) if code == i32::from(SKIPPED) => Ended::Skipped(said),
        _ if said.is_empty() => Ended::Failed(format!("ended with {status}")),
        _ => Ended::Failed(said),
    }
}

/// Runs one case in this process; a failure is reported on standard output.
pub fn run_here(table: &[Case], name: &str, dir: &Path, options: &Options) -> ExitCode {
    let Some(case) = table.iter().find(|case| case.name == name) else {
        println!("no case {name}");
        return ExitCode::from(2);
    };
    sys::set_umask(0o022);
    let own = PathBuf::from(format!("posix-{name}"));
    let beside = options.beside.clone().unwrap_or_else(|| dir.to_owned()).join(&own);
    let others = options.others.iter().map(|other| other.join(&own)).collect();
    let within = Duration::from_millis(options.within_ms);
    let room = Room { path: dir.join(&own), beside, others, within, entries: options.entries };
    // On a read-only mount nothing can be created; there the other path is the writable one.
    let writable = if options.table == Table::ReadOnly { &room.beside } else { &room.path };
    if let Err(e) = std::fs::create_dir(writable) {
        println!("cannot make {}: {e}", writable.display());
        return ExitCode::FAILURE;
    }
    std::panic::set_hook(Box::new(|info| println!("{info}")));
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| (case.run)(&room)));
    let removed = clear(writable);
    match result {
        Err(_) => ExitCode::FAILURE,
        Ok(Err(e)) => match e.downcast_ref::<Skip>() {
            Some(why) => {
                println!("{why}");
                ExitCode::from(SKIPPED)
            }
            None => {
                println!("{e:#}");
                ExitCode::FAILURE
            }
        },
        Ok(Ok(())) => match removed {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                println!("cannot remove what the case made: {e}");
                ExitCode::FAILURE
            }
        },
    }
}

/// Removes the case's directory. This is part of the case: a name that stays listed shows here.
fn clear(path: &Path) -> std::io::Result<()> {
    std::env::set_current_dir("/")?;
    if sys::uid() == 0 {
        sys::become_root();
    }
    std::fs::remove_dir_all(path)
}
