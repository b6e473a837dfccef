//! Locks, kept as simply as can be: for the fake, and for who serves a tree to one client.

use nigh_types::{Call, CallId, Errno, LockInfo, LockKind, NodeId, Reply};

/// All locks of one server. Deadlocks are not looked for.
#[derive(Clone, Default, Debug)]
pub struct Locks {
    held: Vec<Lock>,
    /// Held in sessions that were forgotten, as far as nobody was granted since what it excludes.
    left: Vec<Lock>,
    /// In the order in which they came.
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

/// A call of a session that is answered now.
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
    /// Executes a call on `node`, which is there; all calls that are answered with it, this one last.
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

    /// The strongest lock that is held of a file, of either kind and by whomever.
    #[must_use]
    pub fn strongest(&self, node: NodeId) -> Option<LockKind> {
        self.held.iter().filter(|lock| lock.node == node).map(|lock| lock.kind).max()
    }

    /// All locks of a file are gone, and nobody is told.
    pub fn lose(&mut self, node: NodeId) {
        self.held.retain(|lock| lock.node != node);
    }

    /// Nobody waits for that lock any more; false where it does not wait.
    pub fn cancel(&mut self, session: u64, call: CallId) -> bool {
        let before = self.waits.len();
        self.waits.retain(|(lock, waiting)| (lock.session, *waiting) != (session, call));
        self.waits.len() < before
    }

    /// A session is forgotten: as [`Locks::end`], but what it held can be claimed until [`Locks::claimed`], unless
    /// somebody is granted before what that excludes.
    pub fn forget(&mut self, session: u64) -> Vec<Answered> {
        let held: Vec<Lock> = self.held.iter().filter(|lock| lock.session == session).copied().collect();
        for lock in held {
            clear(&mut self.left, &lock, Lock::is_owners);
            self.left.push(lock);
        }
        self.free(session)
    }

    /// A session claims nothing more.
    pub fn claimed(&mut self, session: u64) {
        self.left.retain(|lock| lock.session != session);
    }

    /// A session is over; the calls of others that are answered by that.
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

    /// Whether all of a lock is left of its owner, in that way or a stronger one.
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

/// Takes a range out of those locks which are `meant`.
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
