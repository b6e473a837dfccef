//! Dentry leases: single names of a directory, each under its own grant, from a remote that cannot grant a whole
//! directory.
//!
//! They stand beside the directory entries, which are under the directory lease. If both are live and disagree, the
//! entries are dropped.

use crate::grants::LiveGrant;
use nigh_types::{Name, NodeId, Time};
use std::collections::BTreeMap;

/// Inode that a name leads to (`None`: the name does not exist), with its grant.
pub(crate) type LeasedDentry = (Option<NodeId>, LiveGrant);

/// Dentry leases of one directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct DentryLeases {
    names: BTreeMap<Name, LeasedDentry>,
    heap: u64,
    /// Above this size `put` sweeps expired dentries.
    sweep_above: usize,
}

const SWEEP_MIN: usize = 64;
/// Bytes for each dentry beside its name, in a B-tree that is two thirds full.
const ENTRY_BYTES: u64 = (size_of::<(Name, LeasedDentry)>() * 3 / 2) as u64;

impl DentryLeases {
    /// Returns the dentry under a live grant.
    pub fn get(&self, now: Time, name: &Name) -> Option<LeasedDentry> {
        self.names.get(name).copied().filter(|(_, held)| held.is_live(now))
    }

    pub fn put(&mut self, now: Time, name: &Name, single: LeasedDentry) {
        if self.names.insert(name.clone(), single).is_none() {
            self.heap += name.as_bytes().len() as u64;
        }
        if self.names.len() > self.sweep_above.max(SWEEP_MIN) {
            self.retain(|_, (_, held)| held.is_live(now));
            self.sweep_above = self.names.len() * 2;
        }
    }

    pub fn remove(&mut self, name: &Name) {
        if self.names.remove(name).is_some() {
            self.heap -= name.as_bytes().len() as u64;
        }
    }

    pub fn retain(&mut self, mut is_kept: impl FnMut(&Name, &LeasedDentry) -> bool) {
        self.names.retain(|name, single| is_kept(name, single));
        self.heap = self.names.keys().map(|name| name.as_bytes().len() as u64).sum();
    }

    /// Keeps serving dentries whose grants have ended ([`crate::OnDisconnect::Stale`]).
    pub fn keep_as_stale(&mut self) {
        self.names.values_mut().for_each(|(_, held)| *held = held.into_stale());
    }

    /// Returns all names, expired or not.
    pub fn names(&self) -> impl Iterator<Item = &Name> {
        self.names.keys()
    }

    /// Returns the names whose grants have no deadline.
    pub fn names_without_deadline(&self) -> impl Iterator<Item = &Name> {
        self.names.iter().filter(|(_, (_, held))| held.deadline == Time::FAR).map(|(name, _)| name)
    }

    pub fn clear(&mut self) {
        *self = DentryLeases::default();
    }

    /// Returns the inodes that names lead to.
    pub fn inodes(&self) -> impl Iterator<Item = NodeId> {
        self.names.values().filter_map(|(id, _)| *id)
    }

    /// Returns the number of names that exist and of names that do not.
    pub fn count(&self) -> (u64, u64) {
        let there = self.inodes().count() as u64;
        (there, self.names.len() as u64 - there)
    }

    /// Returns the memory in use, in bytes.
    pub fn bytes(&self) -> u64 {
        self.names.len() as u64 * ENTRY_BYTES + self.heap
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::{Grant, GrantId, LeaseScope, Mode, Span, Term};

    fn held(secs: u64) -> LiveGrant {
        let (node, covers) = (NodeId { ino: 1, generation: 1 }, LeaseScope::NegativeDentry);
        let term = Term::Limited(Span::from_secs(secs));
        let grant =
            Grant { id: GrantId(1), node, covers, mode: Mode::Read, term, recallable: false, shared: false };
        LiveGrant::begin(&grant, Time(0))
    }

    fn at(secs: u64) -> Time {
        Time(0).after(Span::from_secs(secs))
    }

    #[test]
    fn dentry_lease_ends_at_its_own_deadline() {
        let mut dentry_leases = DentryLeases::default();
        let name = |text: &str| Name::new(text.as_bytes()).unwrap();
        dentry_leases.put(at(0), &name("a"), (None, held(1)));
        dentry_leases.put(at(0), &name("b"), (Some(NodeId { ino: 9, generation: 1 }), held(3)));
        assert_eq!(dentry_leases.get(at(0), &name("a")).map(|single| single.0), Some(None));
        assert_eq!(dentry_leases.get(at(1), &name("a")), None);
        assert!(
            dentry_leases.get(at(2), &name("b")).is_some() && dentry_leases.get(at(3), &name("b")).is_none()
        );
        assert_eq!(dentry_leases.count(), (1, 1));
        dentry_leases.remove(&name("b"));
        assert_eq!(dentry_leases.count(), (0, 1));
    }

    #[test]
    fn expired_dentry_leases_are_swept() {
        let mut dentry_leases = DentryLeases::default();
        for n in 0..10_000u64 {
            let name = Name::new(format!("name-{n}").as_bytes()).unwrap();
            let now = at(n);
            let (id, mut single) = (None, held(1));
            single.deadline = now.after(Span::from_secs(1));
            dentry_leases.put(now, &name, (id, single));
        }
        assert!(dentry_leases.count().1 <= 2 * SWEEP_MIN as u64, "{:?}", dentry_leases.count());
        assert!(dentry_leases.bytes() < 40_000, "{}", dentry_leases.bytes());
    }
}
