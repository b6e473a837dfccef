//! The groups of `cargo xtask test`.

mod badinput;
mod beside;
mod checker;
mod cold;
mod demo;
mod events;
mod exercisers;
mod faults;
mod filesystems;
pub mod host;
mod huge;
mod levels;
mod links;
mod narrow;
mod ninep;
mod posix;
mod reexport;
mod restart;
mod scale;
mod scripts;
mod signals;
mod tools;
mod two;
pub mod unit;

use std::time::Instant;

use super::over::LinkKind;
use super::world::{Length, World};
use crate::report::TestReport;

/// A group: its name, what it is for people, about how long it takes on two cores.
pub struct Group {
    pub name: &'static str,
    pub what: &'static str,
    pub time: &'static str,
    pub run: Run,
    /// Whether an ordinary user can run it, or root runs it as one.
    pub by_user: bool,
}

/// What a group stands on.
pub enum Run {
    /// Only on the checkout.
    Plain(fn(Length, &mut TestReport)),
    /// On mounts.
    Mounted(fn(&World, &mut TestReport)),
}

impl Run {
    pub fn plain(&self, length: Length, tally: &mut TestReport) {
        if let Run::Plain(run) = self {
            run(length, tally);
        }
    }

    pub fn mounted(&self, world: &World, over: LinkKind, tally: &mut TestReport) {
        if let Run::Mounted(run) = self {
            world.over(over, || run(world, tally));
        }
    }
}

/// A named test on mounts.
pub type Test = (&'static str, fn(&World) -> anyhow::Result<()>);

/// Runs tests at once that wait for a timer or a lease most of the time. Each of them names directories of its own, and
/// none stops the server.
pub fn at_once(world: &World, tally: &mut TestReport, tests: &[Test]) {
    let timed = |test: fn(&World) -> anyhow::Result<()>| {
        let start = Instant::now();
        (test(world), start.elapsed())
    };
    std::thread::scope(|scope| {
        let running: Vec<_> =
            tests.iter().map(|(name, test)| (name, scope.spawn(move || timed(*test)))).collect();
        for (name, thread) in running {
            match thread.join() {
                Ok((result, took)) => tally.record(name, took, result),
                Err(_) => tally.fail(name, "it panicked"),
            }
        }
    });
}

#[must_use]
pub fn all() -> &'static [Group] {
    const ALL: &[Group] = &[
        // Beside `lints` and `unit`, which use both cores, first run the groups that wait for links and timers most of the time.
        group("lints", "format, tidy, lints of pure crates", "1 min", Run::Plain(lints), true),
        group("unit", "tests of every crate", "4 min", Run::Plain(unit::run), true),
        group(
            "restart",
            "the server is killed under a mount, or away; cut links",
            "6 min",
            Run::Mounted(restart::run),
            true,
        ),
        group("signals", "alarms and fatal signals while waiting", "1 min", Run::Mounted(signals::run), true),
        group(
            "checker",
            "several mounts on the same names, and a judge",
            "2 min",
            Run::Mounted(checker::run),
            false,
        ),
        group("two", "several mounts of one tree", "4 min", Run::Mounted(two::run), true),
        group("events", "inotify for what another mount changes", "1 min", Run::Mounted(events::run), true),
        // Uses other servers, while this user's server waits for clients that `events` has killed.
        group("ninep", "servers of others that speak 9P2000.L", "3 min", Run::Mounted(ninep::run), false),
        group(
            "faults",
            "faults found elsewhere, each with the right value",
            "1 min",
            Run::Mounted(faults::run),
            true,
        ),
        group("crowd", "a hundred clients on one server", "1 min", Run::Mounted(scale::run), true),
        group("links", "the same over unix://, nigh:// and ssh", "3 min", Run::Mounted(links::run), true),
        group("badinput", "mistakes are said in one line", "1 min", Run::Mounted(badinput::run), true),
        group("demo", "nigh demo", "1 min", Run::Mounted(demo::run), true),
        group("reexport", "smbd and ganesha export a mount", "1 min", Run::Mounted(reexport::run), false),
        group("narrow", "a 32-bit program lists and seeks", "3 min", Run::Mounted(narrow::run), true),
        group("posix", "the POSIX table as root", "2 min", Run::Mounted(posix::as_root), false),
        group("posix-user", "the same as an ordinary user", "2 min", Run::Mounted(posix::as_user), true),
        group(
            "levels",
            "every notification level, and protocol 7.31",
            "4 min",
            Run::Mounted(levels::run),
            true,
        ),
        group("tools", "pjdfstest, fsx, git, cargo, make, sqlite", "8 min", Run::Mounted(tools::run), false),
        group(
            "filesystems",
            "ext4, xfs, btrfs, tmpfs, overlayfs, nested",
            "4 min",
            Run::Mounted(filesystems::run),
            false,
        ),
        group("cold", "trees that are in no cache, at 10 ms", "1 min", Run::Mounted(cold::run), true),
        group("host", "changes on the server's own disk", "2 min", Run::Mounted(host::run), true),
        group("huge", "more names than memory", "1 min", Run::Mounted(huge::run), false),
    ];
    ALL
}

/// What `cargo xtask check` says that needs no build of the whole workspace.
fn lints(_: Length, tally: &mut TestReport) {
    crate::check::house_rules(tally);
}

const fn group(name: &'static str, what: &'static str, time: &'static str, run: Run, by_user: bool) -> Group {
    Group { name, what, time, run, by_user }
}
