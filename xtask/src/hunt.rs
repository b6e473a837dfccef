//! Long hunts, by hand: seeded histories, fuzzing, coverage.

use crate::root;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Args)]
pub struct Sim {
    /// How many histories.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first one.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Only this one.
    #[arg(long, conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
}

/// Seeded histories in virtual time; each must be true (crates/sim).
pub fn sim(options: &Sim) -> Result<bool> {
    let (first, seeds) = options.seed.map_or((options.first, options.seeds), |seed| (seed, 1));
    let mut command = Command::new(root::cargo());
    command.current_dir(root::checkout()).args([
        "test",
        "--release",
        "-p",
        "nigh-sim",
        "--test",
        "histories",
    ]);
    command.env("NIGH_SEED", first.to_string()).env("NIGH_SEEDS", seeds.to_string());
    Ok(command.status()?.success())
}

#[derive(Args)]
pub struct Fuzz {
    /// For each target.
    #[arg(long, default_value_t = 15)]
    minutes: u64,
    /// Only this target.
    #[arg(long)]
    target: Option<String>,
}

/// Runs the fuzz targets on the toolchain in use, from the kept seeds. A crash is kept as a seed.
pub fn fuzz(options: &Fuzz) -> Result<bool> {
    let fuzz = root::checkout().join("fuzz");
    let mut targets = Vec::new();
    for entry in fs::read_dir(fuzz.join("corpus-hex"))? {
        targets.push(entry?.file_name().to_string_lossy().into_owned());
    }
    targets.sort();
    targets.retain(|target| options.target.as_ref().is_none_or(|only| only == target));
    if targets.is_empty() {
        bail!("no such target; they are the directories of fuzz/corpus-hex");
    }
    for target in targets {
        let corpus = root::target().join("fuzz-corpus").join(&target);
        plant(&fuzz.join("corpus-hex").join(&target), &corpus)?;
        let seconds = options.minutes * 60;
        let mut command = Command::new(root::cargo());
        command.current_dir(&fuzz).env("RUSTC_BOOTSTRAP", "1").args(["fuzz", "run", &target]);
        // Nothing that a peer says in so few bytes is worth 64 MiB.
        command.arg(&corpus).args(["--", &format!("-max_total_time={seconds}"), "-malloc_limit_mb=64"]);
        let ran =
            command.status().context("cargo fuzz; install it with `cargo install --locked cargo-fuzz`")?;
        if !ran.success() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Seeds are kept as text; the fuzzer wants bytes.
fn plant(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let bytes = unhex(&fs::read_to_string(&path)?).with_context(|| path.display().to_string())?;
        let name: PathBuf = path.file_stem().context("a seed without a name")?.into();
        fs::write(to.join(name), bytes)?;
    }
    Ok(())
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    let digits: Vec<u8> = text
        .bytes()
        .filter(|b| !b.is_ascii_whitespace())
        .map(|b| char::from(b).to_digit(16).and_then(|d| u8::try_from(d).ok()).context("not hexadecimal"))
        .collect::<Result<_>>()?;
    if !digits.len().is_multiple_of(2) {
        bail!("half a byte is left");
    }
    Ok(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// Lines of the pure crates that their own tests run, by cargo-tarpaulin (which needs no component of the
/// toolchain). Fails below 85 %.
pub fn coverage() -> Result<bool> {
    let tools = root::target().join("tools");
    let tool = tools.join("bin/cargo-tarpaulin");
    if !tool.is_file() {
        let mut install = Command::new(root::cargo());
        install.args(["install", "--quiet", "--locked", "cargo-tarpaulin", "--root"]).arg(&tools);
        if !install.status()?.success() {
            bail!("cargo-tarpaulin cannot be installed");
        }
    }
    let mut command = Command::new(tool);
    command.current_dir(root::checkout()).arg("tarpaulin").args(["--engine", "ptrace", "--skip-clean"]);
    command
        .args(["--fail-under", "85", "--out", "Stdout", "--target-dir"])
        .arg(root::target().join("coverage"));
    for name in root::PURE {
        command.args([
            "--packages",
            &format!("nigh-{name}"),
            "--include-files",
            &format!("crates/{name}/src/*"),
        ]);
    }
    command.args(["--packages", "nigh-sim"]);
    Ok(command.status()?.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_read_as_bytes() {
        assert_eq!(unhex("00 ff\n7F").unwrap(), [0, 255, 127]);
        assert!(unhex("0").is_err());
        assert!(unhex("0g").is_err());
    }
}
