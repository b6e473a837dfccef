//! Explores all interleavings: `cargo xtask sim --orders`, or `--orders NAME` for plans whose name begins with NAME.

use nigh_sim::orders::{Bounds, LONG, PLANS, explore};
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let begun = Instant::now();
    let (mut states, mut all_true) = (0, true);
    let long = LONG.iter().filter(|_| !wanted.is_empty());
    for (name, bounds) in PLANS.iter().chain(long).filter(|(name, _)| name.starts_with(&wanted)) {
        println!("{name}: {}", words(bounds));
        let begun = Instant::now();
        match explore(*bounds) {
            Ok(explored) => {
                states += explored.states;
                println!("  {explored}, {:.0} s", begun.elapsed().as_secs_f64());
            }
            Err(wrong) => {
                all_true = false;
                println!("  {}, {:.0} s: {wrong}", wrong.explored, begun.elapsed().as_secs_f64());
            }
        }
    }
    println!("{states} states, {:.0} s", begun.elapsed().as_secs_f64());
    if all_true && states > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn words(bounds: &Bounds) -> String {
    let Bounds {
        calls: [first, second], one_by_one, warm, pushes, contention, exclusive_leases: alone, ..
    } = bounds;
    let Bounds { slow_kernels, restarts, late, .. } = bounds;
    let mut words = vec![format!("{first} and {second} calls")];
    let mut say = |is: bool, what: &str| words.extend(is.then(|| what.to_owned()));
    say(*one_by_one, "one by one");
    say(*warm, "names known");
    say(*pushes, "pushes");
    say(*contention, "contention");
    say(*alone, "one has names alone");
    say(*slow_kernels, "slow kernels");
    say(*restarts > 0, &format!("{restarts} restart"));
    say(*late > 0, &format!("{late} late timers"));
    words.join(", ")
}
