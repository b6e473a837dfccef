//! Random samples of matrix cells for short runs.

use std::hash::{DefaultHasher, Hash, Hasher};

/// A choice by a seed, which is printed; `NIGH_SEED` repeats it.
pub struct Sample {
    seed: Option<u64>,
}

impl Sample {
    /// `some`: sample some cells of each matrix; otherwise all of them.
    #[must_use]
    pub fn new(some: bool) -> Sample {
        Sample { seed: some.then(seed) }
    }

    /// Prints how to repeat this choice.
    pub fn print(&self) {
        if let Some(seed) = self.seed {
            println!("cells of matrices are chosen by NIGH_SEED={seed}; --long takes all of them");
        }
    }

    /// Returns up to `wanted` cells, in their order; all of them in a long run.
    pub fn of<'a, T>(&self, matrix: &str, cells: &'a [T], wanted: usize) -> Vec<&'a T> {
        let Some(seed) = self.seed else { return cells.iter().collect() };
        let mut order: Vec<usize> = (0..cells.len()).collect();
        order.sort_by_key(|cell| rank(seed, matrix, *cell));
        order.truncate(wanted);
        order.sort_unstable();
        order.into_iter().map(|cell| &cells[cell]).collect()
    }
}

/// Returns a new seed, unless `NIGH_SEED` gives it.
#[must_use]
pub fn seed() -> u64 {
    let chosen = std::env::var("NIGH_SEED").ok().and_then(|seed| seed.parse().ok());
    chosen.unwrap_or_else(|| crate::load::moment() / 1_000_000_000 % 1_000_000)
}

fn rank(seed: u64, matrix: &str, cell: usize) -> u64 {
    // Stable for all runs of one build: the hasher's keys are fixed.
    let mut hasher = DefaultHasher::new();
    (seed, matrix, cell).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_repeats_by_seed_and_takes_each_cell_at_some_seed() {
        let cells: Vec<u32> = (0..8).collect();
        let taken = |seed| -> Vec<u32> {
            Sample { seed: Some(seed) }.of("levels", &cells, 3).into_iter().copied().collect()
        };
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..64 {
            assert_eq!(taken(seed), taken(seed));
            assert!(taken(seed).len() == 3 && taken(seed).is_sorted());
            seen.extend(taken(seed));
        }
        assert_eq!(seen.len(), cells.len());
        assert_eq!(Sample { seed: None }.of("levels", &cells, 3).len(), cells.len());
    }
}
