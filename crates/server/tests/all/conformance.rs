//! The common conformance suite over a real directory, through protocol and streams.

use crate::common::{is_root, me, needs_root};
use nigh_native::{ClientConfig, ClientSession, Message};
use nigh_remote::conformance::{Harness, assert_conforms};
use nigh_remote::{Event, Output, Remote};
use nigh_server::{Server, ServerOptions};
use nigh_types::{Credentials, Span, Term, Time};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

struct Served {
    server: Arc<Server>,
    _state: TempDir,
    started: Instant,
    /// The latest export and its connection.
    current: Option<(TempDir, UnixStream)>,
    who: Credentials,
    lacks: Vec<&'static str>,
}

impl Served {
    fn new(who: Credentials) -> Served {
        let state = tempfile::tempdir().unwrap();
        let server = Server::new(ServerOptions::new(state.path().to_owned())).unwrap();
        Served { server, _state: state, started: Instant::now(), current: None, who, lacks: Vec::new() }
    }
}

impl Harness for Served {
    fn attach(&mut self) -> Box<dyn Remote> {
        // While other sessions exist the server keeps removed files for a moment, so the session before must have
        // ended.
        if let Some((_, mut stream)) = self.current.take() {
            stream.write_all(&Message::Bye("the case is over".to_owned()).encode()).unwrap();
        }
        let give_up = Instant::now() + Duration::from_secs(10);
        while self.server.session_count() > 0 {
            assert!(Instant::now() < give_up, "the session before does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        let dir = tempfile::tempdir().unwrap();
        if is_root() {
            std::os::unix::fs::chown(dir.path(), Some(self.who.uid), Some(self.who.gid)).unwrap();
        }
        let stream = self.server.serve_in_process().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let attach = dir.path().as_os_str().as_bytes().to_vec();
        let term = Term::Limited(Span::from_secs(5));
        self.current = Some((dir, stream));
        Box::new(ClientSession::new(
            self.now(),
            ClientConfig {
                client: 1,
                incarnation: 1,
                attach,
                term,
                features: nigh_native::PREFETCH | nigh_native::LIST_NAMES,
            },
        ))
    }

    fn now(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap() + 1)
    }

    fn pump(&mut self, remote: &mut dyn Remote) -> Vec<Event> {
        let (_, stream) = self.current.as_mut().unwrap();
        let mut events = Vec::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            loop {
                match remote.poll_output() {
                    Output::Event(event) => events.push(event),
                    Output::Transmit(bytes) => stream.write_all(&bytes).unwrap(),
                    Output::Timeout(..) => break,
                }
            }
            if !events.is_empty() {
                return events;
            }
            let now = Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap() + 1);
            match stream.read(&mut buffer) {
                Ok(0) => remote.handle_disconnect(now, "end of stream"),
                Ok(count) => remote.handle_input(now, &buffer[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return events,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn credentials(&self) -> Credentials {
        self.who.clone()
    }

    fn lacks(&self) -> &[&str] {
        &self.lacks
    }
}

#[test]
fn a_real_directory_conforms() {
    assert_conforms(&mut Served::new(me()));
}

#[test]
fn a_real_directory_conforms_for_an_ordinary_user() {
    if needs_root("a_real_directory_conforms_for_an_ordinary_user") {
        assert_conforms(&mut Served::new(Credentials {
            uid: 1000,
            gid: 1000,
            groups: vec![1001],
            privileges: None,
        }));
    }
}
