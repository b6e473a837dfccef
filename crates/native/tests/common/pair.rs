//! A client's session and a server's connection over a tree, joined in memory.

use super::samples;
use nigh_native::{ClientConfig, ClientSession, ServerConfig, ServerConnection, ServerEvent, Session};
use nigh_remote::conformance::Harness;
use nigh_remote::tree::{Tree, TreeConfig};
use nigh_remote::{Event, Output, Remote};
use nigh_types::{Term, Time};

pub const T0: Time = Time(1_000_000_000);

pub fn client(now: Time) -> ClientSession {
    let attach = b"/srv/tree".to_vec();
    ClientSession::new(now, ClientConfig { client: 1, incarnation: 2, attach, term: Term::Session })
}

/// The server's end, which executes what comes on a tree, and the wire between both ends.
pub struct Server {
    pub connection: ServerConnection,
    pub tree: Tree,
    /// Bytes handed over at a time, in both directions.
    pub chunk: u32,
}

impl Server {
    pub fn new(now: Time, chunk: u32) -> Server {
        let tree = Tree::new(TreeConfig::default());
        Server { connection: ServerConnection::new(now, ServerConfig::default()), tree, chunk }
    }

    fn session(&self) -> Session {
        let root = self.tree.root();
        Session {
            root,
            root_attr: self.tree.attr(root).unwrap(),
            cookie_key: self.tree.config().cookie_key,
            ..samples::session()
        }
    }

    fn serve(&mut self, now: Time) {
        while let Some(event) = self.connection.poll_event() {
            match event {
                ServerEvent::Attach { export, version, .. } => {
                    assert_eq!((&export[..], version), (&b"/srv/tree"[..], 1));
                    self.connection.accept(self.session());
                }
                ServerEvent::Request { call, request } => {
                    for response in self.tree.execute(now, &request) {
                        self.connection.respond(call, &response);
                    }
                }
                ServerEvent::Cancel(_) | ServerEvent::Return(_) | ServerEvent::Bye { .. } => {}
                ServerEvent::Acknowledge(recall) => panic!("{recall:?} was never sent"),
            }
        }
    }

    /// Carries bytes both ways until nothing moves; returns the client's events.
    pub fn carry(&mut self, now: Time, remote: &mut dyn Remote) -> Vec<Event> {
        let mut events = Vec::new();
        loop {
            let mut moved = false;
            loop {
                match remote.poll_output() {
                    Output::Event(event) => events.push(event),
                    Output::Transmit(bytes) => {
                        moved = true;
                        for piece in bytes.chunks(self.chunk as usize) {
                            self.connection.handle_input(now, piece).unwrap();
                        }
                    }
                    Output::Timeout(..) => break,
                }
            }
            self.serve(now);
            while let Some(bytes) = self.connection.poll_transmit() {
                moved = true;
                for piece in bytes.chunks(self.chunk as usize) {
                    remote.handle_input(now, piece);
                }
            }
            if !moved {
                return events;
            }
        }
    }
}

/// For the conformance suite.
pub struct Pair {
    pub chunk: u32,
    pub server: Server,
}

impl Harness for Pair {
    fn attach(&mut self) -> Box<dyn Remote> {
        self.server = Server::new(T0, self.chunk);
        Box::new(client(T0))
    }

    fn now(&self) -> Time {
        T0
    }

    fn pump(&mut self, remote: &mut dyn Remote) -> Vec<Event> {
        self.server.carry(T0, remote)
    }
}
