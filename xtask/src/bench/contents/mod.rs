//! `cargo xtask bench --contents`: readers of small files, of large files, and interactive callers beside them, over links of
//! 0, 10 and 50 ms and 1 Gbit/s. Rates are shares of what the emulator itself carries.

mod builds;
mod large;
mod meter;
mod shared;
mod small;
mod trees;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::places::Distant;
use super::table;
use crate::link::client::Emulator;
use crate::test::over::LinkKind;
use crate::test::packages;
use crate::test::world::{As, Length, World};
use large::Large;

const BANDWIDTH: &str = "1Gbit";
/// Programs of the readers, and the packages that bring them.
const NEEDS: &[(&str, &str)] = &[
    ("rsync", "rsync"),
    ("rg", "ripgrep"),
    ("file", "file"),
    ("/usr/bin/python3", "python3"),
    ("strace", "strace"),
];

/// Returns whether all workloads were measured.
pub fn run(nigh: Option<&Path>, short: bool, out: &Path) -> Result<bool> {
    packages::for_benchmark(NEEDS);
    if !short {
        packages::for_benchmark(&[(trees::LINUX, "linux-source-6.1")]);
    }
    let world = World::new(nigh, Length::Long)?;
    let source = world.dir("contents-source", As::Us)?;
    let bytes = if short { 64 << 20 } else { 1 << 30 };
    trees::small(&source.join("small"))?;
    trees::flat(&source.join("flat"))?;
    trees::large(&source.join("large"), bytes)?;
    trees::large(&source.join("other"), bytes)?;
    trees::database(&source.join("database"))?;
    let has_linux = !short && trees::linux(&source.join("linux"))?;
    if !short {
        builds::lay_out(&source)?;
    }
    let mut lines = Vec::new();
    let mut say = |line: Value| {
        println!("{}", table::line(&line));
        lines.push(line);
    };
    for rtt in ["0ms", "10ms", "50ms"] {
        let ceiling_mb_per_s = ceiling(&world, rtt)?;
        say(json!({ "rtt": rtt, "emulator_mb_per_s": ceiling_mb_per_s }));
        let distant = Distant::start(&world, &source, LinkKind::Local, (rtt, BANDWIDTH), "forever")?;
        let large = Large { bytes, ceiling_mb_per_s };
        small::readers(&world, &distant, "small", &mut say)?;
        say(small::own(&world, &distant)?);
        say(large::sequential(&world, &distant, large)?);
        say(large::two(&world, &distant, large)?);
        say(large::beside(&world, &distant)?);
        let reads = if rtt == "10ms" && !short { 10_000 } else { 500 };
        say(large::random(&world, &distant, large, reads)?);
        if rtt == "10ms" {
            small::seldom(&world, &distant, &mut say)?;
            say(large::database(&world, &distant)?);
            say(shared::writer_and_reader(&world, &distant, 1)?);
        }
        if rtt == "10ms" && !short {
            builds::run(&world, &distant, &source, &mut say)?;
        }
        if rtt == "10ms" && has_linux {
            say(local_archive(&world, &source.join("linux"))?);
            small::readers(&world, &distant, "linux", &mut say)?;
        }
        if rtt == "0ms" {
            say(large::without_link(&world, &distant, large)?);
        }
    }
    fs::write(out, serde_json::to_string_pretty(&lines)?)?;
    Ok(true)
}

/// Measures `tar c` of a tree on the local disk.
fn local_archive(world: &World, dir: &Path) -> Result<Value> {
    let mut command = world.command("sh", As::Us);
    command.args(["-c", "tar cf - . | wc -c"]).current_dir(dir);
    let start = Instant::now();
    let bytes: u64 = crate::process::output(&mut command)?.trim().parse()?;
    Ok(json!({ "reader": "tar c on the local disk", "s": start.elapsed().as_secs_f64(), "bytes": bytes }))
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
