//! Rules, counters and timers of sessions.

use crate::common::ends::{attached, drain, later, lock, ok, server_after, welcome};
use crate::common::pair::{Server, T0, client};
use crate::common::samples;
use nigh_native::*;
use nigh_remote::{Event, Reason, Remote};
use nigh_types::*;

fn lost(events: &[Event]) -> &str {
    match events {
        [Event::Lost { why }] => why,
        other => panic!("not lost: {other:?}"),
    }
}

fn lapsed(events: &[Event]) -> &str {
    match events {
        [Event::Expired { why }] => why,
        other => panic!("not lapsed: {other:?}"),
    }
}

/// Sends `call`, replies with `responses`, and returns the session's events.
fn answered(call: Call, responses: &[Response]) -> Vec<Event> {
    let mut client = attached(Limits::default());
    client.handle_call(T0, CallId(1), samples::request(call));
    for response in responses {
        client.handle_input(T0, &encode_response(CallId(1), response));
    }
    drain(&mut client).1
}

#[test]
fn reply_of_wrong_kind_loses_session() {
    let calls = samples::calls();
    let mut fits = 0;
    for call in calls.into_iter().filter(Call::has_reply) {
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
fn reply_about_another_node_loses_session() {
    let place = samples::place();
    let wrong = |call: Call, reply| assert!(lost(&answered(call, &[ok(reply)])).contains("wrong answer"));
    let attr = samples::attr(0o100_644);
    wrong(Call::GetAttr { node: place.clone() }, Reply::Attr(samples::id(8), attr));
    let found = Reply::Found { node: samples::id(8), attr, parent_entry: None };
    wrong(Call::LookupNumber { ino: samples::id(7).ino }, found);
    let read = Call::Read { node: place.clone(), handle: None, offset: 0, length: 3 };
    wrong(read.clone(), Reply::Data(vec![0; 4]));
    assert!(matches!(answered(read, &[ok(Reply::Data(vec![0; 3]))])[..], [Event::Response { .. }]));
    let mkdir = Call::Mkdir { dir: samples::dir(), name: samples::name("x"), mode: 0, umask: 0 };
    let made = |mode, handle| Reply::Created { entry: samples::entry(mode), handle, existed: false };
    wrong(mkdir.clone(), made(0o100_644, None));
    wrong(mkdir.clone(), made(0o040_755, Some(Handle(1))));
    assert!(matches!(answered(mkdir, &[ok(made(0o040_755, None))])[..], [Event::Response { .. }]));
    let unlink = Call::Unlink { dir: samples::dir(), name: samples::name("x"), keep: None };
    wrong(unlink, Reply::Removed { node: samples::id(7), pinned: Some(Handle(1)) });
}

#[test]
fn write_grant_that_was_not_asked_for_loses_session() {
    let lookup = || Call::Lookup { dir: samples::dir(), name: samples::name("x") };
    for mode in [Mode::Read, Mode::Write] {
        let grants = vec![samples::grant(), Grant { mode, ..samples::grant() }];
        let events = answered(lookup(), &[Response { grants, ..ok(Reply::Entry(None)) }]);
        match (mode, &events[..]) {
            (Mode::Read, [Event::Response { response, .. }]) => assert_eq!(response.grants.len(), 2),
            (Mode::Write, events) => assert!(lost(events).contains("a write grant that was not asked for")),
            (Mode::Read, events) => panic!("{events:?}"),
        }
    }
}

fn part(names: &[&str], last: bool) -> Response {
    let entries = names.iter().map(|leaf| (samples::name(leaf), samples::entry(0o100_644))).collect();
    Response { last, ..ok(Reply::Listed(Entries { entries })) }
}

#[test]
fn listing_out_of_cookie_order_loses_session() {
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

fn alone(names: &[&str], last: bool) -> Response {
    let dirent = |leaf: &&str| Dirent { name: samples::name(leaf), ino: 7, kind: None };
    Response { last, ..ok(Reply::Dirents(names.iter().map(dirent).collect())) }
}

#[test]
fn names_only_listing_out_of_order_or_before_its_start_loses_session() {
    let key = samples::session().cookie_key;
    let mut names = ["a", "b", "c", "d"];
    names.sort_by_key(|leaf| key.cookie(leaf.as_bytes()));
    let [a, b, c, d] = names;
    let behind = |leaf: &str| Call::ListNames { dir: samples::dir(), after: key.cookie(leaf.as_bytes()) };
    let good = answered(behind(a), &[alone(&[b], false), alone(&[], false), alone(&[c, d], true)]);
    assert_eq!(good.len(), 3);
    let bad: [&[Response]; 5] = [
        &[alone(&[a, b], true)],
        &[alone(&[c, b], true)],
        &[alone(&[b, b], true)],
        &[alone(&[b, d], false), alone(&[c], true)],
        &[alone(&[b], false), alone(&[], false), alone(&[b], true)],
    ];
    for responses in bad {
        let events = answered(behind(a), responses);
        assert!(lost(&events[events.len() - 1..]).contains("cookie order"), "{events:?}");
    }
    assert!(lost(&answered(behind(a), &[part(&[b], true)])).contains("another kind"));
    assert!(
        lost(&answered(Call::List { dir: samples::dir() }, &[alone(&[b], true)])).contains("another kind")
    );
}

#[test]
fn unexpected_response_loses_session_and_ends_output() {
    let lookup = Call::Lookup { dir: samples::dir(), name: samples::name("x") };
    let events = answered(lookup, &[ok(Reply::Entry(None)), ok(Reply::Entry(None))]);
    assert!(lost(&events[1..]).contains("not outstanding"));
    let mut client = attached(Limits::default());
    client.handle_input(T0, &encode_response(CallId(9), &ok(Reply::Done)));
    let (messages, events, timeout) = drain(&mut client);
    assert_eq!(messages, [], "a Bye would say that all grants are dropped");
    assert!(lost(&events).contains("not outstanding"));
    assert_eq!(timeout, (Time::FAR, Reason::Idle));
    client.handle_call(T0, CallId(10), samples::request(samples::queries().remove(0)));
    client.handle_input(T0, &Message::Ping(1, 0).encode());
    client.handle_disconnect(T0, "eof");
    client.handle_timeout(later(100_000));
    assert_eq!(drain(&mut client), (vec![], vec![], (Time::FAR, Reason::Idle)));
}

#[test]
fn calls_wait_for_welcome_and_for_free_call_slots() {
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
fn call_beyond_limits_fails_without_being_sent() {
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
    assert_eq!((messages, timeout), (vec![Message::Ping(1, 0)], (later(10_000), Reason::Renewal)));
    client.handle_input(later(5_010), &Message::Pong(1, 0).encode());
    assert_eq!(drain(&mut client).2, (later(10_000), Reason::Renewal));
    client.handle_call(later(9_000), CallId(1), samples::request(samples::queries().remove(0)));
    client.handle_input(later(9_500), &encode_response(CallId(1), &ok(Reply::Entry(None))));
    assert_eq!(drain(&mut client).2, (later(14_000), Reason::Renewal));
    assert_eq!((client.counters().renewals, client.counters().requests), (1, 1));
}

#[test]
fn a_silent_server_loses_the_session_before_the_term_ends() {
    let mut client = attached(Limits::default());
    for ms in [5_000, 10_000] {
        client.handle_timeout(later(ms));
        assert!(matches!(drain(&mut client).0[..], [Message::Ping(..)]));
    }
    assert_eq!(drain(&mut client).2, (later(13_500), Reason::SessionEnd));
    client.handle_input(later(13_000), &Message::Pong(1, 0).encode());
    assert_eq!(drain(&mut client).2.0, later(13_500), "a pong to an older ping tells nothing new");
    client.handle_timeout(later(13_500));
    assert!(lapsed(&drain(&mut client).1).contains("not answered for too long"));
}

#[test]
fn client_suspended_past_its_term_lapses_before_handling_input() {
    let mut client = attached(Limits::default());
    client.handle_timeout(later(20_000));
    let (messages, events, _) = drain(&mut client);
    assert_eq!(messages, []);
    assert!(lapsed(&events).contains("gone on without us"));
    client.handle_input(later(20_000), &Message::Ping(1, 0).encode());
    assert_eq!(drain(&mut client).0, []);
}

#[test]
fn counters_match_sent_messages() {
    let mut server = Server::new(T0, u32::MAX);
    let mut client = client(T0);
    let mut now = T0;
    server.exchange(now, &mut client);
    assert_eq!(client.counters().requests, 0);
    let root = NodeRef::without_hint(server.tree.root());
    let lookup = Call::Lookup { dir: root.clone(), name: samples::name("x") };
    client.handle_call(now, CallId(1), samples::request(lookup));
    client.handle_call(now, CallId(2), samples::request(Call::List { dir: root }));
    client.handle_call(now, CallId(3), samples::request(Call::Release { handles: vec![Handle(1)] }));
    client.handle_return(now, vec![GrantId(1)]);
    assert_eq!(server.exchange(now, &mut client).len(), 2);
    now = later(5_000);
    client.handle_timeout(now);
    server.exchange(now, &mut client);
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

#[test]
fn text_of_a_server_arrives_as_one_printable_line_of_bounded_length() {
    let hostile = format!("no \u{1b}[2J\u{1b}]0;X\u{7} entry\nnigh: done\r\n{}", "A".repeat(1 << 20));
    let one_line = |text: &str| text.chars().count() <= 400 && !text.chars().any(char::is_control);
    let mut refused = client(T0);
    let refusal = Refused { errno: Errno::ACCES, message: hostile.clone() };
    refused.handle_input(T0, &Message::Refused(refusal).encode());
    assert!(one_line(lost(&drain(&mut refused).1)));
    assert!(refused.refused().is_some_and(|refused| one_line(&refused.message)));
    let mut ended = attached(Limits::default());
    ended.handle_input(T0, &Message::Bye(hostile.clone()).encode());
    assert!(one_line(lost(&drain(&mut ended).1)));
    let Message::Welcome(mut greeting) = welcome(Limits::default()) else { panic!("no welcome") };
    greeting.session.guarantees.staleness_bound.clone_from(&hostile);
    greeting.session.guarantees.unsupported =
        vec![UnsupportedGuarantee { name: hostile.clone(), why: hostile, by_protocol: false }];
    let mut told = client(T0);
    told.handle_input(T0, &Message::Welcome(greeting).encode());
    let events = drain(&mut told).1;
    let [Event::Attached(session)] = &events[..] else { panic!("{events:?}") };
    let UnsupportedGuarantee { name, why, .. } = &session.guarantees.unsupported[0];
    assert!([&session.guarantees.staleness_bound, name, why].into_iter().all(|text| one_line(text)));
}

#[test]
fn recalls_and_acknowledgements_pass_through_a_client() {
    let mut client = attached(Limits::default());
    let recall = Recall {
        id: RecallId(3),
        node: samples::id(1),
        covers: LeaseScope::Directory,
        names: vec![samples::name("x")],
    };
    client.handle_input(T0, &Message::Recall(recall.clone()).encode());
    assert_eq!(drain(&mut client).1, [Event::Recall(recall)]);
    client.handle_acknowledge(T0, RecallId(3));
    client.handle_return(T0, vec![GrantId(1), GrantId(2)]);
    let sent = drain(&mut client).0;
    assert_eq!(sent, [Message::Acknowledge(RecallId(3)), Message::Return(vec![GrantId(1), GrantId(2)])]);
}

#[test]
fn waiting_lock_calls_do_not_use_up_call_limit() {
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

/// So large that 15 of them fit into a session's limit of unanswered bytes, and one more request of any size might not.
fn write() -> Request {
    let (node, handle, data) = (samples::place(), Some(Handle(1)), vec![1; 4 << 20]);
    samples::request(Call::Write { node, handle, offset: 0, data, flags: WriteFlags::default() })
}

#[test]
fn unanswered_byte_limit_queues_at_client_and_is_enforced_by_server() {
    let mut client = attached(Limits::default());
    let (mut sent, mut bytes) = (Vec::new(), 0);
    for id in 0..40 {
        client.handle_call(T0, CallId(id), write());
    }
    // All output is confirmed at once, so the call does not wait for the window.
    loop {
        let (messages, ..) = drain(&mut client);
        if messages.is_empty() {
            break;
        }
        bytes += messages.iter().map(|message| message.encode().len() as u64).sum::<u64>();
        sent.extend(messages);
        client.handle_input(T0, &Message::Received(sent.len() as u64).encode());
    }
    assert_eq!(sent.len(), 15);
    assert!(bytes <= MAX_UNANSWERED_BYTES);
    let answer = ok(Reply::Written { offset: 0, count: 4 << 20 });
    client.handle_input(T0, &encode_response(CallId(3), &answer));
    assert_eq!(drain(&mut client).0.len(), 1);
    let (mut server, mut result) = server_after(Limits::default(), &sent);
    for id in 100..103 {
        result =
            result.and_then(|()| server.handle_input(T0, &Message::Request(CallId(id), write()).encode()));
    }
    assert_eq!(result, Err(ProtocolError::TooManyBytes(MAX_UNANSWERED_BYTES)));
}

#[test]
fn client_observes_byte_limit_of_small_server() {
    let limits = Limits { max_bytes: 9 << 20, ..Limits::default() };
    let mut keeps = attached(limits);
    (0..10).for_each(|id| keeps.handle_call(T0, CallId(id), write()));
    assert_eq!(drain(&mut keeps).0.len(), 2);
    keeps.handle_input(T0, &Message::Received(2).encode());
    assert_eq!(drain(&mut keeps).0.len(), 0, "a third may be as long as any");
    let answer = ok(Reply::Written { offset: 0, count: 4 << 20 });
    keeps.handle_input(T0, &encode_response(CallId(0), &answer));
    let (messages, ..) = drain(&mut keeps);
    assert!(matches!(messages[..], [Message::Request(CallId(2), _)]), "{}", messages.len());
    // No call could fit into such a limit, and nothing would ever be sent.
    let mut stuck = client(T0);
    stuck.handle_input(T0, &welcome(Limits { max_bytes: 1 << 20, ..limits }).encode());
    assert!(lost(&drain(&mut stuck).1).contains("a limit of bytes"));
}
