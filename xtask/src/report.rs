//! Counts what passed, failed and was skipped, and says it while it happens.

use std::time::{Duration, Instant};

/// Results so far.
#[derive(Default)]
pub struct TestReport {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
    failures: Vec<String>,
    not_run: Vec<String>,
    /// With `CI=true` whatever cannot run counts as failed.
    pub strict: bool,
}

impl TestReport {
    #[must_use]
    pub fn new() -> TestReport {
        TestReport { strict: std::env::var("CI").is_ok_and(|v| v == "true"), ..TestReport::default() }
    }

    pub fn pass(&mut self, name: &str, took: Duration) {
        self.passed += 1;
        println!("ok {name} ({:.1} s)", took.as_secs_f64());
    }

    /// Passed without a line of its own.
    pub fn passed_quietly(&mut self, count: u64) {
        self.passed += count;
    }

    pub fn fail(&mut self, name: &str, why: &str) {
        self.failed += 1;
        println!("FAILED {name}: {why}");
        self.failures.push(format!("{name}: {}", shortened(why)));
    }

    pub fn skip(&mut self, name: &str, why: &str) {
        self.skipped += 1;
        println!("skip {name}: {why}");
    }

    /// A whole group, or a tool, that this machine cannot run.
    pub fn not_run(&mut self, what: &str, why: &str) {
        println!("NOT RUN: {what}: {why}");
        self.not_run.push(format!("NOT RUN: {what}: {why}"));
        if self.strict {
            self.failed += 1;
            self.failures.push(format!("{what} (could not run)"));
        }
    }

    /// Runs one test.
    pub fn test(&mut self, name: &str, test: impl FnOnce() -> anyhow::Result<()>) {
        let start = Instant::now();
        let result = test();
        self.record(name, start.elapsed(), result);
    }

    /// Makes what tests need, which counts as a test. `None`: it failed.
    pub fn prepare<T>(&mut self, name: &str, make: impl FnOnce() -> anyhow::Result<T>) -> Option<T> {
        let start = Instant::now();
        match make() {
            Ok(made) => {
                self.pass(name, start.elapsed());
                Some(made)
            }
            Err(e) => {
                self.fail(name, &format!("{e:#}"));
                None
            }
        }
    }

    /// One test from its result.
    pub fn record(&mut self, name: &str, took: Duration, result: anyhow::Result<()>) {
        match result {
            Ok(()) => self.pass(name, took),
            Err(e) => self.fail(name, &format!("{e:#}")),
        }
    }

    /// Counts what another run of this program printed. False: its closing line is missing.
    pub fn take_over(&mut self, said: &str) -> bool {
        let mut closed = false;
        for line in said.lines() {
            let counts: Vec<u64> = counts(line).unwrap_or_default();
            if let Some(name) = line.strip_prefix("failed: ") {
                self.failures.push(name.to_owned());
            } else if let [passed, failed, skipped] = counts[..] {
                (self.passed, self.failed) = (self.passed + passed, self.failed + failed);
                (self.skipped, closed) = (self.skipped + skipped, true);
            } else {
                println!("{line}");
            }
        }
        closed
    }

    /// Says again what did not run or failed, then the closing line. True if nothing failed.
    pub fn close(&self) -> bool {
        for line in &self.not_run {
            println!("{line}");
        }
        for name in &self.failures {
            println!("failed: {name}");
        }
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        self.failed == 0
    }
}

/// Joins the first lines of a reason to one line: a log may be cut to its end, where failures are repeated.
fn shortened(why: &str) -> String {
    let lines: Vec<&str> = why.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join("; ").chars().take(REASON).collect()
}

/// Characters of a repeated reason.
const REASON: usize = 600;

/// The numbers of a closing line.
fn counts(line: &str) -> Option<Vec<u64>> {
    let words = ["passed", "failed", "skipped"];
    let parts: Vec<_> = line.split(", ").collect();
    let number = |(part, word): (&&str, &str)| part.strip_suffix(word)?.strip_suffix(' ')?.parse().ok();
    (parts.len() == words.len()).then(|| parts.iter().zip(words).map(number).collect())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_reason_is_one_line() {
        let mut tally = TestReport::default();
        tally.fail("a", "window 3:\n  stat = ENOENT\n");
        assert_eq!(tally.failures, ["a: window 3:; stat = ENOENT"]);
    }

    #[test]
    fn counts_and_failures_of_another_run_are_added() {
        let mut tally = TestReport { passed: 1, ..TestReport::default() };
        assert!(!tally.take_over("ok a\nfailed: b\n"));
        assert!(tally.take_over("NOT RUN: c: why\nfailed: d\n7 passed, 2 failed, 3 skipped\n"));
        assert_eq!((tally.passed, tally.failed, tally.skipped), (8, 2, 3));
        assert_eq!(tally.failures, ["b", "d"]);
    }
}
