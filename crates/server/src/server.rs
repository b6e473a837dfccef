//! Serves exports to sessions over streams.

use crate::export::{Export, ExportError, ExportOptions};
use crate::files::SessionFiles;
use crate::mounts::devices_below;
use crate::outbox::Outbox;
use crate::pool::{Job, Pool};
use crate::session::{Attached, Session, now};
use nigh_native::{Limits, ServerConfig, ServerEvent};
use nigh_types::{Errno, Response, Span, Term};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
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
    /// Threads that execute calls; at least 4.
    pub threads: u32,
    /// Open files of one session.
    pub files_per_session: u64,
    /// How long a session stands without renewal; `Span::FOREVER`: until its connection ends, which a
    /// stream on one machine shows reliably.
    pub session_term: Span,
    /// How long grants live at the most while several sessions see the same filesystem.
    pub contended_term: Span,
    /// A client that gives nothing back for so long loses its session.
    pub recall_patience: Duration,
}

impl ServerOptions {
    #[must_use]
    pub fn new(state_dir: PathBuf) -> ServerOptions {
        ServerOptions {
            state_dir,
            export: ExportOptions::default(),
            threads: 8,
            files_per_session: 1 << 16,
            session_term: Span::FOREVER,
            contended_term: Span::from_secs(5),
            recall_patience: Duration::from_secs(2),
        }
    }
}

/// Serves any directory that its process can reach to sessions, which name it by its path.
///
/// Exports are opened when the first session attaches and closed after the last one; sessions that
/// name the same directory share one. Dropping the server ends its sessions.
pub struct Server {
    options: ServerOptions,
    pool: Arc<Pool>,
    exports: Mutex<HashMap<String, Weak<Export>>>,
    /// Before `Session::wire` in lock order.
    sessions: Mutex<Vec<Arc<Session>>>,
    last_session: AtomicU64,
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
        Ok(Arc::new(Server {
            pool: Pool::start(options.threads)?,
            options,
            exports: Mutex::default(),
            sessions: Mutex::default(),
            last_session: AtomicU64::new(0),
        }))
    }

    /// Serves one client until its session ends. What the client may claim follows from the uid that
    /// the kernel says made the connection.
    pub fn serve_stream(&self, stream: UnixStream) -> io::Result<()> {
        let peer_uid = rustix::net::sockopt::socket_peercred(&stream)?.uid.as_raw();
        stream.set_write_timeout(Some(Outbox::PATIENCE))?;
        stream.set_read_timeout(Some(TICK))?;
        let session_id = self.last_session.fetch_add(1, Ordering::Relaxed) + 1;
        let config =
            ServerConfig { session_id, session_term: self.options.session_term, limits: Limits::default() };
        let out = stream.try_clone()?;
        let session = Arc::new(Session::new(config, out, peer_uid, self.options.contended_term));
        let writer = Arc::clone(&session);
        let writer = std::thread::Builder::new()
            .name(format!("nigh-write-{session_id}"))
            .spawn(move || writer.outbox.write())?;
        self.sessions.lock().push(Arc::clone(&session));
        let read = self.read(&session, stream);
        self.detach(&session);
        // Its own failures are the connection's.
        let _ = writer.join();
        tracing::info!(session = session_id, "session ended");
        read
    }

    /// A stream to this server, served by a thread of this process.
    pub fn serve_in_process(self: &Arc<Server>) -> io::Result<UnixStream> {
        let (theirs, ours) = UnixStream::pair()?;
        let server = Arc::clone(self);
        std::thread::Builder::new().name("nigh-session".into()).spawn(move || {
            if let Err(error) = server.serve_stream(ours) {
                tracing::warn!(%error, "a session ended with an error");
            }
        })?;
        Ok(theirs)
    }

    /// Sessions that stand, or are about to.
    #[must_use]
    pub fn session_count(&self) -> u64 {
        self.sessions.lock().len() as u64
    }

    /// Ends all sessions; `why` is for people. What is queued for them is still sent.
    pub fn end_sessions(&self, why: &str) {
        let sessions = self.sessions.lock().clone();
        sessions.iter().for_each(|session| session.end(why));
    }

    fn read(&self, session: &Arc<Session>, mut stream: UnixStream) -> io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        let mut tick = Instant::now();
        loop {
            let count = match stream.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => 0,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                Err(e) => return Err(e),
            };
            let (taken, events) = session.with_connection(|connection| {
                let taken = connection.handle_input(now(), &buffer[..count]);
                let events: Vec<_> = std::iter::from_fn(|| connection.poll_event()).collect();
                (taken, events)
            });
            if let Err(error) = taken {
                tracing::warn!(session = session.id, %error, "the client broke the protocol");
                return Ok(());
            }
            for event in events {
                if !self.take(session, event) {
                    return Ok(());
                }
            }
            if tick.elapsed() >= TICK {
                tick = Instant::now();
                if session.with_connection(|connection| connection.lapses() < now()) {
                    session.end("the client was silent for longer than its term");
                    return Ok(());
                }
                if let Some(attached) = session.attached() {
                    attached.export.close_idle(tick);
                }
            }
        }
    }

    /// False when the session is over.
    fn take(&self, session: &Arc<Session>, event: ServerEvent) -> bool {
        match event {
            ServerEvent::Attach { export, term, .. } => match self.attach(session, &export, term) {
                Ok(()) => true,
                Err((errno, message)) => {
                    session.with_connection(|connection| connection.refuse(errno, &message));
                    false
                }
            },
            ServerEvent::Request { call, request } => {
                if let nigh_types::Call::Release { handles } = &request.call {
                    if let Some(attached) = session.attached() {
                        attached.files.release(handles);
                    }
                } else {
                    self.pool.submit(Job { session: Arc::clone(session), call, request });
                }
                true
            }
            ServerEvent::Cancel(call) => {
                if self.pool.take_back(session, call) {
                    session.answer(call, Response::plain(Err(Errno::INTR)));
                }
                true
            }
            ServerEvent::Acknowledge(recall) => {
                session.acknowledge(recall);
                true
            }
            ServerEvent::Return(grants) => {
                session.returned(&grants);
                true
            }
            ServerEvent::Bye { why } => {
                tracing::debug!(session = session.id, why, "the client said goodbye");
                false
            }
        }
    }

    fn attach(&self, session: &Arc<Session>, export: &[u8], term: Term) -> Result<(), (Errno, String)> {
        let path = Path::new(OsStr::from_bytes(export));
        if !path.is_absolute() {
            return Err((Errno::INVAL, format!("{} is no absolute path", path.display())));
        }
        let export = self.export(path).map_err(|error| (error.errno(), error.to_string()))?;
        let files = SessionFiles::new(self.options.files_per_session, term);
        let devices = devices_below(path).map_err(|error| {
            (crate::error::Fault::from_io(&error).into(), format!("cannot read the table of mounts: {error}"))
        })?;
        session.attach(Attached { export, files, wanted: term, devices });
        let Some(attached) = session.attached() else { return Err((Errno::IO, "not attached".into())) };
        self.share_out(session);
        let agreed = attached.export.session(&attached.files);
        let agreed =
            agreed.map_err(|errno| (errno, format!("cannot look at {}: {errno}", path.display())))?;
        tracing::info!(session = session.id, export = attached.export.id(), term = ?agreed.term, "attached");
        session.with_connection(|connection| connection.accept(agreed));
        Ok(())
    }

    /// See docs/decisions/0007-two-mounts-before-leases.md.
    fn share_out(&self, newcomer: &Arc<Session>) {
        let mut contended = Vec::new();
        {
            let sessions = self.sessions.lock();
            for other in sessions.iter().filter(|other| !Arc::ptr_eq(other, newcomer)) {
                if overlap(newcomer, other) {
                    newcomer.contend();
                    other.contend();
                    contended.push(Arc::clone(other));
                }
            }
        }
        for other in contended {
            other.await_acknowledgements(self.options.recall_patience);
        }
    }

    fn detach(&self, session: &Arc<Session>) {
        self.pool.forget(session);
        session.finish("the session is over");
        let mut sessions = self.sessions.lock();
        sessions.retain(|other| !Arc::ptr_eq(other, session));
        for (at, one) in sessions.iter().enumerate() {
            let contended = sessions.iter().enumerate().any(|(other, two)| other != at && overlap(one, two));
            if !contended {
                one.be_alone();
            }
        }
    }

    fn export(&self, path: &Path) -> Result<Arc<Export>, ExportError> {
        let id = Export::identify(path)?;
        let mut exports = self.exports.lock();
        exports.retain(|_, export| export.strong_count() > 0);
        if let Some(export) = exports.get(&id).and_then(Weak::upgrade) {
            return Ok(export);
        }
        let export = Arc::new(Export::open(path, &self.options.state_dir, self.options.export)?);
        exports.insert(id, Arc::downgrade(&export));
        Ok(export)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end_sessions("the server stops");
        self.pool.stop();
    }
}

/// Whether two sessions may see the same files: their exports have a filesystem in common.
fn overlap(one: &Session, two: &Session) -> bool {
    match (one.attached(), two.attached()) {
        (Some(one), Some(two)) => !one.devices.is_disjoint(&two.devices),
        _ => false,
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
