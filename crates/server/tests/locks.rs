//! Locks between sessions, over streams.

mod common;

use common::*;
use nigh_native::{ClientConfig, ClientSession};
use nigh_remote::{Event, Output, Remote};
use nigh_server::{Server, ServerOptions};
use nigh_types::*;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const ALL: (u64, u64) = (0, u64::MAX);
const WRITE: LockKind = LockKind::Write;
const READ: LockKind = LockKind::Read;

struct Client {
    session: ClientSession,
    stream: UnixStream,
    started: Instant,
    answers: Vec<(CallId, Response)>,
    root: Option<NodeId>,
    calls: u64,
}

impl Client {
    /// Attaches to the export at `path`, as the client with this durable id.
    fn connect(server: &Arc<Server>, path: &Path, client: u64) -> Client {
        let stream = server.serve_in_process().unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        let attach = path.as_os_str().as_bytes().to_vec();
        let term = Term::Limited(Span::from_secs(5));
        static LAST: AtomicU64 = AtomicU64::new(0);
        let incarnation = LAST.fetch_add(1, Ordering::Relaxed);
        let config = ClientConfig { features: 0, client, incarnation, attach, term };
        let session = ClientSession::new(Time(1), config);
        let answers = Vec::new();
        let mut client = Client { session, stream, started: Instant::now(), answers, root: None, calls: 0 };
        client.drain();
        let give_up = Instant::now() + Duration::from_secs(20);
        while client.root.is_none() {
            assert!(Instant::now() < give_up, "not attached");
            client.pump();
        }
        client
    }

    fn leave(mut self) {
        self.session.handle_close("done");
        while let Output::Transmit(bytes) = self.session.poll_output() {
            self.stream.write_all(&bytes).unwrap();
        }
    }

    fn now(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap() + 1)
    }

    fn drain(&mut self) {
        loop {
            match self.session.poll_output() {
                Output::Event(Event::Attached(session)) => self.root = Some(session.root),
                Output::Event(Event::Response { call, response }) => self.answers.push((call, response)),
                Output::Event(Event::Recall(recall)) => {
                    self.session.handle_acknowledge(self.now(), recall.id);
                }
                Output::Event(Event::UpdatePrepare(hold)) => {
                    self.session.handle_acknowledge(self.now(), hold.id)
                }
                Output::Event(Event::UpdateCommit(_)) => {}
                Output::Event(Event::Lost { why } | Event::Expired { why }) => panic!("{why}"),
                Output::Event(Event::Restored { .. }) => panic!("restored, and was not away"),
                Output::Transmit(bytes) => self.stream.write_all(&bytes).unwrap(),
                Output::Timeout(..) => return,
            }
        }
    }

    /// Processes what the server sends within 10 ms.
    fn pump(&mut self) {
        let mut buffer = vec![0; 1 << 16];
        match self.stream.read(&mut buffer) {
            Ok(0) => panic!("the server ended the session"),
            Ok(count) => self.session.handle_input(self.now(), &buffer[..count]),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
        self.drain();
    }

    fn send(&mut self, call: Call) -> CallId {
        self.calls += 1;
        let id = CallId(self.calls);
        let name =
            call.is_mutation().then_some(MutationId { client: 1, incarnation: 2, sequence: self.calls });
        self.session.handle_call(self.now(), id, Request { credentials: me(), mutation_id: name, call });
        self.drain();
        id
    }

    fn answer(&mut self, id: CallId) -> Result<Reply, Errno> {
        let give_up = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(at) = self.answers.iter().position(|(call, _)| *call == id) {
                return self.answers.remove(at).1.result;
            }
            assert!(Instant::now() < give_up, "no answer to {}", id.0);
            self.pump();
        }
    }

    fn call(&mut self, call: Call) -> Result<Reply, Errno> {
        let id = self.send(call);
        self.answer(id)
    }

    /// Whether the call stays unanswered for a while.
    fn waits(&mut self, id: CallId) -> bool {
        for _ in 0..3 {
            self.pump();
        }
        self.answers.iter().all(|(call, _)| *call != id)
    }

    fn place(&mut self, path: &str) -> NodeRef {
        let mut at = NodeRef::without_hint(self.root.unwrap());
        for part in path.split('/') {
            let Ok(Reply::Entry(Some(entry))) = self.call(Call::Lookup { dir: at.clone(), name: name(part) })
            else {
                panic!("no {part} of {path}")
            };
            at = NodeRef { node: entry.id, path_hint: Some((at.node, name(part))) };
        }
        at
    }

    fn cancel(&mut self, id: CallId) {
        self.session.handle_cancel(self.now(), id);
        self.drain();
    }
}

fn lock(node: &NodeRef, owner: u64, kind: LockKind, (start, end): (u64, u64), wait: bool) -> Call {
    let pid = u32::try_from(owner).unwrap();
    Call::Lock { node: node.clone(), owner, flock: false, kind, start, end, wait, pid, reclaim: false }
}

fn flock(node: &NodeRef, owner: u64, kind: LockKind, wait: bool) -> Call {
    Call::Lock {
        node: node.clone(),
        owner,
        flock: true,
        kind,
        start: 0,
        end: 0,
        wait,
        pid: 1,
        reclaim: false,
    }
}

fn unlock(node: &NodeRef, owner: u64, (start, end): (u64, u64)) -> Call {
    Call::Unlock { node: node.clone(), owner, flock: false, start, end }
}

fn getlock(node: &NodeRef, owner: u64, at: u64) -> Call {
    Call::GetLock { node: node.clone(), owner, flock: false, kind: WRITE, start: at, end: at }
}

/// A server, and a directory with `d/f`.
fn exported() -> (Arc<Server>, TempDir, TempDir) {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("d/f"), "data").unwrap();
    (Server::new(ServerOptions::new(state.path().to_owned())).unwrap(), state, dir)
}

#[test]
fn locks_of_sessions_conflict_over_any_path_to_the_file() {
    let (server, _state, dir) = exported();
    fs::hard_link(dir.path().join("d/f"), dir.path().join("link")).unwrap();
    let mut one = Client::connect(&server, dir.path(), 1);
    let mut two = Client::connect(&server, &dir.path().join("d"), 2);
    let (file, link, same) = (one.place("d/f"), one.place("link"), two.place("f"));
    assert_eq!(one.call(lock(&file, 7, WRITE, (10, 19), false)), Ok(Reply::Done));
    assert_eq!(
        two.call(lock(&same, 7, READ, ALL, false)),
        Err(Errno::AGAIN),
        "the same number, not the owner"
    );
    assert_eq!(two.call(lock(&same, 7, WRITE, (20, 29), false)), Ok(Reply::Done));
    assert_eq!(one.call(lock(&link, 7, WRITE, (20, 20), false)), Err(Errno::AGAIN));
    assert_eq!(two.call(flock(&same, 7, WRITE, false)), Ok(Reply::Done));
    assert_eq!(one.call(flock(&link, 7, READ, false)), Err(Errno::AGAIN));
    assert_eq!(one.call(unlock(&file, 7, ALL)), Ok(Reply::Done));
    assert_eq!(two.call(lock(&same, 7, READ, (0, 19), false)), Ok(Reply::Done));
    assert_eq!(one.call(lock(&file, 7, READ, (20, 29), false)), Err(Errno::AGAIN));
    assert_eq!(one.call(lock(&file, 7, READ, (0, 19), false)), Ok(Reply::Done));
}

#[test]
fn lock_owner_pid_is_returned_only_to_its_own_client() {
    let (server, _state, dir) = exported();
    let mut holder = Client::connect(&server, dir.path(), 1);
    let file = holder.place("d/f");
    assert_eq!(holder.call(lock(&file, 4711, READ, (5, 9), false)), Ok(Reply::Done));
    let info = |pid| Ok(Reply::LockConflict(Some(LockInfo { kind: READ, start: 5, end: 9, pid })));
    assert_eq!(holder.call(getlock(&file, 8, 6)), info(4711));
    for (client, pid) in [(1, 4711), (2, 0)] {
        let mut other = Client::connect(&server, dir.path(), client);
        let file = other.place("d/f");
        assert_eq!(other.call(getlock(&file, 4711, 6)), info(pid));
        assert_eq!(other.call(getlock(&file, 4711, 10)), Ok(Reply::LockConflict(None)));
    }
}

#[test]
fn lock_waits_use_no_threads_and_are_granted_in_order() {
    // For this many waiters the test waits until each is queued, because pool threads may reorder calls.
    const COUNTED: u64 = 200;
    const WAITS: u64 = 1_500;
    let (server, _state, dir) = exported();
    let mut holder = Client::connect(&server, dir.path(), 1);
    let mut waiter = Client::connect(&server, dir.path(), 1);
    let (file, same) = (holder.place("d/f"), waiter.place("d/f"));
    assert_eq!(holder.call(lock(&file, 1, WRITE, ALL, false)), Ok(Reply::Done));
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    // More than the limit of outstanding calls.
    let mut waits = Vec::new();
    for owner in 0..WAITS {
        waits.push((owner, waiter.send(lock(&same, owner, WRITE, ALL, true))));
        let give_up = Instant::now() + Duration::from_secs(20);
        let counted = || server.status()["sessions"][1]["calls"]["waiting_for_locks"].as_u64();
        while owner < COUNTED && counted() != Some(owner + 1) {
            assert!(Instant::now() < give_up, "{owner}: {:?}", counted());
        }
    }
    // Other tests run threads in this process too.
    assert!(threads() < before + 500, "{} threads, {before} before", threads());
    assert_eq!(waiter.call(Call::GetAttr { node: same.clone() }).map(drop), Ok(()));
    assert!(waiter.waits(waits[0].1));
    assert_eq!(holder.call(unlock(&file, 1, ALL)), Ok(Reply::Done));
    for nth in 0..WAITS {
        let give_up = Instant::now() + Duration::from_secs(20);
        while waiter.answers.is_empty() {
            assert!(Instant::now() < give_up);
            waiter.pump();
        }
        let (call, response) = waiter.answers.remove(0);
        assert_eq!(response.result, Ok(Reply::Done));
        let at = waits.iter().position(|(_, id)| *id == call).unwrap();
        assert!(at == 0 || nth >= COUNTED, "in the order of their asking: {nth}");
        let (owner, _) = waits.remove(at);
        assert!(waiter.answers.is_empty(), "one at a time");
        let id = waiter.send(unlock(&same, owner, ALL));
        assert_eq!(waiter.answer(id), Ok(Reply::Done));
    }
    assert_eq!(holder.call(lock(&file, 1, WRITE, ALL, false)), Ok(Reply::Done));
}

#[test]
fn a_cancelled_wait_ends_with_eintr_and_gets_no_lock() {
    let (server, _state, dir) = exported();
    let mut one = Client::connect(&server, dir.path(), 1);
    let mut two = Client::connect(&server, dir.path(), 2);
    let (file, same) = (one.place("d/f"), two.place("d/f"));
    assert_eq!(one.call(flock(&file, 1, WRITE, false)), Ok(Reply::Done));
    let parked = two.send(flock(&same, 2, WRITE, true));
    assert!(two.waits(parked));
    two.cancel(parked);
    two.cancel(parked);
    assert_eq!(two.answer(parked), Err(Errno::INTR));
    // Immediately, so that the cancel races with the start of the call.
    for _ in 0..200 {
        let early = two.send(flock(&same, 2, WRITE, true));
        two.cancel(early);
        assert_eq!(two.answer(early), Err(Errno::INTR));
    }
    assert_eq!(
        one.call(Call::Unlock { node: file.clone(), owner: 1, flock: true, start: 0, end: 0 }),
        Ok(Reply::Done)
    );
    assert_eq!(one.call(flock(&file, 3, WRITE, false)), Ok(Reply::Done));
}

#[test]
fn locks_and_lock_waits_end_with_their_session() {
    let (server, _state, dir) = exported();
    let mut one = Client::connect(&server, dir.path(), 1);
    let mut two = Client::connect(&server, dir.path(), 2);
    let mut three = Client::connect(&server, dir.path(), 3);
    let (a, b, c) = (one.place("d/f"), two.place("d/f"), three.place("d/f"));
    assert_eq!(one.call(lock(&a, 1, WRITE, ALL, false)), Ok(Reply::Done));
    assert_eq!(one.call(flock(&a, 1, WRITE, false)), Ok(Reply::Done));
    let second = two.send(lock(&b, 1, WRITE, ALL, true));
    assert!(two.waits(second));
    let third = three.send(lock(&c, 1, WRITE, (7, 7), true));
    assert!(three.waits(third));
    // The waiter leaves first, so it never gets the lock.
    two.leave();
    let give_up = Instant::now() + Duration::from_secs(20);
    while server.session_count() > 2 {
        assert!(Instant::now() < give_up);
        std::thread::sleep(Duration::from_millis(2));
    }
    one.leave();
    assert_eq!(three.answer(third), Ok(Reply::Done));
    assert_eq!(three.call(flock(&c, 1, WRITE, false)), Ok(Reply::Done));
}

#[test]
fn a_deadlock_of_sessions_is_refused() {
    let (server, _state, dir) = exported();
    fs::write(dir.path().join("g"), "").unwrap();
    let mut one = Client::connect(&server, dir.path(), 1);
    let mut two = Client::connect(&server, dir.path(), 2);
    let (f, g) = (one.place("d/f"), one.place("g"));
    assert_eq!(one.call(lock(&f, 1, WRITE, ALL, false)), Ok(Reply::Done));
    assert_eq!(two.call(lock(&g, 1, WRITE, ALL, false)), Ok(Reply::Done));
    let waiting = one.send(lock(&g, 1, READ, ALL, true));
    assert!(one.waits(waiting));
    assert_eq!(two.call(lock(&f, 1, READ, ALL, true)), Err(Errno::DEADLK));
    assert_eq!(two.call(unlock(&g, 1, ALL)), Ok(Reply::Done));
    assert_eq!(one.answer(waiting), Ok(Reply::Done));
}

#[test]
fn removed_name_can_still_be_unlocked() {
    let (server, _state, dir) = exported();
    fs::hard_link(dir.path().join("d/f"), dir.path().join("kept")).unwrap();
    let mut one = Client::connect(&server, dir.path(), 1);
    let mut two = Client::connect(&server, dir.path(), 2);
    let (file, kept) = (one.place("d/f"), two.place("kept"));
    assert_eq!(one.call(lock(&file, 1, WRITE, ALL, false)), Ok(Reply::Done));
    fs::remove_file(dir.path().join("d/f")).unwrap();
    assert_eq!(two.call(lock(&kept, 1, READ, ALL, false)), Err(Errno::AGAIN));
    assert_eq!(one.call(unlock(&file, 1, ALL)), Ok(Reply::Done));
    assert_eq!(two.call(lock(&kept, 1, READ, ALL, false)), Ok(Reply::Done));
}
