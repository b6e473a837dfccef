//! One client's session: its connection and its open files.

use crate::claims::Admission;
use crate::events::Story;
use crate::export::{Export, Progress};
use crate::files::SessionFiles;
use crate::leases::Leases;
use crate::locks::{Locks, Running};
use crate::ops::{self};
use crate::outbox::Outbox;
use crate::pool::Job;
use nigh_link::{Link, Peer};
use nigh_native::lease::Holder;
use nigh_native::{ServerConfig, ServerConnection, encode_response};
use nigh_types::{Call, CallId, Place, Recall, Request, Response, Time};
use parking_lot::Mutex;
use rustc_hash::FxHashSet;
use std::sync::{Arc, OnceLock};

/// Lock order: the server's table of sessions, the table of leases, `Session::wire`, then `cancelled` or the
/// outbox.
pub(crate) struct Session {
    pub(crate) id: u64,
    /// Who is at the other end, and may claim what.
    pub(crate) peer: Peer,
    /// As whom its calls are done.
    pub(crate) admission: Admission,
    pub(crate) story: Story,
    leases: Arc<Leases>,
    attached: OnceLock<Attached>,
    wire: Mutex<ServerConnection>,
    /// Calls that are not answered yet and for which nobody waits. Changed under `wire`, which knows the former.
    cancelled: Mutex<FxHashSet<CallId>>,
    /// Calls that threads of the pool execute.
    running: Running,
    pub(crate) outbox: Outbox,
}

/// What a session has once its client was accepted.
pub(crate) struct Attached {
    pub(crate) export: Arc<Export>,
    pub(crate) files: SessionFiles,
    pub(crate) locks: Arc<Locks>,
    /// The client and its incarnation.
    pub(crate) who: (u64, u64),
}

impl Session {
    pub(crate) fn new(
        config: ServerConfig,
        link: Link,
        peer: Peer,
        story: Story,
        leases: &Arc<Leases>,
    ) -> Session {
        Session {
            id: config.session_id,
            admission: Admission::of(&peer),
            peer,
            story,
            leases: Arc::clone(leases),
            attached: OnceLock::new(),
            wire: Mutex::new(ServerConnection::new(now(), config)),
            cancelled: Mutex::default(),
            running: Running::default(),
            outbox: Outbox::new(link, leases.pool()),
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
        // A connection says hello once, so there is nothing here yet.
        let _ = self.attached.set(attached);
    }

    /// Does something with the connection and sends what it put out. Not with the table of leases.
    pub(crate) fn with_connection<T>(&self, act: impl FnOnce(&mut ServerConnection) -> T) -> T {
        let mut wire = self.wire.lock();
        let result = act(&mut wire);
        self.flush(&mut wire);
        drop(wire);
        self.outbox.send();
        result
    }

    /// Ends the session from this side.
    pub(crate) fn end(&self, why: &str) {
        self.story.ends(|| why.to_owned());
        self.finish(why);
    }

    /// Nothing comes any more; what is queued is still sent, then the connection is closed.
    pub(crate) fn finish(&self, why: &str) {
        self.with_connection(|connection| connection.end(why));
        self.outbox.end();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.wire.lock().is_ended()
    }

    /// Calls that are not answered yet, and those among them that threads execute.
    pub(crate) fn calls(&self) -> (u32, u32) {
        (self.wire.lock().outstanding(), self.running.count())
    }

    /// Nobody waits for this call any more: if it has to wait for others it is given up. Answers whether it
    /// may wait for a lock; `None`: it is answered already.
    pub(crate) fn note_cancelled(&self, call: CallId) -> Option<bool> {
        let wire = self.wire.lock();
        if !wire.is_outstanding(call) {
            return None;
        }
        self.cancelled.lock().insert(call);
        Some(wire.is_lock_wait(call))
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

    fn run(self: &Arc<Session>, mut job: Job) {
        job.request.credentials = self.admission.admit(job.request.credentials);
        let mut next = Some(job);
        while let Some(job) = next {
            let waits = self.attempt(job);
            let goes_on =
                waits.and_then(|job| if job.listing.is_some() { Some(job) } else { self.leases.park(job) });
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
        let Job { session, call, request, change, taken, listing } = job;
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            if let Call::Lock { node, .. } | Call::GetLock { node, .. } = &request.call {
                self.lock(call, &request, node);
                return Progress::Answered;
            }
            export.attempt(files, call, &request, (change, listing), &mut |response| {
                self.answer(call, response);
                self.outbox.has_room()
            })
        }));
        // One that waits is admitted again when it returns; a listing that pauses goes on from there.
        if !matches!(done, Ok(Progress::Pauses(_))) {
            self.outbox.done(&request.call);
        }
        match done {
            Ok(Progress::Answered) => None,
            Ok(Progress::Waits(change)) => {
                Some(Job { session, call, request, change: Some(change), taken, listing: None })
            }
            Ok(Progress::Pauses(listing)) => {
                Some(Job { session, call, request, change: None, taken, listing: Some(listing) })
            }
            Err(_) => {
                self.end("the server has a bug; its log says where");
                None
            }
        }
    }

    /// Sends a response. It is encoded before anything is locked; grants that were recalled or ended since
    /// they were registered are left out.
    pub(crate) fn answer(&self, call: CallId, mut response: Response) {
        let bytes = encode_response(call, &response);
        if response.grants.is_empty() {
            self.transmit(call, response.last, bytes);
        } else {
            let last = response.last;
            let mut grants = std::mem::take(&mut response.grants);
            self.leases.put_answer(self.holder(), &mut grants, |grants, same| {
                let bytes = if same {
                    bytes
                } else {
                    response.grants = grants.to_vec();
                    encode_response(call, &response)
                };
                self.transmit(call, last, bytes);
            });
        }
        self.outbox.send();
    }

    /// Puts a recall on the wire; the outbox is to be told to send when no lock is held.
    pub(crate) fn queue_recall(&self, recall: Recall) {
        let mut wire = self.wire.lock();
        wire.recall(recall);
        self.flush(&mut wire);
    }

    fn transmit(&self, call: CallId, last: bool, bytes: Vec<u8>) {
        let mut wire = self.wire.lock();
        wire.transmit_encoded(call, last, bytes);
        if last {
            self.cancelled.lock().remove(&call);
        }
        self.flush(&mut wire);
    }

    fn flush(&self, wire: &mut ServerConnection) {
        let frames = std::iter::from_fn(|| wire.poll_transmit());
        if !self.outbox.add(frames) && !wire.is_ended() {
            self.story.ends(|| "the client does not read".into());
            wire.end("the client does not read");
        }
    }
}

/// The time that sessions count: it goes on while the machine sleeps.
pub(crate) fn now() -> Time {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let part = |n: i64| u64::try_from(n).unwrap_or(0);
    Time(part(t.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(t.tv_nsec)))
}
