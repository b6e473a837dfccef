//! Listening sockets of a server, and admission of connections.

use crate::daemon::control::{self, Purpose};
use crate::daemon::guests::Arrivals;
use crate::daemon::listen::{Listen, Serving, bind_tcp, bind_unix};
use crate::daemon::server_dirs::ServerDirs;
use crate::os::squash::{is_own, unix_peer};
use crate::server::Server;
use crate::session::log::LineLimiter;
use nigh_link::tcp::Acceptor;
use nigh_link::{Claims, Peer, Squash, UnauthenticatedLimit};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Limit on unauthenticated TCP connections, and on unattached connections of token holders and of this machine's
/// users.
const LOBBY: usize = 64;
const UNATTACHED: &str = "too many connections that attach to nothing: one is dropped";

/// How long a connection on a unix socket may stay silent.
const SILENCE: Duration = Duration::from_secs(15);

/// All listening sockets of a server or guest.
pub(crate) struct Listeners {
    all: Vec<Listener>,
    lobby: UnauthenticatedLimit,
    users: UnauthenticatedLimit,
    complaints: Arc<LineLimiter>,
    /// Cloned for each unix-socket connection from acceptance to its end; the count shows whether any exist.
    present: Arc<()>,
    names: Vec<String>,
    /// Socket files, removed at the end.
    sockets: Vec<PathBuf>,
    /// Scope of the exports that clients of these sockets may attach to ([`Peer::with_scope`]).
    scope: u64,
    arrivals: Arc<Arrivals>,
    links: Arc<Links>,
}

/// Connections being served, which can be cut off.
#[derive(Default)]
struct Links {
    all: Mutex<(u64, BTreeMap<u64, Accepted>)>,
}

impl Links {
    /// Registers a connection. Returns `None` if it cannot be registered; it must then not be served, as it could not
    /// be cut off.
    fn enter(self: &Arc<Links>, stream: io::Result<Accepted>) -> Option<Served> {
        let stream = stream.ok()?;
        let mut all = self.all.lock();
        all.0 += 1;
        let number = all.0;
        all.1.insert(number, stream);
        Some(Served { links: Arc::clone(self), number })
    }

    fn cut_off(&self) {
        for stream in self.all.lock().1.values() {
            let _ = match stream {
                Accepted::Unix(stream) => stream.shutdown(std::net::Shutdown::Both),
                Accepted::Tcp(stream) => stream.shutdown(std::net::Shutdown::Both),
            };
        }
    }
}

/// Registration of a connection, until dropped.
struct Served {
    links: Arc<Links>,
    number: u64,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.links.all.lock().1.remove(&self.number);
    }
}

struct Listener {
    socket: Socket,
    admits: AccessPolicy,
}

pub(crate) enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

#[derive(Clone)]
pub(crate) enum AccessPolicy {
    /// This user and root, with access to every path that they can reach.
    Own,
    /// Users of this machine, with access to exports. A server that cannot impersonate them admits only its own user.
    Users(Option<Squash>),
    /// Network clients that authenticate, with access to exports.
    Network(Arc<Acceptor>, Claims, Squash),
}

impl Listeners {
    /// Listens on this user's socket, which must be free, on all configured addresses, and on sockets passed by the
    /// service manager.
    pub fn open(places: &ServerDirs, serving: &Serving, arrivals: &Arc<Arrivals>) -> io::Result<Listeners> {
        let mut listeners = Listeners::empty((0, Arc::clone(arrivals)));
        let network = serving.network(places)?;
        let mut has_own = false;
        for passed in &serving.passed {
            let own = passed.is_own(places)?;
            has_own |= own;
            let admits = match (&network, passed.is_tcp()) {
                (_, false) if own => AccessPolicy::Own,
                (_, false) => AccessPolicy::Users(serving.squash),
                (Some(network), true) => network.clone(),
                (None, true) => continue,
            };
            listeners.add(passed.listener()?, admits, passed.display_address())?;
        }
        if !has_own {
            listeners.listen_for_own(places)?;
        }
        listeners.listen_for_others(serving, network.as_ref())?;
        Ok(listeners)
    }

    /// Listens only on the addresses in `serving`, for the exports of a guest.
    pub fn open_for(
        places: &ServerDirs,
        serving: &Serving,
        scope: (u64, Arc<Arrivals>),
    ) -> io::Result<Listeners> {
        let mut listeners = Listeners::empty(scope);
        let network = serving.network(places)?;
        match listeners.listen_for_others(serving, network.as_ref()) {
            Ok(()) => Ok(listeners),
            Err(error) => {
                let _ = listeners.close();
                Err(error)
            }
        }
    }

    fn empty((scope, arrivals): (u64, Arc<Arrivals>)) -> Listeners {
        Listeners {
            all: Vec::new(),
            lobby: UnauthenticatedLimit::new(LOBBY),
            users: UnauthenticatedLimit::new(LOBBY),
            // Limits complaints about strangers, so that they cannot fill a disk.
            complaints: Arc::new(LineLimiter::new(1, Duration::from_secs(1))),
            present: Arc::new(()),
            names: Vec::new(),
            sockets: Vec::new(),
            scope,
            arrivals,
            links: Arc::default(),
        }
    }

    fn listen_for_others(&mut self, serving: &Serving, network: Option<&AccessPolicy>) -> io::Result<()> {
        for listen in &serving.listens {
            match listen {
                Listen::Unix(path) => {
                    let listener = bind_unix(path)?;
                    self.add_unix(listener, path.clone(), AccessPolicy::Users(serving.squash))?;
                }
                Listen::Tcp { host, port } => {
                    let Some(admits) = network else { continue };
                    for listener in bind_tcp(host, *port)? {
                        let name = format!("tcp://{}", listener.local_addr()?);
                        self.add(Socket::Tcp(listener), admits.clone(), name)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Closes the connections of all clients of these listeners.
    pub fn cut_off(&self) {
        self.links.cut_off();
    }

    fn listen_for_own(&mut self, places: &ServerDirs) -> io::Result<()> {
        let path = places.socket();
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)
            .map_err(|error| io::Error::new(error.kind(), format!("unix://{}: {error}", path.display())))?;
        self.add_unix(listener, path, AccessPolicy::Own)
    }

    fn add_unix(&mut self, listener: UnixListener, path: PathBuf, admits: AccessPolicy) -> io::Result<()> {
        let name = format!("unix://{}", path.display());
        self.sockets.push(path);
        self.add(Socket::Unix(listener), admits, name)
    }

    fn add(&mut self, socket: Socket, admits: AccessPolicy, name: String) -> io::Result<()> {
        match &socket {
            Socket::Unix(socket) => socket.set_nonblocking(true),
            Socket::Tcp(socket) => socket.set_nonblocking(true),
        }?;
        tracing::info!(at = name, "listening");
        self.names.push(name);
        self.all.push(Listener { socket, admits });
        Ok(())
    }

    /// Addresses for display.
    pub fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    /// Whether any unix-socket connection exists, even a silent one.
    pub fn is_anybody_there(&self) -> bool {
        Arc::strong_count(&self.present) > 1
    }

    /// Descriptors that become readable when a client connects.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all.iter().map(|listener| match &listener.socket {
            Socket::Unix(socket) => socket.as_fd(),
            Socket::Tcp(socket) => socket.as_fd(),
        })
    }

    /// Accepts all pending connections, each with a thread. Returns whether there were any on unix sockets.
    ///
    /// # Errors
    /// Never for a fault of one client, which would end all others.
    pub fn accept_all(&self, server: &Arc<Server>) -> io::Result<bool> {
        let mut any = false;
        for listener in &self.all {
            loop {
                let accepted = match &listener.socket {
                    Socket::Unix(socket) => socket.accept().map(|(stream, _)| Accepted::Unix(stream)),
                    Socket::Tcp(socket) => socket.accept().map(|(stream, _)| Accepted::Tcp(stream)),
                };
                match accepted {
                    Ok(Accepted::Unix(stream)) => any |= self.admit_unix(stream, &listener.admits, server),
                    Ok(Accepted::Tcp(stream)) => self.admit_tcp(stream, &listener.admits, server),
                    Err(error) => match error.raw_os_error() {
                        Some(libc::EWOULDBLOCK) => break,
                        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                            tracing::warn!(%error, "a client has to wait");
                            std::thread::sleep(Duration::from_millis(20));
                            any = true;
                            break;
                        }
                        // Errors that accept(2) passes on for a connection that is gone already.
                        _ if matches!(listener.socket, Socket::Tcp(_)) => {
                            tracing::debug!(%error, "a client went away");
                        }
                        Some(libc::ECONNABORTED | libc::EINTR) => {}
                        Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK) => return Err(error),
                        _ => {
                            complain(&self.complaints, &format!("no connection: {error}"));
                            break;
                        }
                    },
                }
            }
        }
        Ok(any)
    }

    /// Removes the socket files, so that no client finds this server any more.
    pub fn close(self) -> io::Result<()> {
        let remove = |path: &PathBuf| match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        let removed: Vec<_> = self.sockets.iter().map(remove).collect();
        removed.into_iter().collect()
    }

    fn admit_tcp(&self, stream: TcpStream, admits: &AccessPolicy, server: &Arc<Server>) {
        let AccessPolicy::Network(door, claims, squash) = admits else { return };
        let Some(ticket) = self.lobby.enter(&stream) else {
            return complain(&self.complaints, "too many connections that prove nothing: one is dropped");
        };
        let (door, claims, squash, server) = (Arc::clone(door), claims.clone(), *squash, Arc::clone(server));
        let (users, complaints) = (self.users.clone(), Arc::clone(&self.complaints));
        let (scope, served) = (self.scope, self.links.enter(stream.try_clone().map(Accepted::Tcp)));
        let Some(served) = served else {
            return complain(&self.complaints, "no descriptor for a connection, which is dropped");
        };
        let serve = move || {
            let _served = served;
            let from = match stream.set_nonblocking(false).and_then(|()| stream.peer_addr()) {
                Ok(from) => from,
                Err(error) => return complain(&complaints, &format!("a connection cannot be used: {error}")),
            };
            match door.accept(stream) {
                Ok(link) => {
                    let Some(ticket) = ticket.move_to(&users) else {
                        return complain(&complaints, UNATTACHED);
                    };
                    let peer = Peer::new(format!("tcp from {from}"), claims, squash)
                        .from_host(from.ip())
                        .with_scope(scope);
                    // The session log has the reason.
                    let _ = server.serve_stranger(link, peer, Some(ticket));
                }
                Err(error) => complain(&complaints, &error.to_string()),
            }
        };
        self.begin(serve);
    }

    /// Starts a unix-socket connection. Returns false if the client is refused or cannot be served now.
    fn admit_unix(&self, stream: UnixStream, admits: &AccessPolicy, server: &Arc<Server>) -> bool {
        let known = stream.set_nonblocking(false).and_then(|()| nigh_link::unix::credentials(&stream));
        let who = match known {
            Ok(who) => who,
            Err(error) => {
                complain(&self.complaints, &format!("a connection without a known peer: {error}"));
                return false;
            }
        };
        let uid = who.uid;
        let peer = match admits {
            AccessPolicy::Own if is_own(uid) => unix_peer(who, Squash::None).map(Peer::with_any_path),
            AccessPolicy::Users(squash) => unix_peer(who, squash.unwrap_or(Squash::None)),
            _ => None,
        };
        // Only root and this user can reach the other sockets.
        let stranger = matches!(admits, AccessPolicy::Users(_));
        let ticket = if stranger { self.users.enter(&stream) } else { None };
        if stranger && ticket.is_none() {
            complain(&self.complaints, UNATTACHED);
            return false;
        }
        let (server, present) = (Arc::clone(server), Arc::clone(&self.present));
        let complaints = Arc::clone(&self.complaints);
        let wanted = peer.is_some();
        let Some(served) = self.links.enter(stream.try_clone().map(Accepted::Unix)) else {
            complain(&self.complaints, "no descriptor for a connection, which is dropped");
            return false;
        };
        let (peer, arrivals) = (peer.map(|peer| peer.with_scope(self.scope)), Arc::clone(&self.arrivals));
        let begun = self.begin(move || {
            let (_present, _served) = (present, served);
            match control::purpose(&stream, SILENCE) {
                Purpose::Serve if !stranger && is_own(uid) => arrivals.handle_request(stream),
                Purpose::Serve => complain(&complaints, &format!("uid {uid} asks to have something served")),
                Purpose::Status => control::answer(stream, uid, &server),
                Purpose::Nothing => {}
                Purpose::Session => match peer {
                    // The session log has the reason.
                    Some(peer) => drop(server.serve_stranger(stream.into(), peer, ticket)),
                    None => complain(&complaints, &format!("uid {uid} on a socket that is not for others")),
                },
            }
        });
        begun && wanted
    }

    /// Serves a connection on a thread of its own. Returns false if no thread could be started; the connection is
    /// dropped.
    fn begin(&self, serve: impl FnOnce() + Send + 'static) -> bool {
        let begun = std::thread::Builder::new().name("nigh-session".into()).spawn(serve);
        if let Err(error) = &begun {
            complain(&self.complaints, &format!("no thread for a connection, which is dropped: {error}"));
        }
        begun.is_ok()
    }
}

fn complain(lines: &LineLimiter, problem: &str) {
    if let Some(unsaid) = lines.allow() {
        tracing::warn!(event = "refused", rule = ?problem, unsaid, "not let in");
    }
}

enum Accepted {
    Unix(UnixStream),
    Tcp(TcpStream),
}
