//! Short form of `cargo xtask sim --orders`: few calls, and only the named faults.

use nigh_sim::orders::{Bounds, explore};

/// Explores all interleavings. There must be no violation, and at least `least` states: with fewer, some are missing.
fn all(bounds: Bounds, least: u64) {
    let explored = explore(bounds).unwrap_or_else(|wrong| panic!("{bounds:?}: {wrong}"));
    println!("{bounds:?}: {explored}");
    assert!(explored.states >= least, "{explored}");
}

#[test]
fn all_interleavings_of_two_calls_are_correct() {
    all(Bounds::calm([1, 1]), 6_000);
    all(Bounds { warm: false, ..Bounds::calm([1, 1]) }, 8_000);
}

#[test]
fn all_interleavings_of_two_calls_with_pushes_are_correct() {
    all(Bounds { pushes: true, slow_kernels: false, ..Bounds::calm([1, 1]) }, 5_000);
}

#[test]
fn all_interleavings_of_call_with_restart_or_late_timers_are_correct() {
    all(Bounds { restarts: 1, ..Bounds::calm([1, 0]) }, 1_000);
    all(Bounds { restarts: 1, pushes: true, ..Bounds::calm([1, 0]) }, 1_000);
    all(Bounds { late: 2, slow_kernels: false, ..Bounds::calm([1, 0]) }, 4_000);
}
