//! Calls made in a session that the server has forgotten.

use crate::common::ends::drain;
use crate::common::pair::{T0, client};
use crate::common::samples;
use nigh_native::*;
use nigh_remote::{Event, Remote};
use nigh_types::*;

fn welcome(client: &mut ClientSession, session_id: u64, session: SessionParams) {
    let (version, features, session_term, limits) = (MAX_VERSION, 0, SESSION_TERM, Limits::default());
    let welcome = Welcome { version, features, session_id, session_term, limits, session, resumed: None };
    client.handle_input(T0, &Message::Welcome(welcome).encode());
}

fn attached() -> ClientSession {
    let mut client = client(T0);
    welcome(&mut client, 9, samples::session());
    drain(&mut client);
    client
}

/// The server has forgotten the session; the client learns that, and nothing else happens yet.
fn forgotten(client: &mut ClientSession, session_id: u64) {
    client.handle_disconnect(T0, "cut");
    client.handle_connect(T0);
    drain(client);
    welcome(client, session_id, samples::session());
}

fn ask(client: &mut ClientSession, id: u64, call: Call) {
    client.handle_call(T0, CallId(id), samples::request(call));
}

fn mkdir(name: &str) -> Call {
    Call::Mkdir { dir: samples::dir(), name: samples::name(name), mode: 0, umask: 0 }
}

fn look() -> Call {
    Call::Lookup { dir: samples::dir(), name: samples::name("x") }
}

fn reopen(handle: u64) -> Call {
    let access =
        Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
    Call::Reopen { node: samples::place(), handle: Handle(handle), access }
}

fn claim() -> Call {
    let (kind, start, end) = (LockKind::Write, 0, 9);
    let node = samples::place();
    Call::Lock { node, owner: 1, flock: false, kind, start, end, wait: false, pid: 1, reclaim: true }
}

fn walk() -> Call {
    Call::ResolvePath { node: samples::id(1), names: vec![samples::name("x")] }
}

fn restored() -> Event {
    Event::Restored { session: samples::session(), kept: false }
}

fn failed(call: u64, errno: Errno) -> Event {
    Event::Response { call: CallId(call), response: Response::plain(Err(errno)) }
}

/// The calls that were sent, and those sent again.
fn sent(messages: &[Message]) -> (Vec<u64>, Vec<u64>) {
    let (mut new, mut again) = (vec![], vec![]);
    for message in messages {
        match message {
            Message::Request(call, _) => new.push(call.0),
            Message::Resent(call, _) => again.push(call.0),
            Message::Reclaimed => {}
            other => panic!("{other:?}"),
        }
    }
    (new, again)
}

#[test]
fn cancelled_call_is_not_resent_in_new_session() {
    let mut client = attached();
    ask(&mut client, 1, mkdir("a"));
    ask(&mut client, 2, mkdir("b"));
    ask(&mut client, 3, mkdir("c"));
    client.handle_cancel(T0, CallId(1));
    drain(&mut client);
    forgotten(&mut client, 10);
    assert_eq!(drain(&mut client).1, [restored(), failed(1, Errno::INTR)], "cancelled before");
    client.handle_cancel(T0, CallId(2));
    let (messages, events, _) = drain(&mut client);
    assert_eq!((messages, events), (vec![], vec![failed(2, Errno::INTR)]), "and since");
    client.handle_reclaimed(T0);
    let (messages, events, _) = drain(&mut client);
    assert_eq!((sent(&messages), events), ((vec![], vec![3]), vec![]));
    client.handle_cancel(T0, CallId(3));
    assert_eq!(drain(&mut client).0, [Message::Cancel(CallId(3))], "it is on its way");
}

#[test]
fn reclaim_calls_of_forgotten_session_are_not_resent() {
    let mut client = attached();
    ask(&mut client, 1, mkdir("a"));
    drain(&mut client);
    forgotten(&mut client, 10);
    for (id, call) in [(2, reopen(4)), (3, claim()), (4, walk()), (5, look())] {
        ask(&mut client, id, call);
    }
    assert_eq!(sent(&drain(&mut client).0), (vec![2, 3, 4], vec![]));
    client.handle_disconnect(T0, "cut");
    // Not sent yet.
    for (id, call) in [(6, reopen(5)), (7, claim()), (8, walk())] {
        ask(&mut client, id, call);
    }
    client.handle_connect(T0);
    drain(&mut client);
    welcome(&mut client, 11, samples::session());
    let (messages, events, _) = drain(&mut client);
    assert_eq!(
        (messages, events),
        (vec![], vec![restored()]),
        "their number is claimed by its present holder"
    );
    ask(&mut client, 9, reopen(4));
    assert_eq!(sent(&drain(&mut client).0), (vec![9], vec![]));
    client.handle_reclaimed(T0);
    let (messages, events, _) = drain(&mut client);
    assert_eq!((sent(&messages), events), ((vec![8, 5], vec![1, 4]), vec![]), "walks are answered");
}

#[test]
fn calls_fail_when_server_changed_its_id_key() {
    let mut client = attached();
    ask(&mut client, 1, mkdir("a"));
    drain(&mut client);
    forgotten(&mut client, 10);
    ask(&mut client, 2, reopen(4));
    ask(&mut client, 3, look());
    drain(&mut client);
    client.handle_disconnect(T0, "cut");
    ask(&mut client, 4, walk());
    ask(&mut client, 5, mkdir("b"));
    client.handle_connect(T0);
    drain(&mut client);
    let session = SessionParams { cookie_key: CookieKey([9; 16]), ..samples::session() };
    assert_ne!(session.cookie_key, samples::session().cookie_key);
    welcome(&mut client, 11, session.clone());
    let (messages, mut events, _) = drain(&mut client);
    assert_eq!(messages, []);
    assert_eq!(events.remove(0), Event::Restored { session, kept: false });
    let mut answered: Vec<u64> = events
        .iter()
        .map(|event| match event {
            Event::Response { call, response } if response.result == Err(Errno::IO) => call.0,
            other => panic!("{other:?}"),
        })
        .collect();
    answered.sort_unstable();
    assert_eq!(answered, [1, 3, 4, 5]);
    ask(&mut client, 6, look());
    client.handle_cancel(T0, CallId(1));
    client.handle_reclaimed(T0);
    let (messages, events, _) = drain(&mut client);
    assert_eq!((sent(&messages), events), ((vec![6], vec![]), vec![]), "what is asked since goes on");
}

/// Others may rely on the lost session's grants until the client reports that it uses none of them.
#[test]
fn session_after_lost_one_reclaims_before_other_calls() {
    let config = ClientConfig { client: 1, incarnation: 2, attach: vec![], term: Term::Session, features: 0 };
    let mut client = ClientSession::after_lost(T0, config);
    let hello = drain(&mut client).0;
    assert!(matches!(&hello[..], [Message::Hello(Hello { resume: Some(Resume { session_id: 0, .. }), .. })]));
    client.handle_call(T0, CallId(1), samples::request(samples::queries().remove(0)));
    welcome(&mut client, 5, samples::session());
    assert_eq!(drain(&mut client).0, []);
    client.handle_reclaimed(T0);
    assert!(matches!(drain(&mut client).0[..], [Message::Reclaimed, Message::Request(CallId(1), _)]));
}
