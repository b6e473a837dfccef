//! The groups of `cargo xtask test`.

mod badinput;
mod beside;
mod demo;
mod exercisers;
mod filesystems;
mod levels;
mod posix;
mod scripts;
mod signals;
mod tools;
pub mod unit;

use super::world::World;
use crate::tally::Tally;

/// A group: its name, what it is for people, about how long it takes on two cores.
pub struct Group {
    pub name: &'static str,
    pub what: &'static str,
    pub time: &'static str,
    pub run: Run,
}

/// What a group stands on.
pub enum Run {
    /// Only on the checkout.
    Plain(fn(&mut Tally)),
    /// On mounts.
    Mounted(fn(&World, &mut Tally)),
}

/// A named test on mounts.
pub type Test = (&'static str, fn(&World) -> anyhow::Result<()>);

#[must_use]
pub fn all() -> &'static [Group] {
    &[
        Group { name: "unit", what: "tests of every crate", time: "3 min", run: Run::Plain(unit::run) },
        Group {
            name: "posix",
            what: "the POSIX table as root",
            time: "1 min",
            run: Run::Mounted(posix::as_root),
        },
        Group {
            name: "posix-user",
            what: "the same as an ordinary user",
            time: "1 min",
            run: Run::Mounted(posix::as_user),
        },
        Group {
            name: "levels",
            what: "every notification level, and protocol 7.31",
            time: "4 min",
            run: Run::Mounted(levels::run),
        },
        Group {
            name: "tools",
            what: "pjdfstest, fsx, git, cargo, make, sqlite",
            time: "12 min",
            run: Run::Mounted(tools::run),
        },
        Group {
            name: "filesystems",
            what: "ext4, xfs, btrfs, tmpfs, overlayfs, nested mounts",
            time: "4 min",
            run: Run::Mounted(filesystems::run),
        },
        Group {
            name: "signals",
            what: "alarms and fatal signals while waiting",
            time: "1 min",
            run: Run::Mounted(signals::run),
        },
        Group {
            name: "badinput",
            what: "mistakes of a user are said in one line",
            time: "1 min",
            run: Run::Mounted(badinput::run),
        },
        Group { name: "demo", what: "nigh demo", time: "1 min", run: Run::Mounted(demo::run) },
    ]
}
