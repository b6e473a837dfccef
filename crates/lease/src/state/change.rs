//! Changes in progress, and reads that wait like them.

use super::facts::{FactKey, SuspendedFacts};
use super::timers::Armed;
use crate::types::{GrantRequest, Granted, Holder, LeaseKey, ObservedAt, UpdatedKey};
use nigh_types::{RecallId, Time};
use std::collections::BTreeSet;

/// A change in progress.
#[derive(Clone, Debug)]
pub(crate) struct ChangeState {
    pub(crate) by: Option<Holder>,
    pub(crate) since: Time,
    pub(crate) keys: BTreeSet<LeaseKey>,
    /// Recalls and prepares whose acknowledgement it waits for.
    pub(crate) owed: BTreeSet<RecallId>,
    /// The facts that it invalidates, each once.
    pub(crate) facts: Vec<FactKey>,
    pub(crate) suspended: Vec<SuspendedFacts>,
    pub(crate) looked: Option<ObservedAt>,
    /// Facts named since the last prepare, with the holders that are to suspend them.
    pub(crate) unsaid: Vec<(Holder, UpdatedKey)>,
    /// A `Ready` is among the outputs.
    pub(crate) ready_emitted: bool,
    pub(crate) part: QueueEntry,
}

impl ChangeState {
    pub(crate) fn new(by: Option<Holder>, since: Time) -> ChangeState {
        ChangeState {
            by,
            since,
            keys: BTreeSet::new(),
            owed: BTreeSet::new(),
            facts: Vec::new(),
            suspended: Vec::new(),
            looked: None,
            unsaid: Vec::new(),
            ready_emitted: false,
            part: QueueEntry::default(),
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.owed.is_empty() && self.part.waits_for.is_none()
    }
}

/// A change's entry in the write queue.
#[derive(Clone, Default, Debug)]
pub(crate) struct QueueEntry {
    /// The key that it is writing.
    pub(crate) writes: Option<LeaseKey>,
    /// The key whose queue it waits in.
    pub(crate) waits_for: Option<LeaseKey>,
    /// A read instead of a change: it waits for this grant on data.
    pub(crate) reader: Option<GrantRequest>,
    pub(crate) granted: Option<Granted>,
    /// A write-back of stores through mmap.
    pub(crate) is_write_back: bool,
    /// Whether [`LeaseTable::handle_wrote_back`](crate::LeaseTable::handle_wrote_back) has reported for every attempt what it changed of the data.
    pub(crate) changes_reported: Option<bool>,
    /// When to check whether it waits for its own initiator.
    pub(crate) armed: Armed,
}
