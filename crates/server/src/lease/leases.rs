//! The server's lease table with its clock, and the calls parked until other clients have acknowledged.
//! Rules: docs/decisions/0008-leases.md.

use crate::export::open_files::OpenFileTable;
use crate::export::{Export, SpaceReclaimer};
use crate::lease::change_result::{ChangeProbe, ObservedFacts};
use crate::lease::holder::{CallExecutor, LeaseMessage, LeaseSession, ParkedCall};
use crate::lease::inode_locks::InodeLocks;
use crate::os::clock::now;
use nigh_lease::{
    Change, ChangeId, DiscardedLeases, GrantRequest, Granted, Holder, LeaseConfig, LeaseKey, LeaseReport,
    LeaseSequencer, LeaseTable, LeaseTerms, MergeBase, ObservedAt, ParkResult, ReadGrant, SequencerOutput,
    UpdatedKey, WroteBack,
};
use nigh_link::Peer;
use nigh_types::{CallId, Grant, GrantId, LeaseScope, RecallId, Term, Time, UpdateCommit};
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::time::Duration;

/// The lease table shared by all sessions of a server.
///
/// **Lock order.** Inode locks (`inode_locks.rs`), then `Leases::state`, then `Session::wire`, then the outbox. Under
/// `state`, recalls and replies with grants are queued on the sessions' wires in one order, as [`LeaseSequencer`]
/// requires. While `state` is held, nothing is sent to a socket, and no call is executed, submitted or dropped. No
/// thread waits for an acknowledgement with one of these locks: a call that has to is parked, and occupies no thread.
pub(crate) struct Leases {
    state: Mutex<State>,
    /// Signals an earlier deadline to the clock thread.
    wake: Condvar,
    /// Resumes parked calls; `None` for a table of one session, which never parks any.
    executor: Option<Box<dyn CallExecutor>>,
    pub(crate) places: InodeLocks,
    pub(crate) homes: Arc<OpenFileTable>,
    pub(crate) space_reclaimer: Arc<SpaceReclaimer>,
}

struct State {
    sequencer: LeaseSequencer<Box<dyn ParkedCall>>,
    /// Observed result of the change that is ending.
    seen: Option<ObservedFacts>,
    sessions: FxHashMap<Holder, Arc<dyn LeaseSession>>,
    /// Holders whose session was discarded before its lease expired.
    detached: DiscardedLeases<DetachedSession>,
    /// The table's next deadline.
    due: Time,
    /// The deadline that the clock thread waits for.
    clock: Time,
    stopping: bool,
}

/// Client and incarnation of a discarded session.
struct DetachedSession {
    who: (u64, u64),
    peer: Peer,
}

/// Snapshot for status.
pub(crate) struct LeaseSnapshot {
    pub(crate) report: LeaseReport,
    pub(crate) parked: Vec<Parked>,
    /// Holders without a session, with their client ids.
    pub(crate) detached: Vec<(Holder, u64)>,
}

/// A call parked until other clients have acknowledged recalls and prepares.
pub(crate) struct Parked {
    pub(crate) change: ChangeId,
    pub(crate) session: u64,
    pub(crate) call: &'static str,
}

/// Output of the lease table that is carried out after its lock is released.
#[derive(Default)]
struct Pending {
    send: Vec<Arc<dyn LeaseSession>>,
    ready: Vec<Box<dyn ParkedCall>>,
    /// Sessions with expired leases, and the lease numbers.
    fenced: Vec<(Arc<dyn LeaseSession>, u64)>,
}

/// The time may jump during suspend, so the clock thread checks this often while a deadline is set.
const CLOCK_STEP: Duration = Duration::from_secs(1);

/// Attempts to read the result of a change while other changes end.
const OBSERVE_ATTEMPTS: u32 = 4;

impl Leases {
    pub(crate) fn new(config: LeaseConfig, executor: Option<Box<dyn CallExecutor>>) -> Arc<Leases> {
        let state = State {
            sequencer: LeaseSequencer::new(config),
            seen: None,
            sessions: FxHashMap::default(),
            detached: DiscardedLeases::default(),
            due: Time::FAR,
            clock: Time::FAR,
            stopping: false,
        };
        Arc::new(Leases {
            state: Mutex::new(state),
            wake: Condvar::new(),
            executor,
            places: InodeLocks::new(),
            homes: Arc::default(),
            space_reclaimer: Arc::default(),
        })
    }

    /// Starts the thread that drives the table's timeouts, until [`Leases::stop`].
    pub(crate) fn start_clock(self: &Arc<Leases>) -> std::io::Result<()> {
        let leases = Arc::clone(self);
        std::thread::Builder::new().name("nigh-leases".into()).spawn(move || leases.run_clock())?;
        Ok(())
    }

    pub(crate) fn stop(&self) {
        self.state.lock().stopping = true;
        self.wake.notify_all();
    }

    pub(crate) fn report(&self) -> LeaseReport {
        self.state.lock().sequencer.report()
    }

    /// Returns table, parked calls and leases of discarded sessions, all at one moment.
    pub(crate) fn snapshot(&self) -> LeaseSnapshot {
        let state = self.state.lock();
        let parked = state.sequencer.parked();
        LeaseSnapshot {
            report: state.sequencer.report(),
            parked: parked
                .map(|(change, job)| Parked { change, session: job.holder().0, call: job.type_name() })
                .collect(),
            detached: state.detached.iter().map(|(holder, absent)| (holder, absent.who.0)).collect(),
        }
    }

    /// Registers a session. `dropped`: its client has dropped all grants of its earlier sessions.
    pub(crate) fn attach(
        &self,
        session: &Arc<dyn LeaseSession>,
        who: (u64, u64),
        terms: &LeaseTerms,
        dropped: bool,
    ) {
        self.with(|state, now| {
            let is_it =
                |absent: &DetachedSession| absent.who == who && absent.peer.has_same_rights(session.peer());
            if dropped {
                state.detached.handle_dropped((state.sequencer.table_mut(), now), is_it);
            }
            state.sessions.insert(session.holder(), Arc::clone(session));
            state.begin_session(now, &**session, terms);
        });
    }

    /// Resumes a session over another connection. Returns true if its lease had expired and a new one begins.
    /// Otherwise the lease is renewed, unless the session is suspect, which it stays.
    pub(crate) fn resume(&self, session: &dyn LeaseSession, terms: &LeaseTerms) -> bool {
        self.with(|state, now| {
            state.sequencer.table_mut().handle_renewal(now, session.holder());
            let lapsed = !state.sequencer.table().is_known(session.holder());
            if lapsed {
                state.begin_session(now, session, terms);
            }
            lapsed
        })
    }

    /// Whether there are several sessions.
    pub(crate) fn has_several_sessions(&self) -> bool {
        self.state.lock().sessions.len() > 1
    }

    /// Registers a holder without a session.
    pub(crate) fn attach_unconnected(&self, holder: Holder, term: Term) {
        self.with(|state, now| {
            state.sequencer.table_mut().handle_begin(now, holder, &LeaseTerms::plain(term))
        });
    }

    /// Removes a session with its parked calls. `goodbye`: its client has dropped its grants; otherwise they stay
    /// until the lease expires.
    pub(crate) fn remove_session(&self, session: &dyn LeaseSession, who: (u64, u64), goodbye: bool) {
        let peer = session.peer().clone();
        let dropped = self.with(|state, now| {
            let holder = session.holder();
            state.sessions.remove(&holder);
            let client = DetachedSession { who, peer };
            state.detached.end_session((state.sequencer.table_mut(), now), (holder, client), goodbye);
            state.sequencer.take_parked(|call| call.holder() == holder)
        });
        drop(dropped); // ends the calls' changes
    }

    /// Renews a client's lease on receipt of a message. Returns false if the message neither renews the lease nor may
    /// be answered.
    pub(crate) fn renew(&self, holder: Holder) -> bool {
        self.with(|state, now| state.sequencer.table_mut().handle_renewal(now, holder))
    }

    pub(crate) fn acknowledge(&self, holder: Holder, recall: RecallId) {
        self.with(|state, now| state.sequencer.table_mut().handle_acknowledge(now, holder, recall));
    }

    pub(crate) fn return_grants(&self, holder: Holder, grants: &[GrantId]) {
        self.with(|state, now| state.sequencer.table_mut().handle_return(now, holder, grants));
    }

    /// Withdraws grants that no reply carries.
    pub(crate) fn withdraw(&self, holder: Holder, grants: &[GrantId]) {
        if !grants.is_empty() {
            self.with(|state, now| state.sequencer.handle_withdraw(now, holder, grants));
        }
    }

    pub(crate) fn grant(&self, request: GrantRequest) -> Option<Granted> {
        self.with(|state, now| state.sequencer.handle_grant(now, request))
    }

    /// Queues a reply under the lock under which recalls are queued. Removes grants that it may not carry any more;
    /// `put` learns whether the remaining grants are unchanged.
    pub(crate) fn put_answer(&self, holder: Holder, grants: Vec<Grant>, put: impl FnOnce(Vec<Grant>, bool)) {
        self.with_answer(|state, now| state.sequencer.handle_reply(now, holder, grants), put);
    }

    /// [`LeaseTable::handle_may_list`].
    pub(crate) fn may_list(&self, holder: Holder, grant: GrantId) {
        self.with(|state, now| state.sequencer.table_mut().handle_may_list(now, holder, grant));
    }

    /// Recalls a key from all holders, without waiting for its return.
    pub(crate) fn recall(&self, key: LeaseKey) {
        self.with(|state, now| state.sequencer.handle_recall(now, key));
    }

    /// Passes an input to the table that belongs to no session.
    pub(crate) fn with_table<T>(&self, say: impl FnOnce(&mut LeaseTable, Time) -> T) -> T {
        self.with(|state, now| say(state.sequencer.table_mut(), now))
    }

    /// Begins a change, or extends one. Returns true if no other session holds a conflicting lease.
    pub(crate) fn change(
        &self,
        by: Holder,
        begun: Option<ChangeId>,
        changes: &[Change],
        flush: bool,
    ) -> (ChangeId, bool) {
        self.with(|state, now| {
            let table = state.sequencer.table_mut();
            let id = match begun {
                Some(id) => {
                    table.handle_extend(now, id, changes);
                    id
                }
                None if flush => table.handle_write_back(now, by, changes),
                None => table.handle_change(now, Some(by), changes),
            };
            (id, table.is_ready(id))
        })
    }

    /// Requests a grant before data is read. A read that has to wait is registered.
    pub(crate) fn read(&self, request: GrantRequest) -> ReadGrant {
        self.with(|state, now| state.sequencer.handle_read(now, request))
    }

    /// Takes the grant of a read that waited.
    pub(crate) fn take_grant(&self, reader: ChangeId) -> Option<Granted> {
        self.state.lock().sequencer.take_granted(reader)
    }

    /// Ends a change after its effect. Holders of the suspended facts receive the new values.
    fn finish<T>(&self, id: ChangeId, tells: &[ChangeProbe], end: impl FnOnce(&mut State, Time) -> T) -> T {
        let mut end = Some(end);
        for _ in 0..OBSERVE_ATTEMPTS {
            let Some((looked, exports)) = self.exports_awaiting(id) else { break };
            let seen = ObservedFacts::look(looked, exports, tells, &self.homes);
            let result = self.with(|state, now| {
                state.sequencer.table_mut().handle_observed(id, seen.looked).then(|| {
                    state.seen = Some(seen);
                    end.take().expect("it is ended once")(state, now)
                })
            });
            if let Some(result) = result {
                return result;
            }
        }
        // The facts kept changing, so the holders read them themselves.
        self.with(end.expect("it has not ended"))
    }

    /// Ends a change after its effect.
    pub(crate) fn done(&self, id: ChangeId, tells: &[ChangeProbe]) {
        self.finish(id, tells, |state, now| state.sequencer.handle_done(now, id));
    }

    /// Ends a change of data after its effect and grants the written data to the writer.
    pub(crate) fn written(
        &self,
        id: ChangeId,
        tells: &[ChangeProbe],
        wrote: GrantRequest,
    ) -> Option<Granted> {
        self.finish(id, tells, |state, now| state.sequencer.handle_written(now, id, wrote))
    }

    /// Whether a holder has suspended facts of this change.
    pub(crate) fn has_suspended_holders(&self, id: ChangeId) -> bool {
        self.state.lock().sequencer.table().awaiting_update(id).next().is_some()
    }

    pub(crate) fn is_ready(&self, id: ChangeId) -> bool {
        self.state.lock().sequencer.table().is_ready(id)
    }

    /// [`nigh_lease::LeaseTable::merge_base`].
    pub(crate) fn merge_base(
        &self,
        id: ChangeId,
        under: (GrantId, LeaseScope),
        range: (u64, u64),
    ) -> Option<MergeBase> {
        self.with(|state, now| state.sequencer.table_mut().merge_base(now, id, under, range))
    }

    /// [`nigh_lease::LeaseTable::needs_before_image`].
    pub(crate) fn may_need_merge(&self, id: ChangeId) -> bool {
        self.state.lock().sequencer.table().needs_before_image(id)
    }

    /// [`nigh_lease::LeaseTable::handle_wrote_back`].
    pub(crate) fn wrote_back(&self, id: ChangeId, wrote: WroteBack<'_>) {
        self.state.lock().sequencer.table_mut().handle_wrote_back(id, wrote);
    }

    /// [`nigh_lease::LeaseTable::handle_changed`].
    pub(crate) fn changed(&self, id: ChangeId, range: (u64, u64)) {
        self.state.lock().sequencer.table_mut().handle_changed(id, range);
    }

    /// [`nigh_lease::LeaseTable::handle_sync_barrier`].
    pub(crate) fn wait_for_acknowledgements(&self, by: Holder, key: LeaseKey) -> ChangeId {
        self.with(|state, now| state.sequencer.table_mut().handle_sync_barrier(now, by, key))
    }

    /// Returns the exports through which the result of a change is needed, if any.
    fn exports_awaiting(&self, id: ChangeId) -> Option<(ObservedAt, Vec<Arc<Export>>)> {
        let state = self.state.lock();
        let mut exports: Vec<Arc<Export>> = Vec::new();
        for holder in state.sequencer.table().awaiting_update(id) {
            let export = state.sessions.get(&holder).and_then(|session| session.export());
            let known = |export: &&Arc<Export>| exports.iter().any(|known| Arc::ptr_eq(known, export));
            exports.extend(export.filter(|export| !known(export)).cloned());
        }
        (!exports.is_empty()).then(|| (state.sequencer.table().observation_point(), exports))
    }

    /// Handles ENOSPC on a filesystem: all exports close the files that they keep. Returns whether any were closed
    /// since round `rounds`.
    pub(crate) fn reclaim_space(&self, own: &Export, filesystem: Option<u64>, rounds: u64) -> bool {
        let exports: Vec<Arc<Export>> = {
            let state = self.state.lock();
            state.sessions.values().filter_map(|session| session.export()).cloned().collect()
        };
        let others = || exports.iter().flat_map(|export| export.take_kept_fds());
        self.space_reclaimer
            .reclaim(rounds, filesystem, || own.take_kept_fds().into_iter().chain(others()).collect())
    }

    pub(crate) fn end(&self, id: ChangeId) {
        self.with(|state, now| state.sequencer.handle_done(now, id));
    }

    /// Parks a call until its change is ready. Returns the call if it may go on at once; a cancelled call is aborted.
    pub(crate) fn park(&self, call: Box<dyn ParkedCall>) -> Option<Box<dyn ParkedCall>> {
        let Some(change) = call.change() else { return Some(call) };
        let parking = self.state.lock().sequencer.park(change, call, |call| call.is_wanted());
        match parking {
            ParkResult::Parked => None,
            ParkResult::Ready(call) => Some(call),
            ParkResult::Cancelled(call) => {
                call.abort();
                None
            }
        }
    }

    /// Removes and returns a parked call.
    pub(crate) fn take_back(&self, holder: Holder, call: CallId) -> Option<Box<dyn ParkedCall>> {
        let is_it = |parked: &dyn ParkedCall| parked.call() == call && parked.holder() == holder;
        self.state.lock().sequencer.take_parked(|parked| is_it(&**parked)).pop()
    }

    /// Runs one input to the table and all its output.
    fn with<T>(&self, act: impl FnOnce(&mut State, Time) -> T) -> T {
        self.with_answer(act, |_, _| ())
    }

    /// Like [`Leases::with`], for an input that may queue a reply through `put`.
    fn with_answer<T>(
        &self,
        act: impl FnOnce(&mut State, Time) -> T,
        put: impl FnOnce(Vec<Grant>, bool),
    ) -> T {
        let mut state = self.state.lock();
        let result = act(&mut state, now());
        let pending = state.drain(put);
        state.seen = None;
        let earlier = state.due < state.clock;
        drop(state);
        if earlier {
            self.wake.notify_one();
        }
        self.carry_out(pending);
        result
    }

    fn carry_out(&self, pending: Pending) {
        let Pending { send, ready, fenced } = pending;
        send.iter().for_each(|session| session.send());
        fenced.into_iter().for_each(|(session, lease)| session.fence(lease));
        if let Some(executor) = &self.executor {
            ready.into_iter().for_each(|call| executor.resume(call));
        }
    }

    fn run_clock(&self) {
        let mut state = self.state.lock();
        while !state.stopping {
            let time = now();
            if state.due <= time {
                state.sequencer.handle_timeout(time);
                let pending = state.drain(|_, _| ());
                drop(state);
                self.carry_out(pending);
                state = self.state.lock();
                continue;
            }
            state.clock = state.due;
            let left = Duration::from_nanos(state.due.since(time).0);
            if state.due == Time::FAR {
                self.wake.wait(&mut state);
            } else {
                self.wake.wait_for(&mut state, left.min(CLOCK_STEP));
            }
        }
    }
}

impl State {
    fn begin_session(&mut self, now: Time, session: &dyn LeaseSession, terms: &LeaseTerms) {
        session.begin_lease();
        self.sequencer.table_mut().handle_begin(now, session.holder(), terms);
    }

    fn send(&self, pending: &mut Pending, holder: Holder, message: LeaseMessage) {
        if let Some(session) = self.sessions.get(&holder) {
            session.queue(message);
            pending.send.push(Arc::clone(session));
        }
    }

    fn send_commit(&self, pending: &mut Pending, holder: Holder, id: RecallId, told: Vec<UpdatedKey>) {
        let Some(session) = self.sessions.get(&holder) else { return };
        let commit = match (&self.seen, session.export()) {
            (Some(seen), Some(export)) => seen.commit(export, id, told),
            _ => UpdateCommit { id, facts: Vec::new() },
        };
        self.send(pending, holder, LeaseMessage::Commit(commit));
    }

    fn log_suspect(&self, holder: Holder, suspect: bool) {
        if let Some(session) = self.sessions.get(&holder) {
            session.log_suspect(suspect);
        }
    }

    /// Polls the sequencer until it has no more output. Recalls are queued on their wires when this returns.
    fn drain(&mut self, put: impl FnOnce(Vec<Grant>, bool)) -> Pending {
        let (mut pending, mut put) = (Pending::default(), Some(put));
        loop {
            match self.sequencer.poll_output() {
                SequencerOutput::Recall { holder, recall } => {
                    self.send(&mut pending, holder, LeaseMessage::Recall(recall))
                }
                SequencerOutput::Prepare { holder, hold } => {
                    self.send(&mut pending, holder, LeaseMessage::Prepare(hold))
                }
                SequencerOutput::Commit { holder, id, told } => {
                    self.send_commit(&mut pending, holder, id, told)
                }
                SequencerOutput::Reply { grants, same, .. } => {
                    let put = put.take().expect("one input brings one answer at the most");
                    put(grants, same);
                }
                SequencerOutput::Ready(call) => pending.ready.push(call),
                SequencerOutput::Suspect(holder) => self.log_suspect(holder, true),
                SequencerOutput::Trusted(holder) => self.log_suspect(holder, false),
                SequencerOutput::Fenced(holder) => {
                    let session = self.sessions.get(&holder);
                    pending.fenced.extend(session.map(|session| (Arc::clone(session), session.lease())));
                    if self.detached.handle_fenced(holder) {
                        log_fenced_apart(holder);
                    }
                }
                SequencerOutput::Timeout(due, _) => {
                    self.due = due;
                    return pending;
                }
            }
        }
    }
}

/// Logs the lease expiry of a discarded session.
fn log_fenced_apart(holder: Holder) {
    let session = holder.0;
    tracing::warn!(event = "fenced", session, "session fenced: it did not come back within its lease");
}
