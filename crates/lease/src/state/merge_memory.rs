//! Memory for merging write-back of several holders into one file (docs/decisions/0028).

use super::outstanding::OutstandingRecall;
use crate::types::Holder;
use std::collections::BTreeMap;

/// Memory used by the merge bases of all holders.
#[derive(Clone, Default, Debug)]
pub(crate) struct MergeMemory {
    total: u64,
    by_holder: BTreeMap<Holder, u64>,
}

impl MergeMemory {
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Releases the memory of a recall that is no longer outstanding.
    pub(crate) fn removed(&mut self, recall: Option<&OutstandingRecall>) {
        if let Some(OutstandingRecall { holder, base, .. }) = recall {
            self.resized(*holder, base.cost(), 0);
        }
    }

    pub(crate) fn resized(&mut self, holder: Holder, before: u64, after: u64) {
        if before == after {
            return;
        }
        self.total = self.total - before + after;
        let of_holder = self.by_holder.entry(holder).or_default();
        *of_holder = *of_holder - before + after;
        if *of_holder == 0 {
            self.by_holder.remove(&holder);
        }
    }

    pub(crate) fn largest(&self) -> Option<Holder> {
        self.by_holder.iter().max_by_key(|(_, bytes)| **bytes).map(|(holder, _)| *holder)
    }
}
