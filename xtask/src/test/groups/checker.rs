//! Several mounts of one directory at work on the same names, and a judge of all that they are told.

use std::time::{Duration, Instant};

use crate::checker;
use crate::report::Tally;
use crate::root;
use crate::test::sample;
use crate::test::world::World;

pub fn run(world: &World, tally: &mut Tally) {
    if !root::is_root() {
        // What is made belongs to a group that tells who made it, which only root may choose.
        return tally.not_run("checker", "needs root");
    }
    let start = Instant::now();
    let seed = sample::seed();
    let result = checker::check(world, Duration::from_secs(if world.short { 40 } else { 60 }), seed);
    tally.record("three mounts: some order explains what all were told", start.elapsed(), result);
}
