//! One client's session: its stream, over whatever connections, and its open files.

use crate::claims::Admission;
use crate::events::{self, Story};
use crate::export::{Export, Progress};
use crate::files::SessionFiles;
use crate::keeper::{DORMANCY, Held, Keeper, Standing, Tally};
use crate::leases::Leases;
use crate::locks::{Locks, Running};
use crate::memory::{Answers, Memory};
use crate::ops::{self};
use crate::outbox::Outbox;
use crate::pool::Job;
use crate::steering::Walks;
use nigh_link::{Link, Peer};
use nigh_native::lease::Holder;
use nigh_native::{COMPRESSED, ProtocolError, ServerConnection, encode_response};
use nigh_types::{Call, CallId, Credentials, OpName, Origin, Place, Request, Response, Term, Time};
use parking_lot::Mutex;
use rustc_hash::FxHashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Lock order: `intake`, the server's table of sessions, the table of leases, `Session::wire`, then `cancelled`
/// or the outbox.
pub(crate) struct Session {
    pub(crate) id: u64,
    /// Who is at the other end, and may claim what.
    pub(crate) peer: Peer,
    pub(crate) origin: Origin,
    /// As whom its calls are done.
    pub(crate) admission: Admission,
    pub(crate) story: Story,
    leases: Arc<Leases>,
    keeper: Arc<Keeper>,
    tally: Arc<Tally>,
    attached: OnceLock<Attached>,
    pub(crate) standing: Standing,
    /// Counts the leases that it had in the table.
    lease: AtomicU64,
    /// Held while what a connection brought is taken in, so that another one goes on behind it.
    intake: Mutex<()>,
    wire: Mutex<Wire>,
    /// Calls that are not answered yet and for which nobody waits. Changed under `wire`, which knows the former.
    cancelled: Mutex<FxHashSet<CallId>>,
    pub(crate) walks: Walks,
    /// Calls that threads of the pool execute.
    running: Running,
    pub(crate) outbox: Outbox,
}

/// What comes of a connection on which a session is to go on.
pub(crate) enum Resumption {
    /// It does, by this number of its link.
    Link(u64),
    /// It is too late.
    Forgotten,
    /// The client has made another connection since.
    Stale,
}

struct Wire {
    connection: ServerConnection,
    /// The outbox's number of its link.
    link: u64,
    /// When its client made the link's connection, by its own clock.
    moment: u64,
    /// Since when its client is away.
    away: Option<Instant>,
    /// The connection is closed when the client has all that it was sent.
    stopping: bool,
    /// The session is forgotten: answers to its named operations go there.
    late: Option<Arc<Answers>>,
    /// By the connection.
    held: Held,
}

/// What a session has once its client was accepted.
pub(crate) struct Attached {
    /// As the client calls it.
    pub(crate) name: Vec<u8>,
    /// What was agreed of its features and of the term of its grants.
    pub(crate) features: u64,
    pub(crate) term: Term,
    pub(crate) export: Arc<Export>,
    pub(crate) files: SessionFiles,
    pub(crate) locks: Arc<Locks>,
    /// The client and its incarnation.
    pub(crate) who: (u64, u64),
}

impl Session {
    /// Bytes of answers and recalls that are kept for a client: those not put out yet, and those not confirmed.
    /// Calls are held long before ([`Outbox::admit`]); this is for what was under way then, and for recalls.
    const MOST_KEPT: u64 = 32 << 20;

    /// Begins over a connection whose hello came.
    pub(crate) fn new(
        connection: ServerConnection,
        (link, peer, moment): (Link, Peer, u64),
        story: Story,
        leases: &Arc<Leases>,
        keeper: &Arc<Keeper>,
    ) -> Session {
        let outbox = Outbox::new(leases.pool());
        let link = outbox.connect(link);
        let tally = Tally::new(keeper);
        let held = Held::new(&tally, 0);
        Session {
            id: connection.session_id(),
            admission: Admission::of(&peer),
            origin: peer.origin(),
            peer,
            story,
            leases: Arc::clone(leases),
            keeper: Arc::clone(keeper),
            tally,
            attached: OnceLock::new(),
            standing: Standing::default(),
            lease: AtomicU64::new(0),
            intake: Mutex::new(()),
            wire: Mutex::new(Wire {
                connection,
                link,
                moment,
                away: None,
                stopping: false,
                late: None,
                held,
            }),
            cancelled: Mutex::default(),
            walks: Walks::default(),
            running: Running::default(),
            outbox,
        }
    }

    /// This session in the table of leases.
    pub(crate) fn holder(&self) -> Holder {
        Holder(self.id)
    }

    pub(crate) fn attached(&self) -> Option<&Attached> {
        self.attached.get()
    }

    pub(crate) fn attach(&self, attached: Attached) {
        if attached.features & COMPRESSED != 0 {
            self.outbox.pack();
        }
        // A connection says hello once, so there is nothing here yet.
        let _ = self.attached.set(attached);
    }

    /// Does something with the stream and sends what it put out. Not with the table of leases.
    pub(crate) fn with_connection<T>(&self, act: impl FnOnce(&mut ServerConnection) -> T) -> T {
        let mut wire = self.wire.lock();
        let result = act(&mut wire.connection);
        self.flush(&mut wire);
        drop(wire);
        self.outbox.send();
        result
    }

    /// The number of its first link.
    pub(crate) fn first_link(&self) -> u64 {
        1
    }

    /// Takes in what came over a link: `take` is called with nobody else taking in anything. `None`: another
    /// link took its place.
    pub(crate) fn intake<T>(&self, link: u64, take: impl FnOnce() -> T) -> Option<T> {
        let _one = self.intake.lock();
        self.is_over_link(link).then(take)
    }

    /// The same where nobody else takes in anything at this moment; otherwise `None`.
    pub(crate) fn intake_now<T>(&self, link: u64, take: impl FnOnce() -> T) -> Option<Option<T>> {
        let _one = self.intake.try_lock()?;
        Some(self.is_over_link(link).then(take))
    }

    fn is_over_link(&self, link: u64) -> bool {
        self.wire.lock().link == link
    }

    /// Its client came again at `moment` and has `received` frames: the session goes on over this link.
    ///
    /// # Errors
    /// So many frames cannot have arrived. The session is over, and its client is told.
    pub(crate) fn go_on(
        self: &Arc<Session>,
        link: Link,
        (moment, received): (u64, u64),
        agreed: nigh_native::Session,
    ) -> Result<Resumption, ProtocolError> {
        let _one = self.intake.lock();
        if self.moment() > moment {
            return Ok(Resumption::Stale);
        }
        let Some(attached) = self.attached() else { return Ok(Resumption::Forgotten) };
        let mut lapsed = self.leases.resume(self, attached);
        let mut wire = self.wire.lock();
        if !lapsed && self.standing.is_dormant() {
            // A suspect's lease ran out in between: that it is heard renews it not.
            drop(wire);
            lapsed = self.leases.resume(self, attached);
            wire = self.wire.lock();
        }
        if wire.connection.is_ended() || !self.standing.resume() {
            return Ok(Resumption::Forgotten);
        }
        wire.link = self.outbox.connect(link);
        (wire.moment, wire.away) = (moment, None);
        let resumed = wire.connection.resume(now(), received, lapsed, agreed);
        self.flush(&mut wire);
        let number = wire.link;
        drop(wire);
        self.outbox.send();
        resumed.map(|()| Resumption::Link(number))
    }

    /// When its client made the latest connection, by its own clock.
    pub(crate) fn moment(&self) -> u64 {
        self.wire.lock().moment
    }

    /// That link is at its end; the session is not. False: another took its place already.
    pub(crate) fn cut(&self, link: u64) -> bool {
        let mut wire = self.wire.lock();
        if wire.link != link || wire.connection.is_ended() {
            return false;
        }
        wire.cut();
        self.flush(&mut wire);
        drop(wire);
        self.outbox.disconnect(link);
        self.keeper.call();
        true
    }

    /// Its lease in the table has run out: the one of this number, which [`Session::lease`] said.
    pub(crate) fn lapse(&self, lease: u64) {
        let mut wire = self.wire.lock();
        if self.lease() != lease || wire.connection.is_ended() {
            return;
        }
        wire.cut();
        self.flush(&mut wire);
        self.standing.lapse();
        let link = wire.link;
        drop(wire);
        // Its client may be back on another one by now.
        self.outbox.disconnect(link);
        events::dormant(self);
        self.keeper.call();
    }

    /// From when on its client believes nothing any more, if it says nothing more.
    pub(crate) fn lapse_moment(&self) -> Time {
        if self.standing.is_dormant() { Time(0) } else { self.wire.lock().connection.lapses() }
    }

    pub(crate) fn lease(&self) -> u64 {
        self.lease.load(Ordering::SeqCst)
    }

    /// It has a new lease in the table; said under the table's lock.
    pub(crate) fn begin_lease(&self) {
        self.lease.fetch_add(1, Ordering::SeqCst);
    }

    /// Since when its client is away.
    pub(crate) fn away(&self) -> Option<Instant> {
        self.wire.lock().away
    }

    /// Why it is kept no longer, if it lapsed.
    pub(crate) fn reason_to_go(&self) -> Option<&'static str> {
        if !self.standing.is_dormant() {
            return None;
        }
        let attached = self.attached()?;
        let wire = self.wire.lock();
        let long = wire.away.is_none_or(|since| since.elapsed() > DORMANCY);
        let kept = wire.connection.kept_bytes();
        let busy = wire.connection.outstanding() > 0;
        drop(wire);
        let holds = busy || kept > 0 || attached.files.count() > 0 || attached.locks.are_held_by(self.id);
        if attached.locks.are_in_the_way(self.id) {
            Some("another client waits for its locks")
        } else if long {
            Some("its client was away for too long")
        } else {
            (!holds).then_some("nothing is kept for it")
        }
    }

    /// The session is to be forgotten.
    pub(crate) fn doom(&self, why: &str) {
        self.story.ends(|| why.to_owned());
        self.standing.doom();
        self.keeper.call();
    }

    /// Ends the session with a word to its client, which takes it as final.
    pub(crate) fn end(&self, why: &str) {
        self.story.ends(|| why.to_owned());
        self.with_connection(|connection| connection.end(why));
        self.outbox.end();
    }

    /// Ends the session without a word: its client comes again and learns that it is forgotten.
    pub(crate) fn abandon(&self) {
        self.with_connection(ServerConnection::abandon);
        self.outbox.finish();
    }

    /// The same, but for closing the connection. Also its answers to named operations that its client may not
    /// have; those of calls that threads still execute are added to them.
    pub(crate) fn leave_answers(&self) -> Option<Arc<Answers>> {
        let mut wire = self.wire.lock();
        self.part(&mut wire);
        self.flush(&mut wire);
        wire.late.clone()
    }

    fn part(&self, wire: &mut Wire) {
        if let Some(attached) = self.attached()
            && wire.late.is_none()
        {
            let answers = Answers::default();
            for (sequence, response) in wire.connection.unheard_answers() {
                answers.note(sequence, response, &attached.files);
            }
            wire.late = Some(Arc::new(answers));
        }
        wire.connection.abandon();
    }

    /// The server stops: the connection is closed when the client has said that it has everything, or has had
    /// time for that. It is told nothing, and goes on with the next server.
    pub(crate) fn stop(&self) {
        self.wire.lock().stopping = true;
        self.with_connection(|connection| {
            if connection.kept_bytes() > 0 {
                connection.probe();
            }
        });
        self.outbox.end();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.wire.lock().connection.is_ended()
    }

    /// Whether these bytes, if they are the next of its connection, ask for nothing.
    pub(crate) fn asks_nothing(&self, bytes: &[u8]) -> bool {
        self.wire.lock().connection.asks_nothing(bytes)
    }

    /// Calls that are not answered yet, and those among them that threads execute.
    pub(crate) fn calls(&self) -> (u32, u32) {
        (self.wire.lock().connection.outstanding(), self.running.count())
    }

    /// Bytes kept for it: of the answers and recalls that its client has not confirmed, and of all; the table of
    /// leases not counted.
    pub(crate) fn kept_bytes(&self) -> (u64, u64) {
        (self.wire.lock().connection.kept_bytes(), self.tally.bytes())
    }

    /// Nobody waits for this call any more: if it has to wait for others it is given up. Answers whether it
    /// may wait for a lock; `None`: it is answered already.
    pub(crate) fn note_cancelled(&self, call: CallId) -> Option<bool> {
        let wire = self.wire.lock();
        if !wire.connection.is_outstanding(call) {
            return None;
        }
        self.cancelled.lock().insert(call);
        Some(wire.connection.is_lock_wait(call))
    }

    pub(crate) fn is_cancelled(&self, call: CallId) -> bool {
        self.cancelled.lock().contains(&call)
    }

    /// Executes a call on this thread and answers it, or leaves it with the leases until others have given
    /// back what it changes.
    pub(crate) fn execute(self: &Arc<Session>, job: Job) {
        if self.running.enter() {
            if let Some(job) = self.hold(job) {
                self.run(job);
            }
        } else {
            drop(job);
        }
        if self.running.leave() {
            self.free_locks();
        }
    }

    /// The session's threads begin nothing more. Its locks go with the last call that one of them executes.
    pub(crate) fn leave(&self) {
        if self.running.close() {
            self.free_locks();
        }
    }

    /// Whether it is over, and none of its calls is executed any more or will be.
    pub(crate) fn is_settled(&self) -> bool {
        self.running.is_settled()
    }

    fn free_locks(&self) {
        if let Some(attached) = self.attached() {
            attached.locks.end(self.id);
        }
    }

    /// Answers a call for a lock, or leaves it waiting.
    fn lock(&self, call: CallId, request: &Request, node: &Place) {
        let Some(Attached { export, files, locks, .. }) = self.attached() else { return };
        let result = match ops::locks::find(export, files, &request.credentials, (&request.call, node)) {
            Ok(found) => locks.lock(self.id, call, found, &request.call),
            Err(fault) => {
                locks.forget(self.id, call);
                Some(Err(fault.into()))
            }
        };
        if let Some(result) = result {
            self.answer(call, Response::plain(result));
        }
    }

    /// As whom a call is done that is asked for on behalf of `asked`.
    pub(crate) fn admit(&self, asked: Credentials) -> Credentials {
        let (admitted, first) = self.admission.admit_saying(asked);
        if first {
            events::claimed_root(self, &admitted);
        }
        admitted
    }

    fn run(self: &Arc<Session>, mut job: Job) {
        job.request.credentials = self.admit(job.request.credentials);
        let mut next = Some(job);
        while let Some(job) = next {
            let waits = self.attempt(job);
            let goes_on =
                waits.and_then(|job| if job.begun.is_some() { Some(job) } else { self.leases.park(job) });
            next = goes_on.and_then(|job| self.hold(job));
        }
    }

    /// Leaves a call with the outbox that answers much, until the client has taken what is queued; `None` then.
    fn hold(&self, job: Job) -> Option<Job> {
        let call = job.call;
        let job = self.outbox.admit(job);
        if job.is_none() && self.is_cancelled(call) {
            self.outbox.take_back(call).into_iter().for_each(Job::give_up);
        }
        job
    }

    /// The call, if it waits.
    fn attempt(&self, job: Job) -> Option<Job> {
        let Attached { export, files, .. } = self.attached()?;
        let Job { session, call, request, change, taken, again, begun } = job;
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            if let Call::Lock { node, .. } | Call::GetLock { node, .. } = &request.call {
                self.lock(call, &request, node);
                return Progress::Answered;
            }
            export.attempt(files, call, (&request, again), (change, begun), &mut |response| {
                self.answer_named(call, request.name, response);
                self.outbox.has_room()
            })
        }));
        // One that waits is admitted again when it returns; a listing that pauses goes on from there.
        if !matches!(done, Ok(Progress::Pauses(_))) {
            self.outbox.done(&request.call);
            self.walks.forget(call);
        }
        match done {
            Ok(Progress::Answered) => None,
            Ok(Progress::Waits(change)) => {
                Some(Job { session, call, request, change: Some(change), taken, again, begun: None })
            }
            Ok(Progress::Pauses(mut begun)) => {
                begun.count(&self.tally);
                Some(Job { session, call, request, change: None, taken, again, begun: Some(begun) })
            }
            Err(_) => {
                self.end("the server has a bug; its log says where");
                None
            }
        }
    }

    /// Answers a call from what its client's forgotten sessions did, if they did it. It counts as executed until that
    /// answer is sent or, where this session is forgotten too by then, remembered again.
    pub(crate) fn answer_again(&self, memory: &Memory, call: CallId, name: OpName) -> bool {
        let known = if self.running.enter() { memory.recall(self, name) } else { None };
        let found = known.is_some();
        if let Some(response) = known {
            self.answer_named(call, Some(name), response);
        }
        if self.running.leave() {
            self.free_locks();
        }
        found
    }

    /// Sends a response. It is encoded before anything is locked; grants that were recalled or ended since
    /// they were registered are left out.
    pub(crate) fn answer(&self, call: CallId, response: Response) {
        self.answer_named(call, None, response);
    }

    fn answer_named(&self, call: CallId, name: Option<OpName>, mut response: Response) {
        let bytes = encode_response(call, &response);
        if response.grants.is_empty() {
            self.transmit(call, name, &response, bytes);
        } else {
            let grants = std::mem::take(&mut response.grants);
            self.leases.put_answer(self.holder(), grants, |grants, same| {
                let bytes = if same {
                    bytes
                } else {
                    response.grants = grants;
                    encode_response(call, &response)
                };
                self.transmit(call, name, &response, bytes);
            });
        }
        self.outbox.send();
    }

    /// Puts a recall, a hold or its end on the wire; the outbox is to be told to send when no lock is held.
    pub(crate) fn queue(&self, say: impl FnOnce(&mut ServerConnection)) {
        let mut wire = self.wire.lock();
        say(&mut wire.connection);
        self.flush(&mut wire);
    }

    fn transmit(&self, call: CallId, name: Option<OpName>, response: &Response, bytes: Vec<u8>) {
        let mut wire = self.wire.lock();
        if let (Some(late), Some(name), Some(attached)) = (&wire.late, name, self.attached()) {
            late.note(name.sequence, response.clone(), &attached.files);
            return;
        }
        wire.connection.transmit_encoded(call, response.last, bytes);
        if response.last {
            self.cancelled.lock().remove(&call);
        }
        self.flush(&mut wire);
    }

    fn flush(&self, wire: &mut Wire) {
        let connection = &mut wire.connection;
        let frames: Vec<_> = std::iter::from_fn(|| connection.poll_transmit()).collect();
        let waiting = match connection.is_ended() {
            true => 0,
            false if wire.stopping => connection.kept_bytes(),
            false => connection.waiting_bytes(),
        };
        let kept = connection.kept_bytes();
        self.outbox.add(frames, waiting, kept);
        if kept > Session::MOST_KEPT && !connection.is_ended() {
            self.part(wire);
            self.doom("its client takes nothing of what it asked for");
        }
        wire.held.set(wire.connection.held_bytes());
    }
}

impl Wire {
    fn cut(&mut self) {
        self.connection.cut();
        self.away.get_or_insert_with(Instant::now);
    }
}

/// The time that sessions count: it goes on while the machine sleeps.
pub(crate) fn now() -> Time {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let part = |n: i64| u64::try_from(n).unwrap_or(0);
    Time(part(t.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(t.tv_nsec)))
}
