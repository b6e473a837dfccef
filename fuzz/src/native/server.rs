//! A server connection with arbitrary input at any time.

use super::script::Script;
use super::stream::{Heard, Put};
use super::{CALLS, MESSAGES, Reached, T0, said, samples};
use nigh_native::{
    COMPRESSED, Hello, Limits, Message, ProtocolError, ServerConfig, ServerEvent, ServerSession, compress,
    encode_request,
};
use nigh_types::{Call, CallId, Errno, GrantId, LeaseScope, Recall, RecallId, Response, Span, Time};
use std::collections::BTreeSet;

const MAX_CALLS: u32 = 3;

/// A connection, with its recorded input and output.
struct Watched {
    connection: ServerSession,
    now: Time,
    greeted: bool,
    muted: bool,
    /// There is no connection at present.
    cut: bool,
    /// Calls without a reply, and those among them that wait for a lock.
    unanswered: BTreeSet<CallId>,
    lock_waits: BTreeSet<CallId>,
    recalls: BTreeSet<RecallId>,
    latest_recall: u64,
    /// Whether the server has said goodbye, or refused.
    farewell: bool,
    heard: Heard,
    /// Counted frames that it has received.
    received: u64,
    put: Put,
    reached: Reached,
}

/// Input: steps, each a byte and its arguments. Checked: each call is passed on once and within the limit, and none
/// while the session is muted. Recalls end once. Nothing is sent after a farewell or without a connection. A session
/// with input does not expire. Each counted frame keeps its number across connections.
pub fn server(input: &[u8]) -> Reached {
    let mut script = Script::new(input);
    let mut server = Watched::new();
    while let Some(step) = script.byte() {
        server.step(step, &mut script);
        server.drain();
    }
    server.reached
}

impl Watched {
    fn new() -> Watched {
        let limits = Limits { max_calls: MAX_CALLS, ..Limits::default() };
        Watched {
            connection: ServerSession::new(T0, ServerConfig { limits, ..ServerConfig::default() }),
            now: T0,
            greeted: false,
            muted: false,
            cut: false,
            unanswered: BTreeSet::new(),
            lock_waits: BTreeSet::new(),
            recalls: BTreeSet::new(),
            latest_recall: 0,
            farewell: false,
            heard: Heard::default(),
            received: 0,
            put: Put::default(),
            reached: Reached::new(),
        }
    }

    fn step(&mut self, step: u8, script: &mut Script<'_>) {
        match step % 24 {
            0 | 1 => self.hear(script.bytes()),
            2 => self.say(&Message::Hello(Hello { features: COMPRESSED, ..samples::hello() })),
            3..=5 => {
                let (id, call) = (CallId(script.small() % 8), script.one_of(&CALLS));
                self.say(&Message::Request(id, samples::request(call)));
            }
            6 => self.say(&Message::Cancel(CallId(script.small() % 8))),
            7 => self.say(&Message::Acknowledge(RecallId(script.small() % 8))),
            8 => self.say(&Message::Return(vec![GrantId(script.small()); 2])),
            9 => self.accept(),
            10 => self.respond(script.small()),
            11 | 12 => self.recall(),
            13 => {
                self.muted = !script.small().is_multiple_of(2);
                self.connection.mute(self.muted);
            }
            14 => self.now = self.now.after(Span::from_millis(script.small() * 100)),
            15 => match script.small() {
                0 => self.connection.end("the script says so"),
                1 if self.greeted => self.connection.refuse(Errno::NOENT, "not here"),
                2 => self.say(&Message::Bye("the script says so".to_owned())),
                _ => self.connection.probe(),
            },
            16 => self.end_connection(),
            17 => self.resume(script.small(), !script.small().is_multiple_of(2)),
            18 => self.say(&Message::Received(script.small())),
            19 => self.say(&Message::Ping(script.small(), script.small())),
            20 => self.say(&Message::Pong(script.small(), script.small())),
            21 => {
                let (id, call) = (CallId(script.small() % 8), script.one_of(&CALLS));
                self.say(&Message::Resent(id, samples::request(call)));
            }
            22 => self.say_packed(CallId(script.small() % 8)),
            _ => self.say(&script.one_of(&MESSAGES)),
        }
    }

    fn say(&mut self, message: &Message) {
        self.hear(&message.encode());
    }

    fn say_packed(&mut self, call: CallId) {
        let names = vec![samples::name("always the same"); 100];
        let request = samples::request(Call::ResolvePath { node: samples::id(7), names });
        let packs = self.connection.compresses();
        self.hear(&compress(&encode_request(call, &request)).expect("equal names can be packed"));
        if packs && !self.connection.is_ended() {
            self.reached.insert("packed");
        }
    }

    fn hear(&mut self, bytes: &[u8]) {
        if self.cut {
            return;
        }
        let ended = self.connection.is_ended();
        let taken = self.connection.handle_input(self.now, bytes);
        assert_eq!(ended, taken == Err(ProtocolError::Ended), "an ended session hears nothing");
        if taken.is_err() {
            assert!(self.connection.is_ended(), "a broken rule ends it");
            return;
        }
        self.received += self.heard.take(bytes).counted;
        assert!(self.muted || self.connection.lapses() > self.now, "who was heard just now is given up");
    }

    fn accept(&mut self) {
        if std::mem::take(&mut self.greeted) {
            self.connection.accept(samples::session());
            if !self.connection.is_ended() {
                self.reached.insert("attached");
            }
        }
    }

    fn end_connection(&mut self) {
        // Before a session is established, its connection cannot be replaced.
        if self.reached.contains("attached") {
            self.connection.handle_disconnect();
            self.cut = true;
        }
    }

    /// The client reconnects, and has received that many frames.
    fn resume(&mut self, received: u64, lapsed: bool) {
        if !self.reached.contains("attached") || self.connection.is_ended() {
            return;
        }
        self.end_connection();
        self.cut = false;
        self.heard = Heard::default();
        let resumed = self.connection.resume(self.now, received, lapsed, samples::session());
        assert_eq!(resumed.is_err(), self.connection.is_ended(), "a count that cannot be ends it");
        if resumed.is_ok() {
            self.put.resume(received);
            self.reached.insert("resumed");
            assert!(self.muted || self.connection.lapses() > self.now, "who came again is given up");
        }
    }

    fn respond(&mut self, choice: u64) {
        let outstanding: Vec<CallId> = self.unanswered.iter().copied().collect();
        let Some(call) = outstanding.get((choice / 2) as usize % outstanding.len().max(1)).copied() else {
            return;
        };
        if !self.connection.is_outstanding(call) {
            assert!(
                self.connection.is_ended(),
                "a call that was passed on is outstanding until it is answered"
            );
            return;
        }
        let last = choice.is_multiple_of(2);
        self.connection.respond(call, &Response { last, ..Response::plain(Err(Errno::IO)) });
        self.reached.insert("answered");
        if last {
            self.unanswered.remove(&call);
            self.lock_waits.remove(&call);
        }
    }

    fn recall(&mut self) {
        self.latest_recall += 1;
        let id = RecallId(self.latest_recall);
        let recall = Recall { id, node: samples::id(1), covers: LeaseScope::Attributes, names: vec![] };
        self.connection.recall(recall);
        self.recalls.insert(id);
    }

    fn drain(&mut self) {
        while let Some(event) = self.connection.poll_event() {
            self.take(event);
        }
        while let Some(bytes) = self.connection.poll_transmit() {
            assert!(!self.farewell, "something is said after a farewell");
            assert!(!self.cut, "something is said without a connection");
            self.put.put(&bytes);
            let messages = said(&bytes);
            assert_eq!(messages.len(), 1, "a frame at a time");
            if let Message::Welcome(welcome) = &messages[0] {
                let received = welcome.resumed.map_or(0, |resumed| resumed.received);
                assert_eq!(received, self.received, "what it has of the session is said as it is");
            }
            self.farewell = matches!(messages[0], Message::Bye(_) | Message::Refused(_));
        }
    }

    fn take(&mut self, event: ServerEvent) {
        match event {
            ServerEvent::Attach { .. } => self.greeted = true,
            ServerEvent::Request { call, request, resent } => {
                if resent {
                    self.reached.insert("called again");
                }
                self.take_request(call, &request.call);
            }
            ServerEvent::Cancel(call) => {
                assert!(self.unanswered.contains(&call) || self.connection.is_ended());
                self.reached.insert("cancelled");
            }
            ServerEvent::Acknowledge(recall) => {
                assert!(self.recalls.remove(&recall), "recall {} ends once", recall.0);
                self.reached.insert("acknowledged");
            }
            _ => {}
        }
    }

    fn take_request(&mut self, id: CallId, call: &Call) {
        let at_once = matches!(call, Call::PinOpen { .. }) || call.is_write_back();
        assert!(!self.muted || at_once, "a muted session is not served");
        if !call.has_reply() {
            return;
        }
        assert!(self.unanswered.insert(id), "call {} is passed on twice", id.0);
        if call.waits_for_lock() {
            self.lock_waits.insert(id);
        }
        let others = self.unanswered.len() - self.lock_waits.len();
        assert!(others <= MAX_CALLS as usize, "more calls than were allowed");
    }
}
