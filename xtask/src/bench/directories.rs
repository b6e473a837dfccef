//! `cargo xtask bench --directories`: the cost of large directories, of telldir and of seekdir.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use super::directory::{self, Look};
use super::latency;
use super::places::{Distant, Null};
use super::{table, trees};
use crate::process;
use crate::test::mount::{Mount, MountParams};
use crate::test::over::LinkKind;
use crate::test::world::{As, Length, World};

const LIMIT: Duration = Duration::from_secs(600);
/// Directories listed beforehand, so that the client has seen that the program stats no file.
const FEW: u32 = 16;

/// Files per directory: of the published telldir figures, of `ls -l`, and of the largest directory.
struct Sizes {
    small: u32,
    listed: u32,
    large: u32,
}

pub fn run(nigh: Option<&Path>, short: bool, out: &Path) -> Result<bool> {
    let sizes = match short {
        true => Sizes { small: 16_000, listed: 10_000, large: 64_000 },
        false => Sizes { small: 64_000, listed: 100_000, large: 1_000_000 },
    };
    let world = World::new(nigh, Length::Short)?;
    let source = world.dir("source", As::Us)?;
    let names = [("small", sizes.small), ("listed", sizes.listed), ("large", sizes.large)];
    for (name, files) in names {
        println!("building {name}: {files} files");
        directory::build(&source.join(name), files)?;
    }
    let few = source.join("few");
    std::fs::create_dir(&few)?;
    (0..FEW).try_for_each(|n| directory::build(&few.join(n.to_string()), 8))?;
    let mut figures = Vec::new();
    let mut show = |mut line: Map<String, Value>, name: &str, place: &str| {
        line.insert("what".into(), json!(name));
        line.insert("place".into(), json!(place));
        println!("{}", table::line(&Value::Object(line.clone())));
        figures.push(Value::Object(line));
    };
    for dir in ["small", "large"] {
        show(look(&world, None, Look::Telldir, &source.join(dir), &[])?, "telldir", "local");
        show(look(&world, None, Look::Seekdir, &source.join(dir), &[])?, "seekdir", "local");
    }
    show(look(&world, None, Look::Sorted, &source.join("large"), &[])?, "sorted", "local");
    let base = look(&world, None, Look::FlatRate, &source.join("listed"), &["--pinned"])?;
    let base_rate = base["rate"].as_f64().context("no rate")?;
    show(base, "flat-rate", "local, one core");
    for line in floor(&world, &sizes, base_rate)? {
        show(line, "flat-rate", "null daemon, cold");
    }
    for line in beside(&world, &source, base_rate)? {
        show(line, "flat-rate", "nigh, no link");
    }
    let near = Distant::start(&world, &source, LinkKind::Local, ("0ms", "1Gbit"), "forever")?;
    for line in listed(&world, &near, base_rate)? {
        show(line, "flat-rate", "nigh 0ms");
    }
    places(&world, &near, &mut show)?;
    drop(near);
    let far = Distant::start(&world, &source, LinkKind::Local, ("10ms", "1Gbit"), "forever")?;
    show(first_names(&world, &far)?, "first-names", "nigh 10ms");
    for line in names_only(&world, &far)? {
        show(line, "names-only", "nigh 10ms");
    }
    show(flat(&world, &far)?, "flat-ls-l", "nigh 10ms");
    std::fs::write(out, serde_json::to_string_pretty(&figures)?)?;
    println!("figures in {}", out.display());
    Ok(true)
}

/// Runs one measurement in a process of its own, and returns its figures.
fn look(
    world: &World,
    mount: Option<&Mount<'_>>,
    look: Look,
    dir: &Path,
    arguments: &[&str],
) -> Result<Map<String, Value>> {
    let mut command = world.command(world.xtask(), As::Us);
    command.args(["directory", look.name(), "--dir"]).arg(dir).args(arguments);
    let ended = match mount {
        Some(mount) => mount.run(command, LIMIT)?,
        None => world.run(command, LIMIT)?,
    };
    ensure!(ended.ok(), "{}: {}", look.name(), ended.tail(5));
    Ok(serde_json::from_value(ended.json()?)?)
}

/// Warm directories: telldir, seekdir, and the memory that a million telldir positions take.
fn places(
    world: &World,
    near: &Distant<'_>,
    show: &mut impl FnMut(Map<String, Value>, &str, &str),
) -> Result<()> {
    let mount = near.mount(world)?;
    let mut medians = Vec::new();
    for dir in ["small", "large"] {
        let dir = mount.point.join(dir);
        show(look(world, Some(&mount), Look::Telldir, &dir, &[])?, "telldir", "nigh");
        let mut line = look(world, Some(&mount), Look::Seekdir, &dir, &[])?;
        medians.push((line["mean_us"].as_f64().unwrap_or(0.0), line["median_us"].as_f64().unwrap_or(0.0)));
        if let [(mean, median), (large_mean, large_median)] = medians[..] {
            line.insert("mean_to_small".into(), json!(large_mean / mean));
            line.insert("median_to_small".into(), json!(large_median / median));
        }
        show(line, "seekdir", "nigh");
    }
    let processes = format!("--processes={},{}", mount.daemon(), server(world)?);
    let arguments = [&processes, "--calls", "1000000"];
    let line = look(world, Some(&mount), Look::Streams, &mount.point.join("small"), &arguments)?;
    show(line, "telldir-memory", "nigh (client, server)");
    mount.unmount()
}

/// Returns the server process that the mounts connect to.
fn server(world: &World) -> Result<u32> {
    let nigh = world.nigh().display().to_string();
    let said = process::output(std::process::Command::new("pgrep").args(["-f", &format!("^{nigh} serve")]))?;
    said.lines().next().context("there is no server")?.trim().parse().context("no process id")
}

/// Runs the reference program on the null daemon with cold kernel caches: the lower bound for any FUSE filesystem.
fn floor(world: &World, sizes: &Sizes, base_rate: f64) -> Result<Vec<Map<String, Value>>> {
    let trees = trees::Sizes { flat: sizes.listed, deep: 0, read: 0, links: 0, archive: 0, calls: 0 };
    let null = Null::start(world, &trees)?;
    let mut lines = Vec::new();
    for _ in 0..3 {
        std::fs::write("/proc/sys/vm/drop_caches", "2")?;
        let mut line = look(world, None, Look::FlatRate, &null.point.join("flat_dir"), &[])?;
        put_ratio(&mut line, base_rate)?;
        lines.push(line);
    }
    Ok(lines)
}

/// Runs the reference program on a fresh mount on the server's machine.
fn beside(world: &World, source: &Path, base_rate: f64) -> Result<Vec<Map<String, Value>>> {
    let mut lines = Vec::new();
    for _ in 0..3 {
        let point = world.dir("mnt", As::Us)?;
        let mount =
            Mount::new(world, source, &point, &MountParams::new(As::Us).with("--host-timeout=forever"))?;
        let mut line = look(world, Some(&mount), Look::FlatRate, &mount.point.join("listed"), &[])?;
        put_ratio(&mut line, base_rate)?;
        lines.push(line);
        mount.unmount()?;
    }
    Ok(lines)
}

fn put_ratio(line: &mut Map<String, Value>, base_rate: f64) -> Result<()> {
    let rate = line["rate"].as_f64().context("no rate")?;
    line.insert("to_local".into(), json!(rate / base_rate));
    Ok(())
}

/// Runs `ls -l` of a cold directory three times, with `ls` and with the reference program.
fn listed(world: &World, near: &Distant<'_>, base_rate: f64) -> Result<Vec<Map<String, Value>>> {
    let mut lines = Vec::new();
    for _ in 0..3 {
        let mount = near.mount(world)?;
        let mut line = look(world, Some(&mount), Look::FlatRate, &mount.point.join("listed"), &[])?;
        put_ratio(&mut line, base_rate)?;
        mount.unmount()?;
        let mount = near.mount(world)?;
        let took = list(world, &mount, "ls -l listed")?;
        let entries = line["entries"].as_f64().context("no entries")?;
        line.insert("ls_l_ms".into(), json!(took.as_millis()));
        line.insert("ls_l_to_local".into(), json!(entries / took.as_secs_f64() / base_rate));
        mount.unmount()?;
        lines.push(line);
    }
    Ok(lines)
}

fn list(world: &World, mount: &Mount<'_>, script: &str) -> Result<Duration> {
    let mut command = world.command("sh", As::Us);
    command.args(["-euc", &format!("{script} > /dev/null")]).env("LC_ALL", "C").current_dir(&mount.point);
    let ended = mount.run(command, LIMIT)?;
    ensure!(ended.ok(), "{}", ended.tail(5));
    Ok(ended.took)
}

fn first_names(world: &World, far: &Distant<'_>) -> Result<Map<String, Value>> {
    let mount = far.mount(world)?;
    let line = look(world, Some(&mount), Look::FirstNames, &mount.point.join("large"), &[])?;
    mount.unmount()?;
    Ok(line)
}

/// Measures the first names for a known names-only reader (docs/decisions/0023-names-before-attributes.md), and for
/// comparison with attributes, which `cookies=31` causes; with the server's inodes in memory and without.
fn names_only(world: &World, far: &Distant<'_>) -> Result<Vec<Map<String, Value>>> {
    let mut lines = Vec::new();
    for turn in 0..6 {
        let (cookies, is_cold) = (["cookies=63", "cookies=31"][turn % 2], turn >= 4);
        let mount = far.mount_with(world, &["-o", cookies])?;
        let before = format!("--before={}", mount.point.join("few").display());
        if is_cold {
            std::fs::write("/proc/sys/vm/drop_caches", "3")?;
        }
        let mut line = look(world, Some(&mount), Look::FirstNames, &mount.point.join("large"), &[&before])?;
        let dirents = mount.status()?["remote"]["by_type"]["dirents"].clone();
        line.insert("cookies".into(), json!(cookies));
        line.insert("inodes_in_memory".into(), json!(!is_cold));
        line.insert("dirents".into(), dirents);
        mount.unmount()?;
        lines.push(line);
    }
    Ok(lines)
}

/// Runs `ls -l` of the largest directory: time, waits, and memory at both ends.
fn flat(world: &World, far: &Distant<'_>) -> Result<Map<String, Value>> {
    let mount = far.mount(world)?;
    let processes = [mount.daemon(), server(world)?];
    let resident = || processes.iter().map(|p| latency::resident_kib(*p)).collect::<Result<Vec<u64>>>();
    let (before, waits) = (resident()?, |status: &Value| status["remote"].clone());
    let took = list(world, &mount, "ls -l large")?;
    let status = mount.status()?;
    let remote = waits(&status);
    let line = json!({"ms": took.as_millis(), "waits": remote["waits"], "joins": remote["joins"],
        "by_type": remote["by_type"], "kib_before": before, "kib_behind": resident()?,
        "cache_bytes": status["cache"]["bytes"], "cache_entries": status["cache"]["entries"]});
    mount.unmount()?;
    line.as_object().cloned().context("it is an object")
}
