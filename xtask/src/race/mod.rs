//! Races between two paths to one directory, such as two mounts of one tree. Each side is a thread with its own path;
//! a change that a side has made and announced must be visible on the other at once (S1).
//!
//! Runs in a process of its own, which the caller may give up. It fails with the wrong result; otherwise it prints one
//! line of JSON: `operations` (calls of both sides), `longest_ms` and `longest_call`.

mod appends;
mod data;
pub(crate) mod maps;
mod names;
mod scans;
mod sizes;
pub(crate) mod stage;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;

use stage::CallTimes;

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Race {
    /// Both create, rename and unlink names of their own in one directory.
    Names,
    /// As `names`, both always in one of many directories.
    NamesSpread,
    /// One creates and unlinks, the other scans.
    Listing,
    /// A process has read a part of a directory when it is changed, on one side and then on the other, and another
    /// process begins to read.
    Halves,
    /// One changes a large directory while the other scans it once.
    Scans,
    /// Both write records of one file in place.
    Records,
    /// Both append records to one file.
    Appends,
    /// As `appends`, while others read the file on both sides: data never changes after a read.
    AppendsSeen,
    /// One writes and announces it, the other reads.
    Told,
    /// As `told`, in many files; each is cached when it is written.
    ToldSpread,
    /// One writes another length and announces it, and changes the mode while the other reads.
    Sizes,
    /// One extends a file and announces it; the other extends it further, while a third reads there.
    Grows,
    /// One saves as editors do (writes a temporary file, fsync, rename over) and announces it, the other reads.
    Saves,
    /// One stores into a map and syncs, the other writes, in different pages.
    Mapped,
    /// As `mapped`, within one page.
    MappedPage,
    /// Both store into a map and sync, in different pages.
    Stored,
    /// As `stored`, within one page.
    StoredPage,
}

#[derive(clap::Args)]
pub struct Options {
    #[arg(value_enum)]
    race: Race,
    /// An empty directory.
    #[arg(long)]
    first: PathBuf,
    /// Another path to it.
    #[arg(long)]
    second: PathBuf,
    /// Changes of each side that makes any.
    #[arg(long, default_value_t = 1000)]
    count: u64,
    /// How often to scan.
    #[arg(long, default_value_t = 1)]
    scans: u64,
}

pub fn run(options: &Options) -> Result<bool> {
    let (first, second, count) = (options.first.as_path(), options.second.as_path(), options.count);
    let meter: CallTimes = match options.race {
        Race::Names => names::names(first, second, count, u64::MAX),
        Race::NamesSpread => names::names(first, second, count, 3),
        Race::Listing => names::listing(first, second, count),
        Race::Halves => {
            let mut meter = names::halves(first, first, count)?;
            meter.add(&names::halves(second, first, count)?);
            Ok(meter)
        }
        Race::Scans => scans::scans(first, second, count, options.scans),
        Race::Records => data::records(first, second, count),
        Race::Appends => data::appends(first, second, count),
        Race::AppendsSeen => appends::seen(first, second, count),
        Race::Told => data::both_ways(first, second, count, data::told),
        Race::ToldSpread => data::both_ways(first, second, count, data::told_spread),
        Race::Sizes => data::both_ways(first, second, count, sizes::sizes),
        Race::Grows => data::both_ways(first, second, count, sizes::grows),
        Race::Saves => data::both_ways(first, second, count, data::saves),
        Race::Mapped => maps::stored(first, second, count, 4096),
        Race::MappedPage => maps::stored(first, second, count, 8),
        Race::Stored => maps::both_stored(first, second, count, 4096),
        Race::StoredPage => maps::both_stored(first, second, count, 8),
    }?;
    println!(
        "{}",
        serde_json::json!({
            "operations": meter.operations,
            "longest_ms": meter.longest.as_secs_f64() * 1000.0,
            "longest_call": meter.longest_call,
        })
    );
    Ok(true)
}
