//! Replacement of facts by newer ones, and what the kernel holds under the older ones.

use crate::cache::Cache;
use crate::calls::InflightCall;
use crate::grants::LiveGrant;
use crate::listing::ListedEntry;
use crate::op::KernelInvalidation;
use crate::store::CachedEntry;
use nigh_types::{Cookie, Grant, GrantId, LeaseScope, Name, NodeId, Time};
use rustc_hash::FxHashSet;

impl Cache {
    /// Begins another grant on a directory's names. Facts under a live grant with recall stay known, since the kernel
    /// may have them; so all of them end at the earlier deadline (page 0004, rule 1). Under a grant that only ends by
    /// itself the kernel's timeouts end with it, and the older facts are dropped.
    pub(crate) fn renew_lease(&mut self, now: Time, dir: NodeId, fresh: LiveGrant) {
        let old = self.live_directory(now, dir.ino).map(|(_, old)| old);
        let mut held = fresh;
        match old.filter(|old| old.recallable && fresh.recallable) {
            Some(old) => {
                held.deadline = held.deadline.min(old.deadline);
                held.id = held.id.max(old.id);
            }
            None => {
                self.end_directory_lease(dir.ino);
                self.note_lease_begin(dir.ino);
            }
        }
        self.directory(dir).held = Some(held);
    }

    /// Records that a grant on a directory's names is returned, or about to be.
    pub(crate) fn note_grant_returned(&mut self, dir: NodeId, id: GrantId) {
        self.store.note_grant_returned(dir, id, self.calls.is_empty());
    }

    /// Records a new directory lease for local changes in flight: they may have been made before it.
    pub(crate) fn note_lease_begin(&mut self, dir: u64) {
        self.calls.mark_lease_begin(dir);
    }

    /// Updates grant ids from a reply: the server renumbers a grant with each reply, and ends it by its latest id.
    pub(crate) fn refresh_grant_ids(&mut self, flight: &InflightCall, grants: &[Grant]) {
        for grant in grants.iter().filter(|g| g.covers == LeaseScope::Directory) {
            let directory = self.store.dir_mut(grant.node.ino).filter(|d| d.id == grant.node);
            let held = directory.and_then(|d| d.held.as_mut());
            if let Some(held) = held.filter(|_| !flight.recalled(grant.node, LeaseScope::Directory)) {
                held.id = held.id.max(grant.id);
            }
        }
    }

    /// Returns the invalidations for an entry that is gone, or leads to `id` now: no recall will cover the old entry.
    pub(crate) fn invalidations_for_replaced(
        &mut self,
        (dir, name): (u64, &Name),
        old: Option<&CachedEntry>,
        id: Option<NodeId>,
    ) -> Vec<KernelInvalidation> {
        if id == old.map(|c| c.id) {
            return Vec::new();
        }
        let held = self.store.dir(dir).and_then(|d| d.held);
        let drops = held.is_none_or(|held| self.kernel.level().gives_dentries(&held));
        let entry = drops.then_some(KernelInvalidation::Entry { dir, name: name.clone() });
        let Some(child) = old else { return entry.into_iter().collect() };
        let Some(inode) = self.store.inode_of_mut(child.id) else {
            return Vec::new();
        };
        inode.drop_xattrs();
        inode.attr_valid_until = Time(0);
        if inode.nlookup == 0 {
            return Vec::new();
        }
        entry.into_iter().chain([KernelInvalidation::Attr { ino: child.id.ino }]).collect()
    }

    /// Removes entries between two cookies that a chunk does not list: the names do not exist, unless a local change
    /// made them meanwhile.
    pub(crate) fn remove_unlisted(
        &mut self,
        dir: u64,
        flight: &InflightCall,
        entries: &[(Name, ListedEntry)],
        (from, to): (Cookie, Cookie),
        (under_way, all_taken): (&[Name], bool),
    ) -> Vec<KernelInvalidation> {
        let Some(directory) = self.store.dir(dir) else { return Vec::new() };
        let rows = || directory.rows.after(from).take_while(|row| row.cookie <= to);
        if all_taken && rows().filter(|row| row.child.is_some()).count() == entries.len() {
            return Vec::new();
        }
        let listed: FxHashSet<&[u8]> = entries.iter().map(|(name, _)| name.as_bytes()).collect();
        let is_own = |name: &Name| {
            let seen = &flight.race_log;
            under_way.contains(name)
                || seen.name(dir, name).is_some()
                || self.is_newer_than_listing(seen, dir, name)
        };
        let gone = rows().filter(|row| row.child.is_some() && !listed.contains(row.name));
        let gone = gone.map(|row| (row.cookie, row.to_name())).filter(|(_, name)| !is_own(name));
        let gone: Vec<(Cookie, Name)> = gone.collect();
        let mut stale = Vec::new();
        for (cookie, name) in gone {
            let row = self.store.dir_mut(dir).and_then(|d| d.rows.remove(cookie, name.as_bytes()));
            stale.extend(
                row.into_iter()
                    .flat_map(|old| self.invalidations_for_replaced((dir, &name), old.as_ref(), None)),
            );
        }
        stale
    }
}
