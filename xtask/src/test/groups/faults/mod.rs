//! Faults known from reports on other filesystems, from other suites and from hostile peers, each with the right
//! result: that of the local disk, or that of a careful server. One file per area.

mod attributes;
mod capitals;
mod credentials;
mod handles;
mod mounting;
mod output;
mod overlays;
mod rights;
mod space;
mod stuck;
mod unwatched;

use crate::report::TestReport;
use crate::test::world::World;

pub fn run(world: &World, tally: &mut TestReport) {
    let areas: &[&[super::Test]] = &[
        attributes::TESTS,
        capitals::TESTS,
        credentials::TESTS,
        handles::TESTS,
        mounting::TESTS,
        output::TESTS,
        overlays::TESTS,
        rights::TESTS,
        space::TESTS,
        stuck::TESTS,
        unwatched::TESTS,
    ];
    for (name, test) in areas.iter().copied().flatten() {
        tally.test(name, || test(world));
    }
    super::at_once(world, tally, stuck::WAITING);
}
