//! One server per user and machine (decision 19 of the design).
//!
//! Two locks in the runtime directory keep it one. `server.lock` is held by the server as long as it
//! lives. `start.lock` is held by whoever connects or starts one, and by a server that is about to
//! end: so nobody connects to a server that no longer accepts, and two starters start one.

use crate::listen::Serving;
use crate::listeners::Listeners;
use crate::places::Places;
use crate::server::{Server, ServerOptions};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
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
/// What a relay passes on at a time.
const RELAY_BYTES: usize = 256 << 10;

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

/// Copies this process's standard input to this user's server and what it says to standard output, until
/// either ends; it is started as [`ensure_running`] does it. What this says first tells the other end that a server is there
/// (`nigh_link::ssh`).
pub fn relay(exe: &Path) -> io::Result<()> {
    let places = Places::of_user()?;
    let running = ensure_running_at(&places, exe)?;
    let server = own_server(UnixStream::connect(places.relay_socket())?)?;
    // Until then it kept the server from ending.
    drop(running);
    let (from, to) = (server.try_clone()?, server);
    std::thread::Builder::new().name("nigh-relay".into()).spawn(move || {
        let _ = copy(&mut io::stdin().lock(), &mut &to);
        // What comes back is still passed on.
        let _ = to.shutdown(std::net::Shutdown::Write);
    })?;
    let mut output = io::stdout().lock();
    output.write_all(nigh_link::ssh::READY)?;
    output.flush()?;
    copy(&mut &from, &mut output)
}

/// Passes on what came as soon as it came.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; RELAY_BYTES];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                to.write_all(&buffer[..count])?;
                to.flush()?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
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
    match only_server(places)? {
        Some(only) => run(places, &Serving::default(), Some(idle), &signals, only),
        None => Ok(()),
    }
}

/// Runs this user's server with exports and listeners until SIGTERM or SIGINT. It is the server of this
/// user's own mounts too.
///
/// # Errors
/// Also where another one of this user runs: two cannot serve the same directories.
pub fn serve(places: &Places, serving: &Serving) -> io::Result<()> {
    let signals = Signals::register()?;
    places.make_runtime()?;
    let only = match UnixStream::connect(places.socket()) {
        Ok(_) => None,
        Err(_) => only_server(places)?,
    };
    let Some(only) = only else {
        let problem = format!(
            "a server of yours runs already, at {}: end it, or wait {} s after its last mount is gone",
            places.socket().display(),
            IDLE.as_secs()
        );
        return Err(io::Error::new(io::ErrorKind::AddrInUse, problem));
    };
    run(places, serving, None, &signals, only)
}

/// `only` is held until all is over.
fn run(
    places: &Places,
    serving: &Serving,
    idle: Option<Duration>,
    signals: &Signals,
    only: File,
) -> io::Result<()> {
    let exports = serving.exports()?;
    let server = Server::new(ServerOptions { exports, ..ServerOptions::new(places.state.clone()) })?;
    let listeners = Listeners::open(places, serving)?;
    let ended = accept_until_done(places, &listeners, signals, &server, idle);
    // Nobody finds this server any more; then it ends.
    let removed = listeners.close();
    server.end_sessions("the server was told to stop");
    let give_up = Instant::now() + END_PATIENCE;
    while server.session_count() > 0 && Instant::now() < give_up {
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(only);
    ended.map(drop).and(removed)
}

/// Answers the lock that keeps others from connecting while this server ends, if it ends by itself.
fn accept_until_done(
    places: &Places,
    listeners: &Listeners,
    signals: &Signals,
    server: &Arc<Server>,
    idle: Option<Duration>,
) -> io::Result<Option<File>> {
    let mut busy = Instant::now();
    loop {
        let mut watched = vec![PollFd::new(&signals.stream, PollFlags::IN)];
        watched.extend(listeners.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let tick = rustix::time::Timespec { tv_sec: 0, tv_nsec: TICK_MS * 1_000_000 };
        match poll(&mut watched, Some(&tick)) {
            Err(rustix::io::Errno::INTR) => {}
            other => drop(other?),
        }
        if watched[0].revents().contains(PollFlags::IN) {
            return Ok(None);
        }
        if listeners.accept_all(server)? || server.session_count() > 0 {
            busy = Instant::now();
        } else if idle.is_some_and(|idle| busy.elapsed() >= idle)
            // Whoever holds it is about to connect.
            && let Ok(lock) = lock(&places.runtime.join("start.lock"), FlockOperation::NonBlockingLockExclusive)
        {
            if !listeners.accept_all(server)? {
                return Ok(Some(lock));
            }
            busy = Instant::now();
        }
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
