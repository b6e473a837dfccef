//! Many clients on one server: each gets one recall per lease, and the server waits for each.

use std::time::Instant;

use crate::report::Tally;
use crate::scale;
use crate::test::world::World;

pub fn run(world: &World, tally: &mut Tally) {
    let start = Instant::now();
    let result = scale::check(world);
    tally.record(
        "100 clients: who holds is asked once, and nobody waits for another's silence",
        start.elapsed(),
        result,
    );
    let start = Instant::now();
    let result = scale::readers::check(world);
    tally.record(
        "5 readers of 2,000 files: told of each change before its answer, nothing recalled or listed again",
        start.elapsed(),
        result,
    );
}
