//! Output of nigh to a closed pipe, or to a full disk.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::process;
use crate::root;
use crate::test::groups::Test;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};
use crate::wait;

pub const TESTS: &[Test] = &[
    ("faults: output to a closed pipe ends in silence", closed_pipe),
    ("faults: output to a full disk fails in one line", full_disk),
    ("faults: status of a mount that was moved", moved),
    ("faults: status of a mount at a name that is not UTF-8", not_utf8),
    ("faults: status says that a nested mount lowered notifications", lowered),
];

const LIMIT: Duration = Duration::from_secs(20);
const COMMANDS: &[&[&str]] =
    &[&["status"], &["status", "--json"], &["status", "--server"], &["--help"], &["mount", "--help"]];

fn mounted(world: &World) -> Result<Mount<'_>> {
    Mount::new(world, &world.dir("source", As::Us)?, &world.dir("mnt", As::Us)?, &MountParams::new(As::Us))
}

fn status_at(world: &World, point: &Path) -> Result<Value> {
    let mut command = world.command(world.nigh(), As::Us);
    command.arg("status").arg(point).arg("--json");
    let ended = world.run(command, LIMIT)?;
    ensure!(ended.ok(), "nigh status: {}", ended.tail(3));
    Ok(serde_json::from_str(&ended.said)?)
}

fn mount_by(program: &str, arguments: &[&OsStr]) -> Result<()> {
    process::output(Command::new(program).args(arguments)).map(drop)
}

fn moved(world: &World) -> Result<()> {
    if !root::is_root() {
        return Ok(());
    }
    // Only a mount below a private mount can be moved.
    let (room, elsewhere) = (world.dir("room", As::Us)?, world.dir("elsewhere", As::Us)?);
    mount_by(
        "mount",
        &["-t", "tmpfs", "room"].map(OsStr::new).into_iter().chain([room.as_os_str()]).collect::<Vec<_>>(),
    )?;
    mount_by("mount", &[OsStr::new("--make-private"), room.as_os_str()])?;
    let point = room.join("mnt");
    fs::create_dir(&point)?;
    let mount = Mount::new(world, &world.dir("source", As::Us)?, &point, &MountParams::new(As::Us))?;
    mount_by("mount", &[OsStr::new("--move"), point.as_os_str(), elsewhere.as_os_str()])?;
    let status = status_at(world, &elsewhere);
    let stays = status_at(world, &point);
    mount_by("mount", &[OsStr::new("--move"), elsewhere.as_os_str(), point.as_os_str()])?;
    mount.unmount()?;
    mount_by("umount", &[room.as_os_str()])?;
    ensure!(status?["mountpoint"].as_str() == elsewhere.to_str(), "its present path is shown");
    ensure!(stays.is_err(), "it is found where it was");
    Ok(())
}

fn not_utf8(world: &World) -> Result<()> {
    let point = world.dir("mnt", As::Us)?.join(OsStr::from_bytes(b"caf\xe9"));
    fs::create_dir(&point)?;
    let mount = Mount::new(world, &world.dir("source", As::Us)?, &point, &MountParams::new(As::Us))?;
    let status = status_at(world, &point);
    mount.unmount()?;
    ensure!(status?["remote"]["connected"] == true);
    Ok(())
}

fn lowered(world: &World) -> Result<()> {
    if !root::is_root() {
        return Ok(());
    }
    let mount = mounted(world)?;
    let before = mount.status()?;
    let inside = mount.point.join("inside");
    fs::create_dir(&inside)?;
    mount_by(
        "mount",
        &["-t", "tmpfs", "inside"]
            .map(OsStr::new)
            .into_iter()
            .chain([inside.as_os_str()])
            .collect::<Vec<_>>(),
    )?;
    wait::holds(LIMIT, || Ok(mount.status()?["kernel"]["lowered"] == true))?;
    let (status, mut page) = (mount.status()?, world.command(world.nigh(), As::Us));
    page.arg("status").arg(&mount.point);
    let page = world.run(page, LIMIT)?;
    mount_by("umount", &[inside.as_os_str()])?;
    mount.unmount()?;
    if before["kernel"]["notifications"] != "all" {
        return Ok(());
    }
    ensure!(
        before["kernel"]["lowered"] == false && status["kernel"]["lowered"] == true,
        "{}",
        status["kernel"]
    );
    ensure!(page.said.contains("mounted below"), "{}", page.said);
    Ok(())
}

/// Returns the exit status and standard error of a command that prints to `out`.
fn print_to(world: &World, arguments: &[&str], out: Stdio) -> Result<(Option<i32>, String)> {
    let mut command = world.command(world.nigh(), As::Us);
    command.args(arguments).stdin(Stdio::null()).stdout(out).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let ended = process::wait(&mut child, LIMIT)?;
    if ended.is_none() {
        child.kill()?;
    }
    let output = child.wait_with_output()?;
    Ok((ended.and_then(|status| status.code()), String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn closed_pipe(world: &World) -> Result<()> {
    let mount = mounted(world)?;
    for arguments in COMMANDS {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let (code, said) = print_to(world, arguments, writer.into())?;
        ensure!(code == Some(0) && said.is_empty(), "nigh {arguments:?}: exit {code:?}, {said}");
    }
    mount.unmount()
}

fn full_disk(world: &World) -> Result<()> {
    let mount = mounted(world)?;
    for arguments in COMMANDS {
        let full: File = OpenOptions::new().write(true).open("/dev/full").context("/dev/full")?;
        let (code, said) = print_to(world, arguments, full.into())?;
        let told = said.lines().count() == 1 && said.contains("No space left on device");
        ensure!(code == Some(1) && told, "nigh {arguments:?}: exit {code:?}, {said}");
    }
    mount.unmount()
}
