//! What a call that is out has missed.

use crate::rows::Child;
use nigh_types::{Covers, Name, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// What happened to facts after a call was sent: its reply may be older (invariant 4).
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// All grants ended: whatever the reply says is not kept.
    pub lapsed: bool,
    pub recalled: Vec<(NodeId, Covers)>,
    /// Inodes that own mutations changed.
    pub inodes: Vec<u64>,
    /// Names that own mutations bound or unbound, with what they lead to now.
    pub names: Vec<(u64, Name, Option<Child>)>,
    /// Names that others bound or unbound: held (`None`), or known since, unless [`crate::state::Directory::gaps`] has
    /// grown.
    pub pushed: BTreeMap<u64, BTreeMap<Name, Option<u64>>>,
    /// Inodes to which such names led or lead.
    pub told: BTreeSet<u64>,
    /// Of a change: directories whose names it binds or unbinds, and were granted since. Whether its answer is older than that grant
    /// is not known, unless it comes with a grant itself.
    pub granted: BTreeSet<u64>,
}

impl Seen {
    pub fn is_empty(&self) -> bool {
        let own = self.inodes.is_empty() && self.names.is_empty();
        !self.lapsed && self.recalled.is_empty() && own && self.pushed.is_empty() && self.told.is_empty()
    }

    /// Whether others changed that name, or are about to.
    pub fn is_pushed(&self, dir: u64, name: &Name) -> bool {
        self.pushed.get(&dir).is_some_and(|names| names.contains_key(name))
    }

    /// An own change of that name is the later.
    pub(super) fn forget_pushed(&mut self, dir: u64, name: &Name) {
        if let Some(names) = self.pushed.get_mut(&dir) {
            names.remove(name);
            if names.is_empty() {
                self.pushed.remove(&dir);
            }
        }
    }

    /// Whether others changed a name of that directory.
    pub fn was_pushed_in(&self, dir: u64) -> bool {
        self.pushed.contains_key(&dir)
    }

    pub fn name(&self, dir: u64, name: &Name) -> Option<&Option<Child>> {
        self.names.iter().rev().find(|(d, n, _)| *d == dir && n == name).map(|(_, _, child)| child)
    }
}
