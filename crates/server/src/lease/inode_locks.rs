//! Inode locks. See docs/decisions/0008-leases.md, rule 3.
//!
//! A call that changes an inode holds the inode's lock shared, from the search for lease conflicts until the change
//! is done. A call that adds, moves or removes a name holds these exclusively: the directories, the inode behind the
//! name, and a replaced inode. So the conflicts found are still complete when the change is made. The locks are never
//! held while waiting for an acknowledgement. Reads do not take them, except for attributes of an open file that is
//! losing a name.

use nigh_lease::Object;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::OnceLock;

/// Striped locks on inodes: two inodes of one filesystem may share a lock. A call may hold one while it waits for a
/// hung filesystem, so filesystems share no locks, except those beyond the first 63.
///
/// **Order.** A call that holds no lock waits for several in stripe order. A call that holds a lock only tries for
/// another. Inode locks come before every other lock of the server.
pub(crate) struct InodeLocks {
    filesystems: Box<[OnceLock<Stripes>]>,
    filesystem_slots: RwLock<FxHashMap<u64, u32>>,
}

/// The stripes of one filesystem.
type Stripes = Box<[RwLock<()>]>;

const STRIPE_BITS: u32 = 10;
const FILESYSTEMS: u32 = 64;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum LockMode {
    Shared,
    Exclusive,
}

/// The inode locks of one call, released when dropped.
pub(crate) struct InodeLockSet<'a> {
    locks: &'a InodeLocks,
    wanted: BTreeMap<u32, LockMode>,
    held: BTreeMap<u32, Guard<'a>>,
    filesystem: Option<u64>,
}

#[allow(dead_code, reason = "held, not looked at")]
enum Guard<'a> {
    Shared(RwLockReadGuard<'a, ()>),
    Exclusive(RwLockWriteGuard<'a, ()>),
}

impl InodeLocks {
    pub(crate) fn new() -> InodeLocks {
        let filesystems = (0..FILESYSTEMS).map(|_| OnceLock::new()).collect();
        InodeLocks { filesystems, filesystem_slots: RwLock::default() }
    }

    pub(crate) fn empty_set(&self) -> InodeLockSet<'_> {
        InodeLockSet { locks: self, wanted: BTreeMap::new(), held: BTreeMap::new(), filesystem: None }
    }

    /// Returns the lock index of an object: the filesystem's number, with the stripe in the low bits.
    fn stripe(&self, object: Object) -> u32 {
        let known = self.filesystem_slots.read().get(&object.filesystem).copied();
        let filesystem = known.unwrap_or_else(|| {
            let mut met = self.filesystem_slots.write();
            let next = u32::try_from(met.len()).unwrap_or(u32::MAX).min(FILESYSTEMS - 1);
            // Filesystems beyond the last slot share it and get no number of their own.
            if next == FILESYSTEMS - 1 { next } else { *met.entry(object.filesystem).or_insert(next) }
        });
        let mut hasher = rustc_hash::FxHasher::default();
        object.hash(&mut hasher);
        let stripe = u32::try_from(hasher.finish() >> (u64::BITS - STRIPE_BITS)).unwrap_or(0);
        (filesystem << STRIPE_BITS) | stripe
    }

    fn lock(&self, stripe: u32) -> &RwLock<()> {
        let stripes = self.filesystems[(stripe >> STRIPE_BITS) as usize]
            .get_or_init(|| (0..1_u32 << STRIPE_BITS).map(|_| RwLock::new(())).collect());
        &stripes[(stripe & ((1 << STRIPE_BITS) - 1)) as usize]
    }
}

impl InodeLockSet<'_> {
    /// Locks an object without waiting. Where it is not free, returns false: the caller then discards what it has
    /// read, calls [`InodeLockSet::lock_all`] and starts again.
    #[must_use]
    pub(crate) fn try_lock(&mut self, object: Object, grip: LockMode) -> bool {
        self.filesystem.get_or_insert(object.filesystem);
        let stripe = self.locks.stripe(object);
        let wanted = self.wanted.entry(stripe).or_insert(grip);
        *wanted = grip.max(*wanted);
        match (self.held.get(&stripe), *wanted) {
            (Some(Guard::Exclusive(_)), _) | (Some(Guard::Shared(_)), LockMode::Shared) => return true,
            (Some(Guard::Shared(_)), LockMode::Exclusive) => return false,
            (None, _) => {}
        }
        let lock = self.locks.lock(stripe);
        let guard = match *wanted {
            LockMode::Shared => lock.try_read().map(Guard::Shared),
            LockMode::Exclusive => lock.try_write().map(Guard::Exclusive),
        };
        guard.map(|guard| self.held.insert(stripe, guard)).is_some()
    }

    /// The filesystem of the first locked object, which is the call's subject.
    pub(crate) fn filesystem(&self) -> Option<u64> {
        self.filesystem
    }

    pub(crate) fn release(&mut self) {
        self.held.clear();
        self.wanted.clear();
    }

    /// Releases all locks, then waits until all locks requested so far are held together.
    pub(crate) fn lock_all(&mut self) {
        self.held.clear();
        for (&stripe, grip) in &self.wanted {
            let lock = self.locks.lock(stripe);
            let guard = match grip {
                LockMode::Shared => Guard::Shared(lock.read()),
                LockMode::Exclusive => Guard::Exclusive(lock.write()),
            };
            self.held.insert(stripe, guard);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn object(ino: u64) -> Object {
        Object { filesystem: 1, ino, birth: 2 }
    }

    /// Two objects with different locks, and a third that shares the first one's lock.
    fn three() -> [Object; 3] {
        let (first, locks) = (object(1), InodeLocks::new());
        let stripe = locks.stripe(first);
        let other = (2..).map(object).find(|o| locks.stripe(*o) != stripe).unwrap();
        let same = (2..).map(object).find(|o| locks.stripe(*o) == stripe).unwrap();
        [first, other, same]
    }

    #[test]
    fn inode_lock_admits_shared_holders_or_one_exclusive_holder() {
        let [first, other, _] = three();
        let locks = InodeLocks::new();
        let (mut a, mut b) = (locks.empty_set(), locks.empty_set());
        assert!(a.try_lock(first, LockMode::Shared) && b.try_lock(first, LockMode::Shared));
        assert!(b.try_lock(other, LockMode::Exclusive));
        assert!(!a.try_lock(other, LockMode::Shared));
        drop(b);
        a.lock_all();
        assert!(a.try_lock(first, LockMode::Shared) && a.try_lock(other, LockMode::Shared));
    }

    #[test]
    fn objects_sharing_a_lock_stripe_do_not_deadlock() {
        let [first, _, same] = three();
        let locks = InodeLocks::new();
        let mut held = locks.empty_set();
        assert!(held.try_lock(first, LockMode::Shared));
        assert!(!held.try_lock(same, LockMode::Exclusive), "it is held shared: begin anew");
        held.lock_all();
        assert!(held.try_lock(first, LockMode::Shared) && held.try_lock(same, LockMode::Exclusive));
    }

    #[test]
    fn objects_of_different_filesystems_share_no_lock() {
        let locks = InodeLocks::new();
        let mut held = locks.empty_set();
        assert!((0..5_000).map(object).all(|object| {
            held.try_lock(object, LockMode::Exclusive) || {
                held.lock_all();
                held.try_lock(object, LockMode::Exclusive)
            }
        }));
        let mut other = locks.empty_set();
        assert!(
            (0..5_000)
                .all(|ino| other.try_lock(Object { filesystem: 2, ..object(ino) }, LockMode::Exclusive))
        );
        let many = |filesystem| Object { filesystem, ..object(1) };
        let shared: std::collections::BTreeSet<u32> =
            (10..1_000).map(|n| locks.stripe(many(n)) >> STRIPE_BITS).collect();
        assert_eq!(shared.len(), 62, "those that are met late share one place");
    }

    #[test]
    fn inode_locks_taken_in_different_orders_do_not_deadlock() {
        let locks = Arc::new(InodeLocks::new());
        let inside = Arc::new(AtomicU64::new(0));
        let workers: Vec<_> = (0..4_u64)
            .map(|number| {
                let (locks, inside) = (Arc::clone(&locks), Arc::clone(&inside));
                std::thread::spawn(move || {
                    for round in 0..2_000_u64 {
                        let mut wanted = [object(1), object(2), object(3)];
                        wanted.rotate_left(usize::try_from((number + round) % 3).unwrap());
                        let mut held = locks.empty_set();
                        while !wanted.iter().all(|o| held.try_lock(*o, LockMode::Exclusive)) {
                            held.lock_all();
                        }
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    }
}
