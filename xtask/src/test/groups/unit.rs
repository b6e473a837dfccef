//! `cargo test`; its own closing lines, summed. A test that finds that it cannot run says `SKIPPED: WHY` and passes; it is
//! counted as skipped here.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use crate::report::TestReport;
use crate::root;
use crate::test::world::Length;

/// Crates whose tests are built without optimisation, which takes a fifth of the time: tests of these crates alone finish
/// soon. The other tests link the optimised library.
const UNOPTIMISED: [&str; 2] = ["nigh-cache", "nigh-lease"];

pub fn run(length: Length, tally: &mut TestReport) {
    let passed: u64 = [rest(), unoptimised()].into_iter().map(|tests| run_tests(tests, length, tally)).sum();
    println!("{passed} unit tests pass");
    tally.passed_quietly(passed);
}

/// No examples, which `cargo xtask check` looks at; no tests in documentation, which `tidy` forbids.
fn tests() -> Command {
    let mut command = Command::new(root::cargo());
    command.current_dir(root::checkout()).args(["test", "--tests", "--locked", "--no-fail-fast"]);
    command
}

fn rest() -> Command {
    let mut command = tests();
    command.arg("--workspace").args(UNOPTIMISED.map(|name| format!("--exclude={name}")));
    command
}

fn unoptimised() -> Command {
    let mut command = tests();
    command.args(UNOPTIMISED.map(|name| format!("--package={name}")));
    command.args(UNOPTIMISED.map(|name| format!("--config=profile.dev.package.{name}.opt-level=0")));
    command
}

/// Returns how many tests passed.
fn run_tests(mut command: Command, length: Length, tally: &mut TestReport) -> u64 {
    if length != Length::Short {
        command.env("NIGH_LEASE_HISTORIES", "5000");
    }
    command.args(["--", "--show-output"]);
    let out = match command.stdin(Stdio::null()).stderr(Stdio::inherit()).output() {
        Ok(out) => out,
        Err(e) => {
            tally.fail("unit", &e.to_string());
            return 0;
        }
    };
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let sums = sums(&said);
    if sums.failed > 0 || !out.status.success() {
        println!("{said}");
    }
    for (name, why) in failures(&said) {
        tally.fail(&format!("unit: {name}"), &why);
    }
    if !out.status.success() && sums.failed == 0 {
        tally.fail("unit", &format!("cargo test ended with {}", out.status));
    }
    let skipped = skipped(&said);
    for (name, why) in &skipped {
        tally.skip(&format!("unit: {name}"), why);
    }
    tally.skipped += sums.ignored;
    sums.passed.saturating_sub(skipped.len() as u64)
}

#[derive(Default, PartialEq, Eq, Debug)]
struct Sums {
    passed: u64,
    failed: u64,
    ignored: u64,
}

/// Sums the lines `test result: ok. 3 passed; 0 failed; 0 ignored; …`.
fn sums(said: &str) -> Sums {
    let mut sums = Sums::default();
    for line in said.lines().filter(|l| l.starts_with("test result:")) {
        for part in line.split([';', '.']) {
            let mut words = part.split_whitespace();
            let (Some(count), Some(what)) = (words.next().and_then(|w| w.parse::<u64>().ok()), words.next())
            else {
                continue;
            };
            match what {
                "passed" => sums.passed += count,
                "failed" => sums.failed += count,
                "ignored" => sums.ignored += count,
                _ => {}
            }
        }
    }
    sums
}

/// Returns the tests that failed, each with the text of its panic.
fn failures(said: &str) -> Vec<(String, String)> {
    let failed = said.lines().filter(|l| l.starts_with("test ") && l.ends_with("FAILED"));
    let names = failed.filter_map(|l| l.split_whitespace().nth(1));
    names.map(|name| (name.to_owned(), panic_of(said, name))).collect()
}

fn panic_of(said: &str, name: &str) -> String {
    let title = format!("---- {name} stdout ----");
    let output = said.lines().skip_while(|line| *line != title).skip(1);
    let output = output.take_while(|line| !line.starts_with("---- ") && *line != "failures:");
    let panic: Vec<&str> = output.skip_while(|line| !line.contains("panicked at")).collect();
    if panic.is_empty() { "see above".to_owned() } else { panic.join("\n").trim().to_owned() }
}

/// Tests that passed and said that they, or a part of them, could not run; with the first reason.
fn skipped(said: &str) -> BTreeMap<String, String> {
    let (mut skipped, mut test) = (BTreeMap::new(), "?");
    for line in said.lines() {
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            test = name;
        } else if let Some(why) = line.strip_prefix("SKIPPED: ") {
            skipped.entry(test.to_owned()).or_insert_with(|| why.to_owned());
        }
    }
    skipped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_summed() {
        let said = "test a ... ok\ntest b::c ... FAILED\n\
            test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.01s\n\
            test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.01s\n";
        assert_eq!(sums(said), Sums { passed: 7, failed: 1, ignored: 2 });
        assert_eq!(failures(said), [("b::c".to_owned(), "see above".to_owned())]);
    }

    #[test]
    fn failed_test_is_listed_with_its_panic() {
        let said = "test a ... FAILED\ntest b ... ok\n\nsuccesses:\n\n---- b stdout ----\n12 clients\n\nsuccesses:\n    b\n\n\
            failures:\n\n---- a stdout ----\n3 clients\n\nthread 'a' (7) panicked at tests/a.rs:1:2:\nnothing came\n\n\n\
            failures:\n    a\n";
        let panic = "thread 'a' (7) panicked at tests/a.rs:1:2:\nnothing came";
        assert_eq!(failures(said), [("a".to_owned(), panic.to_owned())]);
    }

    #[test]
    fn tests_that_could_not_run_are_told_once_each() {
        let said = "\nsuccesses:\n\n---- a::b stdout ----\nSKIPPED: a::b needs root\nSKIPPED: more of it\n\n\
            ---- c stdout ----\n12 clients\n\n---- d stdout ----\nhere\nSKIPPED: no mkfs.ext4\n\n\
            successes:\n    a::b\n    c\n    d\n";
        let expected = [("a::b", "a::b needs root"), ("d", "no mkfs.ext4")];
        let skipped = skipped(said);
        assert!(skipped.iter().map(|(name, why)| (name.as_str(), why.as_str())).eq(expected));
    }
}
