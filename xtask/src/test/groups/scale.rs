//! Many clients on one server: each gets one recall per lease, and the server waits for each.

use crate::report::TestReport;
use crate::scale;
use crate::test::world::World;

pub fn run(world: &World, tally: &mut TestReport) {
    tally
        .test("100 clients: each holder is recalled once, and no client waits for another's silence", || {
            scale::check(world)
        });
    let readers =
        "5 readers of 2,000 files: told of each change before its answer, nothing recalled or listed again";
    tally.test(readers, || scale::readers::check(world));
}
