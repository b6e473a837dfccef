//! One end of a session, and its output.

use super::pair::{T0, client};
use super::{decode, samples};
use nigh_native::*;
use nigh_remote::{Event, Output, Reason, Remote};
use nigh_types::*;

pub fn later(ms: u64) -> Time {
    T0.after(Span::from_millis(ms))
}

/// All output, as messages and events, and the timeout that follows.
pub fn drain(remote: &mut dyn Remote) -> (Vec<Message>, Vec<Event>, (Time, Reason)) {
    let (mut messages, mut events) = (Vec::new(), Vec::new());
    loop {
        match remote.poll_output() {
            Output::Event(event) => events.push(event),
            Output::Transmit(bytes) => messages.push(decode(&bytes).unwrap().unwrap()),
            Output::Timeout(moment, reason) => return (messages, events, (moment, reason)),
        }
    }
}

pub fn welcome(limits: Limits) -> Message {
    let session = samples::session();
    Message::Welcome(Welcome {
        version: MAX_VERSION,
        features: 0,
        session_id: 5,
        session_term: SESSION_TERM,
        limits,
        session,
        resumed: None,
    })
}

/// A client that has been welcomed.
pub fn attached(limits: Limits) -> ClientSession {
    let mut client = client(T0);
    client.handle_input(T0, &welcome(limits).encode());
    let (messages, events, _) = drain(&mut client);
    assert!(matches!(messages[..], [Message::Hello(_)]));
    assert_eq!(events, [Event::Attached(samples::session())]);
    client
}

pub fn ok(reply: Reply) -> Response {
    Response::plain(Ok(reply))
}

/// A server that has received `messages` after it accepted a client.
pub fn server_after(limits: Limits, messages: &[Message]) -> (ServerSession, Result<(), ProtocolError>) {
    let mut server = ServerSession::new(T0, ServerConfig { limits, ..ServerConfig::default() });
    server.handle_input(T0, &Message::Hello(samples::hello()).encode()).unwrap();
    assert!(matches!(server.poll_event(), Some(ServerEvent::Attach { incarnation: 9, .. })));
    server.accept(samples::session());
    assert!(server.poll_transmit().is_some());
    let bytes: Vec<u8> = messages.iter().flat_map(Message::encode).collect();
    let result = server.handle_input(T0, &bytes);
    (server, result)
}

pub fn lookup(id: u64) -> Message {
    Message::Request(CallId(id), samples::request(samples::queries().remove(0)))
}

pub fn lock(wait: bool) -> Call {
    let node = samples::place();
    Call::Lock {
        node,
        owner: 1,
        flock: false,
        kind: LockKind::Write,
        start: 0,
        end: 9,
        wait,
        pid: 1,
        reclaim: false,
    }
}
