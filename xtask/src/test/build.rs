//! What the tests run, built once.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::root;

/// Every library, binary, test and example of the workspace, in the profile of `cargo test`: one choice of features for all of them.
pub fn everything() -> Result<()> {
    cargo(&["build", "--workspace", "--all-targets"])
}

/// The binaries alone, optimised: for commands that measure.
pub fn released(nigh: bool) -> Result<()> {
    let mut arguments = vec!["build", "--release", "-p", "nigh-posix"];
    if nigh {
        arguments.extend(["-p", "nigh"]);
    }
    cargo(&arguments)
}

fn cargo(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(root::cargo());
    command.current_dir(root::checkout()).args(arguments).args(["--quiet", "--locked"]);
    ensure!(command.status()?.success(), "cargo {} failed", arguments.join(" "));
    Ok(())
}

/// This program, optimised, in place of this process: a figure of a build with assertions says nothing.
pub fn measure_in_release() -> Result<()> {
    use std::os::unix::process::CommandExt;
    if !cfg!(debug_assertions) {
        return Ok(());
    }
    cargo(&["build", "--release", "-p", "xtask"])?;
    let program = root::target().join("release/xtask");
    ensure!(Path::new(&program).is_file(), "cargo built no {}", program.display());
    Err(Command::new(program).args(std::env::args_os().skip(1)).exec().into())
}
