//! Removes the tests' files and ends the tests' processes, and no others.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Result;

use super::mount::{abort_connection, connection_of, detach};
use super::world::{PREFIX, TESTER, in_memory};
use crate::wait;
use crate::{process, root};

/// `cargo xtask clean`. Always true: failures are reported.
pub fn run() -> Result<bool> {
    let named = fs::read_dir(std::env::temp_dir())?.flatten().filter_map(|entry| of_tests(&entry.path()));
    // A removed directory may have left processes.
    let used = processes().into_iter().filter_map(program).filter_map(|program| of_tests(&program));
    for dir in named.chain(used).collect::<BTreeSet<_>>() {
        // Tests that still run, perhaps another user's.
        if let Some(owner) = owner(&dir).filter(|pid| runs(*pid)) {
            println!("left: {} (process {owner} runs)", dir.display());
            continue;
        }
        println!("removing {}", dir.display());
        below(&dir);
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

/// Returns whether tests of another process are running.
#[must_use]
pub fn others_run() -> bool {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else { return false };
    let mut owners = entries.flatten().filter_map(|entry| owner(&entry.path()));
    owners.any(|pid| pid != std::process::id() && runs(pid))
}

fn runs(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Returns the test directory that contains a path.
fn of_tests(path: &Path) -> Option<PathBuf> {
    let temporary = std::env::temp_dir();
    let first = path.strip_prefix(&temporary).ok()?.components().next()?;
    let dir = temporary.join(first);
    owner(&dir).map(|_| dir)
}

/// Returns the process that a test directory's name gives as its owner.
fn owner(dir: &Path) -> Option<u32> {
    dir.file_name()?.to_str()?.strip_prefix(PREFIX)?.parse().ok()
}

/// Ends the processes of a test directory, and removes the mounts and loop devices in it, and the directory.
pub fn below(dir: &Path) {
    // Processes that wait for a mount are killed when its connection is aborted; while they live the mount may be
    // busy.
    for _ in 0..2 {
        for point in mounts_below(dir) {
            if let Some(id) = connection_of(&point) {
                abort_connection(id);
            }
            detach(&point);
        }
        end_processes_below(dir);
    }
    for device in loops_below(dir) {
        let _ = Command::new("losetup").arg("--detach").arg(device).stderr(Stdio::null()).status();
    }
    if let Some(dir) = in_memory(dir) {
        let _ = fs::remove_dir_all(dir);
    }
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => println!("left: {}: {e}", dir.display()),
        _ => {}
    }
}

/// Kills the processes, and waits up to two seconds for their end.
fn end_processes_below(dir: &Path) {
    let _ = wait::holds(Duration::from_secs(2), || {
        let pids = processes_below(dir);
        pids.iter().for_each(|pid| process::signal(*pid, libc::SIGKILL));
        Ok(pids.is_empty())
    });
}

/// Returns the mounts below a directory, innermost first.
fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points =
        table.lines().filter_map(|l| l.split(' ').nth(4)).map(|p| PathBuf::from(p.replace("\\040", " ")));
    let mut points: Vec<_> = points.filter(|p| p.starts_with(dir)).collect();
    points.reverse();
    points
}

/// Returns the processes of a test directory: their program or their home is below it. Zombies are left out, and so is
/// this process.
pub fn processes_below(dir: &Path) -> Vec<u32> {
    let is_of =
        |pid: &u32| *pid != std::process::id() && places(*pid).iter().any(|place| place.starts_with(dir));
    processes().into_iter().filter(is_of).collect()
}

/// Returns all running processes.
#[must_use]
pub fn processes() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|e| e.file_name().to_string_lossy().parse::<u32>().ok()).collect()
}

/// Returns the processes of a program.
#[must_use]
pub fn running(path: &Path) -> Vec<u32> {
    processes().into_iter().filter(|pid| program(*pid).as_deref() == Some(path)).collect()
}

fn program(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/exe")).ok()
}

/// Returns the paths of a process's program and home. Call this only when no mount of the tests hangs: the kernel
/// locks the process's memory to read its environment.
fn places(pid: u32) -> Vec<PathBuf> {
    let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let home = variables.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(b"HOME="));
    let home = home.map(|home| PathBuf::from(std::ffi::OsStr::from_bytes(home)));
    [program(pid), home].into_iter().flatten().collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Child;

    /// A process with this home; ended when dropped.
    struct Sleeper(Child);

    impl Sleeper {
        fn new(program: &Path, home: &Path) -> Sleeper {
            Sleeper(Command::new(program).arg("60").env("HOME", home).spawn().unwrap())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn cleanup_ends_processes_of_its_test_directory_only() {
        // No process has such an id.
        let [ours, others] =
            [u32::MAX, u32::MAX - 1].map(|n| std::env::temp_dir().join(format!("{PREFIX}{n}")));
        for dir in [&ours, &others] {
            fs::create_dir_all(dir.join("home")).unwrap();
        }
        let sleep = process::which("sleep").unwrap();
        fs::copy(&sleep, ours.join("sleep")).unwrap();
        let mut by_home = Sleeper::new(&sleep, &ours.join("home"));
        let mut by_program = Sleeper::new(&ours.join("sleep"), Path::new("/"));
        let mut another = Sleeper::new(&sleep, &others.join("home"));
        below(&ours);
        assert!(by_home.0.try_wait().unwrap().is_some() && by_program.0.try_wait().unwrap().is_some());
        assert!(another.0.try_wait().unwrap().is_none(), "it belongs to another");
        assert!(!ours.exists() && others.exists());
        fs::remove_dir_all(&others).unwrap();
        assert_eq!(of_tests(&others.join("bin/nigh")), Some(others.clone()));
        assert_eq!(of_tests(Path::new("/tmp/nigh-testing/x")), None);
    }
}
