//! Locks on where inodes lie. See docs/decisions/0008-leases.md, rule 3.
//!
//! Whoever changes an inode holds it shared from looking which grants that makes false until it is done;
//! whoever moves, adds or removes a name holds exclusively the directories, what the name leads to, and what
//! stood there. So what was looked at is still so when the change is made. They are never held while waiting
//! for an acknowledgement. Readers do not take them, but for one of a file that is losing a name while it is open.

use nigh_native::lease::Object;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::OnceLock;

/// Locks on objects, striped: two objects of one filesystem may share one. A call that holds one may wait for its
/// filesystem for ever, so filesystems do not share any, but for those that are met behind the first 63.
///
/// **Order.** Several are waited for in the order of their stripes, with none held; with some held another is
/// only tried. They come before every other lock of the server.
pub(crate) struct PlaceLocks {
    filesystems: Box<[OnceLock<Stripes>]>,
    met: RwLock<FxHashMap<u64, u32>>,
}

/// Those of one filesystem.
type Stripes = Box<[RwLock<()>]>;

const STRIPE_BITS: u32 = 10;
const FILESYSTEMS: u32 = 64;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Grip {
    Shared,
    Exclusive,
}

/// Those that one call holds; dropping it lets go of all.
pub(crate) struct HeldPlaces<'a> {
    locks: &'a PlaceLocks,
    wanted: BTreeMap<u32, Grip>,
    held: BTreeMap<u32, Guard<'a>>,
    filesystem: Option<u64>,
}

#[allow(dead_code, reason = "held, not looked at")]
enum Guard<'a> {
    Shared(RwLockReadGuard<'a, ()>),
    Exclusive(RwLockWriteGuard<'a, ()>),
}

impl PlaceLocks {
    pub(crate) fn new() -> PlaceLocks {
        let filesystems = (0..FILESYSTEMS).map(|_| OnceLock::new()).collect();
        PlaceLocks { filesystems, met: RwLock::default() }
    }

    pub(crate) fn none_held(&self) -> HeldPlaces<'_> {
        HeldPlaces { locks: self, wanted: BTreeMap::new(), held: BTreeMap::new(), filesystem: None }
    }

    /// The number of an object's lock: that of its filesystem, and in the lower bits that of the stripe.
    fn stripe(&self, object: Object) -> u32 {
        let known = self.met.read().get(&object.filesystem).copied();
        let filesystem = known.unwrap_or_else(|| {
            let mut met = self.met.write();
            let next = u32::try_from(met.len()).unwrap_or(u32::MAX).min(FILESYSTEMS - 1);
            // Those behind the last place share it, and are not noted.
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

impl HeldPlaces<'_> {
    /// Takes hold of an object if that needs no waiting. Where it would, answers false: the caller forgets
    /// what it has looked at, calls [`HeldPlaces::wait`] and begins anew.
    #[must_use]
    pub(crate) fn take(&mut self, object: Object, grip: Grip) -> bool {
        self.filesystem.get_or_insert(object.filesystem);
        let stripe = self.locks.stripe(object);
        let wanted = self.wanted.entry(stripe).or_insert(grip);
        *wanted = grip.max(*wanted);
        match (self.held.get(&stripe), *wanted) {
            (Some(Guard::Exclusive(_)), _) | (Some(Guard::Shared(_)), Grip::Shared) => return true,
            (Some(Guard::Shared(_)), Grip::Exclusive) => return false,
            (None, _) => {}
        }
        let lock = self.locks.lock(stripe);
        let guard = match *wanted {
            Grip::Shared => lock.try_read().map(Guard::Shared),
            Grip::Exclusive => lock.try_write().map(Guard::Exclusive),
        };
        guard.map(|guard| self.held.insert(stripe, guard)).is_some()
    }

    /// That of the first object, which the call is about.
    pub(crate) fn filesystem(&self) -> Option<u64> {
        self.filesystem
    }

    pub(crate) fn let_go(&mut self) {
        self.held.clear();
        self.wanted.clear();
    }

    /// Lets go of all, and waits until all that was wanted so far is held together.
    pub(crate) fn wait(&mut self) {
        self.held.clear();
        for (&stripe, grip) in &self.wanted {
            let lock = self.locks.lock(stripe);
            let guard = match grip {
                Grip::Shared => Guard::Shared(lock.read()),
                Grip::Exclusive => Guard::Exclusive(lock.write()),
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

    /// Two objects that do not share a lock, and one that shares the first one's.
    fn three() -> [Object; 3] {
        let (first, locks) = (object(1), PlaceLocks::new());
        let stripe = locks.stripe(first);
        let other = (2..).map(object).find(|o| locks.stripe(*o) != stripe).unwrap();
        let same = (2..).map(object).find(|o| locks.stripe(*o) == stripe).unwrap();
        [first, other, same]
    }

    #[test]
    fn shared_holders_stand_together_and_an_exclusive_one_alone() {
        let [first, other, _] = three();
        let locks = PlaceLocks::new();
        let (mut a, mut b) = (locks.none_held(), locks.none_held());
        assert!(a.take(first, Grip::Shared) && b.take(first, Grip::Shared));
        assert!(b.take(other, Grip::Exclusive));
        assert!(!a.take(other, Grip::Shared));
        drop(b);
        a.wait();
        assert!(a.take(first, Grip::Shared) && a.take(other, Grip::Shared));
    }

    #[test]
    fn two_objects_under_one_lock_do_not_wait_for_each_other() {
        let [first, _, same] = three();
        let locks = PlaceLocks::new();
        let mut held = locks.none_held();
        assert!(held.take(first, Grip::Shared));
        assert!(!held.take(same, Grip::Exclusive), "it is held shared: begin anew");
        held.wait();
        assert!(held.take(first, Grip::Shared) && held.take(same, Grip::Exclusive));
    }

    #[test]
    fn objects_of_different_filesystems_share_no_lock() {
        let locks = PlaceLocks::new();
        let mut held = locks.none_held();
        assert!((0..5_000).map(object).all(|object| {
            held.take(object, Grip::Exclusive) || {
                held.wait();
                held.take(object, Grip::Exclusive)
            }
        }));
        let mut other = locks.none_held();
        assert!((0..5_000).all(|ino| other.take(Object { filesystem: 2, ..object(ino) }, Grip::Exclusive)));
        let many = |filesystem| Object { filesystem, ..object(1) };
        let shared: std::collections::BTreeSet<u32> =
            (10..1_000).map(|n| locks.stripe(many(n)) >> STRIPE_BITS).collect();
        assert_eq!(shared.len(), 62, "those that are met late share one place");
    }

    #[test]
    fn those_who_want_the_same_in_another_order_all_come_through() {
        let locks = Arc::new(PlaceLocks::new());
        let inside = Arc::new(AtomicU64::new(0));
        let workers: Vec<_> = (0..4_u64)
            .map(|number| {
                let (locks, inside) = (Arc::clone(&locks), Arc::clone(&inside));
                std::thread::spawn(move || {
                    for round in 0..2_000_u64 {
                        let mut wanted = [object(1), object(2), object(3)];
                        wanted.rotate_left(usize::try_from((number + round) % 3).unwrap());
                        let mut held = locks.none_held();
                        while !wanted.iter().all(|o| held.take(*o, Grip::Exclusive)) {
                            held.wait();
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
