//! Builds of hostapd and wpa_supplicant on a mount of diod: with negative entries off, on, and with symlink targets
//! cached.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{copy, ended, path, source};
use crate::link::client::Emulator;
use crate::test::mount::{Mount, MountParams};
use crate::test::over::{self, LinkKind, free_port};
use crate::test::world::{As, World};

const LIMIT: Duration = Duration::from_secs(1_800);

/// The mount options of each line of the table.
const LINES: &[(&str, &[&str])] = &[
    ("negative entries off", &["--negative-timeout=off", "--symlinks=ask"]),
    ("negative entries on", &["--negative-timeout=forever", "--symlinks=ask"]),
    ("and symlinks kept", &["--negative-timeout=forever", "--symlinks=keep"]),
];

type Messages = BTreeMap<String, u64>;

struct TableLine {
    name: &'static str,
    time: Duration,
    messages: Messages,
    waits: u64,
}

impl TableLine {
    fn total(&self) -> u64 {
        self.messages.values().sum()
    }

    fn print(&self, local: Duration) {
        let count = |name: &str| self.messages.get(name).copied().unwrap_or(0);
        println!(
            "| {} | {:.1} s | {:.2} | {} | {} | {} | {} | {} |",
            self.name,
            self.time.as_secs_f64(),
            self.time.as_secs_f64() / local.as_secs_f64(),
            self.total(),
            count("Twalk"),
            count("Tgetattr"),
            count("Treadlink"),
            self.waits,
        );
    }
}

pub fn run(world: &World, rtt: &str, what: &str) -> Result<()> {
    let local = world.dir("local", As::Us)?;
    lay_out(&local)?;
    let begun = Instant::now();
    make(world, None, &local, what)?;
    let on_disk = begun.elapsed();
    println!(
        "\n{what} at {rtt}, built once on each fresh mount of a diod; the local disk: {:.1} s",
        on_disk.as_secs_f64()
    );
    println!(
        "| | time | × local | T-messages | Twalk | Tgetattr | Treadlink | waits |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    );
    let mut lines: Vec<TableLine> = Vec::new();
    for (name, options) in LINES {
        let line = one(world, rtt, what, name, options)?;
        line.print(on_disk);
        println!("  {:?}", line.messages);
        lines.push(line);
    }
    let falls = lines.windows(2).all(|pair| pair[0].total() > pair[1].total());
    ensure!(falls, "messages do not fall from line to line");
    Ok(())
}

/// Copies the source and the system root to the build directory.
fn lay_out(dir: &Path) -> Result<()> {
    copy(&source::tree()?, &dir.join("wpa"))?;
    copy(&source::system(), &dir.join("system"))?;
    for part in ["hostapd", "wpa_supplicant"] {
        let part = dir.join("wpa").join(part);
        fs::copy(part.join("defconfig"), part.join(".config"))?;
    }
    Ok(())
}

fn make(world: &World, mount: Option<&Mount<'_>>, dir: &Path, what: &str) -> Result<()> {
    let system = dir.join("system");
    let parts: &[(&str, &[&str])] = match what {
        "wpa_cli" => &[("wpa_supplicant", &["wpa_cli"])],
        _ => &[("hostapd", &[]), ("wpa_supplicant", &[])],
    };
    for (part, targets) in parts {
        let mut command = Command::new("make");
        command.args(["-s", "-j2", "-C"]).arg(dir.join("wpa").join(part)).args(*targets);
        command.arg(format!("CC=gcc --sysroot={}", path(&system)?)).stdin(std::process::Stdio::null());
        // The libraries' own files give paths below the root.
        command.env("PKG_CONFIG_SYSROOT_DIR", &system);
        let done = match mount {
            Some(mount) => mount.run(command, LIMIT)?,
            None => world.run(command, LIMIT)?,
        };
        ended(&done, part)?;
    }
    Ok(())
}

fn one(world: &World, rtt: &str, what: &str, name: &'static str, options: &[&str]) -> Result<TableLine> {
    let ports = [free_port()?, over::diod(world)?];
    let wire = Emulator::of_ninep(&world.xtask(), &world.root, ports, rtt)?;
    let (source, point) = (world.dir("nine", As::Us)?, world.dir("mnt", As::Us)?);
    lay_out(&source)?;
    let mut how = MountParams::new(As::Us).with("--entry-timeout=forever").with("--attr-timeout=forever");
    how.over = Some((LinkKind::Ninep, Some(ports[0])));
    for option in options {
        how = how.with(option);
    }
    let mount = Mount::new(world, &source, &point, &how)?;
    let begun = Instant::now();
    make(world, Some(&mount), &point, what)?;
    let time = begun.elapsed();
    let messages = wire.messages()?;
    let waits = mount.status()?["remote"]["waits"].as_u64().unwrap_or(0);
    again(world, &mount, &wire, what, options)?;
    mount.unmount()?;
    Ok(TableLine { name, time, messages, waits })
}

/// Builds again: with unlimited caching of names and symlinks, no message asks for them.
fn again(world: &World, mount: &Mount<'_>, wire: &Emulator, what: &str, options: &[&str]) -> Result<()> {
    let before = (wire.messages()?, mount.status()?["remote"]["waits"].as_u64().unwrap_or(0));
    let begun = Instant::now();
    make(world, Some(mount), &mount.point, what)?;
    let time = begun.elapsed();
    let mut more = wire.messages()?;
    let waits = mount.status()?["remote"]["waits"].as_u64().unwrap_or(0) - before.1;
    for (name, count) in before.0 {
        *more.entry(name).or_default() -= count;
    }
    more.retain(|_, count| *count > 0);
    println!("  again: {:.1} s, {waits} waits, {more:?}", time.as_secs_f64());
    let count = |name: &str| more.get(name).copied().unwrap_or(0);
    // Files that the build has written are read for the first time: a walk and an open for each.
    let names = count("Twalk").saturating_sub(count("Tlopen"));
    let asked = names + count("Treadlink");
    let keeps_all = options.contains(&"--symlinks=keep");
    ensure!(!keeps_all || asked == 0, "names or symlinks were asked again: {more:?}");
    Ok(())
}
