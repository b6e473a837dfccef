//! Rules that the server's end of a session enforces, and its behaviour while muted.

use crate::common::ends::{attached, drain, later, lock, lookup, server_after, welcome};
use crate::common::pair::{T0, client};
use crate::common::{decode, samples};
use nigh_native::*;
use nigh_remote::{Event, Remote};
use nigh_types::*;
use std::time::{Duration, Instant};

/// Frames that a server has for its transport.
fn transmitted(server: &mut ServerSession) -> Vec<Message> {
    let frames = std::iter::from_fn(|| server.poll_transmit());
    frames.map(|bytes| decode(&bytes).unwrap().unwrap()).collect()
}

#[test]
fn muted_session_defers_later_messages_until_unmuted() {
    let (mut server, result) = server_after(Limits::default(), &[lookup(1)]);
    assert_eq!(result, Ok(()));
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { call: CallId(1), .. })));
    let recall =
        Recall { id: RecallId(6), node: samples::id(1), covers: LeaseScope::Attributes, names: vec![] };
    server.recall(recall);
    assert!(server.poll_transmit().is_some());
    server.mute(true);
    let lapses = server.lapses();
    let said = [
        lookup(2),
        Message::Ping(1, 0),
        Message::Cancel(CallId(2)),
        Message::Cancel(CallId(1)),
        Message::Ping(2, 0),
        Message::Acknowledge(RecallId(6)),
    ];
    let bytes: Vec<u8> = said.iter().flat_map(Message::encode).collect();
    server.handle_input(later(5_000), &bytes).unwrap();
    assert_eq!(server.lapses(), lapses, "it renews nothing");
    assert_eq!(server.poll_event(), Some(ServerEvent::Cancel(CallId(1))));
    assert_eq!(server.poll_event(), Some(ServerEvent::Acknowledge(RecallId(6))));
    assert_eq!(server.poll_event(), None);
    server.respond(CallId(1), &Response::plain(Err(Errno::INTR)));
    let answered = decode(&server.poll_transmit().unwrap()).unwrap().unwrap();
    assert!(matches!(answered, Message::Response(CallId(1), _)));
    assert_eq!(server.poll_transmit(), None);
    server.mute(false);
    assert_eq!(transmitted(&mut server), [Message::Pong(2, 5)]);
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { call: CallId(2), .. })));
    assert_eq!(server.poll_event(), Some(ServerEvent::Cancel(CallId(2))));
    assert_eq!(server.poll_event(), None);
}

#[test]
fn muted_session_bounds_unanswered_messages() {
    // A client that closes many files breaks no rule.
    let (mut server, _) = server_after(Limits { max_calls: 2, ..Limits::default() }, &[]);
    server.mute(true);
    let release = |n| {
        Message::Request(CallId(n), samples::request(Call::Release { handles: vec![Handle(n)] })).encode()
    };
    for n in 0..10_000 {
        server.handle_input(T0, &release(n)).unwrap();
    }
    server.mute(false);
    let Some(ServerEvent::Request { request, .. }) = server.poll_event() else { panic!() };
    assert_eq!(request.call, Call::Release { handles: (0..10_000).map(Handle).collect() });
    assert_eq!(server.poll_event(), None);
    let (mut server, _) = server_after(Limits::default(), &[]);
    server.mute(true);
    let release = Call::Release { handles: vec![Handle(1); 1 << 16] };
    let frame = Message::Request(CallId(9), samples::request(release)).encode();
    let sent = (0..256).map(|_| server.handle_input(T0, &frame)).take_while(Result::is_ok).count();
    assert_eq!(sent as u64, MAX_UNANSWERED_BYTES / frame.len() as u64);
}

#[test]
fn cancel_cost_is_constant_and_repeated_cancel_is_ignored() {
    let wait = |n| Message::Request(CallId(n), samples::request(lock(true))).encode();
    // Waiting lock calls, kept by a muted session, and each cancelled so often.
    let took = |locks: u64, times: u64, muted: bool| {
        let (mut server, _) = server_after(Limits::default(), &[]);
        server.mute(muted);
        (0..locks).for_each(|n| server.handle_input(T0, &wait(n)).unwrap());
        let cancels = |n| Message::Cancel(CallId(n)).encode();
        let said: Vec<u8> = (0..times).flat_map(|_| (0..locks).flat_map(cancels)).collect();
        let begun = Instant::now();
        let mut rest = &said[..];
        while !rest.is_empty() {
            server.handle_some(T0, &mut rest).unwrap();
        }
        let took = begun.elapsed();
        server.mute(false);
        let events: Vec<ServerEvent> = std::iter::from_fn(|| server.poll_event()).collect();
        let cancelled = events.iter().filter(|event| matches!(event, ServerEvent::Cancel(_))).count();
        assert_eq!((cancelled as u64, events.len() as u64), (locks, locks * 2));
        let is_call = |event: &ServerEvent| matches!(event, ServerEvent::Request { .. });
        assert!(events[..events.len() / 2].iter().all(is_call), "none goes before its call");
        took
    };
    for muted in [true, false] {
        let (few, many) = (took(128, 128, muted), took(128 * 128, 1, muted));
        assert!(many < few * 20 + Duration::from_millis(20), "{many:?} and {few:?} for as many, {muted}");
    }
}

#[test]
fn large_decompressed_input_is_handled_in_rounds() {
    let mut server = ServerSession::new(T0, ServerConfig::default());
    let hello = Hello { features: COMPRESSED, ..samples::hello() };
    server.handle_input(T0, &Message::Hello(hello).encode()).unwrap();
    server.poll_event();
    server.accept(samples::session());
    let grants = vec![GrantId(7); 1 << 16];
    let frame = compress(&Message::Return(grants.clone()).encode()).unwrap();
    let said = frame.repeat(20);
    let (mut rest, mut rounds, mut returned) = (&said[..], 0, 0);
    while !rest.is_empty() {
        server.handle_some(T0, &mut rest).unwrap();
        let events: Vec<ServerEvent> = std::iter::from_fn(|| server.poll_event()).collect();
        assert!((1..=2).contains(&events.len()), "{} of 512 KiB", events.len());
        assert!(events.iter().all(|event| *event == ServerEvent::Return(grants.clone())));
        (rounds, returned) = (rounds + 1, returned + events.len());
    }
    assert_eq!((rounds, returned), (10, 20));
}

#[test]
fn lists_are_bounded_and_server_only_messages_are_refused() {
    let name = samples::name("a");
    let names = |count: u32| vec![name.clone(); count as usize];
    let handles = |count: u32| vec![Handle(1); count as usize];
    let walk = |count| Call::ResolvePath { node: samples::id(7), names: names(count) };
    let keep = |count| {
        let handle = Handle(Handle::CLIENT_ASSIGNED | 1);
        Call::PinOpen { node: samples::place(), names: names(count), handle }
    };
    let release = |count| Call::Release { handles: handles(count) };
    let asked = |call| Message::Request(CallId(1), samples::request(call));
    let most = (Call::MOST_NAMES, Call::MOST_HANDLES);
    let may = [asked(walk(most.0)), asked(keep(most.0)), asked(release(most.1))];
    let may_not = [asked(walk(most.0 + 1)), asked(keep(most.0 + 1)), asked(release(most.1 + 1))];
    let grants = |count| Message::Return(vec![GrantId(1); count]);
    for message in may.into_iter().chain([grants(65_536)]) {
        assert_eq!(server_after(Limits::default(), &[message]).1, Ok(()));
    }
    for message in may_not.into_iter().chain([grants(65_537)]) {
        let broken = server_after(Limits::default(), &[message]).1;
        assert!(
            matches!(broken, Err(ProtocolError::Malformed(why)) if why.contains("more names")),
            "{broken:?}"
        );
    }
    // A client sends nothing that makes a server end its session.
    let mut client = attached(Limits::default());
    client.handle_call(T0, CallId(1), samples::request(walk(most.0 + 1)));
    let (said, events, _) = drain(&mut client);
    let refused = Event::Response { call: CallId(1), response: Response::plain(Err(Errno::INVAL)) };
    assert_eq!((&said[..], &events[..]), (&[][..], &[refused][..]));
    let recall =
        Recall { id: RecallId(3), node: samples::id(1), covers: LeaseScope::Directory, names: names(9) };
    let broken = server_after(Limits::default(), &[Message::Recall(recall)]).1;
    assert_eq!(broken, Err(ProtocolError::Unexpected(9)));
}

#[test]
fn queued_path_names_count_with_their_memory_cost() {
    let walk = Call::ResolvePath { node: samples::id(7), names: vec![samples::name("a"); 4_096] };
    let (mut server, _) = server_after(Limits::default(), &[]);
    let before = server.held_bytes();
    server.handle_input(T0, &Message::Request(CallId(1), samples::request(walk)).encode()).unwrap();
    assert!(server.held_bytes() - before > 4_096 * 48);
    server.respond(CallId(1), &Response::plain(Ok(Reply::Done)));
    while server.poll_transmit().is_some() {}
    server.handle_input(T0, &Message::Received(1).encode()).unwrap();
    assert_eq!(server.held_bytes(), before);
}

/// An acknowledgement may wait for it; and neither end may take it for a renewal.
#[test]
fn write_back_of_suspect_is_executed_without_renewal() {
    let write = |flush| {
        let flags = WriteFlags { write_back: flush, ..WriteFlags::default() };
        let data = b"page".to_vec();
        samples::request(Call::Write { node: samples::place(), handle: None, offset: 0, data, flags })
    };
    let (mut server, _) = server_after(Limits::default(), &[]);
    server.mute(true);
    let lapses = server.lapses();
    for (call, flush) in [(1, false), (2, true)] {
        let frame = Message::Request(CallId(call), write(flush)).encode();
        server.handle_input(later(5_000), &frame).unwrap();
    }
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { call: CallId(2), .. })));
    assert_eq!((server.poll_event(), server.lapses()), (None, lapses));
    for (flush, renews) in [(false, true), (true, false)] {
        let mut client = client(T0);
        client.handle_input(T0, &welcome(Limits::default()).encode());
        let has_lapsed = |client: &mut ClientSession, ms| {
            client.handle_timeout(later(ms));
            drain(client).1.iter().any(|event| matches!(event, Event::Expired { .. }))
        };
        client.handle_call(later(5_000), CallId(1), write(flush));
        let written = Response::plain(Ok(Reply::Written { offset: 0, count: 4 }));
        client.handle_input(later(5_100), &Message::Response(CallId(1), written).encode());
        assert!(!has_lapsed(&mut client, 13_400));
        assert_eq!(has_lapsed(&mut client, 13_600), !renews, "flush: {flush}");
    }
}

#[test]
fn features_known_to_both_sides_are_negotiated() {
    let mut server = ServerSession::new(T0, ServerConfig::default());
    let hello = Hello { features: EXCLUSIVE_DIR_LEASES | 1 << 40, ..samples::hello() };
    server.handle_input(T0, &Message::Hello(hello).encode()).unwrap();
    assert!(matches!(server.poll_event(), Some(ServerEvent::Attach { features: EXCLUSIVE_DIR_LEASES, .. })));
    server.accept(samples::session());
    let welcome = decode(&server.poll_transmit().unwrap()).unwrap().unwrap();
    assert!(matches!(welcome, Message::Welcome(Welcome { features: EXCLUSIVE_DIR_LEASES, .. })));
}

#[test]
fn server_accepts_hello_only_first_and_once() {
    let mut server = ServerSession::new(T0, ServerConfig::default());
    assert_eq!(server.handle_input(T0, &lookup(1).encode()), Err(ProtocolError::Unexpected(4)));
    assert_eq!(server.handle_input(T0, &lookup(1).encode()), Err(ProtocolError::Ended));
    let (_, result) = server_after(Limits::default(), &[Message::Hello(samples::hello())]);
    assert_eq!(result, Err(ProtocolError::Unexpected(1)));
    let mut server = ServerSession::new(T0, ServerConfig::default());
    let mut long = samples::hello();
    long.attach = vec![b'x'; 20_000];
    let result = server.handle_input(T0, &Message::Hello(long).encode());
    assert!(matches!(result, Err(ProtocolError::FrameTooLong { limit: 16_384, .. })), "{result:?}");
    let mut server = ServerSession::new(T0, ServerConfig::default());
    let get = b"\x10\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0GET / HTTP/1.1\r\n";
    assert_eq!(server.handle_input(T0, get), Err(ProtocolError::NotNigh));
}

#[test]
fn a_server_of_another_version_says_which_side_to_update() {
    let mut server = ServerSession::new(T0, ServerConfig::default());
    let hello = Hello { min_version: 7, max_version: 9, ..samples::hello() };
    server.handle_input(T0, &Message::Hello(hello).encode()).unwrap();
    assert!(matches!(server.poll_event(), Some(ServerEvent::Bye { .. })));
    let refused = decode(&server.poll_transmit().unwrap()).unwrap();
    let Some(Message::Refused(refused)) = refused else { panic!("not refused") };
    assert!(refused.message.contains("update nigh on the server's machine"), "{}", refused.message);
    assert!(server.is_ended());
}

#[test]
fn a_server_enforces_ids_counts_sizes_and_acknowledgements() {
    assert_eq!(
        server_after(Limits::default(), &[lookup(1), lookup(1)]).1,
        Err(ProtocolError::CallInUse(CallId(1)))
    );
    let few = Limits { max_calls: 2, ..Limits::default() };
    assert_eq!(server_after(few, &[lookup(1), lookup(2), lookup(3)]).1, Err(ProtocolError::TooManyCalls(2)));
    let acknowledged = Message::Acknowledge(RecallId(4));
    assert_eq!(server_after(few, &[acknowledged]).1, Err(ProtocolError::UnknownRecall(RecallId(4))));
    let read = Call::Read { node: samples::place(), handle: None, offset: 0, length: 101 };
    let small = Limits { max_data: 100, ..Limits::default() };
    let (mut server, result) = server_after(small, &[Message::Request(CallId(1), samples::request(read))]);
    assert!(matches!(result, Err(ProtocolError::Malformed(_))));
    let farewell = decode(&server.poll_transmit().unwrap()).unwrap();
    assert!(matches!(farewell, Some(Message::Bye(why)) if why.starts_with("protocol error: ")));
}

#[test]
fn server_emits_event_for_each_valid_message() {
    let release = Call::Release { handles: vec![Handle(1)] };
    let messages = [
        lookup(1),
        Message::Cancel(CallId(1)),
        Message::Cancel(CallId(8)),
        Message::Return(vec![GrantId(2)]),
    ];
    let (mut server, result) = server_after(Limits::default(), &messages);
    assert_eq!(result, Ok(()));
    server.handle_input(T0, &Message::Request(CallId(2), samples::request(release)).encode()).unwrap();
    server.handle_input(T0, &Message::Ping(6, 0).encode()).unwrap();
    let events: Vec<_> = std::iter::from_fn(|| server.poll_event()).collect();
    assert!(matches!(events[0], ServerEvent::Request { call: CallId(1), .. }));
    assert_eq!(events[1..3], [ServerEvent::Cancel(CallId(1)), ServerEvent::Return(vec![GrantId(2)])]);
    assert!(matches!(events[3], ServerEvent::Request { call: CallId(2), .. }));
    assert_eq!((events.len(), server.outstanding()), (4, 1));
    server.respond(CallId(1), &Response::plain(Err(Errno::INTR)));
    let recall =
        Recall { id: RecallId(3), node: samples::id(1), covers: LeaseScope::Attributes, names: vec![] };
    server.recall(recall.clone());
    let sent = transmitted(&mut server);
    let response = Message::Response(CallId(1), Response::plain(Err(Errno::INTR)));
    assert_eq!(sent, [Message::Pong(6, 5), response, Message::Recall(recall)]);
    server.handle_input(T0, &Message::Acknowledge(RecallId(3)).encode()).unwrap();
    assert_eq!(server.poll_event(), Some(ServerEvent::Acknowledge(RecallId(3))));
    server.handle_input(T0, &Message::Bye("done".to_owned()).encode()).unwrap();
    assert_eq!(server.poll_event(), Some(ServerEvent::Bye { why: "done".to_owned() }));
    server.transmit_encoded(CallId(1), true, vec![1]);
    assert_eq!(server.poll_transmit(), None);
}

#[test]
fn server_limits_waiting_lock_calls_separately() {
    let few = Limits { max_calls: 1, ..Limits::default() };
    let request = |id, wait| Message::Request(CallId(id), samples::request(lock(wait)));
    let waits: Vec<Message> = (1..=u64::from(MAX_LOCK_WAITS)).map(|id| request(id, true)).collect();
    assert_eq!(server_after(few, &waits).1, Ok(()));
    let more = [waits.clone(), vec![request(100_000, true)]].concat();
    assert_eq!(server_after(few, &more).1, Err(ProtocolError::TooManyCalls(MAX_LOCK_WAITS)));
    let one = [waits.clone(), vec![request(100_000, false)]].concat();
    assert_eq!(server_after(few, &one).1, Ok(()));
    let two = [one, vec![request(100_001, false)]].concat();
    assert_eq!(server_after(few, &two).1, Err(ProtocolError::TooManyCalls(1)));
    let twice = [request(1, true), request(1, false)];
    assert_eq!(server_after(few, &twice).1, Err(ProtocolError::CallInUse(CallId(1))));
}

#[test]
fn only_keepalives_and_acknowledgements_count_as_asking_nothing() {
    let (mut server, _) = server_after(Limits::default(), &[lookup(1)]);
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { .. })));
    let all = [
        (Message::Acknowledge(RecallId(1)), true),
        (Message::Ping(1, 0), true),
        (Message::Pong(1, 0), true),
        (Message::Received(0), true),
        (lookup(2), false),
        (Message::Cancel(CallId(1)), false),
        (Message::Return(vec![GrantId(1)]), false),
        (Message::Reclaimed, false),
        (Message::Bye(String::new()), false),
    ];
    let ping = Message::Ping(7, 0).encode();
    for (message, alone) in &all {
        let frame = message.encode();
        assert_eq!(server.asks_nothing(&frame), *alone, "{message:?}");
        assert_eq!(server.asks_nothing(&[&ping[..], &frame, &ping].concat()), *alone, "{message:?}");
        assert!(!server.asks_nothing(&frame[..frame.len() - 1]), "not whole: {message:?}");
    }
    let mut packed = ping.clone();
    packed[5] |= 8;
    assert!(!server.asks_nothing(&packed));
    // The ping would get a reply, or be kept, with other messages.
    server.mute(true);
    assert!(!server.asks_nothing(&ping));
    server.mute(false);
    // A part of a frame has arrived.
    server.handle_input(T0, &ping[..5]).unwrap();
    assert!(!server.asks_nothing(&ping));
    server.handle_input(T0, &ping[5..]).unwrap();
    assert!(server.asks_nothing(&ping));
    // Frames beyond the window wait for a confirmation.
    let many = Response { last: false, ..Response::plain(Ok(Reply::Data(vec![1; 3 << 20]))) };
    for _ in 0..3 {
        server.respond(CallId(1), &many);
    }
    server.respond(CallId(1), &Response::plain(Ok(Reply::Data(vec![2; 3 << 20]))));
    while server.poll_transmit().is_some() {}
    assert!(server.waiting_bytes() > 0 && !server.asks_nothing(&ping));
    server.handle_input(T0, &Message::Received(3).encode()).unwrap();
    while server.poll_transmit().is_some() {}
    assert!(server.waiting_bytes() == 0 && server.asks_nothing(&ping));
}
