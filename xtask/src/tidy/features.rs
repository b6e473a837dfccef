//! The features of crates that xtask shares with the rest of the workspace.
//!
//! Cargo selects features anew for each set of packages that it builds. A shared crate that has other features for
//! `--package xtask` than for `--workspace` is built twice, and so is everything that depends on it.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::Result;

use super::Problem;
use crate::{process, root};

pub fn check() -> Result<Vec<Problem>> {
    let (xtask, workspace) = (tree(&["--package", "xtask"])?, tree(&["--workspace"])?);
    Ok(differing(&xtask, &workspace))
}

/// Each package of a build, a line, with its version and features.
fn tree(packages: &[&str]) -> Result<String> {
    let mut command = Command::new(root::cargo());
    command.current_dir(root::checkout()).args(["tree", "--locked", "--quiet"]).args(packages);
    command.args(["--edges", "normal,build", "--prefix", "none", "--no-dedupe", "--format", "{p} [{f}]"]);
    process::output(&mut command)
}

fn differing(xtask: &str, workspace: &str) -> Vec<Problem> {
    let workspace: BTreeSet<&str> = workspace.lines().collect();
    let differing: BTreeSet<&str> = xtask.lines().filter(|line| !workspace.contains(line)).collect();
    let what = |line: &str| {
        format!("{line}: other features than in the workspace; name what selects them in [dependencies]")
    };
    differing.into_iter().map(|line| Problem::new("features", "xtask/Cargo.toml", 1, what(line))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crate_with_other_features_is_reported_once() {
        let workspace = "a v1 [std]\nb v1 []\na v1 [std]\nc v1 [x]\n";
        assert_eq!(differing("a v1 [std]\nb v1 []\n", workspace), []);
        let found = differing("a v1 []\nb v1 []\na v1 []\n", workspace);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].what.starts_with("a v1 []: "), "{found:?}");
    }
}
