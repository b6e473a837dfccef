//! `nigh-posix --dir PATH`: one table of cases for everyday files, each a function on a directory of
//! its own. The same table runs on a plain local directory as a control and on a mount.
//!
//! Every case runs in a process of its own, so that it may change directory, user and umask, and
//! may be given up after a limit. Output is a line per case (`ok NAME`, `skip NAME: why`,
//! `FAILED NAME: why`) and a closing line `N passed, N failed, N skipped`; exit 1 if one failed.

mod acls;
mod cases;
mod room;
mod runner;
mod sys;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// What to run, and where.
#[derive(Parser, Debug)]
#[command(name = "nigh-posix", about = "POSIX cases for everyday files, run in a directory.")]
pub struct Options {
    /// Directory to work in; each case makes, and removes, a directory of its own there.
    #[arg(long, required_unless_present = "list")]
    dir: Option<PathBuf>,
    /// Run the cases whose name contains this; several, divided by commas.
    #[arg(long, default_value = "")]
    filter: String,
    /// Which table.
    #[arg(long, value_enum, default_value_t = cases::Table::Everyday)]
    table: cases::Table,
    /// For `shared` and `two`: another path to the same directory. With `shared` others change it there; with
    /// `two` it is looked at there.
    #[arg(long, required_if_eq_any([("table", "shared"), ("table", "two")]))]
    beside: Option<PathBuf>,
    /// For `two`: more paths to the same directory, divided by commas, where cases only look.
    #[arg(long, value_delimiter = ',')]
    others: Vec<PathBuf>,
    /// For `shared`: within how many milliseconds a change must be seen.
    #[arg(long, default_value_t = 0)]
    within_ms: u64,
    /// How many entries the largest directory gets.
    #[arg(long, default_value_t = 10_000)]
    entries: u32,
    /// How many cases run at a time.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Seconds a case may take.
    #[arg(long, default_value_t = 60)]
    limit_s: u64,
    /// Only print the names.
    #[arg(long)]
    list: bool,
    /// Run one case in this process.
    #[arg(long, hide = true)]
    case: Option<String>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let table = cases::table(options.table);
    if options.list {
        for case in &table {
            println!("{}", case.name);
        }
        return ExitCode::SUCCESS;
    }
    let Some(dir) = options.dir.clone() else { return ExitCode::from(2) };
    match &options.case {
        Some(name) => runner::run_here(&table, name, &dir, &options),
        None => runner::run_each(&table, &dir, &options),
    }
}
