//! One sample of every kind of message, call and reply.

use nigh_native::{
    Hello, ID_NAMES, Limits, MAX_VERSION, Message, Refused, Resume, Resumed, SessionParams, Welcome,
};
use nigh_types::*;

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

pub const fn id(ino: u64) -> NodeId {
    NodeId { ino, generation: 1_700_000_000_123_456_789 }
}

pub fn place() -> NodeRef {
    NodeRef { node: id(7), path_hint: Some((id(1), name("file"))) }
}

pub fn dir() -> NodeRef {
    NodeRef::without_hint(id(1))
}

pub fn attr(mode: u32) -> Attr {
    let at = |secs| Timestamp { secs, nanos: 999_999_999 };
    Attr {
        size: 5 << 30,
        blocks: 16,
        mode,
        nlink: 2,
        uid: 1000,
        gid: 100,
        rdev: 0x0103,
        atime: at(1),
        mtime: at(-2),
        ctime: at(3),
        birth_ns: 1_700_000_000_123_456_789,
    }
}

pub fn entry(mode: u32) -> Entry {
    let target = (mode & 0o170_000 == 0o120_000).then(|| b"../target".as_slice().into());
    Entry { id: id(7), attr: attr(mode), target, no_xattrs: true }
}

pub fn access() -> Access {
    Access { read: true, write: false, truncate: true, direct: false, sync: true, append: false }
}

pub fn session() -> SessionParams {
    let (key, term) = (CookieKey(*b"0123456789abcdef"), Term::Limited(Span::from_secs(5)));
    SessionParams {
        supports: Features { acls: true, ..Features::default() },
        guarantees: Guarantees {
            unsupported: vec![UnsupportedGuarantee {
                name: "S4".to_owned(),
                why: "overlayfs".to_owned(),
                by_protocol: false,
            }],
            staleness_bound: "changes are seen within 5 s".to_owned(),
        },
        ids: RemoteIds {
            acts_as: (1000, 100),
            names: vec![
                IdName { kind: IdKind::User, id: 0, name: "root".to_owned() },
                IdName { kind: IdKind::Group, id: 100, name: "users".to_owned() },
            ],
        },
        ..SessionParams::plain(id(1), attr(0o040_755), key, term)
    }
}

/// Hello of a new client.
pub fn hello() -> Hello {
    Hello {
        min_version: MAX_VERSION,
        max_version: MAX_VERSION,
        features: ID_NAMES,
        client: 0x1122_3344_5566_7788,
        incarnation: 9,
        attach: b"/srv/tree".to_vec(),
        term: Term::Session,
        moment: 1_000_000_007,
        resume: None,
    }
}

/// Welcome to a new client.
pub fn welcome() -> Welcome {
    Welcome {
        version: MAX_VERSION,
        features: ID_NAMES,
        session_id: 12,
        session_term: Span::from_secs(15),
        limits: Limits::default(),
        session: session(),
        resumed: None,
    }
}

pub fn queries() -> Vec<Call> {
    let (node, handle) = (place(), Some(Handle(4)));
    vec![
        Call::Lookup { dir: dir(), name: name("x") },
        Call::ResolvePath { node: id(7), names: vec![name("a"), name("b")] },
        Call::GetAttr { node: node.clone() },
        Call::List { dir: dir() },
        Call::ReadLink { node: node.clone() },
        Call::Xattrs { node: node.clone() },
        Call::Xattr { node: node.clone(), name: b"user.a".to_vec() },
        Call::StatFs { node: node.clone() },
        Call::Open { node: node.clone(), access: Access { truncate: false, ..access() } },
        Call::Read { node: node.clone(), handle, offset: 1 << 33, length: 4096 },
        Call::Seek { node: node.clone(), handle: None, offset: 5, data: true },
        Call::GetFlags { node: node.clone() },
        Call::Release { handles: vec![Handle(1), Handle(2)] },
        Call::Lock {
            node: node.clone(),
            owner: 0x8877_6655_4433_2211,
            flock: false,
            kind: LockKind::Write,
            start: 1 << 33,
            end: i64::MAX.cast_unsigned(),
            wait: true,
            pid: 4711,
            reclaim: false,
        },
        Call::Unlock { node: node.clone(), owner: 9, flock: true, start: 0, end: u64::MAX },
        Call::GetLock { node: node.clone(), owner: 9, flock: false, kind: LockKind::Read, start: 3, end: 3 },
        Call::PinOpen {
            node: node.clone(),
            names: vec![name("a"), name("b")],
            handle: Handle(Handle::CLIENT_ASSIGNED | 5),
        },
        Call::Reopen {
            node: node.clone(),
            handle: Handle(4),
            access: Access { truncate: false, ..access() },
        },
        Call::ListNames { dir: dir(), after: Cookie(1 << 40) },
        Call::Prefetch { roots: vec![dir(), node.clone()], order: PrefetchOrder::Name, credit: 1_024 },
        Call::PrefetchCredit { walk: CallId(5), credit: 7, want: Some(node) },
        Call::PrefetchCredit { walk: CallId(5), credit: 0, want: None },
    ]
}

/// At the end, since the seeds of fuzzers count calls.
pub fn later_queries() -> Vec<Call> {
    vec![Call::LookupNumber { ino: id(7).ino }]
}

/// Calls of every kind.
pub fn calls() -> Vec<Call> {
    [queries(), mutations(), later_queries()].concat()
}

pub fn mutations() -> Vec<Call> {
    let (node, handle, x) = (place(), Some(Handle(4)), || name("x"));
    let (mode, umask, offset, length) = (0o644, 0o022, 1 << 33, 10);
    let flags = WriteFlags { append: true, sync: true, ..WriteFlags::default() };
    let stamp = DataVersion { size: 1 << 33, mtime: Timestamp { secs: -7, nanos: 999_999_999 } };
    let since = |under| WriteFlags {
        write_back: true,
        since: Some(WriteBackPrecondition { stamp, under }),
        ..WriteFlags::default()
    };
    let set = SetAttr {
        mode: Some(0o755),
        size: Some(9),
        atime: Some(SetTime::Now),
        mtime: Some(SetTime::At(Timestamp { secs: -5, nanos: 6 })),
        kill_suidgid: true,
        ..SetAttr::default()
    };
    vec![
        Call::Open { node: node.clone(), access: access() },
        Call::Create { dir: dir(), name: x(), mode, umask, exclusive: true, access: access() },
        Call::Tmpfile { dir: dir(), mode, umask, access: access() },
        Call::Mknod { dir: dir(), name: x(), kind: Kind::CharDevice, mode, umask, rdev: 0x0103 },
        Call::Mkdir { dir: dir(), name: x(), mode, umask },
        Call::Symlink { dir: dir(), name: x(), target: b"../target".to_vec() },
        Call::Link { node: node.clone(), dir: dir(), name: x() },
        Call::Unlink { dir: dir(), name: x(), keep: Some(id(7)) },
        Call::Rmdir { dir: dir(), name: x() },
        Call::Rename {
            from: dir(),
            name: x(),
            to: place(),
            new_name: name("y"),
            no_replace: true,
            exchange: false,
            whiteout: false,
            keep: None,
        },
        Call::SetAttr { node: node.clone(), handle, set },
        Call::Write { node: node.clone(), handle, offset, data: b"data".to_vec(), flags },
        Call::Write { node: node.clone(), handle, offset, data: b"data".to_vec(), flags: since(None) },
        Call::Write {
            node: node.clone(),
            handle,
            offset,
            data: b"data".to_vec(),
            flags: since(Some((GrantId(1 << 40), LeaseScope::Data))),
        },
        Call::Fallocate { node: node.clone(), handle, mode: 3, offset, length },
        Call::CopyRange {
            from: place(),
            from_handle: None,
            from_offset: 1,
            to: dir(),
            to_handle: handle,
            to_offset: 2,
            length: u64::MAX,
        },
        Call::SetXattr {
            node: place(),
            name: b"user.a".to_vec(),
            value: vec![0, 255],
            flags: 1,
            kill_sgid: true,
        },
        Call::RemoveXattr { node: place(), name: b"user.a".to_vec() },
        Call::Fsync { node, handle, data_only: true },
    ]
}

pub fn replies() -> Vec<Reply> {
    let file = || entry(0o100_644);
    let handle = Handle(4);
    let xattr = |name: &[u8], value: Option<&[u8]>| (name.into(), value.map(Box::from));
    let space = Space {
        blocks: 1,
        files: 2,
        block_size: 4096,
        fragment_size: 512,
        name_max: 255,
        ..Space::default()
    };
    vec![
        Reply::Entry(None),
        Reply::Entry(Some(entry(0o120_777))),
        Reply::Attr(id(7), attr(0o100_644)),
        Reply::Listed(Entries { entries: vec![(name("a"), file()), (name("b"), entry(0o040_755))] }),
        Reply::Target(b"../target".as_slice().into()),
        Reply::Xattrs(XattrSet { items: vec![xattr(b"user.a", Some(b"1")), xattr(b"user.b", None)] }),
        Reply::Value(vec![1, 2, 3]),
        Reply::Space(space),
        Reply::Opened { handle, attr: attr(0o100_644) },
        Reply::Data(b"data".to_vec()),
        Reply::Offset(1 << 33),
        Reply::Flags(0x10),
        Reply::Created { entry: file(), handle: Some(handle), existed: true },
        Reply::Removed { node: id(7), pinned: None },
        Reply::Renamed { moved: id(7), replaced: Some(id(8)), pinned: Some(handle), whiteout: None },
        Reply::Written { offset: 3, count: 4 },
        Reply::Done,
        Reply::LockConflict(None),
        Reply::LockConflict(Some(LockInfo {
            kind: LockKind::Read,
            start: 1 << 33,
            end: u64::MAX,
            pid: 4711,
        })),
        Reply::Dirents(vec![
            Dirent { name: name("a"), ino: 1 << 33, kind: Some(Kind::File) },
            Dirent { name: name("b"), ino: 7, kind: None },
        ]),
        Reply::Found { node: id(7), attr: attr(0o100_644), parent_entry: Some((id(1), name("x"))) },
        Reply::Found { node: id(1), attr: attr(0o040_755), parent_entry: None },
        Reply::Prefetched(vec![
            PrefetchedDir {
                dir: id(7),
                listed: Some(Entries { entries: vec![(name("a"), file())] }),
                last: false,
            },
            PrefetchedDir { dir: id(8), listed: None, last: true },
        ]),
    ]
}

pub fn grant() -> Grant {
    Grant {
        id: GrantId(3),
        node: id(1),
        covers: LeaseScope::Directory,
        mode: Mode::Read,
        term: Term::Session,
        recallable: true,
        shared: false,
    }
}

pub fn request(call: Call) -> Request {
    let credentials = Credentials { uid: 1000, gid: 100, groups: vec![4, 24], privileges: None };
    let named = call.is_mutation();
    let name = named.then_some(MutationId { client: 0x1122_3344_5566_7788, incarnation: 9, sequence: 1 });
    Request { credentials, mutation_id: name, call }
}

const LEFT: Reply = Reply::Renamed { moved: id(7), replaced: None, pinned: None, whiteout: Some(id(9)) };

/// A rename that leaves a whiteout.
fn leaving() -> Call {
    let mut call = mutations().into_iter().find(|call| matches!(call, Call::Rename { .. })).unwrap();
    if let Call::Rename { whiteout, .. } = &mut call {
        *whiteout = true;
    }
    call
}

/// Groups of named messages: one golden file each.
pub fn all() -> Vec<(&'static str, Vec<(String, Message)>)> {
    let one = |message| vec![(String::new(), message)];
    let requests = calls()
        .into_iter()
        .map(|call| (call.type_name().to_owned(), Message::Request(CallId(5), request(call))));
    let repeated = Call::Mkdir { dir: dir(), name: name("x"), mode: 0o755, umask: 0o022 };
    let again = ("again".to_owned(), Message::Resent(CallId(5), request(repeated)));
    let response = |result| {
        let last = !matches!(result, Ok(Reply::Listed(_)));
        let (after, grants) = (vec![(id(1), attr(0o040_755))], vec![grant()]);
        Message::Response(CallId(5), Response { result, after, grants, last })
    };
    let mut responses: Vec<_> =
        replies().into_iter().map(|reply| (variant(&reply), response(Ok(reply)))).collect();
    responses.push(("error".to_owned(), response(Err(Errno::NOTEMPTY))));
    let recall =
        Recall { id: RecallId(6), node: id(1), covers: LeaseScope::Directory, names: vec![name("x")] };
    let (hold, commit) = update();
    let resuming = Hello { resume: Some(Resume { session_id: 12, received: 345 }), ..hello() };
    let resumed = Welcome { resumed: Some(Resumed { received: 678, lapsed: true }), ..welcome() };
    let limits = Limits { max_bytes: 8 << 20, ..Limits::default() };
    let small = ("of a small server".to_owned(), Message::Welcome(Welcome { limits, ..welcome() }));
    let two = |first: (&str, Message), second: (&str, Message)| {
        [first, second].map(|(name, message)| (name.to_owned(), message)).to_vec()
    };
    let mut welcomes = two(("new", Message::Welcome(welcome())), ("resumed", Message::Welcome(resumed)));
    welcomes.push(small);
    let able = |supports| {
        Message::Welcome(Welcome { session: SessionParams { supports, ..session() }, ..welcome() })
    };
    let believing = able(Features { privileges: true, ..session().supports });
    let finding = able(Features { lookup_number: true, ..session().supports });
    welcomes.extend(two(("that takes privileges", believing), ("that finds numbers", finding)));
    let mut privileged = request(Call::StatFs { node: place() });
    let (users, groups) = (
        vec![IdRange { first: 1001, count: 1 }, IdRange { first: 100_000, count: 65_536 }],
        vec![IdRange::ALL],
    );
    privileged.credentials.privileges = Some(Box::new(Privileges { capabilities: 0x1f, users, groups }));
    let privileged = ("of a privileged caller".to_owned(), Message::Request(CallId(5), privileged));
    let leaving =
        ("rename that leaves a whiteout".to_owned(), Message::Request(CallId(5), request(leaving())));
    responses.push(("renamed that left a whiteout".to_owned(), response(Ok(LEFT))));
    let refused = Refused { errno: Errno::NOENT, message: "there is no export of this name".to_owned() };
    vec![
        ("hello", two(("new", Message::Hello(hello())), ("resuming", Message::Hello(resuming)))),
        ("welcome", welcomes),
        ("refused", one(Message::Refused(refused))),
        ("request", requests.chain([again, privileged, leaving]).collect()),
        ("response", responses),
        ("cancel", one(Message::Cancel(CallId(5)))),
        ("acknowledge", one(Message::Acknowledge(RecallId(6)))),
        ("return", one(Message::Return(vec![GrantId(3), GrantId(4)]))),
        ("recall", one(Message::Recall(recall))),
        ("hold", one(Message::Hold(hold))),
        ("commit", one(Message::Commit(commit))),
        ("ping", one(Message::Ping(2, 3))),
        ("pong", one(Message::Pong(2, 3))),
        ("received", one(Message::Received(64))),
        ("reclaimed", one(Message::Reclaimed)),
        ("bye", one(Message::Bye("unmounted".to_owned()))),
    ]
}

/// The two steps of an update.
fn update() -> (UpdatePrepare, UpdateCommit) {
    let held = |covers, names| UpdateScope { node: id(1), covers, names };
    let facts =
        vec![held(LeaseScope::Directory, vec![name("x"), name("y")]), held(LeaseScope::Attributes, vec![])];
    let hold = UpdatePrepare { id: RecallId(6), facts };
    let commit = UpdateCommit {
        id: RecallId(6),
        facts: vec![
            UpdatedFact::Name { dir: id(1), name: name("x"), entry: None },
            UpdatedFact::Name { dir: id(1), name: name("y"), entry: Some(entry(0o120_777)) },
            UpdatedFact::Attr { node: id(1), attr: attr(0o040_755) },
        ],
    };
    (hold, commit)
}

fn variant(reply: &Reply) -> String {
    let text = format!("{reply:?}");
    text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_lowercase()
}
