//! The client's end of a session.

mod calls;
mod connection;
mod resumable;
mod updates;

pub use resumable::sessions;

use crate::ProtocolError;
use crate::flow_limit::OutstandingLoad;
use crate::frame::{FrameBytes, FrameReader, HEADER_BYTES, MAX_BODY};
use crate::handshake::{Limits, Refused};
use crate::message::{MAX_RETURNED, Message};
use crate::retransmit::{Incoming, Outgoing};
use calls::OutstandingCall;
use nigh_remote::{Counters, Event, Output, Reason, Remote};
use nigh_types::{Call, CallId, CookieKey, Errno, GrantId, RecallId, Request, Response, Span, Term, Time};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use updates::UncommittedPrepares;

/// Identity and wishes of a client, for its hello.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientConfig {
    /// The client's durable identity.
    pub client: u64,
    /// Random, new with each start of the client. A peer that knows it can resume this client's session, so only the
    /// server may learn it.
    pub incarnation: u64,
    /// Path or name of the export.
    pub attach: Vec<u8>,
    /// Longest wanted life of grants.
    pub term: Term,
    /// Optional parts of the protocol that the client wants ([`crate::ID_NAMES`]).
    pub features: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Hello was sent on this connection, and no other message may be sent yet.
    Greeting,
    Connected,
    /// There is no usable connection: another is wanted.
    Disconnected,
    Lost,
}

/// The client's end of one mount's session, as the contract on [`Remote`] says.
///
/// - Calls made without a connection, and those above the server's limits of outstanding calls, are queued here in
///   their order.
/// - A call that no frame can hold, that passes [`Limits::max_data`], or whose xattr name, xattr value or symlink
///   target no Linux filesystem takes, fails with `EINVAL` without being sent. A call cancelled while it is queued here
///   fails with `EINTR`. Calls that wait for a lock do not count among those outstanding; one more than
///   [`crate::MAX_LOCK_WAITS`] fails with `ENOLCK`.
/// - The client renews the session when no message sent in the last third of its term is known to have arrived. The
///   session lapses 0.9 of its term after the *sending* of the latest message that the server answered (decision 4 of
///   the design).
/// - After [`Event::Lost`] nothing more is emitted, and inputs do nothing.
///
/// **Connections.** The end of a connection (`handle_disconnect`) is not the end of the session. When
/// [`ClientSession::wants_connection`] gives a reason, the driver ends the old connection if it still exists, makes a
/// new one and calls [`ClientSession::handle_connect`]. Output that was not carried by then is discarded; all counted
/// frames are sent again. Before the first welcome the end of the connection is [`Event::Lost`].
///
/// ```text
///            welcome                   end of the connection, or 0.9 of the term
///  Greeting ─────────▶ Connected ──────────────────────────────────────────────▶ Disconnected
///      ▲                                                                              │
///      └────────────────────────────── handle_connect ────────────────────────────────┘
///  From each state: farewell, protocol error ─▶ Lost; also what ends Greeting before the first welcome.
/// ```
#[derive(Clone, Debug)]
pub struct ClientSession {
    config: ClientConfig,
    state: State,
    /// The session was established before.
    established: bool,
    /// An earlier session of this incarnation was lost, and its grants may still be in use.
    replaces: bool,
    /// The term has run out since the latest welcome.
    lapsed: bool,
    /// A new session replaces a forgotten one, and the reclaim has not ended.
    reclaiming: bool,
    /// Why another connection is wanted.
    why: String,
    frames: FrameReader,
    outgoing: Outgoing,
    incoming: Incoming,
    outputs: VecDeque<Output>,
    outstanding: BTreeMap<CallId, OutstandingCall>,
    /// Load of the outstanding calls that wait for no lock, and of those that do.
    load: OutstandingLoad,
    lock_load: OutstandingLoad,
    waiting: VecDeque<(CallId, Request)>,
    /// Reclaim calls: while reclaiming, they go before all other calls.
    reclaims: VecDeque<(CallId, Request)>,
    /// Calls sent in a session that the server has forgotten; they go before `waiting`.
    resend: BTreeMap<CallId, OutstandingCall>,
    limits: Limits,
    cookie_key: CookieKey,
    session_term: Span,
    session_id: u64,
    /// Bodies may be compressed on this connection.
    compresses: bool,
    /// Ids of recalls and grants continue over sessions, so that an id of an earlier session is never mistaken for a
    /// later one's.
    recalls: IdSpace,
    grants: IdSpace,
    updates: UncommittedPrepares,
    /// When the latest message was sent that the server is known to have received.
    confirmed: Time,
    /// When the hello of this connection was sent.
    greeted: Time,
    /// Id and sending time of the latest ping.
    ping: (u64, Time),
    refused: Option<Refused>,
    counters: Counters,
}

/// The server's ids of one kind, made unique over sessions.
#[derive(Clone, Copy, Debug, Default)]
struct IdSpace {
    base: u64,
    latest: u64,
}

impl IdSpace {
    /// Converts an id that the server uses in this session.
    fn local_id(&mut self, theirs: u64) -> u64 {
        let ours = self.base.saturating_add(theirs);
        self.latest = self.latest.max(ours);
        ours
    }

    /// The id that the server uses; `None`: it is of an earlier session.
    fn server_id(&self, ours: u64) -> Option<u64> {
        ours.checked_sub(self.base).filter(|theirs| *theirs > 0)
    }

    fn begin_session(&mut self) {
        self.base = self.latest;
    }
}

impl ClientSession {
    /// Creates a session and sends its hello at once.
    #[must_use]
    pub fn new(now: Time, config: ClientConfig) -> ClientSession {
        let mut session = ClientSession::unconnected(now, config);
        session.handle_connect(now);
        session
    }

    /// Creates a session after one of this incarnation was lost. Until `handle_reclaimed` says that no grant of the
    /// lost session is in use any more, the server keeps that session, and calls are queued here.
    #[must_use]
    pub fn after_lost(now: Time, config: ClientConfig) -> ClientSession {
        let mut session = ClientSession::unconnected(now, config);
        session.replaces = true;
        session.handle_connect(now);
        session
    }

    fn unconnected(now: Time, config: ClientConfig) -> ClientSession {
        ClientSession {
            config,
            state: State::Disconnected,
            established: false,
            replaces: false,
            lapsed: false,
            reclaiming: false,
            why: String::new(),
            frames: FrameReader::new(MAX_BODY),
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
            outputs: VecDeque::new(),
            outstanding: BTreeMap::new(),
            load: OutstandingLoad::default(),
            lock_load: OutstandingLoad::default(),
            waiting: VecDeque::new(),
            reclaims: VecDeque::new(),
            resend: BTreeMap::new(),
            limits: Limits::default(),
            cookie_key: CookieKey::default(),
            session_term: Span::FOREVER,
            session_id: 0,
            compresses: false,
            recalls: IdSpace::default(),
            updates: UncommittedPrepares::default(),
            grants: IdSpace::default(),
            confirmed: now,
            greeted: now,
            ping: (0, now),
            refused: None,
            counters: Counters::default(),
        }
    }

    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The server's limits; the defaults until its welcome.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// The server's number for this session; 0 until its welcome.
    #[must_use]
    pub fn session_id(&self) -> u64 {
        self.session_id
    }

    /// Why the server refused this client's latest hello.
    #[must_use]
    pub fn refused(&self) -> Option<&Refused> {
        self.refused.as_ref()
    }

    /// Ends the session from this side, in order: output that is still in `poll_output` goes first.
    pub fn handle_close(&mut self, why: &str) {
        if self.state != State::Lost {
            if self.state != State::Disconnected {
                self.send(&Message::Bye(why.to_owned()));
            }
            self.lose(format!("closed: {why}"));
        }
    }

    fn send(&mut self, message: &Message) {
        self.transmit(Arc::new(message.encode()));
    }

    fn transmit(&mut self, frame: FrameBytes) {
        self.counters.bytes_sent += frame.len() as u64;
        self.outputs.push_back(Output::Transmit(frame));
    }

    /// Sends a counted frame, now or on the next connection.
    fn put(&mut self, frame: FrameBytes) {
        self.outgoing.push(frame);
        self.put_out();
    }

    fn put_out(&mut self) {
        while self.state == State::Connected
            && let Some(frame) = self.outgoing.poll()
        {
            self.transmit(frame);
        }
    }

    fn event(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }

    fn lose(&mut self, why: String) {
        self.event(Event::Lost { why });
        self.state = State::Lost;
        self.outstanding.clear();
        self.resend.clear();
        (self.load, self.lock_load) = (OutstandingLoad::default(), OutstandingLoad::default());
        self.waiting.clear();
        self.reclaims.clear();
        self.outgoing = Outgoing::default();
    }

    /// Ends the session after a protocol error, without a Bye, which would say that all grants are dropped.
    fn abort(&mut self, error: ProtocolError) {
        let why = format!("protocol error of the server: {error}");
        // A peer that does not speak the protocol there is not this session's server.
        let stranger = !matches!(error, ProtocolError::Count { .. });
        if self.established && self.state == State::Greeting && stranger {
            self.drop_connection(&why);
        } else {
            self.lose(why);
        }
    }

    fn answer(&mut self, call: CallId, errno: Errno) {
        self.event(Event::Response { call, response: Response::plain(Err(errno)) });
    }

    fn take_frames(&mut self, now: Time, bytes: &[u8]) -> Result<(), ProtocolError> {
        let mut frames = std::mem::replace(&mut self.frames, FrameReader::new(MAX_BODY));
        let mut input = bytes;
        frames.allow_compressed(self.compresses);
        while let Some(frame) = frames.next(&mut input)? {
            let message = Message::decode(&frame)?;
            let bytes = frame.body.len() as u64 + u64::from(HEADER_BYTES);
            self.take_message(now, frame.frame_type as u8, message)?;
            // A refused frame has not arrived.
            if frame.frame_type.is_counted() {
                self.incoming.take(bytes);
            }
            frames.allow_compressed(self.compresses);
            if !matches!(self.state, State::Greeting | State::Connected) {
                return Ok(());
            }
        }
        self.frames = frames;
        if self.state == State::Connected && self.incoming.is_due() {
            let count = self.incoming.take_count();
            self.send(&Message::Received(count));
        }
        Ok(())
    }

    fn take_message(&mut self, now: Time, number: u8, message: Message) -> Result<(), ProtocolError> {
        match (self.state, message) {
            (State::Greeting, Message::Welcome(welcome)) => self.take_welcome(now, welcome)?,
            (State::Greeting, Message::Refused(refused)) => self.take_refused(refused),
            (_, Message::Bye(why)) => self.lose(format!("the server ended the session: {why}")),
            (State::Connected, Message::Response(call, response)) => {
                self.take_response(now, call, response)?
            }
            (State::Connected, Message::Recall(mut recall)) => {
                recall.id = RecallId(self.recalls.local_id(recall.id.0));
                self.event(Event::Recall(recall));
            }
            (State::Connected, Message::Hold(hold)) => self.take_prepare(number, hold)?,
            (State::Connected, Message::Commit(commit)) => self.take_commit(number, commit)?,
            (State::Connected, Message::Received(count)) => self.take_confirmation(now, count)?,
            (State::Connected, Message::Pong(pong, count)) => {
                let (number, sent) = self.ping;
                if pong == number {
                    self.confirmed = self.confirmed.max(sent);
                }
                self.take_confirmation(now, count)?;
            }
            (State::Connected, Message::Ping(number, count)) => {
                self.take_confirmation(now, count)?;
                let count = self.incoming.take_count();
                self.send(&Message::Pong(number, count));
            }
            _ => return Err(ProtocolError::Unexpected(number)),
        }
        Ok(())
    }

    fn take_confirmation(&mut self, now: Time, count: u64) -> Result<(), ProtocolError> {
        self.outgoing.confirm(count)?;
        self.put_out();
        self.send_waiting(now);
        Ok(())
    }

    fn send_ping(&mut self, now: Time) {
        self.ping = (self.ping.0 + 1, now);
        self.counters.renewals += 1;
        let count = self.incoming.take_count();
        self.send(&Message::Ping(self.ping.0, count));
    }
}

impl Remote for ClientSession {
    fn handle_call(&mut self, now: Time, id: CallId, request: Request) {
        if self.established && self.state != State::Lost && matches!(request.call, Call::PinOpen { .. }) {
            // It must precede the acknowledgement that follows, which does not wait in this queue either.
            self.send_call(now, id, &request);
        } else if self.state != State::Lost {
            let queue = match self.reclaiming && request.call.is_allowed_during_reclaim() {
                true => &mut self.reclaims,
                false => &mut self.waiting,
            };
            queue.push_back((id, request));
            self.send_waiting(now);
        }
    }

    fn handle_cancel(&mut self, _now: Time, id: CallId) {
        self.cancel(id);
    }

    fn handle_acknowledge(&mut self, _now: Time, id: RecallId) {
        if self.state != State::Lost
            && let Some(theirs) = self.recalls.server_id(id.0)
        {
            self.put(Arc::new(Message::Acknowledge(RecallId(theirs)).encode()));
        }
    }

    fn handle_return(&mut self, _now: Time, grants: Vec<GrantId>) {
        let theirs = grants.iter().filter_map(|grant| self.grants.server_id(grant.0).map(GrantId));
        let theirs: Vec<GrantId> = theirs.collect();
        if self.state != State::Lost && self.established {
            for some in theirs.chunks(MAX_RETURNED as usize) {
                self.put(Arc::new(Message::Return(some.to_vec()).encode()));
            }
        }
    }

    fn handle_reclaimed(&mut self, now: Time) {
        if self.reclaiming {
            self.reclaiming = false;
            self.put(Arc::new(Message::Reclaimed.encode()));
            // A reclaim call that remains is a call like any other.
            let claims = std::mem::take(&mut self.reclaims);
            claims.into_iter().rev().for_each(|claim| self.waiting.push_front(claim));
            self.send_waiting(now);
        }
    }

    fn handle_input(&mut self, now: Time, bytes: &[u8]) {
        // If the term ran out while this process was not running, messages that arrived meanwhile are not believed.
        if self.has_lapsed(now) {
            self.handle_timeout(now);
        }
        if !matches!(self.state, State::Greeting | State::Connected) {
            return;
        }
        self.counters.bytes_received += bytes.len() as u64;
        if let Err(error) = self.take_frames(now, bytes) {
            self.abort(error);
        }
    }

    fn handle_disconnect(&mut self, _now: Time, why: &str) {
        match self.state {
            State::Lost | State::Disconnected => {}
            _ if !self.established => self.lose(why.to_owned()),
            _ => self.drop_connection(why),
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.has_lapsed(now) {
            self.lapse(now);
        } else if now >= self.due().0 {
            match self.state {
                State::Greeting if self.established => self.drop_connection("the server does not greet"),
                State::Greeting => self.lose("the server has not answered for too long".to_owned()),
                State::Connected => self.send_ping(now),
                State::Disconnected | State::Lost => {}
            }
        }
    }

    fn poll_output(&mut self) -> Output {
        self.outputs.pop_front().unwrap_or_else(|| {
            let (moment, reason): (Time, Reason) = self.due();
            Output::Timeout(moment, reason)
        })
    }
}
