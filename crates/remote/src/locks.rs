//! Minimal file locks, for the fake and for servers of a tree with one client.

use nigh_types::{Call, CallId, Errno, LockInfo, LockKind, LockRanges, NodeId, Reply};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// All locks of one server. It does not detect deadlocks.
#[derive(Clone, Default, Debug)]
pub struct Locks {
    held: BTreeMap<Owner, LockRanges>,
    /// Reclaimable locks of lost sessions, until a conflicting lock is granted.
    left: BTreeMap<Owner, LockRanges>,
    /// In order of arrival.
    waits: Vec<(Lock, CallId)>,
}

/// An owner of locks on a file. flock(2) and fcntl(2) locks do not conflict.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Owner {
    node: NodeId,
    flock: bool,
    session: u64,
    owner: u64,
}

#[derive(Clone, Copy, Debug)]
struct Lock {
    of: Owner,
    range: LockInfo,
}

/// A call of a session, and its reply that is due now.
pub type Answered = (u64, CallId, Result<Reply, Errno>);

impl Locks {
    /// Executes a call on the existing inode `node`. Returns the calls that get a reply now, this one last.
    ///
    /// # Panics
    /// If the call is not about locks.
    pub fn execute(&mut self, session: u64, call: CallId, node: NodeId, what: &Call) -> Vec<Answered> {
        let lock = |owner, flock, kind, (start, end), pid| {
            let (start, end) = if flock { (0, u64::MAX) } else { (start, end) };
            Lock { of: Owner { node, flock, session, owner }, range: LockInfo { kind, start, end, pid } }
        };
        let mut answered = Vec::new();
        let result = match *what {
            Call::Lock { owner, flock, kind, start, end, wait, pid, reclaim, .. } => {
                let wanted = lock(owner, flock, kind, (start, end), pid);
                if reclaim && !self.is_reclaimable(&wanted) {
                    Err(Errno::AGAIN)
                } else if self.conflicting(&wanted).is_none() {
                    self.set(wanted);
                    Ok(Reply::Done)
                } else if wait {
                    self.waits.push((wanted, call));
                    return answered;
                } else {
                    Err(Errno::AGAIN)
                }
            }
            Call::Unlock { owner, flock, start, end, .. } => {
                let Lock { of, range } = lock(owner, flock, LockKind::Read, (start, end), 0);
                if let Some(held) = self.held.get_mut(&of) {
                    held.clear(range.start, range.end);
                    if held.is_empty() {
                        self.held.remove(&of);
                    }
                }
                Ok(Reply::Done)
            }
            Call::GetLock { owner, flock, kind, start, end, .. } => {
                let wanted = lock(owner, flock, kind, (start, end), 0);
                Ok(Reply::LockConflict(self.conflicting(&wanted)))
            }
            _ => panic!("{} is not about locks", what.type_name()),
        };
        self.grant_waiting(&mut answered);
        answered.push((session, call, result));
        answered
    }

    /// The strongest lock held on a file, of either kind and by any owner.
    #[must_use]
    pub fn strongest(&self, node: NodeId) -> Option<LockKind> {
        let spaces = [false, true].into_iter().flat_map(|flock| self.held.range(owners(node, flock)));
        spaces.flat_map(|(_, held)| held.iter()).map(|lock| lock.kind).max()
    }

    /// Drops all locks of a file, without notice to their owners.
    pub fn drop_of_file(&mut self, node: NodeId) {
        self.held.retain(|of, _| of.node != node);
    }

    /// Cancels a waiting lock call. Returns false if the call does not wait.
    pub fn cancel(&mut self, session: u64, call: CallId) -> bool {
        let before = self.waits.len();
        self.waits.retain(|(lock, waiting)| (lock.of.session, *waiting) != (session, call));
        self.waits.len() < before
    }

    /// Drops a lost session as [`Locks::end`] does, but keeps its locks reclaimable until [`Locks::end_reclaim`], or
    /// until a conflicting lock is granted.
    pub fn forget(&mut self, session: u64) -> Vec<Answered> {
        for (of, held) in self.held.iter().filter(|(of, _)| of.session == session) {
            self.left.entry(*of).or_default().lay_over(held);
        }
        self.free(session)
    }

    /// Ends a session's reclaim.
    pub fn end_reclaim(&mut self, session: u64) {
        self.left.retain(|of, _| of.session != session);
    }

    /// Ends a session. Returns the calls of other sessions that get a reply by this.
    pub fn end(&mut self, session: u64) -> Vec<Answered> {
        self.end_reclaim(session);
        self.free(session)
    }

    fn free(&mut self, session: u64) -> Vec<Answered> {
        self.held.retain(|of, _| of.session != session);
        self.waits.retain(|(lock, _)| lock.of.session != session);
        let mut answered = Vec::new();
        self.grant_waiting(&mut answered);
        answered
    }

    /// The first lock of another owner that conflicts.
    fn conflicting(&self, wanted: &Lock) -> Option<LockInfo> {
        let Lock { of, range: LockInfo { kind, start, end, .. } } = *wanted;
        let others = self.held.range(owners(of.node, of.flock)).filter(|(owner, _)| **owner != of);
        others.filter_map(|(_, held)| held.first_conflict(start, end, kind)).min_by_key(|lock| lock.start)
    }

    /// Whether the owner can reclaim the whole range, in this mode or a stronger one.
    fn is_reclaimable(&self, wanted: &Lock) -> bool {
        let LockInfo { kind, start, end, .. } = wanted.range;
        self.left.get(&wanted.of).is_some_and(|left| left.covers(start, end, kind))
    }

    fn set(&mut self, lock: Lock) {
        let Lock { of, range: LockInfo { kind, start, end, .. } } = lock;
        self.held.entry(of).or_default().set(lock.range);
        for (owner, left) in self.left.range_mut(owners(of.node, of.flock)) {
            if *owner == of {
                left.clear(start, end);
            } else {
                left.clear_conflicts(start, end, kind);
            }
        }
    }

    fn grant_waiting(&mut self, answered: &mut Vec<Answered>) {
        while let Some(at) = self.waits.iter().position(|(lock, _)| self.conflicting(lock).is_none()) {
            let (lock, call) = self.waits.remove(at);
            self.set(lock);
            answered.push((lock.of.session, call, Ok(Reply::Done)));
        }
    }
}

/// All owners of fcntl(2) or flock(2) locks on a file.
fn owners(node: NodeId, flock: bool) -> RangeInclusive<Owner> {
    let at = |number| Owner { node, flock, session: number, owner: number };
    at(0)..=at(u64::MAX)
}
