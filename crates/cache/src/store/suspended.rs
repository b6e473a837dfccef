//! Facts that an update in progress has suspended.

use crate::op::{Caller, Op};
use nigh_types::{LeaseScope, Name, OpId, RecallId, Span, Time, UpdatePrepare, UpdateScope};
use std::collections::{BTreeMap, BTreeSet};

/// Upper bound on a listing's wait for a commit. Then the directory is given back and listed anew, for which the remote
/// waits for no client.
const LISTINGS_WAIT: Span = Span::from_millis(1_000);

/// Suspended facts. Several updates may suspend one fact; it is free when all of them are committed
/// and no lookup of a name without a committed value is in flight.
#[derive(Clone, Debug, Default)]
pub(crate) struct SuspendedFacts {
    open: BTreeMap<RecallId, Vec<UpdateScope>>,
    names: BTreeMap<u64, BTreeMap<Name, u64>>,
    inodes: BTreeMap<u64, u64>,
    /// Requests for listings, by the directory that they wait for.
    waiting: BTreeMap<OpId, (u64, Caller, Op)>,
    /// Since when listings of a directory wait.
    since: BTreeMap<u64, Time>,
    /// Names without a value in the commit, which are being looked up.
    being_looked_up: BTreeSet<(u64, Name)>,
    /// Names whose dentries the notifier expires or invalidates: the kernel looks them up again.
    expired: BTreeSet<(u64, Name)>,
}

impl SuspendedFacts {
    pub fn has_name(&self, dir: u64, name: &Name) -> bool {
        self.names.get(&dir).is_some_and(|names| names.contains_key(name))
    }

    /// Returns whether a name of the directory is suspended.
    pub fn has_names(&self, dir: u64) -> bool {
        self.names.contains_key(&dir)
    }

    pub fn has_inode(&self, ino: u64) -> bool {
        self.inodes.contains_key(&ino)
    }

    /// Returns the requests that wait for commits.
    pub fn waiting(&self) -> impl Iterator<Item = &Op> {
        self.waiting.values().map(|(_, _, op)| op)
    }

    /// Returns the requests that wait for names of a directory.
    pub fn waiting_for(&self, dir: u64) -> impl Iterator<Item = OpId> {
        self.waiting.iter().filter(move |(_, (at, ..))| *at == dir).map(|(op, _)| *op)
    }

    /// Returns when a directory is given back because listings wait for its commits.
    pub fn due(&self) -> Option<Time> {
        self.since.values().min().map(|since| since.after(LISTINGS_WAIT))
    }

    /// Removes a waiting request that is answered otherwise. Returns whether it waited.
    pub fn abort(&mut self, op: OpId) -> bool {
        let Some((dir, ..)) = self.waiting.remove(&op) else { return false };
        self.forget_if_idle(dir);
        true
    }

    pub fn forget_if_idle(&mut self, dir: u64) {
        if !self.waiting.values().any(|(at, ..)| *at == dir) {
            self.since.remove(&dir);
        }
    }

    pub fn begin(&mut self, hold: UpdatePrepare) {
        for held in &hold.facts {
            let ino = held.node.ino;
            match held.covers {
                LeaseScope::Directory => {
                    let names = self.names.entry(ino).or_default();
                    held.names.iter().for_each(|name| *names.entry(name.clone()).or_default() += 1);
                }
                LeaseScope::Attributes => *self.inodes.entry(ino).or_default() += 1,
                LeaseScope::Data | LeaseScope::Dentry | LeaseScope::NegativeDentry => {}
            }
        }
        self.open.insert(hold.id, hold.facts);
    }

    /// Ends an update. Returns the facts that it suspended; `None`: it is of an earlier session.
    pub fn end(&mut self, id: RecallId) -> Option<Vec<UpdateScope>> {
        let facts = self.open.remove(&id)?;
        for held in &facts {
            let ino = held.node.ino;
            match held.covers {
                LeaseScope::Directory => held.names.iter().for_each(|name| self.leave_name(ino, name)),
                LeaseScope::Attributes => leave(&mut self.inodes, &ino),
                LeaseScope::Data | LeaseScope::Dentry | LeaseScope::NegativeDentry => {}
            }
        }
        Some(facts)
    }

    /// Returns a directory whose listings have waited for long enough.
    pub fn overdue(&self, now: Time) -> Option<u64> {
        let over = |since: &Time| since.after(LISTINGS_WAIT) <= now;
        self.since.iter().find(|(_, since)| over(since)).map(|(dir, _)| *dir)
    }

    /// Suspends a name until the remote has replied to a lookup of it.
    pub fn begin_lookup(&mut self, dir: u64, name: &Name) {
        if self.being_looked_up.insert((dir, name.clone())) {
            *self.names.entry(dir).or_default().entry(name.clone()).or_default() += 1;
        }
    }

    /// Ends that suspension. Returns whether the name was asked for.
    pub fn end_lookup(&mut self, dir: u64, name: &Name) -> bool {
        let asked = self.being_looked_up.remove(&(dir, name.clone()));
        if asked {
            self.leave_name(dir, name);
        }
        asked
    }

    fn leave_name(&mut self, dir: u64, name: &Name) {
        let Some(names) = self.names.get_mut(&dir) else { return };
        leave(names, name);
        if names.is_empty() {
            self.names.remove(&dir);
        }
    }

    /// Takes the waiting listings of a directory, to begin them again.
    pub fn take_waiting(&mut self, of: u64) -> Vec<(OpId, Caller, Op)> {
        let (taken, left) =
            std::mem::take(&mut self.waiting).into_iter().partition(|(_, (dir, ..))| *dir == of);
        let taken: BTreeMap<OpId, (u64, Caller, Op)> = taken;
        self.waiting = left;
        taken.into_iter().map(|(id, (_, caller, op))| (id, caller, op)).collect()
    }

    /// Makes a listing wait for the commit of a suspended name.
    pub fn wait(&mut self, now: Time, id: OpId, caller: Caller, dir: u64, op: Op) {
        self.since.entry(dir).or_insert(now);
        self.waiting.insert(id, (dir, caller, op));
    }

    /// Ends the waits for a directory that is given back; those that begin again count from then.
    pub fn give_up(&mut self, dir: u64) {
        self.since.remove(&dir);
    }

    /// Records a name whose dentry the notifier expires or invalidates.
    pub fn note_expired(&mut self, dir: u64, name: &Name) {
        self.expired.insert((dir, name.clone()));
    }

    pub fn take_expired(&mut self, name: &(u64, Name)) -> bool {
        self.expired.remove(name)
    }

    /// Drops all updates, since all grants have ended. Returns the requests that waited.
    pub fn clear(&mut self) -> BTreeMap<OpId, (Caller, Op)> {
        let waiting = std::mem::take(self).waiting;
        waiting.into_iter().map(|(id, (_, caller, op))| (id, (caller, op))).collect()
    }
}

fn leave<K: Ord>(counts: &mut BTreeMap<K, u64>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}
