//! The server's end of a session.

mod hear;

use crate::ProtocolError;
use crate::frame::{self, FrameBytes, FrameReader, MAX_BODY};
use crate::handshake::{COMPRESSED, Limits, Refused, Resume, Resumed, SESSION_TERM, Welcome};
use crate::load::Load;
use crate::message::{Message, encode_response};
use crate::stream::{Incoming, Outgoing};
use nigh_remote::Session;
use nigh_types::{
    CallId, Commit, Errno, GrantId, Hold, Recall, RecallId, Request, Response, Span, Term, Time,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

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
    /// Comes first; answered with [`ServerConnection::accept`] or [`ServerConnection::refuse`], or by letting
    /// the session that it names go on over this connection ([`ServerConnection::resume`]).
    Attach {
        client: u64,
        incarnation: u64,
        export: Vec<u8>,
        term: Term,
        version: u16,
        /// Those wanted that this build knows ([`crate::NAMES_ALONE`], [`crate::ID_NAMES`]).
        features: u64,
        /// As in [`crate::Hello`].
        moment: u64,
        resume: Option<Resume>,
    },
    /// Answered with [`ServerConnection::respond`], if it is to be ([`Call::is_answered`]).
    Request {
        call: CallId,
        request: Request,
        /// It was put out before, in a session that the server has forgotten.
        again: bool,
    },
    /// Nobody waits for this call any more. It is answered all the same: `EINTR` where it had no effect.
    Cancel(CallId),
    /// The client holds nothing any more of what this recall named.
    Acknowledge(RecallId),
    Return(Vec<GrantId>),
    /// The client has claimed what it wants to have again of a forgotten session.
    Reclaimed,
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
    Greeted,
    Attached,
    Ended,
}

/// The server's end of one session.
///
/// **Contract.** After each input drain `poll_event`. What [`ServerConnection::handle_some`] leaves of the bytes is
/// the next input: so no more of what a peer packed is in memory than a frame and a MiB. Whenever something
/// was put out (by an input, or by `accept`, `refuse`, `respond`, `transmit_encoded`, `recall`, `end`) drain
/// `poll_transmit`, whose frames go out in that order. After an error or [`ServerEvent::Bye`], transmit what is left
/// and close the connection; answers that still come are dropped here.
///
/// **Connections.** When the connection has ended say [`ServerConnection::cut`]. What counts is kept until
/// the client has said that it has it, and goes out on the connection with which the session is resumed;
/// meanwhile it piles up, and whoever keeps the session bounds that by [`ServerConnection::kept_bytes`].
///
/// **Muted** (a session that owes acknowledgements for too long), nothing that arrives is answered: pings
/// and calls are kept until it may be heard again, and renew nothing. What arrived before is answered still,
/// and acknowledgements, returns and farewells are taken as ever.
///
/// A client owes nothing for another: what is enforced is that hello comes first and once, sizes,
/// that call ids are not in use twice, the number and the bytes of outstanding calls, operation names on mutations
/// and on nothing else, and acknowledgements of recalls that were sent.
#[derive(Clone, Debug)]
pub struct ServerConnection {
    config: ServerConfig,
    state: State,
    /// What was agreed.
    version: u16,
    features: u64,
    frames: FrameReader,
    events: VecDeque<ServerEvent>,
    /// What does not count, before what does.
    transmit: VecDeque<FrameBytes>,
    /// There is a connection.
    linked: bool,
    outgoing: Outgoing,
    incoming: Incoming,
    outstanding: BTreeMap<CallId, Outstanding>,
    load: Load,
    /// What `outstanding` takes here beyond that.
    beyond: u64,
    /// Calls that wait for a lock: they do not count among the others.
    lock_waits: BTreeMap<CallId, Outstanding>,
    lock_load: Load,
    recalls: BTreeSet<RecallId>,
    heard: Time,
    pings: u64,
    muted: bool,
    /// What arrived while muted: calls and their cancellations in order, and the latest ping.
    kept: VecDeque<ServerEvent>,
    /// Those calls in it that are to be answered.
    kept_calls: BTreeSet<CallId>,
    /// Of what is in it and is not answered.
    kept_load: Load,
    kept_ping: Option<u64>,
}

/// A call that is not answered.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    bytes: u64,
    /// Bytes that it takes here beyond those that arrived.
    beyond: u64,
    /// Of its operation's name.
    sequence: Option<u64>,
    /// Nobody waits for it any more, which was passed on.
    cancelled: bool,
}

impl ServerConnection {
    #[must_use]
    pub fn new(now: Time, config: ServerConfig) -> ServerConnection {
        ServerConnection {
            config,
            state: State::Listening,
            version: 0,
            features: 0,
            frames: FrameReader::new(STRANGER_BODY),
            events: VecDeque::new(),
            transmit: VecDeque::new(),
            linked: true,
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
            outstanding: BTreeMap::new(),
            load: Load::default(),
            beyond: 0,
            lock_waits: BTreeMap::new(),
            lock_load: Load::default(),
            recalls: BTreeSet::new(),
            heard: now,
            pings: 0,
            muted: false,
            kept: VecDeque::new(),
            kept_calls: BTreeSet::new(),
            kept_load: Load::default(),
            kept_ping: None,
        }
    }

    /// This session, as the server numbers it.
    #[must_use]
    pub fn session_id(&self) -> u64 {
        self.config.session_id
    }

    /// Bytes arrived: all of them are taken in.
    ///
    /// # Errors
    /// The rule that the client broke; a farewell that says so is left to transmit.
    pub fn handle_input(&mut self, now: Time, bytes: &[u8]) -> Result<(), ProtocolError> {
        let mut rest = bytes;
        loop {
            self.handle_some(now, &mut rest)?;
            if rest.is_empty() || self.state == State::Ended {
                return Ok(());
            }
        }
    }

    /// The same of as much as is done at a time; takes off `bytes` what that is.
    ///
    /// # Errors
    /// As for [`ServerConnection::handle_input`].
    pub fn handle_some(&mut self, now: Time, bytes: &mut &[u8]) -> Result<(), ProtocolError> {
        if self.state == State::Ended {
            return Err(ProtocolError::Ended);
        }
        if !self.muted {
            self.heard = self.heard.max(now);
        }
        let taken = self.take_frames(bytes);
        if let Err(error) = taken {
            self.finish(&Message::Bye(format!("protocol error: {error}")));
        }
        taken
    }

    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        self.events.pop_front()
    }

    /// Frames for the transport, in this order.
    pub fn poll_transmit(&mut self) -> Option<FrameBytes> {
        if !self.linked {
            return None;
        }
        let plain = self.transmit.pop_front();
        plain.or_else(|| if self.state == State::Attached { self.outgoing.poll() } else { None })
    }

    /// Bytes that are kept until the client has said that it has them.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.outgoing.bytes()
    }

    /// Of these, what was not put out, for want of a connection or of room.
    #[must_use]
    pub fn waiting_bytes(&self) -> u64 {
        if self.linked { self.outgoing.waiting_bytes() } else { self.outgoing.bytes() }
    }

    /// Bytes kept for this session altogether: those that are not confirmed, requests that are not answered, and what arrived of a frame.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        let asked = self.load.bytes() + self.beyond + self.lock_load.bytes() + self.kept_load.bytes();
        self.outgoing.bytes() + asked + self.frames.partial_bytes()
    }

    /// Answers to named operations that the client is not known to have, by the sequence of the name.
    #[must_use]
    pub fn unheard_answers(&self) -> Vec<(u64, Response)> {
        let answer = |(sequence, bytes): (u64, &FrameBytes)| {
            let mut reader = FrameReader::new(MAX_BODY);
            let frame = reader.next(&mut &bytes[..]).ok()??;
            match Message::decode(&frame) {
                Ok(Message::Response(_, response)) => Some((sequence, response)),
                _ => None,
            }
        };
        self.outgoing.answers().filter_map(answer).collect()
    }

    /// The connection has ended. What it brought of a frame is forgotten; the client sends that again.
    pub fn cut(&mut self) {
        if self.state == State::Attached {
            self.linked = false;
            self.frames = FrameReader::new(STRANGER_BODY);
            self.transmit.clear();
            self.kept_ping = None;
        }
    }

    /// The session goes on over another connection, on which its client said that it has `received` frames.
    /// `lapsed`: its lease had run out. Not once it has ended.
    ///
    /// # Errors
    /// So many cannot have arrived; a farewell that says so is left to transmit.
    pub fn resume(
        &mut self,
        now: Time,
        received: u64,
        lapsed: bool,
        session: Session,
    ) -> Result<(), ProtocolError> {
        if self.state != State::Attached {
            return Err(ProtocolError::Ended);
        }
        self.transmit.clear();
        self.kept_ping = None;
        self.linked = true;
        self.frames = FrameReader::new(MAX_BODY);
        self.frames.allow_packed(self.packs());
        if let Err(error) = self.outgoing.resume(received) {
            self.finish(&Message::Bye(format!("protocol error: {error}")));
            return Err(error);
        }
        if !self.muted {
            self.heard = self.heard.max(now);
        }
        let resumed = Resumed { received: self.incoming.say(), lapsed };
        self.welcome(session, Some(resumed));
        Ok(())
    }

    /// Whether frames may have packed bodies ([`crate::pack`]): agreed with the hello of the session.
    #[must_use]
    pub fn packs(&self) -> bool {
        self.features & COMPRESSED != 0
    }

    fn welcome(&mut self, session: Session, resumed: Option<Resumed>) {
        let ServerConfig { session_id, session_term, limits } = self.config;
        let (version, features) = (self.version, self.features);
        let welcome = Welcome { version, features, session_id, session_term, limits, session, resumed };
        self.say(&Message::Welcome(welcome));
    }

    /// Says something that does not count.
    fn say(&mut self, message: &Message) {
        self.transmit.push_back(Arc::new(message.encode()));
    }

    /// Whether what arrives from now on is kept unanswered. Ending it answers what was kept: the caller
    /// counts the client as heard at that moment.
    pub fn mute(&mut self, muted: bool) {
        self.muted = muted;
        if muted || self.state == State::Ended {
            return;
        }
        if let Some(number) = self.kept_ping.take() {
            self.say_pong(number);
        }
        self.events.append(&mut self.kept);
        self.kept_calls.clear();
        self.kept_load = Load::default();
    }

    /// The session stands.
    ///
    /// # Panics
    /// Unless [`ServerEvent::Attach`] is the latest thing that happened to this session.
    pub fn accept(&mut self, session: Session) {
        if self.state == State::Ended {
            return;
        }
        assert_eq!(self.state, State::Greeted, "a session is accepted once, after its hello");
        self.state = State::Attached;
        self.frames.allow(MAX_BODY);
        self.frames.allow_packed(self.packs());
        self.welcome(session, None);
    }

    /// The client is not wanted; `message` tells people what happened and how to mend it.
    pub fn refuse(&mut self, errno: Errno, message: &str) {
        if self.state == State::Greeted {
            self.finish(&Message::Refused(Refused { errno, message: message.to_owned() }));
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
        let mut answers = None;
        if last {
            if let Some(Outstanding { bytes, beyond, sequence, .. }) = self.outstanding.remove(&call) {
                self.load.remove(bytes);
                self.beyond -= beyond;
                answers = sequence;
            }
            self.lock_waits.remove(&call).into_iter().for_each(|call| self.lock_load.remove(call.bytes));
        }
        self.outgoing.push_answer(Arc::new(bytes), answers);
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
        self.outgoing.push(Arc::new(Message::Recall(recall).encode()));
    }

    /// Says that facts are about to change, to a client that takes pushes; [`ServerEvent::Acknowledge`] answers.
    ///
    /// # Panics
    /// If a recall or hold of this id is outstanding.
    pub fn hold(&mut self, hold: Hold) {
        if self.state != State::Attached {
            return;
        }
        assert!(self.recalls.insert(hold.id), "recall {} is outstanding already", hold.id.0);
        self.outgoing.push(Arc::new(Message::Hold(hold).encode()));
    }

    /// Ends a hold that was said, acknowledged or not.
    pub fn commit(&mut self, commit: Commit) {
        if self.state == State::Attached {
            self.outgoing.push(Arc::new(Message::Commit(commit).encode()));
        }
    }

    /// Asks the client for a sign of life; its answer, like any input, counts as renewal.
    pub fn probe(&mut self) {
        if self.state == State::Attached {
            self.pings += 1;
            let count = self.incoming.say();
            self.say(&Message::Ping(self.pings, count));
        }
    }

    /// Ends the session from this side.
    pub fn end(&mut self, why: &str) {
        if self.state != State::Ended {
            self.finish(&Message::Bye(why.to_owned()));
        }
    }

    /// The session ends without a word: its client comes again and learns that it is forgotten.
    pub fn abandon(&mut self) {
        self.close();
        self.outgoing = Outgoing::default();
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

    /// Whether these bytes, if they are the next input, ask for nothing and let nothing go on that was asked for
    /// before: they are signs of life and acknowledgements, whole.
    #[must_use]
    pub fn asks_nothing(&self, bytes: &[u8]) -> bool {
        let plain = self.state == State::Attached && !self.muted && self.kept.is_empty();
        // A confirmation lets go what waits for room.
        let waits = self.outgoing.waiting_bytes() > 0;
        plain && !waits && self.frames.partial_bytes() == 0 && frame::ask_nothing(bytes)
    }

    /// Calls that are not answered yet, without those that wait for a lock.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        self.load.calls()
    }

    /// Whether a call is to be answered still.
    #[must_use]
    pub fn is_outstanding(&self, call: CallId) -> bool {
        self.outstanding.contains_key(&call) || self.is_lock_wait(call)
    }

    /// Whether it is one that may wait for a lock.
    #[must_use]
    pub fn is_lock_wait(&self, call: CallId) -> bool {
        self.lock_waits.contains_key(&call)
    }

    /// After what the client can still take, the last word.
    fn finish(&mut self, last: &Message) {
        while self.linked
            && let Some(frame) = self.outgoing.poll()
        {
            self.transmit.push_back(frame);
        }
        self.say(last);
        self.close();
    }

    fn close(&mut self) {
        self.state = State::Ended;
        self.outstanding.clear();
        self.lock_waits.clear();
        (self.load, self.lock_load, self.beyond) = (Load::default(), Load::default(), 0);
        self.recalls.clear();
        self.kept.clear();
        self.kept_calls.clear();
        self.kept_load = Load::default();
        self.frames = FrameReader::new(STRANGER_BODY);
    }
}
