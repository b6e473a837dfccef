//! Walks of a tree over a link of 10 ms: how often a caller waits for replies that are not on their way.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::wire::{Counted, counted};
use crate::test::world::{As, World};

const LIMIT: Duration = Duration::from_secs(120);
const FILES: u32 = 2_000;
/// Directories at each level, with two small files in each.
const LEVELS: [u32; 3] = [4, 6, 8];

fn waits(counted: &Counted<'_>) -> Result<(u64, u64)> {
    let status = counted.mount.status()?;
    let of = |key: &str| status["remote"][key].as_u64().with_context(|| format!("no {key}"));
    let (waits, joins) = (of("waits")?, of("joins")?);
    Ok((waits - joins, waits))
}

/// Runs a script in a directory of the mount. Returns how many requests waited.
fn walk(world: &World, counted: &Counted<'_>, dir: &str, script: &str, most: u64) -> Result<()> {
    let (before, start) = (waits(counted)?, Instant::now());
    let mut command = world.command("sh", As::Us);
    command.args(["-euc", &format!("{{ {script}; }} > /dev/null")]).current_dir(counted.at(dir));
    let (messages, ended) = counted.cost(|| counted.mount.run(command, LIMIT))?;
    ensure!(ended.ok(), "{}", ended.tail(5));
    let after = waits(counted)?;
    let alone = after.0 - before.0;
    println!(
        "  {script}, {dir}: {alone} waits, {} with joins, {} ms, {messages:?}",
        after.1 - before.1,
        start.elapsed().as_millis()
    );
    ensure!(alone <= most, "{alone} waits, at most {most}");
    Ok(())
}

fn levels(dir: &Path, below: &[u32]) -> Result<()> {
    for file in ["one", "two"] {
        fs::write(dir.join(file), format!("{file}\n"))?;
    }
    let Some((count, below)) = below.split_first() else { return Ok(()) };
    (0..*count).try_for_each(|nth| {
        let dir = dir.join(format!("dir-{nth}"));
        fs::create_dir(&dir)?;
        levels(&dir, below)
    })
}

pub fn walks(world: &World) -> Result<()> {
    for (dir, script, most) in
        [("flat", "ls -lR", 60), ("deep", "ls -lR", 60), ("deep", "tar cf - . | wc -c", 100)]
    {
        // As the figures of other 9P clients. Under limits in time, a machine that is slow reads again what has ended.
        let counted = counted(world, "10ms", &["-o", "cache=loose"])?;
        let (flat, deep) = (counted.source.join("flat"), counted.source.join("deep"));
        fs::create_dir(&flat)?;
        (0..FILES).try_for_each(|nth| fs::write(flat.join(format!("file-{nth:04}")), b""))?;
        fs::create_dir(&deep)?;
        levels(&deep, &LEVELS)?;
        walk(world, &counted, dir, script, most)?;
        counted.mount.unmount()?;
    }
    Ok(())
}
