//! Directories that are too large to be listed whole.

use nigh_types::{Span, Time};
use std::collections::BTreeMap;

/// Time for which a directory that did not fit is not listed whole again.
pub(crate) const NOT_LISTED_FOR: Span = Span::from_millis(60_000);
/// Most directories that are remembered as too large.
const MOST_REMEMBERED: usize = 256;

/// Directories that were too large, and until when they are not listed whole. At most [`MOST_REMEMBERED`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Oversized {
    until: BTreeMap<u64, Time>,
}

impl Oversized {
    pub fn insert(&mut self, now: Time, dir: u64) {
        self.until.retain(|_, until| *until > now);
        if self.until.len() < MOST_REMEMBERED {
            self.until.insert(dir, now.after(NOT_LISTED_FOR));
        }
    }

    /// Returns whether the directory is not to be listed whole.
    pub fn contains(&self, now: Time, dir: u64) -> bool {
        self.until.get(&dir).is_some_and(|until| *until > now)
    }
}
