//! Servers that break the protocol: one clear error, no panic, and no endless wait.

use crate::stage::{Stage, config, name, written};
use nigh_ninep::{Config, Data, Qid, Rmessage, ShortSequence, Tmessage, VERSION};
use nigh_remote::{Event, Remote, ResumableRemote};
use nigh_types::{Access, Call, Errno, Handle, LockKind, NodeId, NodeRef, Response, Span};

#[test]
fn ninep_silent_server_at_handshake_gives_one_error() {
    let mut stage = Stage::silent();
    stage.later(Span::from_secs(30));
    let Some(Event::Lost { why }) = stage.events.pop_front() else { panic!("it is lost") };
    assert!(why.contains("does not answer"), "{why}");
    assert!(stage.session.is_lost());
}

/// The reaction to each wrong handshake: one line that says why.
#[test]
fn ninep_handshake_of_wrong_server_fails_with_one_line() {
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
fn ninep_protocol_error_ends_session_with_one_line() {
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
fn ninep_reply_larger_than_request_ends_session() {
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
            Rmessage::Walk { qids: ShortSequence(vec![Qid::default(), Qid::default()]) },
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

/// A call of each kind.
fn each(root: &NodeRef, file: &NodeRef, dir: &NodeRef, handle: Handle) -> Vec<Call> {
    let link = NodeRef { node: NodeId { ino: 77, generation: 3 }, path_hint: Some((root.node, name("s"))) };
    let open = Access { read: true, write: true, truncate: true, direct: false, sync: true, append: false };
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
    vec![
        Call::Lookup { dir: root.clone(), name: name("x") },
        Call::ResolvePath { node: file.node, names: vec![name("f")] },
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
            whiteout: false,
            keep: None,
        },
        Call::SetAttr { node: file.clone(), handle: Some(handle), set: nigh_types::SetAttr::default() },
        written(file, handle, &[7; 100_000], false),
        written(file, handle, &[7; 100], true),
        Call::SetXattr {
            node: file.clone(),
            name: b"user.x".to_vec(),
            value: vec![1],
            flags: 0,
            kill_sgid: false,
        },
        Call::RemoveXattr { node: file.clone(), name: b"user.x".to_vec() },
        Call::Fsync { node: file.clone(), handle: Some(handle), data_only: true },
        Call::Fsync { node: dir.clone(), handle: None, data_only: false },
    ]
}

/// A call of each kind to a server that fails everything: each gets a reply, and nothing else happens.
#[test]
fn ninep_server_failing_everything_yields_error_replies() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let (file, handle) = stage.create(&root, "f");
    let dir = stage.mkdir(&root, "d");
    let calls = each(&root, &file, &dir, handle);
    for errno in [5, 2, 116, 13, 95, 0, 70_000, u32::MAX] {
        for call in calls.clone() {
            let text = format!("{call:?}");
            let id = stage.call(call);
            while let Some((tag, _)) = stage.asked.pop_front() {
                stage.answer(tag, &Rmessage::Lerror { errno });
            }
            let response = stage.response(id).unwrap_or_else(|| panic!("no answer to {text} by {errno}"));
            let may = ["Xattrs", "Unlock", "Lookup"];
            // An open file that has lost its name is answered from memory.
            let gone = matches!(errno, 2 | 116);
            let fine = gone || response.result.is_err() || may.iter().any(|kind| text.starts_with(kind));
            assert!(fine, "{text}: {response:?}");
        }
        assert!(stage.session.is_connected());
    }
}

/// Lists the root at a server that always has one more name, at the offset after the requested one.
fn list_without_end(stage: &mut Stage, next: impl Fn(u64) -> u64) -> Option<Response> {
    let root = stage.root();
    let id = stage.call(Call::List { dir: root });
    let mut turns = 0;
    while let Some((tag, message)) = stage.asked.pop_front() {
        let answer = match message {
            Tmessage::Readdir { offset, .. } => {
                let mut bytes = vec![0; 13];
                bytes.extend(next(offset).to_le_bytes());
                bytes.push(8);
                bytes.extend([1, 0, b'x']);
                Rmessage::Readdir { entries: Data(bytes) }
            }
            other => stage.server.answer(stage.now, &other),
        };
        stage.answer(tag, &answer);
        turns += 1;
        assert!(turns < 2_000, "it goes on and on");
    }
    stage.response(id)
}

#[test]
fn ninep_listing_without_progress_ends_session() {
    let mut stage = Stage::attached();
    list_without_end(&mut stage, |_| 0);
    assert!(stage.session.is_lost());
}

#[test]
fn ninep_listing_above_name_limit_fails() {
    let mut stage = Stage::attached_with(Config { most_names: 1_000, ..config() });
    // New offsets for ever, and repeated ones.
    for next in [|offset| offset + 1, |offset| (offset + 1) % 10] {
        let response = list_without_end(&mut stage, next);
        assert_eq!(response.map(|response| response.result), Some(Err(Errno::OVERFLOW)));
        stage.check_fids();
    }
    assert!(stage.session.is_connected());
}
