//! `cargo xtask bench --host`: how soon a mount shows changes on the server's own disk.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::json;

use super::table;
use crate::test::groups::host::{Changes, P99_MS, change_and_look};
use crate::test::world::{As, Length, World};

/// Changes a second; 0: one after the other, which the changes alone bound.
const RATES: [u64; 2] = [1000, 0];
const RUNS: usize = 3;

/// Returns whether the median of the 99th percentiles keeps the limit at each rate.
pub fn run(nigh: Option<&Path>, short: bool, out: &Path) -> Result<bool> {
    let (count, dirs) = if short { (2000, 100) } else { (10_000, 1000) };
    let world = World::new(nigh, Length::Long)?;
    let (mut lines, mut met) = (Vec::new(), true);
    for rate in RATES {
        let mut p99s = Vec::new();
        for _ in 0..RUNS {
            let mut line = change_and_look(&world, As::Us, Changes { count, dirs, rate })?;
            p99s.push(line["p99_ms"].as_f64().context("it took no times")?);
            line["rate"] = json!(rate);
            println!("{}", table::line(&line));
            lines.push(line);
        }
        p99s.sort_by(f64::total_cmp);
        let p99 = p99s[RUNS / 2];
        let verdict = if p99 <= P99_MS { "met" } else { "MISSED" };
        println!(
            "rate {rate}: 99th percentile {p99} ms (median of {RUNS} runs), limit {P99_MS} ms: {verdict}"
        );
        met &= p99 <= P99_MS;
    }
    std::fs::write(out, serde_json::to_string_pretty(&lines)?)?;
    Ok(met)
}
