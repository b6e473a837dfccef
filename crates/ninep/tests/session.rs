//! What a session does with a server, message by message and in virtual time.

mod common;

use common::TreeServer;
use nigh_ninep::{Config, Data, Few, FrameReader, Qid, Rmessage, Session, Times, Tmessage, VERSION, mask};
use nigh_remote::tree::Tree;
use nigh_remote::{Carried, Event, Output, Remote};
use nigh_types::{
    Access, Call, CallId, CookieKey, Covers, Credentials, Errno, Handle, LockKind, Name, NodeId, OpName,
    Place, Reply, Request, Response, Span, Term, Time, WriteFlags,
};
use std::collections::VecDeque;

fn config() -> Config {
    let second = Term::Limited(Span::from_secs(1));
    Config {
        aname: b"/tree".to_vec(),
        uname: Vec::new(),
        uid: 0,
        gid: 0,
        all_users: true,
        msize: 1 << 20,
        times: Times { names: second, absent: second, attributes: second },
        cookie_key: CookieKey(*b"sixteen bytes ok"),
    }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// A session, and what it has asked and not been answered.
struct Stage {
    session: Session,
    frames: FrameReader,
    asked: VecDeque<(u16, Tmessage)>,
    events: VecDeque<Event>,
    now: Time,
    calls: u64,
    server: TreeServer,
}

impl Stage {
    /// Nothing is answered yet.
    fn silent() -> Stage {
        let now = Time(1_000_000_000);
        let mut stage = Stage {
            session: Session::new(now, config()),
            frames: FrameReader::new(1 << 20),
            asked: VecDeque::new(),
            events: VecDeque::new(),
            now,
            calls: 0,
            server: TreeServer::new(Tree::default()),
        };
        stage.drain();
        stage
    }

    /// Attached to the server.
    fn attached() -> Stage {
        let mut stage = Stage::silent();
        stage.serve();
        let event = stage.events.pop_front();
        assert!(matches!(event, Some(Event::Attached(_))), "{event:?}");
        stage
    }

    fn drain(&mut self) -> Time {
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

    fn answer(&mut self, tag: u16, answer: &Rmessage) {
        self.session.handle_input(self.now, &answer.encode(tag));
        self.drain();
    }

    /// The server answers one message.
    fn serve_one(&mut self) -> bool {
        let Some((tag, message)) = self.asked.pop_front() else { return false };
        let answer = self.server.answer(self.now, &message);
        self.answer(tag, &answer);
        true
    }

    fn serve(&mut self) {
        while self.serve_one() {}
    }

    fn call_as(&mut self, uid: u32, call: Call) -> CallId {
        self.calls += 1;
        let id = CallId(self.calls);
        let name = OpName { client: 1, incarnation: 1, sequence: self.calls };
        let name = call.is_mutation().then_some(name);
        let credentials = Credentials { uid, gid: uid, groups: Vec::new() };
        self.session.handle_call(self.now, id, Request { credentials, name, call });
        self.drain();
        id
    }

    fn call(&mut self, call: Call) -> CallId {
        self.call_as(0, call)
    }

    fn response(&mut self, id: CallId) -> Option<Response> {
        let is_it = |event: &Event| matches!(event, Event::Response { call, .. } if *call == id);
        let at = self.events.iter().position(is_it)?;
        match self.events.remove(at) {
            Some(Event::Response { response, .. }) => Some(response),
            _ => None,
        }
    }

    fn done(&mut self, call: Call) -> Response {
        let text = format!("{call:?}");
        let id = self.call(call);
        self.serve();
        self.response(id).unwrap_or_else(|| panic!("no answer to {text}"))
    }

    fn root(&self) -> Place {
        Place::bare(self.node(self.server.tree.root(), 2))
    }

    /// As the session numbers it.
    fn node(&self, id: NodeId, generation: u64) -> NodeId {
        let ino = if id.ino == 1 { 1 << 63 } else { id.ino };
        NodeId { ino, generation }
    }

    fn mkdir(&mut self, dir: &Place, text: &str) -> Place {
        let call = Call::Mkdir { dir: dir.clone(), name: name(text), mode: 0o755, umask: 0 };
        let Ok(Reply::Made { entry, .. }) = self.done(call).result else { panic!("not made") };
        Place { node: entry.id, hint: Some((dir.node, name(text))) }
    }

    fn create(&mut self, dir: &Place, text: &str) -> (Place, Handle) {
        let access = Access { read: true, write: true, truncate: false, direct: false, sync: false };
        let (mode, umask, exclusive) = (0o644, 0, true);
        let call = Call::Create { dir: dir.clone(), name: name(text), mode, umask, exclusive, access };
        let Ok(Reply::Made { entry, handle: Some(handle), .. }) = self.done(call).result else {
            panic!("not made")
        };
        (Place { node: entry.id, hint: Some((dir.node, name(text))) }, handle)
    }

    fn look(&mut self, dir: &Place, text: &str) -> Result<Reply, Errno> {
        self.done(Call::Lookup { dir: dir.clone(), name: name(text) }).result
    }

    fn later(&mut self, span: Span) {
        self.now = self.now.after(span);
        self.session.handle_timeout(self.now);
        self.drain();
    }

    fn reconnect(&mut self) {
        self.session.handle_disconnect(self.now, "cut");
        self.drain();
        assert!(matches!(self.events.pop_front(), Some(Event::Lapsed { .. })));
        assert!(self.session.wants_connection().is_some());
        self.asked.clear();
        self.frames = FrameReader::new(1 << 20);
        self.session.handle_connect(self.now);
        self.drain();
        self.serve();
        assert!(matches!(self.events.pop_front(), Some(Event::Restored { kept: false, .. })));
    }

    /// The server has as many fids as the session believes.
    fn check_fids(&mut self) {
        self.serve();
        assert_eq!(self.server.fids.len(), self.session.fids_in_use() as usize);
    }
}

fn read_write(node: &Place) -> Call {
    let access = Access { read: true, write: true, truncate: false, direct: false, sync: false };
    Call::Open { node: node.clone(), access }
}

fn written(node: &Place, handle: Handle, data: &[u8], append: bool) -> Call {
    let flags = WriteFlags { append, ..WriteFlags::default() };
    Call::Write { node: node.clone(), handle: Some(handle), offset: 0, data: data.to_vec(), flags }
}

#[test]
fn no_fid_is_left_behind() {
    let mut stage = Stage::attached();
    let root = stage.root();
    stage.check_fids();
    let before = stage.server.fids.len();
    for round in 0..50 {
        let dir = stage.mkdir(&root, "dir");
        let (file, handle) = stage.create(&dir, "file");
        stage.done(written(&file, handle, b"data", round % 2 == 0)).result.unwrap();
        stage.done(Call::Read { node: file.clone(), handle: None, offset: 0, length: 10 }).result.unwrap();
        stage.done(Call::Xattrs { node: file.clone() }).result.unwrap();
        assert_eq!(stage.look(&dir, "none"), Ok(Reply::Looked(None)));
        stage.done(Call::List { dir: dir.clone() }).result.unwrap();
        let link = Call::Link { node: file.clone(), dir: root.clone(), name: name("link") };
        stage.done(link).result.unwrap();
        let _ = stage.look(&root, "link");
        stage.call(Call::Release { handles: vec![handle] });
        for (dir, leaf) in [(&dir, "file"), (&root, "link")] {
            let unlink = Call::Unlink { dir: dir.clone(), name: name(leaf), keep: Some(file.node) };
            let Ok(Reply::Removed { kept, .. }) = stage.done(unlink).result else { panic!("not removed") };
            stage.call(Call::Release { handles: kept.into_iter().collect() });
        }
        stage.done(Call::Rmdir { dir: root.clone(), name: name("dir") }).result.unwrap();
        stage.check_fids();
        assert_eq!(stage.server.fids.len(), before, "round {round}");
    }
}

/// Nodes of ten thousand files are known, and few of them have fids.
#[test]
fn fids_are_kept_for_those_used_last() {
    let mut stage = Stage::attached();
    let root = stage.root();
    for n in 0..5_000 {
        let (_, handle) = stage.create(&root, &format!("f{n}"));
        stage.call(Call::Release { handles: vec![handle] });
    }
    for n in 0..5_000 {
        assert!(matches!(stage.look(&root, &format!("f{n}")), Ok(Reply::Looked(Some(_)))));
    }
    stage.check_fids();
    assert!(stage.server.fids.len() <= 4_100, "{} fids", stage.server.fids.len());
}

#[test]
fn who_was_not_asked_was_not_silent() {
    let mut stage = Stage::attached();
    let root = stage.root();
    stage.later(Span::from_secs(100));
    let id = stage.call(Call::GetAttr { node: root });
    stage.later(Span::from_millis(5));
    assert!(stage.events.is_empty() && stage.session.is_linked(), "{:?}", stage.events);
    assert_eq!(stage.asked.len(), 1, "and is not asked whether it is there: {:?}", stage.asked);
    stage.serve();
    assert!(stage.response(id).is_some());
}

#[test]
fn a_server_that_says_nothing_is_asked_and_then_given_up() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let id = stage.call(Call::GetAttr { node: root });
    let due = stage.drain();
    assert_eq!(due, stage.now.after(Span::from_secs(20)));
    stage.later(Span::from_secs(20));
    assert_eq!(stage.asked.len(), 2, "it is asked whether it is there");
    stage.later(Span::from_secs(40));
    assert!(matches!(stage.events.pop_front(), Some(Event::Lapsed { .. })));
    assert!(stage.session.wants_connection().is_some());
    stage.asked.clear();
    stage.frames = FrameReader::new(1 << 20);
    stage.session.handle_connect(stage.now);
    stage.drain();
    stage.serve();
    assert!(matches!(stage.events.pop_front(), Some(Event::Restored { kept: false, .. })));
    assert!(stage.response(id).is_none(), "first what was open is claimed");
    stage.session.handle_reclaimed(stage.now);
    stage.drain();
    stage.serve();
    assert!(matches!(stage.response(id), Some(Response { result: Ok(Reply::Attr(..)), .. })));
}

#[test]
fn nobody_there_is_one_error() {
    let mut stage = Stage::silent();
    stage.later(Span::from_secs(30));
    let Some(Event::Lost { why }) = stage.events.pop_front() else { panic!("it is lost") };
    assert!(why.contains("does not answer"), "{why}");
    assert!(stage.session.is_lost());
}

/// What each wrong beginning is answered with: one line that says why.
#[test]
fn servers_of_another_kind_are_refused_in_one_line() {
    let wrong: [(Rmessage, &str); 6] = [
        (Rmessage::Version { msize: 65_536, version: b"unknown".to_vec() }, "\"unknown\""),
        (Rmessage::Version { msize: 65_536, version: b"9P2000".to_vec() }, "\"9P2000\""),
        (Rmessage::Version { msize: 100, version: VERSION.to_vec() }, "100 bytes"),
        (Rmessage::Version { msize: 1 << 24, version: VERSION.to_vec() }, "16777216 bytes"),
        (Rmessage::Lerror { errno: 5 }, "EIO"),
        (Rmessage::Clunk {}, "Rclunk"),
    ];
    for (answer, says) in wrong {
        let mut stage = Stage::silent();
        let (tag, _) = stage.asked.pop_front().unwrap();
        stage.answer(tag, &answer);
        let events: Vec<Event> = stage.events.drain(..).collect();
        let [Event::Lost { why }] = &events[..] else { panic!("{answer:?}: {events:?}") };
        assert!(why.contains(says) && !why.contains('\n'), "{why}");
    }
}

#[test]
fn a_broken_rule_ends_the_session_with_one_line() {
    type Breaks = fn(&mut Stage, u16) -> Vec<u8>;
    let breaks: [(&str, Breaks); 8] = [
        ("tag 77", |_, _| Rmessage::Clunk {}.encode(77)),
        ("Rreadlink", |_, tag| Rmessage::Readlink { target: b"x".to_vec() }.encode(tag)),
        ("shorter", |_, _| vec![3, 0, 0, 0, 25, 0, 0]),
        ("longer", |_, _| vec![0, 0, 0, 0x7f, 25, 0, 0]),
        ("left over", |_, tag| {
            let mut bytes = Rmessage::Lerror { errno: 1 }.encode(tag);
            bytes.extend([0; 4]);
            bytes[0] += 4;
            bytes
        }),
        ("type 99", |_, tag| vec![7, 0, 0, 0, 99, tag.to_le_bytes()[0], tag.to_le_bytes()[1]]),
        ("tag", |_, tag| {
            [Rmessage::Lerror { errno: 1 }.encode(tag), Rmessage::Lerror { errno: 1 }.encode(tag)].concat()
        }),
        ("type 24", |_, tag| vec![7, 0, 0, 0, 24, tag.to_le_bytes()[0], tag.to_le_bytes()[1]]),
    ];
    for (says, bytes) in breaks {
        let mut stage = Stage::attached();
        let root = stage.root();
        stage.call(Call::GetAttr { node: root });
        let (tag, _) = stage.asked.pop_front().unwrap();
        let bytes = bytes(&mut stage, tag);
        stage.session.handle_input(stage.now, &bytes);
        stage.drain();
        let lost = stage.events.iter().find_map(|event| match event {
            Event::Lost { why } => Some(why.clone()),
            _ => None,
        });
        let why = lost.unwrap_or_else(|| panic!("{says}: {:?}", stage.events));
        assert!(why.contains(says), "{says}: {why}");
    }
}

#[test]
fn more_than_was_asked_for_is_no_answer() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let (file, handle) = stage.create(&root, "f");
    for (call, answer) in [
        (
            Call::Read { node: file.clone(), handle: Some(handle), offset: 0, length: 4 },
            Rmessage::Read { data: Data(vec![0; 5]) },
        ),
        (
            Call::Lookup { dir: root.clone(), name: name("f") },
            Rmessage::Walk { qids: Few(vec![Qid::default(), Qid::default()]) },
        ),
    ] {
        let mut stage = Stage::attached();
        let (other, theirs) = stage.create(&root, "f");
        assert_eq!((&other, theirs), (&file, handle));
        stage.call(call);
        let (tag, _) = stage.asked.pop_front().unwrap();
        stage.answer(tag, &answer);
        assert!(stage.session.is_lost(), "{answer:?}");
    }
}

/// A call of each kind to a server that fails everything: each is answered, and nothing else happens.
#[test]
fn errors_to_everything_are_answers() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let (file, handle) = stage.create(&root, "f");
    let dir = stage.mkdir(&root, "d");
    let link = Place { node: NodeId { ino: 77, generation: 3 }, hint: Some((root.node, name("s"))) };
    let open = Access { read: true, write: true, truncate: true, direct: false, sync: true };
    let lock = |wait| Call::Lock {
        node: file.clone(),
        owner: 1,
        flock: false,
        kind: LockKind::Write,
        start: 0,
        end: 9,
        wait,
        pid: 1,
        reclaim: false,
    };
    let calls = vec![
        Call::Lookup { dir: root.clone(), name: name("x") },
        Call::Walk { node: file.node, names: vec![name("f")] },
        Call::GetAttr { node: file.clone() },
        Call::List { dir: dir.clone() },
        Call::ReadLink { node: link },
        Call::Xattrs { node: file.clone() },
        Call::Xattr { node: file.clone(), name: b"user.x".to_vec() },
        Call::StatFs { node: root.clone() },
        Call::Open { node: file.clone(), access: open },
        Call::Read { node: file.clone(), handle: Some(handle), offset: 0, length: 1 << 20 },
        Call::Read { node: file.clone(), handle: None, offset: 0, length: 9 },
        Call::Seek { node: file.clone(), handle: Some(handle), offset: 0, data: true },
        Call::GetFlags { node: file.clone() },
        lock(false),
        lock(true),
        Call::Unlock { node: file.clone(), owner: 1, flock: false, start: 0, end: 9 },
        Call::Reopen { node: file.clone(), handle: Handle(900), access: open },
        Call::Create { dir: dir.clone(), name: name("n"), mode: 0, umask: 0, exclusive: false, access: open },
        Call::Mkdir { dir: dir.clone(), name: name("n"), mode: 0, umask: 0 },
        Call::Symlink { dir: dir.clone(), name: name("n"), target: b"t".to_vec() },
        Call::Link { node: file.clone(), dir: dir.clone(), name: name("n") },
        Call::Unlink { dir: root.clone(), name: name("f"), keep: Some(file.node) },
        Call::Rmdir { dir: root.clone(), name: name("d") },
        Call::Rename {
            from: root.clone(),
            name: name("f"),
            to: dir.clone(),
            new_name: name("g"),
            no_replace: false,
            exchange: false,
            keep: None,
        },
        Call::SetAttr { node: file.clone(), handle: Some(handle), set: nigh_types::SetAttr::default() },
        written(&file, handle, &[7; 100_000], false),
        written(&file, handle, &[7; 100], true),
        Call::SetXattr {
            node: file.clone(),
            name: b"user.x".to_vec(),
            value: vec![1],
            flags: 0,
            kill_sgid: false,
        },
        Call::RemoveXattr { node: file.clone(), name: b"user.x".to_vec() },
        Call::Fsync { node: file.clone(), handle: Some(handle), data_only: true },
        Call::Fsync { node: dir, handle: None, data_only: false },
    ];
    for errno in [5, 2, 116, 13, 95, 0, 70_000, u32::MAX] {
        for call in calls.clone() {
            let text = format!("{call:?}");
            let id = stage.call(call);
            while let Some((tag, _)) = stage.asked.pop_front() {
                stage.answer(tag, &Rmessage::Lerror { errno });
            }
            let response = stage.response(id).unwrap_or_else(|| panic!("no answer to {text} by {errno}"));
            let may = ["Xattrs", "Unlock", "Lookup"];
            // What is open is told from memory where it has lost its name.
            let gone = matches!(errno, 2 | 116);
            let fine = gone || response.result.is_err() || may.iter().any(|kind| text.starts_with(kind));
            assert!(fine, "{text}: {response:?}");
        }
        assert!(stage.session.is_linked());
    }
}

#[test]
fn what_nobody_waits_for_is_called_off_and_its_fid_let_go() {
    // The answer may come before the server sees that, or never.
    for answered in [true, false] {
        let mut stage = Stage::attached();
        let root = stage.root();
        stage.create(&root, "f");
        let before = stage.server.fids.len();
        let id = stage.call(Call::Lookup { dir: root.clone(), name: name("f") });
        let (walk_tag, walk) = stage.asked.pop_front().unwrap();
        stage.session.handle_cancel(stage.now, id);
        stage.drain();
        assert!(matches!(stage.response(id), Some(Response { result: Err(Errno::INTR), .. })));
        let (flush_tag, flush) = stage.asked.pop_front().unwrap();
        assert_eq!(flush, Tmessage::Flush { tag: walk_tag });
        if answered {
            let answer = stage.server.answer(stage.now, &walk);
            stage.answer(walk_tag, &answer);
        }
        // Its tag is nobody's until the flush is answered.
        for _ in 0..10 {
            stage.call(Call::GetAttr { node: root.clone() });
        }
        assert!(stage.asked.iter().all(|(tag, _)| *tag != walk_tag), "answered: {answered}");
        stage.answer(flush_tag, &Rmessage::Flush {});
        stage.check_fids();
        assert_eq!(stage.server.fids.len(), before);
    }
}

#[test]
fn what_was_called_off_is_not_made_again_after_a_reconnect() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let made = stage.call(Call::Mkdir { dir: root.clone(), name: name("d"), mode: 0o755, umask: 0 });
    let looked = stage.call(Call::GetAttr { node: root.clone() });
    stage.session.handle_cancel(stage.now, made);
    stage.drain();
    assert!(stage.response(made).is_none(), "a change is answered when it is done");
    stage.reconnect();
    assert!(matches!(stage.response(made), Some(Response { result: Err(Errno::INTR), .. })));
    stage.session.handle_reclaimed(stage.now);
    stage.drain();
    stage.serve();
    assert!(stage.response(looked).is_some());
    assert_eq!(stage.server.count("Mkdir"), 0, "nobody waited for it");
}

#[test]
fn a_file_is_appended_to_after_a_reconnect() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let dir = stage.mkdir(&root, "d");
    let (file, handle) = stage.create(&dir, "log");
    stage.done(written(&file, handle, b"one", true)).result.unwrap();
    stage.reconnect();
    let access = Access { read: true, write: true, truncate: false, direct: false, sync: false };
    let reopen = Call::Reopen { node: file.clone(), handle, access };
    if stage.done(reopen.clone()).result == Err(Errno::STALE) {
        let names = vec![name("d"), name("log")];
        assert_eq!(stage.done(Call::Walk { node: file.node, names }).result, Ok(Reply::Done));
        stage.done(reopen).result.unwrap();
    }
    stage.session.handle_reclaimed(stage.now);
    stage.drain();
    let wrote = stage.done(written(&file, handle, b"two", true)).result;
    assert_eq!(wrote, Ok(Reply::Written { offset: 3, count: 3 }));
}

#[test]
fn more_messages_than_tags_wait_for_one() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let (file, handle) = stage.create(&root, "f");
    // Each is 256 messages of the least size that can be agreed on.
    let mut stage = {
        stage.server.most = 8_192;
        stage.reconnect();
        stage.session.handle_reclaimed(stage.now);
        stage.drain();
        stage
    };
    let access = Access { read: true, write: true, truncate: false, direct: false, sync: false };
    stage.done(Call::Reopen { node: file.clone(), handle, access }).result.unwrap();
    let data = vec![7; 2 << 20];
    let writes: Vec<CallId> = (0..20).map(|_| stage.call(written(&file, handle, &data, false))).collect();
    assert!(stage.asked.len() <= 4_096, "{} are out", stage.asked.len());
    stage.serve();
    for id in writes {
        let count = data.len() as u64;
        assert_eq!(stage.response(id).map(|r| r.result), Some(Ok(Reply::Written { offset: 0, count })));
    }
    stage.check_fids();
}

/// Each uid is attached once, and reaches by the path what others have found.
#[test]
fn each_user_has_a_root_of_its_own() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let dir = stage.mkdir(&root, "d");
    let inner = stage.mkdir(&dir, "e");
    let before = stage.server.count("Attach");
    for uid in [1000, 1001, 1000, 1000] {
        let id = stage.call_as(uid, Call::GetAttr { node: inner.clone() });
        let attach = stage.asked.iter().find_map(|(_, message)| match message {
            Tmessage::Attach { uid, .. } => Some(*uid),
            _ => None,
        });
        assert!(attach.is_none_or(|as_whom| as_whom == uid), "{attach:?}");
        stage.serve();
        assert!(matches!(stage.response(id), Some(Response { result: Ok(Reply::Attr(..)), .. })));
    }
    assert_eq!(stage.server.count("Attach") - before, 2);
}

#[test]
fn a_listing_that_does_not_go_on_ends_the_session() {
    let mut stage = Stage::attached();
    let root = stage.root();
    stage.call(Call::List { dir: root });
    let mut turns = 0;
    while let Some((tag, message)) = stage.asked.pop_front() {
        let answer = match message {
            Tmessage::Readdir { .. } => {
                let mut bytes = vec![0; 13];
                bytes.extend(0u64.to_le_bytes());
                bytes.push(8);
                bytes.extend([1, 0, b'x']);
                Rmessage::Readdir { entries: Data(bytes) }
            }
            other => stage.server.answer(stage.now, &other),
        };
        stage.answer(tag, &answer);
        turns += 1;
        assert!(turns < 100, "it goes on and on");
    }
    assert!(stage.session.is_lost());
}

#[test]
fn grants_are_times_and_say_of_what() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let covers = |response: &Response| -> Vec<Covers> {
        response
            .grants
            .iter()
            .inspect(|grant| {
                assert!(!grant.recallable && grant.term == Term::Limited(Span::from_secs(1)));
            })
            .map(|grant| grant.covers)
            .collect()
    };
    let missing = stage.done(Call::Lookup { dir: root.clone(), name: name("x") });
    assert_eq!(covers(&missing), [Covers::Absence]);
    stage.mkdir(&root, "d");
    let found = stage.done(Call::Lookup { dir: root.clone(), name: name("d") });
    assert_eq!(covers(&found), [Covers::Entry, Covers::Inode]);
    let listed = stage.done(Call::List { dir: root });
    assert_eq!(covers(&listed), [Covers::Names, Covers::Inode]);
}

/// A server whose locks are lost while they are made stronger (flock(2)), and another machine takes them.
#[test]
fn a_lock_that_cannot_be_made_stronger_is_held_as_before() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let (file, _) = stage.create(&root, "f");
    let lock = |kind| Call::Lock {
        node: file.clone(),
        owner: 1,
        flock: true,
        kind,
        start: 0,
        end: 0,
        wait: false,
        pid: 1,
        reclaim: false,
    };
    assert_eq!(stage.done(lock(LockKind::Read)).result, Ok(Reply::Done));
    let id = stage.call(lock(LockKind::Write));
    let mut kinds = Vec::new();
    while let Some((tag, message)) = stage.asked.pop_front() {
        let answer = match &message {
            Tmessage::Lock { kind, .. } => {
                kinds.push(*kind);
                let status = match kind {
                    1 => nigh_ninep::LockStatus::Blocked,
                    _ => nigh_ninep::LockStatus::Granted,
                };
                Rmessage::Lock { status }
            }
            other => stage.server.answer(stage.now, other),
        };
        stage.answer(tag, &answer);
    }
    assert_eq!(stage.response(id).map(|r| r.result), Some(Err(Errno::AGAIN)));
    assert_eq!(kinds, [1, 0], "it is taken again as it was");
}

#[test]
fn who_waits_for_locks_keeps_nobody_from_unlocking() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let (file, _) = stage.create(&root, "f");
    let lock = |owner, wait| Call::Lock {
        node: file.clone(),
        owner,
        flock: false,
        kind: LockKind::Write,
        start: 0,
        end: u64::MAX,
        wait,
        pid: 1,
        reclaim: false,
    };
    assert_eq!(stage.done(lock(0, false)).result, Ok(Reply::Done));
    let waiting: Vec<CallId> = (1..=600).map(|owner| stage.call(lock(owner, true))).collect();
    let unlock = Call::Unlock { node: file.clone(), owner: 0, flock: false, start: 0, end: u64::MAX };
    assert_eq!(stage.done(unlock).result, Ok(Reply::Done));
    let granted = waiting.iter().filter(|id| stage.response(**id).is_some()).count();
    assert_eq!(granted, 1, "one of them has it");
    assert!(stage.asked.is_empty(), "and the others ask the server nothing: {:?}", stage.asked.len());
}

#[test]
fn open_files_are_read_by_several_messages_in_flight() {
    let mut stage = Stage::attached();
    stage.server.most = 65_536;
    let root = stage.root();
    let (file, handle) = stage.create(&root, "f");
    let data: Vec<u8> = (0..1_000_000u32).map(|n| n.to_le_bytes()[0]).collect();
    stage.done(written(&file, handle, &data, false)).result.unwrap();
    let id = stage.call(Call::Read { node: file.clone(), handle: Some(handle), offset: 0, length: 1 << 20 });
    let reads = stage.asked.iter().filter(|(_, message)| matches!(message, Tmessage::Read { .. })).count();
    assert!(reads >= 16, "{reads} are in flight");
    stage.serve();
    assert_eq!(stage.response(id).map(|r| r.result), Some(Ok(Reply::Data(data))));
    let opened = stage.done(read_write(&file));
    assert!(opened.result.is_ok() && mask::BASIC == 0x7ff);
}
