//! Invariant 9 for the cache: a reply that does not fit its call becomes EPROTO, and an errno is passed on unchanged.

use nigh_cache::{Cache, Caller, Config, Fh, Op, OpReply, Output};
use nigh_types::{
    Access, Attr, Call, CallId, CookieKey, Entries, Entry, Errno, Event, Handle, Kind, Name, NodeId, OpId,
    Reply, Response, SessionParams, SetAttr, Space, Term, Time, WriteFlags, XattrSet,
};

const NOW: Time = Time(1_000_000_000);
const FILE: u64 = 2;
const DIR: u64 = 3;

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn access(write: bool) -> Access {
    Access { read: true, write, truncate: false, direct: false, sync: false, append: false }
}

fn entry(ino: u64, mode: u32) -> Entry {
    let attr = Attr { mode, nlink: 1, ..Attr::default() };
    Entry { id: NodeId { ino, generation: 1 }, attr, target: None, no_xattrs: false }
}

/// Returns the reply or the call that a request led to.
fn ask(cache: &mut Cache, op: OpId, what: Op) -> Result<OpReply, Box<(CallId, Call)>> {
    if let Some(answer) = cache.handle_op(NOW, op, Caller::default(), what) {
        return Ok(answer);
    }
    match cache.poll_output() {
        Output::Call { id, call, .. } => Err(Box::new((id, call))),
        other => panic!("{other:?}"),
    }
}

fn respond(cache: &mut Cache, call: CallId, result: Result<Reply, Errno>) -> Vec<(OpId, OpReply)> {
    cache.handle_event(NOW, Event::Response { call, response: Response::plain(result) });
    let mut answers = Vec::new();
    loop {
        match cache.poll_output() {
            Output::Answer { op, answer } => answers.push((op, answer)),
            Output::Timeout(..) => return answers,
            _ => {}
        }
    }
}

/// A cache whose kernel knows a file, open for writing, and a directory; without grants.
fn prepared() -> (Cache, Fh) {
    let mut cache = Cache::new(Config::default());
    let root = NodeId { ino: 1, generation: 1 };
    let session = SessionParams::plain(root, Attr::default(), CookieKey::default(), Term::Session);
    cache.handle_event(NOW, Event::Attached(session));
    for (leaf, node) in [("f", entry(FILE, 0o100_644)), ("d", entry(DIR, 0o040_755))] {
        let asked = ask(&mut cache, OpId(1), Op::Lookup { dir: 1, name: name(leaf) });
        respond(&mut cache, asked.unwrap_err().0, Ok(Reply::Entry(Some(node))));
    }
    let asked = ask(&mut cache, OpId(2), Op::Open { ino: FILE, access: access(true), append: false });
    let call = asked.unwrap_err().0;
    let attr = entry(FILE, 0o100_644).attr;
    match respond(&mut cache, call, Ok(Reply::Opened { handle: Handle(9), attr })).remove(0) {
        (_, OpReply::Opened(opened)) => (cache, opened.fh),
        other => panic!("{other:?}"),
    }
}

/// Returns one request of each kind that makes a call.
fn requests(fh: Fh) -> Vec<Op> {
    let (ino, dir, leaf) = (FILE, DIR, || name("new"));
    let (mode, umask, access) = (0o644, 0, access(true));
    let xattr = || b"user.one".to_vec();
    let (offset, length) = (0, 10);
    vec![
        Op::Lookup { dir, name: leaf() },
        Op::LookupSelf { ino },
        Op::LookupParent { ino },
        Op::GetAttr { ino },
        Op::SetAttr { ino, fh: None, set: SetAttr { mode: Some(0o600), ..SetAttr::default() } },
        Op::ReadLink { ino },
        Op::Symlink { dir, name: leaf(), target: b"t".to_vec() },
        Op::Mknod { dir, name: leaf(), kind: Kind::Fifo, mode, umask, rdev: 0 },
        Op::Mkdir { dir, name: leaf(), mode, umask },
        Op::Unlink { dir, name: leaf() },
        Op::Rmdir { dir, name: leaf() },
        Op::Rename {
            from: dir,
            name: leaf(),
            to: 1,
            new_name: leaf(),
            no_replace: false,
            exchange: false,
            whiteout: false,
        },
        Op::Link { ino, dir, name: leaf() },
        Op::Open { ino, access, append: false },
        Op::Create { dir, name: leaf(), mode, umask, exclusive: true, access, append: false },
        Op::Tmpfile { dir, mode, umask, access },
        Op::Read { ino, fh, offset, size: 10 },
        Op::Write { ino, fh, offset, data: vec![1], flags: WriteFlags::default() },
        Op::Fsync { ino, fh: Some(fh), data_only: false },
        Op::OpenDir { ino: dir },
        Op::GetXattr { ino, name: xattr(), size: 0 },
        Op::ListXattr { ino, size: 0 },
        Op::SetXattr { ino, name: xattr(), value: vec![1], flags: 0, kill_sgid: false },
        Op::RemoveXattr { ino, name: xattr() },
        Op::StatFs { ino },
        Op::Fallocate { ino, fh, mode: 0, offset, length },
        Op::Seek { ino, fh, offset, data: true },
        Op::CopyRange { ino, fh, offset, to_ino: ino, to_fh: fh, to_offset: 50, length },
        Op::GetFlags { ino },
    ]
}

fn replies() -> Vec<Reply> {
    let node = NodeId { ino: FILE, generation: 1 };
    vec![
        Reply::Entry(None),
        Reply::Attr(node, entry(FILE, 0o100_644).attr),
        Reply::Listed(Entries::default()),
        Reply::Target(b"t".as_slice().into()),
        Reply::Xattrs(XattrSet::default()),
        Reply::Value(vec![1]),
        Reply::Space(Space::default()),
        Reply::Opened { handle: Handle(77), attr: entry(FILE, 0o100_644).attr },
        Reply::Data(vec![1]),
        Reply::Offset(3),
        Reply::Flags(4),
        Reply::Created { entry: entry(50, 0o100_644), handle: None, existed: false },
        Reply::Removed { node, pinned: None },
        Reply::Renamed { moved: node, replaced: None, pinned: None, whiteout: None },
        Reply::Written { offset: 0, count: 1 },
        Reply::Done,
        Reply::Found { node, attr: entry(FILE, 0o100_644).attr, parent_entry: Some((node, name("f"))) },
    ]
}

/// Returns the index in `replies` of the reply that fits a call.
fn fitting(call: &Call) -> usize {
    match call {
        Call::Lookup { .. } => 0,
        Call::GetAttr { .. }
        | Call::SetAttr { .. }
        | Call::Fallocate { .. }
        | Call::SetXattr { .. }
        | Call::RemoveXattr { .. } => 1,
        Call::List { .. } | Call::ListNames { .. } | Call::Prefetch { .. } => 2,
        Call::ReadLink { .. } => 3,
        Call::Xattrs { .. } => 4,
        Call::Xattr { .. } => 5,
        Call::StatFs { .. } => 6,
        Call::Open { .. } | Call::Reopen { .. } => 7,
        Call::Read { .. } => 8,
        Call::Seek { .. } => 9,
        Call::GetFlags { .. } => 10,
        Call::Create { .. }
        | Call::Tmpfile { .. }
        | Call::Mknod { .. }
        | Call::Mkdir { .. }
        | Call::Symlink { .. }
        | Call::Link { .. } => 11,
        Call::Unlink { .. } | Call::Rmdir { .. } => 12,
        Call::Rename { .. } => 13,
        Call::Write { .. } | Call::CopyRange { .. } => 14,
        Call::Fsync { .. }
        | Call::ResolvePath { .. }
        | Call::Release { .. }
        | Call::PrefetchCredit { .. }
        | Call::PinOpen { .. }
        | Call::Lock { .. }
        | Call::Unlock { .. }
        | Call::GetLock { .. } => 15,
        Call::LookupNumber { .. } => 16,
    }
}

#[test]
fn any_reply_to_any_call_answers_its_request_once() {
    let plain = [9, 10, 15];
    for request in requests(prepared().1) {
        for (at, reply) in replies().into_iter().enumerate() {
            let (mut cache, _) = prepared();
            let (call, what) = *ask(&mut cache, OpId(10), request.clone()).unwrap_err();
            let fits = at == fitting(&what);
            let answers = respond(&mut cache, call, Ok(reply.clone()));
            assert_eq!(answers.len(), 1, "{what:?}: {reply:?} is {answers:?}");
            let (op, answer) = &answers[0];
            assert_eq!(*op, OpId(10));
            // The protocol session checks small replies kind by kind (`native/reply_validator.rs`).
            let small = plain.contains(&at) && plain.contains(&fitting(&what));
            if !fits && !small {
                assert_eq!(*answer, OpReply::Failed(Errno::PROTO), "{what:?}: {reply:?}");
            } else if at == 11 && matches!(what, Call::Create { .. } | Call::Tmpfile { .. }) {
                assert_eq!(*answer, OpReply::Failed(Errno::PROTO), "without a handle");
            } else {
                assert!(!matches!(answer, OpReply::Failed(Errno::PROTO)), "{what:?}: {answer:?}");
            }
            assert_eq!(cache.gauges().pending_operations, 0);
        }
    }
}

#[test]
fn each_errno_is_passed_on() {
    for request in requests(prepared().1) {
        for errno in [Errno::IO, Errno::ACCES, Errno::NOENT, Errno::EXIST, Errno::NOTEMPTY] {
            let (mut cache, _) = prepared();
            let (call, _) = *ask(&mut cache, OpId(10), request.clone()).unwrap_err();
            let answers = respond(&mut cache, call, Err(errno));
            assert_eq!(answers, [(OpId(10), OpReply::Failed(errno))], "{request:?}");
            assert_eq!(cache.gauges().pending_operations, 0);
        }
    }
}

/// The kernel uses an unknown inode number, or a file that is not open.
#[test]
fn unknown_inode_numbers_and_handles_send_no_request() {
    let unknown = |op: Op| match op {
        Op::Lookup { name, .. } => Op::Lookup { dir: 99, name },
        Op::GetAttr { .. } => Op::GetAttr { ino: 99 },
        Op::LookupSelf { .. } => Op::LookupSelf { ino: 99 },
        Op::LookupParent { .. } => Op::LookupParent { ino: 99 },
        Op::ReadLink { .. } => Op::ReadLink { ino: 99 },
        Op::Unlink { name, .. } => Op::Unlink { dir: 99, name },
        Op::Rmdir { name, .. } => Op::Rmdir { dir: 99, name },
        Op::Mkdir { name, mode, umask, .. } => Op::Mkdir { dir: 99, name, mode, umask },
        Op::Tmpfile { mode, umask, access, .. } => Op::Tmpfile { dir: 99, mode, umask, access },
        Op::Link { dir, name, .. } => Op::Link { ino: 99, dir, name },
        Op::Open { access, append, .. } => Op::Open { ino: 99, access, append },
        Op::OpenDir { .. } => Op::OpenDir { ino: 99 },
        Op::GetFlags { .. } => Op::GetFlags { ino: 99 },
        Op::Read { fh, offset, size, .. } => Op::Read { ino: 99, fh, offset, size },
        Op::SetAttr { fh, set, .. } => Op::SetAttr { ino: 99, fh, set },
        Op::Rename { from, name, new_name, no_replace, exchange, .. } => {
            Op::Rename { from, name, to: 99, new_name, no_replace, exchange, whiteout: false }
        }
        Op::CopyRange { fh, offset, to_ino, to_fh, to_offset, length, .. } => {
            Op::CopyRange { ino: 99, fh, offset, to_ino, to_fh, to_offset, length }
        }
        other => other,
    };
    let (mut cache, fh) = prepared();
    let mut seen = 0;
    for request in requests(fh) {
        let changed = unknown(request.clone());
        if changed != request {
            seen += 1;
            assert_eq!(ask(&mut cache, OpId(10), changed), Ok(OpReply::Failed(Errno::STALE)), "{request:?}");
        }
    }
    assert_eq!(seen, 17);
    let (data, fh) = (vec![1], Fh(99));
    let write = Op::Write { ino: FILE, fh, offset: 0, data, flags: WriteFlags::default() };
    assert_eq!(ask(&mut cache, OpId(10), write), Ok(OpReply::Failed(Errno::BADF)));
    assert_eq!(ask(&mut cache, OpId(10), Op::Release { fh, flock: None }), Ok(OpReply::Done));
}
