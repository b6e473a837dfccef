//! The latency of one request that the daemon answers from its cache, and the memory that absent names take.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::trees::Sizes;
use super::workload::{self, Workload};
use crate::process;
use crate::test::mount::Mount;
use crate::test::world::World;

/// Median and 99th percentile of an xattr call on one file (the kernel caches no xattrs: each call reaches the
/// daemon), with caller and daemon on one CPU, and on any CPUs.
pub fn of(place: &str, point: &Path, daemon: u32, calls: u32) -> Result<Value> {
    let file = point.join("read/0");
    let free = times(&file, calls)?;
    let before = placement()?;
    put_on(daemon, &one_cpu())?;
    put_on(0, &one_cpu())?;
    let pinned = times(&file, calls);
    put_on(daemon, &before)?;
    put_on(0, &before)?;
    let pinned = pinned?;
    let us = |time: Duration| (time.as_secs_f64() * 1e7).round() / 10.0;
    Ok(json!({
        "place": place,
        "call": "getxattr",
        "calls": calls,
        "pinned_median_us": us(at(&pinned, 50)),
        "pinned_p99_us": us(at(&pinned, 99)),
        "unpinned_median_us": us(at(&free, 50)),
        "unpinned_p99_us": us(at(&free, 99)),
    }))
}

fn at(sorted: &[Duration], percent: usize) -> Duration {
    sorted.get(sorted.len() * percent / 100).copied().unwrap_or_default()
}

fn times(file: &Path, calls: u32) -> Result<Vec<Duration>> {
    let path = CString::new(file.as_os_str().as_bytes())?;
    let mut buffer = [0_u8; 16];
    let mut times = Vec::new();
    for i in 0..calls + 100 {
        let start = Instant::now();
        let ret = unsafe {
            libc::getxattr(path.as_ptr(), c"user.none".as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
        };
        let took = start.elapsed();
        ensure!(ret == -1, "{} has user.none", file.display());
        let errno = io::Error::last_os_error().raw_os_error();
        ensure!(matches!(errno, Some(libc::ENODATA | libc::EOPNOTSUPP)), "{}: {errno:?}", file.display());
        // The first calls fetch.
        if i >= 100 {
            times.push(took);
        }
    }
    times.sort();
    Ok(times)
}

/// Returns the set of the first CPU.
fn one_cpu() -> libc::cpu_set_t {
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    unsafe { libc::CPU_SET(0, &mut set) };
    set
}

/// Returns the CPUs on which this thread may run.
fn placement() -> Result<libc::cpu_set_t> {
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let ret = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    ensure!(ret == 0, "sched_getaffinity: {}", io::Error::last_os_error());
    Ok(set)
}

/// Pins this thread, and all processes that it starts from now on, to the first CPU.
pub fn pin_all() -> Result<()> {
    put_on(0, &one_cpu())
}

/// Pins all threads of a process (0: this thread) to these CPUs.
fn put_on(process: u32, set: &libc::cpu_set_t) -> Result<()> {
    let threads = if process == 0 {
        vec![0]
    } else {
        let tasks = fs::read_dir(format!("/proc/{process}/task")).context("the daemon is gone")?;
        tasks.flatten().filter_map(|t| t.file_name().to_string_lossy().parse::<i32>().ok()).collect()
    };
    for thread in threads {
        let ret = unsafe { libc::sched_setaffinity(thread, size_of::<libc::cpu_set_t>(), set) };
        ensure!(ret == 0, "sched_setaffinity: {}", io::Error::last_os_error());
    }
    Ok(())
}

/// Looks up so many different absent names in one directory; returns the daemon's memory before and after.
pub fn missing_names(world: &World, mount: &Mount<'_>, names: u32) -> Result<Value> {
    let before = resident_kib(mount.daemon())?;
    let sizes = Sizes { calls: names, ..Sizes::scaled(0.01) };
    let command =
        workload::command(&world.xtask(), Workload::StatMissingMany, &mount.point, &sizes, Path::new("none"));
    let ended = mount.run(command, Duration::from_secs(3600))?;
    ensure!(ended.ok(), "{}", ended.tail(5));
    let took = workload::time_said(&ended.said).unwrap_or(ended.took);
    let status = mount.status()?;
    Ok(json!({
        "missing_names": names,
        "seconds": took.as_secs_f64(),
        "daemon_kib_before": before,
        "daemon_kib_after": resident_kib(mount.daemon())?,
        "cache_negative": status["cache"]["negative"],
        "cache_bytes": status["cache"]["bytes"],
        "cache_budget_bytes": status["cache"]["budget_bytes"],
        "waits": status["remote"]["waits"],
    }))
}

/// Returns a process's resident memory.
pub fn resident_kib(process: u32) -> Result<u64> {
    process::memory_kib(process, "VmRSS:")
}
