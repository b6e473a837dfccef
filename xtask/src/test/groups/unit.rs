//! `cargo test --workspace`; its own closing lines, summed.

use std::process::{Command, Stdio};

use crate::root;
use crate::tally::Tally;

pub fn run(tally: &mut Tally) {
    let mut command = Command::new(root::cargo());
    command.current_dir(root::checkout()).args(["test", "--workspace", "--locked", "--no-fail-fast"]);
    let out = match command.stdin(Stdio::null()).stderr(Stdio::inherit()).output() {
        Ok(out) => out,
        Err(e) => return tally.fail("unit", &e.to_string()),
    };
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let sums = sums(&said);
    if sums.failed > 0 || !out.status.success() {
        println!("{said}");
    }
    for name in failures(&said) {
        tally.fail(&format!("unit: {name}"), "see above");
    }
    if !out.status.success() && sums.failed == 0 {
        tally.fail("unit", &format!("cargo test ended with {}", out.status));
    }
    println!("{} unit tests pass", sums.passed);
    tally.passed_quietly(sums.passed);
    tally.skipped += sums.ignored;
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

fn failures(said: &str) -> Vec<String> {
    let failed = said.lines().filter(|l| l.starts_with("test ") && l.ends_with("FAILED"));
    failed.filter_map(|l| l.split_whitespace().nth(1)).map(str::to_owned).collect()
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
        assert_eq!(failures(said), ["b::c"]);
    }
}
