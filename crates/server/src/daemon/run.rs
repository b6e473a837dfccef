//! Running and stopping of a server.

use super::signals::Signals;
use super::supervisor::Supervisor;
use super::{IDLE, lock};
use crate::daemon::control;
use crate::daemon::guests::{self, Arrivals, Guests};
use crate::daemon::listen::Serving;
use crate::daemon::listeners::Listeners;
use crate::daemon::server_dirs::ServerDirs;
use crate::server::{Server, ServerOptions};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::FlockOperation;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long accepted calls may take to end when the server stops.
const DRAIN_PATIENCE: Duration = Duration::from_secs(10);
/// How long clients may take after that to read their queued replies.
const END_PATIENCE: Duration = Duration::from_secs(3);
/// How long a new server waits for one that is ending.
const LOCK_PATIENCE: Duration = Duration::from_secs(16);
const TICK: Duration = Duration::from_millis(250);

/// Runs this user's server until it has had no session for a while (60 s, or `NIGH_SERVER_IDLE_MS`), or until SIGTERM
/// or SIGINT. Returns `Ok` at once if another server runs already. `serving` has no exports.
pub fn run_user_server(serving: &Serving) -> io::Result<()> {
    let idle = match std::env::var("NIGH_SERVER_IDLE_MS") {
        Ok(text) => text.parse().map(Duration::from_millis).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, "NIGH_SERVER_IDLE_MS is no number of milliseconds")
        })?,
        Err(_) => IDLE,
    };
    run_until_idle(&ServerDirs::of_user()?, serving, idle)
}

/// Like [`run_user_server`], with other directories and another idle time.
pub fn run_server_at(places: &ServerDirs, idle: Duration) -> io::Result<()> {
    run_until_idle(places, &Serving::default(), idle)
}

fn run_until_idle(places: &ServerDirs, serving: &Serving, idle: Duration) -> io::Result<()> {
    let signals = Signals::register()?;
    places.make_runtime()?;
    match only_server(places, serving)? {
        Some(only) => run(places, serving, Some(idle), &signals, only),
        None => Ok(()),
    }
}

/// Runs this user's server with exports and listeners until SIGTERM or SIGINT. It also serves this user's own mounts.
///
/// If another server of this user runs, for example one started by a mount, it takes over the exports and listeners,
/// since two servers cannot serve one directory. If that server ends, this process becomes the server.
///
/// # Errors
/// Fails also if the other server refuses, and for sockets of a service manager, which cannot be passed on.
pub fn serve(places: &ServerDirs, serving: &Serving) -> io::Result<()> {
    let signals = Signals::register()?;
    places.make_runtime()?;
    places.check_state()?;
    loop {
        if let Some(only) = only_server(places, serving)? {
            return run(places, serving, None, &signals, only);
        }
        if !serving.passed.is_empty() {
            let problem = format!(
                "a server of yours runs already, at {}, and cannot be given sockets of a service manager: end it, or wait \
                 {} s after its last mount is gone",
                places.socket().display(),
                IDLE.as_secs()
            );
            return Err(io::Error::new(io::ErrorKind::AddrInUse, problem));
        }
        if be_guest(places, serving, &signals)? {
            return Ok(());
        }
    }
}

/// Lets the running server serve until a signal (returns true), or until that server ends.
fn be_guest(places: &ServerDirs, serving: &Serving, signals: &Signals) -> io::Result<bool> {
    let Some(mut stream) = super::running(places)? else { return Ok(false) };
    let names = match guests::join(&mut stream, control::SERVE, serving) {
        // The server was about to end.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            std::thread::sleep(TICK);
            return Ok(false);
        }
        other => other?,
    };
    for at in &names {
        tracing::info!(at, "listening, by the server of yours that runs already");
    }
    let mut supervisor = Supervisor::new();
    supervisor.ready("served by the server that runs already");
    loop {
        let mut watched = [
            PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            PollFd::new(&stream, PollFlags::IN | PollFlags::RDHUP),
        ];
        let pause = rustix::time::Timespec::try_from(supervisor.pause(TICK)).map_err(io::Error::other)?;
        match poll(&mut watched, Some(&pause)) {
            Err(rustix::io::Errno::INTR) => {}
            other => drop(other?),
        }
        supervisor.turn(|| "served by the server that runs already".to_owned());
        if watched[0].revents().contains(PollFlags::IN) {
            tracing::info!("stopping on request");
            supervisor.stopping();
            return Ok(true);
        }
        if !watched[1].revents().is_empty() {
            tracing::info!("the server that ran has ended");
            return Ok(false);
        }
    }
}

/// Runs a server. `only` is held until everything is done.
fn run(
    places: &ServerDirs,
    serving: &Serving,
    idle: Option<Duration>,
    signals: &Signals,
    only: File,
) -> io::Result<()> {
    let exports = serving.exports()?;
    let server = Server::new(ServerOptions { exports, ..ServerOptions::new(places.state.clone()) })?;
    let arrivals = Arc::new(Arrivals::new(places)?);
    let listeners = Listeners::open(places, serving, &arrivals)?;
    let mut guests = Guests::new(arrivals);
    server.set_listening(listeners.names());
    let mut supervisor = Supervisor::new();
    supervisor.ready(&status_line(&server));
    let ended = accept_until_done(places, (&listeners, &mut guests), signals, &server, &mut supervisor, idle);
    supervisor.stopping();
    server.stop_taking();
    // No process finds this server any more. A process that looks for one starts the next, which waits for `only`.
    let removed = listeners.close();
    guests.close(&server);
    wind_up(&server, &mut supervisor);
    drop(only);
    ended.map(drop).and(removed)
}

/// Accepts connections until the server is to stop. If it stops for lack of sessions, returns the lock that keeps
/// others from connecting.
fn accept_until_done(
    places: &ServerDirs,
    (listeners, guests): (&Listeners, &mut Guests),
    signals: &Signals,
    server: &Arc<Server>,
    supervisor: &mut Supervisor,
    idle: Option<Duration>,
) -> io::Result<Option<File>> {
    let mut busy = Instant::now();
    loop {
        let mut watched = vec![PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        watched.extend(
            listeners.fds().chain(guests.fds()).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
        );
        let pause = rustix::time::Timespec::try_from(supervisor.pause(TICK)).map_err(io::Error::other)?;
        match poll(&mut watched, Some(&pause)) {
            Err(rustix::io::Errno::INTR) => {}
            other => drop(other?),
        }
        if watched[0].revents().contains(PollFlags::IN) {
            tracing::info!("stopping on request");
            return Ok(None);
        }
        listeners.accept_all(server)?;
        guests.turn(server)?;
        supervisor.turn(|| status_line(server));
        if server.session_count() > 0 || !guests.is_empty() {
            busy = Instant::now();
        } else if idle.is_some_and(|idle| busy.elapsed() >= idle) && !listeners.is_anybody_there() {
            match lock(&places.runtime.join("start.lock"), FlockOperation::NonBlockingLockExclusive) {
                Ok(lock) if !listeners.accept_all(server)? => {
                    tracing::info!("no client uses this server any more: it exits");
                    return Ok(Some(lock));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    tracing::info!("the runtime directory is gone: no client can reach this server any more");
                    return Ok(None);
                }
                // A process holds the lock and is about to connect.
                _ => {}
            }
        }
    }
}

/// Drains the server: waits for accepted calls, then for queued messages, each with a timeout.
fn wind_up(server: &Server, supervisor: &mut Supervisor) {
    let turn = |supervisor: &mut Supervisor, left: &dyn Fn() -> u64, patience: Duration, what: &str| {
        let give_up = Instant::now() + patience;
        while left() > 0 && Instant::now() < give_up {
            supervisor.turn(|| format!("stopping: {} {what}", left()));
            std::thread::sleep(Duration::from_millis(5));
        }
        left()
    };
    let calls = || server.calls_under_way();
    let cut = turn(supervisor, &calls, DRAIN_PATIENCE, "calls to finish");
    if cut > 0 {
        tracing::warn!(calls = cut, after_s = DRAIN_PATIENCE.as_secs(), "calls did not end in time");
    }
    server.end_sessions("the server stops");
    let sessions = || server.session_count();
    let deaf = turn(supervisor, &sessions, END_PATIENCE, "sessions to end");
    if deaf > 0 {
        tracing::warn!(sessions = deaf, "clients did not take in what was left for them");
    }
    tracing::info!("stopped");
}

fn status_line(server: &Server) -> String {
    let recalls = server.leases().holders.iter().filter(|holder| holder.owed > 0).count();
    let owing = if recalls == 0 { String::new() } else { format!(", {recalls} asked to give back") };
    match server.session_count() {
        1 => format!("1 session{owing}"),
        count => format!("{count} sessions{owing}"),
    }
}

/// Takes the lock of the single server. Returns `None` if another server holds it and answers. Waits for a server
/// that is about to end.
fn only_server(places: &ServerDirs, serving: &Serving) -> io::Result<Option<File>> {
    let path = places.runtime.join("server.lock");
    let give_up = Instant::now() + LOCK_PATIENCE;
    // The service manager itself listens on the socket for the server that this process is to become.
    let mut is_ours = false;
    for passed in &serving.passed {
        is_ours |= passed.is_own(places)?;
    }
    loop {
        match lock(&path, FlockOperation::NonBlockingLockExclusive) {
            Ok(lock) => return Ok(Some(lock)),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            Err(_) if !is_ours && UnixStream::connect(places.socket()).is_ok() => return Ok(None),
            Err(_) if Instant::now() > give_up => {
                let problem =
                    format!("a server of yours holds {} and does not answer: end it", path.display());
                return Err(io::Error::new(io::ErrorKind::TimedOut, problem));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}
