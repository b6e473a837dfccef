//! One server per user and machine.
//!
//! Two locks in the runtime directory ensure that. The server holds `server.lock` while it lives. A process that
//! connects to a server or starts one holds `start.lock`, and so does a server that is about to end. So no process
//! connects to a server that accepts no more, and two concurrent starters start one server.

pub(crate) mod control;
pub(crate) mod guests;
pub(crate) mod listen;
pub(crate) mod listeners;
mod run;
pub(crate) mod server_dirs;
mod signals;
pub(crate) mod socket_activation;
pub(crate) mod status_text;
mod supervisor;

pub use run::{run_server_at, run_user_server, serve};

use crate::daemon::server_dirs::ServerDirs;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a started server may take to answer: it first waits for one that is about to end.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// How long to retry on a server that accepts connections and closes them: it is exiting, or does not know the
/// liveness request.
const DYING_PATIENCE: Duration = Duration::from_secs(2);
/// How long a server lives without a session.
pub const IDLE: Duration = Duration::from_secs(60);
/// Buffer size of a relay.
const RELAY_BYTES: usize = 256 << 10;

/// Connects to this user's server. If none runs, starts `exe serve --listen user`, detached from this process. Its
/// log goes to `serve.log` in the runtime directory.
pub fn ensure_running(exe: &Path) -> io::Result<UnixStream> {
    ensure_running_at(&ServerDirs::of_user()?, exe)
}

/// Like [`ensure_running`], with other directories, which are passed to the server in `NIGH_RUNTIME_DIR` and
/// `NIGH_STATE_DIR`.
pub fn ensure_running_at(places: &ServerDirs, exe: &Path) -> io::Result<UnixStream> {
    places.make_runtime()?;
    let _starting = lock(&places.runtime.join("start.lock"), FlockOperation::LockExclusive)?;
    if let Some(stream) = running(places)? {
        return Ok(stream);
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
    // The service manager addresses these variables to this process, not to its server.
    for variable in supervisor::VARIABLES {
        command.env_remove(variable);
    }
    // SAFETY: setsid is safe between fork and exec.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(drop).map_err(Into::into));
    }
    let mut child = command.spawn()?;
    let give_up = Instant::now() + START_PATIENCE;
    loop {
        if let Some(stream) = running(places)? {
            reap_later(child);
            return Ok(stream);
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

/// Returns a connection that the running server has accepted, or `None` if no server runs. A killed or stopping
/// server may still queue connections for a moment before it closes them.
fn running(places: &ServerDirs) -> io::Result<Option<UnixStream>> {
    let give_up = Instant::now() + DYING_PATIENCE;
    loop {
        let Ok(stream) = UnixStream::connect(places.socket()) else { return Ok(None) };
        let stream = own_server(stream)?;
        if Instant::now() > give_up || control::is_served(&stream, START_PATIENCE)? {
            return Ok(Some(stream));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Prevents a zombie if the server ends before a long-lived caller.
fn reap_later(mut child: std::process::Child) {
    // Without the thread the child is reaped when this process ends.
    let _ = std::thread::Builder::new().name("nigh-reap".into()).spawn(move || child.wait());
}

/// Relays this process's standard input to this user's server, and the server's output to standard output, until
/// either ends. Starts the server like [`ensure_running`]. The first output tells the other end that a server is
/// there (`nigh_link::ssh`).
pub fn relay(exe: &Path) -> io::Result<()> {
    let places = ServerDirs::of_user()?;
    let server = ensure_running_at(&places, exe)?;
    let (from, to) = (server.try_clone()?, server);
    std::thread::Builder::new().name("nigh-relay".into()).spawn(move || {
        let _ = copy(&mut io::stdin().lock(), &mut &to);
        // The server's remaining output is still relayed.
        let _ = to.shutdown(std::net::Shutdown::Write);
    })?;
    let mut output = io::stdout().lock();
    output.write_all(nigh_link::ssh::READY)?;
    output.flush()?;
    copy(&mut &from, &mut output)
}

/// Copies bytes as soon as they arrive.
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

fn own_server(stream: UnixStream) -> io::Result<UnixStream> {
    let (peer, _) = nigh_link::unix::ids(&stream)?;
    if peer == rustix::process::geteuid().as_raw() {
        return Ok(stream);
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        "another user's server answers on this user's socket",
    ))
}

fn lock(path: &Path, how: FlockOperation) -> io::Result<File> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    flock(&file, how)?;
    Ok(file)
}
