//! Races between a session's reader, the pool and the clock.

use super::*;
use crate::lease::holder::LeaseMessage;
use crate::pool::job::Job;
use crate::session::Resumption;
use crate::session::reply_cache::{Replies, SessionReplies};
use nigh_lease::Object;
use nigh_link::Peer;
use nigh_native::{
    Hello, MAX_VERSION, MIN_VERSION, Message, Resume, ServerEvent, WINDOW_BYTES, encode_request,
};
use nigh_types::{
    Access, Call, CallId, Credentials, Handle, LeaseScope, LockKind, MutationId, Name, NodeRef, Recall,
    RecallId, Reply, Request, Response, Term,
};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Duration;
use tempfile::TempDir;

/// The number of a session's first link.
const LINK: u64 = 1;
const LONG: Duration = Duration::from_secs(10);

fn world() -> (Arc<Server>, TempDir, TempDir) {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    (Server::new(ServerOptions::new(state.path().to_owned())).unwrap(), state, dir)
}

/// An attached session without threads of its own, with the client's end of its stream.
fn attached(server: &Server, dir: &Path) -> (Arc<Session>, UnixStream) {
    greeted(server, dir, 1, None)
}

/// An attached session of a client whose earlier session was discarded.
fn back(server: &Server, dir: &Path) -> (Arc<Session>, UnixStream) {
    greeted(server, dir, 1, Some(Resume { session_id: 0, received: 0 }))
}

fn greeted(
    server: &Server,
    dir: &Path,
    incarnation: u64,
    resume: Option<Resume>,
) -> (Arc<Session>, UnixStream) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let hello = Message::Hello(Hello {
        min_version: MIN_VERSION,
        max_version: MAX_VERSION,
        features: 0,
        client: 1,
        incarnation,
        attach: dir.as_os_str().as_encoded_bytes().to_vec(),
        term: Term::Session,
        moment: 1,
        resume,
    });
    theirs.write_all(&hello.encode()).unwrap();
    let (session, link) = server.greet(&ours.into(), Peer::in_process()).unwrap().unwrap();
    assert_eq!(link, LINK);
    (session, theirs)
}

fn asking(call: Call) -> Request {
    Request { credentials: Credentials::default(), mutation_id: None, call }
}

/// Whether the session gets a lock on a file, which is created if missing.
fn lock(server: &Server, session: &Session, dir: &Path) -> bool {
    std::fs::write(dir.join("f"), "").unwrap();
    let reach = session.attached().unwrap().export.resolver();
    let file = reach.child(reach.root_node(), &Name::new(b"f").unwrap()).unwrap();
    let (node, owner, flock, kind, wait) = (NodeRef::without_hint(file.id), 1, false, LockKind::Write, false);
    let (start, end, pid, reclaim) = (0, 9, 1, false);
    let call = Call::Lock { node, owner, flock, kind, start, end, wait, pid, reclaim };
    server.locks.lock(session.id, CallId(1), (file.id, file.object), &call).unwrap().is_ok()
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < give_up, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn store_replies(server: &Server, session: &Arc<Session>, answers: Arc<Replies>) -> Vec<SessionReplies> {
    let executing = Arc::downgrade(session) as Weak<dyn Executing>;
    server.memory.store(executing, session.attached().unwrap().reply_client(&session.peer), answers)
}

#[test]
fn cancel_after_reply_is_not_recorded() {
    let (server, _state, dir) = world();
    let (session, _theirs) = attached(&server, dir.path());
    let root = NodeRef::without_hint(session.attached().unwrap().export.resolver().root());
    let getattr = asking(Call::GetAttr { node: root });
    let seven = CallId(7);
    server.handle_bytes(&session, LINK, &encode_request(seven, &getattr));
    wait("no answer", || !session.with_connection(|connection| connection.is_outstanding(seven)));
    // The reader had taken the cancellation from the stream before, and handles it only now.
    server.handle_event(&session, ServerEvent::Cancel(seven));
    assert!(!session.is_cancelled(seven));
    // The cancellation of an executing call is kept until the call is answered.
    session.with_connection(|connection| {
        connection.handle_input(now(), &encode_request(seven, &getattr)).unwrap();
        assert!(matches!(connection.poll_event(), Some(ServerEvent::Request { .. })));
    });
    server.handle_event(&session, ServerEvent::Cancel(seven));
    assert!(session.is_cancelled(seven));
    session.reply(seven, Response::plain(Ok(Reply::Done)));
    assert!(!session.is_cancelled(seven));
}

#[test]
fn slow_close_does_not_block_the_reader_of_the_session() {
    let (server, _state, dir) = world();
    std::fs::write(dir.path().join("f"), "").unwrap();
    let (session, _theirs) = attached(&server, dir.path());
    let Attached { export, files, .. } = session.attached().unwrap();
    let root = NodeRef::without_hint(export.resolver().root());
    let execute = |call| {
        let mut result = None;
        export.execute(files, CallId(1), asking(call), &mut |response| result = Some(response.result));
        result.unwrap().unwrap()
    };
    let name = Name::new(b"f").unwrap();
    let Reply::Entry(Some(entry)) = execute(Call::Lookup { dir: root.clone(), name: name.clone() }) else {
        panic!()
    };
    let node = NodeRef { node: entry.id, path_hint: Some((root.node, name)) };
    let access =
        Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
    let Reply::Opened { handle, .. } = execute(Call::Open { node, access }) else { panic!() };
    let (server, session) = (&server, &session);
    std::thread::scope(|scope| {
        // The close updates the open-file table, which is locked here.
        let slow = files.leases().homes.block();
        let (done, is_done) = mpsc::channel();
        scope.spawn(move || {
            server.handle_request(
                session,
                CallId(0),
                asking(Call::Release { handles: vec![handle, Handle(99)] }),
                false,
            );
            done.send(()).unwrap();
        });
        assert!(is_done.recv_timeout(LONG).is_ok(), "the reader waits for the disk");
        assert_eq!(files.count(), 0);
        let eight = CallId(8);
        server.handle_bytes(
            session,
            LINK,
            &encode_request(eight, &asking(Call::GetAttr { node: root.clone() })),
        );
        wait("no answer", || !session.with_connection(|connection| connection.is_outstanding(eight)));
        assert_eq!(files.closing(), 1, "it counts as open until it is closed");
        drop(slow);
    });
    wait("not closed", || files.closing() == 0);
}

#[test]
fn new_session_waits_until_calls_of_discarded_session_end() {
    let (server, _state, dir) = world();
    let (session, _theirs) = attached(&server, dir.path());
    // An intermediate state: the session table has lost the session, while a thread may still take one of its calls
    // from the pool.
    let answers = session.take_replies().unwrap();
    drop(store_replies(&server, &session, answers));
    std::thread::scope(|scope| {
        let (done, is_done) = mpsc::channel();
        let server = &server;
        scope.spawn(move || done.send(server.memory.is_settled((1, 1))).unwrap());
        assert!(is_done.recv_timeout(Duration::from_millis(200)).is_err(), "it may still be at work");
        session.close();
        assert_eq!(is_done.recv_timeout(LONG), Ok(true));
    });
}

#[test]
fn cached_reply_survives_discard_of_the_session_that_requests_it() {
    let (server, _state, dir) = world();
    let name = MutationId { client: 1, incarnation: 1, sequence: 7 };
    let (first, _theirs) = attached(&server, dir.path());
    let Attached { export, files, .. } = first.attached().unwrap();
    let root = NodeRef::without_hint(export.resolver().root());
    let done = Response::plain(Ok(Reply::Done));
    first.take_replies().unwrap().note(name.sequence, done.clone(), files);
    server.discard(&first, End::Discarded);
    let (second, _theirs) = back(&server, dir.path());
    // Another thread is discarding the session, unknown to the reader.
    second.take_replies().unwrap();
    let call = Call::Mkdir { dir: root, name: Name::new(b"once").unwrap(), mode: 0o700, umask: 0 };
    server.handle_request(&second, CallId(9), Request { mutation_id: Some(name), ..asking(call) }, true);
    server.discard(&second, End::Discarded);
    let (third, _theirs) = back(&server, dir.path());
    assert_eq!(third.find_reply(&server.memory, name), Some(done));
    assert!(!dir.path().join("once").exists());
}

#[test]
fn client_that_lost_its_locks_is_recorded_as_such_despite_earlier_lockless_session() {
    let (server, state, dir) = world();
    let (first, _theirs) = attached(&server, dir.path());
    server.discard(&first, End::Disconnected);
    let (second, _theirs) = back(&server, dir.path());
    server.registry.reclaim_done(second.id);
    assert!(lock(&server, &second, dir.path()));
    server.discard(&second, End::Disconnected);
    let lines = std::fs::read_to_string(state.path().join("sessions")).unwrap();
    assert!(lines.contains('?') && !lines.contains('+'), "{lines}");
}

#[test]
fn locks_of_discarded_session_are_released_only_after_the_loss_is_recorded() {
    let (server, _state, dir) = world();
    let (holder, _theirs) = attached(&server, dir.path());
    let (other, _theirs) = greeted(&server, dir.path(), 2, None);
    let lock = |session| lock(&server, session, dir.path());
    assert!(lock(&holder) && !lock(&other));
    server.registry.set_readonly(true);
    server.discard(&holder, End::Discarded);
    server.reap();
    assert!(!lock(&other), "the next server would give it back");
    server.registry.set_readonly(false);
    wait("it is free", || lock(&other));
}

#[test]
fn cancelled_lock_call_held_in_outbox_leaves_no_state() {
    let (server, _state, dir) = world();
    let (session, _theirs) = attached(&server, dir.path());
    let node = NodeRef::without_hint(session.attached().unwrap().export.resolver().root());
    let (owner, flock, kind, start, end) = (1, true, LockKind::Write, 0, u64::MAX);
    let (wait, pid, reclaim) = (true, 1, false);
    let lock = Call::Lock { node: node.clone(), owner, flock, kind, start, end, wait, pid, reclaim };
    let (call, request) = (CallId(7), asking(lock.clone()));
    session.with_connection(|connection| {
        connection.handle_input(now(), &encode_request(call, &request)).unwrap();
    });
    server.locks.note_pending(session.id, call);
    assert_eq!(session.note_cancelled(call), Some(true));
    // With this many unconfirmed bytes no call of the session proceeds.
    session.outbox.add([], 0, WINDOW_BYTES + 1);
    let (taken, change, begun) = (server.inflight.take().unwrap(), None, None);
    session.execute(Job {
        session: Arc::clone(&session),
        call,
        request,
        change,
        inflight: taken,
        resent: false,
        stream: begun,
    });
    assert!(!session.with_connection(|connection| connection.is_outstanding(call)), "it is answered");
    // The call number is free again: a late cancellation must not affect its next use.
    assert!(!server.locks.cancel(session.id, call));
    let object = Object { filesystem: 1, ino: 1, birth: 1 };
    let locked = server.locks.lock(session.id, call, (node.node, object), &lock);
    assert_eq!(locked, Some(Ok(Reply::Done)));
}

#[test]
fn lease_expiry_does_not_close_the_link_of_a_concurrent_resumption() {
    const ROUNDS: u64 = 20_000;
    let (server, _state, dir) = world();
    let (session, _theirs) = attached(&server, dir.path());
    let Attached { export, files, .. } = session.attached().unwrap();
    // An unconfirmed recall keeps the session from being discarded.
    let (id, node, covers, names) = (RecallId(1), export.resolver().root(), LeaseScope::Directory, vec![]);
    session.queue(LeaseMessage::Recall(Recall { id, node, covers, names }));
    let agreed = export.session(files).unwrap();
    let (begun, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let wait = |number: &AtomicU64, nth| {
        while number.load(Ordering::SeqCst) < nth {
            std::hint::spin_loop();
        }
    };
    let stands = |mut stream: UnixStream| {
        stream.set_nonblocking(true).unwrap();
        let rest = std::iter::from_fn(|| Some(stream.read(&mut [0; 4096]))).find(|r| !matches!(r, Ok(1..)));
        matches!(rest, Some(Err(error)) if error.kind() == ErrorKind::WouldBlock)
    };
    let mut closed = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for nth in 1..=ROUNDS {
                wait(&begun, nth);
                session.lapse(session.lease());
                done.store(nth, Ordering::SeqCst);
            }
        });
        for nth in 1..=ROUNDS {
            let (ours, theirs) = UnixStream::pair().unwrap();
            begun.store(nth, Ordering::SeqCst);
            let resumed = session.resume(ours.into(), (1 + nth, 0), agreed.clone());
            wait(&done, nth);
            // The later of the two decides.
            let goes_on = matches!(resumed, Ok(Resumption::Link(_))) && !session.phase.is_courtesy();
            closed += u64::from(goes_on && !stands(theirs));
        }
    });
    assert_eq!(closed, 0);
    assert!(!session.phase.is_expiring(), "the reaper discards it, although its recall is unconfirmed");
}

#[test]
fn courtesy_session_whose_client_returned_meanwhile_does_not_expire() {
    let (server, _state, dir) = world();
    let (session, _theirs) = attached(&server, dir.path());
    let Attached { export, files, .. } = session.attached().unwrap();
    let (id, node, covers, names) = (RecallId(1), export.resolver().root(), LeaseScope::Directory, vec![]);
    session.queue(LeaseMessage::Recall(Recall { id, node, covers, names }));
    assert_eq!(session.courtesy(), None, "its client is there");
    session.lapse(session.lease());
    let (since, has_calls) = session.courtesy().unwrap();
    assert!(has_calls, "a recall is unconfirmed");
    let (ours, _again) = UnixStream::pair().unwrap();
    let resumed = session.resume(ours.into(), (u64::MAX, 0), export.session(files).unwrap());
    assert!(matches!(resumed, Ok(Resumption::Link(_))));
    assert_eq!(session.courtesy(), None);
    assert!(!session.expire_courtesy(since), "its client is there");
    session.lapse(session.lease());
    assert!(!session.expire_courtesy(since), "its client was there since");
    assert!(session.expire_courtesy(session.courtesy().unwrap().0));
}

#[test]
fn suspect_session_whose_lease_expires_during_resume_gets_new_lease() {
    let (server, _state, dir) = world();
    let (session, _theirs) = attached(&server, dir.path());
    let Attached { export, files, who, .. } = session.attached().unwrap();
    let agreed = export.session(files).unwrap();
    let (ours, _again) = UnixStream::pair().unwrap();
    let ((held, is_held), (release, released)) = (mpsc::channel(), mpsc::channel());
    let pause = || std::thread::sleep(Duration::from_millis(100));
    std::thread::scope(|scope| {
        let mut back = None;
        // While the table is locked the resumption waits for it. Then the stream is held until the table has
        // answered.
        server.leases.put_answer(session.holder(), Vec::new(), |_, _| {
            back = Some(scope.spawn(|| session.resume(ours.into(), (u64::MAX, 0), agreed)));
            pause();
            let session = &session;
            scope.spawn(move || {
                session.with_connection(|_| {
                    held.send(()).unwrap();
                    released.recv_timeout(LONG).unwrap();
                });
            });
            is_held.recv_timeout(LONG).unwrap();
        });
        pause();
        server.leases.remove_session(&*session, *who, true);
        session.phase.lapse();
        release.send(()).unwrap();
        assert!(matches!(back.unwrap().join().unwrap(), Ok(Resumption::Link(_))));
    });
    assert!(!session.phase.is_courtesy());
    let holders = server.leases().holders;
    assert!(holders.iter().any(|holder| holder.holder == session.holder()), "it would never be fenced");
}
