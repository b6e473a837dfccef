//! The tables of cases. Each subject has a file; its cases' names begin with the subject.

mod attributes;
mod create;
mod data;
mod links;
pub(crate) mod listing;
mod locks;
mod maps;
mod names;
mod paths;
mod permissions;
mod readonly;
mod rename;
mod rights;
mod shared;
mod signals;
mod space;
mod special;
mod two;
mod xattrs;

use clap::ValueEnum;

use crate::room::Room;

/// One case: it passes, fails, or reports that it does not apply ([`crate::room::Skip`]).
#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    pub run: fn(&Room) -> anyhow::Result<()>,
}

/// Which cases.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Table {
    /// What an application does with files of its own.
    Everyday,
    /// What it sees of changes made by others.
    Shared,
    /// What several mounts of one tree see of each other, at once.
    Two,
    /// A build's calls while signals arrive.
    Signals,
    /// What a mount with `-o ro` refuses; `--dir` is writable by the other way, `--beside`.
    ReadOnly,
}

impl Table {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Table::Everyday => "everyday",
            Table::Shared => "shared",
            Table::Two => "two",
            Table::Signals => "signals",
            Table::ReadOnly => "read-only",
        }
    }
}

#[must_use]
pub fn table(which: Table) -> Vec<Case> {
    let parts: &[&[Case]] = match which {
        Table::Shared => &[shared::CASES],
        Table::Two => &[two::names::CASES, two::attributes::CASES, two::data::CASES, two::open::CASES],
        Table::Signals => &[signals::CASES],
        Table::ReadOnly => &[readonly::CASES],
        Table::Everyday => &[
            create::CASES,
            data::CASES,
            maps::CASES,
            space::CASES,
            rename::CASES,
            links::CASES,
            attributes::CASES,
            permissions::CASES,
            rights::CASES,
            xattrs::CASES,
            names::CASES,
            paths::CASES,
            listing::CASES,
            locks::CASES,
            special::CASES,
        ],
    };
    parts.concat()
}

/// Cases named after their functions.
macro_rules! cases {
    ($($subject:ident :: $($name:ident),+ $(,)?);+ $(;)?) => {
        pub const CASES: &[$crate::cases::Case] = &[$($(
            $crate::cases::Case { name: concat!(stringify!($subject), "_", stringify!($name)), run: $name },
        )+)+];
    };
}
pub(crate) use cases;
