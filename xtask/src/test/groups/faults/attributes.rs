//! Set-user-ID programs that another mount changes, on mounts with `-o suid`.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::root;
use crate::test::groups::Test;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};

pub const TESTS: &[Test] = &[
    ("faults: a changed set-user-ID program runs as its caller", changed_program),
    ("faults: the same at lower notification levels and an older protocol", changed_program_at_levels),
];

const LIMIT: Duration = Duration::from_secs(20);
const OWNER: u32 = 1;
const USER: u32 = 65_534;

/// Each changes the program `$1` so that it still runs.
const WAYS: &[&str] = &[
    r"printf '\177' | dd of=$1 conv=notrunc status=none",
    "echo z >> $1",
    "fallocate --keep-size --length 4096 $1",
    "truncate --size=+1 $1",
    "dd if=$1 of=$1 bs=4096 count=1 conv=notrunc oflag=direct status=none",
];

fn changed_program(world: &World) -> Result<()> {
    if !root::is_root() {
        println!("SKIPPED: needs root");
        return Ok(());
    }
    changed(world, WAYS, MountParams::new(As::Us))
}

fn changed_program_at_levels(world: &World) -> Result<()> {
    if !root::is_root() {
        println!("SKIPPED: needs root");
        return Ok(());
    }
    for (name, value) in [
        ("NIGH_NOTIFY_LEVEL", "no-epoch"),
        ("NIGH_NOTIFY_LEVEL", "none"),
        ("NIGH_FUSE_WITHOUT", "HANDLE_KILLPRIV_V2"),
        ("NIGH_FUSE_MINOR", "31"),
    ] {
        changed(world, &WAYS[..2], MountParams::new(As::Us).set(name, value))
            .with_context(|| format!("{name}={value}"))?;
    }
    Ok(())
}

fn changed(world: &World, ways: &[&str], how: MountParams) -> Result<()> {
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    std::fs::set_permissions(&source, std::fs::Permissions::from_mode(0o755))?;
    let mount = Mount::new(world, &source, &point, &how.with("-o").with("suid"))?;
    for (nth, way) in ways.iter().enumerate() {
        let name = format!("id{nth}");
        let program = source.join(&name);
        std::fs::copy("/usr/bin/id", &program).context("/usr/bin/id")?;
        chown(&program, Some(OWNER), Some(OWNER))?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o6757))?;
        let program = point.join(&name);
        let before = run(&mount, &program)?;
        ensure!(before == ("-rwsr-srwx".into(), OWNER.to_string()), "{way}: {before:?} before");
        let mut change = command("sh");
        change.args(["-c", way, "sh"]).arg(&program);
        let ended = mount.run(change, LIMIT)?;
        ensure!(ended.ok(), "{way}: {}", ended.said);
        let after = run(&mount, &program)?;
        ensure!(after == ("-rwxr-xrwx".into(), USER.to_string()), "{way}: {after:?}");
    }
    mount.unmount()
}

/// Returns the mode, by a statx of the mode alone, and the user as which the program runs.
fn run(mount: &Mount<'_>, program: &Path) -> Result<(String, String)> {
    let mut stat = command("stat");
    stat.args(["--format", "%A"]).arg(program);
    let mut id = command(program);
    id.arg("--user");
    let mut said = Vec::new();
    for command in [stat, id] {
        let ended = mount.run(command, LIMIT)?;
        ensure!(ended.ok(), "{}", ended.said);
        said.push(ended.said.trim().to_owned());
    }
    let [mode, user] = said.try_into().ok().context("two answers")?;
    Ok((mode, user))
}

fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.uid(USER).gid(USER);
    command
}
