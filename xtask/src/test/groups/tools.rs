//! Real programs on a mount give the same results as on the local disk.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::scripts::{SCRIPTS, Script};
use super::{exercisers, filesystems};
use crate::report::TestReport;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};
use crate::{process, root};

pub fn run(world: &World, tally: &mut TestReport) {
    if root::is_root() {
        if let Err(e) = on_ext4(world, tally) {
            tally.not_run("tools: pjdfstest and fsx on ext4", &format!("{e:#}"));
        }
        if let Err(e) = toolchain(world) {
            tally.not_run("tools: cargo build", &format!("{e:#}"));
        }
    }
    for who in world.users() {
        let some = if who == As::Us { SCRIPTS.len() } else { 3 };
        for script in world.sample.of("tools", SCRIPTS, some) {
            let name = format!("{} as {}", script.name, who.name());
            if let Some(missing) = script.needs.iter().find(|p| !available(world, p)) {
                tally.not_run(&name, &format!("{missing} is missing"));
                continue;
            }
            tally.test(&name, || compare(world, script, who));
        }
    }
}

fn available(world: &World, program: &str) -> bool {
    Path::new(program).is_file()
        || process::which(program).is_some()
        || world.root.join("rust/bin").join(program).is_file()
}

fn on_ext4(world: &World, tally: &mut TestReport) -> Result<()> {
    let disk = filesystems::disk(world, "ext4", "tools-ext4")?;
    let how = MountParams::new(As::Us);
    exercisers::pjdfstest(world, tally, &disk.point, &how);
    exercisers::fsx(world, tally, &disk.point, &how);
    Ok(())
}

/// The toolchain often lies in a home that others may not enter: in our namespace it is bound to where they
/// may.
fn toolchain(world: &World) -> Result<()> {
    let sysroot = process::output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let at = world.dir("rust", As::Us)?;
    let bound = Command::new("mount").arg("--bind").arg(sysroot.trim()).arg(&at).status()?;
    ensure!(bound.success(), "cannot bind the toolchain to {}", at.display());
    Ok(())
}

/// What the script says on the local disk and on a mount must be equal.
fn compare(world: &World, script: &Script, who: As) -> Result<()> {
    let inputs = inputs(world, script)?;
    let local = world.dir("local", who)?;
    let expected = script_in(world, script, who, &local, &inputs, None)?;
    let (source, point) = (world.dir("source", who)?, world.dir("mnt", who)?);
    let mount = Mount::new(world, &source, &point, &MountParams::new(who))?;
    let got = script_in(world, script, who, &point, &inputs, Some(&mount))?;
    ensure!(expected == got, "local and mounted differ:\n{}", first_difference(&expected, &got));
    mount.unmount()
}

fn first_difference(expected: &str, got: &str) -> String {
    let (mut left, mut right) = (expected.lines(), got.lines());
    loop {
        match (left.next(), right.next()) {
            (None, None) => return "only in blanks".to_owned(),
            (a, b) if a == b => {}
            (a, b) => {
                return format!("  local:   {}\n  mounted: {}", a.unwrap_or("(end)"), b.unwrap_or("(end)"));
            }
        }
    }
}

/// What is fetched before, by whoever runs us: users of the script have no network and no cargo home.
fn inputs(world: &World, script: &Script) -> Result<std::path::PathBuf> {
    let dir = world.root.join("inputs").join(script.name);
    if dir.exists() {
        return Ok(dir);
    }
    std::fs::create_dir_all(&dir)?;
    if let Some(prepare) = script.prepare {
        let mut command = Command::new("sh");
        command.args(["-euc", prepare]).current_dir(&dir);
        let ended = world.run(command, Duration::from_secs(300))?;
        ensure!(ended.ok(), "preparing: {}", ended.tail(10));
    }
    let mut open = Command::new("chmod");
    open.args(["-R", "a+rX"]).arg(&dir);
    process::output(&mut open)?;
    std::fs::set_permissions(world.root.join("inputs"), std::fs::Permissions::from_mode(0o755))?;
    Ok(dir)
}

fn script_in(
    world: &World,
    script: &Script,
    who: As,
    dir: &Path,
    inputs: &Path,
    guard: Option<&Mount<'_>>,
) -> Result<String> {
    let mut command = world.command("sh", who);
    command.args(["-euc", script.text]).current_dir(dir).env("INPUTS", inputs).env("LC_ALL", "C");
    let rust = world.root.join("rust/bin");
    let path = std::env::var("PATH").unwrap_or_default();
    let system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    if root::is_root() {
        command.env("PATH", format!("{}:{system}", rust.display())).env_remove("RUSTUP_TOOLCHAIN");
    } else {
        command.env("PATH", format!("{path}:{system}"));
    }
    command.env_remove("CARGO_TARGET_DIR").env_remove("CARGO_BUILD_JOBS");
    let limit = Duration::from_secs(script.limit_s);
    let ended = match guard {
        Some(mount) => mount.run(command, limit)?,
        None => world.run(command, limit)?,
    };
    let place = if guard.is_some() { "mounted" } else { "local" };
    ensure!(ended.ok(), "{place}: {}", ended.tail(12));
    Ok(ended.said)
}
