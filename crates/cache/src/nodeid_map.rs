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
const OURS: u64 = (1 << 63) - (1 << 49);

/// Map between inode numbers and node ids where they differ.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeIdMap {
    /// Node id of our own range, by inode number;
    ours: FxHashMap<u64, u64>,
    /// inode number, by that node id.
    meant: FxHashMap<u64, u64>,
    /// Inodes that are gone, by node id;
    former: FxHashMap<u64, ReusedNodeId>,
    /// and their node ids, by inode number.
    left: FxHashMap<u64, Vec<u64>>,
    given: u64,
}

/// Inode whose number another inode has taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReusedNodeId {
    pub id: NodeId,
    /// The kernel's lookup count.
    lookups: u64,
    /// The kernel takes it for removed (`S_DEAD`), whatever has the number at the remote.
    is_dead: bool,
    /// Attributes of a directory that a local change removed, for processes that are still in it ([`crate::on_remove_reply`]).
    gone: Option<Attr>,
}

impl NodeIdMap {
    /// Returns whether a node id is from our own range, even if an earlier mount assigned it.
    pub fn gave(number: u64) -> bool {
        (OURS..1 << 63).contains(&number)
    }

    /// Returns whether all node ids equal the inode numbers.
    pub fn are_their_own(&self) -> bool {
        self.ours.is_empty() && self.former.is_empty()
    }

    /// Returns an inode's node id.
    pub fn of(&self, ino: u64) -> u64 {
        self.ours.get(&ino).copied().unwrap_or(ino)
    }

    /// Returns the inode number that a node id stands for.
    pub fn resolve(&self, number: u64) -> Result<u64, ReusedNodeId> {
        match self.former.get(&number) {
            Some(former) => Err(*former),
            None => Ok(self.meant.get(&number).copied().unwrap_or(number)),
        }
    }

    /// Returns an inode's node id and those of earlier inodes with its number.
    pub fn all_of(&self, ino: u64) -> Vec<u64> {
        std::iter::once(self.of(ino)).chain(self.left.get(&ino).into_iter().flatten().copied()).collect()
    }

    /// Records that another inode has taken the number of this one, with its lookup count.
    pub fn pass(&mut self, id: NodeId, lookups: u64, gone: Option<Attr>) {
        self.part(ReusedNodeId { id, lookups, is_dead: false, gone });
    }

    /// Returns the attributes of a removed directory with this node id.
    pub fn removed(&mut self, number: u64) -> Option<&mut Attr> {
        self.former.get_mut(&number)?.gone.as_mut()
    }

    /// Gives another node id to an inode that the kernel takes for removed, or that has the id of a removed one.
    pub fn bury(&mut self, id: NodeId, lookups: u64, gone: Option<Attr>) {
        self.part(ReusedNodeId { id, lookups, is_dead: true, gone });
    }

    fn part(&mut self, former: ReusedNodeId) {
        let id = former.id;
        let number = self.of(id.ino);
        self.leave(id.ino);
        self.former.insert(number, former);
        self.left.entry(id.ino).or_default().push(number);
    }

    /// Restores an inode whose reuse was reported by a late reply. Returns its lookup count.
    pub fn take_back(&mut self, id: NodeId) -> u64 {
        let is_it = |former: &ReusedNodeId| former.id == id && !former.is_dead;
        let is_its = |number: &&u64| self.former.get(number).is_some_and(is_it);
        let Some(&number) = self.left.get(&id.ino).and_then(|left| left.iter().find(is_its)) else {
            return 0;
        };
        let lookups = self.remove(number);
        if number != id.ino {
            self.mean(number, id.ino);
        }
        lookups
    }

    /// Removes a former inode. Returns its lookup count.
    fn remove(&mut self, number: u64) -> u64 {
        let Some(ReusedNodeId { id, lookups, .. }) = self.former.remove(&number) else { return 0 };
        if let Some(left) = self.left.get_mut(&id.ino) {
            left.retain(|other| *other != number);
            if left.is_empty() {
                self.left.remove(&id.ino);
            }
        }
        lookups
    }

    fn mean(&mut self, number: u64, ino: u64) {
        self.ours.insert(ino, number);
        self.meant.insert(number, ino);
    }

    /// Returns the node id for an inode that the kernel does not know.
    pub fn begin(&mut self, ino: u64) -> u64 {
        if self.former.contains_key(&self.of(ino)) {
            self.given += 1;
            self.mean(OURS + self.given, ino);
        }
        self.of(ino)
    }

    /// Frees an inode's node id: the kernel has forgotten it.
    pub fn leave(&mut self, ino: u64) {
        if let Some(number) = self.ours.remove(&ino) {
            self.meant.remove(&number);
        }
    }

    /// Handles a FORGET. Returns the inode number; a former inode ends with its last lookup.
    pub fn forget(&mut self, number: u64, count: u64) -> Result<u64, ReusedNodeId> {
        let Some(former) = self.former.get_mut(&number) else { return self.resolve(number) };
        former.lookups = former.lookups.saturating_sub(count);
        let is_left = *former;
        if is_left.lookups == 0 {
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
        assert_eq!((numbers.begin(7), numbers.resolve(7)), (7, Ok(7)));
        numbers.pass(id(1), 2, None);
        assert!(matches!(numbers.resolve(7), Err(former) if former.id == id(1)));
        let second = numbers.begin(7);
        assert_eq!((second >= OURS, numbers.begin(7), numbers.resolve(second)), (true, second, Ok(7)));
        numbers.pass(id(2), 1, None);
        let third = numbers.begin(7);
        assert!(third > second && numbers.resolve(second).is_err() && numbers.resolve(third) == Ok(7));
        let mut all = numbers.all_of(7);
        all.sort_unstable();
        assert_eq!(all, [7, second, third]);
        assert!(numbers.forget(7, 1).is_err() && numbers.forget(second, 1).is_err());
        assert_eq!(numbers.forget(third, 1), Ok(7));
        numbers.leave(7);
        assert!(numbers.resolve(7).is_err(), "forgotten twice");
        assert!(numbers.forget(7, 1).is_err());
        assert_eq!(numbers.forget(7, 1), Ok(7));
        assert!(numbers.are_their_own() && numbers.left.is_empty());
    }

    /// A reply about the first inode comes after one about the second.
    #[test]
    fn inode_reported_reused_by_a_late_reply_gets_its_node_id_back() {
        let mut numbers = NodeIdMap::default();
        numbers.pass(id(1), 2, None);
        assert_eq!(numbers.take_back(id(2)), 0);
        let second = numbers.begin(7);
        numbers.pass(id(2), 3, None);
        assert_eq!((numbers.take_back(id(1)), numbers.of(7), numbers.resolve(7)), (2, 7, Ok(7)));
        assert!(numbers.resolve(second).is_err());
        numbers.pass(id(1), 2, None);
        assert_eq!((numbers.take_back(id(2)), numbers.of(7), numbers.resolve(second)), (3, second, Ok(7)));
        assert!(matches!(numbers.resolve(7), Err(former) if former.id == id(1)));
    }

    #[test]
    fn inode_that_the_kernel_marked_dead_gets_another_node_id() {
        let mut numbers = NodeIdMap::default();
        numbers.bury(id(1), 2, None);
        assert_eq!(numbers.take_back(id(1)), 0);
        let second = numbers.begin(7);
        assert!(second >= OURS && numbers.resolve(second) == Ok(7) && numbers.resolve(7).is_err());
        assert!(numbers.forget(7, 2).is_err());
        numbers.leave(7);
        assert!(numbers.are_their_own() && numbers.begin(7) == 7);
    }
}
