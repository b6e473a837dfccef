//! `cargo xtask check`: what a commit must pass.

use std::process::Command;
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::report::TestReport;
use crate::test::world::Length;
use crate::{explore, process, root, tidy};

#[derive(clap::Args)]
pub struct Options {
    /// Leave the unit tests out.
    #[arg(long)]
    no_tests: bool,
}

/// True if all is well.
pub fn run(options: &Options) -> Result<bool> {
    let mut tally = TestReport::new();
    house_rules(&mut tally);
    let clippy = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
    cargo(&mut tally, "lints", &clippy, &[]);
    packages(&mut tally);
    if !options.no_tests {
        crate::test::groups::unit::run(Length::Short, &mut tally);
    }
    Ok(tally.close())
}

/// Format, the rules of `tidy`, and the stricter lints of the pure crates.
pub fn house_rules(tally: &mut TestReport) {
    cargo(tally, "format", &["fmt", "--all", "--check"], &[]);
    tally.test("tidy", || {
        let problems = tidy::problems()?;
        ensure!(problems.is_empty(), "{}\n  {}", problems.len(), problems.join("\n  "));
        Ok(())
    });
    pure_lints(tally);
}

fn cargo(tally: &mut TestReport, name: &str, arguments: &[&str], variables: &[(&str, &str)]) {
    let start = Instant::now();
    let mut command = Command::new(root::cargo());
    command.current_dir(root::checkout()).args(arguments).envs(variables.iter().copied());
    match command.status() {
        Ok(status) if status.success() => tally.pass(name, start.elapsed()),
        Ok(status) => tally.fail(name, &format!("cargo {} ended with {status}", arguments.join(" "))),
        Err(e) => tally.fail(name, &e.to_string()),
    }
}

fn pure_lints(tally: &mut TestReport) {
    let rules = root::checkout().join("xtask/pure");
    let packages: Vec<String> = root::PURE.iter().map(|name| format!("--package=nigh-{name}")).collect();
    let mut arguments = vec!["clippy", "--locked", "--lib"];
    arguments.extend(packages.iter().map(String::as_str));
    arguments.extend(["--", "-D", "warnings", "-D", "clippy::iter_over_hash_type"]);
    cargo(tally, "lints of pure crates", &arguments, &[("CLIPPY_CONF_DIR", &rules.to_string_lossy())]);
}

/// Licences, sources and known vulnerabilities of all packages, as deny.toml says. The database of vulnerabilities is a
/// git repository.
fn packages(tally: &mut TestReport) {
    let tool = match process::which("cargo-deny").map_or_else(|| explore::tool("cargo-deny"), Ok) {
        Ok(tool) => tool,
        Err(e) => return tally.not_run("licences, advisories", &format!("{e:#}")),
    };
    for (name, checks) in
        [("licences", &["licenses", "bans", "sources"][..]), ("advisories", &["advisories"])]
    {
        let start = Instant::now();
        let mut command = Command::new(&tool);
        command.current_dir(root::checkout()).args(["--locked", "check"]).args(checks);
        match command.output() {
            Ok(out) if out.status.success() => tally.pass(name, start.elapsed()),
            Ok(out) => {
                let said = String::from_utf8_lossy(&out.stderr);
                if said.contains("failed to fetch advisory database") {
                    println!("NOT RUN: {name}: the advisory database cannot be reached");
                } else {
                    tally.fail(name, said.trim());
                }
            }
            Err(e) => tally.fail(name, &e.to_string()),
        }
    }
}
