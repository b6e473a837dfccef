//! Order of local changes among the replies to calls that were in flight with them.

use crate::cache::Cache;
use crate::calls::{ConcurrentDentry, InflightCall};
use nigh_types::{LeaseScope, Name, NodeId};

impl Cache {
    /// Records a name that was learned for local changes in flight: their replies may be older.
    pub(crate) fn mark_name_in_flight(&mut self, dir: u64, name: &Name, id: Option<NodeId>) {
        let learned =
            ConcurrentDentry { cookie: self.store.cookie(name), id, local: None, lease_generation: None };
        self.calls.mark_name_learned(dir, name, learned);
    }

    /// Records in every call in flight that a local change changed an inode.
    pub(crate) fn note_local_inode(&mut self, ino: u64) {
        self.drop_expired(ino);
        self.statfs_cache = None;
        self.calls.mark_local_inode(ino);
    }

    /// Returns the directory's lease generation if its lease has lived without a break since the change was sent, so
    /// that the cache received all changes by other clients.
    fn lease_generation_since_sent(&self, change: &InflightCall, dir: u64) -> Option<u64> {
        let directory = self.store.dir(dir).filter(|_| !change.race_log.granted_dirs.contains(&dir))?;
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
        if let Some(directory) = self.store.dir_mut(dir) {
            directory.version += 1;
        }
        if self.store.id_of(dir).is_some_and(|id| by.recalled(id, LeaseScope::Directory)) {
            return;
        }
        let (cookie, same_lease) = (self.store.cookie(name), self.lease_generation_since_sent(by, dir));
        let learned = ConcurrentDentry { cookie, id, local: Some(id), lease_generation: same_lease };
        self.calls.mark_local_dentry(dir, name, learned);
    }
}
