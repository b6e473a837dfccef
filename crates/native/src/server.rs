//! The server's end of a session.

mod input;

use crate::ProtocolError;
use crate::flow_limit::OutstandingLoad;
use crate::frame::{self, FrameBytes, FrameReader, MAX_BODY};
use crate::handshake::{COMPRESSED, Limits, Refused, Resume, Resumed, SESSION_TERM, Welcome};
use crate::message::{Message, encode_response};
use crate::retransmit::{Incoming, Outgoing};
use nigh_remote::SessionParams;
use nigh_types::{
    CallId, Errno, GrantId, Recall, RecallId, Request, Response, Span, Term, Time, UpdateCommit,
    UpdatePrepare,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// The most bytes of a body from a peer that has not sent hello.
const MAX_BODY_BEFORE_HELLO: u32 = 16 << 10;

/// A server's settings for one session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerConfig {
    /// The server's number for this session.
    pub session_id: u64,
    /// How long the session lasts without renewal; `Span::FOREVER`: until the connection ends.
    pub session_term: Span,
    pub limits: Limits,
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig { session_id: 1, session_term: SESSION_TERM, limits: Limits::default() }
    }
}

/// A client's message, for the server's driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServerEvent {
    /// The first event; answered with [`ServerSession::accept`] or [`ServerSession::refuse`], or by resuming the
    /// session that it names over this connection ([`ServerSession::resume`]).
    Attach {
        client: u64,
        incarnation: u64,
        export: Vec<u8>,
        term: Term,
        version: u16,
        /// The wanted features that this build knows ([`crate::EXCLUSIVE_DIR_LEASES`], [`crate::ID_NAMES`]).
        features: u64,
        /// As in [`crate::Hello`].
        moment: u64,
        resume: Option<Resume>,
    },
    /// Answered with [`ServerSession::respond`], if the call has a reply ([`nigh_types::Call::has_reply`]).
    Request {
        call: CallId,
        request: Request,
        /// It was sent before, in a session that the server has forgotten.
        resent: bool,
    },
    /// The caller has given up this call. It gets a reply all the same: `EINTR` if it had no effect.
    Cancel(CallId),
    /// The client has dropped every fact that this recall or prepare named.
    Acknowledge(RecallId),
    Return(Vec<GrantId>),
    /// The client's reclaim of a forgotten session has ended.
    Reclaimed,
    /// The session is over; the connection is closed after the remaining frames are transmitted.
    Bye {
        why: String,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// No message came yet.
    Listening,
    /// Hello came; it is neither accepted nor refused.
    Greeted,
    Attached,
    Ended,
}

/// The server's end of one session.
///
/// **Contract.** After each input drain `poll_event`. The bytes that [`ServerSession::handle_some`] leaves are the
/// next input: so no more of a peer's compressed data is in memory than a frame and a MiB. After each output (from an
/// input, or from `accept`, `refuse`, `respond`, `transmit_encoded`, `recall`, `end`) drain `poll_transmit`, and send
/// its frames in that order. After an error or [`ServerEvent::Bye`], transmit the remaining frames and close the
/// connection; later replies are dropped here.
///
/// **Connections.** When the connection has ended, call [`ServerSession::handle_disconnect`]. Counted frames are kept
/// until the client has confirmed them, and are sent on the connection with which the session is resumed. Meanwhile
/// they accumulate, and the owner of the session bounds them by [`ServerSession::kept_bytes`].
///
/// **Muted** (a session that has owed acknowledgements for too long): pings and calls that arrive are kept without a
/// reply until the session is unmuted, and renew nothing. Earlier calls still get replies, and acknowledgements,
/// returns and farewells are handled as ever.
///
/// Rules enforced on the client: hello comes first and once; sizes; call ids are not in use twice; the number and the
/// bytes of outstanding calls; operation names on mutations and on no other call; acknowledgements only of recalls that
/// were sent.
#[derive(Clone, Debug)]
pub struct ServerSession {
    config: ServerConfig,
    state: State,
    /// The agreed version and features.
    version: u16,
    features: u64,
    frames: FrameReader,
    events: VecDeque<ServerEvent>,
    /// Uncounted frames, which go before counted ones.
    transmit: VecDeque<FrameBytes>,
    /// There is a connection.
    connected: bool,
    outgoing: Outgoing,
    incoming: Incoming,
    outstanding: BTreeMap<CallId, OutstandingCall>,
    load: OutstandingLoad,
    /// Memory of `outstanding` beyond the bytes in `load`.
    beyond: u64,
    /// Calls that wait for a lock: they do not count among the others.
    lock_waits: BTreeMap<CallId, OutstandingCall>,
    lock_load: OutstandingLoad,
    recalls: BTreeSet<RecallId>,
    last_renewed: Time,
    pings: u64,
    muted: bool,
    /// Events that arrived while muted: calls and their cancellations in order. The latest ping is in `kept_ping`.
    kept: VecDeque<ServerEvent>,
    /// The calls in `kept` that have a reply.
    kept_calls: BTreeSet<CallId>,
    /// Load of the calls in `kept` that have no reply.
    kept_load: OutstandingLoad,
    kept_ping: Option<u64>,
}

/// An outstanding call.
#[derive(Clone, Copy, Debug)]
struct OutstandingCall {
    bytes: u64,
    /// Its memory beyond the bytes that arrived.
    beyond: u64,
    /// Sequence of its operation's name.
    sequence: Option<u64>,
    /// The caller has given it up, and the cancellation was passed on.
    cancelled: bool,
}

impl ServerSession {
    #[must_use]
    pub fn new(now: Time, config: ServerConfig) -> ServerSession {
        ServerSession {
            config,
            state: State::Listening,
            version: 0,
            features: 0,
            frames: FrameReader::new(MAX_BODY_BEFORE_HELLO),
            events: VecDeque::new(),
            transmit: VecDeque::new(),
            connected: true,
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
            outstanding: BTreeMap::new(),
            load: OutstandingLoad::default(),
            beyond: 0,
            lock_waits: BTreeMap::new(),
            lock_load: OutstandingLoad::default(),
            recalls: BTreeSet::new(),
            last_renewed: now,
            pings: 0,
            muted: false,
            kept: VecDeque::new(),
            kept_calls: BTreeSet::new(),
            kept_load: OutstandingLoad::default(),
            kept_ping: None,
        }
    }

    /// The server's number for this session.
    #[must_use]
    pub fn session_id(&self) -> u64 {
        self.config.session_id
    }

    /// Takes in all bytes that arrived.
    ///
    /// # Errors
    /// The rule that the client broke; a farewell with that error is left to transmit.
    pub fn handle_input(&mut self, now: Time, bytes: &[u8]) -> Result<(), ProtocolError> {
        let mut rest = bytes;
        loop {
            self.handle_some(now, &mut rest)?;
            if rest.is_empty() || self.state == State::Ended {
                return Ok(());
            }
        }
    }

    /// Takes in bytes as [`ServerSession::handle_input`], up to one round; removes them from `bytes`.
    ///
    /// # Errors
    /// As for [`ServerSession::handle_input`].
    pub fn handle_some(&mut self, now: Time, bytes: &mut &[u8]) -> Result<(), ProtocolError> {
        if self.state == State::Ended {
            return Err(ProtocolError::Ended);
        }
        if !self.muted {
            self.last_renewed = self.last_renewed.max(now);
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

    /// Returns the next frame for the transport, in this order.
    pub fn poll_transmit(&mut self) -> Option<FrameBytes> {
        if !self.connected {
            return None;
        }
        let plain = self.transmit.pop_front();
        plain.or_else(|| if self.state == State::Attached { self.outgoing.poll() } else { None })
    }

    /// Bytes that are kept until the client has confirmed them.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.outgoing.bytes()
    }

    /// The part of these that was not sent, for want of a connection or of window.
    #[must_use]
    pub fn waiting_bytes(&self) -> u64 {
        if self.connected { self.outgoing.waiting_bytes() } else { self.outgoing.bytes() }
    }

    /// Bytes kept for this session altogether: unconfirmed frames, unanswered requests, and the part of a frame that
    /// arrived.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        let asked = self.load.bytes() + self.beyond + self.lock_load.bytes() + self.kept_load.bytes();
        self.outgoing.bytes() + asked + self.frames.partial_bytes()
    }

    /// Replies to named operations that the client is not known to have received, by the sequence of the name.
    #[must_use]
    pub fn unconfirmed_replies(&self) -> Vec<(u64, Response)> {
        let answer = |(sequence, bytes): (u64, &FrameBytes)| {
            let mut reader = FrameReader::new(MAX_BODY);
            let frame = reader.next(&mut &bytes[..]).ok()??;
            match Message::decode(&frame) {
                Ok(Message::Response(_, response)) => Some((sequence, response)),
                _ => None,
            }
        };
        self.outgoing.unconfirmed_replies().filter_map(answer).collect()
    }

    /// Notes that the connection has ended. A partly received frame is dropped; the client sends it again.
    pub fn handle_disconnect(&mut self) {
        if self.state == State::Attached {
            self.connected = false;
            self.frames = FrameReader::new(MAX_BODY_BEFORE_HELLO);
            self.transmit.clear();
            self.kept_ping = None;
        }
    }

    /// Resumes the session over another connection, on which its client confirmed `received` frames. `lapsed`: its
    /// lease had run out. Fails once the session has ended.
    ///
    /// # Errors
    /// The count is impossible; a farewell with that error is left to transmit.
    pub fn resume(
        &mut self,
        now: Time,
        received: u64,
        lapsed: bool,
        session: SessionParams,
    ) -> Result<(), ProtocolError> {
        if self.state != State::Attached {
            return Err(ProtocolError::Ended);
        }
        self.transmit.clear();
        self.kept_ping = None;
        self.connected = true;
        self.frames = FrameReader::new(MAX_BODY);
        self.frames.allow_compressed(self.compresses());
        if let Err(error) = self.outgoing.resume(received) {
            self.finish(&Message::Bye(format!("protocol error: {error}")));
            return Err(error);
        }
        if !self.muted {
            self.last_renewed = self.last_renewed.max(now);
        }
        let resumed = Resumed { received: self.incoming.take_count(), lapsed };
        self.welcome(session, Some(resumed));
        Ok(())
    }

    /// Whether frames may have compressed bodies ([`crate::compress`]): agreed with the hello of the session.
    #[must_use]
    pub fn compresses(&self) -> bool {
        self.features & COMPRESSED != 0
    }

    fn welcome(&mut self, session: SessionParams, resumed: Option<Resumed>) {
        let ServerConfig { session_id, session_term, limits } = self.config;
        let (version, features) = (self.version, self.features);
        let welcome = Welcome { version, features, session_id, session_term, limits, session, resumed };
        self.say(&Message::Welcome(welcome));
    }

    /// Sends an uncounted message.
    fn say(&mut self, message: &Message) {
        self.transmit.push_back(Arc::new(message.encode()));
    }

    /// Sets whether messages that arrive from now on are kept without a reply. Unmuting handles the kept ones: the
    /// caller renews the client's lease at that moment.
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
        self.kept_load = OutstandingLoad::default();
    }

    /// Accepts the session.
    ///
    /// # Panics
    /// Unless [`ServerEvent::Attach`] is the latest thing that happened to this session.
    pub fn accept(&mut self, session: SessionParams) {
        if self.state == State::Ended {
            return;
        }
        assert_eq!(self.state, State::Greeted, "a session is accepted once, after its hello");
        self.state = State::Attached;
        self.frames.allow(MAX_BODY);
        self.frames.allow_compressed(self.compresses());
        self.welcome(session, None);
    }

    /// Refuses the client; `message` tells people what happened and how to mend it.
    pub fn refuse(&mut self, errno: Errno, message: &str) {
        if self.state == State::Greeted {
            self.finish(&Message::Refused(Refused { errno, message: message.to_owned() }));
        }
    }

    /// Sends a reply to a call.
    ///
    /// # Panics
    /// If the call is not outstanding, or the frame would be longer than [`crate::MAX_BODY`].
    pub fn respond(&mut self, call: CallId, response: &Response) {
        let bytes = encode_response(call, response);
        self.transmit_encoded(call, response.last, bytes);
    }

    /// Sends a reply that [`encode_response`] encoded, perhaps on another thread.
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
            if let Some(OutstandingCall { bytes, beyond, sequence, .. }) = self.outstanding.remove(&call) {
                self.load.remove(bytes);
                self.beyond -= beyond;
                answers = sequence;
            }
            self.lock_waits.remove(&call).into_iter().for_each(|call| self.lock_load.remove(call.bytes));
        }
        self.outgoing.push_reply(Arc::new(bytes), answers);
    }

    /// Recalls facts; [`ServerEvent::Acknowledge`] answers.
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

    /// Sends an update prepare to a client that takes updates; [`ServerEvent::Acknowledge`] answers.
    ///
    /// # Panics
    /// If a recall or prepare of this id is outstanding.
    pub fn prepare(&mut self, hold: UpdatePrepare) {
        if self.state != State::Attached {
            return;
        }
        assert!(self.recalls.insert(hold.id), "recall {} is outstanding already", hold.id.0);
        self.outgoing.push(Arc::new(Message::Hold(hold).encode()));
    }

    /// Sends the commit of a prepare, acknowledged or not.
    pub fn commit(&mut self, commit: UpdateCommit) {
        if self.state == State::Attached {
            self.outgoing.push(Arc::new(Message::Commit(commit).encode()));
        }
    }

    /// Pings the client; its pong, like any input, counts as renewal.
    pub fn probe(&mut self) {
        if self.state == State::Attached {
            self.pings += 1;
            let count = self.incoming.take_count();
            self.say(&Message::Ping(self.pings, count));
        }
    }

    /// Ends the session from this side.
    pub fn end(&mut self, why: &str) {
        if self.state != State::Ended {
            self.finish(&Message::Bye(why.to_owned()));
        }
    }

    /// Ends the session without a message: its client reconnects and learns that the session is forgotten.
    pub fn abandon(&mut self) {
        self.close();
        self.outgoing = Outgoing::default();
    }

    /// When the session lapses unless another message arrives: 1.1 terms after the latest one.
    #[must_use]
    pub fn lapses(&self) -> Time {
        let Span(term) = self.config.session_term;
        self.last_renewed.after(Span(term.saturating_add(term / 10)))
    }

    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.state == State::Ended
    }

    /// Whether these bytes, as the next input, ask for nothing and unblock no earlier request: they are whole pings,
    /// pongs and acknowledgements.
    #[must_use]
    pub fn asks_nothing(&self, bytes: &[u8]) -> bool {
        let plain = self.state == State::Attached && !self.muted && self.kept.is_empty();
        // A confirmation opens the window for waiting frames.
        let waits = self.outgoing.waiting_bytes() > 0;
        plain && !waits && self.frames.partial_bytes() == 0 && frame::ask_nothing(bytes)
    }

    /// The number of unanswered calls, without those that wait for a lock.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        self.load.calls()
    }

    /// Whether a call still needs a reply.
    #[must_use]
    pub fn is_outstanding(&self, call: CallId) -> bool {
        self.outstanding.contains_key(&call) || self.is_lock_wait(call)
    }

    /// Whether a call may wait for a lock.
    #[must_use]
    pub fn is_lock_wait(&self, call: CallId) -> bool {
        self.lock_waits.contains_key(&call)
    }

    /// Transmits what fits in the client's window, then the last message.
    fn finish(&mut self, last: &Message) {
        while self.connected
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
        (self.load, self.lock_load, self.beyond) =
            (OutstandingLoad::default(), OutstandingLoad::default(), 0);
        self.recalls.clear();
        self.kept.clear();
        self.kept_calls.clear();
        self.kept_load = OutstandingLoad::default();
        self.frames = FrameReader::new(MAX_BODY_BEFORE_HELLO);
    }
}
