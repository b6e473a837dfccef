//! Minimal file locks, for the fake and for servers of a tree with one client.

use nigh_types::{Call, CallId, Errno, LockInfo, LockKind, NodeId, Reply};

/// All locks of one server. It does not detect deadlocks.
#[derive(Clone, Default, Debug)]
pub struct Locks {
    held: Vec<Lock>,
    /// Reclaimable locks of lost sessions, until a conflicting lock is granted.
    left: Vec<Lock>,
    /// In order of arrival.
    waits: Vec<(Lock, CallId)>,
}

#[derive(Clone, Copy, Debug)]
struct Lock {
    session: u64,
    node: NodeId,
    flock: bool,
    owner: u64,
    kind: LockKind,
    start: u64,
    end: u64,
    pid: u32,
}

/// A call of a session, and its reply that is due now.
pub type Answered = (u64, CallId, Result<Reply, Errno>);

impl Lock {
    fn is_owners(&self, other: &Lock) -> bool {
        let key = |lock: &Lock| (lock.session, lock.node, lock.flock, lock.owner);
        key(self) == key(other)
    }

    fn touches(&self, other: &Lock) -> bool {
        self.start <= other.end && other.start <= self.end
    }

    fn excludes(&self, other: &Lock) -> bool {
        let same_space = (self.node, self.flock) == (other.node, other.flock);
        same_space && !self.is_owners(other) && self.touches(other) && self.kind.excludes(other.kind)
    }
}

impl Locks {
    /// Executes a call on the existing inode `node`. Returns the calls that get a reply now, this one last.
    ///
    /// # Panics
    /// If the call is not about locks.
    pub fn execute(&mut self, session: u64, call: CallId, node: NodeId, what: &Call) -> Vec<Answered> {
        let whole = |flock: bool, start: u64, end: u64| if flock { (0, u64::MAX) } else { (start, end) };
        let lock = |owner, flock, kind, (start, end), pid| Lock {
            session,
            node,
            flock,
            owner,
            kind,
            start,
            end,
            pid,
        };
        let mut answered = Vec::new();
        let result = match *what {
            Call::Lock { owner, flock, kind, start, end, wait, pid, reclaim, .. } => {
                let wanted = lock(owner, flock, kind, whole(flock, start, end), pid);
                if reclaim && !self.is_left(&wanted) {
                    Err(Errno::AGAIN)
                } else if self.in_the_way(&wanted).is_none() {
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
                let range = lock(owner, flock, LockKind::Read, whole(flock, start, end), 0);
                clear(&mut self.held, &range, Lock::is_owners);
                Ok(Reply::Done)
            }
            Call::GetLock { owner, flock, kind, start, end, .. } => {
                let wanted = lock(owner, flock, kind, whole(flock, start, end), 0);
                let info = |l: &Lock| LockInfo { kind: l.kind, start: l.start, end: l.end, pid: l.pid };
                Ok(Reply::Locked(self.in_the_way(&wanted).map(info)))
            }
            _ => panic!("{} is not about locks", what.type_name()),
        };
        self.settle(&mut answered);
        answered.push((session, call, result));
        answered
    }

    /// The strongest lock held on a file, of either kind and by any owner.
    #[must_use]
    pub fn strongest(&self, node: NodeId) -> Option<LockKind> {
        self.held.iter().filter(|lock| lock.node == node).map(|lock| lock.kind).max()
    }

    /// Drops all locks of a file, without notice to their owners.
    pub fn lose(&mut self, node: NodeId) {
        self.held.retain(|lock| lock.node != node);
    }

    /// Cancels a waiting lock call. Returns false if the call does not wait.
    pub fn cancel(&mut self, session: u64, call: CallId) -> bool {
        let before = self.waits.len();
        self.waits.retain(|(lock, waiting)| (lock.session, *waiting) != (session, call));
        self.waits.len() < before
    }

    /// Drops a lost session as [`Locks::end`] does, but keeps its locks reclaimable until [`Locks::claimed`], or
    /// until a conflicting lock is granted.
    pub fn forget(&mut self, session: u64) -> Vec<Answered> {
        let held: Vec<Lock> = self.held.iter().filter(|lock| lock.session == session).copied().collect();
        for lock in held {
            clear(&mut self.left, &lock, Lock::is_owners);
            self.left.push(lock);
        }
        self.free(session)
    }

    /// Ends a session's reclaim.
    pub fn claimed(&mut self, session: u64) {
        self.left.retain(|lock| lock.session != session);
    }

    /// Ends a session. Returns the calls of other sessions that get a reply by this.
    pub fn end(&mut self, session: u64) -> Vec<Answered> {
        self.claimed(session);
        self.free(session)
    }

    fn free(&mut self, session: u64) -> Vec<Answered> {
        self.held.retain(|lock| lock.session != session);
        self.waits.retain(|(lock, _)| lock.session != session);
        let mut answered = Vec::new();
        self.settle(&mut answered);
        answered
    }

    fn in_the_way(&self, wanted: &Lock) -> Option<&Lock> {
        self.held.iter().filter(|held| held.excludes(wanted)).min_by_key(|held| held.start)
    }

    /// Whether the owner can reclaim the whole range, in this mode or a stronger one.
    fn is_left(&self, wanted: &Lock) -> bool {
        let mut rest = vec![*wanted];
        for left in self.left.iter().filter(|left| left.is_owners(wanted) && left.kind >= wanted.kind) {
            clear(&mut rest, left, |_, _| true);
        }
        rest.is_empty()
    }

    fn set(&mut self, lock: Lock) {
        clear(&mut self.held, &lock, Lock::is_owners);
        clear(&mut self.left, &lock, |left, lock| left.is_owners(lock) || left.excludes(lock));
        self.held.push(lock);
    }

    fn settle(&mut self, answered: &mut Vec<Answered>) {
        while let Some(at) = self.waits.iter().position(|(lock, _)| self.in_the_way(lock).is_none()) {
            let (lock, call) = self.waits.remove(at);
            self.set(lock);
            answered.push((lock.session, call, Ok(Reply::Done)));
        }
    }
}

/// Removes a range from those locks for which `meant` holds.
fn clear(locks: &mut Vec<Lock>, range: &Lock, meant: impl Fn(&Lock, &Lock) -> bool) {
    let mut rest = Vec::new();
    for lock in locks.drain(..) {
        if !meant(&lock, range) || !lock.touches(range) {
            rest.push(lock);
            continue;
        }
        if lock.start < range.start {
            rest.push(Lock { end: range.start - 1, ..lock });
        }
        if lock.end > range.end {
            rest.push(Lock { start: range.end + 1, ..lock });
        }
    }
    *locks = rest;
}
