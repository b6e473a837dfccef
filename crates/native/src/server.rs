//! The server's end of a session.

use crate::ProtocolError;
use crate::frame::{FrameReader, MAX_BODY};
use crate::handshake::{FEATURES, Hello, Limits, Refused, SESSION_TERM, Welcome};
use crate::locks::MAX_LOCK_WAITS;
use crate::message::{Message, encode_response};
use nigh_remote::Session;
use nigh_types::{Call, CallId, Errno, GrantId, Recall, RecallId, Request, Response, Span, Term, Time};
use std::collections::{BTreeSet, VecDeque};

/// Bytes of a body taken from someone who has not said hello.
const STRANGER_BODY: u32 = 16 << 10;

/// What a server offers on one connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerConfig {
    /// This session, as the server numbers it.
    pub session_id: u64,
    /// How long the session stands without renewal; `Span::FOREVER`: until the connection ends.
    pub session_term: Span,
    pub limits: Limits,
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig { session_id: 1, session_term: SESSION_TERM, limits: Limits::default() }
    }
}

/// What a client wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServerEvent {
    /// Comes first; answered with [`ServerConnection::accept`] or [`ServerConnection::refuse`].
    Attach {
        client: u64,
        incarnation: u64,
        export: Vec<u8>,
        term: Term,
        version: u16,
        /// Those wanted that this build knows ([`crate::NAMES_ALONE`], [`crate::ID_NAMES`]).
        features: u64,
    },
    /// Answered with [`ServerConnection::respond`], if it is to be ([`Call::is_answered`]).
    Request {
        call: CallId,
        request: Request,
    },
    /// Nobody waits for this call any more. It is answered all the same: `EINTR` where it had no effect.
    Cancel(CallId),
    /// The client holds nothing any more of what this recall named.
    Acknowledge(RecallId),
    Return(Vec<GrantId>),
    /// The session is over; after what is left to transmit the connection is closed.
    Bye {
        why: String,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Nothing came yet.
    Listening,
    /// Hello came; neither accepted nor refused.
    Greeted {
        version: u16,
        features: u64,
    },
    Attached,
    Ended,
}

/// The server's end of one session.
///
/// **Contract.** After each input drain `poll_event`; whenever something was put out (by an input,
/// or by `accept`, `refuse`, `respond`, `transmit_encoded`, `recall`, `end`) drain `poll_transmit`,
/// whose frames go out in that order. After an error or [`ServerEvent::Bye`], transmit what is left
/// and close the connection; answers that still come are dropped here.
///
/// **Muted** (a session that owes acknowledgements for too long), nothing that arrives is answered: pings
/// and calls are kept until it may be heard again, and renew nothing. What arrived before is answered still,
/// and acknowledgements, returns and farewells are taken as ever.
///
/// A client owes nothing for another: what is enforced is that hello comes first and once, sizes,
/// that call ids are not in use twice, the number of outstanding calls, operation names on mutations
/// and on nothing else, and acknowledgements of recalls that were sent.
pub struct ServerConnection {
    config: ServerConfig,
    state: State,
    frames: FrameReader,
    events: VecDeque<ServerEvent>,
    transmit: VecDeque<Vec<u8>>,
    outstanding: BTreeSet<CallId>,
    /// Calls that wait for a lock: they do not count among the others.
    lock_waits: BTreeSet<CallId>,
    recalls: BTreeSet<RecallId>,
    heard: Time,
    pings: u64,
    muted: bool,
    /// What arrived while muted: calls and their cancellations in order, and the latest ping.
    kept: VecDeque<ServerEvent>,
    kept_ping: Option<u64>,
}

impl ServerConnection {
    #[must_use]
    pub fn new(now: Time, config: ServerConfig) -> ServerConnection {
        ServerConnection {
            config,
            state: State::Listening,
            frames: FrameReader::new(STRANGER_BODY),
            events: VecDeque::new(),
            transmit: VecDeque::new(),
            outstanding: BTreeSet::new(),
            lock_waits: BTreeSet::new(),
            recalls: BTreeSet::new(),
            heard: now,
            pings: 0,
            muted: false,
            kept: VecDeque::new(),
            kept_ping: None,
        }
    }

    /// Bytes arrived.
    ///
    /// # Errors
    /// The rule that the client broke; a farewell that says so is left to transmit.
    pub fn handle_input(&mut self, now: Time, bytes: &[u8]) -> Result<(), ProtocolError> {
        if self.state == State::Ended {
            return Err(ProtocolError::Ended);
        }
        if !self.muted {
            self.heard = self.heard.max(now);
        }
        let taken = self.take_frames(bytes);
        if let Err(error) = taken {
            self.transmit.push_back(Message::Bye(format!("protocol error: {error}")).encode());
            self.finish();
        }
        taken
    }

    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        self.events.pop_front()
    }

    /// Bytes for the transport, in this order.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        self.transmit.pop_front()
    }

    /// Whether what arrives from now on is kept unanswered. Ending it answers what was kept: the caller
    /// counts the client as heard at that moment.
    pub fn mute(&mut self, muted: bool) {
        self.muted = muted;
        if muted || self.state == State::Ended {
            return;
        }
        if let Some(number) = self.kept_ping.take() {
            self.transmit.push_back(Message::Pong(number).encode());
        }
        self.events.append(&mut self.kept);
    }

    /// The session stands.
    ///
    /// # Panics
    /// Unless [`ServerEvent::Attach`] is the latest thing that happened to this session.
    pub fn accept(&mut self, session: Session) {
        let State::Greeted { version, features } = self.state else {
            assert_eq!(self.state, State::Ended, "a session is accepted once, after its hello");
            return;
        };
        self.state = State::Attached;
        self.frames.allow(MAX_BODY);
        let ServerConfig { session_id, session_term, limits } = self.config;
        let welcome = Welcome { version, features, session_id, session_term, limits, session };
        self.transmit.push_back(Message::Welcome(welcome).encode());
    }

    /// The client is not wanted; `message` tells people what happened and how to mend it.
    pub fn refuse(&mut self, errno: Errno, message: &str) {
        if matches!(self.state, State::Greeted { .. }) {
            let refused = Refused { errno, message: message.to_owned() };
            self.transmit.push_back(Message::Refused(refused).encode());
            self.finish();
        }
    }

    /// Answers a call.
    ///
    /// # Panics
    /// If the call is not outstanding, or the frame would be longer than [`crate::MAX_BODY`].
    pub fn respond(&mut self, call: CallId, response: &Response) {
        let bytes = encode_response(call, response);
        self.transmit_encoded(call, response.last, bytes);
    }

    /// Answers a call with what [`encode_response`] made of it, perhaps on another thread.
    ///
    /// # Panics
    /// If the call is not outstanding.
    pub fn transmit_encoded(&mut self, call: CallId, last: bool, bytes: Vec<u8>) {
        if self.state == State::Ended {
            return;
        }
        assert!(self.is_outstanding(call), "call {} is answered but not outstanding", call.0);
        if last {
            self.outstanding.remove(&call);
            self.lock_waits.remove(&call);
        }
        self.transmit.push_back(bytes);
    }

    /// Asks for facts back; [`ServerEvent::Acknowledge`] answers.
    ///
    /// # Panics
    /// If a recall of this id is outstanding.
    pub fn recall(&mut self, recall: Recall) {
        if self.state != State::Attached {
            return;
        }
        assert!(self.recalls.insert(recall.id), "recall {} is outstanding already", recall.id.0);
        self.transmit.push_back(Message::Recall(recall).encode());
    }

    /// Asks the client for a sign of life; its answer, like any input, counts as renewal.
    pub fn probe(&mut self) {
        if self.state == State::Attached {
            self.pings += 1;
            self.transmit.push_back(Message::Ping(self.pings).encode());
        }
    }

    /// Ends the session from this side.
    pub fn end(&mut self, why: &str) {
        if self.state != State::Ended {
            self.transmit.push_back(Message::Bye(why.to_owned()).encode());
            self.finish();
        }
    }

    /// When the session lapses unless the client is heard from: 1.1 of its term after it last was.
    #[must_use]
    pub fn lapses(&self) -> Time {
        let Span(term) = self.config.session_term;
        self.heard.after(Span(term.saturating_add(term / 10)))
    }

    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.state == State::Ended
    }

    /// Calls that are not answered yet, without those that wait for a lock.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        u32::try_from(self.outstanding.len()).unwrap_or(u32::MAX)
    }

    /// Whether a call is to be answered still.
    #[must_use]
    pub fn is_outstanding(&self, call: CallId) -> bool {
        self.outstanding.contains(&call) || self.lock_waits.contains(&call)
    }

    /// Whether it is one that may wait for a lock.
    #[must_use]
    pub fn is_lock_wait(&self, call: CallId) -> bool {
        self.lock_waits.contains(&call)
    }

    fn finish(&mut self) {
        self.state = State::Ended;
        self.outstanding.clear();
        self.lock_waits.clear();
        self.recalls.clear();
        self.kept.clear();
    }

    fn take_frames(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        let mut frames = std::mem::replace(&mut self.frames, FrameReader::new(STRANGER_BODY));
        let mut input = bytes;
        while self.state != State::Ended
            && let Some(frame) = frames.next(&mut input)?
        {
            self.take_message(frame.frame_type as u8, Message::decode(&frame)?)?;
        }
        self.frames = frames;
        Ok(())
    }

    fn take_message(&mut self, number: u8, message: Message) -> Result<(), ProtocolError> {
        match (self.state, message) {
            (State::Listening, Message::Hello(hello)) => self.take_hello(hello),
            (_, Message::Bye(why)) => {
                self.events.push_back(ServerEvent::Bye { why });
                self.finish();
            }
            (State::Attached, Message::Request(call, request)) => self.take_request(call, request)?,
            (State::Attached, Message::Cancel(call)) => {
                if self.is_outstanding(call) {
                    let is_it =
                        |e: &ServerEvent| matches!(e, ServerEvent::Request { call: c, .. } if *c == call);
                    let queue = if self.kept.iter().any(is_it) { &mut self.kept } else { &mut self.events };
                    if !queue.contains(&ServerEvent::Cancel(call)) {
                        queue.push_back(ServerEvent::Cancel(call));
                    }
                }
            }
            (State::Attached, Message::Acknowledge(recall)) => {
                if !self.recalls.remove(&recall) {
                    return Err(ProtocolError::UnknownRecall(recall));
                }
                self.events.push_back(ServerEvent::Acknowledge(recall));
            }
            (State::Attached, Message::Return(grants)) => {
                self.events.push_back(ServerEvent::Return(grants));
            }
            (State::Attached, Message::Ping(number)) if self.muted => self.kept_ping = Some(number),
            (State::Attached, Message::Ping(number)) => {
                self.transmit.push_back(Message::Pong(number).encode());
            }
            (State::Attached, Message::Pong(_)) => {}
            _ => return Err(ProtocolError::Unexpected(number)),
        }
        Ok(())
    }

    fn take_hello(&mut self, hello: Hello) {
        match hello.choose_version() {
            Ok(version) => {
                let features = hello.features & FEATURES;
                self.state = State::Greeted { version, features };
                let Hello { client, incarnation, attach: export, term, .. } = hello;
                self.events.push_back(ServerEvent::Attach {
                    client,
                    incarnation,
                    export,
                    term,
                    version,
                    features,
                });
            }
            Err(refused) => {
                self.events.push_back(ServerEvent::Bye { why: refused.message.clone() });
                self.transmit.push_back(Message::Refused(refused).encode());
                self.finish();
            }
        }
    }

    fn take_request(&mut self, call: CallId, request: Request) -> Result<(), ProtocolError> {
        let Limits { max_data, max_calls } = self.config.limits;
        let data = match &request.call {
            Call::Read { length, .. } => u64::from(*length),
            Call::Write { data, .. } => data.len() as u64,
            _ => 0,
        };
        if data > u64::from(max_data) {
            return Err(ProtocolError::Malformed("a read or write is longer than the server said it takes"));
        }
        if request.call.is_answered() {
            let waits = request.call.waits_for_lock();
            let (calls, limit) = match waits {
                true => (self.lock_waits.len() as u64, MAX_LOCK_WAITS),
                false => (self.outstanding.len() as u64, max_calls),
            };
            if calls >= u64::from(limit) {
                return Err(ProtocolError::TooManyCalls(limit));
            }
            if self.is_outstanding(call) {
                return Err(ProtocolError::CallInUse(call));
            }
            if waits {
                self.lock_waits.insert(call)
            } else {
                self.outstanding.insert(call)
            };
        }
        // What goes before an acknowledgement must not wait for it; it is not answered, so it renews nothing.
        if matches!(request.call, Call::Keep { .. }) {
            self.events.push_back(ServerEvent::Request { call, request });
            return Ok(());
        }
        // Releases are not answered, and so not counted among the outstanding calls.
        if self.muted && self.kept.len() as u64 >= 4 * u64::from(max_calls) {
            return Err(ProtocolError::TooManyCalls(max_calls));
        }
        let queue = if self.muted { &mut self.kept } else { &mut self.events };
        queue.push_back(ServerEvent::Request { call, request });
        Ok(())
    }
}
