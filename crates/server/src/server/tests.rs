//! Races of a session's reader with the pool.

use super::*;
use nigh_native::{Hello, MAX_VERSION, MIN_VERSION, Message, encode_request};
use nigh_types::{Access, Credentials, Handle, Name, Place, Reply};
use std::sync::mpsc;
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(10);

fn world() -> (Arc<Server>, TempDir, TempDir) {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    (Server::new(ServerOptions::new(state.path().to_owned())).unwrap(), state, dir)
}

/// A session that is attached and has no threads of its own; and the client's end of its stream.
fn attached(server: &Server, dir: &Path) -> (Arc<Session>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let config = ServerConfig { session_id: 1, ..ServerConfig::default() };
    let story = crate::events::Story::new(&Arc::default(), nigh_link::Kind::Unix);
    let session = Arc::new(Session::new(config, ours.into(), Peer::in_process(), story, &server.leases));
    let hello = Hello {
        min_version: MIN_VERSION,
        max_version: MAX_VERSION,
        features: 0,
        client: 1,
        incarnation: 1,
        attach: dir.as_os_str().as_encoded_bytes().to_vec(),
        term: Term::Session,
    };
    assert!(server.hear(&session, &Message::Hello(hello).encode()).is_none());
    assert!(session.attached().is_some());
    (session, theirs)
}

fn asking(call: Call) -> Request {
    Request { credentials: Credentials::default(), name: None, call }
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < give_up, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_cancel_that_crosses_its_answer_is_not_kept() {
    let (server, _state, dir) = world();
    let (session, _theirs) = attached(&server, dir.path());
    let root = Place::bare(session.attached().unwrap().export.reach().root());
    let getattr = asking(Call::GetAttr { node: root });
    let seven = CallId(7);
    server.hear(&session, &encode_request(seven, &getattr));
    wait("no answer", || !session.with_connection(|connection| connection.is_outstanding(seven)));
    // The reader had taken it from the stream before, and comes to it now.
    server.take(&session, ServerEvent::Cancel(seven));
    assert!(!session.is_cancelled(seven));
    // One that is at work is noted until it is answered.
    session.with_connection(|connection| {
        connection.handle_input(now(), &encode_request(seven, &getattr)).unwrap();
        assert!(matches!(connection.poll_event(), Some(ServerEvent::Request { .. })));
    });
    server.take(&session, ServerEvent::Cancel(seven));
    assert!(session.is_cancelled(seven));
    session.answer(seven, Response::plain(Ok(Reply::Done)));
    assert!(!session.is_cancelled(seven));
}

#[test]
fn a_close_that_takes_long_keeps_nobody_from_being_heard() {
    let (server, _state, dir) = world();
    std::fs::write(dir.path().join("f"), "").unwrap();
    let (session, _theirs) = attached(&server, dir.path());
    let Attached { export, files, .. } = session.attached().unwrap();
    let root = Place::bare(export.reach().root());
    let execute = |call| {
        let mut result = None;
        export.execute(files, CallId(1), asking(call), &mut |response| result = Some(response.result));
        result.unwrap().unwrap()
    };
    let name = Name::new(b"f").unwrap();
    let Reply::Looked(Some(entry)) = execute(Call::Lookup { dir: root.clone(), name: name.clone() }) else {
        panic!()
    };
    let node = Place { node: entry.id, hint: Some((root.node, name)) };
    let access = Access { read: true, write: false, truncate: false, direct: false, sync: false };
    let Reply::Opened { handle, .. } = execute(Call::Open { node, access }) else { panic!() };
    let (server, session) = (&server, &session);
    std::thread::scope(|scope| {
        // Closing it says there that it is not open any more.
        let slow = files.holding().leases.homes.hold();
        let (done, is_done) = mpsc::channel();
        scope.spawn(move || {
            server.request(session, CallId(0), asking(Call::Release { handles: vec![handle, Handle(99)] }));
            done.send(()).unwrap();
        });
        assert!(is_done.recv_timeout(LONG).is_ok(), "the reader waits for the disk");
        assert_eq!(files.count(), 0);
        let eight = CallId(8);
        server.hear(session, &encode_request(eight, &asking(Call::GetAttr { node: root.clone() })));
        wait("no answer", || !session.with_connection(|connection| connection.is_outstanding(eight)));
        assert_eq!(files.closing(), 1, "it counts as open until it is closed");
        drop(slow);
    });
    wait("not closed", || files.closing() == 0);
}
