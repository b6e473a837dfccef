//! File locks of all sessions: the lock table, and the calls that wait for locks without a thread. See
//! docs/decisions/0011-locks.md.

use crate::session::Session;
use crate::session::grace::Grace;
use crate::session::lock_reclaimers::LockReclaimers;
use crate::session::registry::ClientIncarnation;
use nigh_lease::Object;
use nigh_lease::{LockOwner, LockRequest, LockResult, LockTable};
use nigh_types::{Call, CallId, Errno, LockKind, NodeId, Origin, Reply, Response};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The file locks of all sessions. Under `state` only the locks of grace period and reaper are taken, and no call is
/// answered.
pub(crate) struct Locks {
    state: Mutex<State>,
    grace: Arc<Grace>,
}

#[derive(Default)]
struct State {
    table: LockTable<Object>,
    members: BTreeMap<u64, Member>,
    /// Sessions with entries left in the table.
    reclaimers: LockReclaimers,
    /// The server stops.
    stopping: bool,
}

/// Snapshot for status.
pub(crate) struct LockSnapshot {
    /// Number of locked ranges, by session.
    pub(crate) held: BTreeMap<u64, u64>,
    /// For each waiting call its session, and the sessions that hold conflicting locks.
    pub(crate) waits: Vec<(u64, BTreeSet<u64>)>,
}

/// Limits on the locked ranges of one origin, and of all.
const MOST_OF_ORIGIN: u64 = 1 << 18;
const MOST_RANGES: u64 = 1 << 21;
/// Number of conflicting locks searched for sessions of disconnected clients.
const MOST_BLOCKERS: usize = 64;

/// Maximum number of waits shown: finding the blockers of one takes time linear in the file's locks.
const WAITS_SHOWN: usize = 1_000;

/// An active session.
struct Member {
    session: Arc<Session>,
    /// The client (a machine and user) and its incarnation.
    who: ClientIncarnation,
    /// The client has dropped all its state.
    said_goodbye: bool,
    /// Objects of the session's locks by node id, so that unlocking needs no access to the disk.
    objects: BTreeMap<NodeId, Object>,
    /// Lock calls in the pool that may block, each with whether it was cancelled.
    pending_calls: BTreeMap<CallId, bool>,
}

/// Waiting calls that can be answered.
type Ended = Vec<(Arc<Session>, CallId, Result<(), Errno>)>;

impl Locks {
    /// An empty lock table for a starting server.
    pub(crate) fn new(grace: Arc<Grace>) -> Locks {
        Locks { state: Mutex::default(), grace }
    }

    /// Registers a session in place of its client's discarded ones; the table keeps it until [`Locks::end`].
    /// `dropped`: the client reclaims nothing.
    pub(crate) fn begin(&self, session: &Arc<Session>, who: ClientIncarnation, dropped: bool) {
        let member = Member {
            who,
            said_goodbye: false,
            objects: BTreeMap::new(),
            pending_calls: BTreeMap::new(),
            session: Arc::clone(session),
        };
        let ended = self.change(|state| {
            // The last thread of an earlier session may not have reported its end yet.
            let earlier = state.members.iter().filter(|(_, other)| {
                let theirs = other.who == who && other.session.peer.has_same_rights(&session.peer);
                !dropped && theirs && other.session.is_settled()
            });
            let earlier: Vec<u64> = earlier.map(|(id, _)| *id).collect();
            let ended: Vec<Member> = earlier.into_iter().filter_map(|id| state.end(id)).collect();
            let State { table, members, reclaimers: claimants, .. } = state;
            for earlier in claimants.take(who, &session.peer) {
                if dropped {
                    table.handle_reclaim_ended(earlier);
                } else {
                    table.handle_successor(earlier, session.id);
                }
            }
            if table.reclaimable_by(session.id) > 0 {
                claimants.add(session.id, who, &session.peer);
            }
            members.insert(session.id, member);
            ended
        });
        drop(ended);
    }

    /// Notes that the session's client has dropped all its state.
    pub(crate) fn leave(&self, session: u64) {
        if let Some(member) = self.state.lock().members.get_mut(&session) {
            member.said_goodbye = true;
        }
    }

    /// Notes that a session has completed its reclaim.
    pub(crate) fn reclaim_done(&self, session: u64) {
        let mut state = self.state.lock();
        state.table.handle_reclaim_ended(session);
        state.reclaimers.remove(session);
    }

    /// Stops the release of locks, except those of clients that say goodbye. The other clients reclaim theirs from
    /// the next server.
    pub(crate) fn stop(&self) {
        self.state.lock().stopping = true;
    }

    /// Ends a session: releases its locks and drops its waiting calls.
    pub(crate) fn end(&self, session: u64) {
        drop(self.change(|state| state.end(session)));
    }

    /// Whether a session holds a lock or waits for one.
    pub(crate) fn are_held_by(&self, session: u64) -> bool {
        self.state.lock().members.get(&session).is_some_and(|member| !member.objects.is_empty())
    }

    /// Whether another session waits for a lock of this session.
    pub(crate) fn are_waited_for(&self, session: u64) -> bool {
        self.state.lock().table.is_waited_for(session)
    }

    /// Registers a lock call that goes to the pool, so that it can be cancelled from now on.
    pub(crate) fn note_pending(&self, session: u64, call: CallId) {
        if let Some(member) = self.state.lock().members.get_mut(&session) {
            member.pending_calls.insert(call, false);
        }
    }

    /// Removes a lock call that will not reach the table.
    pub(crate) fn forget(&self, session: u64, call: CallId) {
        if let Some(member) = self.state.lock().members.get_mut(&session) {
            member.pending_calls.remove(&call);
        }
    }

    /// Cancels a lock call. Returns true if it was waiting for a lock and is now to be answered.
    pub(crate) fn cancel(&self, session: u64, call: CallId) -> bool {
        let mut state = self.state.lock();
        let State { table, members, .. } = &mut *state;
        let Some(member) = members.get_mut(&session) else { return false };
        if let Some(cancelled) = member.pending_calls.get_mut(&call) {
            *cancelled = true;
            return false;
        }
        let Some(object) = table.handle_cancel(session, call) else { return false };
        if !table.is_used_by(&object, session) {
            member.objects.retain(|_, other| *other != object);
        }
        true
    }

    /// Executes a lock call, or a lock query, on a resolved file. Returns `None` if the call waits; it is answered
    /// once the lock is granted.
    pub(crate) fn lock(
        &self,
        session: u64,
        id: CallId,
        (node, object): (NodeId, Object),
        call: &Call,
    ) -> Option<Result<Reply, Errno>> {
        self.change(|state| {
            let State { table, members, .. } = state;
            // The session ended meanwhile, so the lock would never be released.
            let Some(member) = members.get_mut(&session) else { return Some(Err(Errno::IO)) };
            if member.pending_calls.remove(&id) == Some(true) {
                return Some(Err(Errno::INTR));
            }
            let (who, origin) = (member.who, member.session.origin);
            let owner = |owner, flock| LockOwner { session, flock, owner };
            match *call {
                Call::Lock { owner: number, flock, kind, start, end, wait, pid, reclaim, .. } => {
                    let claim = claim(object, owner(number, flock), kind, (start, end), pid);
                    if let Err(errno) = has_room(table, members, origin) {
                        return Some(Err(errno));
                    }
                    let tried = if reclaim {
                        table.handle_reclaim(claim, self.grace.may_reclaim_any(who))
                    } else {
                        let tried = table.handle_lock(claim, wait.then_some(id));
                        if tried != LockResult::Granted {
                            expire_blockers(table, members, &claim);
                        }
                        tried
                    };
                    let Some(member) = members.get_mut(&session) else { return Some(Err(Errno::IO)) };
                    if table.is_used_by(&object, session) {
                        member.objects.insert(node, object);
                    }
                    match tried {
                        LockResult::Granted => Some(Ok(Reply::Done)),
                        LockResult::Waits => None,
                        LockResult::Refused(errno) => Some(Err(errno)),
                    }
                }
                Call::GetLock { owner: number, flock, kind, start, end, .. } => {
                    let claim = claim(object, owner(number, flock), kind, (start, end), 0);
                    let client = who.0;
                    let found = table.conflict(&claim).map(|(holder, mut info)| {
                        // A process id is meaningful only on its own machine.
                        if members.get(&holder.session).is_none_or(|m| m.who.0 != client) {
                            info.pid = 0;
                        }
                        info
                    });
                    Some(Ok(Reply::LockConflict(found)))
                }
                _ => Some(Err(Errno::PROTO)),
            }
        })
    }

    /// Releases locks of an owner. This accesses only memory, so the session's reader thread does it, in the order of
    /// the calls.
    pub(crate) fn unlock(&self, session: u64, call: &Call) -> Result<Reply, Errno> {
        let Call::Unlock { node, owner, flock, start, end } = call else { return Err(Errno::PROTO) };
        let unlocked = self.change(|State { table, members, .. }| {
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

    /// Returns the number of locks per session, and the waits.
    pub(crate) fn snapshot(&self) -> LockSnapshot {
        let state = self.state.lock();
        let held = state.members.keys().map(|session| (*session, state.table.held(*session)));
        let waits = state.table.waits().take(WAITS_SHOWN);
        LockSnapshot { held: held.collect(), waits: waits.collect() }
    }

    /// Changes the table, then answers the waiting calls that the change released.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let (result, ended) = {
            let mut state = self.state.lock();
            let result = change(&mut state);
            let State { table, members, .. } = &mut *state;
            let ended: Ended = std::iter::from_fn(|| table.poll_ended())
                .filter_map(|(session, call, result)| {
                    Some((Arc::clone(&members.get(&session)?.session), call, result))
                })
                .collect();
            (result, ended)
        };
        for (session, call, result) in ended {
            session.reply(call, Response::plain(result.map(|()| Reply::Done)));
        }
        result
    }
}

impl State {
    fn end(&mut self, session: u64) -> Option<Member> {
        let member = self.members.remove(&session)?;
        if self.stopping && !member.said_goodbye {
            return Some(member);
        }
        let State { table, reclaimers: claimants, .. } = self;
        claimants.remove(session);
        if member.said_goodbye {
            table.handle_session_end(session);
        } else {
            table.handle_forgotten(session);
        }
        if table.reclaimable_by(session) > 0 {
            claimants.add(session, member.who, &member.session.peer);
        }
        while let Some(earliest) = claimants.evict(|session| table.reclaimable_by(session)) {
            table.handle_reclaim_ended(earliest);
        }
        Some(member)
    }
}

/// Expires courtesy sessions that hold some of the first locks in conflict with this claim.
fn expire_blockers(table: &LockTable<Object>, members: &BTreeMap<u64, Member>, claim: &LockRequest<Object>) {
    let in_way = table.conflicts(claim).take(MOST_BLOCKERS).map(|(owner, _)| owner.session);
    let in_way: BTreeSet<u64> = in_way.filter(|other| *other != claim.owner.session).collect();
    for Member { session, .. } in in_way.iter().filter_map(|other| members.get(other)) {
        if session.phase.expire_courtesy() {
            session.expire("another client wants its locks");
        }
    }
}

/// Returns `ENOLCK` if the origin holds too many ranges. Checked only while there are many in all, since the check
/// takes time linear in the number of sessions. This machine's root is bound only by the total limit.
fn has_room(table: &LockTable<Object>, members: &BTreeMap<u64, Member>, origin: Origin) -> Result<(), Errno> {
    let all = table.ranges();
    if all < MOST_OF_ORIGIN || (origin.is_local_root() && all < MOST_RANGES) {
        return Ok(());
    }
    let theirs = members.iter().filter(|(_, member)| member.session.origin == origin);
    let theirs: u64 = theirs.map(|(session, _)| table.held(*session)).sum();
    if all < MOST_RANGES && theirs < MOST_OF_ORIGIN { Ok(()) } else { Err(Errno::NOLCK) }
}

fn claim(
    object: Object,
    owner: LockOwner,
    kind: LockKind,
    (start, end): (u64, u64),
    pid: u32,
) -> LockRequest<Object> {
    let (start, end) = ends(owner.flock, start, end);
    LockRequest { object, owner, kind, start, end, pid }
}

/// flock(2) locks the whole file.
fn ends(flock: bool, start: u64, end: u64) -> (u64, u64) {
    if flock { (0, u64::MAX) } else { (start, end) }
}

/// Counter of the calls that threads execute for a session. The session's locks are released when the session is over
/// *and* its last call has ended: until then a call may still write the locked file.
#[derive(Default)]
pub(crate) struct Running {
    count: AtomicU32,
    over: AtomicBool,
}

impl Running {
    /// Enters a call; [`Running::leave`] must follow in any case. Returns false if the session is over and the call
    /// must not be executed.
    pub(crate) fn enter(&self) -> bool {
        self.count.fetch_add(1, Ordering::SeqCst);
        !self.over.load(Ordering::SeqCst)
    }

    /// Leaves a call. Returns true if it was the last call of an ended session.
    pub(crate) fn leave(&self) -> bool {
        self.count.fetch_sub(1, Ordering::SeqCst) == 1 && self.over.load(Ordering::SeqCst)
    }

    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::SeqCst)
    }

    /// Whether the session is over, and none of its calls is running or will be.
    pub(crate) fn is_settled(&self) -> bool {
        self.over.load(Ordering::SeqCst) && self.count() == 0
    }

    /// Marks the session as over. Returns true if no call is running.
    pub(crate) fn close(&self) -> bool {
        self.over.store(true, Ordering::SeqCst);
        self.count.load(Ordering::SeqCst) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::test_session::test_session;
    use nigh_link::{Claims, Peer, Squash};
    use nigh_types::{Credentials, Time};

    #[test]
    fn last_running_call_of_ended_session_releases_its_locks() {
        let running = Running::default();
        assert!(!running.is_settled(), "calls may come");
        assert!(running.enter() && running.enter());
        assert!(!running.leave());
        assert!(!running.close(), "a call still runs");
        assert!(!running.enter(), "none is begun");
        assert!(!running.leave() && !running.is_settled());
        assert!(running.leave() && running.is_settled());
        assert!(Running::default().close());
    }

    fn session(id: u64, host: &str) -> Arc<Session> {
        let claims = Claims::Only(Credentials { uid: 5, gid: 5, groups: vec![], privileges: None });
        let peer = Peer::new("tcp", claims, Squash::Root).from_host(host.parse().unwrap());
        test_session(id, peer)
    }

    #[test]
    fn excess_unreclaimed_locks_are_dropped_from_the_client_with_most() {
        let locks = Locks::new(Arc::new(Grace::new(BTreeMap::new(), Time(0))));
        let object = Object { filesystem: 1, ino: 1, birth: 1 };
        let hold = |session, ranges: u64| {
            let owner = LockOwner { session, flock: false, owner: 1 };
            for at in (0..ranges).map(|n| 2 * n) {
                let claim = LockRequest { object, owner, kind: LockKind::Read, start: at, end: at, pid: 1 };
                assert_eq!(locks.state.lock().table.handle_lock(claim, None), LockResult::Granted);
            }
        };
        let claimable = |session| locks.state.lock().table.reclaimable_by(session);
        // Sessions are discarded with the maximum number of locks; their clients return and reclaim nothing.
        for n in 0..5 {
            locks.begin(&session(10 + n, "10.0.0.2"), (100 + n, 1), true);
            hold(10 + n, 65_536);
            locks.end(10 + n);
            locks.begin(&session(20 + n, "10.0.0.2"), (100 + n, 1), false);
        }
        let theirs = || (20..25).map(claimable).sum::<u64>();
        assert_eq!(theirs(), 4 * 65_536, "one of them made way");
        for n in 0..3 {
            locks.begin(&session(30 + n, "10.0.0.1"), (1, n), true);
            hold(30 + n, 3);
            locks.end(30 + n);
        }
        assert_eq!(theirs(), 3 * 65_536, "and another one for others");
        for n in 0..3 {
            locks.begin(&session(40 + n, "10.0.0.1"), (1, n), false);
            assert_eq!(claimable(40 + n), 3);
        }
        locks.reclaim_done(40);
        assert_eq!(claimable(40), 0);
        // A session discarded before its reclaim leaves its locks claimable by its client.
        locks.end(41);
        locks.begin(&session(50, "10.0.0.1"), (1, 1), false);
        assert_eq!(claimable(50), 3);
    }

    #[test]
    fn lock_requests_on_object_with_thousands_of_locks_are_fast() {
        let mut table = LockTable::default();
        let owner = |session, owner| LockOwner { session, flock: true, owner };
        let claim = |owner, kind| LockRequest { object: 1, owner, kind, start: 0, end: u64::MAX, pid: 1 };
        let begun = std::time::Instant::now();
        for number in 0..65_536 {
            assert_eq!(table.handle_lock(claim(owner(1, number), LockKind::Read), None), LockResult::Granted);
        }
        for number in 0..4_096 {
            let wanted = claim(owner(2, number), LockKind::Write);
            assert_eq!(table.handle_lock(wanted, Some(CallId(number))), LockResult::Waits);
        }
        for number in 0..64 {
            table.handle_unlock(1, owner(1, number), 0, u64::MAX).unwrap();
        }
        assert_eq!(table.poll_ended(), None);
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{:?}", begun.elapsed());
    }
}
