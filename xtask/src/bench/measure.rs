//! Runs a workload at a place and counts its costs.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::places::{Distant, Null};
use super::trees::Sizes;
use super::workload::{self, Workload};
use crate::process::{self, CommandResult};
use crate::test::mount::Mount;
use crate::test::world::World;

const LIMIT: Duration = Duration::from_secs(1200);

/// One line of the table.
pub struct Row {
    pub workload: Workload,
    pub place: String,
    pub phase: &'static str,
    pub time: Duration,
    pub costs: Costs,
}

/// Counters that increased during a run.
#[derive(Clone, Default)]
pub struct Costs {
    pub waits: Option<u64>,
    pub joins: Option<u64>,
    pub requests: Option<u64>,
    pub by_type: BTreeMap<String, u64>,
    pub kernel: BTreeMap<String, u64>,
    pub bytes: Option<u64>,
    pub flights: Option<u64>,
}

impl Row {
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "workload": self.workload.name(),
            "place": self.place,
            "phase": self.phase,
            "seconds": self.time.as_secs_f64(),
            "waits": self.costs.waits,
            "joins": self.costs.joins,
            "requests": self.costs.requests,
            "by_type": self.costs.by_type,
            "kernel": self.costs.kernel,
            "link_bytes": self.costs.bytes,
            "link_flights_to_server": self.costs.flights,
        })
    }
}

fn command(world: &World, work: Workload, dir: &Path, sizes: &Sizes) -> Result<std::process::Command> {
    let archive = world.root.join("tree.tar");
    if !archive.exists() {
        let mut tar = std::process::Command::new("tar");
        tar.arg("-cf").arg(&archive).arg("tree").current_dir(world.root.join("source"));
        process::output(&mut tar)?;
    }
    let mut command = workload::command(&world.xtask(), work, dir, sizes, &archive);
    command.current_dir(&world.root);
    Ok(command)
}

fn time(work: Workload, ended: &CommandResult) -> Result<Duration> {
    ensure!(ended.ok(), "{}: {}", work.name(), ended.tail(8));
    workload::time_said(&ended.said).with_context(|| format!("{} said no time: {}", work.name(), ended.said))
}

/// How often a read-only workload is repeated warm; the median counts.
const WARM: usize = 5;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Runs on the local disk, the reference for all figures.
pub fn local(world: &World, work: Workload, dir: &Path, sizes: &Sizes) -> Result<Vec<Row>> {
    let once = || -> Result<Duration> { time(work, &world.run(command(world, work, dir, sizes)?, LIMIT)?) };
    let first = once()?;
    let times =
        if work.mutates() { vec![first] } else { (0..WARM).map(|_| once()).collect::<Result<_>>()? };
    Ok(vec![Row {
        workload: work,
        place: "local".into(),
        phase: "warm",
        time: median(times),
        costs: Costs::default(),
    }])
}

/// Runs on the null daemon, the lower bound for any FUSE filesystem.
pub fn null(world: &World, work: Workload, null: &Null, sizes: &Sizes) -> Result<Vec<Row>> {
    let once =
        || -> Result<Duration> { time(work, &world.run(command(world, work, &null.point, sizes)?, LIMIT)?) };
    let before = null_counts(null)?;
    let first = once()?;
    let (times, before) = if work.mutates() {
        (vec![first], before)
    } else {
        let times = (1..WARM).map(|_| once()).collect::<Result<_>>()?;
        let before = null_counts(null)?;
        once()?;
        (times, before)
    };
    let costs = Costs { kernel: grown(&before, &null_counts(null)?), ..Costs::default() };
    Ok(vec![Row { workload: work, place: "null daemon".into(), phase: "warm", time: median(times), costs }])
}

fn null_counts(null: &Null) -> Result<Value> {
    let mut line = String::new();
    BufReader::new(UnixStream::connect(&null.control)?).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

/// On nigh: cold on a fresh mount, then warm.
pub fn distant(world: &World, work: Workload, distant: &Distant<'_>, sizes: &Sizes) -> Result<Vec<Row>> {
    let mount = distant.mount(world)?;
    let place = format!("nigh {}", distant.rtt);
    let once = |phase: &'static str| -> Result<Row> {
        let (before, link) = (mount.status()?, distant.link.counts()?);
        let ended = mount.run(command(world, work, &mount.point, sizes)?, LIMIT)?;
        let time = time(work, &ended)?;
        let costs = costs(&before, &mount.status()?, &link, &distant.link.counts()?);
        Ok(Row { workload: work, place: place.clone(), phase, time, costs })
    };
    let mut rows = vec![once(if work.mutates() { "once" } else { "cold" })?];
    if !work.mutates() {
        let mut warm = once("warm")?;
        let mut times = vec![warm.time];
        for _ in 1..WARM {
            times.push(once("warm")?.time);
        }
        warm.time = median(times);
        rows.push(warm);
    }
    settle(&mount);
    mount.unmount()?;
    Ok(rows)
}

/// Lets the daemon send the server the releases that FORGETs have caused, before the mount ends.
fn settle(mount: &Mount<'_>) {
    let _ = fs::File::open(&mount.point).and_then(|dir| dir.sync_all());
}

fn costs(before: &Value, after: &Value, link_before: &Value, link_after: &Value) -> Costs {
    let remote = |key: &str| {
        number(&after["remote"][key]).zip(number(&before["remote"][key])).map(|(a, b)| a - b.min(a))
    };
    let link = |way: &str, key: &str| {
        number(&link_after[way][key]).zip(number(&link_before[way][key])).map(|(a, b)| a - b.min(a))
    };
    Costs {
        waits: remote("waits"),
        joins: remote("joins"),
        requests: remote("requests"),
        by_type: grown(&before["remote"]["by_type"], &after["remote"]["by_type"]),
        kernel: grown(&before["kernel"]["requests"], &after["kernel"]["requests"]),
        bytes: link("to_server", "bytes").zip(link("to_client", "bytes")).map(|(a, b)| a + b),
        flights: link("to_server", "flights"),
    }
}

fn number(value: &Value) -> Option<u64> {
    value.as_u64()
}

/// Returns the differences of two objects of counters, without unchanged ones.
fn grown(before: &Value, after: &Value) -> BTreeMap<String, u64> {
    let Some(after) = after.as_object() else { return BTreeMap::new() };
    let pairs = after.iter().filter_map(|(key, value)| {
        let was = before[key.as_str()].as_u64().unwrap_or(0);
        value.as_u64().map(|now| (key.clone(), now.saturating_sub(was)))
    });
    pairs.filter(|(_, count)| *count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_subtracted() {
        let before = json!({"remote": {"waits": 3, "requests": 10, "by_type": {"list": 2, "open": 1}},
            "kernel": {"requests": {"LOOKUP": 5}}});
        let after = json!({"remote": {"waits": 4, "requests": 15, "by_type": {"list": 6, "open": 1, "read": 1}},
            "kernel": {"requests": {"LOOKUP": 5, "READ": 2}}});
        let link =
            json!({"to_server": {"bytes": 10, "flights": 1}, "to_client": {"bytes": 20, "flights": 1}});
        let costs = costs(&before, &after, &link, &link);
        assert_eq!((costs.waits, costs.requests, costs.bytes), (Some(1), Some(5), Some(0)));
        assert_eq!(costs.by_type, BTreeMap::from([("list".to_owned(), 4), ("read".to_owned(), 1)]));
        assert_eq!(costs.kernel, BTreeMap::from([("READ".to_owned(), 2)]));
    }
}
