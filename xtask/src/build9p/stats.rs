//! 10,000 stats of one missing name, as the published shell loop: with the timeout at 0 and at 10 s.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::ended;
use crate::link::client::Emulator;
use crate::test::mount::{Mount, MountParams};
use crate::test::over::{self, LinkKind, free_port};
use crate::test::world::{As, World};

pub fn run(world: &World, rtt: &str) -> Result<()> {
    let local = world.dir("local", As::Us)?;
    println!("10,000 stats of one missing name, a process each, at {rtt}");
    println!("| | time | T-messages | Twalk |\n| --- | --- | --- | --- |");
    let time = stats(world, None, &local)?;
    println!("| local disk | {:.2} s | | |", time.as_secs_f64());
    for (name, option) in [("0", "--negative-timeout=off"), ("10 s", "--negative-timeout=10s")] {
        let ports = [free_port()?, over::diod(world)?];
        let wire = Emulator::of_ninep(&world.xtask(), &world.root, ports, rtt)?;
        let (source, point) = (world.dir("nine", As::Us)?, world.dir("mnt", As::Us)?);
        let mut how = MountParams::new(As::Us).with(option);
        how.over = Some((LinkKind::Ninep, Some(ports[0])));
        let mount = Mount::new(world, &source, &point, &how)?;
        let before = wire.messages()?;
        let time = stats(world, Some(&mount), &point)?;
        let after = wire.messages()?;
        let sum = |messages: &std::collections::BTreeMap<String, u64>| messages.values().sum::<u64>();
        let walks = after.get("Twalk").unwrap_or(&0) - before.get("Twalk").unwrap_or(&0);
        println!(
            "| timeout {name} | {:.2} s | {} | {walks} |",
            time.as_secs_f64(),
            sum(&after) - sum(&before)
        );
        mount.unmount()?;
    }
    Ok(())
}

fn stats(world: &World, mount: Option<&Mount<'_>>, dir: &std::path::Path) -> Result<Duration> {
    let mut command = Command::new("sh");
    command.args(["-c", "i=0; while [ $i -lt 10000 ]; do stat none >/dev/null 2>&1; i=$((i+1)); done"]);
    command.current_dir(dir).stdin(Stdio::null());
    let begun = Instant::now();
    let limit = Duration::from_secs(600);
    let done = match mount {
        Some(mount) => mount.run(command, limit)?,
        None => world.run(command, limit)?,
    };
    ended(&done, "the loop")?;
    Ok(begun.elapsed())
}
