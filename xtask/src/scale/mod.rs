//! `cargo xtask crowd`: many simulated clients on one server. The sessions are real, and one thread of this process
//! carries their bytes over an emulated link; the server is a process of its own.

mod caching_client;
mod changes;
mod event_loop;
mod figures;
mod measure;
mod push_benchmark;
pub mod readers;
mod server;
mod sim_client;
mod stage;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::test::world::{As, Length, World};
use stage::Stage;

#[derive(clap::Args)]
pub struct Options {
    /// Number of clients.
    #[arg(long, default_value_t = 1000)]
    clients: usize,
    /// Directories on which each client holds leases.
    #[arg(long, default_value_t = 200)]
    directories: usize,
    /// Timed changes, each of a directory of its own.
    #[arg(long, default_value_t = 250)]
    changes: usize,
    /// Clients with a lease on each of those directories.
    #[arg(long, default_value_t = 100)]
    holders: usize,
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
        Options { clients: 100, directories: 20, changes: 20, holders: 50, rtt_ms: 10, nigh: None }
    }
}

pub fn run(options: &Options) -> Result<bool> {
    let world = World::new(options.nigh.as_deref(), Length::Short)?;
    measure(&world, options)?;
    Ok(true)
}

/// With 100 clients: checks counts and order, and that no session is lost.
pub fn check(world: &World) -> Result<()> {
    measure(world, &Options::short())
}

fn measure(world: &World, options: &Options) -> Result<()> {
    let Options { clients, directories, changes, holders, rtt_ms, .. } = *options;
    ensure!((1..=clients).contains(&holders), "--holders must be from 1 to --clients");
    ensure!(clients > 3, "a crowd has more than 3 clients");
    let begun = Instant::now();
    raise_descriptor_limit(clients)?;
    let dir = world.dir("crowd", As::Us)?;
    let result = on_stage(&world.nigh(), &dir, options);
    std::fs::remove_dir_all(&dir)?;
    result?;
    println!(
        "{clients} clients, {directories} directories, {changes} changes that {holders} hold, {rtt_ms} ms: {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}

fn on_stage(nigh: &Path, dir: &Path, options: &Options) -> Result<()> {
    let names =
        |sort: &str, count: usize| -> Vec<String> { (0..count).map(|n| format!("{sort}-{n}")).collect() };
    let rtt = Duration::from_millis(options.rtt_ms);
    let (held, few) = (names("held", options.directories), names("few", options.changes));
    let (wide, own) = (names("wide", 10), names("own", 100.min(options.clients - 3)));
    let (two, free) = (names("two", 2), names("free", options.changes));
    let all = [&held, &few, &wide, &own, &two, &free];
    let mut stage = Stage::new(nigh, dir, all.into_iter().flatten().cloned(), 0)?;
    measure::idle(&mut stage, options.clients)?;
    measure::grants(&mut stage, &held)?;
    measure::renewals(&mut stage, Duration::from_secs(if options.clients > 100 { 15 } else { 6 }))?;
    measure::recalls(&mut stage, &free, 0, rtt)?;
    measure::recalls(&mut stage, &few, options.holders, rtt)?;
    measure::recalls(&mut stage, &wide, options.clients, rtt)?;
    stage.check_all_stand()?;
    measure::silent(&mut stage, &own, (&two[0], &two[1]), rtt)
}

/// Each client has a socket.
fn raise_descriptor_limit(clients: usize) -> Result<()> {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)?;
    let most = limit.maximum.unwrap_or(u64::MAX);
    ensure!(
        most > clients as u64 + 100,
        "{most} descriptors are not enough for {clients} clients: see `ulimit -Hn`"
    );
    Ok(())
}
