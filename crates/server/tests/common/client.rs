//! A client of a server over a real stream.

use super::{me, name};
use nigh_link::{Claims, Peer, Squash};
use nigh_native::{ClientConfig, ClientSession};
use nigh_remote::{Event, Output, Remote};
use nigh_server::Server;
use nigh_types::*;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Limit on the wait for a reply. A call that changes the disk may wait for a commit of its journal, and other tests keep
/// the disk busy.
const REPLY_LIMIT: Duration = Duration::from_secs(120);

fn fresh_incarnation() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// Returns a connection whose peer is limited to this user.
pub fn user_link(server: &Arc<Server>, uid: u32) -> UnixStream {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let who = Credentials { uid, gid: uid, groups: vec![], privileges: None };
    let (server, peer) = (Arc::clone(server), Peer::new("test", Claims::Only(who), Squash::None));
    std::thread::spawn(move || server.serve_link(ours.into(), peer));
    theirs
}

/// A client session over a stream, driven by the test.
pub struct Client {
    pub session: ClientSession,
    config: ClientConfig,
    stream: UnixStream,
    started: Instant,
    pub events: Vec<Event>,
    calls: u64,
    sequence: u64,
    pub incarnation: u64,
    /// Acknowledges every recall at once.
    pub obliging: bool,
    /// Compresses what it sends, whether or not that was negotiated.
    packs: bool,
}

impl Client {
    pub fn connect(server: &Arc<Server>, path: &Path, term: Term) -> Client {
        Client::over(server.serve_in_process().unwrap(), path, term, fresh_incarnation())
    }

    /// Connects a client whose kernel cannot invalidate all dentries at once.
    pub fn connect_alone(server: &Arc<Server>, path: &Path) -> Client {
        Client::begin(
            server.serve_in_process().unwrap(),
            path,
            Term::Session,
            1 << 40,
            nigh_native::EXCLUSIVE_DIR_LEASES,
        )
    }

    pub fn over(stream: UnixStream, path: &Path, term: Term, incarnation: u64) -> Client {
        Client::begin(stream, path, term, incarnation, 0)
    }

    /// Connects with optional features of the protocol.
    pub fn wanting(stream: UnixStream, path: &Path, term: Term, features: u64) -> Client {
        Client::begin(stream, path, term, fresh_incarnation(), features)
    }

    fn begin(stream: UnixStream, path: &Path, term: Term, incarnation: u64, features: u64) -> Client {
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let attach = path.as_os_str().as_bytes().to_vec();
        let config = ClientConfig { client: 1, incarnation, attach, term, features };
        let session = ClientSession::new(Time(1), config.clone());
        let mut client = Client {
            session,
            config,
            stream,
            started: Instant::now(),
            events: vec![],
            calls: 0,
            sequence: 0,
            incarnation,
            obliging: false,
            packs: false,
        };
        client.drain();
        client
    }

    pub fn now(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap() + 1)
    }

    pub fn drain(&mut self) {
        loop {
            match self.session.poll_output() {
                Output::Event(event) => self.events.push(event),
                Output::Transmit(bytes) => {
                    let packed = nigh_native::compress(&bytes).filter(|_| self.packs);
                    drop(self.stream.write_all(&packed.unwrap_or_else(|| bytes.to_vec())));
                }
                Output::Timeout(..) => return,
            }
        }
    }

    /// Processes what the server sends within 20 ms.
    pub fn pump(&mut self) {
        let mut buffer = vec![0; 1 << 20];
        match self.stream.read(&mut buffer) {
            Ok(0) => self.session.handle_disconnect(self.now(), "end of stream"),
            Ok(count) => self.session.handle_input(self.now(), &buffer[..count]),
            // A read with a time limit is interrupted when a stopped process continues (signal(7)).
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => self.session.handle_disconnect(self.now(), &error.to_string()),
        }
        self.drain();
        if self.obliging {
            self.give_back();
        }
    }

    pub fn wait<T>(&mut self, mut wanted: impl FnMut(&mut Vec<Event>) -> Option<T>) -> T {
        let give_up = Instant::now() + REPLY_LIMIT;
        loop {
            if let Some(found) = wanted(&mut self.events) {
                return found;
            }
            let last = &self.events[self.events.len().saturating_sub(4)..];
            let (count, ended) = (self.events.len(), self.session.wants_connection());
            assert!(
                Instant::now() < give_up,
                "no reply; ended: {ended:?}; {count} events, the last: {last:?}"
            );
            self.pump();
        }
    }

    pub fn session(&mut self) -> nigh_remote::SessionParams {
        self.wait(|events| {
            events.iter().find_map(|e| match e {
                Event::Attached(session) => Some(session.clone()),
                Event::Lost { why } => panic!("{why}"),
                _ => None,
            })
        })
    }

    /// Waits until the session asks for a new connection; returns the reason.
    pub fn cut(&mut self) -> String {
        let give_up = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(why) = self.session.wants_connection() {
                return why.to_owned();
            }
            assert!(Instant::now() < give_up, "it is still connected; {:?}", self.events);
            self.pump();
        }
    }

    /// Closes the session.
    pub fn leave(mut self) {
        let now = self.now();
        self.session.handle_timeout(now);
        self.session.handle_close("the test is done with it");
        self.drain();
    }

    /// Ends the connection and continues the session over `stream`.
    pub fn go_on_over(&mut self, stream: UnixStream) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.session.handle_timeout(self.now());
        self.session.handle_disconnect(self.now(), "cut");
        self.drain();
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        self.stream = stream;
        self.session.handle_connect(self.now());
        self.drain();
    }

    /// Drops the session without a close, and begins a new one over `stream`.
    pub fn lose_and_begin_again(&mut self, stream: UnixStream) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        self.stream = stream;
        self.events.clear();
        self.session = ClientSession::after_lost(self.now(), self.config.clone());
        self.drain();
    }

    /// Waits until the session is connected. Returns whether the server still had its state; `None` if nothing was
    /// lost.
    pub fn wait_linked(&mut self) -> Option<bool> {
        let give_up = Instant::now() + Duration::from_secs(20);
        while !self.session.is_linked() {
            assert!(Instant::now() < give_up, "not linked; {:?}", self.events);
            self.pump();
        }
        let restored = self.events.iter().position(|e| matches!(e, Event::Restored { .. }))?;
        match self.events.remove(restored) {
            Event::Restored { kept, .. } => Some(kept),
            _ => None,
        }
    }

    pub fn lost(&mut self) -> String {
        self.wait(|events| {
            events.iter().find_map(|e| if let Event::Lost { why } = e { Some(why.clone()) } else { None })
        })
    }

    pub fn send(&mut self, call: Call) -> CallId {
        self.send_as(&me(), call)
    }

    pub fn send_packed(&mut self, call: Call) -> CallId {
        self.packs = true;
        self.send(call)
    }

    pub fn send_as(&mut self, who: &Credentials, call: Call) -> CallId {
        self.calls += 1;
        let id = CallId(self.calls);
        let name = call.is_mutation().then(|| {
            self.sequence += 1;
            MutationId { client: 1, incarnation: self.incarnation, sequence: self.sequence }
        });
        self.session.handle_call(
            self.now(),
            id,
            Request { credentials: who.clone(), mutation_id: name, call },
        );
        self.drain();
        id
    }

    pub fn answer(&mut self, id: CallId) -> Response {
        self.wait(|events| {
            let at = events.iter().position(|e| matches!(e, Event::Response { call, .. } if *call == id))?;
            let Event::Response { response, .. } = events.remove(at) else { return None };
            Some(response)
        })
    }

    pub fn call_as(&mut self, who: &Credentials, call: Call) -> Response {
        let id = self.send_as(who, call);
        self.answer(id)
    }

    pub fn call(&mut self, call: Call) -> Response {
        let id = self.send(call);
        self.answer(id)
    }

    /// Recalls not yet acknowledged.
    pub fn recalls(&self) -> Vec<Recall> {
        let recall = |event: &Event| match event {
            Event::Recall(recall) => Some(recall.clone()),
            _ => None,
        };
        self.events.iter().filter_map(recall).collect()
    }

    /// Acknowledges all recalls received so far.
    pub fn give_back(&mut self) {
        let recalls = self.recalls();
        self.events.retain(|event| !matches!(event, Event::Recall(_)));
        for recall in recalls {
            self.session.handle_acknowledge(self.now(), recall.id);
        }
        self.drain();
    }

    /// Waits for a recall, and acknowledges all recalls received until then.
    pub fn give_back_next(&mut self) {
        self.wait(|events| events.iter().any(|event| matches!(event, Event::Recall(_))).then_some(()));
        self.give_back();
    }

    /// Whether the call is answered, after a short wait.
    pub fn is_answered(&mut self, id: CallId) -> bool {
        for _ in 0..3 {
            self.pump();
        }
        self.events.iter().any(|e| matches!(e, Event::Response { call, .. } if *call == id))
    }

    /// Processes input, and expired timeouts.
    pub fn tick(&mut self) {
        self.pump();
        self.session.handle_timeout(self.now());
        self.drain();
    }

    pub fn cancel(&mut self, id: CallId) {
        self.session.handle_cancel(self.now(), id);
        self.drain();
    }

    pub fn root(&mut self) -> NodeRef {
        NodeRef::without_hint(self.session().root)
    }

    pub fn entry(&mut self, dir: &NodeRef, text: &str) -> Entry {
        match self.call(Call::Lookup { dir: dir.clone(), name: name(text) }).result {
            Ok(Reply::Entry(Some(entry))) => entry,
            other => panic!("{text}: {other:?}"),
        }
    }

    /// Resolves a path below the root, with the hint that a client would give.
    pub fn place(&mut self, path: &str) -> NodeRef {
        let mut at = self.root();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let entry = self.entry(&at, part);
            at = NodeRef { node: entry.id, path_hint: Some((at.node, name(part))) };
        }
        at
    }

    pub fn attr(&mut self, node: &NodeRef) -> (Attr, Vec<Grant>) {
        let response = self.call(Call::GetAttr { node: node.clone() });
        match response.result {
            Ok(Reply::Attr(_, attr)) => (attr, response.grants),
            other => panic!("{other:?}"),
        }
    }

    pub fn list(&mut self, dir: &NodeRef) -> (Vec<(Name, Entry)>, Vec<Grant>) {
        let id = self.send(Call::List { dir: dir.clone() });
        let (mut entries, mut grants) = (Vec::new(), Vec::new());
        loop {
            let response = self.answer(id);
            let Ok(Reply::Listed(part)) = response.result else { panic!("{:?}", response.result) };
            entries.extend(part.entries);
            grants.extend(response.grants);
            if response.last {
                return (entries, grants);
            }
        }
    }

    pub fn open(&mut self, node: &NodeRef, access: Access) -> Handle {
        match self.call(Call::Open { node: node.clone(), access }).result {
            Ok(Reply::Opened { handle, .. }) => handle,
            other => panic!("{other:?}"),
        }
    }

    pub fn read(&mut self, node: &NodeRef) -> (Vec<u8>, Vec<Grant>) {
        let call = Call::Read { node: node.clone(), handle: None, offset: 0, length: 4096 };
        let response = self.call(call);
        match response.result {
            Ok(Reply::Data(data)) => (data, response.grants),
            other => panic!("{other:?}"),
        }
    }
}

/// The root of the attached export.
pub fn top(client: &mut Client) -> NodeRef {
    NodeRef::without_hint(client.session().root)
}

/// Looks up a name in the root, with the hint that a client would give.
pub fn find(client: &mut Client, text: &str) -> NodeRef {
    let top = top(client);
    match client.call(Call::Lookup { dir: top.clone(), name: name(text) }).result {
        Ok(Reply::Entry(Some(entry))) => NodeRef { node: entry.id, path_hint: Some((top.node, name(text))) },
        other => panic!("{text}: {other:?}"),
    }
}
