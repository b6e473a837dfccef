//! Long hunts, by hand: seeded histories, fuzzing, coverage.

use crate::root;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

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
    /// Histories in which nothing goes wrong, and files are mapped by all.
    #[arg(long)]
    calm: bool,
    /// Plants each known bug and says which history finds it (docs/decisions/0016-checkers.md).
    #[arg(long, conflicts_with_all = ["seeds", "first", "seed"])]
    planted: bool,
    /// All orders in which a few calls can meet (or those of the plans whose name begins so), and how many states there were.
    #[arg(long, value_name = "PLAN", num_args = 0..=1, default_missing_value = "",
          conflicts_with_all = ["seeds", "first", "seed", "calm", "planted"])]
    orders: Option<String>,
    /// So many scans of a directory of 100,000 entries under 50,000 changes, in each world.
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["seeds", "calm", "planted", "orders"])]
    scans: Option<u64>,
}

/// Seeded histories in virtual time; each must be true (crates/sim).
pub fn sim(options: &Sim) -> Result<bool> {
    let example = || {
        let mut command = Command::new(root::cargo());
        command.current_dir(root::checkout()).args(["run", "--quiet", "--profile", "sim", "-p", "nigh-sim"]);
        command
    };
    if let Some(plan) = &options.orders {
        return Ok(example().args(["--example", "orders", "--", plan]).status()?.success());
    }
    if options.planted {
        let mut command = example();
        command.args(["--features", "nigh-types/planted", "--example", "planted"]);
        let by_histories = command.status()?.success();
        return Ok(by_the_client()? && by_histories);
    }
    let (first, seeds) = options.seed.map_or((options.first, options.seeds), |seed| (seed, 1));
    if let Some(scans) = options.scans {
        let mut command = tests(&["scans"]);
        command.env("NIGH_SCANS", options.seed.map_or(scans, |_| 1).to_string());
        command.env("NIGH_SEED", first.to_string()).env("NIGH_SCAN_ENTRIES", "100000");
        return Ok(command.arg("--nocapture").status()?.success());
    }
    let mut command = tests(&["histories", "native"]);
    if options.calm {
        command.env("NIGH_CALM", "1");
    }
    command.env("NIGH_SEED", first.to_string()).env("NIGH_SEEDS", seeds.to_string());
    Ok(command.status()?.success())
}

/// Tests of the simulator in these modules, optimised.
fn tests(modules: &[&str]) -> Command {
    let mut command = Command::new(root::cargo());
    command.current_dir(root::checkout()).args(["test", "--release", "-p", "nigh-sim"]);
    command.args(["--test", "all", "--"]).args(modules.iter().map(|module| format!("{module}::")));
    command
}

/// Bug 5 is beyond histories: a test of the client's notifier must pass without it, and fail with it.
fn by_the_client() -> Result<bool> {
    const TEST: &str = "notifier::tests::names_of_a_locked_directory_do_not_delay_other_invalidations";
    let test = |bug: &str| {
        let mut command = Command::new(root::cargo());
        command.current_dir(root::checkout()).args([
            "test",
            "--quiet",
            "--profile",
            "sim",
            "-p",
            "nigh-client",
        ]);
        command.args(["--features", "nigh-types/planted", "--lib", TEST]).env("NIGH_PLANTED", bug).output()
    };
    let said =
        |output: &std::process::Output, what: &str| String::from_utf8_lossy(&output.stdout).contains(what);
    let (without, with) = (test("")?, test("5")?);
    ensure!(said(&without, "1 passed"), "{}", String::from_utf8_lossy(&without.stderr));
    let found = said(&with, "1 failed");
    println!("bug 5 Client: {}", if found { format!("found: {TEST} fails") } else { "MISSED".to_owned() });
    Ok(found)
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

/// Runs the fuzz targets on the toolchain in use, from the kept seeds, by cargo-fuzz. Says for each how many inputs it
/// ran, or which one crashed it; that is for a person to keep as a seed.
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
    let tool = tool("cargo-fuzz")?;
    let mut all_ran = true;
    for target in targets {
        let corpus = root::target().join("fuzz-corpus").join(&target);
        plant(&fuzz.join("corpus-hex").join(&target), &corpus)?;
        let seconds = options.minutes * 60;
        let mut command = Command::new(&tool);
        command.current_dir(&fuzz).env("RUSTC_BOOTSTRAP", "1").args(["fuzz", "run", &target]);
        // Nothing that a peer says in so few bytes is worth 64 MiB.
        command.arg(&corpus).args(["--", &format!("-max_total_time={seconds}"), "-malloc_limit_mb=64"]);
        let mut child = command.stderr(Stdio::piped()).spawn()?;
        let said = pass_on(BufReader::new(child.stderr.take().context("it has an end")?), std::io::stderr())?;
        let status = child.wait()?;
        match outcome(&said, status) {
            Ok(runs) => println!("{target}: {runs} runs, ok"),
            Err(why) => {
                println!("{target}: {why}");
                all_ran = false;
            }
        }
    }
    Ok(all_ran)
}

/// What a fuzzer says, passed on as it says it; of that, the lines that [`outcome`] knows.
fn pass_on(mut from: impl BufRead, mut to: impl Write) -> Result<Vec<String>> {
    let (mut kept, mut line) = (Vec::new(), Vec::new());
    while from.read_until(b'\n', &mut line)? > 0 {
        to.write_all(&line)?;
        let text = String::from_utf8_lossy(&line);
        if runs(&text).is_some() || crash(&text).is_some() {
            kept.push(text.into_owned());
        }
        line.clear();
    }
    Ok(kept)
}

/// How many inputs it ran, or why it did not end well.
fn outcome(said: &[String], status: ExitStatus) -> Result<u64, String> {
    // Inputs that only took long are kept too.
    let last = said.last().map_or("", String::as_str);
    match (status.success(), runs(last), crash(last)) {
        (true, Some(runs), _) => Ok(runs),
        (false, _, Some(path)) => Err(format!("crashed: {path}")),
        _ => Err(format!("failed: {status}")),
    }
}

/// libFuzzer says how many inputs it tried when its time is over,
fn runs(line: &str) -> Option<u64> {
    line.strip_prefix("Done ")?.split_once(" runs in ")?.0.parse().ok()
}

/// and where it put the one with which it ended before.
fn crash(line: &str) -> Option<&str> {
    Some(line.split_once("Test unit written to ")?.1.trim_end())
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
    let mut command = Command::new(tool("cargo-tarpaulin")?);
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

/// Where a program is that cargo calls; it is installed below the target directory at the first use.
pub fn tool(name: &str) -> Result<PathBuf> {
    let tools = root::target().join("tools");
    let tool = tools.join("bin").join(name);
    if !tool.is_file() {
        let mut install = Command::new(root::cargo());
        install.args(["install", "--quiet", "--locked", name, "--root"]).arg(&tools);
        if !install.status()?.success() {
            bail!("{name} cannot be installed");
        }
    }
    Ok(tool)
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

    /// Its own words, among others.
    #[test]
    fn result_of_a_fuzzer_is_one_line() {
        let [ended, crashed] = [0, 77].map(|code| std::os::unix::process::ExitStatusExt::from_raw(code << 8));
        let told = |said: &str, status| outcome(&pass_on(said.as_bytes(), std::io::sink()).unwrap(), status);
        let slow = "artifact_prefix='/f/'; Test unit written to /f/slow-unit-1c\n";
        let done = format!("#524288\tpulse  cov: 36\n{slow}Done 1114112 runs in 61 second(s)\n");
        assert_eq!(told(&done, ended), Ok(1_114_112));
        let crash =
            format!("{slow}artifact_prefix='/f/'; Test unit written to /f/crash-0eb8\nBase64: MTI=\n");
        assert_eq!(told(&crash, crashed), Err("crashed: /f/crash-0eb8".to_owned()));
        for said in ["error: could not compile\n", &done] {
            assert_eq!(told(said, crashed), Err("failed: exit status: 77".to_owned()));
        }
    }
}
