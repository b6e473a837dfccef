//! Sessions over connections that are cut anywhere: each frame takes effect once, and in order.

use crate::common::cuts::{Dice, Effect, World};
use crate::common::ends::{drain, later};
use crate::common::pair::{T0, client};
use crate::common::samples;
use nigh_native::*;
use nigh_remote::{Event, Reason, Remote};
use nigh_types::*;

/// Calls, replies in one chunk and in several, cancellations, recalls, acknowledgements and returns, with occasional
/// cuts at any byte of either direction, also before the welcome of a resumption arrived.
#[test]
fn random_connection_cuts_keep_frames_exactly_once_in_order() {
    let (mut cancels, mut parts) = (0, 0);
    for seed in 0..200 {
        let mut dice = Dice(seed);
        let mut world = World::new();
        let most_bytes = if seed % 50 == 0 { 1 << 20 } else { 100 };
        for _ in 0..120 {
            for _ in 0..dice.below(5) {
                world.act(&mut dice, most_bytes);
            }
            world.put_out();
            if dice.below(4) == 0 {
                let (up, down) = (dice.below(300), dice.below(300));
                world.deliver_up(up);
                world.put_out();
                world.deliver_down(down);
                world.cut();
                for _ in 0..dice.below(3) {
                    world.act(&mut dice, most_bytes);
                }
                world.connect();
                world.put_out();
            } else {
                let (up, down) = (dice.below(2000), dice.below(2000));
                world.deliver_up(up);
                world.put_out();
                world.deliver_down(down);
            }
        }
        world.check();
        cancels += world.done.iter().filter(|effect| matches!(effect, Effect::Cancel(_))).count();
        parts += world
            .heard
            .iter()
            .filter(|e| matches!(e, Event::Response { response, .. } if !response.last))
            .count();
    }
    assert!(
        cancels > 200 && parts > 200,
        "{cancels} cancellations arrived, {parts} parts that were not the last"
    );
}

/// One exchange, cut after each of its bytes in either direction.
#[test]
fn connection_cut_at_every_byte_loses_and_repeats_nothing() {
    let script = |world: &mut World| {
        world.call(3);
        world.call(5);
        world.recall();
        world.put_out();
        world.deliver_up(u64::MAX);
        world.answer(0);
        world.put_out();
    };
    let mut whole = World::new();
    script(&mut whole);
    let lengths = (whole.to_server.len() as u64, whole.to_client.len() as u64);
    assert!(lengths.0 == 0 && lengths.1 > 50);
    for down in 0..=lengths.1 {
        for welcome in [0, 1, 20, 100, 1000] {
            let mut world = World::new();
            script(&mut world);
            world.deliver_down(down);
            world.put_out();
            world.cut();
            world.connect();
            world.put_out();
            world.deliver_up(u64::MAX);
            world.put_out();
            world.deliver_down(welcome);
            world.cut();
            world.connect();
            world.check();
        }
    }
    let mut up = 0;
    loop {
        let mut world = World::new();
        world.call(3);
        world.recall();
        world.call(4);
        world.put_out();
        let all = world.to_server.len() as u64;
        world.deliver_up(up);
        world.cut();
        world.connect();
        world.check();
        if up == all {
            break;
        }
        up += 1;
    }
}

#[test]
fn full_window_is_sent_again_over_next_connection() {
    let mut world = World::new();
    for _ in 0..30 {
        world.call(1 << 20);
    }
    world.put_out();
    assert!((world.to_server.len() as u64) < WINDOW_BYTES + (2 << 20), "no more is put out than the window");
    world.cut();
    world.connect();
    world.check();
    assert_eq!(world.done.len(), 30);
}

fn welcome(session_id: u64, resumed: Option<Resumed>) -> Vec<u8> {
    let session = samples::session();
    let (version, features, session_term, limits) = (MAX_VERSION, 0, SESSION_TERM, Limits::default());
    Message::Welcome(Welcome { version, features, session_id, session_term, limits, session, resumed })
        .encode()
}

fn attached() -> ClientSession {
    let mut client = client(T0);
    client.handle_input(T0, &welcome(9, None));
    drain(&mut client);
    client
}

fn granted(id: u64) -> Response {
    let grant = Grant { id: GrantId(id), ..samples::grant() };
    Response { grants: vec![grant], ..Response::plain(Ok(Reply::Entry(None))) }
}

fn look(client: &mut ClientSession, now: Time, id: u64) {
    let call = Call::Lookup { dir: samples::dir(), name: samples::name("x") };
    client.handle_call(now, CallId(id), samples::request(call));
}

#[test]
fn lapsed_client_reconnects_and_drops_earlier_grants() {
    let mut client = attached();
    look(&mut client, T0, 1);
    client.handle_disconnect(later(1_000), "cut");
    assert_eq!(drain(&mut client).2, (later(13_500), Reason::SessionEnd));
    client.handle_connect(later(2_000));
    client.handle_timeout(later(13_500));
    let (messages, events, _) = drain(&mut client);
    assert!(messages.is_empty() && matches!(events[..], [Event::Expired { .. }]), "{messages:?} {events:?}");
    client.handle_connect(later(14_000));
    let (messages, ..) = drain(&mut client);
    let resume = Some(Resume { session_id: 9, received: 0 });
    assert!(matches!(&messages[..], [Message::Hello(hello)] if hello.resume == resume));
    client.handle_input(later(14_100), &welcome(9, Some(Resumed { received: 0, lapsed: true })));
    let (messages, events, timeout) = drain(&mut client);
    assert_eq!(events, [Event::Restored { session: samples::session(), kept: true }]);
    assert!(matches!(messages[..], [Message::Request(CallId(1), _), Message::Ping(..)]), "{messages:?}");
    assert_eq!(timeout.1, Reason::Renewal);
    client.handle_input(later(14_200), &encode_response(CallId(1), &granted(5)));
    let (messages, events, _) = drain(&mut client);
    assert_eq!(messages, [], "what was granted since may stand on it");
    assert!(matches!(&events[..], [Event::Response { response, .. }] if response.grants.is_empty()));
}

#[test]
fn handshake_timeout_is_shorter_on_reconnect() {
    let mut first = client(T0);
    assert_eq!(drain(&mut first).2, (later(30_000), Reason::SessionEnd));
    let mut again = attached();
    again.handle_disconnect(later(1_000), "cut");
    again.handle_connect(later(1_000));
    again.handle_timeout(later(10_999));
    assert_eq!(again.wants_connection(), None);
    assert_eq!(drain(&mut again).2, (later(11_000), Reason::SessionEnd));
    again.handle_timeout(later(11_000));
    assert_eq!(again.wants_connection(), Some("the server does not greet"));
}

#[test]
fn calls_are_resent_to_forgetful_server_only_after_reclaim() {
    let mut client = attached();
    let mkdir = Call::Mkdir { dir: samples::dir(), name: samples::name("x"), mode: 0, umask: 0 };
    client.handle_call(T0, CallId(1), samples::request(mkdir.clone()));
    look(&mut client, T0, 2);
    client.handle_cancel(T0, CallId(2));
    client.handle_input(T0, &encode_response(CallId(2), &granted(5)));
    let recall =
        Recall { id: RecallId(7), node: samples::id(1), covers: LeaseScope::Attributes, names: vec![] };
    client.handle_input(T0, &Message::Recall(recall.clone()).encode());
    drain(&mut client);
    client.handle_disconnect(later(1), "cut");
    client.handle_connect(later(2));
    drain(&mut client);
    client.handle_input(later(3), &welcome(4, None));
    let (messages, events, _) = drain(&mut client);
    assert_eq!(messages, []);
    assert_eq!(events, [Event::Restored { session: samples::session(), kept: false }]);
    // Ids of the forgotten session mean nothing in this one.
    client.handle_acknowledge(later(3), RecallId(7));
    client.handle_return(later(3), vec![GrantId(5)]);
    look(&mut client, later(3), 3);
    let access =
        Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
    let reopen = Call::Reopen { node: samples::place(), handle: Handle(4), access };
    client.handle_call(later(3), CallId(4), samples::request(reopen));
    let (messages, ..) = drain(&mut client);
    assert!(matches!(messages[..], [Message::Request(CallId(4), _)]), "{messages:?}");
    client.handle_reclaimed(later(4));
    client.handle_reclaimed(later(4));
    let (messages, ..) = drain(&mut client);
    let again = Message::Resent(CallId(1), samples::request(mkdir));
    assert_eq!(messages[..2], [Message::Reclaimed, again]);
    assert!(matches!(messages[2..], [Message::Request(CallId(3), _)]));
    // Ids of both sessions differ.
    client.handle_input(later(5), &encode_response(CallId(3), &granted(5)));
    client.handle_input(later(5), &Message::Recall(recall.clone()).encode());
    let (_, events, _) = drain(&mut client);
    let [Event::Response { response, .. }, Event::Recall(second)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((response.grants[0].id, second.id), (GrantId(10), RecallId(14)));
    client.handle_acknowledge(later(6), second.id);
    client.handle_return(later(6), vec![GrantId(10)]);
    let (messages, ..) = drain(&mut client);
    assert_eq!(messages, [Message::Acknowledge(RecallId(7)), Message::Return(vec![GrantId(5)])]);
}

#[test]
fn restarted_listing_omits_entries_already_delivered() {
    let key = samples::session().cookie_key;
    let mut names = ["a", "b", "c", "d"];
    names.sort_by_key(|leaf| key.cookie(leaf.as_bytes()));
    let part = |names: &[&str], last| {
        let entries = names.iter().map(|leaf| (samples::name(leaf), samples::entry(0o100_644))).collect();
        Response { last, ..Response::plain(Ok(Reply::Listed(Entries { entries }))) }
    };
    let mut client = attached();
    client.handle_call(T0, CallId(1), samples::request(Call::List { dir: samples::dir() }));
    client.handle_input(T0, &encode_response(CallId(1), &part(&names[..2], false)));
    client.handle_disconnect(T0, "cut");
    client.handle_connect(T0);
    client.handle_input(T0, &welcome(4, None));
    client.handle_reclaimed(T0);
    drain(&mut client);
    // One of the entries passed on has been removed meanwhile, which is not reported any more.
    client.handle_input(T0, &encode_response(CallId(1), &part(&[names[1], names[2]], false)));
    client.handle_input(T0, &encode_response(CallId(1), &part(&names[3..], true)));
    let (_, events, _) = drain(&mut client);
    let listed = |event: &Event| match event {
        Event::Response { response: Response { result: Ok(Reply::Listed(part)), .. }, .. } => {
            part.entries.len()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(events.iter().map(listed).collect::<Vec<_>>(), [1, 1]);
}

/// Their reader has a full listing on its way; and the server that comes back may not support them.
#[test]
fn names_only_listing_ends_with_its_session() {
    let mut client = attached();
    let after = samples::session().cookie_key.cookie(b"a");
    client.handle_call(T0, CallId(1), samples::request(Call::ListNames { dir: samples::dir(), after }));
    client.handle_disconnect(T0, "cut");
    client.handle_connect(T0);
    client.handle_input(T0, &welcome(4, None));
    client.handle_reclaimed(T0);
    let (messages, events, _) = drain(&mut client);
    assert!(!messages.iter().any(|message| matches!(message, Message::Request(..))), "{messages:?}");
    let cancelled = Response::plain(Err(Errno::CANCELED));
    assert!(events.contains(&Event::Response { call: CallId(1), response: cancelled }), "{events:?}");
}

/// The server that comes back may be an older one, without support for the call.
#[test]
fn lookup_by_number_is_resent_only_to_supporting_server() {
    for finds_numbers in [false, true] {
        let mut client = attached();
        client.handle_call(T0, CallId(1), samples::request(Call::LookupNumber { ino: 7 }));
        drain(&mut client);
        client.handle_disconnect(T0, "cut");
        client.handle_call(T0, CallId(2), samples::request(Call::LookupNumber { ino: 8 }));
        client.handle_connect(T0);
        let supports = Features { lookup_number: finds_numbers, ..samples::session().supports };
        let session = SessionParams { supports, ..samples::session() };
        let anew = Message::Welcome(Welcome { session_id: 4, session, ..samples::welcome() });
        client.handle_input(T0, &anew.encode());
        client.handle_reclaimed(T0);
        let (messages, events, _) = drain(&mut client);
        let is_request = |message: &&Message| matches!(message, Message::Request(..) | Message::Resent(..));
        assert_eq!(
            messages.iter().filter(is_request).count(),
            if finds_numbers { 2 } else { 0 },
            "{messages:?}"
        );
        for call in [CallId(1), CallId(2)] {
            let stale = Event::Response { call, response: Response::plain(Err(Errno::STALE)) };
            assert_eq!(events.contains(&stale), !finds_numbers, "{events:?}");
        }
    }
}
