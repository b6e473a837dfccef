//! Messages: encoded and decoded, cut short, changed, and made of random bytes.

use crate::common::pair::{T0, client};
use crate::common::{decode, samples};
use nigh_native::{
    FrameReader, HEADER_BYTES, MAX_BODY, Message, ProtocolError, ServerConfig, ServerSession,
    encode_response, listed_bytes,
};
use nigh_remote::{Output, Remote};
use nigh_types::*;
use proptest::prelude::*;

fn names() -> impl Strategy<Value = Name> {
    prop::collection::vec(1..=255_u8, 1..=255).prop_filter_map("a name", |bytes| Name::new(&bytes).ok())
}

fn ids() -> impl Strategy<Value = NodeId> {
    (1..=u64::MAX, any::<u64>()).prop_map(|(ino, generation)| NodeId { ino, generation })
}

fn times() -> impl Strategy<Value = Timestamp> {
    (any::<i64>(), 0..1_000_000_000_u32).prop_map(|(secs, nanos)| Timestamp { secs, nanos })
}

fn attrs() -> impl Strategy<Value = Attr> {
    let kind = prop::sample::select(vec![1_u32, 2, 4, 6, 8, 10, 12]);
    let numbers = (any::<[u32; 4]>(), 0..=0o7777_u32, kind);
    (0..=i64::MAX.cast_unsigned(), any::<[u64; 2]>(), numbers, [times(), times(), times()]).prop_map(
        |(size, [blocks, birth_ns], ([nlink, uid, gid, rdev], mode, kind), [atime, mtime, ctime])| Attr {
            size,
            blocks,
            mode: mode | kind << 12,
            nlink,
            uid,
            gid,
            rdev,
            atime,
            mtime,
            ctime,
            birth_ns,
        },
    )
}

fn entries() -> impl Strategy<Value = Entry> {
    let target = prop::option::of(prop::collection::vec(1..=255_u8, 1..200));
    (ids(), attrs(), target, any::<bool>()).prop_map(|(id, attr, target, no_xattrs)| {
        let target = target.map(Vec::into_boxed_slice);
        Entry { id, attr, target, no_xattrs }
    })
}

fn places() -> impl Strategy<Value = NodeRef> {
    (ids(), prop::option::of((ids(), names()))).prop_map(|(node, hint)| NodeRef { node, path_hint: hint })
}

/// Every call, with fields that vary.
fn calls() -> impl Strategy<Value = Call> {
    let samples = samples::calls();
    let numbers = (any::<u64>(), any::<u64>(), any::<u32>(), prop::option::of(any::<u64>()), any::<bool>());
    let fields = (places(), places(), names(), names(), prop::collection::vec(any::<u8>(), 0..3000), numbers);
    (prop::sample::select(samples), fields).prop_map(|(sample, (place, other, leaf, new, bytes, numbers))| {
        let (a, b, c, h, flag) = numbers;
        let h = h.map(Handle);
        match sample {
            Call::Lookup { .. } => Call::Lookup { dir: place, name: leaf },
            Call::ResolvePath { .. } => Call::ResolvePath { node: place.node, names: vec![leaf, new] },
            Call::Read { .. } => Call::Read { node: place, handle: h, offset: a, length: c },
            Call::Seek { .. } => Call::Seek { node: place, handle: h, offset: a, data: flag },
            Call::Unlink { .. } => Call::Unlink { dir: place, name: leaf, keep: flag.then_some(other.node) },
            Call::Rename { .. } => Call::Rename {
                from: place,
                name: leaf,
                to: other,
                new_name: new,
                no_replace: flag,
                exchange: !flag && c % 2 == 0,
                whiteout: flag || c % 2 == 1,
                keep: None,
            },
            Call::Write { flags, .. } => {
                Call::Write { node: place, handle: h, offset: a, data: bytes, flags }
            }
            Call::CopyRange { .. } => Call::CopyRange {
                from: place,
                from_handle: h,
                from_offset: a,
                to: other,
                to_handle: None,
                to_offset: b,
                length: a ^ b,
            },
            Call::SetXattr { kill_sgid, .. } => {
                let name = leaf.as_bytes().to_vec();
                Call::SetXattr { node: place, name, value: bytes, flags: c, kill_sgid }
            }
            Call::Link { .. } => Call::Link { node: place, dir: other, name: leaf },
            other => other,
        }
    })
}

fn results() -> impl Strategy<Value = Result<Reply, Errno>> {
    let fields = (entries(), attrs(), ids(), prop::collection::vec((names(), entries()), 0..20));
    let bytes = prop::collection::vec(any::<u8>(), 0..3000);
    let errno = 1..4096_i32;
    (prop::sample::select(samples::replies()), fields, bytes, errno, any::<u64>(), any::<bool>()).prop_map(
        |(sample, (entry, attr, id, listed), bytes, errno, number, flag)| match sample {
            Reply::Entry(_) => Ok(Reply::Entry(flag.then_some(entry))),
            Reply::Attr(..) => Ok(Reply::Attr(id, attr)),
            Reply::Listed(_) => Ok(Reply::Listed(Entries { entries: listed })),
            Reply::Value(_) => Ok(Reply::Value(bytes)),
            Reply::Data(_) => Ok(Reply::Data(bytes)),
            Reply::Opened { .. } => Ok(Reply::Opened { handle: Handle(number), attr }),
            Reply::Created { .. } => {
                Ok(Reply::Created { entry, handle: flag.then_some(Handle(number)), existed: !flag })
            }
            Reply::Done if flag => Err(Errno::from_raw(errno)),
            other => Ok(other),
        },
    )
}

fn grants() -> impl Strategy<Value = Grant> {
    let covers = prop::sample::select(vec![LeaseScope::Directory, LeaseScope::Attributes, LeaseScope::Data]);
    let nanos = 0..=u64::MAX;
    (any::<u64>(), ids(), covers, any::<[bool; 3]>(), nanos).prop_map(
        |(id, node, covers, [write, recallable, shared], n)| {
            let mode = if write { Mode::Write } else { Mode::Read };
            let term = if n == u64::MAX { Term::Session } else { Term::Limited(Span(n)) };
            Grant { id: GrantId(id), node, covers, mode, term, recallable, shared }
        },
    )
}

fn messages() -> impl Strategy<Value = Message> {
    let groups = prop::collection::vec(any::<u32>(), 0..40);
    let request = (any::<u64>(), calls(), groups, any::<[u64; 3]>()).prop_map(|(id, call, groups, op)| {
        let [client, incarnation, sequence] = op;
        let range = IdRange { first: groups.first().copied().unwrap_or(3), count: 9 };
        let privileged =
            Privileges { capabilities: sequence, users: vec![range], groups: vec![range; groups.len()] };
        let privileges = (id % 2 == 0).then(|| Box::new(privileged));
        let credentials = Credentials { uid: 1, gid: 2, groups, privileges };
        let name = call.is_mutation().then_some(MutationId { client, incarnation, sequence });
        Message::Request(CallId(id), Request { credentials, mutation_id: name, call })
    });
    let after = prop::collection::vec((ids(), attrs()), 0..4);
    let grants = prop::collection::vec(grants(), 0..4);
    let response = (any::<u64>(), results(), after, grants, any::<bool>()).prop_map(
        |(id, result, after, grants, last)| {
            Message::Response(CallId(id), Response { result, after, grants, last })
        },
    );
    let others: Vec<Message> = samples::all().into_iter().flat_map(|(_, all)| all).map(|(_, m)| m).collect();
    prop_oneof![request, response, prop::sample::select(others)]
}

/// The bytes of a handshake's message.
fn sample(group: &str) -> Vec<u8> {
    let all = samples::all();
    let (_, messages) = all.iter().find(|(name, _)| *name == group).unwrap();
    messages[0].1.encode()
}

proptest! {
    #[test]
    fn every_message_round_trips(message in messages()) {
        let bytes = message.encode();
        prop_assert_eq!(decode(&bytes), Ok(Some(message)));
    }

    #[test]
    fn fields_that_a_later_version_appends_are_skipped(message in messages(), more in prop::collection::vec(any::<u8>(), 0..50)) {
        let mut bytes = message.encode();
        bytes.extend(&more);
        let length = u32::try_from(bytes.len()).unwrap() - HEADER_BYTES;
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        prop_assert_eq!(decode(&bytes), Ok(Some(message)));
    }

    #[test]
    fn a_message_cut_short_is_malformed(message in messages(), cut in any::<prop::sample::Index>()) {
        let mut bytes = message.encode();
        let body = bytes.len() - HEADER_BYTES as usize;
        prop_assume!(body > 0);
        let keep = cut.index(body);
        bytes.truncate(HEADER_BYTES as usize + keep);
        bytes[..4].copy_from_slice(&u32::try_from(keep).unwrap().to_le_bytes());
        let short = decode(&bytes);
        let hello = match &message {
            Message::Hello(hello) => Some(hello),
            _ => None,
        };
        // Fields appended by later versions: the time, and the session to resume.
        let appended = hello.map_or(0, |hello| if hello.resume.is_some() { 8 + 1 + 16 } else { 8 + 1 });
        let expected = match &short {
            Err(ProtocolError::NotNigh) => hello.is_some() && keep < 4,
            Ok(Some(Message::Hello(old))) => hello.is_some() && keep == body - appended && old.moment == 0,
            other => matches!(other, Err(ProtocolError::Malformed(_))),
        };
        prop_assert!(expected, "{:?}", short);
    }

    #[test]
    fn changed_bytes_never_panic(message in messages(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = message.encode();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(Some(decoded)) = decode(&bytes) {
            prop_assert_eq!(decode(&decoded.encode()), Ok(Some(decoded)));
        }
    }

    #[test]
    fn noise_never_panics(number in 1..=12_u8, flags in any::<u8>(), body in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = u32::try_from(body.len()).unwrap().to_le_bytes().to_vec();
        bytes.extend([number, flags, 0, 0]);
        bytes.extend([0; 8]);
        bytes.extend(&body);
        let _ = decode(&bytes);
        let _ = decode(&body);
        let mut reader = FrameReader::new(MAX_BODY);
        for byte in &body {
            if reader.next(&mut std::slice::from_ref(byte)).is_err() {
                break;
            }
        }
    }

    #[test]
    fn changed_streams_never_panic_a_session(
        said in prop::collection::vec(messages(), 1..6),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes: Vec<u8> = said.iter().flat_map(Message::encode).collect();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let (first, second) = bytes.split_at(cut.index(bytes.len()));
        let mut session = client(T0);
        session.handle_call(T0, CallId(5), samples::request(samples::queries().remove(3)));
        session.handle_input(T0, &sample("welcome"));
        let mut server = ServerSession::new(T0, ServerConfig::default());
        server.handle_input(T0, &sample("hello")).unwrap();
        server.accept(samples::session());
        for piece in [first, second] {
            session.handle_input(T0, piece);
            while !matches!(session.poll_output(), Output::Timeout(..)) {}
            if server.handle_input(T0, piece).is_err() {
                prop_assert!(server.is_ended());
            }
        }
    }

    #[test]
    fn encoded_entry_size_is_within_documented_bound(entry in entries(), name in names()) {
        let bound = listed_bytes(&name, &entry);
        let response = |entries| Response { result: Ok(Reply::Listed(Entries { entries })), after: vec![], grants: vec![], last: true };
        let empty = encode_response(CallId(1), &response(vec![])).len();
        let with = encode_response(CallId(1), &response(vec![(name, entry)])).len();
        prop_assert!(with - empty <= bound);
    }
}

#[test]
fn malformed_attributes_names_and_targets_are_refused() {
    let refused = |message: Message| match decode(&message.encode()) {
        Err(ProtocolError::Malformed(what)) => what,
        other => panic!("not refused: {other:?}"),
    };
    let attr = |mode, size| {
        let attr = Attr { mode, size, ..samples::attr(0) };
        Message::Response(CallId(1), Response::plain(Ok(Reply::Attr(samples::id(1), attr))))
    };
    assert!(refused(attr(0, 0)).contains("mode"));
    assert!(refused(attr(0o100_644, u64::MAX)).contains("size"));
    let target =
        |target: &[u8]| Message::Response(CallId(1), Response::plain(Ok(Reply::Target(target.into()))));
    assert!(refused(target(b"")).contains("target"));
    assert!(refused(target(b"a\0b")).contains("target"));
    assert!(refused(target(&[b'x'; 4096])).contains("target"));
    let zero = NodeId { ino: 0, generation: 0 };
    let getattr = Call::GetAttr { node: NodeRef::without_hint(zero) };
    assert!(refused(Message::Request(CallId(1), samples::request(getattr))).contains("inode number"));
    let dots = [&b"."[..], b"..", b"a/b", b"\0"];
    let lookup = Message::Request(
        CallId(1),
        samples::request(Call::Lookup { dir: samples::dir(), name: samples::name("@@@") }),
    );
    let bytes = lookup.encode();
    let at = bytes.windows(3).position(|window| window == b"@@@").unwrap();
    for dot in dots {
        let mut bytes = bytes.clone();
        let padded = [dot, b"xxx"].concat();
        bytes[at..at + 3].copy_from_slice(&padded[..3]);
        bytes[at - 2] = u8::try_from(dot.len()).unwrap();
        assert!(
            matches!(decode(&bytes), Err(ProtocolError::Malformed(what)) if what.contains("name")),
            "{dot:?}"
        );
    }
}

#[test]
fn operation_name_is_required_on_mutations_and_refused_elsewhere() {
    for call in samples::calls() {
        let mut request = samples::request(call);
        request.mutation_id = match request.mutation_id {
            None => Some(MutationId { client: 1, incarnation: 1, sequence: 1 }),
            Some(_) => None,
        };
        let bytes = Message::Request(CallId(1), request).encode();
        assert_eq!(decode(&bytes), Err(ProtocolError::OpName));
    }
}

#[test]
fn append_open_adds_one_field_and_other_opens_are_unchanged() {
    let request = |append| {
        let access = Access { append, ..samples::access() };
        let name = Name::new(b"x").unwrap();
        let call = Call::Create { dir: samples::dir(), name, mode: 0, umask: 0, exclusive: true, access };
        let name = Some(MutationId { client: 1, incarnation: 2, sequence: 3 });
        Request { credentials: Credentials::default(), mutation_id: name, call }
    };
    let [plain, appends] =
        [false, true].map(|append| nigh_native::encode_request(CallId(7), &request(append)));
    assert_eq!(appends.len(), plain.len() + 1);
    for (bytes, append) in [(plain, false), (appends, true)] {
        assert_eq!(decode(&bytes), Ok(Some(Message::Request(CallId(7), request(append)))));
    }
}

/// It ignores the bytes behind `keep`, and refuses such a rename with `EINVAL`.
#[test]
fn older_server_takes_a_rename_that_leaves_a_whiteout_for_one_with_both_flags() {
    let request = |(no_replace, exchange, whiteout)| {
        let (from, to, name) = (samples::dir(), samples::dir(), Name::new(b"x").unwrap());
        let new_name = name.clone();
        let call = Call::Rename { from, name, to, new_name, no_replace, exchange, whiteout, keep: None };
        let name = Some(MutationId { client: 1, incarnation: 2, sequence: 3 });
        Request { credentials: Credentials::default(), mutation_id: name, call }
    };
    let encode = |flags| nigh_native::encode_request(CallId(7), &request(flags));
    let both = encode((true, true, false));
    for no_replace in [false, true] {
        let leaves = encode((no_replace, false, true));
        let (further, fields) = leaves.split_last().unwrap();
        assert_eq!((*further, leaves.len()), (u8::from(no_replace), both.len() + 1));
        assert!(fields.ends_with(&both[both.len() - 40..]));
        let asked = Message::Request(CallId(7), request((no_replace, false, true)));
        assert_eq!(decode(&leaves), Ok(Some(asked)));
    }
}
