//! Readable tables of the figures.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::measure::Row;

/// Time, waits and requests of every workload, with ratios to the local disk and the null daemon.
pub fn print(rows: &[Row]) {
    println!(
        "\n{:18} {:12} {:5} {:>11} {:>7} {:>8} {:>8} {:>10} {:>8} {:>8}",
        "workload", "place", "", "time", "waits", "requests", "FUSE", "bytes", "× local", "× null"
    );
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by_key(|row| row.workload as u32);
    for row in sorted {
        let cell = |value: Option<u64>| value.map_or_else(|| "–".to_owned(), |v| v.to_string());
        let fuse = (!row.costs.kernel.is_empty()).then(|| row.costs.kernel.values().sum());
        println!(
            "{:18} {:12} {:5} {:>11} {:>7} {:>8} {:>8} {:>10} {:>8} {:>8}",
            row.workload.name(),
            row.place,
            row.phase,
            time(row.time),
            cell(row.costs.waits),
            cell(row.costs.requests),
            cell(fuse),
            cell(row.costs.bytes),
            ratio(rows, row, "local"),
            ratio(rows, row, "null daemon"),
        );
    }
}

/// FUSE requests by opcode and remote requests by type, where there were any.
pub fn print_requests(rows: &[Row]) {
    println!("\nrequests by kind");
    for row in rows.iter().filter(|r| r.place != "local") {
        println!(
            "{:18} {:12} {:5} kernel: {}; remote: {}",
            row.workload.name(),
            row.place,
            row.phase,
            counts(&row.costs.kernel),
            counts(&row.costs.by_type)
        );
    }
}

fn counts(counts: &BTreeMap<String, u64>) -> String {
    let mut sorted: Vec<_> = counts.iter().collect();
    sorted.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let parts: Vec<String> = sorted.iter().map(|(name, count)| format!("{name} {count}")).collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}

fn time(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1000.0)
}

fn ratio(rows: &[Row], row: &Row, place: &str) -> String {
    let base = rows.iter().find(|r| r.workload == row.workload && r.place == place);
    match base {
        Some(base) if row.place != place && !base.time.is_zero() => {
            format!("{:.2}", row.time.as_secs_f64() / base.time.as_secs_f64())
        }
        _ => "–".to_owned(),
    }
}

/// One object of figures on a line.
#[must_use]
pub fn line(figures: &Value) -> String {
    let Some(object) = figures.as_object() else { return figures.to_string() };
    let parts: Vec<String> = object.iter().map(|(key, value)| format!("{key} {value}")).collect();
    parts.join(", ")
}
