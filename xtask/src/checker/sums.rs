//! Sums over runs of the soak.

use std::fs;
use std::path::Path;

use anyhow::Result;
use serde_json::{Map, Value, json};

/// Goals: the path in a sum, and the required value.
const GOALS: [(&str, u64); 8] = [
    ("/seconds", 7_200),
    ("/calls", 1_000_000),
    ("/faults/cut", 100),
    ("/faults/down_less_than_a_term", 100),
    ("/faults/down_more_than_a_term", 100),
    ("/faults/client_stopped_past_its_term", 100),
    ("/faults/server_killed", 100),
    ("/faults/worker_killed", 100),
];
/// Limit of the time from a fatal signal to the end of a wait, in µs, in 99 of 100 cases.
const KILLED_US: u64 = 50_000;

/// The sum of all runs in a file.
pub struct Sums(pub Value);

impl Sums {
    /// Adds a run to those in the file.
    ///
    /// # Errors
    /// If the file cannot be read or written, or has another format.
    pub fn add(path: &Path, run: &Value) -> Result<Sums> {
        let mut runs: Vec<Value> = match fs::read_to_string(path) {
            Ok(text) => serde_json::from_str(&text)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        runs.push(run.clone());
        fs::write(path, serde_json::to_string_pretty(&runs)?)?;
        Ok(Sums::of(&runs))
    }

    fn of(runs: &[Value]) -> Sums {
        let sum = |path: &str| runs.iter().filter_map(|run| run.pointer(path)?.as_u64()).sum::<u64>();
        let most = |path: &str| runs.iter().filter_map(|run| run.pointer(path)?.as_u64()).max();
        let mut faults = Map::new();
        for (path, _) in GOALS {
            if let Some(name) = path.strip_prefix("/faults/") {
                faults.insert(name.to_owned(), json!(sum(path)));
            }
        }
        let mut killed: Vec<u64> = Vec::new();
        for run in runs {
            let all = run["killed_us"].as_array().into_iter().flatten();
            killed.extend(all.filter_map(Value::as_u64));
        }
        killed.sort_unstable();
        Sums(json!({
            "runs": runs.len(),
            "seconds": sum("/seconds"),
            "calls": sum("/counts/calls"),
            "faults": faults,
            "recalls": sum("/recalls"),
            "epochs": sum("/epochs"),
            "fences": sum("/fences"),
            "unknown": sum("/counts/unknown"),
            "left_out": sum("/counts/left_out"),
            "longest_ms": {
                "without_faults": most("/longest_ms/without_faults"),
                "with_faults": most("/longest_ms/with_faults"),
            },
            "killed": killed.len(),
            "killed_p99_us": percentile(&killed, 99),
            "killed_longest_us": killed.last(),
        }))
    }

    /// Returns the goals that are not reached yet.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        for (path, least) in GOALS {
            let there = self.0.pointer(path).and_then(Value::as_u64).unwrap_or(0);
            if there < least {
                missing.push(format!("{}: {there} of {least}", &path[1..]));
            }
        }
        match self.0["killed_p99_us"].as_u64() {
            Some(p99) if p99 <= KILLED_US => {}
            p99 => {
                missing.push(format!("the end of a wait by a fatal signal takes {p99:?} us, not {KILLED_US}"))
            }
        }
        missing
    }
}

/// Returns a percentile of sorted values.
fn percentile(sorted: &[u64], percent: usize) -> Option<u64> {
    let at = (sorted.len() * percent).div_ceil(100);
    sorted.get(at.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soak_runs_are_summed() {
        let faults = |n: u64| {
            json!({ "cut": n, "down_less_than_a_term": n, "down_more_than_a_term": n,
                "client_stopped_past_its_term": n, "server_killed": n, "worker_killed": n })
        };
        let run = |n: u64| json!({ "seconds": 3_600, "counts": { "calls": 500_000 }, "faults": faults(n), "killed_us": [9, 70_000] });
        let one = Sums::of(&[run(99)]);
        assert_eq!(one.missing().len(), 9, "{:?}", one.missing());
        let mut quick = run(1);
        quick["killed_us"] = json!(vec![5; 300]);
        assert_eq!(Sums::of(&[run(99), quick]).missing(), Vec::<String>::new());
        assert_eq!(Sums::of(&[run(98), run(1)]).missing().len(), 7);
    }

    #[test]
    fn a_percentile_is_one_of_the_values() {
        assert_eq!(percentile(&[], 99), None);
        assert_eq!(percentile(&[7], 99), Some(7));
        let all: Vec<u64> = (1..=200).collect();
        assert_eq!(percentile(&all, 99), Some(198));
    }
}
