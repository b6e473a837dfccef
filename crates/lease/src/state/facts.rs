//! Facts under change: the parts of keys whose new values can be sent (docs/decisions/0014-pushes.md).

use crate::types::{Holder, LeaseKey};
use nigh_types::{Name, NodeId, RecallId};

/// A key, and the name if the key is updated name by name.
pub(crate) type FactKey = (LeaseKey, Option<Name>);

/// How many changes of a fact are in progress, and which end of a change was the latest.
#[derive(Clone, Default, Debug)]
pub(crate) struct FactState {
    pub(crate) under_way: u64,
    pub(crate) ended: u64,
}

/// The facts that one holder suspends during a change.
#[derive(Clone, Debug)]
pub(crate) struct SuspendedFacts {
    pub(crate) holder: Holder,
    pub(crate) id: RecallId,
    pub(crate) facts: Vec<UpdatedKey>,
}

/// An updated fact, with the node id in its holder's export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpdatedKey {
    pub key: LeaseKey,
    pub node: NodeId,
    /// With [`LeaseScope::Directory`].
    pub name: Option<Name>,
}

/// When the result of a change was observed, as a count of ended changes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ObservedAt(pub(crate) u64);

impl UpdatedKey {
    pub(crate) fn fact(&self) -> FactKey {
        (self.key, self.name.clone())
    }
}
