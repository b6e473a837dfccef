//! Diagnosis of a stalled load: the server's status, where each thread waits, and whether the disk is slow.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::test::mount::Mount;
use crate::test::world::World;

/// The requests here may hang too.
const LIMIT: Duration = Duration::from_secs(10);

/// Returns everything observable, as readable lines.
pub fn picture(world: &World, mount: &Mount<'_>, source: &Path) -> String {
    let mut lines = vec![disk(world, source)];
    let server = mount.server_status().unwrap_or_else(|error| Value::String(error.to_string()));
    lines.push(format!("the server: {server}"));
    let pid = server["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    for (what, pid) in [("server", pid), ("daemon", Some(mount.daemon()))] {
        let Some(pid) = pid else { continue };
        lines.extend(threads(pid).into_iter().map(|line| format!("{what}: {line}")));
    }
    lines.join("\n  ")
}

/// Measures a small write and an fsync beside the source.
fn disk(world: &World, source: &Path) -> String {
    let mut command = Command::new("dd");
    command.args(["if=/dev/zero", "bs=4096", "count=1", "conv=fsync"]);
    command.arg(format!("of={}", source.with_file_name("probe").display()));
    match world.run(command, LIMIT) {
        Ok(ended) if ended.ok() => format!("a write and fsync beside the source: {:?}", ended.took),
        Ok(ended) => format!("a write and fsync beside the source: {}", ended.tail(3)),
        Err(error) => format!("a write and fsync beside the source: {error}"),
    }
}

/// Returns a process's threads: name, kernel function in which each waits, and stack (for root); equal threads once.
fn threads(pid: u32) -> Vec<String> {
    let mut found = BTreeMap::<String, u64>::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let read = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        let stack = read("stack");
        let stack = stack.lines().filter_map(|line| line.split_whitespace().nth(1)).collect::<Vec<_>>();
        let line = format!("{} {} {}", read("comm").trim(), read("wchan").trim(), stack.join(" < "));
        *found.entry(line.trim().to_owned()).or_default() += 1;
    }
    found.into_iter().map(|(line, count)| format!("{count} x {line}")).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn waiting_thread_is_listed_with_kernel_function() {
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let waiting =
            std::thread::Builder::new().name("it-waits".into()).spawn(move || receiver.recv()).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        let threads = super::threads(std::process::id());
        assert!(threads.iter().any(|line| line.starts_with("1 x it-waits")), "{threads:?}");
        drop(sender);
        assert!(waiting.join().unwrap().is_err());
    }
}
