//! The lease table of a server, its clock, and the calls that wait for others to give back.
//! Rules: docs/decisions/0008-leases.md.

use crate::events;
use crate::export::{Export, GivenBack};
use crate::homes::Homes;
use crate::place_locks::PlaceLocks;
use crate::pool::{Job, Pool};
use crate::session::{Attached, Session, now};
use crate::told::{Seen, Tell};
use nigh_link::Peer;
use nigh_native::lease::{
    Change, ChangeId, Desk, DeskOutput, Granted, Holder, LeaseConfig, LeaseKey, LeaseReport, Looked,
    MergeBase, Parking, Party, Reading, Told, WroteBack,
};
use nigh_native::{LeaseTable, NAMES_ALONE, PUSHES, ServerConnection, TRUSTS_WATCH};
use nigh_types::{CallId, Commit, Covers, Grant, GrantId, NodeId, RecallId, Span, Term, Time};
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// One table for all sessions of a server.
///
/// **Lock order.** Places (`place_locks.rs`), then `Leases::state`, then `Session::wire`, then the outbox.
/// Under `state` recalls, and answers that carry grants, take their places on sessions' wires, as [`Desk`]
/// says. Nothing is sent to a socket, no call is executed, submitted or dropped under it. Nobody waits under any
/// of them for an acknowledgement: a call that has to is parked, and occupies no thread.
pub(crate) struct Leases {
    state: Mutex<State>,
    /// The clock has something earlier to do.
    wake: Condvar,
    /// Whereto parked calls return; `None` for a table of one session, where none is ever parked.
    pool: Option<Weak<Pool>>,
    pub(crate) places: PlaceLocks,
    pub(crate) homes: Arc<Homes>,
    pub(crate) given_back: Arc<GivenBack>,
}

struct State {
    desk: Desk<Job>,
    /// What has become of the change that ends just now.
    seen: Option<Seen>,
    sessions: FxHashMap<Holder, Arc<Session>>,
    /// Whose sessions were forgotten before their lease ran out.
    cut: BTreeMap<Holder, Absent>,
    /// When the table wants to be told the time.
    due: Time,
    /// For when the clock was set.
    clock: Time,
    stopping: bool,
}

/// The client of a session that is no more, and its incarnation.
struct Absent {
    who: (u64, u64),
    peer: Peer,
}

/// For status.
pub(crate) struct Picture {
    pub(crate) report: LeaseReport,
    pub(crate) parked: Vec<Parked>,
    /// Holders without a session, and which client each was.
    pub(crate) cut: Vec<(Holder, u64)>,
}

/// A call that waits for others to give back.
pub(crate) struct Parked {
    pub(crate) change: ChangeId,
    pub(crate) session: u64,
    pub(crate) call: &'static str,
}

/// What the table said and is done when its lock is free again.
#[derive(Default)]
struct Pending {
    send: Vec<Arc<Session>>,
    ready: Vec<Job>,
    /// With the number of the lease that ran out.
    fenced: Vec<(Arc<Session>, u64)>,
}

/// The time may jump while the machine sleeps, so the clock looks this often while anything is due.
const CLOCK_STEP: Duration = Duration::from_secs(1);

/// It is looked so often what has become of a change while others end.
const LOOKS: u32 = 4;

impl Leases {
    pub(crate) fn new(config: LeaseConfig, pool: Option<&Arc<Pool>>) -> Arc<Leases> {
        let state = State {
            desk: Desk::new(config),
            seen: None,
            sessions: FxHashMap::default(),
            cut: BTreeMap::new(),
            due: Time::FAR,
            clock: Time::FAR,
            stopping: false,
        };
        Arc::new(Leases {
            state: Mutex::new(state),
            wake: Condvar::new(),
            pool: pool.map(Arc::downgrade),
            places: PlaceLocks::new(),
            homes: Arc::default(),
            given_back: Arc::default(),
        })
    }

    /// Whereto calls return that had to wait.
    pub(crate) fn pool(&self) -> Weak<Pool> {
        self.pool.clone().unwrap_or_default()
    }

    /// Starts the thread that tells the table the time, until [`Leases::stop`].
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
        self.state.lock().desk.report()
    }

    /// The table, the parked calls, and the leases whose session was forgotten; all at one moment.
    pub(crate) fn picture(&self) -> Picture {
        let state = self.state.lock();
        let parked = state.desk.parked();
        Picture {
            report: state.desk.report(),
            parked: parked
                .map(|(change, job)| Parked {
                    change,
                    session: job.session.id,
                    call: job.request.call.type_name(),
                })
                .collect(),
            cut: state.cut.iter().map(|(holder, absent)| (*holder, absent.who.0)).collect(),
        }
    }

    /// A session begins. `dropped`: its client has dropped everything that earlier sessions of it were granted.
    pub(crate) fn attach(&self, session: &Arc<Session>, attached: &Attached, dropped: bool) {
        self.with(|state, now| {
            let is_it = |absent: &Absent| absent.who == attached.who && absent.peer.is_same(&session.peer);
            let returned = state.cut.iter().filter(|(_, absent)| dropped && is_it(absent));
            let returned: Vec<Holder> = returned.map(|(holder, _)| *holder).collect();
            for holder in returned {
                state.cut.remove(&holder);
                state.desk.table_mut().handle_gone(now, holder);
            }
            state.sessions.insert(session.holder(), Arc::clone(session));
            state.begin_session(now, session, attached);
        });
    }

    /// A session goes on over another connection. True: its lease had run out, and a new one begins. Otherwise
    /// its client is heard, unless it is suspect, which it stays.
    pub(crate) fn resume(&self, session: &Arc<Session>, attached: &Attached) -> bool {
        self.with(|state, now| {
            state.desk.table_mut().handle_heard(now, session.holder());
            let lapsed = !state.desk.table().knows(session.holder());
            if lapsed {
                state.begin_session(now, session, attached);
            }
            lapsed
        })
    }

    /// Whether there are several sessions.
    pub(crate) fn are_several(&self) -> bool {
        self.state.lock().sessions.len() > 1
    }

    /// The same for a session without a connection.
    pub(crate) fn attach_alone(&self, holder: Holder, term: Term) {
        self.with(|state, now| state.begin(now, holder, false, term));
    }

    /// The session is over, and with it what it had parked. `goodbye`: its client has dropped everything;
    /// otherwise its grants stand until its lease has run out.
    pub(crate) fn leave(&self, session: &Arc<Session>, who: (u64, u64), goodbye: bool) {
        let peer = session.peer.clone();
        let dropped = self.with(|state, now| {
            let holder = session.holder();
            state.sessions.remove(&holder);
            if goodbye {
                state.desk.table_mut().handle_gone(now, holder);
            } else if state.desk.table().knows(holder) {
                state.desk.table_mut().handle_cut(now, holder);
                state.cut.insert(holder, Absent { who, peer });
            }
            state.desk.take_parked(|job| Arc::ptr_eq(&job.session, session))
        });
        drop(dropped); // ends their changes
    }

    /// Something was heard of the client. False: it is neither answered nor renewed by it.
    pub(crate) fn is_heard(&self, holder: Holder) -> bool {
        self.with(|state, now| state.desk.table_mut().handle_heard(now, holder))
    }

    pub(crate) fn acknowledge(&self, holder: Holder, recall: RecallId) {
        self.with(|state, now| state.desk.table_mut().handle_acknowledge(now, holder, recall));
    }

    pub(crate) fn give_back(&self, holder: Holder, grants: &[GrantId]) {
        self.with(|state, now| state.desk.table_mut().handle_return(now, holder, grants));
    }

    /// These were registered and no answer carries them.
    pub(crate) fn withdraw(&self, holder: Holder, grants: &[GrantId]) {
        if !grants.is_empty() {
            self.with(|state, now| state.desk.handle_withdraw(now, holder, grants));
        }
    }

    pub(crate) fn grant(&self, holder: Holder, key: LeaseKey, node: NodeId) -> Option<Granted> {
        self.with(|state, now| state.desk.handle_grant(now, (holder, key), node))
    }

    /// Puts an answer on a wire, under the lock under which recalls are put there. Takes out of its grants what
    /// it may not carry; `put` is told whether those that are left are as they were.
    pub(crate) fn put_answer(&self, holder: Holder, grants: Vec<Grant>, put: impl FnOnce(Vec<Grant>, bool)) {
        self.with_answer(|state, now| state.desk.handle_answer(now, holder, grants), put);
    }

    /// [`LeaseTable::handle_may_list`].
    pub(crate) fn may_list(&self, holder: Holder, grant: GrantId) {
        self.with(|state, now| state.desk.table_mut().handle_may_list(now, holder, grant));
    }

    /// Asks everybody for what they hold of a key. Nobody waits until they have given it back.
    pub(crate) fn recall(&self, key: LeaseKey) {
        self.with(|state, now| state.desk.handle_recall(now, key));
    }

    /// What is no session's and is said to the table.
    pub(crate) fn tell<T>(&self, say: impl FnOnce(&mut LeaseTable, Time) -> T) -> T {
        self.with(|state, now| say(state.desk.table_mut(), now))
    }

    /// Begins a change, or names more of what it makes false. True: nobody else holds any of it.
    pub(crate) fn change(
        &self,
        by: Holder,
        begun: Option<ChangeId>,
        changes: &[Change],
        flush: bool,
    ) -> (ChangeId, bool) {
        self.with(|state, now| {
            let table = state.desk.table_mut();
            let id = match begun {
                Some(id) => {
                    table.handle_extend(now, id, changes);
                    id
                }
                None if flush => table.handle_flush(now, by, changes),
                None => table.handle_change(now, Some(by), changes),
            };
            (id, table.is_ready(id))
        })
    }

    /// For a grant that is to be had before data is read; a call that waits for it is kept.
    pub(crate) fn read(&self, seat: (Holder, LeaseKey), node: NodeId) -> Reading {
        self.with(|state, now| state.desk.handle_read(now, seat, node))
    }

    /// What a call was granted that waited.
    pub(crate) fn claim(&self, reader: ChangeId) -> Option<Granted> {
        self.state.lock().desk.take_granted(reader)
    }

    /// Ends a change that has had its effect. Those who hold back what it changed are told what that is now.
    fn finish<T>(&self, id: ChangeId, tells: &[Tell], end: impl FnOnce(&mut State, Time) -> T) -> T {
        let mut end = Some(end);
        for _ in 0..LOOKS {
            let Some((looked, exports)) = self.asked(id) else { break };
            let seen = Seen::look(looked, exports, tells, &self.homes);
            let result = self.with(|state, now| {
                state.desk.table_mut().handle_looked(id, seen.looked).then(|| {
                    state.seen = Some(seen);
                    end.take().expect("it is ended once")(state, now)
                })
            });
            if let Some(result) = result {
                return result;
            }
        }
        // Who holds it back looks for itself.
        self.with(end.expect("it has not ended"))
    }

    /// A change has had its effect, and ends.
    pub(crate) fn done(&self, id: ChangeId, tells: &[Tell]) {
        self.finish(id, tells, |state, now| state.desk.handle_done(now, id));
    }

    /// The same of a change of data, which its maker is granted.
    pub(crate) fn written(
        &self,
        id: ChangeId,
        tells: &[Tell],
        seat: (Holder, LeaseKey),
        node: NodeId,
    ) -> Option<Granted> {
        self.finish(id, tells, |state, now| state.desk.handle_written(now, id, seat, node))
    }

    /// Whether somebody holds back what a change names.
    pub(crate) fn is_awaited(&self, id: ChangeId) -> bool {
        self.state.lock().desk.table().awaiting(id).next().is_some()
    }

    pub(crate) fn is_ready(&self, id: ChangeId) -> bool {
        self.state.lock().desk.table().is_ready(id)
    }

    /// [`nigh_native::LeaseTable::merge_base`].
    pub(crate) fn merge_base(
        &self,
        id: ChangeId,
        under: (GrantId, Covers),
        range: (u64, u64),
    ) -> Option<MergeBase> {
        self.with(|state, now| state.desk.table_mut().merge_base(now, id, under, range))
    }

    /// [`nigh_native::LeaseTable::overtakes`].
    pub(crate) fn overtakes(&self, id: ChangeId) -> bool {
        self.state.lock().desk.table().overtakes(id)
    }

    /// [`nigh_native::LeaseTable::handle_wrote_back`].
    pub(crate) fn wrote_back(&self, id: ChangeId, wrote: WroteBack<'_>) {
        self.state.lock().desk.table_mut().handle_wrote_back(id, wrote);
    }

    /// [`nigh_native::LeaseTable::handle_changed`].
    pub(crate) fn changed(&self, id: ChangeId, range: (u64, u64)) {
        self.state.lock().desk.table_mut().handle_changed(id, range);
    }

    /// [`nigh_native::LeaseTable::handle_settle`].
    pub(crate) fn settle(&self, by: Holder, key: LeaseKey) -> ChangeId {
        self.with(|state, now| state.desk.table_mut().handle_settle(now, by, key))
    }

    /// For which exports it is to be looked what has become of a change; `None`: for none.
    fn asked(&self, id: ChangeId) -> Option<(Looked, Vec<Arc<Export>>)> {
        let state = self.state.lock();
        let mut exports: Vec<Arc<Export>> = Vec::new();
        for holder in state.desk.table().awaiting(id) {
            let attached = state.sessions.get(&holder).and_then(|session| session.attached());
            let export = attached.map(|attached| &attached.export);
            let known = |export: &&Arc<Export>| exports.iter().any(|known| Arc::ptr_eq(known, export));
            exports.extend(export.filter(|export| !known(export)).cloned());
        }
        (!exports.is_empty()).then(|| (state.desk.table().looks(), exports))
    }

    /// A call on that filesystem was refused for want of space: all exports give back what they keep. Whether anything was
    /// given back since there were so many rounds.
    pub(crate) fn give_back_space(&self, own: &Export, filesystem: Option<u64>, rounds: u64) -> bool {
        let exports: Vec<Arc<Export>> = {
            let state = self.state.lock();
            let attached = state.sessions.values().filter_map(|session| session.attached());
            attached.map(|attached| Arc::clone(&attached.export)).collect()
        };
        let others = || exports.iter().flat_map(|export| export.take_kept());
        self.given_back.since(rounds, filesystem, || own.take_kept().into_iter().chain(others()).collect())
    }

    pub(crate) fn end(&self, id: ChangeId) {
        self.with(|state, now| state.desk.handle_done(now, id));
    }

    /// Keeps a call until its change is ready; `None`: it is kept, or nobody waits for it any more.
    /// Otherwise it goes on at once.
    pub(crate) fn park(&self, job: Job) -> Option<Job> {
        let Some(change) = job.change.as_ref().map(|change| change.id) else { return Some(job) };
        let is_wanted = |job: &Job| !job.session.is_over() && !job.session.is_cancelled(job.call);
        let parking = self.state.lock().desk.park(change, job, is_wanted);
        match parking {
            Parking::Parked => None,
            Parking::Ready(job) => Some(job),
            Parking::Unwanted(job) => {
                job.give_up();
                None
            }
        }
    }

    /// Takes back a call that is parked.
    pub(crate) fn take_back(&self, session: &Arc<Session>, call: CallId) -> Option<Job> {
        let is_it = |job: &Job| job.call == call && Arc::ptr_eq(&job.session, session);
        self.state.lock().desk.take_parked(is_it).pop()
    }

    /// One input to the table, and all that it puts out.
    fn with<T>(&self, act: impl FnOnce(&mut State, Time) -> T) -> T {
        self.with_answer(act, |_, _| ())
    }

    /// The same with an answer that is put on its wire when it is its turn.
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
        send.iter().for_each(|session| session.outbox.send());
        for (session, lease) in fenced {
            events::fenced(&session);
            session.lapse(lease);
        }
        if let Some(pool) = self.pool.as_ref().and_then(Weak::upgrade) {
            ready.into_iter().for_each(|job| pool.submit(job));
        }
    }

    fn run_clock(&self) {
        let mut state = self.state.lock();
        while !state.stopping {
            let time = now();
            if state.due <= time {
                state.desk.handle_timeout(time);
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
    fn begin_session(&mut self, now: Time, session: &Session, attached: &Attached) {
        session.begin_lease();
        let names_alone = attached.features & NAMES_ALONE != 0;
        self.begin(now, session.holder(), names_alone, attached.term);
        let party = Party { client: attached.who, origin: session.origin };
        self.desk.table_mut().handle_client(now, session.holder(), party);
        // A peer that does not speak for all users of its machine: each call goes by its caller's rights alone.
        if attached.export.acts() && !attached.files.is_vouched() {
            self.desk.table_mut().handle_confine(now, session.holder());
        }
        if attached.features & PUSHES != 0 {
            self.desk.table_mut().handle_pushes(now, session.holder());
        }
        if attached.features & TRUSTS_WATCH != 0 {
            self.desk.table_mut().handle_trusts_watch(now, session.holder());
        }
    }

    fn begin(&mut self, now: Time, holder: Holder, names_alone: bool, term: Term) {
        self.desk.table_mut().handle_attach(now, holder, names_alone);
        let limit = match term {
            Term::Session => Span::FOREVER,
            Term::Limited(span) => span,
        };
        self.desk.table_mut().handle_limit(now, holder, limit);
    }

    fn say(&self, pending: &mut Pending, holder: Holder, say: impl FnOnce(&mut ServerConnection)) {
        if let Some(session) = self.sessions.get(&holder) {
            session.queue(say);
            pending.send.push(Arc::clone(session));
        }
    }

    fn say_commit(&self, pending: &mut Pending, holder: Holder, id: RecallId, told: Vec<Told>) {
        let Some(session) = self.sessions.get(&holder) else { return };
        let export = session.attached().map(|attached| &attached.export);
        let commit = match (&self.seen, export) {
            (Some(seen), Some(export)) => seen.commit(export, id, told),
            _ => Commit { id, facts: Vec::new() },
        };
        self.say(pending, holder, |connection| connection.commit(commit));
    }

    /// Everything that the desk has to say. Recalls are on their wires when this returns.
    fn drain(&mut self, put: impl FnOnce(Vec<Grant>, bool)) -> Pending {
        let (mut pending, mut put) = (Pending::default(), Some(put));
        loop {
            match self.desk.poll_output() {
                DeskOutput::Recall { holder, recall } => {
                    self.say(&mut pending, holder, |connection| connection.recall(recall))
                }
                DeskOutput::Hold { holder, hold } => {
                    self.say(&mut pending, holder, |connection| connection.hold(hold))
                }
                DeskOutput::Commit { holder, id, told } => self.say_commit(&mut pending, holder, id, told),
                DeskOutput::Answer { grants, same, .. } => {
                    let put = put.take().expect("one input brings one answer at the most");
                    put(grants, same);
                }
                DeskOutput::Ready(call) => pending.ready.push(call),
                DeskOutput::Suspect(holder) => {
                    self.sessions.get(&holder).into_iter().for_each(|session| events::suspect(session));
                }
                DeskOutput::Trusted(holder) => {
                    self.sessions.get(&holder).into_iter().for_each(|session| events::acknowledged(session));
                }
                DeskOutput::Fenced(holder) => {
                    let session = self.sessions.get(&holder);
                    pending.fenced.extend(session.map(|session| (Arc::clone(session), session.lease())));
                    if self.cut.remove(&holder).is_some() {
                        events::fenced_apart(holder);
                    }
                }
                DeskOutput::Timeout(due, _) => {
                    self.due = due;
                    return pending;
                }
            }
        }
    }
}
