//! 9P2000.L: foreign servers, behind nigh's cache.

mod bad;
mod beside;
mod conformance;
mod posix;
mod raw;
mod restart;
mod server;
mod walks;
mod wire;

use crate::report::TestReport;
use crate::test::world::World;

pub fn run(world: &World, tally: &mut TestReport) {
    let tests: &[super::Test] = &[
        ("diod conforms as any remote", conformance::diod),
        ("a missing name is asked once within its time", wire::missing_names),
        ("with no time each look is one message", wire::no_time),
        ("what is made over a missing name is there at once", wire::made_over_missing),
        ("a symlink is read once", wire::symlinks),
        ("50,000 names are read in as few messages as can be", wire::large_directory),
        ("walks of trees wait seldom at 10 ms", walks::walks),
        ("a deep path is walked 16 names at a time", wire::deep_paths),
        ("pjdfstest", posix::pjdfstest),
        ("a server that lies once is left, and another session begun", bad::in_the_midst),
        ("diod killed and started again", restart::killed),
    ];
    for (name, test) in tests {
        tally.test(name, || test(world));
    }
    super::at_once(
        world,
        tally,
        &[
            ("unpfs conforms as any remote", conformance::unpfs),
            ("others' changes on disk are seen in time", beside::on_disk),
            ("others' changes by a second mount are seen in time", beside::second_mount),
            ("servers of another kind are refused in one line", bad::at_mount),
        ],
    );
}
