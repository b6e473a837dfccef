//! Random requests of every kind: the cache replies as the tree behind it does.

use nigh_sim::differential::{Plan, run};

#[test]
fn cache_replies_equal_those_of_reference_tree() {
    let seeds = std::env::var("NIGH_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(100);
    let first = std::env::var("NIGH_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    for seed in first..first + seeds {
        if let Err(lie) = run(Plan { seed, steps: 300 }) {
            panic!("{lie}");
        }
    }
}
