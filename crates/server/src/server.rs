//! Serves exports to sessions over streams.

mod status;

use crate::events;
use crate::events::Story;
use crate::export::{Export, ExportError, ExportOptions, Opened};
use crate::exports::Exports;
use crate::files::SessionFiles;
use crate::intake;
use crate::leases::{Holding, Leases};
use crate::locks::Locks;
use crate::outbox::Outbox;
use crate::pool::{Job, Pool};
use crate::session::{Attached, Session, now};
use crate::work::Work;
use nigh_link::{Link, Peer, Ticket};
use nigh_native::lease::{LeaseConfig, LeaseReport};
use nigh_native::{Limits, NAMES_ALONE, ProtocolError, SESSION_TERM, ServerConfig, ServerEvent};
use nigh_types::{Call, CallId, Errno, Request, Response, Span, Term};
use parking_lot::Mutex;
use status::Meter;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How a server works.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Below it each export has its state directory.
    pub state_dir: PathBuf,
    pub export: ExportOptions,
    /// What clients may attach to by name.
    pub exports: Exports,
    /// Threads that execute calls; at least 4.
    pub threads: u32,
    /// Open files of one session.
    pub files_per_session: u64,
    /// How long a session stands without renewal, on every transport (decision 4 of the design).
    pub session_term: Span,
    /// How leases are kept; their term is `session_term`.
    pub leases: LeaseConfig,
}

impl ServerOptions {
    #[must_use]
    pub fn new(state_dir: PathBuf) -> ServerOptions {
        ServerOptions {
            state_dir,
            export: ExportOptions::default(),
            exports: Exports::default(),
            threads: 8,
            files_per_session: 1 << 16,
            session_term: SESSION_TERM,
            leases: LeaseConfig::default(),
        }
    }
}

/// Serves directories to sessions: those of its table of exports by name, and to peers that may do so
/// any that its process can reach, by its path.
///
/// Exports are opened when the first session attaches and closed after the last one; sessions that
/// name the same directory share one. Dropping the server ends its sessions.
pub struct Server {
    options: ServerOptions,
    pool: Arc<Pool>,
    leases: Arc<Leases>,
    /// By what they are and the mount by which they are reached.
    exports: Mutex<HashMap<(String, u64), Weak<Export>>>,
    /// Before the leases' table and `Session::wire` in lock order.
    sessions: Mutex<Vec<Arc<Session>>>,
    locks: Arc<Locks>,
    work: Arc<Work>,
    meter: Meter,
    last_session: AtomicU64,
}

/// How a connection came to its end.
enum Ended {
    /// Its client has dropped everything.
    Goodbye,
    /// It may not know yet.
    Cut,
}

/// How often a session that hears nothing looks after its idle descriptors and its term.
const TICK: Duration = Duration::from_secs(2);
/// Bytes read from a connection at a time.
const READ_BYTES: usize = 256 << 10;
/// Descriptors that are left for what is no open file.
const SPARE_DESCRIPTORS: u64 = 256;

impl Server {
    /// Starts the threads. Raises this process's soft limit of descriptors to its hard one.
    pub fn new(mut options: ServerOptions) -> io::Result<Arc<Server>> {
        let held = options.export.directories.get() as u64 + options.export.readers.get() as u64;
        let room = raise_descriptor_limit().saturating_sub(held + SPARE_DESCRIPTORS);
        options.files_per_session = options.files_per_session.min(room.max(16));
        let pool = Pool::start(options.threads)?;
        let config = LeaseConfig { term: options.session_term, ..options.leases };
        let leases = Leases::new(config, Some(&pool));
        leases.start_clock()?;
        Ok(Arc::new(Server {
            pool,
            leases,
            options,
            exports: Mutex::default(),
            sessions: Mutex::default(),
            locks: Arc::default(),
            work: Arc::default(),
            meter: Meter::default(),
            last_session: AtomicU64::new(0),
        }))
    }

    /// Serves one client until its session ends; `peer` says what it may claim.
    pub fn serve_link(&self, link: Link, peer: Peer) -> io::Result<()> {
        self.serve_stranger(link, peer, None)
    }

    /// The same for one that may be told to go as long as it has attached to nothing: until then its ticket
    /// is kept.
    pub(crate) fn serve_stranger(&self, link: Link, peer: Peer, ticket: Option<Ticket>) -> io::Result<()> {
        link.set_write_timeout(Some(Outbox::PATIENCE))?;
        link.set_read_timeout(Some(TICK))?;
        let session_id = self.last_session.fetch_add(1, Ordering::Relaxed) + 1;
        let config =
            ServerConfig { session_id, session_term: self.options.session_term, limits: Limits::default() };
        let story = Story::new(&self.meter.limits, link.kind());
        let session = Arc::new(Session::new(config, link.clone(), peer, story, &self.leases));
        events::connected(&session);
        let writer = Arc::clone(&session);
        let writer = std::thread::Builder::new()
            .name(format!("nigh-write-{session_id}"))
            .spawn(move || writer.outbox.write());
        let writer = writer.inspect_err(|error| {
            session.story.ends(|| format!("no thread for it: {error}"));
            events::ended(&session);
        })?;
        self.sessions.lock().push(Arc::clone(&session));
        let read = self.read(&session, &link, ticket);
        let goodbye = matches!(read, Ok(Ended::Goodbye));
        if let Err(error) = &read {
            session.story.ends(|| error.to_string());
        }
        self.detach(&session, goodbye);
        // Its own failures are the connection's.
        let _ = writer.join();
        self.meter.count_ended(&link);
        events::ended(&session);
        read.map(drop)
    }

    /// A stream to this server, served by a thread of this process.
    pub fn serve_in_process(self: &Arc<Server>) -> io::Result<UnixStream> {
        let (theirs, ours) = UnixStream::pair()?;
        let server = Arc::clone(self);
        std::thread::Builder::new().name("nigh-session".into()).spawn(move || {
            // What ended it stands in the log.
            let _ = server.serve_link(ours.into(), Peer::in_process());
        })?;
        Ok(theirs)
    }

    /// Sessions that stand, or are about to.
    #[must_use]
    pub fn session_count(&self) -> u64 {
        self.sessions.lock().len() as u64
    }

    /// From now on calls are not taken, and nobody is let in; what was taken goes on.
    pub fn stop_taking(&self) {
        self.work.stop();
    }

    /// Calls that were taken and are not finished. Those that wait for a lock do not count: that may take
    /// for ever.
    #[must_use]
    pub fn calls_under_way(&self) -> u64 {
        self.work.under_way()
    }

    /// Who holds what, and who waits for whom.
    #[must_use]
    pub fn leases(&self) -> LeaseReport {
        self.leases.report()
    }

    /// Ends all sessions, since the server stops; `why` is for people. What is queued for them is still sent. What
    /// they have open without a name stays for those that come back to the next server.
    pub fn end_sessions(&self, why: &str) {
        let exports: Vec<_> = self.exports.lock().values().filter_map(Weak::upgrade).collect();
        exports.iter().for_each(|export| export.leave_orphans());
        let sessions = self.sessions.lock().clone();
        sessions.iter().for_each(|session| session.end(why));
    }

    fn read(&self, session: &Arc<Session>, link: &Link, mut ticket: Option<Ticket>) -> io::Result<Ended> {
        let mut buffer = vec![0; READ_BYTES];
        let mut tick = Instant::now();
        loop {
            let count = match link.read(&mut buffer) {
                Ok(0) => return Ok(Ended::Cut),
                Ok(count) => count,
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => 0,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(Ended::Cut),
                Err(e) => return Err(e),
            };
            if count > 0
                && let Some(ended) = self.hear(session, &buffer[..count])
            {
                return Ok(ended);
            }
            ticket = ticket.filter(|_| session.attached().is_none());
            if tick.elapsed() >= TICK {
                tick = Instant::now();
                match session.attached() {
                    Some(attached) => attached.export.close_idle(tick),
                    None if session.with_connection(|connection| connection.lapses() < now()) => {
                        session.end("nothing was said for too long");
                        return Ok(Ended::Cut);
                    }
                    None => {}
                }
            }
        }
    }

    /// Takes in what a client said. Only while its lease goes on by that is it answered: where it owes
    /// acknowledgements for too long, all else that it says waits until it has given them.
    fn hear(&self, session: &Arc<Session>, bytes: &[u8]) -> Option<Ended> {
        let is_heard = || session.attached().is_none() || self.leases.is_heard(session.holder());
        let heard = is_heard();
        let (taken, events) = session.with_connection(|connection| {
            connection.mute(!heard);
            let taken = connection.handle_input(now(), bytes);
            (taken, std::iter::from_fn(|| connection.poll_event()).collect::<Vec<_>>())
        });
        let ended = self.take_all(session, events);
        if let Err(error) = taken {
            if error != ProtocolError::Ended {
                session.story.ends(|| format!("the client broke the protocol: {error}"));
            }
            return Some(ended.unwrap_or(Ended::Cut));
        }
        if ended.is_some() || heard || !is_heard() {
            return ended;
        }
        let events = session.with_connection(|connection| {
            connection.mute(false);
            std::iter::from_fn(|| connection.poll_event()).collect::<Vec<_>>()
        });
        self.take_all(session, events)
    }

    fn take_all(&self, session: &Arc<Session>, events: Vec<ServerEvent>) -> Option<Ended> {
        events.into_iter().find_map(|event| self.take(session, event))
    }

    /// Answers how the session ended, if it did.
    fn take(&self, session: &Arc<Session>, event: ServerEvent) -> Option<Ended> {
        match event {
            ServerEvent::Attach { client, incarnation, export, term, features, .. } => {
                let attached = self.attach(session, &export, (client, incarnation), term, features);
                if let Err((errno, message)) = attached {
                    events::refused(session, errno, &message);
                    session.with_connection(|connection| connection.refuse(errno, &message));
                    return Some(Ended::Goodbye);
                }
            }
            ServerEvent::Request { call, request } => return self.request(session, call, request),
            ServerEvent::Cancel(call) => self.cancel(session, call),
            ServerEvent::Acknowledge(recall) => self.leases.acknowledge(session.holder(), recall),
            ServerEvent::Return(grants) => self.leases.give_back(session.holder(), &grants),
            ServerEvent::Bye { why } => {
                session.story.ends(|| format!("goodbye: {why}"));
                return Some(Ended::Goodbye);
            }
        }
        None
    }

    fn request(&self, session: &Arc<Session>, call: CallId, request: Request) -> Option<Ended> {
        let attached = session.attached()?;
        if let Err(broken) = intake::check(&attached.export, &request) {
            session.end(&broken.to_string());
            return Some(Ended::Cut);
        }
        match &request.call {
            Call::Release { handles } => {
                // Closing the last descriptor of a large file may take long, and this thread has to listen.
                if let Some(closing) = attached.files.take(handles) {
                    self.pool.drop_later(Box::new(closing));
                }
                return None;
            }
            Call::Keep { node, names, handle } => {
                let who = session.admission.admit(request.credentials);
                attached.export.keep(&attached.files, &who, (node, names), *handle);
                return None;
            }
            Call::Unlock { .. } => {
                let result = self.locks.unlock(session.id, &request.call);
                session.answer(call, Response::plain(result));
                return None;
            }
            _ => {}
        }
        // While the server stops it stays unanswered: the client hears of the end instead.
        let taken = self.work.take()?;
        if matches!(request.call, Call::Lock { wait: true, .. }) {
            self.locks.expect(session.id, call);
        }
        let session = Arc::clone(session);
        self.pool.submit(Job { session, call, request, change: None, taken, listing: None });
        None
    }

    /// Noted before looking, so that a call on its way from one to the other is not missed.
    fn cancel(&self, session: &Arc<Session>, call: CallId) {
        let Some(locks) = session.note_cancelled(call) else { return };
        let job = self.pool.take_back(session, call).or_else(|| self.leases.take_back(session, call));
        if let Some(job) = job.or_else(|| session.outbox.take_back(call)) {
            if locks {
                self.locks.forget(session.id, call);
            }
            job.give_up();
        } else if locks && self.locks.cancel(session.id, call) {
            session.answer(call, Response::plain(Err(Errno::INTR)));
        }
    }

    fn attach(
        &self,
        session: &Arc<Session>,
        asked: &[u8],
        who: (u64, u64),
        term: Term,
        features: u64,
    ) -> Result<(), (Errno, String)> {
        if self.work.is_stopping() {
            return Err((Errno::AGAIN, "the server stops: try again in a moment".into()));
        }
        let (root, path) = self.options.exports.open(asked, &session.peer)?;
        let path = path.as_path();
        let export = self.export(root, path).map_err(|error| (error.errno(), error.to_string()))?;
        let holding = Holding { leases: Arc::clone(&self.leases), holder: session.holder() };
        let files = SessionFiles::of_session(self.options.files_per_session, term, holding)
            .vouched(session.admission.vouches());
        let locks = Arc::clone(&self.locks);
        session.attach(Attached { export, files, locks, who });
        let Some(attached) = session.attached() else { return Err((Errno::IO, "not attached".into())) };
        self.locks.begin(session, who.0);
        let agreed = attached.export.session(&attached.files);
        let mut agreed =
            agreed.map_err(|errno| (errno, format!("cannot look at {}: {errno}", path.display())))?;
        intake::introduce(&mut agreed, &attached.export, &session.admission, features);
        self.leases.attach(session, who, features & NAMES_ALONE != 0, term);
        events::attached(session, agreed.term);
        session.with_connection(|connection| connection.accept(agreed));
        Ok(())
    }

    fn detach(&self, session: &Arc<Session>, goodbye: bool) {
        session.finish("the session is over");
        self.pool.forget(session);
        if let Some(attached) = session.attached() {
            self.leases.leave(session, attached.who, goodbye);
        }
        session.leave();
        self.sessions.lock().retain(|other| !Arc::ptr_eq(other, session));
    }

    fn export(&self, root: OwnedFd, path: &Path) -> Result<Arc<Export>, ExportError> {
        let opened = Opened::new(root, path)?;
        let key = opened.key();
        let mut exports = self.exports.lock();
        exports.retain(|_, export| export.strong_count() > 0);
        if let Some(export) = exports.get(&key).and_then(Weak::upgrade) {
            return Ok(export);
        }
        // Over another mount it may be read-only, or hide something; its ids are the same.
        let mut twins = exports.iter().filter(|((id, _), _)| *id == key.0);
        let twin = twins.find_map(|(_, twin)| twin.upgrade());
        let ids = match &twin {
            Some(twin) => Arc::clone(&twin.reach().ids),
            None => opened.open_ids(path, &self.options.state_dir)?,
        };
        let export = Arc::new(Export::of(opened, path, ids, self.options.export)?);
        export.set_grace(LeaseConfig { term: self.options.session_term, ..self.options.leases }.lapse());
        if twin.is_none() {
            export.find_orphans();
        }
        exports.insert(key, Arc::downgrade(&export));
        Ok(export)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end_sessions("the server stops");
        self.pool.stop();
        self.leases.stop();
    }
}

fn raise_descriptor_limit() -> u64 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    let before = limit.current;
    limit.current = limit.maximum;
    match setrlimit(Resource::Nofile, limit) {
        Ok(()) => limit.maximum.unwrap_or(u64::MAX),
        Err(_) => before.unwrap_or(u64::MAX),
    }
}

#[cfg(test)]
mod tests;
