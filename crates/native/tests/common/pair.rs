//! A client's session and a server's connection over an in-memory tree.

use super::samples;
use nigh_lease::{LockOwner, LockRequest, LockResult, LockTable};
use nigh_native::{
    ClientConfig, ClientSession, MAX_VERSION, ServerConfig, ServerEvent, ServerSession, SessionParams,
};
use nigh_remote::conformance::Harness;
use nigh_remote::model_fs::{ModelFs, ModelFsConfig};
use nigh_remote::{Event, Output, Remote};
use nigh_types::{Call, CallId, Errno, LockKind, NodeId, NodeRef, Reply, Response, Term, Time};

pub const T0: Time = Time(1_000_000_000);

pub fn client(now: Time) -> ClientSession {
    let attach = b"/srv/tree".to_vec();
    ClientSession::new(
        now,
        ClientConfig { client: 1, incarnation: 2, attach, term: Term::Session, features: 0 },
    )
}

/// The server's end, which executes calls on a tree, and the wire between both ends.
pub struct Server {
    pub connection: ServerSession,
    pub tree: ModelFs,
    pub locks: LockTable<NodeId>,
    /// Bytes handed over at a time, in both directions.
    pub chunk: u32,
}

impl Server {
    pub fn new(now: Time, chunk: u32) -> Server {
        let tree = ModelFs::new(ModelFsConfig::default());
        let connection = ServerSession::new(now, ServerConfig::default());
        Server { connection, tree, locks: LockTable::default(), chunk }
    }

    fn session(&self) -> SessionParams {
        let root = self.tree.root();
        SessionParams {
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
                    assert_eq!((&export[..], version), (&b"/srv/tree"[..], MAX_VERSION));
                    self.connection.accept(self.session());
                }
                ServerEvent::Request { call, request, .. } if lock_place(&request.call).is_some() => {
                    if let Some(result) = self.lock(call, &request.call) {
                        self.connection.respond(call, &Response::plain(result));
                    }
                }
                ServerEvent::Request { call, request, .. } => {
                    for response in self.tree.execute(now, &request) {
                        self.connection.respond(call, &response);
                    }
                }
                ServerEvent::Cancel(call) => {
                    if self.locks.handle_cancel(1, call).is_some() {
                        self.connection.respond(call, &Response::plain(Err(Errno::INTR)));
                    }
                }
                ServerEvent::Return(_) | ServerEvent::Reclaimed | ServerEvent::Bye { .. } => {}
                ServerEvent::Acknowledge(recall) => panic!("{recall:?} was never sent"),
            }
            while let Some((_, call, result)) = self.locks.poll_ended() {
                self.connection.respond(call, &Response::plain(result.map(|()| Reply::Done)));
            }
        }
    }

    /// Executes a lock call; `None`: it waits.
    fn lock(&mut self, call: CallId, what: &Call) -> Option<Result<Reply, Errno>> {
        let object = match self.tree.lockable(lock_place(what)?) {
            Ok(object) => object,
            Err(errno) => return Some(Err(errno)),
        };
        let owner = |owner, flock| LockOwner { session: 1, flock, owner };
        let ends = |flock: bool, start, end| if flock { (0, u64::MAX) } else { (start, end) };
        let claim = |owner: LockOwner, kind: LockKind, (start, end), pid| LockRequest {
            object,
            owner,
            kind,
            start,
            end,
            pid,
        };
        Some(Ok(match *what {
            Call::Lock { owner: number, flock, kind, start, end, wait, pid, reclaim, .. } => {
                let claim = claim(owner(number, flock), kind, ends(flock, start, end), pid);
                let tried = match reclaim {
                    true => self.locks.handle_reclaim(claim, false),
                    false => self.locks.handle_lock(claim, wait.then_some(call)),
                };
                match tried {
                    LockResult::Granted => Reply::Done,
                    LockResult::Waits => return None,
                    LockResult::Refused(errno) => return Some(Err(errno)),
                }
            }
            Call::Unlock { owner: number, flock, start, end, .. } => {
                let (start, end) = ends(flock, start, end);
                match self.locks.handle_unlock(object, owner(number, flock), start, end) {
                    Ok(()) => Reply::Done,
                    Err(errno) => return Some(Err(errno)),
                }
            }
            Call::GetLock { owner: number, flock, kind, start, end, .. } => {
                let claim = claim(owner(number, flock), kind, ends(flock, start, end), 0);
                Reply::LockConflict(self.locks.conflict(&claim).map(|(_, info)| info))
            }
            _ => return Some(Err(Errno::NOSYS)),
        }))
    }

    /// Carries bytes both ways until nothing moves; returns the client's events.
    pub fn exchange(&mut self, now: Time, remote: &mut dyn Remote) -> Vec<Event> {
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

/// The file of a lock call.
fn lock_place(call: &Call) -> Option<&NodeRef> {
    match call {
        Call::Lock { node, .. } | Call::Unlock { node, .. } | Call::GetLock { node, .. } => Some(node),
        _ => None,
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
        self.server.exchange(T0, remote)
    }
}
