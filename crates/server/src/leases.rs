//! The lease table of a server, its clock, and the calls that wait for others to give back.
//! Rules: docs/decisions/0008-leases.md.

use crate::events;
use crate::homes::Homes;
use crate::place_locks::PlaceLocks;
use crate::pool::{Job, Pool};
use crate::session::{Attached, Session, now};
use crate::unsent::{Carried, Unsent};
use nigh_link::Peer;
use nigh_native::lease::{
    Change, ChangeId, Granted, Holder, LeaseConfig, LeaseKey, LeaseOutput, LeaseReport,
};
use nigh_native::{LeaseTable, NAMES_ALONE};
use nigh_types::{CallId, Covers, Grant, GrantId, NodeId, Recall, RecallId, Span, Term, Time};
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// One table for all sessions of a server.
///
/// **Lock order.** Places (`place_locks.rs`), then `Leases::state`, then `Session::wire`, then the outbox.
/// Under `state` recalls, and answers that carry grants, take their places on sessions' wires; so a recall
/// stands there before whatever was granted after it. Nothing is sent to a socket, no call is executed,
/// submitted or dropped under it. Nobody waits under any of them for an acknowledgement: a call that has to is
/// parked, and occupies no thread.
pub(crate) struct Leases {
    state: Mutex<State>,
    /// The clock has something earlier to do.
    wake: Condvar,
    /// Whereto parked calls return; `None` for a table of one session, where none is ever parked.
    pool: Option<Weak<Pool>>,
    pub(crate) places: PlaceLocks,
    pub(crate) homes: Arc<Homes>,
}

struct State {
    table: LeaseTable,
    unsent: Unsent,
    sessions: FxHashMap<Holder, Arc<Session>>,
    /// Whose sessions were forgotten before their lease ran out.
    cut: BTreeMap<Holder, Absent>,
    parked: FxHashMap<ChangeId, Job>,
    /// Those of `parked` that wait for a grant.
    readers: FxHashMap<ChangeId, Reader>,
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

/// A call that waits for a grant on data.
struct Reader {
    seat: (Holder, LeaseKey),
    node: NodeId,
    /// What it was granted and has not taken.
    given: Option<Granted>,
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

impl Leases {
    pub(crate) fn new(config: LeaseConfig, pool: Option<&Arc<Pool>>) -> Arc<Leases> {
        let state = State {
            table: LeaseTable::new(config),
            unsent: Unsent::default(),
            sessions: FxHashMap::default(),
            cut: BTreeMap::new(),
            parked: FxHashMap::default(),
            readers: FxHashMap::default(),
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
        self.state.lock().table.report()
    }

    /// The table, the parked calls, and the leases whose session was forgotten; all at one moment.
    pub(crate) fn picture(&self) -> Picture {
        let state = self.state.lock();
        let parked = state.parked.iter();
        Picture {
            report: state.table.report(),
            parked: parked
                .map(|(change, job)| Parked {
                    change: *change,
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
                state.table.handle_gone(now, holder);
            }
            state.sessions.insert(session.holder(), Arc::clone(session));
            state.begin_session(now, session, attached);
        });
    }

    /// A session goes on over another connection. True: its lease had run out, and a new one begins. Otherwise
    /// its client is heard, unless it is suspect, which it stays.
    pub(crate) fn resume(&self, session: &Arc<Session>, attached: &Attached) -> bool {
        self.with(|state, now| {
            state.table.handle_heard(now, session.holder());
            let lapsed = !state.table.knows(session.holder());
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
                state.table.handle_gone(now, holder);
            } else if state.table.knows(holder) {
                state.table.handle_cut(now, holder);
                state.cut.insert(holder, Absent { who, peer });
            }
            let theirs = |job: &Job| Arc::ptr_eq(&job.session, session);
            let changes: Vec<ChangeId> =
                state.parked.iter().filter(|(_, job)| theirs(job)).map(|(change, _)| *change).collect();
            changes.iter().filter_map(|change| state.parked.remove(change)).collect::<Vec<Job>>()
        });
        drop(dropped); // ends their changes
    }

    /// Something was heard of the client. False: it is neither answered nor renewed by it.
    pub(crate) fn is_heard(&self, holder: Holder) -> bool {
        self.with(|state, now| state.table.handle_heard(now, holder))
    }

    pub(crate) fn acknowledge(&self, holder: Holder, recall: RecallId) {
        self.with(|state, now| state.table.handle_acknowledge(now, holder, recall));
    }

    pub(crate) fn give_back(&self, holder: Holder, grants: &[GrantId]) {
        self.with(|state, now| state.table.handle_return(now, holder, grants));
    }

    /// These were registered and no answer carries them.
    pub(crate) fn withdraw(&self, holder: Holder, grants: &[GrantId]) {
        if !grants.is_empty() {
            self.with(|state, now| {
                grants.iter().for_each(|grant| state.unsent.drop(*grant));
                state.table.handle_withdraw(now, holder, grants);
            });
        }
    }

    pub(crate) fn grant(&self, holder: Holder, key: LeaseKey, node: NodeId) -> Option<Granted> {
        self.with(|state, now| state.unsent.register(&mut state.table, now, (holder, key), node))
    }

    /// Puts an answer on a wire, under the lock under which recalls are put there. Takes out of its grants what
    /// it may not carry; `put` is told whether those that are left are as they were.
    pub(crate) fn put_answer(
        &self,
        holder: Holder,
        grants: &mut Vec<Grant>,
        put: impl FnOnce(&[Grant], bool),
    ) {
        let mut state = self.state.lock();
        let (now, before) = (now(), grants.len());
        let mut same = true;
        let State { table, unsent, .. } = &mut *state;
        let mut recalled = Vec::new();
        grants.retain_mut(|grant| {
            let id = grant.id;
            let carried = unsent.carry(table, now, grant);
            same &= carried != Carried::No && grant.id == id;
            recalled.extend((carried == Carried::Recalled).then_some(grant.id));
            carried != Carried::No
        });
        let mut pending = state.drain();
        // The new numbers may have put the holder above its quota.
        grants.retain(|grant| recalled.contains(&grant.id) || state.table.stands(holder, grant.id));
        put(grants, same && grants.len() == before);
        state.say_due(&mut pending);
        drop(state);
        self.carry_out(pending);
    }

    /// Asks everybody for what they hold of a key. Nobody waits until they have given it back.
    pub(crate) fn recall(&self, key: LeaseKey) {
        self.with(|state, now| {
            let change =
                state.table.handle_change(now, None, &[Change { key, names: Vec::new(), writes: false }]);
            state.table.handle_done(now, change);
        });
    }

    /// Begins a change, or names more of what it makes false. True: nobody else holds any of it.
    fn change(
        &self,
        by: Holder,
        begun: Option<ChangeId>,
        changes: &[Change],
        flush: bool,
    ) -> (ChangeId, bool) {
        self.with(|state, now| {
            let id = match begun {
                Some(id) => {
                    state.table.handle_extend(now, id, changes);
                    id
                }
                None if flush => state.table.handle_flush(now, by, changes),
                None => state.table.handle_change(now, Some(by), changes),
            };
            (id, state.table.is_ready(id))
        })
    }

    /// For a grant that is to be had before data is read; a call that waits for it is kept.
    fn read(&self, seat: (Holder, LeaseKey), node: NodeId) -> Reading {
        self.with(|state, now| {
            if let Some(granted) = state.unsent.register(&mut state.table, now, seat, node) {
                return Reading::Granted(granted);
            }
            let Some(id) = state.table.handle_wait(now, seat.0, seat.1, node) else {
                return Reading::Refused;
            };
            state.readers.insert(id, Reader { seat, node, given: None });
            Reading::Waits(id)
        })
    }

    /// What a call was granted that waited.
    fn claim(&self, reader: ChangeId) -> Option<Granted> {
        self.state.lock().readers.get_mut(&reader)?.given.take()
    }

    /// A change of data has its effect, which its maker is granted.
    fn written(&self, id: ChangeId, seat: (Holder, LeaseKey), node: NodeId) -> Option<Granted> {
        self.with(|state, now| {
            let gap = state.unsent.has_gap(&state.table, seat);
            let granted = state.table.handle_written(now, id, seat.1, node)?;
            state.unsent.note(seat, node, granted, gap);
            Some(granted)
        })
    }

    fn end(&self, id: ChangeId) {
        self.with(|state, now| {
            let left = state.readers.remove(&id);
            if let Some(Reader { seat, given: Some(granted), .. }) = left {
                state.unsent.drop(granted.id);
                state.table.handle_withdraw(now, seat.0, &[granted.id]);
            }
            state.table.handle_done(now, id);
        });
    }

    /// Keeps a call until its change is ready; `None`: it is kept, or nobody waits for it any more.
    /// Otherwise it goes on at once.
    pub(crate) fn park(&self, job: Job) -> Option<Job> {
        let mut given_up = None;
        let mut state = self.state.lock();
        let waits = job.change.as_ref().map(|change| change.id).filter(|id| !state.table.is_ready(*id));
        let go_on = match waits {
            None => Some(job),
            Some(_) if job.session.is_over() || job.session.is_cancelled(job.call) => {
                given_up = Some(job);
                None
            }
            Some(id) => {
                state.parked.insert(id, job);
                None
            }
        };
        drop(state);
        if let Some(job) = given_up {
            job.give_up();
        }
        go_on
    }

    /// Takes back a call that is parked.
    pub(crate) fn take_back(&self, session: &Arc<Session>, call: CallId) -> Option<Job> {
        let mut state = self.state.lock();
        let is_it = |job: &Job| job.call == call && Arc::ptr_eq(&job.session, session);
        let change = state.parked.iter().find(|(_, job)| is_it(job)).map(|(change, _)| *change)?;
        state.parked.remove(&change)
    }

    /// One input to the table, and all that it puts out.
    fn with<T>(&self, act: impl FnOnce(&mut State, Time) -> T) -> T {
        let mut state = self.state.lock();
        let result = act(&mut state, now());
        let mut pending = state.drain();
        state.say_due(&mut pending);
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
                state.table.handle_timeout(time);
                let pending = state.drain();
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
        self.table.handle_client(now, session.holder(), attached.who);
    }

    fn begin(&mut self, now: Time, holder: Holder, names_alone: bool, term: Term) {
        self.table.handle_attach(now, holder, names_alone);
        let limit = match term {
            Term::Session => Span::FOREVER,
            Term::Limited(span) => span,
        };
        self.table.handle_limit(now, holder, limit);
    }

    fn say(&self, pending: &mut Pending, holder: Holder, recall: Recall) {
        if let Some(session) = self.sessions.get(&holder) {
            session.queue_recall(recall);
            pending.send.push(Arc::clone(session));
        }
    }

    /// Recalls that answers were in the way of.
    fn say_due(&mut self, pending: &mut Pending) {
        for (holder, recall) in self.unsent.take_due() {
            self.say(pending, holder, recall);
        }
    }

    /// A reader that waits was granted what it waited for; a recall of that follows at the earliest. (Nothing
    /// of its session that was granted before is under way: whoever wrote meanwhile waited for that.)
    fn note_granted(&mut self, reader: ChangeId) {
        if let Some(Reader { seat, node, given }) = self.readers.get_mut(&reader)
            && let Some(granted) = self.table.take_granted(reader)
        {
            self.unsent.note(*seat, *node, granted, false);
            *given = Some(granted);
        }
    }

    /// Everything that the table has to say. Recalls are on their wires when this returns.
    fn drain(&mut self) -> Pending {
        let mut pending = Pending::default();
        loop {
            match self.table.poll_output() {
                LeaseOutput::Recall { holder, recall } => {
                    let key = self.table.recalled_key(recall.id);
                    let recall = match key {
                        Some(key) => self.unsent.recall(holder, key, recall),
                        None => Some(recall),
                    };
                    if let Some(recall) = recall {
                        self.say(&mut pending, holder, recall);
                    }
                }
                LeaseOutput::Ready(change) => {
                    self.note_granted(change);
                    pending.ready.extend(self.parked.remove(&change));
                }
                LeaseOutput::Suspect(holder) => {
                    self.sessions.get(&holder).into_iter().for_each(|session| events::suspect(session));
                }
                LeaseOutput::Trusted(holder) => {
                    self.sessions.get(&holder).into_iter().for_each(|session| events::acknowledged(session));
                }
                LeaseOutput::Fenced(holder) => {
                    let session = self.sessions.get(&holder);
                    pending.fenced.extend(session.map(|session| (Arc::clone(session), session.lease())));
                    if self.cut.remove(&holder).is_some() {
                        events::fenced_apart(holder);
                    }
                }
                LeaseOutput::Timeout(due, _) => {
                    self.due = due;
                    return pending;
                }
            }
        }
    }
}

/// A change under way, until this is dropped.
pub(crate) struct OpenChange {
    leases: Arc<Leases>,
    id: ChangeId,
}

impl OpenChange {
    /// [`LeaseTable::is_unbroken`].
    pub(crate) fn is_unbroken(&self, since: (GrantId, Covers)) -> bool {
        self.leases.with(|state, now| state.table.is_unbroken(now, self.id, since))
    }
}

impl Drop for OpenChange {
    fn drop(&mut self) {
        self.leases.end(self.id);
    }
}

/// Whether data may be read under a grant.
enum Reading {
    Granted(Granted),
    Waits(ChangeId),
    Refused,
}

/// One session's part in the table.
#[derive(Clone)]
pub(crate) struct Holding {
    pub(crate) leases: Arc<Leases>,
    pub(crate) holder: Holder,
}

impl Holding {
    /// Of a table of its own.
    pub(crate) fn alone(term: Term) -> Holding {
        let leases = Leases::new(LeaseConfig { term: Span(u64::MAX / 2), ..LeaseConfig::default() }, None);
        let holder = Holder(1);
        leases.attach_alone(holder, term);
        Holding { leases, holder }
    }

    /// Begins a change, or adds to one. True: it may be made now.
    pub(crate) fn change(&self, open: &mut Option<OpenChange>, changes: &[Change], flush: bool) -> bool {
        let begun = open.as_ref().map(|change| change.id);
        let (id, ready) = self.leases.change(self.holder, begun, changes, flush);
        open.get_or_insert_with(|| self.opened(id));
        ready
    }

    /// A grant for a call that reads data; `Err`: it waits until `open` is ready, and then asks again.
    pub(crate) fn read(
        &self,
        open: &mut Option<OpenChange>,
        key: LeaseKey,
        node: NodeId,
    ) -> Result<Option<Granted>, ()> {
        if let Some(waited) = open.take() {
            return Ok(self.leases.claim(waited.id));
        }
        match self.leases.read((self.holder, key), node) {
            Reading::Granted(granted) => Ok(Some(granted)),
            Reading::Refused => Ok(None),
            Reading::Waits(id) => {
                *open = Some(self.opened(id));
                Err(())
            }
        }
    }

    /// Ends a change of data, whose maker is granted what it wrote.
    pub(crate) fn written(&self, open: OpenChange, key: LeaseKey, node: NodeId) -> Option<Granted> {
        self.leases.written(open.id, (self.holder, key), node)
    }

    /// Waits until what was asked of others is given back. True: it is.
    pub(crate) fn settle(&self, open: &mut Option<OpenChange>, key: LeaseKey) -> bool {
        let id = match open {
            Some(open) => open.id,
            None => self.leases.with(|state, now| state.table.handle_settle(now, self.holder, key)),
        };
        open.get_or_insert_with(|| self.opened(id));
        self.leases.with(|state, _| state.table.is_ready(id))
    }

    fn opened(&self, id: ChangeId) -> OpenChange {
        OpenChange { leases: Arc::clone(&self.leases), id }
    }
}

impl std::fmt::Debug for Holding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.holder.fmt(f)
    }
}
