//! A connection: its HELLO, the session that it begins or resumes, and its input.

pub(crate) mod dispatch;
pub(crate) mod idle;
pub(crate) mod quotas;
pub(crate) mod validate_ids;

use crate::connection::idle::WakeReason;
use crate::lease::holder::LeaseSession;
use crate::lease::session_files::SessionFiles;
use crate::os::clock::now;
use crate::server::Server;
use crate::session::log::{self, SessionLog};
use crate::session::outbox::Outbox;
use crate::session::{Attached, End, Resumption, Session};
use nigh_link::{Link, Peer, UnauthenticatedSlot};
use nigh_native::{ProtocolError, Resume, ServerConfig, ServerEvent, ServerSession, TRUSTS_WATCH, UPDATES};
use nigh_types::{Errno, Term, Time};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a connection's thread waits for input before it moves the connection to the idle set.
const BUSY: Duration = Duration::from_millis(200);
/// Bytes read from a connection at a time.
const READ_BYTES: usize = 256 << 10;
/// Initial read size, until that many bytes arrive at once: many clients send little.
const FIRST_BYTES: usize = 4 << 10;

/// How a connection ended.
pub(crate) enum Ended {
    /// The client has dropped all its grants.
    Goodbye,
    /// The client violated the protocol.
    Broken,
    /// The connection was lost; the client may reconnect.
    Lost,
    /// The client has reconnected already.
    Replaced,
}

/// The contents of a HELLO.
struct Hello {
    who: (u64, u64),
    export: Vec<u8>,
    term: Term,
    features: u64,
    moment: u64,
    resume: Option<Resume>,
}

impl Hello {
    fn of(event: ServerEvent) -> Option<Hello> {
        let ServerEvent::Attach { client, incarnation, export, term, features, moment, resume, .. } = event
        else {
            return None;
        };
        Some(Hello { who: (client, incarnation), export, term, features, moment, resume })
    }
}

/// Outcome of waiting for a HELLO.
enum HelloOutcome {
    Hello(Box<ServerSession>, Hello),
    /// No HELLO arrived; the text says why.
    Nothing(String),
}

type Refusal = (Errno, String);

impl Server {
    /// Serves one client over a connection until it ends; `peer` holds the ids that it may claim.
    pub fn serve_link(&self, link: Link, peer: Peer) -> io::Result<()> {
        self.serve_stranger(link, peer, None)
    }

    /// Serves a connection that may be dropped while it is unattached; the ticket is kept until it attaches.
    pub(crate) fn serve_stranger(
        &self,
        link: Link,
        peer: Peer,
        ticket: Option<UnauthenticatedSlot>,
    ) -> io::Result<()> {
        link.set_write_timeout(Some(Outbox::PATIENCE))?;
        link.set_read_timeout(Some(BUSY))?;
        self.unattached.fetch_add(1, Ordering::SeqCst);
        let admitted = self.greet(&link, peer);
        self.unattached.fetch_sub(1, Ordering::SeqCst);
        drop(ticket);
        let Some((session, number)) = admitted? else { return Ok(()) };
        let writer = Arc::clone(&session);
        let writer = std::thread::Builder::new()
            .name(format!("nigh-write-{}", session.id))
            .spawn(move || writer.outbox.write(number));
        let read = match &writer {
            Ok(_) => self.read(&session, number, &link),
            Err(error) => Err(io::Error::other(format!("no thread for it: {error}"))),
        };
        match &read {
            Ok(Ended::Replaced) => {}
            Ok(Ended::Goodbye) => self.discard(&session, End::Goodbye),
            Ok(Ended::Broken) => self.discard(&session, End::Disconnected),
            Ok(Ended::Lost) | Err(_) if session.outbox.is_not_reading() => {
                self.handle_link_loss(&session, number, "the client does not read");
            }
            Ok(Ended::Lost) => self.handle_link_loss(&session, number, "the connection was lost"),
            Err(error) => self.handle_link_loss(&session, number, &error.to_string()),
        }
        // A failure of the writer is one of the connection.
        let _ = writer?.join();
        read.map(drop)
    }

    fn handle_link_loss(&self, session: &Arc<Session>, number: u64, why: &str) {
        if session.disconnect(number) {
            if !self.is_ending() {
                log::cut(session, why);
            }
            if self.inflight.is_stopping() {
                session.outbox.drop_held();
            }
        }
        // No client reconnects to a server that stops.
        if session.is_over() || (self.is_ending() && session.disconnected_since().is_some()) {
            self.discard(session, End::Disconnected);
        }
    }

    /// Returns a stream to this server, served by a thread of this process.
    pub fn serve_in_process(self: &Arc<Server>) -> io::Result<UnixStream> {
        let (theirs, ours) = UnixStream::pair()?;
        let server = Arc::clone(self);
        std::thread::Builder::new().name("nigh-session".into()).spawn(move || {
            // The session log has the reason.
            let _ = server.serve_link(ours.into(), Peer::in_process());
        })?;
        Ok(theirs)
    }

    /// Waits for the HELLO. Returns the session that the connection begins or resumes, and the link's number there;
    /// `None` if the connection was refused or sent no valid HELLO.
    pub(crate) fn greet(&self, link: &Link, peer: Peer) -> io::Result<Option<(Arc<Session>, u64)>> {
        let story = SessionLog::new(&self.meter.limits, link.kind());
        let id = self.next_session_id();
        log::connected(&story, id, &peer);
        let why = match self.wait_for_hello(link, id) {
            Ok(HelloOutcome::Hello(connection, hello)) => {
                return Ok(self.admit((link, peer, story), connection, &hello));
            }
            Ok(HelloOutcome::Nothing(why)) => why,
            Err(error) => error.to_string(),
        };
        self.meter.count_ended(link.bytes());
        log::left(&story, id, &peer, &why);
        Ok(None)
    }

    fn wait_for_hello(&self, link: &Link, session_id: u64) -> io::Result<HelloOutcome> {
        let (session_term, limits) = (self.options.session_term, self.options.bounds.limits());
        let config = ServerConfig { session_id, session_term, limits };
        let mut connection = ServerSession::new(now(), config);
        // Deadline for the HELLO, whatever other bytes arrive.
        let until = connection.lapses();
        let mut buffer = vec![0; FIRST_BYTES];
        let nothing = |why: &str| Ok(HelloOutcome::Nothing(why.to_owned()));
        loop {
            let Some(count) = read_some(link, &mut buffer)? else {
                return nothing("the connection was lost");
            };
            if until < now() {
                return nothing("it did not say hello in time");
            }
            if count == 0 {
                if self.is_ending() {
                    return nothing("the server stops");
                }
                // The read timed out.
                continue;
            }
            let taken = connection.handle_input(now(), &buffer[..count]);
            let event = connection.poll_event();
            while let Some(frame) = connection.poll_transmit() {
                link.write_all(&frame)?;
            }
            if let Err(error) = taken {
                return nothing(&format!("the client broke the protocol: {error}"));
            }
            match event {
                Some(ServerEvent::Bye { why }) => return nothing(&format!("goodbye: {why}")),
                Some(event) => {
                    if let Some(hello) = Hello::of(event) {
                        return Ok(HelloOutcome::Hello(Box::new(connection), hello));
                    }
                }
                None => {}
            }
        }
    }

    fn admit(
        &self,
        (link, peer, story): (&Link, Peer, SessionLog),
        connection: Box<ServerSession>,
        hello: &Hello,
    ) -> Option<(Arc<Session>, u64)> {
        if let Some((session, resume)) = self.named(&peer, hello)
            && !self.inflight.is_stopping()
        {
            match resume_session(&session, link, (hello.moment, resume.received)) {
                Ok(Resumption::Link(number)) => {
                    log::resumed(&session, connection.session_id());
                    return Some((session, number));
                }
                Ok(Resumption::Stale) => {
                    self.meter.count_ended(link.bytes());
                    let why = "its client has made another connection since";
                    log::left(&story, connection.session_id(), &peer, why);
                    return None;
                }
                Ok(Resumption::Discarded) => {}
                Err(error) => {
                    session.log.set_end_reason(|| format!("the client broke the protocol: {error}"));
                    self.discard(&session, End::Disconnected);
                    return None;
                }
            }
        }
        let of = (link.clone(), peer, hello.moment);
        let session = Arc::new(Session::new(
            *connection,
            of,
            story,
            (&self.leases, Arc::downgrade(&self.pool)),
            &self.reaper,
        ));
        if let Err((errno, message)) = self.attach(&session, hello) {
            log::refused(&session, errno, &message);
            session.with_connection(|connection| connection.refuse(errno, &message));
            session.outbox.end();
            session.outbox.write(session.first_link());
            self.meter.count_ended(session.outbox.bytes());
            log::ended(&session, End::Disconnected);
            return None;
        }
        let number = session.first_link();
        Some((session, number))
    }

    /// Returns the session named in a HELLO if it belongs to this client. A client with other credentials or another
    /// incarnation learns nothing about it.
    fn named(&self, peer: &Peer, hello: &Hello) -> Option<(Arc<Session>, Resume)> {
        let resume = hello.resume?;
        let session = self.session(resume.session_id)?;
        let attached = session.attached()?;
        let same =
            attached.who == hello.who && attached.name == hello.export && session.peer.has_same_rights(peer);
        same.then_some((session, resume))
    }

    fn attach(&self, session: &Arc<Session>, hello: &Hello) -> Result<(), Refusal> {
        if self.inflight.is_stopping() {
            return Err((Errno::AGAIN, "the server stops: try again in a moment".into()));
        }
        let asked = &hello.export[..];
        let exports = self.exports_of(session.peer.scope());
        let exports = exports.ok_or_else(|| (Errno::NOENT, "what served that has ended".to_owned()))?;
        let (root, path) = exports.open(asked, &session.peer)?;
        let path = path.as_path();
        let export =
            self.export(root, path, session.origin).map_err(|error| (error.errno(), error.to_string()))?;
        let place = (&self.leases, session.holder());
        let files = SessionFiles::of_session(self.options.files_per_session, hello.term, place)
            .vouched(session.credential_policy.vouches())
            .sharing(&self.descriptors, session.origin)
            .trusting(hello.features & TRUSTS_WATCH != 0);
        let Hello { who, mut features, term, .. } = *hello;
        if export.impersonates() && !session.credential_policy.vouches() {
            // Updates are read with the server's rights, and a confined client may not see all that they contain.
            features &= !UPDATES;
        }
        let (name, locks) = (asked.to_vec(), Arc::clone(&self.locks));
        session.attach(Attached { name, features, term, export, files, locks, who });
        let Some(attached) = session.attached() else { return Err((Errno::IO, "not attached".into())) };
        let agreed = session_params(session, attached)
            .map_err(|errno| (errno, format!("cannot look at {}: {errno}", path.display())))?;
        let overtaken = || (Errno::STALE, "a later connection of this client is served".to_owned());
        if self.sessions_of(session, attached).iter().any(|other| other.moment() > hello.moment) {
            return Err(overtaken());
        }
        self.discard_earlier(session, attached, hello.resume.is_none());
        if hello.resume.is_some() && !self.memory.is_settled(hello.who) {
            return Err((Errno::AGAIN, "what this client asked for before is still being done".into()));
        }
        let whole = hello.resume.is_none();
        let room = self.quota_lock.lock();
        self.make_room(session)?;
        self.registry.begin(session.id, hello.who, whole).map_err(|problem| (Errno::IO, problem))?;
        let begun = self.begin(session, attached, hello.resume.is_none());
        drop(room);
        if !begun {
            self.registry.end(session.id, Time(0));
            return Err(overtaken());
        }
        if hello.resume.is_none() {
            self.returned(hello.who);
        }
        log::attached(session, agreed.term);
        session.with_connection(|connection| connection.accept(agreed));
        Ok(())
    }

    fn read(&self, session: &Arc<Session>, number: u64, link: &Link) -> io::Result<Ended> {
        let mut buffer = vec![0; FIRST_BYTES];
        loop {
            let Some(count) = read_some(link, &mut buffer)? else { return Ok(Ended::Lost) };
            let ended = if count > 0 {
                self.handle_bytes(session, number, &buffer[..count])
            } else {
                buffer = vec![0; FIRST_BYTES];
                match self.idle_connections.wait(session, number, link) {
                    WakeReason::Input(bytes) if bytes.is_empty() => None,
                    WakeReason::Input(bytes) => self.handle_bytes(session, number, &bytes),
                    WakeReason::Ended(ended) => Some(ended),
                    WakeReason::Failed(error) => return Err(error),
                }
            };
            if let Some(ended) = ended {
                return Ok(ended);
            }
            if count == buffer.len() && count < READ_BYTES {
                buffer = vec![0; count * 4];
            }
        }
    }
}

/// Resumes the session over this link, if possible.
fn resume_session(session: &Arc<Session>, link: &Link, at: (u64, u64)) -> Result<Resumption, ProtocolError> {
    let Some(Ok(agreed)) = session.attached().map(|attached| session_params(session, attached)) else {
        return Ok(Resumption::Discarded);
    };
    session.resume(link.clone(), at, agreed)
}

/// Returns the session parameters for the client.
fn session_params(session: &Session, attached: &Attached) -> Result<nigh_native::SessionParams, Errno> {
    let mut agreed = attached.export.session(&attached.files)?;
    validate_ids::fill_session_params(
        &mut agreed,
        &attached.export,
        &session.credential_policy,
        attached.features,
    );
    Ok(agreed)
}

/// Reads some bytes; 0 after a timeout, `None` at the end of the stream.
fn read_some(link: &Link, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        return match link.read(buffer) {
            Ok(0) => Ok(None),
            Ok(count) => Ok(Some(count)),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => Ok(Some(0)),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(e) => Err(e),
        };
    }
}
