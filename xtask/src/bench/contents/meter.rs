//! What work on a mount costs: time, waits, and bytes.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::bench::places::Distant;
use crate::test::mount::Mount;
use crate::test::world::{As, World};

pub const LIMIT: Duration = Duration::from_secs(1_200);
/// Options of mounts that are compared: with reads ahead, and without.
pub const COMPARED: [&[&str]; 2] = [&[], &["--prefetch=off"]];

/// Counters of a mount, and of its link, at some moment.
pub struct Meter {
    status: Value,
    flights: Option<u64>,
}

impl Meter {
    pub fn read(mount: &Mount<'_>, distant: &Distant<'_>) -> Result<Meter> {
        let flights = distant.link.counts()?["to_server"]["flights"].as_u64();
        Ok(Meter { status: mount.status()?, flights })
    }

    fn of(&self, part: &str) -> Result<u64> {
        self.status.pointer(part).and_then(Value::as_u64).with_context(|| format!("no {part}"))
    }

    /// Returns the costs since an earlier moment. `link_flights`: bursts of bytes to the server after silence, by the link
    /// emulator. `unread_bytes`: contents that were read ahead and not read by now.
    pub fn since(&self, then: &Meter) -> Result<Value> {
        let grown = |part: &str| Ok::<u64, anyhow::Error>(self.of(part)? - then.of(part)?);
        let (waits, joins) = (grown("/remote/waits")?, grown("/remote/joins")?);
        let (fetched, used) = (grown("/cache/contents/fetched")?, grown("/cache/contents/used")?);
        Ok(json!({
            "waits_without_joins": waits - joins,
            "joins": joins,
            "link_flights": self.flights.zip(then.flights).map(|(now, then)| now - then),
            "received_mb": grown("/remote/bytes_received")? as f64 / 1e6,
            "fetched_bytes": fetched,
            "unread_bytes": fetched.saturating_sub(used),
            "wasted_bytes": grown("/cache/contents/wasted")?,
        }))
    }
}

/// A directory in memory, which does not exist before and is removed. As root the server watches the whole filesystem of the
/// export: what a process writes there would cost it events that another machine's disk does not.
struct Out(PathBuf);

impl Out {
    fn new() -> Out {
        Out(PathBuf::from(format!("/dev/shm/nigh-bench-{}", std::process::id())))
    }
}

impl Drop for Out {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a script in a directory of a mount; `OUT` names a directory that does not exist.
pub fn shell(world: &World, mount: &Mount<'_>, dir: &str, script: &str) -> Result<Duration> {
    let out = Out::new();
    let mut command = world.command("sh", As::Us);
    command.args(["-euc", &format!("{{ {script}; }} > /dev/null")]).env("OUT", &out.0);
    command.current_dir(mount.point.join(dir));
    let start = Instant::now();
    let ended = mount.run(command, LIMIT)?;
    ensure!(ended.ok(), "{}", ended.tail(5));
    Ok(start.elapsed())
}

/// Runs a script in a directory of a fresh mount. Returns the line with its costs.
pub fn measured(
    world: &World,
    distant: &Distant<'_>,
    dir: &str,
    (name, script): (&str, &str),
) -> Result<Value> {
    let mount = distant.mount(world)?;
    shell(world, &mount, dir, "true")?;
    let then = Meter::read(&mount, distant)?;
    let took = shell(world, &mount, dir, script)?;
    let line = json!({ "rtt": distant.rtt, "reader": name, "s": took.as_secs_f64() });
    let line = joined(line, &Meter::read(&mount, distant)?.since(&then)?);
    mount.unmount()?;
    Ok(line)
}

/// Puts the members of two objects into one.
pub fn joined(mut line: Value, costs: &Value) -> Value {
    if let (Some(line), Some(costs)) = (line.as_object_mut(), costs.as_object()) {
        line.extend(costs.clone());
    }
    line
}
