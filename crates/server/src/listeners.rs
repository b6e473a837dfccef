//! All that a server listens on, and whom it lets in there.

use crate::acting::can_act;
use crate::listen::{Listen, Serving, bind_tcp, bind_unix};
use crate::places::Places;
use crate::server::Server;
use nigh_link::tcp::Door;
use nigh_link::{Claims, Link, Lobby, Peer, Squash};
use parking_lot::Mutex;
use rustix::process::geteuid;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections over TCP that have proved nothing yet.
const LOBBY: usize = 64;

/// All that a server listens on.
pub(crate) struct Listeners {
    all: Vec<Listener>,
    lobby: Lobby,
    complaints: Arc<Complaints>,
    /// Removed at the end.
    sockets: Vec<PathBuf>,
}

struct Listener {
    socket: Socket,
    admits: Admits,
}

enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

#[derive(Clone)]
pub(crate) enum Admits {
    /// This user and root, to whatever they can reach.
    Own,
    /// The same, from another machine.
    Relays,
    /// Users of this machine, to exports; on a server that cannot act as them only its own.
    Users(Option<Squash>),
    /// Whoever gets through the door, to exports.
    Network(Arc<Door>, Claims, Squash),
}

impl Listeners {
    /// Listens on this user's socket, which must be free, and everywhere else that is said.
    pub fn open(places: &Places, serving: &Serving) -> io::Result<Listeners> {
        let mut listeners = Listeners {
            all: Vec::new(),
            lobby: Lobby::new(LOBBY),
            complaints: Arc::default(),
            sockets: Vec::new(),
        };
        // Whoever finds a server by the last one finds the others too.
        for (path, admits) in [(places.relay_socket(), Admits::Relays), (places.socket(), Admits::Own)] {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            listeners.add_unix(UnixListener::bind(&path)?, path, admits)?;
        }
        let network = serving.network(places)?;
        for listen in &serving.listens {
            match listen {
                Listen::Unix(path) => {
                    let listener = bind_unix(path)?;
                    listeners.add_unix(listener, path.clone(), Admits::Users(serving.squash))?;
                }
                Listen::Tcp { host, port } => {
                    let Some(admits) = &network else { continue };
                    for listener in bind_tcp(host, *port)? {
                        listener.set_nonblocking(true)?;
                        tracing::info!(address = %listener.local_addr()?, "listening");
                        let socket = Socket::Tcp(listener);
                        listeners.all.push(Listener { socket, admits: admits.clone() });
                    }
                }
            }
        }
        Ok(listeners)
    }

    fn add_unix(&mut self, listener: UnixListener, path: PathBuf, admits: Admits) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        tracing::info!(socket = %path.display(), "listening");
        self.sockets.push(path);
        self.all.push(Listener { socket: Socket::Unix(listener), admits });
        Ok(())
    }

    /// What becomes readable when somebody connects.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all.iter().map(|listener| match &listener.socket {
            Socket::Unix(socket) => socket.as_fd(),
            Socket::Tcp(socket) => socket.as_fd(),
        })
    }

    /// Lets in all who are there now, each with a thread. Whether there was anybody.
    pub fn accept_all(&self, server: &Arc<Server>) -> io::Result<bool> {
        let mut any = false;
        for listener in &self.all {
            loop {
                let accepted = match &listener.socket {
                    Socket::Unix(socket) => socket.accept().map(|(stream, _)| Accepted::Unix(stream)),
                    Socket::Tcp(socket) => socket.accept().map(|(stream, _)| Accepted::Tcp(stream)),
                };
                match accepted {
                    Ok(Accepted::Unix(stream)) => any |= admit_unix(stream, &listener.admits, server)?,
                    Ok(Accepted::Tcp(stream)) => self.admit_tcp(stream, &listener.admits, server),
                    Err(error) => match error.raw_os_error() {
                        Some(libc::EWOULDBLOCK) => break,
                        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                            tracing::warn!(%error, "a client has to wait");
                            std::thread::sleep(Duration::from_millis(20));
                            any = true;
                            break;
                        }
                        // What accept says of a connection that is gone already (accept(2)).
                        _ if matches!(listener.socket, Socket::Tcp(_)) => {
                            tracing::debug!(%error, "a client went away");
                        }
                        Some(libc::ECONNABORTED | libc::EINTR) => {}
                        _ => return Err(error),
                    },
                }
            }
        }
        Ok(any)
    }

    /// Nobody finds this server by its sockets any more.
    pub fn close(self) -> io::Result<()> {
        let remove = |path: &PathBuf| match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        let removed: Vec<_> = self.sockets.iter().map(remove).collect();
        removed.into_iter().collect()
    }

    fn admit_tcp(&self, stream: TcpStream, admits: &Admits, server: &Arc<Server>) {
        let Admits::Network(door, claims, squash) = admits else { return };
        let Some(ticket) = self.lobby.enter(&stream) else {
            return self.complaints.say("too many connections that prove nothing: one is dropped");
        };
        let (door, claims, squash, server) = (Arc::clone(door), claims.clone(), *squash, Arc::clone(server));
        let complaints = Arc::clone(&self.complaints);
        let serve = move || {
            let from = stream.peer_addr().map_or_else(|_| "?".to_owned(), |address| address.to_string());
            if let Err(error) = stream.set_nonblocking(false) {
                return tracing::warn!(%error, "a connection cannot be used");
            }
            let admitted = door.admit(stream);
            drop(ticket);
            match admitted {
                Ok(link) => {
                    let peer = Peer::new(format!("tcp from {from}"), claims, squash);
                    if let Err(error) = server.serve_link(link, peer) {
                        tracing::warn!(%error, "a session ended with an error");
                    }
                }
                Err(error) => complaints.say(&error.to_string()),
            }
        };
        if let Err(error) = std::thread::Builder::new().name("nigh-session".into()).spawn(serve) {
            tracing::warn!(%error, "no thread for a connection: it is dropped");
        }
    }
}

/// Lines about strangers: at most one a second, so that they cannot fill a disk.
#[derive(Default)]
struct Complaints {
    /// When the latest was written, and how many were not since.
    latest: Mutex<(Option<Instant>, u64)>,
}

impl Complaints {
    fn say(&self, problem: &str) {
        let mut latest = self.latest.lock();
        if latest.0.is_some_and(|at| at.elapsed() < Duration::from_secs(1)) {
            latest.1 += 1;
            return;
        }
        tracing::warn!(problem, unsaid = latest.1, "not let in");
        *latest = (Some(Instant::now()), 0);
    }
}

enum Accepted {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// False for somebody who is not wanted.
fn admit_unix(stream: UnixStream, admits: &Admits, server: &Arc<Server>) -> io::Result<bool> {
    stream.set_nonblocking(false)?;
    let credentials = nigh_link::unix::credentials(&stream)?;
    let uid = credentials.uid;
    let own = uid == 0 || uid == geteuid().as_raw();
    let claims = if uid == 0 { Claims::Any } else { Claims::Only(credentials) };
    let came = format!("unix socket, uid {uid}");
    let peer = match admits {
        Admits::Own | Admits::Relays if own => Peer::new(came, claims, Squash::None).with_any_path(),
        Admits::Users(squash) if own || can_act() => Peer::new(came, claims, squash.unwrap_or(Squash::None)),
        _ => {
            tracing::warn!(uid, "another user's connection is refused");
            return Ok(false);
        }
    };
    let link = if matches!(admits, Admits::Relays) { Link::relayed(stream) } else { stream.into() };
    let server = Arc::clone(server);
    std::thread::Builder::new().name("nigh-session".into()).spawn(move || {
        if let Err(error) = server.serve_link(link, peer) {
            tracing::warn!(%error, "a session ended with an error");
        }
    })?;
    Ok(true)
}
