//! Several mounts of one directory at work on the same names, and a judge of all that they are told.

use std::time::{Duration, Instant};

use crate::checker;
use crate::root;
use crate::tally::Tally;
use crate::test::world::World;

pub fn run(world: &World, tally: &mut Tally) {
    if !root::is_root() {
        // What is made belongs to a group that tells who made it, which only root may choose.
        return tally.not_run("checker", "needs root");
    }
    let start = Instant::now();
    let seed = start_seed();
    let result = checker::check(world, Duration::from_secs(60), seed);
    tally.record("three mounts: some order explains what all were told", start.elapsed(), result);
}

/// Another one each time, which is said and can be given to `cargo xtask checker`; `NIGH_SEED` chooses it.
fn start_seed() -> u64 {
    let chosen = std::env::var("NIGH_SEED").ok().and_then(|seed| seed.parse().ok());
    chosen.unwrap_or_else(|| crate::load::moment() / 1_000_000_000 % 1_000_000)
}
