//! What a call that is out has missed.

use crate::rows::Child;
use nigh_types::{Covers, Name, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// What became of a name, as far as was learned.
#[derive(Clone, Debug)]
pub(crate) struct Learned {
    /// What it leads to now.
    pub child: Option<Child>,
    /// What the latest own change that was answered made of it; else others were asked.
    pub own: Option<Option<NodeId>>,
    /// A grant on its directory's names lived from before that change was sent, and lives until the directory has more
    /// gaps: what others made of it later was told.
    pub until_gap: Option<u64>,
}

/// What happened to facts after a call was sent: its reply may be older (invariant 4).
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// All grants ended: whatever the reply says is not kept.
    pub lapsed: bool,
    pub recalled: Vec<(NodeId, Covers)>,
    /// Inodes that own mutations changed.
    pub inodes: Vec<u64>,
    pub names: BTreeMap<u64, BTreeMap<Name, Learned>>,
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
        let own = self.inodes.is_empty() && self.names.values().all(BTreeMap::is_empty);
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

    pub fn name(&self, dir: u64, name: &Name) -> Option<&Learned> {
        self.names.get(&dir)?.get(name)
    }

    /// Names of a directory that own mutations bound or unbound.
    pub fn own_names(&self, dir: u64) -> impl Iterator<Item = &Name> {
        self.names.get(&dir).into_iter().flat_map(BTreeMap::keys)
    }

    pub fn put_name(&mut self, dir: u64, name: &Name, learned: Learned) {
        let old = self.names.entry(dir).or_default().insert(name.clone(), learned);
        if let Some(learned) = self.names.get_mut(&dir).and_then(|names| names.get_mut(name)) {
            learned.own = learned.own.or_else(|| old?.own);
        }
    }

    /// Others changed that name later.
    pub fn forget_name(&mut self, dir: u64, name: &Name) {
        if let Some(names) = self.names.get_mut(&dir) {
            names.remove(name);
        }
    }
}
