//! Several mounts of one directory at work on the same names, and a judge of all that they are told.

use std::time::Duration;

use crate::checker::{self, Fault};
use crate::report::TestReport;
use crate::root;
use crate::test::sample;
use crate::test::world::World;

pub fn run(world: &World, tally: &mut TestReport) {
    if !root::is_root() {
        // What is made belongs to a group that tells who made it, which only root may choose.
        return tally.not_run("checker", "needs root");
    }
    let seed = sample::seed();
    let (cuts, kills) = if world.short { (30, 15) } else { (60, 40) };
    let tests = [
        ("three mounts: some order explains what all were told", cuts, Fault::CutLink),
        ("three mounts, and a server that is killed again and again", kills, Fault::KilledServer),
    ];
    for (name, seconds, fault) in tests {
        tally.test(name, || checker::check(world, Duration::from_secs(seconds), seed, fault));
    }
}
