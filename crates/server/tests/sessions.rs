//! The server over streams, with the client's end of the protocol.

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
use std::time::{Duration, Instant};
use tempfile::TempDir;

struct Client {
    session: ClientSession,
    stream: UnixStream,
    started: Instant,
    events: Vec<Event>,
    calls: u64,
    sequence: u64,
}

impl Client {
    fn connect(server: &Arc<Server>, path: &Path, term: Term) -> Client {
        Client::over(server.serve_in_process().unwrap(), path, term)
    }

    fn over(stream: UnixStream, path: &Path, term: Term) -> Client {
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let attach = path.as_os_str().as_bytes().to_vec();
        let config = ClientConfig { client: 1, incarnation: 2, attach, term };
        let session = ClientSession::new(Time(1), config);
        let mut client =
            Client { session, stream, started: Instant::now(), events: vec![], calls: 0, sequence: 0 };
        client.drain();
        client
    }

    fn now(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap() + 1)
    }

    fn drain(&mut self) {
        loop {
            match self.session.poll_output() {
                Output::Event(event) => self.events.push(event),
                Output::Transmit(bytes) => drop(self.stream.write_all(&bytes)),
                Output::Timeout(..) => return,
            }
        }
    }

    /// Takes in what the server sent within 20 ms.
    fn pump(&mut self) {
        let mut buffer = vec![0; 1 << 20];
        match self.stream.read(&mut buffer) {
            Ok(0) => self.session.handle_disconnect(self.now(), "end of stream"),
            Ok(count) => self.session.handle_input(self.now(), &buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => self.session.handle_disconnect(self.now(), &error.to_string()),
        }
        self.drain();
    }

    fn wait<T>(&mut self, mut wanted: impl FnMut(&mut Vec<Event>) -> Option<T>) -> T {
        let give_up = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(found) = wanted(&mut self.events) {
                return found;
            }
            assert!(Instant::now() < give_up, "nothing came; {:?}", self.events);
            self.pump();
        }
    }

    fn session(&mut self) -> nigh_remote::Session {
        self.wait(|events| {
            events.iter().find_map(|e| match e {
                Event::Attached(session) => Some(session.clone()),
                Event::Lost { why } => panic!("{why}"),
                _ => None,
            })
        })
    }

    fn lost(&mut self) -> String {
        self.wait(|events| {
            events.iter().find_map(|e| if let Event::Lost { why } = e { Some(why.clone()) } else { None })
        })
    }

    fn send(&mut self, call: Call) -> CallId {
        self.calls += 1;
        let id = CallId(self.calls);
        let name = call.is_mutation().then(|| {
            self.sequence += 1;
            OpName { client: 1, incarnation: 2, sequence: self.sequence }
        });
        self.session.handle_call(self.now(), id, Request { credentials: me(), name, call });
        self.drain();
        id
    }

    fn answer(&mut self, id: CallId) -> Response {
        self.wait(|events| {
            let at = events.iter().position(|e| matches!(e, Event::Response { call, .. } if *call == id))?;
            let Event::Response { response, .. } = events.remove(at) else { return None };
            Some(response)
        })
    }

    fn call(&mut self, call: Call) -> Response {
        let id = self.send(call);
        self.answer(id)
    }

    fn recalls(&self) -> Vec<Recall> {
        self.events
            .iter()
            .filter_map(|e| if let Event::Recall(r) = e { Some(r.clone()) } else { None })
            .collect()
    }
}

fn server() -> (Arc<Server>, TempDir, TempDir) {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    (Server::new(ServerOptions::new(state.path().to_owned())).unwrap(), state, dir)
}

const SOON: Term = Term::Limited(Span::from_secs(5));

#[test]
fn a_client_attaches_works_and_leaves() {
    let (server, _state, dir) = server();
    let mut client = Client::connect(&server, dir.path(), SOON);
    let root = client.session().root;
    let made = client.call(Call::Mkdir { dir: Place::bare(root), name: name("d"), mode: 0o700, umask: 0 });
    assert!(matches!(made.result, Ok(Reply::Made { .. })));
    assert!(dir.path().join("d").is_dir());
    let listed = client.call(Call::List { dir: Place::bare(root) });
    assert!(matches!(listed.result, Ok(Reply::Listed(part)) if part.entries.len() == 1));
    assert_eq!(server.session_count(), 1);
    drop(client);
    let give_up = Instant::now() + Duration::from_secs(5);
    while server.session_count() > 0 {
        assert!(Instant::now() < give_up);
        std::thread::sleep(Duration::from_millis(5));
    }
    // Its state is free again.
    let mut client = Client::connect(&server, dir.path(), SOON);
    assert_eq!(client.session().root, root);
}

#[test]
fn a_wrong_export_is_refused_in_one_line() {
    let (server, _state, dir) = server();
    fs::write(dir.path().join("f"), "").unwrap();
    for (path, word) in [
        (dir.path().join("f"), "no directory"),
        (dir.path().join("none"), "none"),
        ("rel".into(), "absolute"),
    ] {
        let why = Client::connect(&server, &path, SOON).lost();
        assert!(why.contains(word) && !why.contains('\n'), "{why}");
    }
    assert!(Client::connect(&server, dir.path(), SOON).session().root.ino > 0);
}

#[test]
fn large_listings_and_data_arrive_while_small_calls_are_answered() {
    let (server, _state, dir) = server();
    for n in 0..20_000 {
        fs::File::create(dir.path().join(format!("name-{n}"))).unwrap();
    }
    fs::write(dir.path().join("big"), vec![9; 4 << 20]).unwrap();
    let mut client = Client::connect(&server, dir.path(), SOON);
    let root = Place::bare(client.session().root);
    let lists: Vec<_> = (0..6).map(|_| client.send(Call::List { dir: root.clone() })).collect();
    let Ok(Reply::Looked(Some(big))) =
        client.call(Call::Lookup { dir: root.clone(), name: name("big") }).result
    else {
        panic!()
    };
    let node = Place { node: big.id, hint: Some((root.node, name("big"))) };
    let read = client.call(Call::Read { node, handle: None, offset: 0, length: 4 << 20 });
    assert!(matches!(read.result, Ok(Reply::Data(data)) if data.len() == 4 << 20));
    for id in lists {
        let mut count = 0;
        loop {
            let response = client.answer(id);
            let Ok(Reply::Listed(part)) = response.result else { panic!("{:?}", response.result) };
            count += part.entries.len();
            if response.last {
                break;
            }
        }
        assert_eq!(count, 20_001);
    }
}

#[test]
fn a_second_session_shortens_terms_and_recalls_what_the_first_holds() {
    let (server, _state, dir) = server();
    fs::create_dir(dir.path().join("d")).unwrap();
    let mut first = Client::connect(&server, dir.path(), Term::Session);
    let root = Place::bare(first.session().root);
    let looked = first.call(Call::Lookup { dir: root.clone(), name: name("d") });
    assert!(looked.grants.iter().all(|g| g.term == Term::Session && g.recallable));
    let Ok(Reply::Looked(Some(d))) = looked.result else { panic!() };
    let returned = first.call(Call::GetAttr { node: root.clone() }).grants;
    first.session.handle_return(first.now(), returned.iter().map(|g| g.id).collect());
    first.drain();
    let _ = first.call(Call::StatFs { node: root.clone() });
    let below = dir.path().join("d");
    let mut second = Client::connect(&server, &below, Term::Session);
    first.wait(|events| (events.iter().filter(|e| matches!(e, Event::Recall(_))).count() == 2).then_some(()));
    second.pump();
    assert!(second.events.is_empty(), "it waits until the first has given back: {:?}", second.events);
    let mut recalled: Vec<_> = first.recalls().iter().map(|r| (r.node, r.covers)).collect();
    recalled.sort();
    let mut held = vec![(root.node, Covers::Names), (d.id, Covers::Inode)];
    held.sort();
    assert_eq!(recalled, held);
    for recall in first.recalls() {
        first.session.handle_acknowledge(first.now(), recall.id);
        first.drain();
    }
    assert_eq!(second.session().term, SOON);
    for client in [&mut first, &mut second] {
        let here = Place::bare(client.session().root);
        let grants = client.call(Call::GetAttr { node: here }).grants;
        assert!(grants.iter().all(|g| g.term == SOON && !g.recallable), "{grants:?}");
    }
    drop(second);
    let alone = |client: &mut Client| {
        client.call(Call::GetAttr { node: root.clone() }).grants[0].term == Term::Session
    };
    let give_up = Instant::now() + Duration::from_secs(5);
    while !alone(&mut first) {
        assert!(Instant::now() < give_up);
    }
}

#[test]
fn a_client_that_gives_nothing_back_loses_its_session() {
    let (server, _state, dir) = server();
    let mut first = Client::connect(&server, dir.path(), Term::Session);
    let root = Place::bare(first.session().root);
    first.call(Call::GetAttr { node: root });
    let began = Instant::now();
    let mut second = Client::connect(&server, dir.path(), SOON);
    second.session();
    assert!((1_500..10_000).contains(&began.elapsed().as_millis()));
    assert!(first.lost().contains("give back"));
}

#[test]
fn sessions_on_other_filesystems_do_not_shorten_terms() {
    let (server, _state, dir) = server();
    let Ok(shm) = tempfile::tempdir_in("/dev/shm") else { return println!("SKIPPED: no /dev/shm") };
    let device = |path: &Path| fs::metadata(path).map(|m| std::os::unix::fs::MetadataExt::dev(&m)).unwrap();
    if device(shm.path()) == device(dir.path()) {
        return println!("SKIPPED: one filesystem only");
    }
    let mut first = Client::connect(&server, dir.path(), Term::Session);
    let mut second = Client::connect(&server, shm.path(), Term::Session);
    assert_eq!((first.session().term, second.session().term), (Term::Session, Term::Session));
    let root = Place::bare(first.session().root);
    assert_eq!(first.call(Call::GetAttr { node: root }).grants[0].term, Term::Session);
}

#[test]
fn garbage_ends_the_session_and_nothing_else() {
    let (server, _state, dir) = server();
    let mut good = Client::connect(&server, dir.path(), SOON);
    let root = Place::bare(good.session().root);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[0; 64]] {
        let mut stream = server.serve_in_process().unwrap();
        stream.write_all(garbage).unwrap();
        let mut rest = Vec::new();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.read_to_end(&mut rest).unwrap();
    }
    assert!(good.call(Call::GetAttr { node: root }).result.is_ok());
}

#[test]
fn ending_says_why() {
    let (server, _state, dir) = server();
    let mut client = Client::connect(&server, dir.path(), SOON);
    client.session();
    server.end_sessions("maintenance at noon");
    assert!(client.lost().contains("maintenance at noon"));
}
