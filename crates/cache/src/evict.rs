//! Keeping to the budget: whole directories go, those first that were not used lately.

use crate::cache::Cache;
use crate::recall::After;
use nigh_types::{NodeId, Time};

/// What an inode's record costs, in bytes, with its place in the table.
const INODE_BYTES: u64 = (size_of::<crate::state::Inode>() + 24) as u64;
const DIRECTORY_BYTES: u64 = (size_of::<crate::state::Directory>() + 24) as u64;

impl Cache {
    /// Memory held by cached facts, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.row_bytes + self.inodes.len() as u64 * INODE_BYTES + self.dirs.len() as u64 * DIRECTORY_BYTES
    }

    /// Gives back directories until the budget is kept; second chance for those used since last time.
    pub(crate) fn trim(&mut self, now: Time) {
        let mut turns = self.order.len() * 2;
        while self.bytes() > self.config.budget_bytes && turns > 0 {
            turns -= 1;
            let Some(ino) = self.order.pop_front() else { return };
            let Some(directory) = self.dirs.get_mut(&ino) else { continue };
            if std::mem::take(&mut directory.used) || directory.listing.is_some() {
                self.order.push_back(ino);
                continue;
            }
            let id = directory.id;
            self.evict(now, id);
        }
    }

    fn evict(&mut self, now: Time, node: NodeId) {
        self.counters.evictions += 1;
        tracing::debug!(target: "nigh::evict", ino = node.ino);
        let held = self.dirs.get(&node.ino).and_then(|d| d.held).filter(|h| h.lives(now));
        // Under a deadline the kernel's timeouts end by themselves; else it must be told first.
        self.keep_open_below(node.ino);
        if let Some(held) = held.filter(|h| h.recallable) {
            let stale = self.stale_names(node);
            if self.config.level.may_keep_pages() && !stale.is_empty() {
                self.invalidate(stale, Some(After::Return(vec![held.id])));
            } else {
                self.out.push_back(crate::Output::Return(vec![held.id]));
            }
        }
        let children: Vec<u64> = self
            .dirs
            .get(&node.ino)
            .into_iter()
            .flat_map(|d| d.rows.iter())
            .filter_map(|row| row.child.as_ref().map(|c| c.id.ino))
            .collect();
        self.forget_names(node.ino);
        self.dirs.remove(&node.ino);
        for ino in children {
            let Some(inode) = self.inodes.get_mut(&ino) else { continue };
            if inode.lookups == 0 && inode.own.take().is_some() {
                self.drop_if_idle(ino);
            }
        }
    }
}
