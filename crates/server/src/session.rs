//! One client's session: its connection, open files, and the grants that may have to be recalled.

use crate::export::Export;
use crate::files::SessionFiles;
use crate::outbox::Outbox;
use nigh_native::{ServerConfig, ServerConnection, encode_response};
use nigh_types::{
    CallId, Covers, Errno, Grant, GrantId, NodeId, Recall, RecallId, Request, Response, Span, Term, Time,
};
use parking_lot::{Condvar, Mutex};
use rustc_hash::{FxHashMap, FxHashSet};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Lock order: the server's table of sessions, `Session::wire`, the outbox.
pub(crate) struct Session {
    pub(crate) id: u64,
    /// The uid that the kernel says is at the other end.
    peer_uid: u32,
    /// Grants of a contended session live no longer than this.
    contended_term: Span,
    attached: OnceLock<Attached>,
    wire: Mutex<Wire>,
    acknowledged: Condvar,
    pub(crate) outbox: Outbox,
}

/// What a session has once its client was accepted.
pub(crate) struct Attached {
    pub(crate) export: Arc<Export>,
    pub(crate) files: SessionFiles,
    /// What the client asked for.
    pub(crate) wanted: Term,
    /// Devices on which the export lies, as mountinfo numbers them.
    pub(crate) devices: FxHashSet<String>,
}

struct Wire {
    connection: ServerConnection,
    grants: Granted,
    /// Others see the same files.
    contended: bool,
    recalls: FxHashSet<RecallId>,
    last_recall: u64,
}

/// Grants that live longer than the cap for contended sessions, by what they cover.
#[derive(Default)]
struct Granted {
    latest: FxHashMap<(NodeId, Covers), GrantId>,
    by_id: FxHashMap<GrantId, (NodeId, Covers)>,
}

impl Session {
    pub(crate) fn new(
        config: ServerConfig,
        stream: UnixStream,
        peer_uid: u32,
        contended_term: Span,
    ) -> Session {
        Session {
            id: config.session_id,
            peer_uid,
            contended_term,
            attached: OnceLock::new(),
            wire: Mutex::new(Wire {
                connection: ServerConnection::new(now(), config),
                grants: Granted::default(),
                contended: false,
                recalls: FxHashSet::default(),
                last_recall: 0,
            }),
            acknowledged: Condvar::new(),
            outbox: Outbox::new(stream),
        }
    }

    pub(crate) fn attached(&self) -> Option<&Attached> {
        self.attached.get()
    }

    pub(crate) fn attach(&self, attached: Attached) {
        // A connection says hello once, so there is nothing here yet.
        let _ = self.attached.set(attached);
    }

    /// Does something with the connection and sends what it put out.
    pub(crate) fn with_connection<T>(&self, act: impl FnOnce(&mut ServerConnection) -> T) -> T {
        let mut wire = self.wire.lock();
        let result = act(&mut wire.connection);
        self.flush(&mut wire);
        drop(wire);
        self.outbox.send();
        result
    }

    /// Ends the session from this side.
    pub(crate) fn end(&self, why: &str) {
        tracing::info!(session = self.id, why, "session ended by the server");
        self.finish(why);
    }

    /// Nothing comes any more; what is queued is still sent, then the connection is closed. Nobody waits
    /// for this client's acknowledgements any longer.
    pub(crate) fn finish(&self, why: &str) {
        self.with_connection(|connection| connection.end(why));
        self.outbox.end();
        self.acknowledged.notify_all();
    }

    /// Executes a call on this thread and answers it.
    pub(crate) fn execute(self: &Arc<Session>, call: CallId, request: Request) {
        let Some(Attached { export, files, .. }) = self.attached() else { return };
        if self.peer_uid != 0 && export.acts() && request.credentials.uid != self.peer_uid {
            return self.answer(call, Response::plain(Err(Errno::PERM)));
        }
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            export.execute(files, call, request, &mut |response| {
                let last = response.last;
                self.answer(call, response);
                if !last {
                    self.outbox.wait_for_room();
                }
            });
        }));
        if done.is_err() {
            self.end("the server has a bug; its log says where");
        }
    }

    /// Sends a response. It is encoded before the connection is locked.
    pub(crate) fn answer(&self, call: CallId, mut response: Response) {
        let mut bytes = encode_response(call, &response);
        let mut wire = self.wire.lock();
        if wire.contended {
            if shorten(&mut response.grants, self.contended_term) {
                bytes = encode_response(call, &response);
            }
        } else {
            let long = |grant: &&Grant| capped(grant.term, self.contended_term) != grant.term;
            response.grants.iter().filter(long).for_each(|grant| wire.grants.note(grant));
        }
        wire.connection.transmit_encoded(call, response.last, bytes);
        self.flush(&mut wire);
        drop(wire);
        self.outbox.send();
    }

    pub(crate) fn returned(&self, grants: &[GrantId]) {
        let mut wire = self.wire.lock();
        grants.iter().for_each(|id| wire.grants.forget(*id));
    }

    pub(crate) fn acknowledge(&self, recall: RecallId) {
        self.wire.lock().recalls.remove(&recall);
        self.acknowledged.notify_all();
    }

    /// Others see the same files from now on: grants live as long as those of contended sessions, and
    /// all that would live longer are recalled.
    pub(crate) fn contend(&self) {
        let Some(attached) = self.attached() else { return };
        let mut wire = self.wire.lock();
        if wire.contended {
            return;
        }
        wire.contended = true;
        attached.files.change_term(capped(attached.wanted, self.contended_term));
        let granted = std::mem::take(&mut wire.grants);
        for (node, covers) in granted.latest.into_keys() {
            wire.last_recall += 1;
            let id = RecallId(wire.last_recall);
            wire.connection.recall(Recall { id, node, covers, names: Vec::new() });
            if !wire.connection.is_ended() {
                wire.recalls.insert(id);
            }
        }
        self.flush(&mut wire);
        drop(wire);
        self.outbox.send();
    }

    /// Grants may live as long as the client wants again.
    pub(crate) fn be_alone(&self) {
        let Some(attached) = self.attached() else { return };
        let mut wire = self.wire.lock();
        if std::mem::take(&mut wire.contended) {
            attached.files.change_term(attached.wanted);
        }
    }

    /// Waits until the client has given back what was recalled; a client of which nothing is heard
    /// for `patience` loses its session.
    pub(crate) fn await_acknowledgements(&self, patience: Duration) {
        let mut wire = self.wire.lock();
        let mut left = wire.recalls.len();
        let mut deadline = Instant::now() + patience;
        while !wire.recalls.is_empty() && !wire.connection.is_ended() {
            let late = self.acknowledged.wait_until(&mut wire, deadline).timed_out();
            if wire.recalls.len() < left {
                left = wire.recalls.len();
                deadline = Instant::now() + patience;
            } else if late {
                drop(wire);
                return self.end("the client did not give back what was recalled");
            }
        }
    }

    fn flush(&self, wire: &mut Wire) {
        let frames = std::iter::from_fn(|| wire.connection.poll_transmit());
        if !self.outbox.add(frames) && !wire.connection.is_ended() {
            wire.connection.end("the client does not read");
        }
    }
}

impl Granted {
    fn note(&mut self, grant: &Grant) {
        let key = (grant.node, grant.covers);
        if let Some(older) = self.latest.insert(key, grant.id) {
            self.by_id.remove(&older);
        }
        self.by_id.insert(grant.id, key);
    }

    fn forget(&mut self, id: GrantId) {
        if let Some(key) = self.by_id.remove(&id)
            && self.latest.get(&key) == Some(&id)
        {
            self.latest.remove(&key);
        }
    }
}

/// The shorter of the two.
pub(crate) fn capped(term: Term, cap: Span) -> Term {
    match term {
        Term::Limited(span) if span <= cap => term,
        _ => Term::Limited(cap),
    }
}

/// Whether any had to be.
fn shorten(grants: &mut [Grant], cap: Span) -> bool {
    let mut any = false;
    for grant in grants {
        let term = capped(grant.term, cap);
        any |= term != grant.term;
        grant.recallable &= term == grant.term;
        grant.term = term;
    }
    any
}

/// The time that sessions count: it goes on while the machine sleeps.
pub(crate) fn now() -> Time {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let part = |n: i64| u64::try_from(n).unwrap_or(0);
    Time(part(t.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(t.tv_nsec)))
}
