//! The file locks of a mount. `calls/locks.rs` changes them.

use super::fids::Fid;
use nigh_remote::locks::Locks;
use nigh_types::{LockKind, NodeId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The locks of this mount, and their state at the server.
#[derive(Debug, Default)]
pub(crate) struct FileLocks {
    pub ranges: Locks,
    pub files: BTreeMap<NodeId, (Arc<Fid>, LockKind)>,
    /// Files whose lock at the server is being changed.
    pub busy: BTreeSet<NodeId>,
    /// Counts changes of `ranges`.
    pub changes: u64,
}
