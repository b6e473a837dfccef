//! Readers of large files, and callers beside them.

use std::fs;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::meter::{COMPARED, Meter, joined, measured, shell};
use crate::bench::places::Distant;
use crate::process;
use crate::test::mount::{Mount, MountParams};
use crate::test::over::LinkKind;
use crate::test::world::{As, World};

const TIMES: usize = 3;
/// As many lookups in the database by number, and one range.
const QUERIES: &str = "/usr/bin/python3 -c 'import random, sqlite3
random.seed(7)
db = sqlite3.connect(\"file:database?mode=ro\", uri=True)
for _ in range(300): db.execute(\"select length(body) from t where number = ?\", (random.randrange(100000),)).fetchall()
db.execute(\"select sum(length(body)) from t where number between 50000 and 60000\").fetchall()'";

/// The two files, and what the link carries.
#[derive(Clone, Copy)]
pub struct Large {
    /// Size of each, in bytes.
    pub bytes: u64,
    pub ceiling_mb_per_s: f64,
}

impl Large {
    fn rate(&self, took: Duration) -> f64 {
        self.bytes as f64 / took.as_secs_f64() / 1e6
    }
}

fn dd(world: &World, mount: &Mount<'_>, file: &str) -> std::process::Command {
    let mut command = world.command("dd", As::Us);
    command.arg(format!("if={file}")).args(["of=/dev/null", "bs=1M"]).current_dir(&mount.point);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// `dd` of a large file, with the daemon's memory; two at once; and one with a caller beside it that waits for one reply after
/// the other.
pub fn sequential(world: &World, distant: &Distant<'_>, large: Large) -> Result<Value> {
    let mount = distant.mount(world)?;
    shell(world, &mount, ".", "stat large small/one")?;
    let then = Meter::read(&mount, distant)?;
    let took = shell(world, &mount, ".", "dd if=large of=/dev/null bs=1M 2>&1")?;
    let costs = Meter::read(&mount, distant)?.since(&then)?;
    let peak = process::memory_kib(mount.daemon(), "VmHWM:")?;
    let status = mount.status()?;
    mount.unmount()?;
    let line = json!({
        "rtt": distant.rtt, "reader": "dd", "mb_per_s": large.rate(took),
        "share": large.rate(took) / large.ceiling_mb_per_s,
        "daemon_peak_mb": peak as f64 / 1e3,
        "contents_budget_mb": status["cache"]["contents"]["budget_bytes"].as_f64().map(|bytes| bytes / 1e6),
    });
    Ok(joined(line, &costs))
}

/// Two readers of two files at once. Shares are of the time in which both read.
pub fn two(world: &World, distant: &Distant<'_>, large: Large) -> Result<Value> {
    let mount = distant.mount(world)?;
    shell(world, &mount, ".", "stat large other")?;
    let start = Instant::now();
    let mut running = [("large", None), ("other", None)];
    let mut children = Vec::new();
    for (file, _) in &running {
        children.push(dd(world, &mount, file).spawn()?);
    }
    while running.iter().any(|(_, took)| took.is_none()) {
        for ((_, took), child) in running.iter_mut().zip(&mut children) {
            if took.is_none() && child.try_wait()?.is_some() {
                *took = Some(start.elapsed());
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    mount.unmount()?;
    let shares: Vec<f64> =
        running.iter().filter_map(|(_, took)| Some(large.rate((*took)?) / large.ceiling_mb_per_s)).collect();
    Ok(json!({ "rtt": distant.rtt, "reader": "two dd at once", "shares": shares }))
}

/// Returns the median and the 99th percentile of the time of a call that waits for one reply, beside `dd`, in ms.
pub fn beside(world: &World, distant: &Distant<'_>) -> Result<Value> {
    let mount = distant.mount(world)?;
    shell(world, &mount, ".", "stat large")?;
    let file = fs::File::open(mount.point.join("small/one"))?;
    let mut copy = dd(world, &mount, "large").spawn()?;
    let mut times = Vec::new();
    while copy.try_wait()?.is_none() {
        let start = Instant::now();
        ask_flags(&file)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(file);
    mount.unmount()?;
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
    Ok(json!({
        "rtt": distant.rtt, "reader": "a call beside dd", "calls": times.len(), "p50_ms": at(0.5), "p99_ms": at(0.99),
    }))
}

/// Asks for the flags of a file, which the cache does not keep.
fn ask_flags(file: &fs::File) -> Result<()> {
    const FS_IOC_GETFLAGS: libc::c_ulong = 0x8008_6601;
    let mut flags: libc::c_long = 0;
    // SAFETY: the kernel writes a long at most.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_GETFLAGS, &raw mut flags) };
    ensure!(done == 0, "FS_IOC_GETFLAGS: {}", std::io::Error::last_os_error());
    Ok(())
}

pub fn random(world: &World, distant: &Distant<'_>, large: Large, reads: u32) -> Result<Value> {
    let pages = large.bytes / 4096;
    let script = format!(
        "/usr/bin/python3 -c 'import os, random\nrandom.seed(7)\nfd = os.open(\"large\", os.O_RDONLY)\n\
         for _ in range({reads}): os.pread(fd, 4096, random.randrange({pages}) * 4096)'"
    );
    let line = measured(world, distant, ".", ("random 4 KiB", &script))?;
    Ok(joined(json!({ "reads": reads }), &line))
}

/// Queries on a database of 100 MB, with and without reads ahead.
pub fn database(world: &World, distant: &Distant<'_>) -> Result<Value> {
    let mut seconds = Vec::new();
    for arguments in COMPARED {
        let mount = distant.mount_with(world, arguments)?;
        shell(world, &mount, ".", "stat database")?;
        seconds.push(shell(world, &mount, ".", QUERIES)?.as_secs_f64());
        mount.unmount()?;
    }
    Ok(
        json!({ "rtt": distant.rtt, "reader": "sqlite", "s": seconds[0], "s_without_reads_ahead": seconds[1] }),
    )
}

/// `dd` through a server's unix socket without an emulated link, and `cat` through the null daemon. The medians of some runs in
/// turn.
pub fn without_link(world: &World, distant: &Distant<'_>, large: Large) -> Result<Value> {
    // The null daemon has its files in memory.
    let bytes = large.bytes.min(256 << 20);
    let null = crate::bench::places::Null::start(world, &crate::bench::trees::Sizes::scaled(0.001))?;
    let there = null.point.join("large");
    let part = fs::File::open(distant.source.join("large"))?.take(bytes);
    let copied = std::io::copy(&mut { part }, &mut fs::File::create(&there)?)?;
    ensure!(copied == bytes, "the large file is too small");
    let how = MountParams { over: Some((LinkKind::Local, None)), ..MountParams::new(As::Us) };
    let near = world.root.join("near-mnt");
    fs::create_dir_all(&near)?;
    let (mut of_nigh, mut of_null) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        let mount = Mount::new(world, &distant.source, &near, &how)?;
        let script = format!("dd if=large of=/dev/null bs=1M count={} 2>&1", bytes >> 20);
        of_nigh.push(shell(world, &mount, ".", &script)?.as_secs_f64());
        mount.unmount()?;
        // The kernel has the pages of what it wrote.
        let mut forget = world.command("dd", As::Us);
        forget.arg(format!("if={}", there.display())).args(["of=/dev/null", "iflag=nocache", "count=0"]);
        process::output(&mut forget)?;
        let mut cat = world.command("cat", As::Us);
        cat.arg(&there).stdout(Stdio::null());
        let start = Instant::now();
        ensure!(cat.status()?.success(), "cat on the null daemon");
        of_null.push(start.elapsed().as_secs_f64());
    }
    of_nigh.sort_by(f64::total_cmp);
    of_null.sort_by(f64::total_cmp);
    let (mounted, plain) = (of_nigh[TIMES / 2], of_null[TIMES / 2]);
    Ok(json!({
        "reader": "dd through a unix socket", "mb_per_s": bytes as f64 / mounted / 1e6,
        "null_mb_per_s": bytes as f64 / plain / 1e6, "ratio": plain / mounted,
    }))
}
