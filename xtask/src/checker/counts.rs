//! Statistics of a run.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use nigh_sim::history::{CallResult, History, Record, Report};
use serde_json::{Value, json};

/// At most one window in so many may blame a kernel's link count, or one.
const UNDERCOUNTED: u64 = 100;
/// At most one window in so many may be undecided, or one.
const UNDECIDED: u64 = 20;
/// A read that took less than this, in ns, did not pass a link of a millisecond.
const FROM_MEMORY: u64 = 500_000;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    pub windows: u64,
    pub calls: BTreeMap<String, u64>,
    pub refused: u64,
    pub looks: u64,
    pub looks_from_memory: u64,
    pub changes: u64,
    pub unknown: u64,
    pub left_out: u64,
    pub stale: u64,
    pub miscounted: u64,
    /// Windows explained only by a kernel that counted one name of a file too few.
    pub undercounted: u64,
    pub lost: u64,
    pub early: u64,
    pub torn: u64,
    /// Windows with an object that the search could not decide.
    pub undecided: u64,
    pub longest_ms: u64,
    /// The largest set of configurations.
    pub largest: u64,
}

impl Counts {
    pub fn add(&mut self, history: &History, report: &Report) {
        self.windows += 1;
        self.unknown += report.unknown;
        self.left_out += report.ignored;
        self.stale += report.stale;
        self.miscounted += report.wrong_nlink;
        self.undercounted += report.undercounted;
        self.lost += report.lost;
        self.early += report.read_before_reply;
        self.torn += report.torn;
        self.undecided += u64::from(report.undecided > 0);
        self.longest_ms = self.longest_ms.max(longest_ms(history));
        self.largest = self.largest.max(u64::try_from(report.largest).unwrap_or(u64::MAX));
        for record in history.records.iter().filter(|record| record.mount != Record::EXPORT) {
            let call = record.call.to_string();
            *self.calls.entry(call.split(' ').next().unwrap_or_default().to_owned()).or_default() += 1;
            let took = took(record);
            let failed = matches!(record.response, Some((_, CallResult::Failed(_))));
            self.refused += u64::from(failed);
            if !record.call.is_change() {
                self.looks += 1;
                self.looks_from_memory += u64::from(took.is_some_and(|took| took < FROM_MEMORY));
            } else if !failed {
                self.changes += 1;
            }
        }
    }

    /// Checks that most windows are decided, and that link counts of kernels are seldom blamed. On a loaded machine many calls overlap, and calls in doubt at a kill may
    /// take effect at any time: then there may be too many orders.
    pub fn check_decided(&self) -> Result<()> {
        let most = (self.windows / UNDECIDED).max(1);
        ensure!(self.undecided <= most, "{} of {} windows are undecided", self.undecided, self.windows);
        let most = (self.windows / UNDERCOUNTED).max(1);
        ensure!(
            self.undercounted <= most,
            "in {} of {} windows a kernel refused link(2) of a file with a name",
            self.undercounted,
            self.windows
        );
        Ok(())
    }

    #[must_use]
    pub fn all_calls(&self) -> u64 {
        self.calls.values().sum()
    }

    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "windows": self.windows,
            "calls": self.all_calls(),
            "by_kind": self.calls,
            "refused": self.refused,
            "looks": self.looks,
            "looks_from_memory": self.looks_from_memory,
            "changes": self.changes,
            "unknown": self.unknown,
            "left_out": self.left_out,
            "stale": self.stale,
            "miscounted": self.miscounted,
            "undercounted": self.undercounted,
            "lost": self.lost,
            "early": self.early,
            "torn": self.torn,
            "undecided": self.undecided,
            "longest_ms": self.longest_ms,
            "largest": self.largest,
        })
    }
}

fn took(record: &Record) -> Option<u64> {
    record.response.as_ref().map(|(end, _)| end.saturating_sub(record.begin))
}

/// Returns the longest duration of a call.
#[must_use]
pub fn longest_ms(history: &History) -> u64 {
    history.records.iter().filter_map(took).max().unwrap_or(0) / 1_000_000
}
