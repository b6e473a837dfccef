//! Facts under change: the parts of keys whose new values can be sent (docs/decisions/0014-pushes.md).

use crate::types::{Holder, LeaseKey, UpdatedKey};
use nigh_types::{Name, RecallId};

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

impl UpdatedKey {
    pub(crate) fn fact(&self) -> FactKey {
        (self.key, self.name.clone())
    }
}
