//! `cargo xtask readers`: one writer changes a directory that many readers have cached completely. The server pushes
//! each change to the readers, which never list the directory again (docs/decisions/0014-pushes.md).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::caching_client::ReadCounts;
use super::changes::KINDS;
use super::push_benchmark::{PushBenchmark, Run};
use crate::test::world::{As, Length, World};

#[derive(clap::Args)]
pub struct Options {
    /// Number of readers.
    #[arg(long, default_value_t = 20)]
    readers: usize,
    /// Files in the directory.
    #[arg(long, default_value_t = 100_000)]
    entries: u64,
    /// Files in a small directory, for comparison.
    #[arg(long, default_value_t = 1_000)]
    small: u64,
    /// Changes at that pace, and as many each as soon as the one before has its reply.
    #[arg(long, default_value_t = 10_000)]
    changes: u64,
    /// Changes a second.
    #[arg(long, default_value_t = 50)]
    pace: u32,
    /// Round trip time of the emulated link, in ms.
    #[arg(long, default_value_t = 10)]
    rtt_ms: u64,
    /// Measure this binary instead of building one.
    #[arg(long, value_name = "PATH")]
    nigh: Option<PathBuf>,
}

impl Options {
    /// The short form, with the checks of the long one.
    fn short() -> Options {
        let (readers, entries, small, changes, pace, rtt_ms) = (5, 2_000, 0, 100, 50, 10);
        Options { readers, entries, small, changes, pace, rtt_ms, nigh: None }
    }
}

pub fn run(options: &Options) -> Result<bool> {
    let world = World::new(options.nigh.as_deref(), Length::Short)?;
    measure(&world, options)?;
    Ok(true)
}

/// With 5 readers of 2,000 files: checks counts and order.
pub fn check(world: &World) -> Result<()> {
    measure(world, &Options::short())
}

fn measure(world: &World, options: &Options) -> Result<()> {
    let begun = Instant::now();
    let mut large_and_small = Vec::new();
    for (entries, changes) in
        [(options.entries, options.changes), (options.small, options.changes.div_ceil(5))]
    {
        if entries > 0 {
            let dir = world.dir("readers", As::Us)?;
            let result = on_stage(&world.nigh(), &dir, &Options { entries, changes, nigh: None, ..*options });
            fs::remove_dir_all(&dir)?;
            large_and_small.push(result?);
        }
    }
    if let [large, small] = &large_and_small[..] {
        let share = |of: fn(&Run) -> Duration| of(large).as_secs_f64() / of(small).as_secs_f64();
        println!(
            "{} files to {} files, unpaced: p50 {:.2}, p99 {:.2}, server's processor {:.2} times as much",
            options.entries,
            options.small,
            share(|run| run.times.permille(500)),
            share(|run| run.times.permille(990)),
            share(|run| run.cpu_each)
        );
    }
    println!("{} readers, {} ms: {:.0} s", options.readers, options.rtt_ms, begun.elapsed().as_secs_f64());
    Ok(())
}

/// Runs everything with one directory; returns the figures of the unpaced run with readers.
fn on_stage(nigh: &Path, dir: &Path, options: &Options) -> Result<Run> {
    let rtt = Duration::from_millis(options.rtt_ms);
    let mut show = PushBenchmark::new(nigh, dir, options.entries, rtt)?;
    let pace = Some(Duration::from_secs(1) / options.pace);
    let few = options.changes.div_ceil(5);
    let files = options.entries;
    println!("{files} files; one who writes, alone:");
    show.run(few, pace)?.print(rtt);
    show.run(few, None)?.print(rtt);
    show.readers_list(options.readers)?;
    let before = show.totals()?;
    println!("{files} files; beside {} readers:", options.readers);
    show.run(options.changes, pace)?.print(rtt);
    let unpaced = show.run(options.changes, None)?;
    unpaced.print(rtt);
    println!("{files} files; the same while their kernels take 1 ms to forget:");
    show.forget_in(Duration::from_millis(1))?;
    show.run(few, pace)?.print(rtt);
    show.check_counts(&before)?;
    Ok(unpaced)
}

impl Run {
    fn print(&self, rtt: Duration) {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let pace = match self.pace {
            Some(every) => format!("{:.0} a second", 1.0 / every.as_secs_f64()),
            None => format!("unpaced ({:.0} a second)", self.times.count() as f64 / self.took.as_secs_f64()),
        };
        println!("  {pace}: {}", self.times);
        println!(
            "    beyond two round trips at p99 {:.1} ms; {:.2} ms of the server's processor each",
            ms(self.times.permille(990).saturating_sub(rtt * 2)),
            ms(self.cpu_each)
        );
        let kinds = KINDS.iter().zip(&self.by_kind);
        let kinds: Vec<String> = kinds
            .map(|(kind, times)| {
                format!("{kind} {:.1}/{:.1}", ms(times.permille(500)), ms(times.permille(990)))
            })
            .collect();
        println!("    p50/p99 in ms: {}", kinds.join(", "));
        let ReadCounts { kernel, memory, server } = self.looks;
        if memory + server > 0 {
            println!(
                "    looks after it: {memory} from memory, {kernel} by the kernel, {server} asked the server; {} \
                 bytes to each reader for each",
                self.bytes_each
            );
        }
    }
}
