//! Builds the programs that the tests run, once.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};

use crate::root;

static PROGRAMS: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Builds every program of the workspace in the profile of `cargo test`, and returns a folder with copies of them. Only
/// the first call in the life of this process builds: cargo may then build tests beside the mounted groups, which
/// replaces the programs in its own folder.
pub fn programs() -> Result<PathBuf> {
    let mut built = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(folder) = &*built {
        return Ok(folder.clone());
    }
    cargo(&["build", "--workspace", "--bins"])?;
    let folder = root::target().join("under-test");
    std::fs::create_dir_all(&folder)?;
    for program in ["nigh", "nigh-posix"] {
        std::fs::copy(root::target().join("debug").join(program), folder.join(program))?;
    }
    *built = Some(folder.clone());
    Ok(folder)
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
