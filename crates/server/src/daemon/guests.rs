//! Guests: exports and listeners of another `nigh serve` process of this user. Two servers cannot serve one
//! directory, so the running server takes them over while that process lives.
//!
//! Each guest has its own exports. Clients of its listeners reach only these, since the access rules of a listener
//! (token, permissions of its socket's directory) were chosen for these exports.

use crate::daemon::listen::{Listen, Serving};
use crate::daemon::listeners::Listeners;
use crate::daemon::server_dirs::ServerDirs;
use crate::export::exports::Exports;
use crate::server::Server;
use nigh_link::Squash;
use rustix::event::eventfd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

/// Maximum length of a request in bytes.
const MOST_BYTES: u64 = 256 << 10;
/// Number of remembered requests besides those of present guests.
const MOST_REMEMBERED: usize = 64;
/// Timeout of either end of a request.
const PATIENCE: Duration = Duration::from_secs(20);
const TAKEN: &str = "taken";

/// A guest with open exports and listeners, on its way to the accepting thread.
struct Arrival {
    stream: UnixStream,
    scope: u64,
    exports: Exports,
    listeners: Listeners,
}

/// Scope numbers by request. A repeated request, for example of a restarted service, gets its former scope, so that
/// its clients can resume their sessions.
#[derive(Default)]
struct Scopes {
    by_request: BTreeMap<Vec<u8>, u64>,
    in_use: BTreeSet<u64>,
    last: u64,
}

impl Scopes {
    fn take(&mut self, request: &[u8]) -> Result<u64, String> {
        if let Some(scope) = self.by_request.get(request).copied() {
            if self.in_use.insert(scope) {
                return Ok(scope);
            }
            return Err("another process of yours has the same exports and listeners: end it first".into());
        }
        let Scopes { by_request, in_use, .. } = self;
        if by_request.len() >= MOST_REMEMBERED {
            by_request.retain(|_, scope| in_use.contains(scope));
        }
        self.last += 1;
        self.by_request.insert(request.to_vec(), self.last);
        self.in_use.insert(self.last);
        Ok(self.last)
    }
}

/// Processes that are becoming guests.
pub(crate) struct Arrivals {
    places: ServerDirs,
    scopes: Mutex<Scopes>,
    waiting: Mutex<Vec<Arrival>>,
    wake: OwnedFd,
}

impl Arrivals {
    pub fn new(places: &ServerDirs) -> io::Result<Arrivals> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arrivals { places: places.clone(), scopes: Mutex::default(), waiting: Mutex::default(), wake })
    }

    /// Reads a request, opens its exports and listeners, and queues them for [`Guests::turn`]. Runs on the
    /// connection's own thread: the peer, a directory, a token file or a host name lookup may be slow.
    pub fn handle_request(self: &Arc<Arrivals>, mut stream: UnixStream) {
        let line = stream
            .set_read_timeout(Some(PATIENCE))
            .and_then(|()| stream.set_write_timeout(Some(PATIENCE)))
            .and_then(|()| read_line(&stream))
            .map_err(|error| error.to_string());
        match line.and_then(|line| self.open(&line)) {
            Ok((scope, exports, listeners)) => {
                self.waiting.lock().push(Arrival { stream, scope, exports, listeners });
                let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
            }
            Err(problem) => refuse(&mut stream, &problem),
        }
    }

    fn open(self: &Arc<Arrivals>, line: &[u8]) -> Result<(u64, Exports, Listeners), String> {
        let serving = parse(line)?;
        let scope = self.scopes.lock().take(line)?;
        let opened = serving.exports().and_then(|exports| {
            Ok((exports, Listeners::open_for(&self.places, &serving, (scope, Arc::clone(self)))?))
        });
        let opened = opened.map(|(exports, listeners)| (scope, exports, listeners));
        opened.map_err(|error| {
            self.release(scope);
            error.to_string()
        })
    }

    fn release(&self, scope: u64) {
        self.scopes.lock().in_use.remove(&scope);
    }

    fn take(&self) -> Vec<Arrival> {
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        std::mem::take(&mut self.waiting.lock())
    }
}

struct Guest {
    stream: UnixStream,
    scope: u64,
    listeners: Listeners,
}

/// The guests of a server, owned by the accepting thread.
pub(crate) struct Guests {
    arrivals: Arc<Arrivals>,
    all: Vec<Guest>,
}

impl Guests {
    pub fn new(arrivals: Arc<Arrivals>) -> Guests {
        Guests { arrivals, all: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Descriptors that become readable when a guest arrives or leaves, or when a client connects to a guest's
    /// listener.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let guests = self.all.iter().flat_map(|guest| guest.listeners.fds().chain([guest.stream.as_fd()]));
        guests.chain([self.arrivals.wake.as_fd()])
    }

    /// Adds arrived guests, removes guests whose process has ended, and accepts clients of the others.
    ///
    /// # Errors
    /// Errors of an unusable listener.
    pub fn turn(&mut self, server: &Arc<Server>) -> io::Result<()> {
        for arrival in self.arrivals.take() {
            self.take(server, arrival);
        }
        let gone: Vec<usize> =
            (0..self.all.len()).rev().filter(|at| has_ended(&self.all[*at].stream)).collect();
        for at in gone {
            let guest = self.all.swap_remove(at);
            tracing::info!(guest = guest.scope, "a serving process ended: its exports and listeners go");
            self.leave(server, guest);
        }
        for guest in &self.all {
            guest.listeners.accept_all(server)?;
        }
        Ok(())
    }

    fn take(&mut self, server: &Arc<Server>, arrival: Arrival) {
        let Arrival { stream, scope, exports, listeners } = arrival;
        server.add_guest(scope, exports, listeners.names());
        let said = json!({ TAKEN: listeners.names() }).to_string() + "\n";
        // If the write fails the guest has ended, and the next turn removes it.
        let _ = (&stream).write_all(said.as_bytes());
        self.all.push(Guest { stream, scope, listeners });
    }

    /// Removes a guest: its exports can no longer be attached to, and connections by its listeners are closed.
    fn leave(&self, server: &Server, guest: Guest) {
        server.remove_guest(guest.scope);
        guest.listeners.cut_off();
        let _ = guest.listeners.close();
        self.arrivals.release(guest.scope);
    }

    /// Removes all guests when the server ends.
    pub fn close(mut self, server: &Server) {
        std::mem::take(&mut self.all).into_iter().for_each(|guest| self.leave(server, guest));
    }
}

/// Whether a guest's process has ended: it sends nothing more, so readability means the end of the stream.
fn has_ended(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

fn refuse(stream: &mut UnixStream, problem: &str) {
    let said = json!({ "refused": problem }).to_string() + "\n";
    let _ = stream.write_all(said.as_bytes());
}

/// Reads one line, without its terminator.
fn read_line(stream: &UnixStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut bytes = io::BufReader::new(stream.take(MOST_BYTES));
    io::BufRead::read_until(&mut bytes, b'\n', &mut line)?;
    match line.pop() {
        Some(b'\n') => Ok(line),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "a request to serve that does not end")),
    }
}

/// Encodes a request. Paths are absolute, because the server has another working directory.
fn request(serving: &Serving) -> Result<String, String> {
    let text = |path: &OsStr| {
        let path = path.to_str().map(str::to_owned);
        path.ok_or_else(|| "a path that is no UTF-8 can be served by a server of its own only".to_owned())
    };
    let exports: Vec<String> =
        serving.exports.iter().map(|export| text(&absolute(export)?)).collect::<Result<_, String>>()?;
    let token = serving.token.as_deref().map(|token| {
        std::path::absolute(token)
            .map_err(|error| error.to_string())
            .and_then(|token| text(token.as_os_str()))
    });
    let listens: Vec<String> = serving.listens.iter().map(Listen::to_string).collect();
    Ok(json!({
        "exports": exports,
        "listens": listens,
        "token": token.transpose()?,
        "plaintext": serving.plaintext,
        "trust_client_ids": serving.trust_client_ids,
        "squash": serving.squash.map(|squash| match squash {
            Squash::None => "none",
            Squash::Root => "root",
            Squash::All => "all",
        }),
    })
    .to_string())
}

/// Makes DIR absolute in `[NAME=]DIR`.
fn absolute(export: &OsStr) -> Result<std::ffi::OsString, String> {
    let (name, dir) = Exports::split(export);
    let dir = std::path::absolute(Path::new(dir)).map_err(|error| error.to_string())?;
    let mut whole = name.map(|name| [name, b"="].concat()).unwrap_or_default();
    whole.extend_from_slice(dir.as_os_str().as_bytes());
    Ok(OsStr::from_bytes(&whole).to_owned())
}

fn parse(line: &[u8]) -> Result<Serving, String> {
    let malformed = || "another version of nigh serves already: end it, or update both".to_owned();
    let asked: Value = serde_json::from_slice(line).map_err(|_| malformed())?;
    let texts = |key: &str| -> Result<Vec<String>, String> {
        let all = asked[key].as_array().ok_or_else(malformed)?;
        all.iter().map(|text| text.as_str().map(str::to_owned).ok_or_else(malformed)).collect()
    };
    let listens = texts("listens")?;
    let serving = Serving {
        exports: texts("exports")?.into_iter().map(Into::into).collect(),
        listens: listens
            .iter()
            .map(|text| Listen::parse(text).ok_or_else(malformed))
            .collect::<Result<_, _>>()?,
        token: asked["token"].as_str().map(Into::into),
        plaintext: asked["plaintext"].as_bool().ok_or_else(malformed)?,
        trust_client_ids: asked["trust_client_ids"].as_bool().ok_or_else(malformed)?,
        passed: Vec::new(),
        squash: match asked["squash"].as_str() {
            None => None,
            Some("none") => Some(Squash::None),
            Some("root") => Some(Squash::Root),
            Some("all") => Some(Squash::All),
            Some(_) => return Err(malformed()),
        },
    };
    serving.check()?;
    Ok(serving)
}

/// Asks the server at the other end to take over exports and listeners. Returns its listen addresses for them. They
/// remain until the stream is closed.
///
/// # Errors
/// The reason of a refusal, in one line. `UnexpectedEof` if the server ended before it replied.
pub(crate) fn join(stream: &mut UnixStream, head: &[u8], serving: &Serving) -> io::Result<Vec<String>> {
    let refused = |problem: String| io::Error::new(io::ErrorKind::InvalidInput, problem);
    let asked = request(serving).map_err(refused)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(head)?;
    stream.write_all(format!("{asked}\n").as_bytes())?;
    let old = "a server of yours runs already, and is of a version that takes no exports: end it";
    let answer = read_line(stream).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => error,
        _ => refused(old.to_owned()),
    })?;
    let answer: Value = serde_json::from_slice(&answer).map_err(|_| refused(old.to_owned()))?;
    stream.set_read_timeout(None)?;
    match (answer["refused"].as_str(), answer[TAKEN].as_array()) {
        (Some(problem), _) => Err(refused(problem.to_owned())),
        (None, Some(names)) => Ok(names.iter().filter_map(Value::as_str).map(str::to_owned).collect()),
        _ => Err(refused(old.to_owned())),
    }
}
