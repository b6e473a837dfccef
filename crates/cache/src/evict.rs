//! Eviction within the memory budget: whole directories, least recently used first.

use crate::cache::Cache;
use crate::kernel::NotifyLevel;
use crate::kernel::OnInvalidated;
use crate::op::KernelInvalidation;
use crate::store::{Directory, Inode, InodeExt};
use nigh_types::{NodeId, Time};
use std::collections::BTreeSet;

/// Bytes of an inode record with its slot in the hash table, which is half full to full.
pub(crate) const INODE_BYTES: u64 = (size_of::<Inode>() + 8 + 17 * 3 / 2) as u64;
/// Share of the budget that names keep at least.
const LEFT_FOR_NAMES: u64 = 4;
/// Share of the budget by which memory grows before the next try to free what could not be freed.
const TRIM_STEP: u64 = 64;
/// Bytes of a directory record, with its own attributes.
const DIRECTORY_BYTES: u64 = (size_of::<Directory>() + 24 + size_of::<InodeExt>()) as u64;

impl Cache {
    /// Returns the memory in use, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let inodes = self.store.inode_count() as u64 * INODE_BYTES + self.kernel.inodes.bytes();
        self.names_bytes() + inodes + self.open.dirs.snapshot_bytes() + self.open.names.bytes()
    }

    /// Returns the bytes that eviction can free.
    fn names_bytes(&self) -> u64 {
        self.store.entry_bytes() + self.store.dir_count() as u64 * DIRECTORY_BYTES
    }

    /// Returns whether eviction goes on. Inodes that the kernel knows stay until it forgets them: however many there
    /// are, a quarter of the budget is left for names.
    fn exceeds(&self, budget: u64) -> bool {
        self.has_too_many_dirs() || self.exceeds_bytes(budget)
    }

    fn has_too_many_dirs(&self) -> bool {
        self.store.dir_count() as u64 > self.config.most_dirs
    }

    fn exceeds_bytes(&self, budget: u64) -> bool {
        self.bytes() > budget && self.names_bytes() > self.config.budget_bytes / LEFT_FOR_NAMES
    }

    /// Evicts directories until the budget is kept, with a second chance for those used since last time. Directories
    /// that are being read stay, so up to twice the budget may be in use; beyond that only the one read last stays.
    pub(crate) fn trim(&mut self, now: Time) {
        let budget = self.config.budget_bytes;
        if self.bytes() <= budget.max(self.trim_above) && !self.has_too_many_dirs() {
            return;
        }
        let reading = self.being_read();
        self.trim_prefetched(now, budget, &reading);
        self.evict_while(now, &reading, |cache| cache.exceeds(budget));
        if self.exceeds_bytes(budget.saturating_mul(2)) {
            let last_read = BTreeSet::from([self.open.dirs.last_read()]);
            self.evict_while(now, &last_read, |cache| cache.exceeds(budget));
        }
        if self.bytes() > budget {
            self.open.dirs.drop_snapshots();
            self.drop_name_streams(now);
        }
        let left = self.bytes();
        self.trim_above = if left > budget { left.saturating_add(budget / TRIM_STEP) } else { 0 };
    }

    /// Evicts prefetched directories that a walk has left behind, before all others.
    fn trim_prefetched(&mut self, now: Time, budget: u64, spared: &BTreeSet<u64>) {
        let mut turns = self.prefetch.arrived();
        while self.exceeds(budget) && turns > 0 {
            turns -= 1;
            let Some(ino) = self.prefetch.pop_arrived() else { return };
            let Some(directory) = self.store.dir(ino) else { continue };
            if directory.prefetched_by.is_none() && directory.first_used_at.is_none() {
                continue;
            }
            if directory.listing.is_some() || spared.contains(&ino) {
                self.prefetch.push_arrived(ino);
                continue;
            }
            self.evict(now, directory.id);
        }
    }

    /// Evicts one directory after another; those used since last time get a second turn.
    pub(crate) fn evict_while(
        &mut self,
        now: Time,
        spared: &BTreeSet<u64>,
        goes_on: impl Fn(&Cache) -> bool,
    ) {
        let mut turns = self.store.evictable() * 2;
        while goes_on(self) && turns > 0 {
            turns -= 1;
            let Some(ino) = self.store.next_to_evict() else { return };
            let Some(directory) = self.store.dir_mut(ino) else { continue };
            let used = std::mem::take(&mut directory.used);
            if used || directory.listing.is_some() || spared.contains(&ino) {
                self.store.evict_later(ino);
                continue;
            }
            let id = directory.id;
            self.evict(now, id);
        }
    }

    /// Invalidates dentries under grants without a deadline. The kernel's timeouts end the others; without their record
    /// no code would invalidate these at the end of the session.
    fn drop_dentries(&mut self, node: NodeId) {
        let Some(directory) =
            self.store.dir(node.ino).filter(|_| self.kernel.level() == NotifyLevel::NoEpoch)
        else {
            return;
        };
        let for_ever = directory.dentry_leases.names_without_deadline();
        let stale: Vec<KernelInvalidation> =
            for_ever.map(|name| KernelInvalidation::Entry { dir: node.ino, name: name.clone() }).collect();
        if !stale.is_empty() {
            self.invalidate(stale, None);
        }
    }

    pub(crate) fn evict(&mut self, now: Time, node: NodeId) {
        self.counters.evictions += 1;
        tracing::debug!(target: "nigh::evict", ino = node.ino);
        let held = self.store.dir(node.ino).and_then(|d| d.held).filter(|h| h.is_live(now));
        // Under a deadline the kernel's timeouts end by themselves; else it must be invalidated first.
        self.pin_open_below(node.ino);
        if let Some(held) = held.filter(|h| h.recallable && !h.stale) {
            self.note_grant_returned(node, held.id);
            let stale = self.invalidations_under_lease(node);
            if self.kernel.can_notify() && !stale.is_empty() {
                self.invalidate(stale, Some(OnInvalidated::Return(vec![held.id])));
            } else {
                self.out.push_back(crate::Output::Return(vec![held.id]));
            }
        }
        let children: Vec<u64> = self
            .store
            .dir(node.ino)
            .into_iter()
            .flat_map(|d| {
                let rows = d.rows.iter().filter_map(|row| row.child.map(|c| c.id.ino));
                rows.chain(d.dentry_leases.inodes().map(|id| id.ino))
            })
            .collect();
        if let Some((call, cost)) = self.store.dir_mut(node.ino).and_then(|d| d.prefetched_by.take()) {
            self.count_wasted(call, cost);
        }
        self.drop_dentries(node);
        self.drop_dir_names(node.ino);
        self.store.remove_dir(node.ino);
        for ino in children {
            let Some(inode) = self.store.inode_mut(ino) else { continue };
            if inode.nlookup == 0 && inode.drop_own_attr().is_some() {
                self.drop_if_idle(ino);
            }
        }
    }
}
