//! Acknowledgements that holders owe.

use crate::merge_base::MergeBase;
use crate::types::{ChangeId, Holder, LeaseKey, LeaseOutput};
use nigh_types::{GrantId, Mode, Name, NodeId, Recall, RecallId, UpdatePrepare};
use std::collections::BTreeSet;

/// A recall whose acknowledgement is owed.
#[derive(Clone, Debug)]
pub(crate) struct OutstandingRecall {
    pub(crate) holder: Holder,
    pub(crate) key: LeaseKey,
    pub(crate) node: NodeId,
    pub(crate) names: Vec<Name>,
    /// The recalled grant; `None` once it has ended in another way. The acknowledgement is awaited even so: otherwise
    /// it would end a grant that was given before it arrived.
    pub(crate) grant: Option<GrantId>,
    /// The mode of that grant.
    pub(crate) mode: Mode,
    /// [`Entry::held_exclusively_since`](super::Entry::held_exclusively_since) of the recalled grant.
    pub(crate) held_exclusively_since: GrantId,
    /// For data: bytes that other holders' write-back has changed since. These do not count for `held_exclusively_since`.
    pub(crate) base: MergeBase,
    pub(crate) waiting: Vec<ChangeId>,
}

impl OutstandingRecall {
    pub(crate) fn output(&self, id: RecallId) -> LeaseOutput {
        let OutstandingRecall { holder, key, node, ref names, .. } = *self;
        LeaseOutput::Recall { holder, recall: Recall { id, node, covers: key.covers, names: names.clone() } }
    }
}

/// An update prepare whose acknowledgement is owed.
#[derive(Clone, Debug)]
pub(crate) struct PendingUpdate {
    pub(crate) holder: Holder,
    pub(crate) hold: UpdatePrepare,
    pub(crate) waiting: ChangeId,
}

/// An acknowledgement that write-backs did not wait for.
#[derive(Clone, Default, Debug)]
pub(crate) struct BypassedAck {
    /// The data that they write.
    pub(crate) data: BTreeSet<LeaseKey>,
    /// The syncs of that data that wait for the acknowledgement.
    pub(crate) waiting: Vec<ChangeId>,
}
