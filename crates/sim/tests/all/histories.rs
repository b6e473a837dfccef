//! Short form of `cargo xtask sim`, with fixed seeds.

use nigh_sim::random::{Plan, run};

/// Seeds that have found a bug.
const FOUND: [u64; 10] = [2_014, 3_425, 3_632, 8_012, 9_545, 12_022, 13_859, 14_922, 24_425, 34_498];

#[test]
fn seeded_histories_return_only_true_replies() {
    let seeds = std::env::var("NIGH_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
    let first = std::env::var("NIGH_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    let found = FOUND.iter().copied().filter(|_| first == 0);
    for seed in (first..first + seeds).chain(found) {
        let clients = 1 + u32::try_from(seed % 3).unwrap();
        for pushes in [false, true] {
            if let Err(lie) = run(Plan { seed, clients, steps: 300, pushes }) {
                panic!("{}{lie}", if pushes { "with pushes: " } else { "" });
            }
        }
    }
}
