//! The client's end of a session.

use crate::ProtocolError;
use crate::call::{check, payload_bytes};
use crate::expect::Expected;
use crate::frame::{FrameReader, MAX_BODY};
use crate::handshake::{Hello, Limits, MAX_VERSION, MIN_VERSION, Refused, Welcome};
use crate::locks::MAX_LOCK_WAITS;
use crate::message::{Message, encode_request};
use nigh_remote::{Event, Output, Reason, Remote};
use nigh_types::{Call, CallId, CookieKey, Errno, GrantId, RecallId, Request, Response, Span, Term, Time};
use std::collections::{BTreeMap, VecDeque};

/// How long a client waits for the server's first message.
const GREETING: Span = Span::from_secs(30);
/// Grants given back in one message.
const RETURNED_AT_ONCE: usize = 65_536;

/// Who asks, and for what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientConfig {
    /// The client's durable identity.
    pub client: u64,
    /// Random, new with each start of the client.
    pub incarnation: u64,
    /// Path or name of the export.
    pub attach: Vec<u8>,
    /// How long grants should live at the most.
    pub term: Term,
    /// Optional parts of the protocol that are wanted ([`crate::ID_NAMES`]).
    pub features: u64,
}

/// What a session has sent and received; only grows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Calls sent that expect an answer. Not counted: the handshake, renewals, acknowledgements,
    /// returned grants, cancellations, releases.
    pub requests: u64,
    pub renewals: u64,
    /// Calls sent by [`Call::type_name`]; releases too, so this may sum to more than `requests`.
    pub by_type: BTreeMap<&'static str, u64>,
    /// Of the whole stream, headers and handshake included.
    pub bytes_sent: u64,
    pub bytes_received: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Greeting,
    Attached,
    Lost,
}

/// The client's end of one session, as the contract on [`Remote`] says.
///
/// - Calls made before the server's consent, and those above the server's limit of outstanding
///   calls, wait here in their order.
/// - A call that no frame can hold, that passes [`Limits::max_data`], or whose xattr name, xattr value
///   or symlink target no Linux filesystem takes, is answered with `EINVAL`
///   without being sent; one cancelled while it waits here, with `EINTR`. Calls that wait for a lock do
///   not count among those outstanding; one more than [`MAX_LOCK_WAITS`] is answered with `ENOLCK`.
/// - The session is renewed when nothing that was sent for a third of its term is known to have
///   arrived. It counts as lost 0.9 of its term after the *sending* of the latest message that the
///   server answered (decision 4 of the design).
/// - After [`Event::Lost`] nothing more is put out, and inputs do nothing.
pub struct ClientSession {
    state: State,
    frames: FrameReader,
    outputs: VecDeque<Output>,
    outstanding: BTreeMap<CallId, Expected>,
    /// Of these, the ones that wait for a lock.
    lock_waits: u32,
    waiting: VecDeque<(CallId, Request)>,
    limits: Limits,
    cookie_key: CookieKey,
    session_term: Span,
    session_id: u64,
    /// When the latest message was sent of which the server showed that it had it.
    confirmed: Time,
    /// Number and sending time of the latest ping.
    ping: (u64, Time),
    refused: Option<Refused>,
    counters: Counters,
}

impl ClientSession {
    /// A session that says hello at once.
    #[must_use]
    pub fn new(now: Time, config: ClientConfig) -> ClientSession {
        let mut session = ClientSession {
            state: State::Greeting,
            frames: FrameReader::new(MAX_BODY),
            outputs: VecDeque::new(),
            outstanding: BTreeMap::new(),
            lock_waits: 0,
            waiting: VecDeque::new(),
            limits: Limits::default(),
            cookie_key: CookieKey::default(),
            session_term: Span::FOREVER,
            session_id: 0,
            confirmed: now,
            ping: (0, now),
            refused: None,
            counters: Counters::default(),
        };
        session.send(&Message::Hello(Hello {
            min_version: MIN_VERSION,
            max_version: MAX_VERSION,
            features: config.features,
            client: config.client,
            incarnation: config.incarnation,
            attach: config.attach,
            term: config.term,
        }));
        session
    }

    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What the server takes; the defaults until it has said so.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// This session, as the server numbers it; 0 until it said so.
    #[must_use]
    pub fn session_id(&self) -> u64 {
        self.session_id
    }

    /// Why the server did not want this client, where that is how the session was lost.
    #[must_use]
    pub fn refused(&self) -> Option<&Refused> {
        self.refused.as_ref()
    }

    /// Ends the session from this side, in order: what is still in `poll_output` goes first.
    pub fn handle_close(&mut self, why: &str) {
        if self.state != State::Lost {
            self.send(&Message::Bye(why.to_owned()));
            self.lose(format!("closed: {why}"));
        }
    }

    fn send(&mut self, message: &Message) {
        self.transmit(message.encode());
    }

    fn transmit(&mut self, bytes: Vec<u8>) {
        self.counters.bytes_sent += bytes.len() as u64;
        self.outputs.push_back(Output::Transmit(bytes));
    }

    fn event(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }

    fn lose(&mut self, why: String) {
        self.event(Event::Lost { why });
        self.state = State::Lost;
        self.outstanding.clear();
        self.lock_waits = 0;
        self.waiting.clear();
    }

    fn break_off(&mut self, error: ProtocolError) {
        self.send(&Message::Bye(format!("protocol error: {error}")));
        self.lose(format!("protocol error of the server: {error}"));
    }

    fn answer(&mut self, call: CallId, errno: Errno) {
        self.event(Event::Response { call, response: Response::plain(Err(errno)) });
    }

    fn send_waiting(&mut self, now: Time) {
        while self.state == State::Attached
            && (self.outstanding.len() as u64) - u64::from(self.lock_waits) < u64::from(self.limits.max_calls)
        {
            let Some((call, request)) = self.waiting.pop_front() else { return };
            self.send_call(now, call, &request);
        }
    }

    fn send_call(&mut self, now: Time, call: CallId, request: &Request) {
        let named = request.name.is_some();
        assert_eq!(named, request.call.is_mutation(), "mutations are named, and nothing else");
        let expects_answer = request.call.is_answered();
        if !self.fits(&request.call) {
            if expects_answer {
                self.answer(call, Errno::INVAL);
            }
            return;
        }
        if request.call.waits_for_lock() {
            if self.lock_waits >= MAX_LOCK_WAITS {
                return self.answer(call, Errno::NOLCK);
            }
            self.lock_waits += 1;
        }
        *self.counters.by_type.entry(request.call.type_name()).or_default() += 1;
        if expects_answer {
            self.counters.requests += 1;
            let earlier = self.outstanding.insert(call, Expected::of(&request.call, now));
            assert!(earlier.is_none(), "call ids are never reused within a session");
        }
        self.transmit(encode_request(call, request));
    }

    fn fits(&self, call: &Call) -> bool {
        // Fixed fields, names, and a caller in as many groups as Linux allows.
        const OTHER_BYTES: usize = (256 << 10) + 4096;
        let data = match call {
            Call::Read { length, .. } => u64::from(*length),
            Call::Write { data, .. } => data.len() as u64,
            _ => 0,
        };
        let bytes = payload_bytes(call) + OTHER_BYTES;
        data <= u64::from(self.limits.max_data) && bytes <= MAX_BODY as usize && check(call).is_ok()
    }

    fn take_frames(&mut self, now: Time, bytes: &[u8]) -> Result<(), ProtocolError> {
        let mut frames = std::mem::replace(&mut self.frames, FrameReader::new(MAX_BODY));
        let mut input = bytes;
        while let Some(frame) = frames.next(&mut input)? {
            self.take_message(now, frame.frame_type as u8, Message::decode(&frame)?)?;
            if self.state == State::Lost {
                break;
            }
        }
        self.frames = frames;
        Ok(())
    }

    fn take_message(&mut self, now: Time, number: u8, message: Message) -> Result<(), ProtocolError> {
        match (self.state, message) {
            (State::Greeting, Message::Welcome(welcome)) => self.take_welcome(now, welcome),
            (State::Greeting, Message::Refused(refused)) => {
                self.lose(refused.message.clone());
                self.refused = Some(refused);
                Ok(())
            }
            (_, Message::Bye(why)) => {
                self.lose(format!("the server ended the session: {why}"));
                Ok(())
            }
            (State::Attached, Message::Response(call, response)) => self.take_response(now, call, response),
            (State::Attached, Message::Recall(recall)) => {
                self.event(Event::Recall(recall));
                Ok(())
            }
            (State::Attached, Message::Pong(pong)) => {
                let (number, sent) = self.ping;
                if pong == number {
                    self.confirmed = self.confirmed.max(sent);
                }
                Ok(())
            }
            (State::Attached, Message::Ping(number)) => {
                self.send(&Message::Pong(number));
                Ok(())
            }
            _ => Err(ProtocolError::Unexpected(number)),
        }
    }

    fn take_welcome(&mut self, now: Time, welcome: Welcome) -> Result<(), ProtocolError> {
        if !(MIN_VERSION..=MAX_VERSION).contains(&welcome.version) {
            return Err(ProtocolError::Version(welcome.version));
        }
        self.limits = welcome.limits;
        self.limits.max_data = self.limits.max_data.min(Limits::default().max_data);
        self.cookie_key = welcome.session.cookie_key;
        self.session_term = welcome.session_term;
        self.session_id = welcome.session_id;
        self.state = State::Attached;
        self.event(Event::Attached(welcome.session));
        self.send_waiting(now);
        Ok(())
    }

    fn take_response(&mut self, now: Time, call: CallId, response: Response) -> Result<(), ProtocolError> {
        let expected = self.outstanding.get_mut(&call).ok_or(ProtocolError::UnknownCall(call))?;
        expected.check(call, &response, self.cookie_key)?;
        self.confirmed = self.confirmed.max(expected.sent);
        if response.last {
            self.lock_waits -= u32::from(expected.lock_wait);
            self.outstanding.remove(&call);
        }
        self.event(Event::Response { call, response });
        self.send_waiting(now);
        Ok(())
    }

    /// The next moment at which something is due.
    fn due(&self) -> (Time, Reason) {
        match self.state {
            State::Lost => (Time::FAR, Reason::Idle),
            State::Greeting => (self.confirmed.after(GREETING), Reason::SessionEnd),
            State::Attached => {
                let end = (self.confirmed.after(self.lapse()), Reason::SessionEnd);
                let renewal = self.confirmed.max(self.ping.1).after(Span(self.session_term.0 / 3));
                match self.session_term {
                    Span::FOREVER => (Time::FAR, Reason::Idle),
                    _ if renewal < end.0 => (renewal, Reason::Renewal),
                    _ => end,
                }
            }
        }
    }

    /// 0.9 of the session's term.
    fn lapse(&self) -> Span {
        Span(self.session_term.0 / 10 * 9)
    }
}

impl Remote for ClientSession {
    fn handle_call(&mut self, now: Time, id: CallId, request: Request) {
        if self.state == State::Attached && matches!(request.call, Call::Keep { .. }) {
            // Before the acknowledgement that follows, which does not wait in this line either.
            self.send_call(now, id, &request);
        } else if self.state != State::Lost {
            self.waiting.push_back((id, request));
            self.send_waiting(now);
        }
    }

    fn handle_cancel(&mut self, _now: Time, id: CallId) {
        if let Some(at) = self.waiting.iter().position(|(call, _)| *call == id) {
            self.waiting.remove(at);
            self.answer(id, Errno::INTR);
        } else if self.outstanding.contains_key(&id) {
            self.send(&Message::Cancel(id));
        }
    }

    fn handle_acknowledge(&mut self, _now: Time, id: RecallId) {
        if self.state == State::Attached {
            self.send(&Message::Acknowledge(id));
        }
    }

    fn handle_return(&mut self, _now: Time, grants: Vec<GrantId>) {
        if self.state == State::Attached {
            for some in grants.chunks(RETURNED_AT_ONCE) {
                self.send(&Message::Return(some.to_vec()));
            }
        }
    }

    fn handle_input(&mut self, now: Time, bytes: &[u8]) {
        if self.state == State::Lost {
            return;
        }
        self.counters.bytes_received += bytes.len() as u64;
        if let Err(error) = self.take_frames(now, bytes) {
            self.break_off(error);
        }
    }

    fn handle_disconnect(&mut self, _now: Time, why: &str) {
        if self.state != State::Lost {
            self.lose(why.to_owned());
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        let (moment, reason) = self.due();
        if now < moment {
            return;
        }
        match reason {
            Reason::SessionEnd => self.lose("the server has not answered for too long".to_owned()),
            Reason::Renewal if now >= self.confirmed.after(self.lapse()) => {
                self.lose(
                    "the server was not asked for too long, and may have gone on without us".to_owned(),
                );
            }
            Reason::Renewal => {
                self.ping = (self.ping.0 + 1, now);
                self.counters.renewals += 1;
                self.send(&Message::Ping(self.ping.0));
            }
            Reason::Idle | Reason::Delay => {}
        }
    }

    fn poll_output(&mut self) -> Output {
        self.outputs.pop_front().unwrap_or_else(|| {
            let (moment, reason) = self.due();
            Output::Timeout(moment, reason)
        })
    }
}
