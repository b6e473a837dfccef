//! The project's chores. `cargo xtask check` before a commit, `cargo xtask test` for everything that
//! a machine can show, `cargo xtask bench` and `cargo xtask matrix` by hand.

mod bench;
mod build9p;
mod check;
mod checker;
mod explore;
mod host;
mod link;
mod listing;
mod load;
mod matrix;
mod process;
mod race;
mod report;
mod root;
mod scale;
mod test;
mod tidy;
mod wait;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "xtask", about = "nigh's chores")]
struct Options {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Format, lints, tidy, licences, advisories, unit tests: what a commit must pass.
    Check(check::Options),
    /// Only the house rules that this program checks itself.
    Tidy {
        /// Print the structure of each crate instead: circles of imports, spread of types.
        #[arg(long)]
        report: bool,
    },
    /// Every group of tests that this machine can run.
    Test(test::Options),
    /// Removes what tests left behind: mounts, loop devices, their user, their directories.
    Clean,
    /// Times the workloads, cold and warm.
    Bench(bench::Options),
    /// The POSIX table in every combination of user, notification level, protocol and features.
    Matrix(matrix::Options),
    /// Seeded histories in virtual time.
    Sim(explore::Sim),
    /// The fuzz targets, from the kept seeds.
    Fuzz(explore::Fuzz),
    /// Many simulated clients on one server: memory, times and order.
    Crowd(scale::Options),
    /// One writer and many readers of one directory: that it is not listed again, and what a change takes.
    Readers(scale::readers::Options),
    /// How many lines of the pure crates their tests run.
    Coverage,
    /// Builds hostapd and wpa_supplicant on a mount of a 9P server: times, and messages on the wire.
    Build9p(build9p::Options),
    /// Relays a socket with a round trip time and a bandwidth, and counts what passes.
    LinkEmulator(link::Options),
    /// Runs one workload in a directory and prints its time.
    Workload(bench::workload::Options),
    /// Looks at one large directory and prints what that took.
    Directory(bench::directory::Options),
    /// Two threads on two paths to one directory; says whether each saw what the other had done.
    Race(race::Options),
    /// Changes a directory and waits until another path to it shows that.
    Host(host::Options),
    /// Works in a directory whose server dies, or whose link does, and says whether all came as it must.
    Load(load::Options),
    /// Several mounts of one directory at work, and a check that their results are linearizable.
    Checker(checker::Options),
    /// The same for hours, while links, clients and the server fail.
    Soak(checker::soak::Options),
    /// One process that works for the checker.
    CheckerWorker(checker::worker::Options),
    /// Mounts the null daemon: a filesystem that answers from memory and keeps nothing.
    NullDaemon(bench::null::Options),
}

impl Chore {
    /// Whether it prints figures, which a build with assertions would falsify.
    fn measures(&self) -> bool {
        matches!(
            self,
            Chore::Bench(_)
                | Chore::Crowd(_)
                | Chore::Readers(_)
                | Chore::Build9p(_)
                | Chore::Checker(_)
                | Chore::Soak(_)
        )
    }
}

fn main() -> ExitCode {
    let chore = Options::parse().chore;
    if chore.measures()
        && let Err(e) = test::build::measure_in_release()
    {
        eprintln!("xtask: {e:#}");
        return ExitCode::FAILURE;
    }
    let result = match chore {
        Chore::Check(options) => check::run(&options),
        Chore::Tidy { report } => tidy::run(report),
        Chore::Test(options) => test::run(&options),
        Chore::Clean => test::clean::run(),
        Chore::Bench(options) => bench::run(&options),
        Chore::Matrix(options) => matrix::run(&options),
        Chore::Sim(options) => explore::sim(&options),
        Chore::Fuzz(options) => explore::fuzz(&options),
        Chore::Crowd(options) => scale::run(&options),
        Chore::Readers(options) => scale::readers::run(&options),
        Chore::Coverage => explore::coverage(),
        Chore::Build9p(options) => build9p::run(&options),
        Chore::LinkEmulator(options) => link::run(&options),
        Chore::Workload(options) => bench::workload::run(&options),
        Chore::Directory(options) => bench::directory::run(&options),
        Chore::Race(options) => race::run(&options),
        Chore::Host(options) => host::run(&options),
        Chore::Load(options) => load::run(&options),
        Chore::Checker(options) => checker::run(&options),
        Chore::Soak(options) => checker::soak::run(&options),
        Chore::CheckerWorker(options) => checker::worker::run(&options),
        Chore::NullDaemon(options) => bench::null::run(&options),
    };
    test::ending::leave_to_signal();
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::FAILURE
        }
    }
}
