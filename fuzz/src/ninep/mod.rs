//! 9P2000.L: arbitrary server behaviour. `crates/ninep/tests/seeds.rs` replays the seeds.

#[path = "../../../crates/ninep/tests/common/mod.rs"]
mod common;

use common::TreeServer;
use nigh_ninep::{Config, FrameReader, Rmessage, Session, Times, Tmessage, dirents};
use nigh_remote::model_fs::ModelFs;
use nigh_remote::{Event, Output, Remote, ResumableRemote};
use nigh_types::{
    Access, Call, CallId, CookieKey, Credentials, LockKind, MutationId, Name, NodeId, NodeRef, Request,
    SetAttr, Span, Term, Time, WriteFlags,
};
use std::collections::{BTreeSet, VecDeque};

const MSIZE: u32 = 65_536;

/// The events that a script reached.
pub type Reached = BTreeSet<&'static str>;

/// Input: the chunk size (1 byte), then messages of either direction. Decoded messages must encode to the original
/// bytes.
pub fn codec(input: &[u8]) -> Reached {
    let mut reached = Reached::new();
    let Some((&cut, stream)) = input.split_first() else { return reached };
    let mut frames = FrameReader::new(MSIZE);
    for bytes in stream.chunks(usize::from(cut).max(1)) {
        frames.take(bytes);
        loop {
            let frame = match frames.poll_frame() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(_) => {
                    reached.insert("refused");
                    return reached;
                }
            };
            let whole = |encoded: Vec<u8>| assert_eq!(encoded[7..], frame.body, "{}", frame.code);
            if let Ok(message) = Rmessage::decode(frame.code, &frame.body) {
                whole(message.encode(frame.tag));
                reached.insert("an answer");
                if let Rmessage::Readdir { entries } = &message
                    && dirents(entries).is_ok_and(|entries| !entries.is_empty())
                {
                    reached.insert("entries");
                }
            }
            if let Ok(message) = Tmessage::decode(frame.code, &frame.body) {
                whole(message.encode(frame.tag));
                reached.insert("a request");
            }
        }
    }
    reached
}

struct Script<'a> {
    steps: &'a [u8],
    session: Session,
    server: TreeServer,
    frames: FrameReader,
    asked: VecDeque<(u16, Tmessage)>,
    now: Time,
    out: BTreeSet<CallId>,
    calls: u64,
    reached: Reached,
}

/// Input: steps, a byte each and its arguments: calls; correct, wrong or corrupted replies; arbitrary bytes;
/// disconnects; time. Checked for any server behaviour: no panic, at most one reply per call, and every call has a
/// reply once the server fails all requests.
pub fn session(input: &[u8]) -> Reached {
    let now = Time(1_000_000_000);
    let second = Term::Limited(Span::from_secs(1));
    let times = Times { names: second, absent: second, attributes: second };
    let config = Config::new(times, CookieKey(*b"sixteen bytes ok"));
    let config = Config { aname: b"/tree".to_vec(), all_users: true, msize: MSIZE, ..config };
    let mut server = TreeServer::new(ModelFs::default());
    server.is_strict = false;
    let mut script = Script {
        steps: input,
        session: Session::new(now, config),
        server,
        frames: FrameReader::new(1 << 24),
        asked: VecDeque::new(),
        now,
        out: BTreeSet::new(),
        calls: 0,
        reached: Reached::new(),
    };
    script.drain();
    while script.step() {}
    script.end();
    script.reached
}

impl Script<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.steps.split_first()?;
        self.steps = rest;
        Some(*first)
    }

    fn step(&mut self) -> bool {
        let Some(step) = self.byte() else { return false };
        match step % 16 {
            0..=4 => self.serve(None),
            5 => self.serve_all(),
            6..=9 => self.call(),
            10 => {
                let (at, to) = (self.byte().unwrap_or(0), self.byte().unwrap_or(0));
                self.serve(Some((at, to)));
            }
            11 => {
                let errno = u32::from(self.byte().unwrap_or(5));
                if let Some((tag, _)) = self.asked.pop_front() {
                    self.hear(&Rmessage::Lerror { errno }.encode(tag));
                }
            }
            12 => {
                let length = usize::from(self.byte().unwrap_or(0)).min(self.steps.len());
                let (bytes, rest) = self.steps.split_at(length);
                self.steps = rest;
                let bytes = bytes.to_vec();
                self.hear(&bytes);
            }
            13 => {
                let id = CallId(u64::from(self.byte().unwrap_or(0)));
                if self.out.contains(&id) {
                    self.session.handle_cancel(self.now, id);
                }
            }
            14 => {
                self.now = self.now.after(Span::from_secs(u64::from(self.byte().unwrap_or(0))));
                self.session.handle_timeout(self.now);
            }
            _ => self.cut(),
        }
        self.drain();
        true
    }

    fn cut(&mut self) {
        self.session.handle_disconnect(self.now, "cut");
        self.drain();
        self.connect();
    }

    fn connect(&mut self) {
        if self.session.wants_connection().is_some() {
            self.asked.clear();
            self.frames = FrameReader::new(1 << 24);
            self.session.handle_connect(self.now);
            self.drain();
        }
    }

    fn hear(&mut self, bytes: &[u8]) {
        self.session.handle_input(self.now, bytes);
        self.drain();
    }

    /// Replies to the next message, with one byte of the reply changed.
    fn serve(&mut self, change: Option<(u8, u8)>) {
        let Some((tag, message)) = self.asked.pop_front() else { return };
        let mut answer = self.server.answer(self.now, &message).encode(tag);
        if let Some((at, to)) = change {
            let at = usize::from(at) % answer.len();
            answer[at] = to;
        }
        self.hear(&answer);
    }

    fn serve_all(&mut self) {
        for _ in 0..1_000 {
            if self.asked.is_empty() {
                return;
            }
            self.serve(None);
        }
    }

    fn drain(&mut self) {
        for _ in 0..100_000 {
            match self.session.poll_output() {
                Output::Event(Event::Response { call, response }) => {
                    assert!(self.out.contains(&call), "{call:?} is answered and was not asked");
                    self.reached.insert(if response.result.is_ok() { "done" } else { "failed" });
                    if response.last {
                        self.out.remove(&call);
                    }
                }
                Output::Event(Event::Attached(_)) => drop(self.reached.insert("attached")),
                Output::Event(Event::Restored { .. }) => {
                    self.reached.insert("restored");
                    self.session.handle_reclaimed(self.now);
                }
                Output::Event(Event::Lost { .. }) => {
                    self.reached.insert("lost");
                    self.out.clear();
                }
                Output::Event(_) => {}
                Output::Transmit(bytes) => {
                    self.frames.take(&bytes);
                    while let Some(frame) = self.frames.poll_frame().expect("we send whole messages") {
                        let message = Tmessage::decode(frame.code, &frame.body).expect("and right ones");
                        self.asked.push_back((frame.tag, message));
                    }
                }
                Output::Timeout(..) => return,
            }
        }
        panic!("it has always something to say");
    }

    fn call(&mut self) {
        if self.session.is_lost() {
            return;
        }
        let (kind, which) = (self.byte().unwrap_or(0), self.byte().unwrap_or(0));
        self.calls += 1;
        let id = CallId(self.calls);
        let call = call_of(kind, which);
        let name = MutationId { client: 1, incarnation: 1, sequence: self.calls };
        let name = call.is_mutation().then_some(name);
        let credentials =
            Credentials { uid: u32::from(which / 128), gid: 0, groups: Vec::new(), privileges: None };
        if call.has_reply() {
            self.out.insert(id);
        }
        self.session.handle_call(self.now, id, Request { credentials, mutation_id: name, call });
    }

    /// From now on the server fails all requests.
    fn end(&mut self) {
        for _ in 0..64 {
            self.connect();
            while let Some((tag, message)) = self.asked.pop_front() {
                let begins = matches!(
                    message,
                    Tmessage::Version { .. } | Tmessage::Attach { .. } | Tmessage::Getattr { .. }
                );
                let answer = match begins && !self.session.is_connected() {
                    true => self.server.answer(self.now, &message),
                    false => Rmessage::Lerror { errno: 5 },
                };
                self.hear(&answer.encode(tag));
            }
            self.now = self.now.after(Span::from_secs(61));
            self.session.handle_timeout(self.now);
            self.drain();
        }
        if self.session.is_connected() {
            assert!(self.out.is_empty(), "{:?} have no answer", self.out);
        }
    }
}

fn call_of(kind: u8, which: u8) -> Call {
    let root = NodeId { ino: 1 << 63, generation: 2 };
    let name = |n: u8| Name::new(format!("n{}", n % 4).as_bytes()).expect("a name");
    let dir = match which & 0x40 {
        0 => NodeRef::without_hint(root),
        _ => NodeRef { node: NodeId { ino: 2, generation: 2 }, path_hint: Some((root, name(0))) },
    };
    let generation = [1, 2, 3, 1][usize::from(which >> 4) % 4];
    let node = NodeRef {
        node: NodeId { ino: 2 + u64::from(which % 8), generation },
        path_hint: Some((dir.node, name(which))),
    };
    let (mode, umask, exclusive) = (0o644, 0o022, which & 1 == 0);
    let access = Access {
        read: true,
        write: which & 2 == 0,
        truncate: false,
        direct: false,
        sync: false,
        append: false,
    };
    let name = name(which);
    match kind % 24 {
        0 | 1 => Call::Lookup { dir, name },
        2 => Call::GetAttr { node },
        3 => Call::List { dir },
        4 => Call::ReadLink { node },
        5 => Call::Xattrs { node },
        6 => Call::Open { node, access },
        7 => Call::Read { node, handle: None, offset: u64::from(which), length: 200_000 },
        8 => Call::Create { dir, name, mode, umask, exclusive, access },
        9 => Call::Mkdir { dir, name, mode, umask },
        10 => Call::Symlink { dir, name, target: vec![b't'; usize::from(which) + 1] },
        11 => Call::Link { node, dir, name },
        12 => Call::Unlink { dir, name, keep: Some(node.node) },
        13 => Call::Rmdir { dir, name },
        14 => {
            let (from, to, new_name) = (dir, NodeRef::without_hint(root), Name::new(b"n1").expect("a name"));
            let (no_replace, exchange, keep) = (false, false, Some(node.node));
            Call::Rename { from, name, to, new_name, no_replace, exchange, whiteout: false, keep }
        }
        15 => {
            let set =
                SetAttr { mode: Some(0o600), size: (which & 4 == 0).then_some(9), ..SetAttr::default() };
            Call::SetAttr { node, handle: None, set }
        }
        16 => {
            let flags = WriteFlags { append: which & 1 == 0, kill_suidgid: true, ..WriteFlags::default() };
            Call::Write { node, handle: None, offset: 3, data: vec![which; 100_000], flags }
        }
        17 => Call::SetXattr { node, name: b"user.x".to_vec(), value: vec![1], flags: 0, kill_sgid: false },
        18 => Call::Fsync { node, handle: None, data_only: false },
        19 => {
            let (owner, flock, start, end) = (u64::from(which % 3), which & 8 == 0, 0, 9);
            let kind = if which & 16 == 0 { LockKind::Read } else { LockKind::Write };
            Call::Lock { node, owner, flock, kind, start, end, wait: false, pid: 1, reclaim: false }
        }
        20 => Call::Unlock { node, owner: u64::from(which % 3), flock: which & 8 == 0, start: 0, end: 5 },
        21 => Call::StatFs { node },
        22 => Call::ResolvePath { node: node.node, names: vec![name; usize::from(which % 40)] },
        _ => Call::PinOpen {
            node,
            names: Vec::new(),
            handle: nigh_types::Handle((1 << 63) | u64::from(which)),
        },
    }
}
