//! Removes what tests made, and nothing else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Result;

use super::mount::{abort_connection, connection_of};
use super::world::{PREFIX, TESTER};
use crate::{process, root};

/// `cargo xtask clean`. Always true: what cannot be removed is said.
pub fn run() -> Result<bool> {
    for entry in fs::read_dir(std::env::temp_dir())?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(owner) = name.strip_prefix(PREFIX) else { continue };
        // Tests that still run, perhaps of somebody else.
        if owner.parse::<u32>().is_ok_and(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
            println!("left: {} (process {owner} runs)", entry.path().display());
            continue;
        }
        println!("removing {}", entry.path().display());
        below(&entry.path());
    }
    if root::is_root()
        && Command::new("id").arg(TESTER).stderr(Stdio::null()).output().is_ok_and(|o| o.status.success())
    {
        println!("removing the user {TESTER}");
        let userdel = process::which("userdel").unwrap_or_else(|| "userdel".into());
        let _ = Command::new(userdel).arg(TESTER).stderr(Stdio::null()).status();
    }
    Ok(true)
}

/// Whether tests of another process are under way.
#[must_use]
pub fn others_run() -> bool {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else { return false };
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut owners = names.filter_map(|name| name.strip_prefix(PREFIX)?.parse::<u32>().ok());
    owners.any(|pid| pid != std::process::id() && Path::new(&format!("/proc/{pid}")).exists())
}

/// Processes started from below this directory, mounts on it, loop devices over its files, and it.
pub fn below(dir: &Path) {
    for point in mounts_below(dir) {
        if let Some(id) = connection_of(&point) {
            abort_connection(id);
        }
        let lazily = Command::new("umount").arg("--lazy").arg(&point).stderr(Stdio::null()).status();
        if !lazily.is_ok_and(|s| s.success()) {
            let _ = Command::new("fusermount3").args(["-u", "-z"]).arg(&point).stderr(Stdio::null()).status();
        }
    }
    for pid in processes_below(dir) {
        process::signal(pid, libc::SIGKILL);
    }
    for device in loops_below(dir) {
        let _ = Command::new("losetup").arg("--detach").arg(device).stderr(Stdio::null()).status();
    }
    if let Err(e) = fs::remove_dir_all(dir) {
        println!("left: {}: {e}", dir.display());
    }
}

/// Innermost first.
fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points =
        table.lines().filter_map(|l| l.split(' ').nth(4)).map(|p| PathBuf::from(p.replace("\\040", " ")));
    let mut points: Vec<_> = points.filter(|p| p.starts_with(dir)).collect();
    points.reverse();
    points
}

/// Programs are copied below the test's directory before they run, so where a program lies says whose
/// process it is.
fn processes_below(dir: &Path) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_string_lossy().parse::<u32>().ok());
    pids.filter(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.starts_with(dir)))
        .collect()
}

fn loops_below(dir: &Path) -> Vec<String> {
    let Ok(out) =
        Command::new("losetup").args(["--list", "--noheadings", "--output", "NAME,BACK-FILE"]).output()
    else {
        return Vec::new();
    };
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let pairs = text.lines().filter_map(|l| l.trim().split_once(char::is_whitespace));
    pairs
        .filter(|(_, file)| Path::new(file.trim()).starts_with(dir))
        .map(|(name, _)| name.to_owned())
        .collect()
}
