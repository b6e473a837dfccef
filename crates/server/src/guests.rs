//! Exports and listeners that another `nigh serve` of this user brings: two servers cannot serve the same directories, so the
//! one that runs takes them, for as long as that process lives.
//!
//! Each guest has exports of its own: a client that comes by its listeners reaches these and no others, since what a listener
//! asks of its clients (token, folder of its socket) was chosen for these.

use crate::exports::Exports;
use crate::listen::{Listen, Serving};
use crate::listeners::Listeners;
use crate::places::Places;
use crate::server::Server;
use nigh_link::Squash;
use rustix::event::eventfd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

/// The longest request, in bytes.
const MOST_BYTES: u64 = 256 << 10;
/// How long either end of a request waits for the other.
const PATIENCE: Duration = Duration::from_secs(20);
const TAKEN: &str = "taken";

/// Connections of processes that want to be guests, on their way to the thread that accepts.
pub(crate) struct Arrivals {
    waiting: Mutex<Vec<(UnixStream, Serving)>>,
    wake: OwnedFd,
}

impl Arrivals {
    pub fn new() -> io::Result<Arrivals> {
        Ok(Arrivals {
            waiting: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Reads a request and leaves it for [`Guests::turn`]. For the connection's own thread: the peer may be slow.
    pub fn hear(&self, mut stream: UnixStream) {
        let serving = stream
            .set_read_timeout(Some(PATIENCE))
            .and_then(|()| stream.set_write_timeout(Some(PATIENCE)))
            .and_then(|()| read_line(&stream))
            .map_err(|error| error.to_string())
            .and_then(|line| parse(&line));
        match serving {
            Ok(serving) => {
                self.waiting.lock().push((stream, serving));
                let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
            }
            Err(problem) => refuse(&mut stream, &problem),
        }
    }

    fn take(&self) -> Vec<(UnixStream, Serving)> {
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        std::mem::take(&mut self.waiting.lock())
    }
}

struct Guest {
    stream: UnixStream,
    scope: u64,
    listeners: Listeners,
}

/// The guests of a server. Owned by the thread that accepts.
pub(crate) struct Guests {
    arrivals: Arc<Arrivals>,
    all: Vec<Guest>,
    last_scope: u64,
}

impl Guests {
    pub fn new(arrivals: Arc<Arrivals>) -> Guests {
        Guests { arrivals, all: Vec::new(), last_scope: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// What becomes readable when a guest comes or goes, or a client connects to one's listeners.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let guests = self.all.iter().flat_map(|guest| guest.listeners.fds().chain([guest.stream.as_fd()]));
        guests.chain([self.arrivals.wake.as_fd()])
    }

    /// Takes guests that came, lets go those whose process ended, and lets in clients of the others.
    ///
    /// # Errors
    /// Those of a listener that cannot be used any more.
    pub fn turn(&mut self, places: &Places, server: &Arc<Server>) -> io::Result<()> {
        for (stream, serving) in self.arrivals.take() {
            self.take(places, server, stream, &serving);
        }
        let gone: Vec<usize> =
            (0..self.all.len()).rev().filter(|at| has_ended(&self.all[*at].stream)).collect();
        for at in gone {
            let guest = self.all.swap_remove(at);
            tracing::info!(guest = guest.scope, "a serving process ended: its exports and listeners go");
            leave(server, guest);
        }
        for guest in &self.all {
            guest.listeners.accept_all(server)?;
        }
        Ok(())
    }

    fn take(&mut self, places: &Places, server: &Arc<Server>, mut stream: UnixStream, serving: &Serving) {
        self.last_scope += 1;
        let scope = self.last_scope;
        let opened = serving.exports().and_then(|exports| {
            let listeners = Listeners::open_for(places, serving, (scope, Arc::clone(&self.arrivals)))?;
            Ok((exports, listeners))
        });
        match opened {
            Ok((exports, listeners)) => {
                server.add_guest(scope, exports, listeners.names());
                let said = json!({ TAKEN: listeners.names() }).to_string() + "\n";
                let guest = Guest { stream, scope, listeners };
                // A guest that does not hear it has ended, which is seen next.
                let _ = (&guest.stream).write_all(said.as_bytes());
                self.all.push(guest);
            }
            Err(error) => refuse(&mut stream, &error.to_string()),
        }
    }

    /// Lets all go: the server ends.
    pub fn close(self, server: &Server) {
        self.all.into_iter().for_each(|guest| leave(server, guest));
    }
}

/// New clients find nothing any more, and those that came by the guest's listeners are cut off.
fn leave(server: &Server, guest: Guest) {
    server.remove_guest(guest.scope);
    guest.listeners.cut_off();
    let _ = guest.listeners.close();
}

/// A guest says nothing more: whatever can be read is its end.
fn has_ended(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

fn refuse(stream: &mut UnixStream, problem: &str) {
    let said = json!({ "refused": problem }).to_string() + "\n";
    let _ = stream.write_all(said.as_bytes());
}

/// One line, without its end.
fn read_line(stream: &UnixStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut bytes = io::BufReader::new(stream.take(MOST_BYTES));
    io::BufRead::read_until(&mut bytes, b'\n', &mut line)?;
    match line.pop() {
        Some(b'\n') => Ok(line),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "a request to serve that does not end")),
    }
}

/// What a process wants to have served. Paths are absolute, since the server has another working directory.
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

/// `[NAME=]DIR` with an absolute DIR.
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

/// Asks the server at the other end to take exports and listeners. Answers where it listens for them; they stay as long as
/// the stream is open.
///
/// # Errors
/// Why it does not, in one line.
pub(crate) fn join(stream: &mut UnixStream, head: &[u8], serving: &Serving) -> io::Result<Vec<String>> {
    let refused = |problem: String| io::Error::new(io::ErrorKind::InvalidInput, problem);
    let asked = request(serving).map_err(refused)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(head)?;
    stream.write_all(format!("{asked}\n").as_bytes())?;
    let old = "a server of yours runs already, and is of a version that takes no exports: end it";
    let answer = read_line(stream).map_err(|_| refused(old.to_owned()))?;
    let answer: Value = serde_json::from_slice(&answer).map_err(|_| refused(old.to_owned()))?;
    stream.set_read_timeout(None)?;
    match (answer["refused"].as_str(), answer[TAKEN].as_array()) {
        (Some(problem), _) => Err(refused(problem.to_owned())),
        (None, Some(names)) => Ok(names.iter().filter_map(Value::as_str).map(str::to_owned).collect()),
        _ => Err(refused(old.to_owned())),
    }
}
