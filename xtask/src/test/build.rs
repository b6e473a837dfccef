//! Builds everything that the tests run, once.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::root;

/// Builds every library, binary, test and example of the workspace, in the profile of `cargo test`, with one choice of
/// features.
pub fn everything() -> Result<()> {
    cargo(&["build", "--workspace", "--all-targets"])
}

/// Builds the optimised binaries only, for measurements.
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

/// Replaces this process by its optimised build: figures of a build with assertions mean nothing.
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
