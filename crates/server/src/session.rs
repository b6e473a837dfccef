//! A client session: its message stream, independent of connections, and its open files.

pub(crate) mod grace;
mod lease_session;
pub(crate) mod lock_reclaimers;
pub(crate) mod locks;
pub(crate) mod log;
pub(crate) mod outbox;
pub(crate) mod registry;
pub(crate) mod reply_cache;
#[cfg(test)]
pub(crate) mod test_session;

use crate::export::Export;
use crate::lease::holder::LeaseSession;
use crate::lease::leases::Leases;
use crate::lease::session_files::SessionFiles;
use crate::limits::reaper::{Charge, MemoryAccount, SessionPhase, SessionReaper};
use crate::ops::execute::Progress;
use crate::ops::prefetch_control::PrefetchJobs;
use crate::ops::{self};
use crate::os::clock::now;
use crate::os::squash::CredentialPolicy;
use crate::pool::Pool;
use crate::pool::job::Job;
use crate::session::locks::{Locks, Running};
use crate::session::log::SessionLog;
use crate::session::outbox::Outbox;
use crate::session::reply_cache::{Executing, Replies, ReplyCache};
use nigh_link::{Link, Peer};
use nigh_native::{COMPRESSED, ProtocolError, ServerSession, encode_response};
use nigh_types::{Call, CallId, Credentials, MutationId, NodeRef, Origin, Request, Response, Term, Time};
use parking_lot::Mutex;
use rustc_hash::FxHashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

/// Lock order: `input_lock`, the server's session table, the lease table, `Session::wire`, then `cancelled` or the
/// outbox.
pub(crate) struct Session {
    pub(crate) id: u64,
    /// The peer, with the ids that it may claim.
    pub(crate) peer: Peer,
    pub(crate) origin: Origin,
    /// Maps the credentials in requests to those with which calls are executed.
    pub(crate) credential_policy: CredentialPolicy,
    pub(crate) log: SessionLog,
    leases: Arc<Leases>,
    reaper: Arc<SessionReaper>,
    memory: Arc<MemoryAccount>,
    attached: OnceLock<Attached>,
    pub(crate) phase: SessionPhase,
    /// Counter of the leases that the session has had in the lease table.
    lease: AtomicU64,
    /// Held while input of a connection is handled, so that a later connection's input follows it.
    input_lock: Mutex<()>,
    wire: Mutex<Wire>,
    /// Unanswered calls that the client has cancelled. Changed under `wire`, which knows whether a call is answered.
    cancelled: Mutex<FxHashSet<CallId>>,
    pub(crate) prefetch_jobs: PrefetchJobs,
    /// Calls that pool threads are executing.
    running: Running,
    pub(crate) outbox: Outbox,
}

/// Outcome of a connection's attempt to resume a session.
pub(crate) enum Resumption {
    /// The session goes on; this is the number of the new link.
    Link(u64),
    /// The session is discarded already.
    Discarded,
    /// The client has made a later connection.
    Stale,
}

struct Wire {
    connection: ServerSession,
    /// The outbox's number of the current link.
    link: u64,
    /// When the client made the link's connection, by the client's clock.
    moment: u64,
    /// Since when the client is disconnected.
    disconnected_since: Option<Instant>,
    /// The server stops: the connection closes once the client has all queued messages.
    stopping: bool,
    /// Set once the session is discarded: replies to its named operations are stored there.
    late_replies: Option<Arc<Replies>>,
    /// Memory used by the connection.
    held: Charge,
}

/// How a session ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Its client has dropped all its grants.
    Goodbye,
    /// The client may trust its grants until its lease expires.
    Disconnected,
    /// The client is disconnected, and may trust its grants until its lease expires.
    Discarded,
}

/// The attached state of a session, set when its client was accepted.
pub(crate) struct Attached {
    /// The export's name in the client's request.
    pub(crate) name: Vec<u8>,
    /// Negotiated feature bits, and term of the session's grants.
    pub(crate) features: u64,
    pub(crate) term: Term,
    pub(crate) export: Arc<Export>,
    pub(crate) files: SessionFiles,
    pub(crate) locks: Arc<Locks>,
    /// The client id and its incarnation.
    pub(crate) who: (u64, u64),
}

impl Executing for Session {
    fn is_settled(&self) -> bool {
        self.is_settled()
    }
}

impl Session {
    /// Maximum size in bytes of the unsent and unconfirmed replies and recalls of one session. [`Outbox::admit`]
    /// stops calls at much less; the rest covers replies under way at that moment, and recalls.
    const MOST_UNCONFIRMED: u64 = 32 << 20;

    /// A session on a connection whose HELLO has arrived.
    pub(crate) fn new(
        connection: ServerSession,
        (link, peer, moment): (Link, Peer, u64),
        log: SessionLog,
        (leases, pool): (&Arc<Leases>, Weak<Pool>),
        reaper: &Arc<SessionReaper>,
    ) -> Session {
        let outbox = Outbox::new(pool);
        let link = outbox.connect(link);
        let memory = MemoryAccount::new(reaper);
        let held = Charge::new(&memory, 0);
        Session {
            id: connection.session_id(),
            credential_policy: CredentialPolicy::of(&peer),
            origin: peer.origin(),
            peer,
            log,
            leases: Arc::clone(leases),
            reaper: Arc::clone(reaper),
            memory,
            attached: OnceLock::new(),
            phase: SessionPhase::default(),
            lease: AtomicU64::new(0),
            input_lock: Mutex::new(()),
            wire: Mutex::new(Wire {
                connection,
                link,
                moment,
                disconnected_since: None,
                stopping: false,
                late_replies: None,
                held,
            }),
            cancelled: Mutex::default(),
            prefetch_jobs: PrefetchJobs::default(),
            running: Running::default(),
            outbox,
        }
    }

    pub(crate) fn attached(&self) -> Option<&Attached> {
        self.attached.get()
    }

    pub(crate) fn attach(&self, attached: Attached) {
        if attached.features & COMPRESSED != 0 {
            self.outbox.enable_compression();
        }
        // A connection sends one HELLO, so the cell is still empty.
        let _ = self.attached.set(attached);
    }

    /// Runs `act` on the connection state and sends the resulting frames. Not to be called with the lease table
    /// locked.
    pub(crate) fn with_connection<T>(&self, act: impl FnOnce(&mut ServerSession) -> T) -> T {
        let mut wire = self.wire.lock();
        let result = act(&mut wire.connection);
        self.flush(&mut wire);
        drop(wire);
        self.outbox.send();
        result
    }

    /// The number of the session's first link.
    pub(crate) fn first_link(&self) -> u64 {
        1
    }

    /// Runs `take` on a link's input while no other link's input is handled. Returns `None` if another link has
    /// replaced this one.
    pub(crate) fn with_input<T>(&self, link: u64, take: impl FnOnce() -> T) -> Option<T> {
        let _one = self.input_lock.lock();
        self.is_over_link(link).then(take)
    }

    /// Like [`Session::with_input`], but returns `None` at once while other input is handled.
    pub(crate) fn try_with_input<T>(&self, link: u64, take: impl FnOnce() -> T) -> Option<Option<T>> {
        let _one = self.input_lock.try_lock()?;
        Some(self.is_over_link(link).then(take))
    }

    fn is_over_link(&self, link: u64) -> bool {
        self.wire.lock().link == link
    }

    /// Resumes the session over this link. Its client connected again at `moment` and has received `received` frames.
    ///
    /// # Errors
    /// The frame count is impossible. The session is over, and its client is informed.
    pub(crate) fn resume(
        self: &Arc<Session>,
        link: Link,
        (moment, received): (u64, u64),
        agreed: nigh_native::SessionParams,
    ) -> Result<Resumption, ProtocolError> {
        let _one = self.input_lock.lock();
        if self.moment() > moment {
            return Ok(Resumption::Stale);
        }
        let Some(attached) = self.attached() else { return Ok(Resumption::Discarded) };
        let terms = attached.lease_terms(self.origin);
        let mut lapsed = self.leases.resume(&**self, &terms);
        let mut wire = self.wire.lock();
        if !lapsed && self.phase.is_courtesy() {
            // The lease of a suspect session expired in between: its messages do not renew it.
            drop(wire);
            lapsed = self.leases.resume(&**self, &terms);
            wire = self.wire.lock();
        }
        if wire.connection.is_ended() || !self.phase.resume() {
            return Ok(Resumption::Discarded);
        }
        wire.link = self.outbox.connect(link);
        (wire.moment, wire.disconnected_since) = (moment, None);
        let resumed = wire.connection.resume(now(), received, lapsed, agreed);
        self.flush(&mut wire);
        let number = wire.link;
        drop(wire);
        self.outbox.send();
        resumed.map(|()| Resumption::Link(number))
    }

    /// When the client made the latest connection, by the client's clock.
    pub(crate) fn moment(&self) -> u64 {
        self.wire.lock().moment
    }

    /// Handles the end of a link; the session goes on. Returns false if another link has replaced it already.
    pub(crate) fn disconnect(&self, link: u64) -> bool {
        let mut wire = self.wire.lock();
        if wire.link != link || wire.connection.is_ended() {
            return false;
        }
        wire.disconnect();
        self.flush(&mut wire);
        drop(wire);
        self.outbox.disconnect(link);
        self.reaper.notify();
        true
    }

    /// Handles the expiry of the lease with this number (see [`Session::lease`]).
    pub(crate) fn lapse(&self, lease: u64) {
        let mut wire = self.wire.lock();
        if self.lease() != lease || wire.connection.is_ended() {
            return;
        }
        wire.disconnect();
        self.flush(&mut wire);
        self.phase.lapse();
        let link = wire.link;
        drop(wire);
        // The client may have reconnected over another link by now.
        self.outbox.disconnect(link);
        log::dormant(self);
        self.reaper.notify();
    }

    /// The time at which the client stops trusting its grants unless it renews.
    pub(crate) fn lapse_moment(&self) -> Time {
        if self.phase.is_courtesy() { Time(0) } else { self.wire.lock().connection.lapses() }
    }

    /// Since when the client is disconnected.
    pub(crate) fn disconnected_since(&self) -> Option<Instant> {
        self.wire.lock().disconnected_since
    }

    /// Since when the client of a courtesy session is disconnected, and whether calls or replies are kept for it.
    /// `None` for any other session.
    pub(crate) fn courtesy(&self) -> Option<(Instant, bool)> {
        let wire = self.wire.lock();
        let since = wire.disconnected_since.filter(|_| self.phase.is_courtesy())?;
        Some((since, wire.connection.outstanding() > 0 || wire.connection.kept_bytes() > 0))
    }

    /// Marks a courtesy session for removal, unless its client has returned since. Returns whether it did.
    pub(crate) fn expire_courtesy(&self, since: Instant) -> bool {
        // With the lock, because the client may return and be away again.
        let wire = self.wire.lock();
        wire.disconnected_since == Some(since) && self.phase.expire_courtesy()
    }

    /// Marks the session for removal by the reaper.
    pub(crate) fn expire(&self, why: &str) {
        self.log.set_end_reason(|| why.to_owned());
        self.phase.expire();
        self.reaper.notify();
    }

    /// Ends the session with a final error message to the client.
    pub(crate) fn end(&self, why: &str) {
        self.log.set_end_reason(|| why.to_owned());
        self.with_connection(|connection| connection.end(why));
        self.outbox.end();
    }

    /// Ends the session silently: the client reconnects and learns that the session is discarded.
    pub(crate) fn abandon(&self) {
        self.with_connection(ServerSession::abandon);
        self.outbox.finish();
    }

    /// Ends the session without closing the connection. Returns the replies to named operations that the client may
    /// not have received; replies of calls still executing are added to them.
    pub(crate) fn take_replies(&self) -> Option<Arc<Replies>> {
        let mut wire = self.wire.lock();
        self.detach(&mut wire);
        self.flush(&mut wire);
        wire.late_replies.clone()
    }

    fn detach(&self, wire: &mut Wire) {
        if let Some(attached) = self.attached()
            && wire.late_replies.is_none()
        {
            let answers = Replies::default();
            for (sequence, response) in wire.connection.unconfirmed_replies() {
                answers.note(sequence, response, &attached.files);
            }
            wire.late_replies = Some(Arc::new(answers));
        }
        wire.connection.abandon();
    }

    /// Stops the session with the server: the connection closes when the client has confirmed all replies, or after a
    /// timeout. The client gets no goodbye, and reconnects to the next server.
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

    /// Whether these bytes, if next on the connection, contain no message that needs a reply.
    pub(crate) fn asks_nothing(&self, bytes: &[u8]) -> bool {
        self.wire.lock().connection.asks_nothing(bytes)
    }

    /// Returns the number of unanswered calls, and of those being executed by threads.
    pub(crate) fn calls(&self) -> (u32, u32) {
        (self.wire.lock().connection.outstanding(), self.running.count())
    }

    /// Returns the bytes of unconfirmed replies and recalls, and the total memory of the session without its lease
    /// table entries.
    pub(crate) fn kept_bytes(&self) -> (u64, u64) {
        (self.wire.lock().connection.kept_bytes(), self.memory.bytes())
    }

    /// Cancels an unanswered call: it is aborted if it has to wait. Returns whether the call may wait for a lock, or
    /// `None` if it is answered already.
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

    /// Executes a call on this thread and answers it, or parks it until other clients have returned the leases on its
    /// facts.
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

    /// Lets threads begin no more calls. The session's locks are released with the last executing call.
    pub(crate) fn close(&self) {
        if self.running.close() {
            self.free_locks();
        }
    }

    fn free_locks(&self) {
        if let Some(attached) = self.attached() {
            attached.locks.end(self.id);
        }
    }

    /// Answers a lock call, or leaves it waiting.
    fn lock(&self, call: CallId, request: &Request, node: &NodeRef) {
        let Some(Attached { export, files, locks, .. }) = self.attached() else { return };
        let result = match ops::locks::find(export, files, &request.credentials, (&request.call, node)) {
            Ok(found) => locks.lock(self.id, call, found, &request.call),
            Err(fault) => {
                locks.forget(self.id, call);
                Some(Err(fault.into()))
            }
        };
        if let Some(result) = result {
            self.reply(call, Response::plain(result));
        }
    }

    /// Returns the credentials with which a call asked for by `asked` is executed.
    pub(crate) fn admit(&self, asked: Credentials) -> Credentials {
        let (admitted, first) = self.credential_policy.admit_noting_root(asked);
        if first {
            log::claimed_root(self, &admitted);
        }
        admitted
    }

    fn run(self: &Arc<Session>, mut job: Job) {
        job.request.credentials = self.admit(job.request.credentials);
        let mut next = Some(job);
        while let Some(job) = next {
            let waits = self.attempt(job);
            let goes_on =
                waits.and_then(|job| if job.stream.is_some() { Some(job) } else { job.park(&self.leases) });
            next = goes_on.and_then(|job| self.hold(job));
        }
    }

    /// Leaves a call with a large reply in the outbox until the client has received the queued replies; then returns
    /// `None`.
    fn hold(&self, job: Job) -> Option<Job> {
        let call = job.call;
        let job = self.outbox.admit(job);
        if job.is_none() && self.is_cancelled(call) {
            self.outbox.take_back(call).into_iter().for_each(Job::abort);
        }
        job
    }

    /// Makes one attempt to execute a call. Returns the call if it has to wait.
    fn attempt(&self, job: Job) -> Option<Job> {
        let Attached { export, files, .. } = self.attached()?;
        let Job { session, call, request, change, inflight, resent, stream: begun } = job;
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            if let Call::Lock { node, .. } | Call::GetLock { node, .. } = &request.call {
                self.lock(call, &request, node);
                return Progress::Answered;
            }
            export.attempt(files, call, (&request, resent), (change, begun), &mut |response| {
                self.reply_to_mutation(call, request.mutation_id, response);
                self.outbox.has_room()
            })
        }));
        // A waiting call is admitted again when it resumes. A paused listing keeps its credential_policy.
        if !matches!(done, Ok(Progress::Pauses(_))) {
            self.outbox.done(&request.call);
            self.prefetch_jobs.forget(call);
        }
        match done {
            Ok(Progress::Answered) => None,
            Ok(Progress::Waits(change)) => {
                Some(Job { session, call, request, change: Some(change), inflight, resent, stream: None })
            }
            Ok(Progress::Pauses(mut begun)) => {
                begun.count(&self.memory);
                Some(Job { session, call, request, change: None, inflight, resent, stream: Some(begun) })
            }
            Err(_) => {
                self.end("the server has a bug; its log says where");
                None
            }
        }
    }

    /// Answers a resent call from the replies of the client's discarded sessions, if one of them executed it. The
    /// call counts as running until its reply is sent, or, if this session is discarded by then, stored again.
    pub(crate) fn replay_reply(&self, memory: &ReplyCache, call: CallId, name: MutationId) -> bool {
        let known = if self.running.enter() { self.find_reply(memory, name) } else { None };
        let found = known.is_some();
        if let Some(response) = known {
            self.reply_to_mutation(call, Some(name), response);
        }
        if self.running.leave() {
            self.free_locks();
        }
        found
    }

    pub(crate) fn find_reply(&self, memory: &ReplyCache, name: MutationId) -> Option<Response> {
        let attached = self.attached()?;
        memory.find_reply(&attached.reply_client(&self.peer), name, &attached.files)
    }

    /// Whether the session is over and none of its calls is being executed or will be.
    pub(crate) fn is_settled(&self) -> bool {
        self.running.is_settled()
    }

    /// Sends a response without grants that have ended since their registration; a data grant whose recall waits for this
    /// reply is kept. The response is encoded before any lock is taken.
    pub(crate) fn reply(&self, call: CallId, response: Response) {
        self.reply_to_mutation(call, None, response);
    }

    fn reply_to_mutation(&self, call: CallId, name: Option<MutationId>, mut response: Response) {
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

    fn transmit(&self, call: CallId, name: Option<MutationId>, response: &Response, bytes: Vec<u8>) {
        let mut wire = self.wire.lock();
        if let (Some(late), Some(name), Some(attached)) = (&wire.late_replies, name, self.attached()) {
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
        if kept > Session::MOST_UNCONFIRMED && !connection.is_ended() {
            self.detach(wire);
            self.expire("its client takes nothing of what it asked for");
        }
        wire.held.set(wire.connection.held_bytes());
    }
}

impl Wire {
    fn disconnect(&mut self) {
        self.connection.handle_disconnect();
        self.disconnected_since.get_or_insert_with(Instant::now);
    }
}
