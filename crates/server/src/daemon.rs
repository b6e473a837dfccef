//! One server per user and machine (decision 19 of the design).
//!
//! Two locks in the runtime directory keep it one. `server.lock` is held by the server as long as it
//! lives. `start.lock` is held by whoever connects or starts one, and by a server that is about to
//! end: so nobody connects to a server that no longer accepts, and two starters start one.

use crate::places::Places;
use crate::server::{Server, ServerOptions};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a started server may take until it answers.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// How long a server stays without a session.
pub const IDLE: Duration = Duration::from_secs(60);
/// How long sessions may take to end when the server is told to.
const END_PATIENCE: Duration = Duration::from_secs(3);
const TICK_MS: i64 = 250;

/// A connection to this user's server; `exe serve --listen user` is started, detached from this
/// process, if there is none. Its log goes to `serve.log` in the runtime directory.
pub fn ensure_running(exe: &Path) -> io::Result<UnixStream> {
    ensure_running_at(&Places::of_user()?, exe)
}

/// The same with directories of one's own, which the started server finds in `NIGH_RUNTIME_DIR` and
/// `NIGH_STATE_DIR`.
pub fn ensure_running_at(places: &Places, exe: &Path) -> io::Result<UnixStream> {
    places.make_runtime()?;
    let _starting = lock(&places.runtime.join("start.lock"), FlockOperation::LockExclusive)?;
    if let Ok(stream) = UnixStream::connect(places.socket()) {
        return own_server(stream);
    }
    let log =
        OpenOptions::new().append(true).create(true).mode(0o600).open(places.runtime.join("serve.log"))?;
    let mut command = Command::new(exe);
    command
        .args(["serve", "--listen", "user"])
        .env("NIGH_RUNTIME_DIR", &places.runtime)
        .env("NIGH_STATE_DIR", &places.state)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    // SAFETY: setsid is safe between fork and exec.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(drop).map_err(Into::into));
    }
    let mut child = command.spawn()?;
    let give_up = Instant::now() + START_PATIENCE;
    loop {
        if let Ok(stream) = UnixStream::connect(places.socket()) {
            reap_later(child);
            return own_server(stream);
        }
        if let Some(status) = child.try_wait()? {
            let log = places.runtime.join("serve.log");
            let message = format!("the server did not start ({status}); see {}", log.display());
            return Err(io::Error::other(message));
        }
        if Instant::now() > give_up {
            let _ = child.kill();
            let _ = child.wait();
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the server that was started does not answer",
            ));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A caller that lives on must not leave a zombie when the server ends before it.
fn reap_later(mut child: std::process::Child) {
    // Without the thread the child is reaped when this process ends.
    let _ = std::thread::Builder::new().name("nigh-reap".into()).spawn(move || child.wait());
}

/// Runs this user's server until it has had no session for a while (60 s, or `NIGH_SERVER_IDLE_MS`),
/// or until SIGTERM or SIGINT. `Ok` at once where another one runs already.
pub fn run_user_server() -> io::Result<()> {
    let idle = match std::env::var("NIGH_SERVER_IDLE_MS") {
        Ok(text) => text.parse().map(Duration::from_millis).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, "NIGH_SERVER_IDLE_MS is no number of milliseconds")
        })?,
        Err(_) => IDLE,
    };
    run_server_at(&Places::of_user()?, idle)
}

/// The same with directories and idle time of one's own.
pub fn run_server_at(places: &Places, idle: Duration) -> io::Result<()> {
    let signals = Signals::register()?;
    places.make_runtime()?;
    let Some(_only) = only_server(places)? else { return Ok(()) };
    let socket = places.socket();
    match std::fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&socket)?;
    listener.set_nonblocking(true)?;
    let server = Server::new(ServerOptions::new(places.state.clone()))?;
    tracing::info!(socket = %socket.display(), "serving");
    let ended = accept_until_done(places, &listener, &signals, &server, idle);
    // Nobody finds this server any more; then it ends.
    let removed = std::fs::remove_file(&socket);
    drop(listener);
    server.end_sessions("the server was told to stop");
    let give_up = Instant::now() + END_PATIENCE;
    while server.session_count() > 0 && Instant::now() < give_up {
        std::thread::sleep(Duration::from_millis(10));
    }
    ended.map(drop).and(removed)
}

/// Answers the lock that keeps others from connecting while this server ends, if it ends by itself.
fn accept_until_done(
    places: &Places,
    listener: &UnixListener,
    signals: &Signals,
    server: &Arc<Server>,
    idle: Duration,
) -> io::Result<Option<File>> {
    let mut busy = Instant::now();
    loop {
        let mut watched = [PollFd::new(listener, PollFlags::IN), PollFd::new(&signals.stream, PollFlags::IN)];
        let tick = rustix::time::Timespec { tv_sec: 0, tv_nsec: TICK_MS * 1_000_000 };
        match poll(&mut watched, Some(&tick)) {
            Err(rustix::io::Errno::INTR) => {}
            other => drop(other?),
        }
        if watched[1].revents().contains(PollFlags::IN) {
            return Ok(None);
        }
        if accept_all(listener, server)? || server.session_count() > 0 {
            busy = Instant::now();
        } else if busy.elapsed() >= idle
            // Whoever holds it is about to connect.
            && let Ok(lock) = lock(&places.runtime.join("start.lock"), FlockOperation::NonBlockingLockExclusive)
        {
            if !accept_all(listener, server)? {
                return Ok(Some(lock));
            }
            busy = Instant::now();
        }
    }
}

/// Whether there was anybody.
fn accept_all(listener: &UnixListener, server: &Arc<Server>) -> io::Result<bool> {
    let mut any = false;
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(any),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                tracing::warn!(%error, "a client has to wait");
                std::thread::sleep(Duration::from_millis(20));
                return Ok(true);
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) => return Err(error),
        };
        stream.set_nonblocking(false)?;
        let peer = rustix::net::sockopt::socket_peercred(&stream)?.uid;
        if !peer.is_root() && peer != rustix::process::geteuid() {
            tracing::warn!(uid = peer.as_raw(), "another user's connection is refused");
            continue;
        }
        any = true;
        let server = Arc::clone(server);
        std::thread::Builder::new().name("nigh-session".into()).spawn(move || {
            if let Err(error) = server.serve_stream(stream) {
                tracing::warn!(%error, "a session ended with an error");
            }
        })?;
    }
}

/// The lock of the one server; `None` where another holds it and answers. One that is about to end is
/// waited for.
fn only_server(places: &Places) -> io::Result<Option<File>> {
    let path = places.runtime.join("server.lock");
    let give_up = Instant::now() + START_PATIENCE / 2;
    loop {
        match lock(&path, FlockOperation::NonBlockingLockExclusive) {
            Ok(lock) => return Ok(Some(lock)),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            Err(_) if UnixStream::connect(places.socket()).is_ok() => return Ok(None),
            Err(error) if Instant::now() > give_up => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn own_server(stream: UnixStream) -> io::Result<UnixStream> {
    let peer = rustix::net::sockopt::socket_peercred(&stream)?.uid;
    if peer == rustix::process::geteuid() {
        return Ok(stream);
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        "somebody else's server answers on this user's socket",
    ))
}

fn lock(path: &Path, how: FlockOperation) -> io::Result<File> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    flock(&file, how)?;
    Ok(file)
}

/// SIGTERM and SIGINT make the stream readable, for as long as this lives; whichever thread gets them.
struct Signals {
    stream: UnixStream,
    registered: Vec<signal_hook::SigId>,
}

impl Signals {
    fn register() -> io::Result<Signals> {
        let (stream, writer) = UnixStream::pair()?;
        let mut signals = Signals { stream, registered: Vec::new() };
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            let id = signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
            signals.registered.push(id);
        }
        Ok(signals)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}
