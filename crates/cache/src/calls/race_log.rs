//! Log of changes that happened while a call was in flight.

use super::InflightCall;
use crate::cache::Cache;
use nigh_types::{Cookie, LeaseScope, Name, NodeId};
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
    /// [`crate::records::Directory::lease_generation`] has grown.
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

impl Cache {
    /// Returns names of a directory that local changes in flight bind or unbind.
    pub(crate) fn names_in_flight(&self, dir: u64) -> Vec<Name> {
        let touched = self.flights.values().flat_map(|f| f.purpose.names());
        touched.filter(|(d, _)| *d == dir).map(|(_, name)| name.clone()).collect()
    }

    /// Returns whether a local change of the name is in flight.
    pub(crate) fn is_name_in_flight(&self, dir: u64, name: &Name) -> bool {
        self.flights.values().any(|flight| flight.purpose.binds(dir, name))
    }

    /// Returns whether a local change of names in the directory is in flight.
    pub(crate) fn has_local_change_in(&self, dir: u64) -> bool {
        self.flights.values().any(|flight| flight.purpose.binds_in(dir))
    }

    /// Records a name that was learned for local changes in flight: their replies may be older.
    pub(crate) fn mark_name_in_flight(&mut self, dir: u64, name: &Name, id: Option<NodeId>) {
        let learned = ConcurrentDentry {
            cookie: self.key.cookie(name.as_bytes()),
            id,
            local: None,
            lease_generation: None,
        };
        for flight in self.flights.values_mut().filter(|flight| flight.purpose.binds(dir, name)) {
            flight.race_log.put_dentry(dir, name, learned);
        }
    }

    /// Records learned attributes for local changes in flight: their replies may be older.
    pub(crate) fn mark_attr_in_flight(&mut self, ino: u64) {
        for flight in self.flights.values_mut().filter(|f| f.is_mutation()) {
            flight.race_log.local_inodes.push(ino);
        }
    }

    /// Records in every call in flight that a local change changed an inode.
    pub(crate) fn note_local_inode(&mut self, ino: u64) {
        self.drop_expired(ino);
        self.statfs_cache = None;
        for flight in self.flights.values_mut().filter(|flight| flight.purpose.tracks_races()) {
            flight.race_log.local_inodes.push(ino);
        }
    }

    /// Returns the directory's lease generation if its lease has lived without a break since the change was sent, so
    /// that the cache received all changes by other clients.
    fn lease_generation_since_sent(&self, change: &InflightCall, dir: u64) -> Option<u64> {
        let directory = self.dirs.get(&dir).filter(|_| !change.race_log.granted_dirs.contains(&dir))?;
        directory
            .held
            .filter(|held| held.recallable && held.is_live(self.clock))
            .map(|_| directory.lease_generation)
    }

    /// Returns whether the reply to a local change contradicts what was learned since, without a known order: another
    /// local change bound the name otherwise, or other clients may have.
    pub(crate) fn is_change_ambiguous(
        &self,
        change: &InflightCall,
        dir: u64,
        name: &Name,
        id: Option<NodeId>,
    ) -> bool {
        let own = change.race_log.name(dir, name).and_then(|learned| learned.local);
        let by_others =
            change.is_contradicted(dir, name, id) && self.lease_generation_since_sent(change, dir).is_none();
        by_others || own.is_some_and(|own| own != id)
    }

    /// Records a local change of a name in all calls in flight, unless the directory was recalled since: calls sent
    /// later know better. Runs before anything is learned from that change.
    pub(crate) fn note_local_dentry(
        &mut self,
        by: &InflightCall,
        (dir, name): (u64, &Name),
        id: Option<NodeId>,
    ) {
        self.drop_expired_names(dir);
        if let Some(directory) = self.dirs.get_mut(&dir) {
            directory.version += 1;
        }
        if self.id_of(dir).is_some_and(|id| by.recalled(id, LeaseScope::Directory)) {
            return;
        }
        let (cookie, same_lease) =
            (self.key.cookie(name.as_bytes()), self.lease_generation_since_sent(by, dir));
        let learned = ConcurrentDentry { cookie, id, local: Some(id), lease_generation: same_lease };
        for flight in self.flights.values_mut().filter(|flight| flight.purpose.tracks_races()) {
            if !flight.is_mutation() {
                flight.race_log.forget_remote_change(dir, name);
            }
            flight.race_log.put_dentry(dir, name, learned);
        }
    }
}
