//! FUSE node ids.
//!
//! FUSE names a node by its number alone. If a reply gives a node id another generation or file type, the kernel takes
//! the id for reused. Every call that holds the old inode then fails with EIO, even one that is about to use it
//! (`fuse_stale_inode`, `fuse_make_bad`). So when another inode takes a number at the remote, its node id goes on
//! meaning the old inode until the kernel forgets that, and replies give the new inode a node id from our own range.
//! Applications see the inode's own number.

use nigh_types::{Attr, NodeId};
use rustc_hash::FxHashMap;

/// Start of our own range; no id is used twice (docs/decisions/0001-node-ids.md).
const ASSIGNED_BASE: u64 = (1 << 63) - (1 << 49);

/// Map between inode numbers and node ids where they differ.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeIdMap {
    /// Node id of our own range, by inode number;
    assigned: FxHashMap<u64, u64>,
    /// inode number, by that node id.
    inode_of_assigned: FxHashMap<u64, u64>,
    /// Inodes that are gone, by node id;
    former: FxHashMap<u64, ReusedNodeId>,
    /// and their node ids, by inode number.
    reused_by_inode: FxHashMap<u64, Vec<u64>>,
    assigned_count: u64,
}

/// Inode whose number another inode has taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReusedNodeId {
    pub id: NodeId,
    /// The kernel's lookup count.
    nlookup: u64,
    /// The kernel takes it for removed (`S_DEAD`), whatever has the number at the remote.
    is_dead: bool,
    /// Attributes of a directory that a local change removed, for processes that are still in it (`ops/removed.rs`).
    unlinked_attr: Option<Attr>,
}

impl NodeIdMap {
    /// Returns whether a node id is from our own range, even if an earlier mount assigned it.
    pub fn is_assigned(number: u64) -> bool {
        (ASSIGNED_BASE..1 << 63).contains(&number)
    }

    /// Returns whether all node ids equal the inode numbers.
    pub fn is_identity(&self) -> bool {
        self.assigned.is_empty() && self.former.is_empty()
    }

    /// Returns an inode's node id.
    pub fn nodeid(&self, ino: u64) -> u64 {
        self.assigned.get(&ino).copied().unwrap_or(ino)
    }

    /// Returns the inode number that a node id stands for.
    pub fn resolve(&self, number: u64) -> Result<u64, ReusedNodeId> {
        match self.former.get(&number) {
            Some(former) => Err(*former),
            None => Ok(self.inode_of_assigned.get(&number).copied().unwrap_or(number)),
        }
    }

    /// Returns an inode's node id and those of earlier inodes with its number.
    pub fn all_nodeids(&self, ino: u64) -> Vec<u64> {
        std::iter::once(self.nodeid(ino))
            .chain(self.reused_by_inode.get(&ino).into_iter().flatten().copied())
            .collect()
    }

    /// Records that another inode has taken the number of this one, with its lookup count.
    pub fn reuse(&mut self, id: NodeId, lookups: u64, gone: Option<Attr>) {
        self.set_aside(ReusedNodeId { id, nlookup: lookups, is_dead: false, unlinked_attr: gone });
    }

    /// Returns the attributes of a removed directory with this node id.
    pub fn removed_attr(&mut self, number: u64) -> Option<&mut Attr> {
        self.former.get_mut(&number)?.unlinked_attr.as_mut()
    }

    /// Gives another node id to an inode that the kernel takes for removed, or that has the id of a removed one.
    pub fn alias(&mut self, id: NodeId, lookups: u64, gone: Option<Attr>) {
        self.set_aside(ReusedNodeId { id, nlookup: lookups, is_dead: true, unlinked_attr: gone });
    }

    fn set_aside(&mut self, former: ReusedNodeId) {
        let id = former.id;
        let number = self.nodeid(id.ino);
        self.release(id.ino);
        self.former.insert(number, former);
        self.reused_by_inode.entry(id.ino).or_default().push(number);
    }

    /// Restores an inode whose reuse was reported by a late reply. Returns its lookup count.
    pub fn restore(&mut self, id: NodeId) -> u64 {
        let is_it = |former: &ReusedNodeId| former.id == id && !former.is_dead;
        let is_its = |number: &&u64| self.former.get(number).is_some_and(is_it);
        let Some(&number) = self.reused_by_inode.get(&id.ino).and_then(|left| left.iter().find(is_its))
        else {
            return 0;
        };
        let lookups = self.remove(number);
        if number != id.ino {
            self.assign(number, id.ino);
        }
        lookups
    }

    /// Removes a former inode. Returns its lookup count.
    fn remove(&mut self, number: u64) -> u64 {
        let Some(ReusedNodeId { id, nlookup: lookups, .. }) = self.former.remove(&number) else { return 0 };
        if let Some(left) = self.reused_by_inode.get_mut(&id.ino) {
            left.retain(|other| *other != number);
            if left.is_empty() {
                self.reused_by_inode.remove(&id.ino);
            }
        }
        lookups
    }

    fn assign(&mut self, number: u64, ino: u64) {
        self.assigned.insert(ino, number);
        self.inode_of_assigned.insert(number, ino);
    }

    /// Returns the node id for an inode that the kernel does not know.
    pub fn assign_if_reused(&mut self, ino: u64) -> u64 {
        if self.former.contains_key(&self.nodeid(ino)) {
            self.assigned_count += 1;
            self.assign(ASSIGNED_BASE + self.assigned_count, ino);
        }
        self.nodeid(ino)
    }

    /// Frees an inode's node id: the kernel has forgotten it.
    pub fn release(&mut self, ino: u64) {
        if let Some(number) = self.assigned.remove(&ino) {
            self.inode_of_assigned.remove(&number);
        }
    }

    /// Handles a FORGET. Returns the inode number; a former inode ends with its last lookup.
    pub fn forget(&mut self, number: u64, count: u64) -> Result<u64, ReusedNodeId> {
        let Some(former) = self.former.get_mut(&number) else { return self.resolve(number) };
        former.nlookup = former.nlookup.saturating_sub(count);
        let is_left = *former;
        if is_left.nlookup == 0 {
            self.remove(number);
        }
        Err(is_left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(generation: u64) -> NodeId {
        NodeId { ino: 7, generation }
    }

    #[test]
    fn node_id_means_the_old_inode_until_the_kernel_forgets_it() {
        let mut numbers = NodeIdMap::default();
        assert_eq!((numbers.assign_if_reused(7), numbers.resolve(7)), (7, Ok(7)));
        numbers.reuse(id(1), 2, None);
        assert!(matches!(numbers.resolve(7), Err(former) if former.id == id(1)));
        let second = numbers.assign_if_reused(7);
        assert_eq!(
            (second >= ASSIGNED_BASE, numbers.assign_if_reused(7), numbers.resolve(second)),
            (true, second, Ok(7))
        );
        numbers.reuse(id(2), 1, None);
        let third = numbers.assign_if_reused(7);
        assert!(third > second && numbers.resolve(second).is_err() && numbers.resolve(third) == Ok(7));
        let mut all = numbers.all_nodeids(7);
        all.sort_unstable();
        assert_eq!(all, [7, second, third]);
        assert!(numbers.forget(7, 1).is_err() && numbers.forget(second, 1).is_err());
        assert_eq!(numbers.forget(third, 1), Ok(7));
        numbers.release(7);
        assert!(numbers.resolve(7).is_err(), "forgotten twice");
        assert!(numbers.forget(7, 1).is_err());
        assert_eq!(numbers.forget(7, 1), Ok(7));
        assert!(numbers.is_identity() && numbers.reused_by_inode.is_empty());
    }

    /// A reply about the first inode comes after one about the second.
    #[test]
    fn inode_reported_reused_by_a_late_reply_gets_its_node_id_back() {
        let mut numbers = NodeIdMap::default();
        numbers.reuse(id(1), 2, None);
        assert_eq!(numbers.restore(id(2)), 0);
        let second = numbers.assign_if_reused(7);
        numbers.reuse(id(2), 3, None);
        assert_eq!((numbers.restore(id(1)), numbers.nodeid(7), numbers.resolve(7)), (2, 7, Ok(7)));
        assert!(numbers.resolve(second).is_err());
        numbers.reuse(id(1), 2, None);
        assert_eq!((numbers.restore(id(2)), numbers.nodeid(7), numbers.resolve(second)), (3, second, Ok(7)));
        assert!(matches!(numbers.resolve(7), Err(former) if former.id == id(1)));
    }

    #[test]
    fn inode_that_the_kernel_marked_dead_gets_another_node_id() {
        let mut numbers = NodeIdMap::default();
        numbers.alias(id(1), 2, None);
        assert_eq!(numbers.restore(id(1)), 0);
        let second = numbers.assign_if_reused(7);
        assert!(second >= ASSIGNED_BASE && numbers.resolve(second) == Ok(7) && numbers.resolve(7).is_err());
        assert!(numbers.forget(7, 2).is_err());
        numbers.release(7);
        assert!(numbers.is_identity() && numbers.assign_if_reused(7) == 7);
    }
}
