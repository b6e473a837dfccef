//! All locks of a server: the table, and the calls that wait without a thread.
//! See docs/decisions/0011-locks.md.

use crate::session::Session;
use nigh_native::lease::Object;
use nigh_native::{Claim, LockOwner, LockTable, Tried};
use nigh_types::{Call, CallId, Errno, LockKind, NodeId, Reply, Response};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The locks of all sessions. Its mutex is taken last; nothing is answered under it.
#[derive(Default)]
pub(crate) struct Locks {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    table: LockTable<Object>,
    members: BTreeMap<u64, Member>,
}

/// For status.
pub(crate) struct LockPicture {
    /// Ranges, by session.
    pub(crate) held: BTreeMap<u64, u64>,
    /// Of each wait the session, and those that hold what it waits for.
    pub(crate) waits: Vec<(u64, BTreeSet<u64>)>,
}

/// Looking for whom one waits takes time with the locks of that file.
const WAITS_SHOWN: usize = 1_000;

/// A session that stands.
struct Member {
    session: Arc<Session>,
    /// The client's durable identity: one machine and user.
    client: u64,
    /// What its locks are on, by the export's numbers, so that unlocking needs no look at the disk.
    objects: BTreeMap<NodeId, Object>,
    /// Calls that the pool has and that may come to wait; whether they were cancelled meanwhile.
    coming: BTreeMap<CallId, bool>,
}

/// Calls that waited and can be answered.
type Ended = Vec<(Arc<Session>, CallId, Result<(), Errno>)>;

impl Locks {
    /// A session begins. Until [`Locks::end`] the table keeps it.
    pub(crate) fn begin(&self, session: &Arc<Session>, client: u64) {
        let session = Arc::clone(session);
        let member = Member { client, objects: BTreeMap::new(), coming: BTreeMap::new(), session };
        self.state.lock().members.insert(member.session.id, member);
    }

    /// A session is over: its locks are free, and what it waits for is forgotten.
    pub(crate) fn end(&self, session: u64) {
        self.change(|state| {
            state.table.handle_session_end(session);
            state.members.remove(&session)
        });
    }

    /// A call for a lock goes to the pool. From now on it can be cancelled.
    pub(crate) fn expect(&self, session: u64, call: CallId) {
        if let Some(member) = self.state.lock().members.get_mut(&session) {
            member.coming.insert(call, false);
        }
    }

    /// That call will not come after all.
    pub(crate) fn forget(&self, session: u64, call: CallId) {
        if let Some(member) = self.state.lock().members.get_mut(&session) {
            member.coming.remove(&call);
        }
    }

    /// Nobody waits for a call any more. True: it waited for a lock, does not any longer, and is to be
    /// answered.
    pub(crate) fn cancel(&self, session: u64, call: CallId) -> bool {
        let mut state = self.state.lock();
        let State { table, members } = &mut *state;
        let Some(member) = members.get_mut(&session) else { return false };
        if let Some(cancelled) = member.coming.get_mut(&call) {
            *cancelled = true;
            return false;
        }
        let Some(object) = table.handle_cancel(session, call) else { return false };
        if !table.is_used_by(&object, session) {
            member.objects.retain(|_, other| *other != object);
        }
        true
    }

    /// A call for a lock on a reached file, or a question for one. `None`: it waits, and is answered when it
    /// has the lock.
    pub(crate) fn lock(
        &self,
        session: u64,
        id: CallId,
        (node, object): (NodeId, Object),
        call: &Call,
    ) -> Option<Result<Reply, Errno>> {
        self.change(|state| {
            let State { table, members } = state;
            // Its session ended meanwhile: nobody would ever unlock it.
            let Some(member) = members.get_mut(&session) else { return Some(Err(Errno::IO)) };
            if member.coming.remove(&id) == Some(true) {
                return Some(Err(Errno::INTR));
            }
            let owner = |owner, flock| LockOwner { session, flock, owner };
            match *call {
                Call::Lock { owner: number, flock, kind, start, end, wait, pid, .. } => {
                    let claim = claim(object, owner(number, flock), kind, (start, end), pid);
                    let tried = table.handle_lock(claim, wait.then_some(id));
                    if table.is_used_by(&object, session) {
                        member.objects.insert(node, object);
                    }
                    match tried {
                        Tried::Granted => Some(Ok(Reply::Done)),
                        Tried::Waits => None,
                        Tried::Refused(errno) => Some(Err(errno)),
                    }
                }
                Call::GetLock { owner: number, flock, kind, start, end, .. } => {
                    let claim = claim(object, owner(number, flock), kind, (start, end), 0);
                    let client = member.client;
                    let found = table.conflict(&claim).map(|(holder, mut info)| {
                        // The number of a process means something on its own machine only.
                        if members.get(&holder.session).is_none_or(|m| m.client != client) {
                            info.pid = 0;
                        }
                        info
                    });
                    Some(Ok(Reply::Locked(found)))
                }
                _ => Some(Err(Errno::PROTO)),
            }
        })
    }

    /// Ends what an owner holds. This looks at nothing but memory, so a session's reader does it, in the
    /// order in which calls came.
    pub(crate) fn unlock(&self, session: u64, call: &Call) -> Result<Reply, Errno> {
        let Call::Unlock { node, owner, flock, start, end } = call else { return Err(Errno::PROTO) };
        let unlocked = self.change(|State { table, members }| {
            let Some(member) = members.get_mut(&session) else { return Ok(()) };
            let Some(&object) = member.objects.get(&node.node) else { return Ok(()) };
            let (start, end) = ends(*flock, *start, *end);
            let owner = LockOwner { session, flock: *flock, owner: *owner };
            table.handle_unlock(object, owner, start, end)?;
            if !table.is_used_by(&object, session) {
                member.objects.remove(&node.node);
            }
            Ok(())
        });
        unlocked.map(|()| Reply::Done)
    }

    /// Who holds how much, and who waits for whom.
    pub(crate) fn picture(&self) -> LockPicture {
        let state = self.state.lock();
        let held = state.members.keys().map(|session| (*session, state.table.held(*session)));
        let waits = state.table.waits().take(WAITS_SHOWN);
        LockPicture { held: held.collect(), waits: waits.collect() }
    }

    /// Changes the table, then answers the waiting calls that wait no longer by that.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let (result, ended) = {
            let mut state = self.state.lock();
            let result = change(&mut state);
            let State { table, members } = &mut *state;
            let ended: Ended = std::iter::from_fn(|| table.poll_ended())
                .filter_map(|(session, call, result)| {
                    Some((Arc::clone(&members.get(&session)?.session), call, result))
                })
                .collect();
            (result, ended)
        };
        for (session, call, result) in ended {
            session.answer(call, Response::plain(result.map(|()| Reply::Done)));
        }
        result
    }
}

fn claim(
    object: Object,
    owner: LockOwner,
    kind: LockKind,
    (start, end): (u64, u64),
    pid: u32,
) -> Claim<Object> {
    let (start, end) = ends(owner.flock, start, end);
    Claim { object, owner, kind, start, end, pid }
}

/// flock(2) locks a file as a whole.
fn ends(flock: bool, start: u64, end: u64) -> (u64, u64) {
    if flock { (0, u64::MAX) } else { (start, end) }
}

/// Counts the calls of a session that threads are executing. Its locks are freed when the session is over
/// *and* the last of them has ended: until then it may still write what it locked.
#[derive(Default)]
pub(crate) struct Running {
    count: AtomicU32,
    over: AtomicBool,
}

impl Running {
    /// Before a call; [`Running::leave`] follows in any case. False: the session is over, and the call is not
    /// to be executed.
    pub(crate) fn enter(&self) -> bool {
        self.count.fetch_add(1, Ordering::SeqCst);
        !self.over.load(Ordering::SeqCst)
    }

    /// True: that was the last call of a session that is over.
    pub(crate) fn leave(&self) -> bool {
        self.count.fetch_sub(1, Ordering::SeqCst) == 1 && self.over.load(Ordering::SeqCst)
    }

    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::SeqCst)
    }

    /// The session is over. True: nothing runs.
    pub(crate) fn close(&self) -> bool {
        self.over.store(true, Ordering::SeqCst);
        self.count.load(Ordering::SeqCst) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_last_learns_that_a_session_is_over() {
        let running = Running::default();
        assert!(running.enter() && running.enter());
        assert!(!running.leave());
        assert!(!running.close(), "a call still runs");
        assert!(!running.enter(), "none is begun");
        assert!(!running.leave());
        assert!(running.leave());
        assert!(Running::default().close());
    }

    #[test]
    fn what_is_asked_of_an_object_that_thousands_hold_takes_no_time() {
        let mut table = LockTable::default();
        let owner = |session, owner| LockOwner { session, flock: true, owner };
        let claim = |owner, kind| Claim { object: 1, owner, kind, start: 0, end: u64::MAX, pid: 1 };
        let begun = std::time::Instant::now();
        for number in 0..65_536 {
            assert_eq!(table.handle_lock(claim(owner(1, number), LockKind::Read), None), Tried::Granted);
        }
        for number in 0..4_096 {
            let wanted = claim(owner(2, number), LockKind::Write);
            assert_eq!(table.handle_lock(wanted, Some(CallId(number))), Tried::Waits);
        }
        for number in 0..64 {
            table.handle_unlock(1, owner(1, number), 0, u64::MAX).unwrap();
        }
        assert_eq!(table.poll_ended(), None);
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{:?}", begun.elapsed());
    }
}
