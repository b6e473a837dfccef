//! Log of changes that happened while a call was in flight.

use nigh_types::{Bug, Cookie, LeaseScope, Name, NodeId, planted};
use std::collections::{BTreeMap, BTreeSet};

/// State of a name as learned while a call was in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConcurrentDentry {
    pub cookie: Cookie,
    /// The inode that the name leads to now.
    pub id: Option<NodeId>,
    /// The inode after the latest local change with a reply; `None`: the name was learned from other replies only.
    pub local: Option<Option<NodeId>>,
    /// Set if one directory lease has covered the name since that change was sent. While
    /// `Directory::lease_generation` equals this value, the cache has received every later change by other clients.
    pub lease_generation: Option<u64>,
}

/// Changes after a call was sent, which its reply may predate (invariant 4).
#[derive(Clone, Debug, Default)]
pub(crate) struct RaceLog {
    /// All grants ended: nothing of the reply is kept.
    pub all_grants_ended: bool,
    pub recalled: Vec<(NodeId, LeaseScope)>,
    /// Inodes that local changes changed.
    pub local_inodes: Vec<u64>,
    pub names: BTreeMap<u64, BTreeMap<Name, ConcurrentDentry>>,
    /// Names that other clients bound or unbound: in preparation (`None`), or known since, until
    /// [`crate::store::Directory::lease_generation`] has grown.
    pub remote_names: BTreeMap<u64, BTreeMap<Name, Option<u64>>>,
    /// Inodes that such names led to or lead to.
    pub remote_inodes: BTreeSet<u64>,
    /// For a change: directories of its names that were granted since. The reply may be older than such a grant, unless
    /// it carries a grant itself.
    pub granted_dirs: BTreeSet<u64>,
}

impl RaceLog {
    pub fn is_empty(&self) -> bool {
        let own = self.local_inodes.is_empty() && self.names.is_empty();
        !self.all_grants_ended
            && self.recalled.is_empty()
            && own
            && self.remote_names.is_empty()
            && self.remote_inodes.is_empty()
    }

    /// Returns whether these facts were recalled.
    pub fn has_recall_of(&self, node: NodeId, covers: LeaseScope) -> bool {
        let tainted = self.all_grants_ended || self.recalled.contains(&(node, covers));
        tainted && !planted(Bug::ForgetsRecalls)
    }

    /// Returns whether other clients changed the name, or are about to.
    pub fn is_remotely_changed(&self, dir: u64, name: &Name) -> bool {
        self.remote_names.get(&dir).is_some_and(|names| names.contains_key(name))
    }

    /// Forgets a remote change of a name: a local change is newer.
    pub(super) fn forget_remote_change(&mut self, dir: u64, name: &Name) {
        forget(&mut self.remote_names, dir, name);
    }

    /// Returns whether other clients changed a name of the directory.
    pub fn has_remote_change_in(&self, dir: u64) -> bool {
        self.remote_names.contains_key(&dir)
    }

    pub fn name(&self, dir: u64, name: &Name) -> Option<&ConcurrentDentry> {
        self.names.get(&dir)?.get(name)
    }

    /// Returns names of a directory that local changes bound or unbound.
    pub fn local_dentries(&self, dir: u64) -> impl Iterator<Item = (&Name, &ConcurrentDentry)> {
        self.names.get(&dir).into_iter().flatten()
    }

    /// Records a name; the result of an earlier local change stays known.
    pub fn put_dentry(&mut self, dir: u64, name: &Name, learned: ConcurrentDentry) {
        let names = self.names.entry(dir).or_default();
        let own = learned.local.or_else(|| names.get(name)?.local);
        names.insert(name.clone(), ConcurrentDentry { local: own, ..learned });
    }

    /// Forgets a name: other clients changed it later.
    pub fn forget_dentry(&mut self, dir: u64, name: &Name) {
        forget(&mut self.names, dir, name);
    }
}

fn forget<T>(of: &mut BTreeMap<u64, BTreeMap<Name, T>>, dir: u64, name: &Name) {
    if let Some(names) = of.get_mut(&dir) {
        names.remove(name);
        if names.is_empty() {
            of.remove(&dir);
        }
    }
}
