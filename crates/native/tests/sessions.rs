//! What sessions enforce, count and time.

mod common;

use common::pair::{Server, T0, client};
use common::samples;
use nigh_native::*;
use nigh_remote::{Event, Output, Reason, Remote};
use nigh_types::*;

fn later(ms: u64) -> Time {
    T0.after(Span::from_millis(ms))
}

/// Everything that comes out, as messages and events, and the timeout that follows.
fn drain(remote: &mut dyn Remote) -> (Vec<Message>, Vec<Event>, (Time, Reason)) {
    let (mut messages, mut events) = (Vec::new(), Vec::new());
    loop {
        match remote.poll_output() {
            Output::Event(event) => events.push(event),
            Output::Transmit(bytes) => messages.push(common::decode(&bytes).unwrap().unwrap()),
            Output::Timeout(moment, reason) => return (messages, events, (moment, reason)),
        }
    }
}

fn welcome(limits: Limits) -> Message {
    let session = samples::session();
    Message::Welcome(Welcome {
        version: MAX_VERSION,
        features: 0,
        session_id: 5,
        session_term: SESSION_TERM,
        limits,
        session,
    })
}

/// A client that has been welcomed.
fn attached(limits: Limits) -> ClientSession {
    let mut client = client(T0);
    client.handle_input(T0, &welcome(limits).encode());
    let (messages, events, _) = drain(&mut client);
    assert!(matches!(messages[..], [Message::Hello(_)]));
    assert_eq!(events, [Event::Attached(samples::session())]);
    client
}

fn lost(events: &[Event]) -> &str {
    match events {
        [Event::Lost { why }] => why,
        other => panic!("not lost: {other:?}"),
    }
}

/// Sends `call`, answers it with `responses`, and returns what becomes of the session.
fn answered(call: Call, responses: &[Response]) -> Vec<Event> {
    let mut client = attached(Limits::default());
    client.handle_call(T0, CallId(1), samples::request(call));
    for response in responses {
        client.handle_input(T0, &encode_response(CallId(1), response));
    }
    drain(&mut client).1
}

fn ok(reply: Reply) -> Response {
    Response::plain(Ok(reply))
}

#[test]
fn a_reply_that_does_not_fit_its_call_loses_the_session() {
    let calls: Vec<Call> = samples::queries().into_iter().chain(samples::mutations()).collect();
    let mut fits = 0;
    for call in calls.into_iter().filter(Call::is_answered) {
        let mut fitting = 0;
        for reply in samples::replies() {
            let events = answered(call.clone(), &[ok(reply)]);
            match &events[..] {
                [Event::Response { .. }] => fitting += 1,
                events => assert!(lost(events).starts_with("protocol error of the server"), "{events:?}"),
            }
        }
        fits += fitting;
        assert!(fitting <= 2, "{call:?}");
    }
    assert!(fits >= 20, "most calls have a sample that answers them: {fits}");
}

#[test]
fn a_reply_about_something_else_loses_the_session() {
    let place = samples::place();
    let wrong = |call: Call, reply| assert!(lost(&answered(call, &[ok(reply)])).contains("wrong answer"));
    let attr = samples::attr(0o100_644);
    wrong(Call::GetAttr { node: place.clone() }, Reply::Attr(samples::id(8), attr));
    let read = Call::Read { node: place.clone(), handle: None, offset: 0, length: 3 };
    wrong(read.clone(), Reply::Data(vec![0; 4]));
    assert!(matches!(answered(read, &[ok(Reply::Data(vec![0; 3]))])[..], [Event::Response { .. }]));
    let mkdir = Call::Mkdir { dir: samples::dir(), name: samples::name("x"), mode: 0, umask: 0 };
    let made = |mode, handle| Reply::Made { entry: samples::entry(mode), handle, existed: false };
    wrong(mkdir.clone(), made(0o100_644, None));
    wrong(mkdir.clone(), made(0o040_755, Some(Handle(1))));
    assert!(matches!(answered(mkdir, &[ok(made(0o040_755, None))])[..], [Event::Response { .. }]));
    let unlink = Call::Unlink { dir: samples::dir(), name: samples::name("x"), keep: None };
    wrong(unlink, Reply::Removed { node: samples::id(7), kept: Some(Handle(1)) });
}

fn part(names: &[&str], last: bool) -> Response {
    let entries = names.iter().map(|leaf| (samples::name(leaf), samples::entry(0o100_644))).collect();
    Response { last, ..ok(Reply::Listed(Listed { entries })) }
}

#[test]
fn listings_are_in_cookie_order_or_the_session_is_lost() {
    let key = samples::session().cookie_key;
    let mut names = ["a", "b", "c", "d"];
    names.sort_by_key(|leaf| key.cookie(leaf.as_bytes()));
    let [a, b, c, d] = names;
    let list = || Call::List { dir: samples::dir() };
    let good = answered(list(), &[part(&[a, b], false), part(&[], false), part(&[c, d], true)]);
    assert_eq!(good.len(), 3);
    let bad: [&[Response]; 4] = [
        &[part(&[b, a], true)],
        &[part(&[a, a], true)],
        &[part(&[a, c], false), part(&[b], true)],
        &[part(&[a, b], false), part(&[], false), part(&[b], true)],
    ];
    for responses in bad {
        let events = answered(list(), responses);
        assert!(lost(&events[events.len() - 1..]).contains("cookie order"), "{events:?}");
    }
    let error = Response { last: false, ..Response::plain(Err(Errno::IO)) };
    assert!(lost(&answered(list(), &[error])).contains("more is to follow"));
    let more = Response { last: false, ..ok(Reply::Done) };
    let fsync = Call::Fsync { node: samples::dir(), handle: None, data_only: false };
    assert!(lost(&answered(fsync, &[more])).contains("more is to follow"));
}

#[test]
fn answers_that_nobody_waits_for_lose_the_session_and_nothing_follows() {
    let lookup = Call::Lookup { dir: samples::dir(), name: samples::name("x") };
    let events = answered(lookup, &[ok(Reply::Looked(None)), ok(Reply::Looked(None))]);
    assert!(lost(&events[1..]).contains("not outstanding"));
    let mut client = attached(Limits::default());
    client.handle_input(T0, &encode_response(CallId(9), &ok(Reply::Done)));
    let (messages, events, timeout) = drain(&mut client);
    assert!(matches!(&messages[..], [Message::Bye(why)] if why.starts_with("protocol error")));
    assert!(lost(&events).contains("not outstanding"));
    assert_eq!(timeout, (Time::FAR, Reason::Idle));
    client.handle_call(T0, CallId(10), samples::request(samples::queries().remove(0)));
    client.handle_input(T0, &Message::Ping(1).encode());
    client.handle_disconnect(T0, "eof");
    client.handle_timeout(later(100_000));
    assert_eq!(drain(&mut client), (vec![], vec![], (Time::FAR, Reason::Idle)));
}

#[test]
fn calls_wait_for_the_welcome_and_for_room() {
    let mut client = client(T0);
    for i in 1..=3 {
        client.handle_call(T0, CallId(i), samples::request(samples::queries().remove(0)));
    }
    assert!(matches!(drain(&mut client).0[..], [Message::Hello(_)]));
    client.handle_input(T0, &welcome(Limits { max_calls: 1, ..Limits::default() }).encode());
    let sent = |client: &mut ClientSession| drain(client).0;
    assert!(matches!(sent(&mut client)[..], [Message::Request(CallId(1), _)]));
    client.handle_cancel(T0, CallId(2));
    let (messages, events, _) = drain(&mut client);
    assert_eq!(messages, []);
    let interrupted = Event::Response { call: CallId(2), response: Response::plain(Err(Errno::INTR)) };
    assert_eq!(events, [interrupted]);
    client.handle_cancel(T0, CallId(1));
    assert_eq!(sent(&mut client), [Message::Cancel(CallId(1))]);
    client.handle_input(T0, &encode_response(CallId(1), &Response::plain(Err(Errno::INTR))));
    assert!(matches!(sent(&mut client)[..], [Message::Request(CallId(3), _)]));
    assert_eq!(client.counters().requests, 2);
}

#[test]
fn what_no_server_takes_is_answered_here() {
    let mut client = attached(Limits { max_data: 100, ..Limits::default() });
    let (node, flags) = (samples::place(), WriteFlags::default());
    let refused = [
        Call::Read { node: node.clone(), handle: None, offset: 0, length: 101 },
        Call::Write { node: node.clone(), handle: None, offset: 0, data: vec![0; 101], flags },
        Call::SetXattr {
            node: node.clone(),
            name: b"user.a".to_vec(),
            value: vec![0; 65_537],
            flags: 0,
            kill_sgid: false,
        },
        Call::Xattr { node, name: vec![b'x'; 256] },
    ];
    for (call, id) in refused.into_iter().zip(1..) {
        client.handle_call(T0, CallId(id), samples::request(call));
        let (messages, events, _) = drain(&mut client);
        let answer = Event::Response { call: CallId(id), response: Response::plain(Err(Errno::INVAL)) };
        assert_eq!((messages, events), (vec![], vec![answer]));
    }
    assert_eq!(client.counters().requests, 0);
}

#[test]
fn an_idle_session_is_renewed_every_third_of_its_term() {
    let mut client = attached(Limits::default());
    assert_eq!(drain(&mut client).2, (later(5_000), Reason::Renewal));
    client.handle_timeout(later(4_999));
    assert_eq!(drain(&mut client).0, []);
    client.handle_timeout(later(5_000));
    let (messages, _, timeout) = drain(&mut client);
    assert_eq!((messages, timeout), (vec![Message::Ping(1)], (later(10_000), Reason::Renewal)));
    client.handle_input(later(5_010), &Message::Pong(1).encode());
    assert_eq!(drain(&mut client).2, (later(10_000), Reason::Renewal));
    client.handle_call(later(9_000), CallId(1), samples::request(samples::queries().remove(0)));
    client.handle_input(later(9_500), &encode_response(CallId(1), &ok(Reply::Looked(None))));
    assert_eq!(drain(&mut client).2, (later(14_000), Reason::Renewal));
    assert_eq!((client.counters().renewals, client.counters().requests), (1, 1));
}

#[test]
fn a_silent_server_loses_the_session_before_the_term_ends() {
    let mut client = attached(Limits::default());
    for ms in [5_000, 10_000] {
        client.handle_timeout(later(ms));
        assert!(matches!(drain(&mut client).0[..], [Message::Ping(_)]));
    }
    assert_eq!(drain(&mut client).2, (later(13_500), Reason::SessionEnd));
    client.handle_input(later(13_000), &Message::Pong(1).encode());
    assert_eq!(drain(&mut client).2.0, later(13_500), "a pong to an older ping tells nothing new");
    client.handle_timeout(later(13_500));
    assert!(lost(&drain(&mut client).1).contains("too long"));
}

#[test]
fn a_process_that_slept_over_its_term_serves_nothing_more() {
    let mut client = attached(Limits::default());
    client.handle_timeout(later(20_000));
    let (messages, events, _) = drain(&mut client);
    assert_eq!(messages, []);
    assert!(lost(&events).contains("gone on without us"));
}

#[test]
fn counters_count_what_they_say() {
    let mut server = Server::new(T0, u32::MAX);
    let mut client = client(T0);
    let mut now = T0;
    server.carry(now, &mut client);
    assert_eq!(client.counters().requests, 0);
    let root = Place::bare(server.tree.root());
    let lookup = Call::Lookup { dir: root.clone(), name: samples::name("x") };
    client.handle_call(now, CallId(1), samples::request(lookup));
    client.handle_call(now, CallId(2), samples::request(Call::List { dir: root }));
    client.handle_call(now, CallId(3), samples::request(Call::Release { handles: vec![Handle(1)] }));
    client.handle_return(now, vec![GrantId(1)]);
    assert_eq!(server.carry(now, &mut client).len(), 2);
    now = later(5_000);
    client.handle_timeout(now);
    server.carry(now, &mut client);
    let counters = client.counters();
    assert_eq!((counters.requests, counters.renewals), (2, 1));
    let by_type: Vec<_> = counters.by_type.iter().map(|(name, count)| (*name, *count)).collect();
    assert_eq!(by_type, [("list", 1), ("lookup", 1), ("release", 1)]);
    assert!(counters.bytes_sent > 200 && counters.bytes_received > 200);
    assert_eq!(server.connection.lapses(), later(5_000 + 16_500));
}

#[test]
fn refusals_and_farewells_end_the_session() {
    let mut refused_client = client(T0);
    let refused = Refused { errno: Errno::NOENT, message: "there is no export x".to_owned() };
    refused_client.handle_input(T0, &Message::Refused(refused.clone()).encode());
    assert_eq!(lost(&drain(&mut refused_client).1), "there is no export x");
    assert_eq!(refused_client.refused(), Some(&refused));
    let mut client = attached(Limits::default());
    client.handle_input(T0, &Message::Bye("stopping".to_owned()).encode());
    assert_eq!(lost(&drain(&mut client).1), "the server ended the session: stopping");
    let mut client = attached(Limits::default());
    client.handle_close("unmounted");
    let (messages, events, _) = drain(&mut client);
    assert_eq!(messages, [Message::Bye("unmounted".to_owned())]);
    assert_eq!(lost(&events), "closed: unmounted");
}

/// A server that has heard `messages` after accepting a client.
fn told(limits: Limits, messages: &[Message]) -> (ServerConnection, Result<(), ProtocolError>) {
    let mut server = ServerConnection::new(T0, ServerConfig { limits, ..ServerConfig::default() });
    server.handle_input(T0, &Message::Hello(samples::hello()).encode()).unwrap();
    assert!(matches!(server.poll_event(), Some(ServerEvent::Attach { incarnation: 9, .. })));
    server.accept(samples::session());
    assert!(server.poll_transmit().is_some());
    let bytes: Vec<u8> = messages.iter().flat_map(Message::encode).collect();
    let result = server.handle_input(T0, &bytes);
    (server, result)
}

fn lookup(id: u64) -> Message {
    Message::Request(CallId(id), samples::request(samples::queries().remove(0)))
}

#[test]
fn a_muted_session_is_answered_what_came_before_and_the_rest_when_it_is_heard_again() {
    let (mut server, result) = told(Limits::default(), &[lookup(1)]);
    assert_eq!(result, Ok(()));
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { call: CallId(1), .. })));
    let recall = Recall { id: RecallId(6), node: samples::id(1), covers: Covers::Inode, names: vec![] };
    server.recall(recall);
    assert!(server.poll_transmit().is_some());
    server.mute(true);
    let lapses = server.lapses();
    let said = [
        lookup(2),
        Message::Ping(1),
        Message::Cancel(CallId(2)),
        Message::Cancel(CallId(1)),
        Message::Ping(2),
        Message::Acknowledge(RecallId(6)),
    ];
    let bytes: Vec<u8> = said.iter().flat_map(Message::encode).collect();
    server.handle_input(later(5_000), &bytes).unwrap();
    assert_eq!(server.lapses(), lapses, "it renews nothing");
    assert_eq!(server.poll_event(), Some(ServerEvent::Cancel(CallId(1))));
    assert_eq!(server.poll_event(), Some(ServerEvent::Acknowledge(RecallId(6))));
    assert_eq!(server.poll_event(), None);
    server.respond(CallId(1), &Response::plain(Err(Errno::INTR)));
    let answered = common::decode(&server.poll_transmit().unwrap()).unwrap().unwrap();
    assert!(matches!(answered, Message::Response(CallId(1), _)));
    assert_eq!(server.poll_transmit(), None);
    server.mute(false);
    assert_eq!(server.poll_transmit(), Some(Message::Pong(2).encode()));
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { call: CallId(2), .. })));
    assert_eq!(server.poll_event(), Some(ServerEvent::Cancel(CallId(2))));
    assert_eq!(server.poll_event(), None);
}

#[test]
fn a_muted_session_cannot_pile_up_what_nobody_answers() {
    let limits = Limits { max_calls: 2, ..Limits::default() };
    let (mut server, _) = told(limits, &[]);
    server.mute(true);
    let release = Call::Release { handles: vec![Handle(1)] };
    let bytes = Message::Request(CallId(9), samples::request(release)).encode().repeat(9);
    assert_eq!(server.handle_input(T0, &bytes), Err(ProtocolError::TooManyCalls(2)));
}

#[test]
fn features_that_both_sides_know_are_agreed_on() {
    let mut server = ServerConnection::new(T0, ServerConfig::default());
    let hello = Hello { features: NAMES_ALONE | 1 << 40, ..samples::hello() };
    server.handle_input(T0, &Message::Hello(hello).encode()).unwrap();
    assert!(matches!(server.poll_event(), Some(ServerEvent::Attach { features: NAMES_ALONE, .. })));
    server.accept(samples::session());
    let welcome = common::decode(&server.poll_transmit().unwrap()).unwrap().unwrap();
    assert!(matches!(welcome, Message::Welcome(Welcome { features: NAMES_ALONE, .. })));
}

#[test]
fn a_server_takes_hello_first_and_once() {
    let mut server = ServerConnection::new(T0, ServerConfig::default());
    assert_eq!(server.handle_input(T0, &lookup(1).encode()), Err(ProtocolError::Unexpected(4)));
    assert_eq!(server.handle_input(T0, &lookup(1).encode()), Err(ProtocolError::Ended));
    let (_, result) = told(Limits::default(), &[Message::Hello(samples::hello())]);
    assert_eq!(result, Err(ProtocolError::Unexpected(1)));
    let mut server = ServerConnection::new(T0, ServerConfig::default());
    let mut long = samples::hello();
    long.attach = vec![b'x'; 20_000];
    let result = server.handle_input(T0, &Message::Hello(long).encode());
    assert!(matches!(result, Err(ProtocolError::FrameTooLong { limit: 16_384, .. })), "{result:?}");
    let mut server = ServerConnection::new(T0, ServerConfig::default());
    let get = b"\x10\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0GET / HTTP/1.1\r\n";
    assert_eq!(server.handle_input(T0, get), Err(ProtocolError::NotNigh));
}

#[test]
fn a_server_of_another_version_says_which_side_to_update() {
    let mut server = ServerConnection::new(T0, ServerConfig::default());
    let hello = Hello { min_version: 7, max_version: 9, ..samples::hello() };
    server.handle_input(T0, &Message::Hello(hello).encode()).unwrap();
    assert!(matches!(server.poll_event(), Some(ServerEvent::Bye { .. })));
    let refused = common::decode(&server.poll_transmit().unwrap()).unwrap();
    let Some(Message::Refused(refused)) = refused else { panic!("not refused") };
    assert!(refused.message.contains("update nigh on the server's machine"), "{}", refused.message);
    assert!(server.is_ended());
}

#[test]
fn a_server_enforces_ids_counts_sizes_and_acknowledgements() {
    assert_eq!(told(Limits::default(), &[lookup(1), lookup(1)]).1, Err(ProtocolError::CallInUse(CallId(1))));
    let few = Limits { max_calls: 2, ..Limits::default() };
    assert_eq!(told(few, &[lookup(1), lookup(2), lookup(3)]).1, Err(ProtocolError::TooManyCalls(2)));
    let acknowledged = Message::Acknowledge(RecallId(4));
    assert_eq!(told(few, &[acknowledged]).1, Err(ProtocolError::UnknownRecall(RecallId(4))));
    let read = Call::Read { node: samples::place(), handle: None, offset: 0, length: 101 };
    let small = Limits { max_data: 100, ..Limits::default() };
    let (mut server, result) = told(small, &[Message::Request(CallId(1), samples::request(read))]);
    assert!(matches!(result, Err(ProtocolError::Malformed(_))));
    let farewell = common::decode(&server.poll_transmit().unwrap()).unwrap();
    assert!(matches!(farewell, Some(Message::Bye(why)) if why.starts_with("protocol error: ")));
}

#[test]
fn a_server_passes_on_what_keeps_the_rules() {
    let release = Call::Release { handles: vec![Handle(1)] };
    let messages = [
        lookup(1),
        Message::Cancel(CallId(1)),
        Message::Cancel(CallId(8)),
        Message::Return(vec![GrantId(2)]),
    ];
    let (mut server, result) = told(Limits::default(), &messages);
    assert_eq!(result, Ok(()));
    server.handle_input(T0, &Message::Request(CallId(2), samples::request(release)).encode()).unwrap();
    server.handle_input(T0, &Message::Ping(6).encode()).unwrap();
    let events: Vec<_> = std::iter::from_fn(|| server.poll_event()).collect();
    assert!(matches!(events[0], ServerEvent::Request { call: CallId(1), .. }));
    assert_eq!(events[1..3], [ServerEvent::Cancel(CallId(1)), ServerEvent::Return(vec![GrantId(2)])]);
    assert!(matches!(events[3], ServerEvent::Request { call: CallId(2), .. }));
    assert_eq!((events.len(), server.outstanding()), (4, 1));
    server.respond(CallId(1), &Response::plain(Err(Errno::INTR)));
    let recall = Recall { id: RecallId(3), node: samples::id(1), covers: Covers::Inode, names: vec![] };
    server.recall(recall.clone());
    let sent: Vec<_> = std::iter::from_fn(|| server.poll_transmit())
        .map(|bytes| common::decode(&bytes).unwrap().unwrap())
        .collect();
    let response = Message::Response(CallId(1), Response::plain(Err(Errno::INTR)));
    assert_eq!(sent, [Message::Pong(6), response, Message::Recall(recall)]);
    server.handle_input(T0, &Message::Acknowledge(RecallId(3)).encode()).unwrap();
    assert_eq!(server.poll_event(), Some(ServerEvent::Acknowledge(RecallId(3))));
    server.handle_input(T0, &Message::Bye("done".to_owned()).encode()).unwrap();
    assert_eq!(server.poll_event(), Some(ServerEvent::Bye { why: "done".to_owned() }));
    server.transmit_encoded(CallId(1), true, vec![1]);
    assert_eq!(server.poll_transmit(), None);
}

#[test]
fn recalls_and_acknowledgements_pass_through_a_client() {
    let mut client = attached(Limits::default());
    let recall = Recall {
        id: RecallId(3),
        node: samples::id(1),
        covers: Covers::Names,
        names: vec![samples::name("x")],
    };
    client.handle_input(T0, &Message::Recall(recall.clone()).encode());
    assert_eq!(drain(&mut client).1, [Event::Recall(recall)]);
    client.handle_acknowledge(T0, RecallId(3));
    client.handle_return(T0, vec![GrantId(1), GrantId(2)]);
    let sent = drain(&mut client).0;
    assert_eq!(sent, [Message::Acknowledge(RecallId(3)), Message::Return(vec![GrantId(1), GrantId(2)])]);
}

fn lock(wait: bool) -> Call {
    let node = samples::place();
    Call::Lock { node, owner: 1, flock: false, kind: LockKind::Write, start: 0, end: 9, wait, pid: 1 }
}

#[test]
fn who_waits_for_locks_keeps_nobody_from_calling() {
    let few = Limits { max_calls: 1, ..Limits::default() };
    let mut client = attached(few);
    for id in 1..=u64::from(MAX_LOCK_WAITS) {
        client.handle_call(T0, CallId(id), samples::request(lock(true)));
    }
    let (messages, events, _) = drain(&mut client);
    assert_eq!((messages.len() as u64, events.len()), (u64::from(MAX_LOCK_WAITS), 0));
    client.handle_call(T0, CallId(100_000), samples::request(lock(true)));
    let refused = Response::plain(Err(Errno::NOLCK));
    let (messages, events, _) = drain(&mut client);
    assert_eq!(
        (messages, events),
        (vec![], vec![Event::Response { call: CallId(100_000), response: refused }])
    );
    for (id, sent) in [(100_001, 1), (100_002, 0)] {
        client.handle_call(T0, CallId(id), samples::request(lock(false)));
        assert_eq!(drain(&mut client).0.len(), sent, "calls that do not wait are bounded by themselves");
    }
    client.handle_input(T0, &encode_response(CallId(1), &ok(Reply::Done)));
    client.handle_call(T0, CallId(100_003), samples::request(lock(true)));
    assert_eq!(drain(&mut client).0.len(), 0, "it is in line behind the one that may not go yet");
    for id in [100_001, 100_002] {
        client.handle_input(T0, &encode_response(CallId(id), &ok(Reply::Done)));
        assert_eq!(drain(&mut client).0.len(), 1);
    }
}

#[test]
fn a_server_counts_waits_for_locks_by_themselves() {
    let few = Limits { max_calls: 1, ..Limits::default() };
    let request = |id, wait| Message::Request(CallId(id), samples::request(lock(wait)));
    let waits: Vec<Message> = (1..=u64::from(MAX_LOCK_WAITS)).map(|id| request(id, true)).collect();
    assert_eq!(told(few, &waits).1, Ok(()));
    let more = [waits.clone(), vec![request(100_000, true)]].concat();
    assert_eq!(told(few, &more).1, Err(ProtocolError::TooManyCalls(MAX_LOCK_WAITS)));
    let one = [waits.clone(), vec![request(100_000, false)]].concat();
    assert_eq!(told(few, &one).1, Ok(()));
    let two = [one, vec![request(100_001, false)]].concat();
    assert_eq!(told(few, &two).1, Err(ProtocolError::TooManyCalls(1)));
    let twice = [request(1, true), request(1, false)];
    assert_eq!(told(few, &twice).1, Err(ProtocolError::CallInUse(CallId(1))));
}
