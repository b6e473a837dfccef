//! What nigh prints where the reader leaves early, or the disk is full.

use std::fs::{File, OpenOptions};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process;
use crate::test::groups::Test;
use crate::test::mount::{How, Mount};
use crate::test::world::{As, World};

pub const TESTS: &[Test] = &[
    ("faults: output to a closed pipe ends in silence", closed_pipe),
    ("faults: output to a full disk fails in one line", full_disk),
];

const LIMIT: Duration = Duration::from_secs(20);
const COMMANDS: &[&[&str]] =
    &[&["status"], &["status", "--json"], &["status", "--server"], &["--help"], &["mount", "--help"]];

fn mounted(world: &World) -> Result<Mount<'_>> {
    Mount::new(world, &world.dir("source", As::Us)?, &world.dir("mnt", As::Us)?, &How::new(As::Us))
}

/// Exit status and standard error of a command that prints to `out`.
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
