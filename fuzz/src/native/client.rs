//! A client session with arbitrary input at any time.

use super::script::Script;
use super::stream::{Heard, Put};
use super::{CALLS, MESSAGES, REPLIES, Reached, T0, WELCOME, said, samples};
use nigh_native::{
    COMPRESSED, ClientConfig, ClientSession, Limits, Message, Resume, Resumed, Welcome, compress,
    encode_response,
};
use nigh_remote::{Event, Output, Remote};
use nigh_types::{CallId, GrantId, LeaseScope, Recall, RecallId, Reply, Response, Span, Term, Time};
use std::collections::BTreeSet;

/// A session, with its recorded input and output.
struct Watched {
    session: ClientSession,
    now: Time,
    /// When the session next wants a timeout.
    due: Time,
    calls: u64,
    unanswered: BTreeSet<CallId>,
    recalls: Vec<RecallId>,
    attached: bool,
    lapsed: bool,
    lost: bool,
    heard: Heard,
    /// Counted frames of this session that it has received.
    received: u64,
    put: Put,
    reached: Reached,
}

/// Input: steps, each a byte and its arguments. Checked: each call has one reply, nothing is sent after the end,
/// output is valid, a timeout moves the next deadline on, and each counted frame keeps its number across connections,
/// in both directions.
pub fn client(input: &[u8]) -> Reached {
    let mut script = Script::new(input);
    let mut client = Watched::new();
    client.drain();
    while let Some(step) = script.byte() {
        client.step(step, &mut script);
        client.drain();
    }
    client.session.handle_close("the script ends");
    client.drain();
    assert!(client.lost, "a closed session is lost");
    assert_eq!(client.due, Time::FAR, "nothing is due after the end");
    client.reached
}

/// Builds a welcome. `choice` selects the term, the call limit, the session, and whether bodies may be compressed.
fn welcome(choice: u64, session_id: u64, script: &mut Script<'_>) -> Vec<u8> {
    let session_term = [Span::from_secs(15), Span::from_millis(100), Span::FOREVER][(choice % 3) as usize];
    let max_calls = [1, 2, 1024][(choice / 3 % 3) as usize];
    let limits = Limits { max_calls, ..Limits::default() };
    let (session_id, resumed) = match choice / 9 % 4 {
        0 => (WELCOME.session_id, None),
        1 | 2 => (session_id, Some(Resumed { received: script.small(), lapsed: choice / 9 % 4 == 2 })),
        _ => (session_id + script.small(), None),
    };
    let features = if (choice / 36).is_multiple_of(2) { COMPRESSED } else { 0 };
    Message::Welcome(Welcome { features, session_id, session_term, limits, resumed, ..WELCOME.clone() })
        .encode()
}

fn response(reply: Reply, last: bool) -> Response {
    Response { last, ..Response::plain(Ok(reply)) }
}

impl Watched {
    fn new() -> Watched {
        let config = ClientConfig {
            client: 1,
            incarnation: 2,
            attach: b"/srv/tree".to_vec(),
            term: Term::Session,
            features: COMPRESSED,
        };
        Watched {
            session: ClientSession::new(T0, config),
            now: T0,
            due: T0,
            calls: 0,
            unanswered: BTreeSet::new(),
            recalls: Vec::new(),
            attached: false,
            lapsed: false,
            lost: false,
            heard: Heard::default(),
            received: 0,
            put: Put::default(),
            reached: Reached::new(),
        }
    }

    fn step(&mut self, step: u8, script: &mut Script<'_>) {
        match step % 16 {
            0 | 1 => self.hear(script.bytes()),
            2 => self.hear(&welcome(script.small(), self.session.session_id(), script)),
            3 | 4 => {
                let call = CallId(script.small());
                let (reply, last) = (script.one_of(&REPLIES), !script.small().is_multiple_of(4));
                self.hear(&encode_response(call, &response(reply, last)));
            }
            5 => {
                let (id, node) = (RecallId(script.small()), samples::id(script.small() + 1));
                self.hear(
                    &Message::Recall(Recall { id, node, covers: LeaseScope::Attributes, names: vec![] })
                        .encode(),
                );
            }
            6 => self.call(script.one_of(&CALLS)),
            7 => self.session.handle_cancel(self.now, CallId(script.small())),
            8 => {
                if let Some(recall) = self.recalls.pop() {
                    self.session.handle_acknowledge(self.now, recall);
                }
            }
            9 => self.session.handle_return(self.now, vec![GrantId(script.small()); 3]),
            10 => self.pass(Span::from_millis(script.small() * 100)),
            11 => self.connection(script.small()),
            12 => self.hear(&Message::Received(script.small()).encode()),
            13 => {
                let (number, count) = (script.small(), script.small());
                let ping = number.is_multiple_of(2);
                let message =
                    if ping { Message::Ping(number, count) } else { Message::Pong(number / 2, count) };
                self.hear(&message.encode());
            }
            14 => {
                let call = CallId(script.small());
                let data = response(Reply::Data(vec![7; 3000]), true);
                self.hear_packed(&encode_response(call, &data));
            }
            _ => self.hear(&script.one_of(&MESSAGES).encode()),
        }
    }

    fn hear_packed(&mut self, frame: &[u8]) {
        let packs = self.session.compresses() && self.session.is_linked();
        self.hear(&compress(frame).expect("so many equal bytes can be packed"));
        if packs && !self.session.is_lost() {
            self.reached.insert("packed");
        }
    }

    /// Feeds one frame at a time: an invalid frame has not arrived, but the frames before it have.
    fn hear(&mut self, mut bytes: &[u8]) {
        loop {
            let (first, rest) = bytes.split_at(self.heard.missing(bytes));
            self.hear_some(first);
            if rest.is_empty() {
                return;
            }
            bytes = rest;
        }
    }

    fn hear_some(&mut self, bytes: &[u8]) {
        let hears = |session: &ClientSession| !session.is_lost() && session.wants_connection().is_none();
        let heard = hears(&self.session);
        self.session.handle_input(self.now, bytes);
        // A session that notices the end of its term ignores the input.
        if !heard || !hears(&self.session) {
            return;
        }
        let whole = self.heard.take(bytes);
        match whole.welcome {
            None => self.received += whole.counted,
            Some(Some(Resumed { received, .. })) => {
                self.reached.insert("resumed");
                self.put.resume(received);
                self.received += whole.counted;
            }
            Some(None) => (self.put, self.received) = (Put::default(), whole.counted),
        }
    }

    /// Disconnects, connects, or both; or reports the end of reclaim.
    fn connection(&mut self, choice: u64) {
        if choice.is_multiple_of(4) {
            return self.session.handle_reclaimed(self.now);
        }
        if choice % 4 != 3 {
            self.session.handle_disconnect(self.now, "the script says so");
        }
        if choice % 4 != 2 {
            if self.session.wants_connection().is_some() {
                self.heard = Heard::default();
            }
            self.session.handle_connect(self.now);
        }
    }

    fn call(&mut self, call: nigh_types::Call) {
        self.calls += 1;
        let id = CallId(self.calls);
        if call.has_reply() && !self.lost {
            self.unanswered.insert(id);
        }
        self.session.handle_call(self.now, id, samples::request(call));
    }

    /// Advances time, with a timeout at each deadline of the session.
    fn pass(&mut self, time: Span) {
        let end = self.now.after(time);
        while self.due <= end {
            self.now = self.now.max(self.due);
            self.session.handle_timeout(self.now);
            self.drain();
            assert!(self.due > self.now, "time was told, and the moment stays");
        }
        self.now = end;
    }

    fn drain(&mut self) {
        loop {
            match self.session.poll_output() {
                Output::Timeout(due, _) => {
                    self.due = due;
                    return;
                }
                Output::Transmit(bytes) => {
                    assert!(!self.lost, "something is sent after the end");
                    let messages = said(&bytes);
                    assert_eq!(messages.len(), 1, "a frame at a time");
                    self.put.put(&bytes);
                    if let Message::Hello(hello) = &messages[0] {
                        let (session_id, received) = (self.session.session_id(), self.received);
                        let resume = self.attached.then_some(Resume { session_id, received });
                        assert_eq!(hello.resume, resume, "what it has of the session is said as it is");
                    }
                    if let Message::Resent(..) = &messages[0] {
                        self.reached.insert("called again");
                    }
                }
                Output::Event(event) => self.take(event),
            }
        }
    }

    fn take(&mut self, event: Event) {
        assert!(!self.lost, "something happens after the end: {event:?}");
        match event {
            Event::Attached(_) => {
                assert!(!self.attached, "attached twice");
                self.attached = true;
                self.reached.insert("attached");
            }
            Event::Response { call, response } => {
                assert!(self.unanswered.contains(&call), "call {} was not made, or is answered", call.0);
                if response.last {
                    self.unanswered.remove(&call);
                }
                if response.result.is_ok() {
                    self.reached.insert("answered");
                }
            }
            Event::Recall(recall) => {
                self.reached.insert("recalled");
                self.recalls.push(recall.id);
            }
            Event::UpdatePrepare(hold) => {
                self.reached.insert("held");
                self.recalls.push(hold.id);
            }
            Event::UpdateCommit(_) => drop(self.reached.insert("committed")),
            Event::Expired { .. } => {
                assert!(self.attached && !self.lapsed, "there is nothing that could lapse");
                self.lapsed = true;
                self.reached.insert("lapsed");
            }
            Event::Restored { kept, .. } => {
                assert!(self.attached, "there was nothing before");
                self.lapsed = false;
                self.reached.insert(if kept { "restored" } else { "forgotten" });
            }
            Event::Lost { .. } => self.lost = true,
        }
    }
}
