//! A session against a server, message by message and in virtual time.

use crate::stage::{Stage, config, name, read_write, written};
use nigh_ninep::{Config, FrameReader, Rmessage, Times, Tmessage, mask};
use nigh_remote::{Event, Remote, ResumableRemote};
use nigh_types::{
    Access, Call, CallId, Errno, Handle, LeaseScope, LockKind, NodeRef, Reply, Response, SetAttr, Span, Term,
};

#[test]
fn every_fid_is_clunked() {
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
        assert_eq!(stage.look(&dir, "none"), Ok(Reply::Entry(None)));
        stage.done(Call::List { dir: dir.clone() }).result.unwrap();
        let link = Call::Link { node: file.clone(), dir: root.clone(), name: name("link") };
        stage.done(link).result.unwrap();
        let _ = stage.look(&root, "link");
        stage.call(Call::Release { handles: vec![handle] });
        for (dir, leaf) in [(&dir, "file"), (&root, "link")] {
            let unlink = Call::Unlink { dir: dir.clone(), name: name(leaf), keep: Some(file.node) };
            let Ok(Reply::Removed { pinned: kept, .. }) = stage.done(unlink).result else {
                panic!("not removed")
            };
            stage.call(Call::Release { handles: kept.into_iter().collect() });
        }
        stage.done(Call::Rmdir { dir: root.clone(), name: name("dir") }).result.unwrap();
        stage.check_fids();
        assert_eq!(stage.server.fids.len(), before, "round {round}");
    }
}

/// Ten thousand files are known, and few of them have fids.
#[test]
fn fids_are_kept_for_recently_used_nodes() {
    let mut stage = Stage::attached();
    let root = stage.root();
    for n in 0..5_000 {
        let (_, handle) = stage.create(&root, &format!("f{n}"));
        stage.call(Call::Release { handles: vec![handle] });
    }
    for n in 0..5_000 {
        assert!(matches!(stage.look(&root, &format!("f{n}")), Ok(Reply::Entry(Some(_)))));
    }
    stage.check_fids();
    assert!(stage.server.fids.len() <= 4_100, "{} fids", stage.server.fids.len());
}

#[test]
fn idle_server_is_not_counted_as_silent() {
    let mut stage = Stage::attached();
    let root = stage.root();
    stage.later(Span::from_secs(100));
    let id = stage.call(Call::GetAttr { node: root });
    stage.later(Span::from_millis(5));
    assert!(stage.events.is_empty() && stage.session.is_connected(), "{:?}", stage.events);
    assert_eq!(stage.asked.len(), 1, "and is not asked whether it is there: {:?}", stage.asked);
    stage.serve();
    assert!(stage.response(id).is_some());
}

#[test]
fn silent_server_is_probed_and_then_disconnected() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let id = stage.call(Call::GetAttr { node: root });
    let due = stage.drain();
    assert_eq!(due, stage.now.after(Span::from_secs(20)));
    stage.later(Span::from_secs(20));
    assert_eq!(stage.asked.len(), 2, "it is asked whether it is there");
    stage.later(Span::from_secs(40));
    assert!(matches!(stage.events.pop_front(), Some(Event::Expired { .. })));
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
fn cancelled_request_is_flushed_and_its_fid_clunked() {
    // The reply may come before the server handles the flush, or never.
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
        // Its tag is not reused until the flush gets its reply.
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
fn cancelled_call_is_not_repeated_after_reconnect() {
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
    assert_eq!(stage.server.count("Mkdir"), 0, "no caller waited for it");
}

#[test]
fn append_works_after_reconnect() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let dir = stage.mkdir(&root, "d");
    let (file, handle) = stage.create(&dir, "log");
    stage.done(written(&file, handle, b"one", true)).result.unwrap();
    stage.reconnect();
    let access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    let reopen = Call::Reopen { node: file.clone(), handle, access };
    if stage.done(reopen.clone()).result == Err(Errno::STALE) {
        let names = vec![name("d"), name("log")];
        assert_eq!(stage.done(Call::ResolvePath { node: file.node, names }).result, Ok(Reply::Done));
        stage.done(reopen).result.unwrap();
    }
    stage.session.handle_reclaimed(stage.now);
    stage.drain();
    let wrote = stage.done(written(&file, handle, b"two", true)).result;
    assert_eq!(wrote, Ok(Reply::Written { offset: 3, count: 3 }));
}

#[test]
fn messages_beyond_tag_limit_wait_for_free_tag() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let (file, handle) = stage.create(&root, "f");
    // Each needs 256 messages of the smallest size that can be agreed on.
    let mut stage = {
        stage.server.most = 8_192;
        stage.reconnect();
        stage.session.handle_reclaimed(stage.now);
        stage.drain();
        stage
    };
    let access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
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

/// Each uid is attached once, and reaches nodes by paths that other users found.
#[test]
fn each_user_attaches_its_own_root() {
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
fn ninep_grants_carry_configured_terms_and_scopes() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let covers = |response: &Response| -> Vec<LeaseScope> {
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
    assert_eq!(covers(&missing), [LeaseScope::NegativeDentry]);
    stage.mkdir(&root, "d");
    let found = stage.done(Call::Lookup { dir: root.clone(), name: name("d") });
    assert_eq!(covers(&found), [LeaseScope::Dentry, LeaseScope::Attributes]);
    let listed = stage.done(Call::List { dir: root });
    assert_eq!(covers(&listed), [LeaseScope::Directory, LeaseScope::Attributes]);
}

/// A server that releases a lock while it is upgraded (flock(2)), and another machine that takes it.
#[test]
fn failed_lock_upgrade_keeps_old_lock_or_reports_its_loss() {
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
fn waiting_lock_calls_do_not_block_unlock() {
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
fn large_read_uses_several_messages_in_flight() {
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

/// A file that is being kept open without a reply is released before it is open.
#[test]
fn file_released_while_being_pinned_is_closed() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let (file, handle) = stage.create(&root, "f");
    stage.call(Call::Release { handles: vec![handle] });
    stage.check_fids();
    let before = stage.server.fids.len();
    let chosen = Handle(Handle::CLIENT_ASSIGNED | 1);
    stage.call(Call::PinOpen { node: file.clone(), names: vec![name("f")], handle: chosen });
    stage.call(Call::Release { handles: vec![chosen] });
    stage.check_fids();
    assert_eq!(stage.server.fids.len(), before);
}

/// A listing says of each name that it exists, and of all others that they do not.
#[test]
fn listing_term_is_minimum_of_name_and_absence_terms() {
    let (short, long) = (Term::Limited(Span::from_millis(300)), Term::Limited(Span::from_secs(7)));
    let none = Term::Limited(Span::ZERO);
    let times = [
        (short, long, Some(short)),
        (long, short, Some(short)),
        (Term::Session, short, Some(short)),
        (short, Term::Session, Some(short)),
        (Term::Session, Term::Session, Some(Term::Session)),
        (Term::Session, none, None),
        (none, Term::Session, None),
    ];
    for (names, absent, expected) in times {
        let mut stage =
            Stage::attached_with(Config { times: Times { names, absent, attributes: long }, ..config() });
        let root = stage.root();
        let made = stage.done(Call::Mkdir { dir: root.clone(), name: name("d"), mode: 0o755, umask: 0 });
        let listed = stage.done(Call::List { dir: root });
        for (what, response) in [("made", made), ("listed", listed)] {
            let terms = response.grants.iter().filter(|grant| grant.covers == LeaseScope::Directory);
            let terms: Vec<Term> = terms.map(|grant| grant.term).collect();
            assert_eq!(terms, Vec::from_iter(expected), "{what}: names {names:?}, absence {absent:?}");
        }
    }
}

/// The attributes of such a file come from its own fid, as long as that is still the file's.
#[test]
fn renamed_and_unlinked_open_file_keeps_attributes() {
    let mut stage = Stage::attached();
    let root = stage.root();
    let (file, handle) = stage.create(&root, "f");
    stage.done(written(&file, handle, b"some data", false)).result.unwrap();
    let rename = Call::Rename {
        from: root.clone(),
        name: name("f"),
        to: root.clone(),
        new_name: name("g"),
        no_replace: false,
        exchange: false,
        whiteout: false,
        keep: None,
    };
    stage.done(rename).result.unwrap();
    let unlink = Call::Unlink { dir: root.clone(), name: name("g"), keep: None };
    stage.done(unlink).result.unwrap();
    let bare = NodeRef::without_hint(file.node);
    let Ok(Reply::Attr(_, attr)) = stage.done(Call::GetAttr { node: bare.clone() }).result else {
        panic!("it is open")
    };
    assert_eq!((attr.size, attr.nlink), (9, 0));
    let set = SetAttr { size: Some(4), ..SetAttr::default() };
    let cut = stage.done(Call::SetAttr { node: bare, handle: Some(handle), set });
    assert!(matches!(cut.result, Ok(Reply::Attr(_, attr)) if attr.size == 4), "{cut:?}");
}

/// All tags may be in use, and messages in flight are flushed.
#[test]
fn flush_is_sent_without_waiting_for_free_tag() {
    let mut stage = Stage::attached();
    stage.server.most = 8_192;
    let root = stage.root();
    let (file, _) = stage.create(&root, "f");
    stage.reconnect();
    stage.session.handle_reclaimed(stage.now);
    stage.drain();
    let read = Call::Read { node: file, handle: None, offset: 0, length: 1 << 20 };
    assert!(stage.done(read.clone()).result.is_ok());
    let reads: Vec<CallId> = (0..40).map(|_| stage.call(read.clone())).collect();
    let out = stage.asked.len();
    for id in &reads {
        stage.session.handle_cancel(stage.now, *id);
    }
    stage.drain();
    let flushes = stage.asked.iter().filter(|(_, message)| matches!(message, Tmessage::Flush { .. })).count();
    assert_eq!(flushes, out, "each is called off");
    stage.serve();
    stage.check_fids();
    assert!(matches!(stage.done(Call::GetAttr { node: root }).result, Ok(Reply::Attr(..))));
}
