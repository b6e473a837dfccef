//! Activates each injected fault, and looks for a seeded history and an interleaving of a few calls that detects it:
//! `cargo xtask sim --planted`. With an argument: only the faults with this name.
//!
//! A fault is detected when a history reports wrong data. A failed assertion of the faulty code is reported, but does
//! not count.

use nigh_sim::orders::{Bounds, explore};
use nigh_sim::{native, random};
use nigh_types::{Bug, plant};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

/// After so many histories a fault counts as undetected.
const MOST: u64 = 10_000;

/// Faults, and the histories that must detect them.
const HUNTS: &[(&[Bug], World)] = &[
    (&[Bug::KeepsUngranted], World::Fake),
    (&[Bug::OutlivesGrant], World::Fake),
    (&[Bug::AcknowledgesFirst], World::Fake),
    (&[Bug::ForgetsRecalls], World::Fake),
    (&[Bug::OutlivesGrant], World::Native),
    (&[Bug::AcknowledgesFirst], World::Native),
    (&[Bug::ForgetsRecalls, Bug::CarriesWhatEnded], World::Native),
    (&[Bug::WaitsForItself], World::Calm),
    (&[Bug::KeepsContents], World::Native),
    (&[Bug::FencesEarly], World::Native),
    (&[Bug::TakesAnyName], World::Native),
];

/// Faults that an interleaving of a few calls must detect.
const ORDERS: &[(&[Bug], Bounds)] = &[
    (&[Bug::KeepsUngranted], Bounds::calm([1, 1])),
    (&[Bug::AcknowledgesFirst], Bounds::calm([1, 1])),
    (&[Bug::ForgetsRecalls, Bug::CarriesWhatEnded], Bounds { warm: false, ..Bounds::calm([1, 1]) }),
    (&[Bug::FencesEarly], Bounds { late: 2, slow_kernels: false, ..Bounds::calm([1, 0]) }),
];

#[derive(Clone, Copy, Debug)]
enum World {
    Fake,
    Native,
    /// The native world without link faults.
    Calm,
}

impl World {
    fn run(self, seed: u64) -> Result<(), String> {
        match self {
            World::Fake => {
                let clients = 1 + u32::try_from(seed % 3).unwrap_or(0);
                random::run(random::Plan { seed, clients, steps: 300, pushes: seed % 2 == 1 })
            }
            World::Native => native::run(native::Plan::of(seed)).map(drop),
            World::Calm => native::run(native::Plan::calm(seed)).map(drop),
        }
    }
}

fn main() -> ExitCode {
    let mut missed = false;
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let only = std::env::args().nth(1).map(|name| Bug::of_name(&name).ok_or(name));
    if let Some(Err(unknown)) = only {
        eprintln!("no fault {unknown}");
        return ExitCode::FAILURE;
    }
    let only = only.and_then(Result::ok);
    let is_wanted = |bugs: &[Bug]| only.is_none_or(|only| bugs.contains(&only));
    for (bugs, world) in HUNTS.iter().filter(|(bugs, _)| is_wanted(bugs)) {
        if !plant(bugs) {
            eprintln!("this build can have no bugs planted: cargo xtask sim --planted");
            return ExitCode::FAILURE;
        }
        let begun = Instant::now();
        let what = match hunt(bugs, *world) {
            Some(found) => found,
            None => {
                missed = true;
                format!("MISSED in {MOST} histories")
            }
        };
        println!("bug {} {world:?}: {what} ({:.1} s)", names(bugs), begun.elapsed().as_secs_f64());
    }
    for (bugs, bounds) in ORDERS.iter().filter(|(bugs, _)| is_wanted(bugs)) {
        let begun = Instant::now();
        let what = explored(bugs, *bounds);
        missed |= what.is_err();
        let what = what.unwrap_or_else(|why| format!("MISSED: {why}"));
        println!("bug {} Orders: {what} ({:.1} s)", names(bugs), begun.elapsed().as_secs_f64());
    }
    let _ = plant(&[]);
    std::panic::set_hook(hook);
    if missed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn names(bugs: &[Bug]) -> String {
    bugs.iter().map(|bug| bug.name()).collect::<Vec<&str>>().join(" and ")
}

/// Returns the violation that exploration finds with the faults, and not without them.
fn explored(bugs: &[Bug], bounds: Bounds) -> Result<String, String> {
    let _ = plant(bugs);
    let found = catch_unwind(AssertUnwindSafe(|| explore(bounds)));
    let _ = plant(&[]);
    let wrong = match found {
        Ok(Err(wrong)) => wrong,
        Ok(Ok(explored)) => return Err(format!("{explored}")),
        Err(_) => return Err("an assertion failed".to_owned()),
    };
    explore(bounds).map_err(|lie| format!("found without it too: {lie}"))?;
    Ok(format!("found: {} (state {}, {} steps)", wrong.message, wrong.explored.states, wrong.steps))
}

/// Returns the first line of the first history's violation that occurs with the faults, and not without them.
fn hunt(bugs: &[Bug], world: World) -> Option<String> {
    let mut panics = 0_u64;
    for seed in 0..MOST {
        match catch_unwind(AssertUnwindSafe(|| world.run(seed))) {
            Ok(Ok(())) => {}
            Ok(Err(lie)) => {
                let _ = plant(&[]);
                let is_sound = matches!(catch_unwind(AssertUnwindSafe(|| world.run(seed))), Ok(Ok(())));
                let _ = plant(bugs);
                if !is_sound {
                    continue;
                }
                let line = lie.lines().next().unwrap_or_default();
                return Some(format!("found: {line}{}", asserted(panics)));
            }
            Err(_) => panics += 1,
        }
    }
    None
}

fn asserted(panics: u64) -> String {
    if panics == 0 { String::new() } else { format!(" (in {panics} histories before an assertion failed)") }
}
