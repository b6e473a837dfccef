//! A client's report of an open file precedes its acknowledgement, whatever else waits.

use crate::common::ends::drain;
use crate::common::pair::{T0, client};
use crate::common::{decode, samples};
use nigh_native::*;
use nigh_remote::Remote;
use nigh_types::*;

fn keep(handle: u64) -> Call {
    Call::PinOpen { node: samples::place(), names: vec![samples::name("a")], handle: Handle(handle) }
}

const OURS: u64 = Handle::CLIENT_ASSIGNED | 3;

fn sent(client: &mut ClientSession) -> Vec<Message> {
    drain(client).0
}

#[test]
fn open_pin_is_sent_before_queued_calls() {
    let mut client = client(T0);
    client.handle_input(
        T0,
        &Message::Welcome(Welcome {
            version: MAX_VERSION,
            features: 0,
            session_id: 5,
            session_term: SESSION_TERM,
            limits: Limits { max_calls: 1, ..Limits::default() },
            session: samples::session(),
            resumed: None,
        })
        .encode(),
    );
    sent(&mut client);
    for id in [1, 2] {
        client.handle_call(T0, CallId(id), samples::request(samples::queries().remove(0)));
    }
    client.handle_call(T0, CallId(3), samples::request(keep(OURS)));
    client.handle_acknowledge(T0, RecallId(6));
    let said = sent(&mut client);
    assert!(
        matches!(
            said[..],
            [
                Message::Request(CallId(1), _),
                Message::Request(CallId(3), _),
                Message::Acknowledge(RecallId(6))
            ]
        ),
        "{said:?}"
    );
    assert_eq!(client.counters().requests, 1, "it expects no answer");
}

#[test]
fn open_pin_of_muted_session_is_handled_without_renewal() {
    let mut server = ServerSession::new(T0, ServerConfig::default());
    server.handle_input(T0, &Message::Hello(samples::hello()).encode()).unwrap();
    server.poll_event();
    server.accept(samples::session());
    while server.poll_transmit().is_some() {}
    server.mute(true);
    let call = Message::Request(CallId(1), samples::request(samples::queries().remove(0)));
    for message in [call, Message::Request(CallId(2), samples::request(keep(OURS)))] {
        server.handle_input(T0, &message.encode()).unwrap();
    }
    assert!(matches!(server.poll_event(), Some(ServerEvent::Request { call: CallId(2), .. })));
    assert_eq!(server.poll_event(), None);
    assert_eq!(server.poll_transmit(), None);
}

#[test]
fn open_pin_without_client_handle_bit_is_protocol_error() {
    for (handle, is_good) in
        [(OURS, true), (u64::MAX, true), (3, false), (Handle::CLIENT_ASSIGNED - 1, false)]
    {
        let message = Message::Request(CallId(1), samples::request(keep(handle)));
        assert_eq!(decode(&message.encode()).is_ok(), is_good, "{handle}");
    }
}

#[test]
fn open_pin_without_connection_precedes_acknowledgement_on_next_one() {
    let mut client = client(T0);
    let welcome = |resumed| {
        let (version, limits, session) = (MAX_VERSION, Limits::default(), samples::session());
        let (features, session_id, session_term) = (0, 5, SESSION_TERM);
        Message::Welcome(Welcome { version, features, session_id, session_term, limits, session, resumed })
    };
    client.handle_input(T0, &welcome(None).encode());
    client.handle_disconnect(T0, "cut");
    sent(&mut client);
    client.handle_call(T0, CallId(3), samples::request(keep(OURS)));
    client.handle_acknowledge(T0, RecallId(6));
    client.handle_connect(T0);
    assert!(matches!(sent(&mut client)[..], [Message::Hello(_)]));
    client.handle_input(T0, &welcome(Some(Resumed { received: 0, lapsed: false })).encode());
    let said = sent(&mut client);
    assert!(
        matches!(
            said[..],
            [Message::Request(CallId(3), _), Message::Acknowledge(RecallId(6)), Message::Ping(..)]
        ),
        "{said:?}"
    );
}
