//! Updates in place, in two steps, so that a grant outlives a change: prepare suspends the facts, commit gives their
//! new values. See docs/decisions/0014-pushes.md.

use crate::{Attr, Entry, LeaseScope, Name, NodeId, RecallId};

/// First step of an update: until its commit the client serves none of these facts from memory. The client
/// acknowledges its number once the kernel has dropped the facts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpdatePrepare {
    /// Updates and recalls share one number space.
    pub id: RecallId,
    /// At least one.
    pub facts: Vec<UpdateScope>,
}

/// Scope of an update: facts of one object under one grant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpdateScope {
    pub node: NodeId,
    /// Not [`LeaseScope::Data`]: page caches cannot be updated, only invalidated.
    pub covers: LeaseScope,
    /// With [`LeaseScope::Directory`]: the changing names, at least one. Otherwise empty.
    pub names: Vec<Name>,
}

/// Second step of an update: the new values. A fact of the update without a value here becomes unknown, unless another
/// pending update covers it. The grants live on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpdateCommit {
    /// Number of the [`UpdatePrepare`].
    pub id: RecallId,
    pub facts: Vec<UpdatedFact>,
}

/// New value of an updated fact.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UpdatedFact {
    /// The inode that the name leads to; `None` if the name is absent.
    Name {
        dir: NodeId,
        name: Name,
        entry: Option<Entry>,
    },
    Attr {
        node: NodeId,
        attr: Attr,
    },
}
