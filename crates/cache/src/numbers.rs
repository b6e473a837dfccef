//! The numbers by which the kernel knows inodes.
//!
//! FUSE names a node by its number alone. A kernel that is told of another generation or kind under a number takes it for one that was
//! used again, and every call that has got hold of the old inode fails with EIO from then on, also one that is about to use it
//! (`fuse_stale_inode`, `fuse_make_bad`). So a number that another inode has taken at the remote goes on meaning the old one for as long
//! as the kernel remembers that, and the new one is told under one of ours. What applications see is the inode's own.

use nigh_types::{Attr, NodeId};
use rustc_hash::FxHashMap;

/// Ours are from here on; none is given twice (docs/decisions/0001-node-ids.md).
const OURS: u64 = (1 << 63) - (1 << 49);

/// Numbers that are not those of the inodes that they mean, and the other way round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Numbers {
    /// By inode: one of ours that means it;
    ours: FxHashMap<u64, u64>,
    /// by that: the inode.
    meant: FxHashMap<u64, u64>,
    /// By number: inodes that are gone;
    former: FxHashMap<u64, Former>,
    /// by the inode that has theirs now: these numbers.
    left: FxHashMap<u64, Vec<u64>>,
    given: u64,
}

/// An inode whose own number another has taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Former {
    pub id: NodeId,
    /// How often the kernel was told of it and has not forgotten.
    lookups: u64,
    /// The kernel takes it for removed (`S_DEAD`), whatever has the number at the remote.
    is_dead: bool,
    /// Of a directory that an own change removed: what a process that is still in it sees ([`crate::removed`]).
    gone: Option<Attr>,
}

impl Numbers {
    /// Whether a number is one of ours, be it that an earlier mount gave it.
    pub fn gave(number: u64) -> bool {
        (OURS..1 << 63).contains(&number)
    }

    /// All inodes are known by their own numbers.
    pub fn are_their_own(&self) -> bool {
        self.ours.is_empty() && self.former.is_empty()
    }

    /// By which the kernel knows an inode.
    pub fn of(&self, ino: u64) -> u64 {
        self.ours.get(&ino).copied().unwrap_or(ino)
    }

    /// The inode that a number means.
    pub fn meant(&self, number: u64) -> Result<u64, Former> {
        match self.former.get(&number) {
            Some(former) => Err(*former),
            None => Ok(self.meant.get(&number).copied().unwrap_or(number)),
        }
    }

    /// By which the kernel knows an inode and those that had its number before.
    pub fn all_of(&self, ino: u64) -> Vec<u64> {
        std::iter::once(self.of(ino)).chain(self.left.get(&ino).into_iter().flatten().copied()).collect()
    }

    /// Another inode has taken the number of one of which the kernel was told so often.
    pub fn pass(&mut self, id: NodeId, lookups: u64, gone: Option<Attr>) {
        self.part(Former { id, lookups, is_dead: false, gone });
    }

    /// The attributes of a removed directory that had this number.
    pub fn removed(&mut self, number: u64) -> Option<&mut Attr> {
        self.former.get_mut(&number)?.gone.as_mut()
    }

    /// The kernel takes an inode for removed that is not, or had the same id as one that is: replies name it by another number from now on.
    pub fn bury(&mut self, id: NodeId, lookups: u64, gone: Option<Attr>) {
        self.part(Former { id, lookups, is_dead: true, gone });
    }

    fn part(&mut self, former: Former) {
        let id = former.id;
        let number = self.of(id.ino);
        self.leave(id.ino);
        self.former.insert(number, former);
        self.left.entry(id.ino).or_default().push(number);
    }

    /// It is that one after all: an answer about another was late. How often the kernel was told of it.
    pub fn take_back(&mut self, id: NodeId) -> u64 {
        let is_it = |former: &Former| former.id == id && !former.is_dead;
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

    /// How often the kernel was told of it.
    fn remove(&mut self, number: u64) -> u64 {
        let Some(Former { id, lookups, .. }) = self.former.remove(&number) else { return 0 };
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

    /// By which the kernel is to be told of an inode that it does not know.
    pub fn begin(&mut self, ino: u64) -> u64 {
        if self.former.contains_key(&self.of(ino)) {
            self.given += 1;
            self.mean(OURS + self.given, ino);
        }
        self.of(ino)
    }

    /// The kernel has forgotten what it was told of an inode.
    pub fn leave(&mut self, ino: u64) {
        if let Some(number) = self.ours.remove(&ino) {
            self.meant.remove(&number);
        }
    }

    /// The kernel forgets a number so often. The inode that it means; one that is gone is forgotten with that.
    pub fn forget(&mut self, number: u64, count: u64) -> Result<u64, Former> {
        let Some(former) = self.former.get_mut(&number) else { return self.meant(number) };
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
    fn a_number_means_who_had_it_until_that_is_forgotten() {
        let mut numbers = Numbers::default();
        assert_eq!((numbers.begin(7), numbers.meant(7)), (7, Ok(7)));
        numbers.pass(id(1), 2, None);
        assert!(matches!(numbers.meant(7), Err(former) if former.id == id(1)));
        let second = numbers.begin(7);
        assert_eq!((second >= OURS, numbers.begin(7), numbers.meant(second)), (true, second, Ok(7)));
        numbers.pass(id(2), 1, None);
        let third = numbers.begin(7);
        assert!(third > second && numbers.meant(second).is_err() && numbers.meant(third) == Ok(7));
        let mut all = numbers.all_of(7);
        all.sort_unstable();
        assert_eq!(all, [7, second, third]);
        assert!(numbers.forget(7, 1).is_err() && numbers.forget(second, 1).is_err());
        assert_eq!(numbers.forget(third, 1), Ok(7));
        numbers.leave(7);
        assert!(numbers.meant(7).is_err(), "it was told of that twice");
        assert!(numbers.forget(7, 1).is_err());
        assert_eq!(numbers.forget(7, 1), Ok(7));
        assert!(numbers.are_their_own() && numbers.left.is_empty());
    }

    /// An answer about the first comes after one about the second.
    #[test]
    fn who_has_its_number_after_all_is_known_as_before() {
        let mut numbers = Numbers::default();
        numbers.pass(id(1), 2, None);
        assert_eq!(numbers.take_back(id(2)), 0);
        let second = numbers.begin(7);
        numbers.pass(id(2), 3, None);
        assert_eq!((numbers.take_back(id(1)), numbers.of(7), numbers.meant(7)), (2, 7, Ok(7)));
        assert!(numbers.meant(second).is_err());
        numbers.pass(id(1), 2, None);
        assert_eq!((numbers.take_back(id(2)), numbers.of(7), numbers.meant(second)), (3, second, Ok(7)));
        assert!(matches!(numbers.meant(7), Err(former) if former.id == id(1)));
    }

    #[test]
    fn what_the_kernel_takes_for_removed_is_told_under_another_number_for_good() {
        let mut numbers = Numbers::default();
        numbers.bury(id(1), 2, None);
        assert_eq!(numbers.take_back(id(1)), 0);
        let second = numbers.begin(7);
        assert!(second >= OURS && numbers.meant(second) == Ok(7) && numbers.meant(7).is_err());
        assert!(numbers.forget(7, 2).is_err());
        numbers.leave(7);
        assert!(numbers.are_their_own() && numbers.begin(7) == 7);
    }
}
