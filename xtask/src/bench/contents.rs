//! `cargo xtask bench --contents`: readers of small files, of a large file, and an interactive caller beside it, over links
//! of 0, 10 and 50 ms and 1 Gbit/s. Rates are shares of what the emulator itself carries.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::places::Distant;
use super::table;
use crate::link::client::Emulator;
use crate::test::mount::Mount;
use crate::test::over::LinkKind;
use crate::test::world::{As, Length, World};

const BANDWIDTH: &str = "1Gbit";
const LIMIT: Duration = Duration::from_secs(600);
/// Each reads every file of the tree once.
const READERS: &[(&str, &str)] = &[
    ("cp -r", "cp -r . \"$OUT\""),
    ("tar c", "tar cf - . | cat"),
    ("grep -r", "grep -r nothing . || true"),
    ("rsync -a", "rsync -a . \"$OUT\""),
    ("rg -j4", "rg -j4 nothing . || true"),
    ("find -exec cat +", "find . -type f -exec cat {} +"),
    (
        "os.walk",
        "/usr/bin/python3 -c 'import os\nfor d, _, fs in os.walk(\".\"):\n  for f in fs: open(d + \"/\" + f).read()'",
    ),
];

/// Returns whether all workloads were measured.
pub fn run(nigh: Option<&Path>, short: bool, out: &Path) -> Result<bool> {
    let world = World::new(nigh, Length::Long)?;
    let source = world.dir("contents-source", As::Us)?;
    let large = if short { 64 << 20 } else { 1 << 30 };
    prepare(&source, large)?;
    let mut lines = Vec::new();
    let mut say = |line: Value| {
        println!("{}", table::line(&line));
        lines.push(line);
    };
    for rtt in ["0ms", "10ms", "50ms"] {
        let ceiling = ceiling(&world, rtt)?;
        say(json!({ "rtt": rtt, "emulator_mb_per_s": ceiling }));
        let distant = Distant::start(&world, &source, LinkKind::Local, (rtt, BANDWIDTH), "forever")?;
        for (name, script) in READERS {
            if let Some(program) = missing(script) {
                println!("{name}: no {program}");
            } else {
                say(small(&world, &distant, (rtt, name, script))?);
            }
        }
        say(sequential(&world, &distant, (rtt, large, ceiling))?);
        say(random(&world, &distant, rtt, large)?);
        say(written(&world, &distant, rtt)?);
    }
    fs::write(out, serde_json::to_string_pretty(&lines)?)?;
    Ok(true)
}

/// Returns a program that a script needs and this machine lacks.
fn missing(script: &str) -> Option<&str> {
    let program = script.split_whitespace().next()?;
    crate::process::which(program).is_none().then_some(program)
}

/// 784 files of 10 bytes in 391 directories, and a large file.
fn prepare(source: &Path, large: u64) -> Result<()> {
    let mut number = 0;
    let mut fill = |dir: &Path| -> Result<()> {
        fs::create_dir(dir)?;
        for file in ["one", "two"] {
            number += 1;
            fs::write(dir.join(file), format!("{number:09}\n"))?;
        }
        Ok(())
    };
    let small = source.join("small");
    fill(&small)?;
    for a in 0..13 {
        let a = small.join(format!("dir-{a}"));
        fill(&a)?;
        for b in 0..29 {
            fill(&a.join(format!("dir-{b}")))?;
        }
    }
    let mut file = fs::File::create(source.join("large"))?;
    let mut block = vec![0_u8; 1 << 20];
    for at in 0..large >> 20 {
        for (word, bytes) in block.chunks_exact_mut(8).enumerate() {
            bytes
                .copy_from_slice(&(at << 17 | word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        }
        file.write_all(&block)?;
    }
    Ok(file.sync_all()?)
}

/// Measures what the emulator carries, in MB/s: a stream of 64 MiB without nigh, the first round trip not counted.
fn ceiling(world: &World, rtt: &str) -> Result<f64> {
    const BYTES: u64 = 64 << 20;
    let to = world.root.join("ceiling.sock");
    let _ = fs::remove_file(&to);
    let listener = UnixListener::bind(&to)?;
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.read_exact(&mut [0])?;
        let block = vec![7_u8; 64 << 10];
        (0..BYTES / block.len() as u64).try_for_each(|_| stream.write_all(&block))
    });
    let link = Emulator::start(&world.xtask(), &world.root, &to, rtt, BANDWIDTH)?;
    let mut stream = UnixStream::connect(&link.socket)?;
    stream.write_all(b"x")?;
    let (mut block, mut left) = (vec![0_u8; 64 << 10], BYTES - 1);
    stream.read_exact(&mut [0])?;
    let start = Instant::now();
    while left > 0 {
        let count = stream.read(&mut block)? as u64;
        ensure!(count > 0, "the emulator ended the stream");
        left -= count;
    }
    let rate = (BYTES - 1) as f64 / start.elapsed().as_secs_f64() / 1e6;
    let _ = sender.join();
    Ok((rate * 10.0).round() / 10.0)
}

struct Before {
    waits: u64,
    joins: u64,
    bytes: u64,
}

fn of(status: &Value, key: &str) -> Result<u64> {
    status["remote"][key].as_u64().with_context(|| format!("no {key}"))
}

fn before(mount: &Mount<'_>) -> Result<Before> {
    let status = mount.status()?;
    Ok(Before {
        waits: of(&status, "waits")?,
        joins: of(&status, "joins")?,
        bytes: of(&status, "bytes_received")?,
    })
}

fn shell(world: &World, mount: &Mount<'_>, dir: &str, script: &str) -> Result<Duration> {
    let out = world.root.join("contents-out");
    let _ = fs::remove_dir_all(&out);
    let mut command = world.command("sh", As::Us);
    command.args(["-euc", &format!("{{ {script}; }} > /dev/null")]).env("OUT", &out);
    command.current_dir(mount.point.join(dir));
    let start = Instant::now();
    let ended = mount.run(command, LIMIT)?;
    ensure!(ended.ok(), "{}", ended.tail(5));
    Ok(start.elapsed())
}

/// The costs of what was done since `then`.
fn costs(mount: &Mount<'_>, then: &Before) -> Result<Value> {
    let status = mount.status()?;
    let (waits, joins) = (of(&status, "waits")? - then.waits, of(&status, "joins")? - then.joins);
    Ok(json!({
        "waits_without_joins": waits - joins,
        "joins": joins,
        "received_mb": (of(&status, "bytes_received")? - then.bytes) as f64 / 1e6,
        "wasted": status["cache"]["contents"]["wasted"],
    }))
}

fn joined(mut line: Value, costs: &Value) -> Value {
    if let (Some(line), Some(costs)) = (line.as_object_mut(), costs.as_object()) {
        line.extend(costs.clone());
    }
    line
}

fn small(world: &World, distant: &Distant<'_>, (rtt, name, script): (&str, &str, &str)) -> Result<Value> {
    let mount = distant.mount(world)?;
    shell(world, &mount, "small", "true")?;
    let then = before(&mount)?;
    let took = shell(world, &mount, "small", script)?;
    let line = json!({ "rtt": rtt, "reader": name, "s": took.as_secs_f64() });
    let line = joined(line, &costs(&mount, &then)?);
    mount.unmount()?;
    Ok(line)
}

/// `dd` of the large file; and again, with a caller beside it that waits for one reply after the other.
fn sequential(
    world: &World,
    distant: &Distant<'_>,
    (rtt, large, ceiling): (&str, u64, f64),
) -> Result<Value> {
    let mount = distant.mount(world)?;
    shell(world, &mount, ".", "stat large small/one")?;
    let then = before(&mount)?;
    let took = shell(world, &mount, ".", "dd if=large of=/dev/null bs=1M 2>&1")?;
    let costs = costs(&mount, &then)?;
    let rate = large as f64 / took.as_secs_f64() / 1e6;
    mount.unmount()?;
    let mount = distant.mount(world)?;
    shell(world, &mount, ".", "stat large")?;
    let beside = beside(world, &mount)?;
    mount.unmount()?;
    let line = json!({
        "rtt": rtt, "reader": "dd", "mb_per_s": rate, "share": rate / ceiling,
        "beside_p50_ms": beside.0, "beside_p99_ms": beside.1,
    });
    Ok(joined(line, &costs))
}

/// Returns the median and the 99th percentile of the time of a call that waits for one reply, beside `dd`, in ms.
fn beside(world: &World, mount: &Mount<'_>) -> Result<(f64, f64)> {
    let file = fs::File::open(mount.point.join("small/one"))?;
    let mut command = world.command("dd", As::Us);
    command.args(["if=large", "of=/dev/null", "bs=1M"]).current_dir(&mount.point);
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let mut copy = command.spawn()?;
    let mut times = Vec::new();
    while copy.try_wait()?.is_none() {
        let start = Instant::now();
        ask_flags(&file)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(Duration::from_millis(10));
    }
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
    Ok((at(0.5), at(0.99)))
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

fn random(world: &World, distant: &Distant<'_>, rtt: &str, large: u64) -> Result<Value> {
    let count = if rtt == "50ms" { 500 } else { 2_000 };
    let mount = distant.mount(world)?;
    shell(world, &mount, ".", "stat large")?;
    let then = before(&mount)?;
    let script = format!(
        "/usr/bin/python3 -c 'import os, random\nrandom.seed(7)\nfd = os.open(\"large\", os.O_RDONLY)\n\
         for _ in range({count}): os.pread(fd, 4096, random.randrange({large} // 4096) * 4096)'"
    );
    let took = shell(world, &mount, ".", &script)?;
    let line = json!({ "rtt": rtt, "reader": "random 4 KiB", "reads": count, "s": took.as_secs_f64() });
    let line = joined(line, &costs(&mount, &then)?);
    mount.unmount()?;
    Ok(line)
}

/// Small files that the mount writes, and reads back.
fn written(world: &World, distant: &Distant<'_>, rtt: &str) -> Result<Value> {
    let mount = distant.mount(world)?;
    let make = "mkdir own; for n in $(seq 100); do echo contents of $n > own/$n; done";
    let then = before(&mount)?;
    let made = shell(world, &mount, ".", make)?;
    let making = costs(&mount, &then)?;
    let then = before(&mount)?;
    let read = shell(world, &mount, ".", "cat own/*")?;
    let line = json!({
        "rtt": rtt, "reader": "own files", "make_s": made.as_secs_f64(), "read_s": read.as_secs_f64(),
        "waits_making": making["waits_without_joins"],
    });
    let line = joined(line, &costs(&mount, &then)?);
    shell(world, &mount, ".", "rm -r own")?;
    mount.unmount()?;
    Ok(line)
}
