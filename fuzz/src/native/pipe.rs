//! Both ends of a session over pipes that delay and cut.

use super::script::Script;
use super::{Reached, T0, samples};
use nigh_native::{ClientConfig, ClientSession, ServerConfig, ServerEvent, ServerSession};
use nigh_remote::model_fs::{ModelFs, ModelFsConfig};
use nigh_remote::{Event, Output, Remote, SessionParams};
use nigh_types::{
    Access, Call, CallId, Cookie, Errno, LeaseScope, MutationId, NodeId, NodeRef, Recall, RecallId, Request,
    Response, Span, Term, Time,
};
use std::collections::{BTreeSet, VecDeque};

struct Pair {
    now: Time,
    client: ClientSession,
    server: ServerSession,
    /// The connection that receives the hello of a new link, and whether it belongs to a restarted server without
    /// sessions.
    stranger: Option<(ServerSession, bool)>,
    tree: ModelFs,
    up: VecDeque<u8>,
    down: VecDeque<u8>,
    due: Time,
    calls: u64,
    unanswered: BTreeSet<CallId>,
    /// Calls that have arrived and are not executed yet.
    arrived: VecDeque<(CallId, Request)>,
    recalls: u64,
    /// Recalls that the server waits for, and recalls that the client has seen.
    owed: BTreeSet<RecallId>,
    seen: Vec<RecallId>,
    lost: bool,
    reached: Reached,
}

/// Input: steps, each a byte and its arguments. Checked: neither end reports a protocol error. When all bytes have
/// arrived, each call has one reply and each recall one acknowledgement, whatever connections were cut, unless the
/// server has forgotten the recall.
pub fn pipe(input: &[u8]) -> Reached {
    let mut script = Script::new(input);
    let mut pair = Pair::new();
    pair.carry();
    while let Some(step) = script.byte() {
        match step % 12 {
            0 | 1 => pair.call(script.small()),
            2 => pair.up(script.small()),
            3 => pair.down(script.small()),
            4 => pair.execute(script.small()),
            5 => pair.recall(),
            6 => pair.acknowledge(),
            7 => {
                let call = CallId(script.small());
                pair.client.handle_cancel(pair.now, call);
            }
            8 => pair.pass(Span::from_millis(script.small() * 20)),
            9 => {
                pair.up(u64::MAX);
                pair.down(u64::MAX);
            }
            10 => pair.connect(script.small() % 8 == 7),
            _ => pair.cut(),
        }
        pair.carry();
    }
    pair.finish()
}

impl Pair {
    fn new() -> Pair {
        let config = ClientConfig {
            client: 1,
            incarnation: 2,
            attach: b"/srv/tree".to_vec(),
            term: Term::Session,
            features: 0,
        };
        Pair {
            now: T0,
            client: ClientSession::new(T0, config),
            server: ServerSession::new(T0, ServerConfig::default()),
            stranger: None,
            tree: ModelFs::new(ModelFsConfig::default()),
            up: VecDeque::new(),
            down: VecDeque::new(),
            due: T0,
            calls: 0,
            unanswered: BTreeSet::new(),
            arrived: VecDeque::new(),
            recalls: 0,
            owed: BTreeSet::new(),
            seen: Vec::new(),
            lost: false,
            reached: Reached::new(),
        }
    }

    fn call(&mut self, choice: u64) {
        self.calls += 1;
        let id = CallId(self.calls);
        let dir = NodeRef::without_hint(self.tree.root());
        let name = samples::name(&format!("n{}", choice / 8 % 4));
        let call = match choice % 8 {
            0 => Call::Lookup { dir, name },
            1 if choice / 32 % 2 == 1 => Call::ListNames { dir, after: Cookie(choice << 48) },
            1 => Call::List { dir },
            2 => Call::Mkdir { dir, name, mode: 0o755, umask: 0 },
            3 => {
                let access = Access { truncate: false, ..samples::access() };
                Call::Create { dir, name, mode: 0o644, umask: 0, exclusive: false, access }
            }
            4 => Call::Unlink { dir, name, keep: None },
            5 => Call::Rmdir { dir, name },
            6 => Call::Release { handles: vec![nigh_types::Handle(choice)] },
            _ => Call::GetAttr { node: dir },
        };
        if call.has_reply() && !self.lost {
            self.unanswered.insert(id);
        }
        let named = call.is_mutation();
        let name = named.then_some(MutationId { client: 1, incarnation: 2, sequence: self.calls });
        self.client.handle_call(self.now, id, Request { mutation_id: name, ..samples::request(call) });
    }

    /// Ends the connection; bytes in transit are lost.
    fn cut(&mut self) {
        self.up.clear();
        self.down.clear();
        if self.stranger.take().is_none() {
            self.server.handle_disconnect();
        }
        self.client.handle_disconnect(self.now, "cut");
    }

    /// Replaces the connection. `anew`: the server has restarted since.
    fn connect(&mut self, anew: bool) {
        if self.client.session_id() == 0 {
            return;
        }
        self.cut();
        self.carry();
        let session_id = self.server.session_id() + 1;
        let config = ServerConfig { session_id, ..ServerConfig::default() };
        self.stranger = Some((ServerSession::new(self.now, config), anew));
        self.client.handle_connect(self.now);
    }

    fn greet(&mut self, bytes: &[u8]) {
        let Some((stranger, anew)) = &mut self.stranger else { return };
        assert_eq!(stranger.handle_input(self.now, bytes), Ok(()), "our own client breaks the rules");
        let Some(event) = stranger.poll_event() else { return };
        let ServerEvent::Attach { resume: Some(resume), .. } = event else { panic!("{event:?}") };
        // The client does not name a session that was newly created and of which it has not heard.
        let (anew, session) = (*anew || resume.session_id != self.server.session_id(), self.session());
        let Some((mut stranger, _)) = self.stranger.take() else { return };
        if anew {
            stranger.accept(session);
            self.server = stranger;
            (self.arrived, self.owed) = Default::default();
        } else {
            let lapsed = self.server.lapses() <= self.now;
            let resumed = self.server.resume(self.now, resume.received, lapsed, session);
            assert_eq!(resumed, Ok(()), "it cannot have received so much");
            self.reached.insert("resumed");
        }
    }

    fn session(&self) -> SessionParams {
        let root = self.tree.root();
        let root_attr = self.tree.attr(root).expect("the root is there");
        let cookie_key = self.tree.config().cookie_key;
        SessionParams { root, root_attr, cookie_key, ..samples::session() }
    }

    /// Delivers at most `count` bytes to the server.
    fn up(&mut self, count: u64) {
        let bytes: Vec<u8> = take(&mut self.up, count);
        if self.stranger.is_some() {
            return self.greet(&bytes);
        }
        if !self.server.is_ended() {
            let heard = self.server.handle_input(self.now, &bytes);
            assert_eq!(heard, Ok(()), "our own client breaks the rules");
        }
    }

    fn down(&mut self, count: u64) {
        let bytes = take(&mut self.down, count);
        self.client.handle_input(self.now, &bytes);
    }

    /// Executes a call that has arrived, not always the first.
    fn execute(&mut self, choice: u64) {
        let at = (choice as usize) % self.arrived.len().max(1);
        let Some((call, request)) = self.arrived.remove(at) else { return };
        for response in self.tree.execute(self.now, &request) {
            if self.server.is_outstanding(call) {
                self.server.respond(call, &response);
            }
        }
    }

    fn recall(&mut self) {
        // The server has granted nothing before the session is established.
        if self.client.session_id() == 0 || self.server.is_ended() {
            return;
        }
        self.recalls += 1;
        let id = RecallId(self.recalls);
        let node = NodeId { ino: 1, generation: 1 };
        self.server.recall(Recall { id, node, covers: LeaseScope::Directory, names: vec![] });
        self.owed.insert(id);
    }

    fn acknowledge(&mut self) {
        if let Some(recall) = self.seen.pop() {
            self.client.handle_acknowledge(self.now, recall);
        }
    }

    fn pass(&mut self, time: Span) {
        let end = self.now.after(time);
        while self.due <= end {
            self.now = self.now.max(self.due);
            self.client.handle_timeout(self.now);
            self.carry();
        }
        self.now = end;
    }

    /// Sends all output of both ends.
    fn carry(&mut self) {
        loop {
            match self.client.poll_output() {
                Output::Timeout(due, _) => {
                    self.due = due;
                    break;
                }
                Output::Transmit(bytes) => self.up.extend(bytes.iter()),
                Output::Event(event) => self.take(event),
            }
        }
        while let Some(event) = self.server.poll_event() {
            self.serve(event);
        }
        while let Some(bytes) = self.server.poll_transmit() {
            self.down.extend(bytes.iter());
        }
    }

    fn take(&mut self, event: Event) {
        assert!(!self.lost, "something happens after the end: {event:?}");
        match event {
            Event::Response { call, response } => {
                assert!(self.unanswered.contains(&call), "call {} was not made, or is answered", call.0);
                self.reached.insert(if response.result.is_ok() { "answered" } else { "failed" });
                if response.last {
                    self.unanswered.remove(&call);
                }
            }
            Event::Recall(recall) => {
                self.reached.insert("recalled");
                self.seen.push(recall.id);
            }
            Event::Attached(_) => drop(self.reached.insert("attached")),
            Event::UpdatePrepare(hold) => {
                self.reached.insert("held");
                self.seen.push(hold.id);
            }
            Event::UpdateCommit(_) => drop(self.reached.insert("committed")),
            Event::Expired { .. } => drop(self.reached.insert("lapsed")),
            Event::Lost { why } => {
                assert!(!why.contains("protocol"), "our own server breaks the rules: {why}");
                self.lost = true;
            }
            Event::Restored { kept: false, .. } => {
                self.reached.insert("forgotten");
                self.client.handle_reclaimed(self.now);
            }
            Event::Restored { kept: true, .. } => {}
        }
    }

    fn serve(&mut self, event: ServerEvent) {
        match event {
            ServerEvent::Attach { .. } => {
                let session = self.session();
                self.server.accept(session);
            }
            ServerEvent::Request { call, request, resent } if request.call.has_reply() => {
                if resent {
                    self.reached.insert("called again");
                }
                self.arrived.push_back((call, request));
            }
            ServerEvent::Cancel(call) => {
                if let Some(at) = self.arrived.iter().position(|(id, _)| *id == call) {
                    self.arrived.remove(at);
                    self.server.respond(call, &Response::plain(Err(Errno::INTR)));
                }
            }
            ServerEvent::Acknowledge(recall) => {
                assert!(self.owed.remove(&recall), "recall {} is acknowledged twice", recall.0);
            }
            _ => {}
        }
    }

    fn is_unlinked(&self) -> bool {
        self.client.wants_connection().is_some()
    }

    /// Delivers and executes everything in transit.
    fn finish(mut self) -> Reached {
        loop {
            if self.is_unlinked() {
                self.connect(false);
            }
            self.carry();
            self.acknowledge();
            self.execute(0);
            self.carry();
            let idle = self.up.is_empty() && self.down.is_empty();
            if idle && self.arrived.is_empty() && self.seen.is_empty() && !self.is_unlinked() {
                break;
            }
            self.up(u64::MAX);
            self.down(u64::MAX);
        }
        if !self.lost {
            assert!(self.unanswered.is_empty(), "not answered: {:?}", self.unanswered);
            assert!(self.owed.is_empty(), "not acknowledged: {:?}", self.owed);
        }
        self.reached
    }
}

fn take(pipe: &mut VecDeque<u8>, count: u64) -> Vec<u8> {
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(pipe.len());
    pipe.drain(..count).collect()
}
