//! Locks, kept as simply as can be: for the fake, and for who serves a tree to one client.

use nigh_types::{Call, CallId, Errno, LockInfo, LockKind, NodeId, Reply};

/// All locks of one server. Deadlocks are not looked for.
#[derive(Default)]
pub struct Locks {
    held: Vec<Lock>,
    /// In the order in which they came.
    waits: Vec<(Lock, CallId)>,
}

#[derive(Clone, Copy)]
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
            Call::Lock { owner, flock, kind, start, end, wait, pid, .. } => {
                let wanted = lock(owner, flock, kind, whole(flock, start, end), pid);
                if self.in_the_way(&wanted).is_none() {
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
                self.clear(&lock(owner, flock, LockKind::Read, whole(flock, start, end), 0));
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

    /// Nobody waits for that lock any more; false where it does not wait.
    pub fn cancel(&mut self, session: u64, call: CallId) -> bool {
        let before = self.waits.len();
        self.waits.retain(|(lock, waiting)| (lock.session, *waiting) != (session, call));
        self.waits.len() < before
    }

    /// A session is over; the calls of others that are answered by that.
    pub fn end(&mut self, session: u64) -> Vec<Answered> {
        self.held.retain(|lock| lock.session != session);
        self.waits.retain(|(lock, _)| lock.session != session);
        let mut answered = Vec::new();
        self.settle(&mut answered);
        answered
    }

    fn in_the_way(&self, wanted: &Lock) -> Option<&Lock> {
        self.held.iter().filter(|held| held.excludes(wanted)).min_by_key(|held| held.start)
    }

    fn set(&mut self, lock: Lock) {
        self.clear(&lock);
        self.held.push(lock);
    }

    /// Takes a range out of what its owner holds.
    fn clear(&mut self, range: &Lock) {
        let mut left = Vec::new();
        for held in self.held.drain(..) {
            if !held.is_owners(range) || !held.touches(range) {
                left.push(held);
                continue;
            }
            if held.start < range.start {
                left.push(Lock { end: range.start - 1, ..held });
            }
            if held.end > range.end {
                left.push(Lock { start: range.end + 1, ..held });
            }
        }
        self.held = left;
    }

    fn settle(&mut self, answered: &mut Vec<Answered>) {
        while let Some(at) = self.waits.iter().position(|(lock, _)| self.in_the_way(lock).is_none()) {
            let (lock, call) = self.waits.remove(at);
            self.set(lock);
            answered.push((lock.session, call, Ok(Reply::Done)));
        }
    }
}
