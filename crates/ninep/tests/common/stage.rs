//! A session with its unanswered messages: message by message and in virtual time.

#![allow(dead_code, reason = "each test uses a part")]

use crate::common::TreeServer;
use nigh_ninep::{Config, FrameReader, Rmessage, Session, Times, Tmessage};
use nigh_remote::model_fs::ModelFs;
use nigh_remote::{Event, Output, Remote, ResumableRemote};
use nigh_types::{
    Access, Call, CallId, CookieKey, Credentials, Errno, Handle, MutationId, Name, NodeId, NodeRef, Reply,
    Request, Response, Span, Term, Time, WriteFlags,
};
use std::collections::VecDeque;

pub fn config() -> Config {
    let second = Term::Limited(Span::from_secs(1));
    let times = Times { names: second, absent: second, attributes: second };
    let config = Config::new(times, CookieKey(*b"sixteen bytes ok"));
    Config { aname: b"/tree".to_vec(), all_users: true, msize: 1 << 20, ..config }
}

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// A session with its unanswered messages.
pub struct Stage {
    pub session: Session,
    pub frames: FrameReader,
    pub asked: VecDeque<(u16, Tmessage)>,
    pub events: VecDeque<Event>,
    pub now: Time,
    pub calls: u64,
    pub server: TreeServer,
}

impl Stage {
    /// A session without any reply yet.
    pub fn silent() -> Stage {
        Stage::with(config())
    }

    /// A session with this configuration, without any reply yet.
    pub fn with(config: Config) -> Stage {
        let now = Time(1_000_000_000);
        let mut stage = Stage {
            session: Session::new(now, config),
            frames: FrameReader::new(1 << 20),
            asked: VecDeque::new(),
            events: VecDeque::new(),
            now,
            calls: 0,
            server: TreeServer::new(ModelFs::default()),
        };
        stage.drain();
        stage
    }

    /// A session that is attached to the server.
    pub fn attached() -> Stage {
        Stage::attached_with(config())
    }

    pub fn attached_with(config: Config) -> Stage {
        let mut stage = Stage::with(config);
        stage.serve();
        let event = stage.events.pop_front();
        assert!(matches!(event, Some(Event::Attached(_))), "{event:?}");
        stage
    }

    pub fn drain(&mut self) -> Time {
        loop {
            match self.session.poll_output() {
                Output::Event(event) => self.events.push_back(event),
                Output::Transmit(bytes) => {
                    self.frames.take(&bytes);
                    while let Some(frame) = self.frames.poll_frame().unwrap() {
                        let message = Tmessage::decode(frame.code, &frame.body).unwrap();
                        self.asked.push_back((frame.tag, message));
                    }
                }
                Output::Timeout(due, _) => return due,
            }
        }
    }

    pub fn answer(&mut self, tag: u16, answer: &Rmessage) {
        self.session.handle_input(self.now, &answer.encode(tag));
        self.drain();
    }

    /// Lets the server reply to one message.
    pub fn serve_one(&mut self) -> bool {
        let Some((tag, message)) = self.asked.pop_front() else { return false };
        let answer = self.server.answer(self.now, &message);
        self.answer(tag, &answer);
        true
    }

    pub fn serve(&mut self) {
        while self.serve_one() {}
    }

    pub fn call_as(&mut self, uid: u32, call: Call) -> CallId {
        self.calls += 1;
        let id = CallId(self.calls);
        let name = MutationId { client: 1, incarnation: 1, sequence: self.calls };
        let name = call.is_mutation().then_some(name);
        let credentials = Credentials { uid, gid: uid, groups: Vec::new(), privileges: None };
        self.session.handle_call(self.now, id, Request { credentials, mutation_id: name, call });
        self.drain();
        id
    }

    pub fn call(&mut self, call: Call) -> CallId {
        self.call_as(0, call)
    }

    pub fn response(&mut self, id: CallId) -> Option<Response> {
        let is_it = |event: &Event| matches!(event, Event::Response { call, .. } if *call == id);
        let at = self.events.iter().position(is_it)?;
        match self.events.remove(at) {
            Some(Event::Response { response, .. }) => Some(response),
            _ => None,
        }
    }

    pub fn done(&mut self, call: Call) -> Response {
        let text = format!("{call:?}");
        let id = self.call(call);
        self.serve();
        self.response(id).unwrap_or_else(|| panic!("no answer to {text}"))
    }

    pub fn root(&self) -> NodeRef {
        NodeRef::without_hint(self.node(self.server.tree.root(), 2))
    }

    /// The session's node id.
    pub fn node(&self, id: NodeId, generation: u64) -> NodeId {
        let ino = if id.ino == 1 { 1 << 63 } else { id.ino };
        NodeId { ino, generation }
    }

    pub fn mkdir(&mut self, dir: &NodeRef, text: &str) -> NodeRef {
        let call = Call::Mkdir { dir: dir.clone(), name: name(text), mode: 0o755, umask: 0 };
        let Ok(Reply::Created { entry, .. }) = self.done(call).result else { panic!("not made") };
        NodeRef { node: entry.id, path_hint: Some((dir.node, name(text))) }
    }

    pub fn create(&mut self, dir: &NodeRef, text: &str) -> (NodeRef, Handle) {
        let access =
            Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
        let (mode, umask, exclusive) = (0o644, 0, true);
        let call = Call::Create { dir: dir.clone(), name: name(text), mode, umask, exclusive, access };
        let Ok(Reply::Created { entry, handle: Some(handle), .. }) = self.done(call).result else {
            panic!("not made")
        };
        (NodeRef { node: entry.id, path_hint: Some((dir.node, name(text))) }, handle)
    }

    pub fn look(&mut self, dir: &NodeRef, text: &str) -> Result<Reply, Errno> {
        self.done(Call::Lookup { dir: dir.clone(), name: name(text) }).result
    }

    pub fn later(&mut self, span: Span) {
        self.now = self.now.after(span);
        self.session.handle_timeout(self.now);
        self.drain();
    }

    pub fn reconnect(&mut self) {
        self.session.handle_disconnect(self.now, "cut");
        self.drain();
        assert!(matches!(self.events.pop_front(), Some(Event::Expired { .. })));
        assert!(self.session.wants_connection().is_some());
        self.asked.clear();
        self.frames = FrameReader::new(1 << 20);
        self.session.handle_connect(self.now);
        self.drain();
        self.serve();
        assert!(matches!(self.events.pop_front(), Some(Event::Restored { kept: false, .. })));
    }

    /// Checks that the server has as many fids as the session counts.
    pub fn check_fids(&mut self) {
        self.serve();
        assert_eq!(self.server.fids.len(), self.session.fids_in_use() as usize);
    }
}

pub fn read_write(node: &NodeRef) -> Call {
    let access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    Call::Open { node: node.clone(), access }
}

pub fn written(node: &NodeRef, handle: Handle, data: &[u8], append: bool) -> Call {
    let flags = WriteFlags { append, ..WriteFlags::default() };
    Call::Write { node: node.clone(), handle: Some(handle), offset: 0, data: data.to_vec(), flags }
}
