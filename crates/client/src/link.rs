//! The link of a mount: handshake, reads and writes, and reconnection.

use crate::clock::boot_time;
use crate::driver::{Driver, Outgoing};
use crate::mount::StartError;
use nigh_link::Link;
use nigh_remote::{Event, Output, ResumableRemote, SessionParams};
use nigh_types::Time;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const READ_BYTES: usize = 256 << 10;
/// Pauses between connection attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Frames up to this length are written together.
const SHORT_BYTES: usize = 16 << 10;
/// Most bytes written together.
const TOGETHER_BYTES: usize = 64 << 10;

/// Makes a new link after the old one was lost. It must not wait for people.
pub type Reconnect = Box<dyn Fn() -> io::Result<Link> + Send>;

/// Begins a session at the given time; the flag says whether an earlier session of this mount was lost. This module
/// does not depend on the kind of remote.
pub type Begin = Box<dyn Fn(Time, bool) -> Box<dyn ResumableRemote> + Send>;

/// An established session, its parameters, and events that came with the welcome.
pub(crate) type EstablishedSession = (Box<dyn ResumableRemote>, SessionParams, Vec<Event>);

/// Sends the hello and waits for the welcome.
pub(crate) fn greet(
    link: &Link,
    mut session: Box<dyn ResumableRemote>,
) -> Result<EstablishedSession, StartError> {
    let lost = |error: io::Error| StartError::Lost(error.to_string());
    let mut welcome = None;
    let mut early = Vec::new();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let until = loop {
            match session.poll_output() {
                Output::Transmit(bytes) => link.write_all(&bytes).map_err(lost)?,
                Output::Event(Event::Attached(session)) => welcome = Some(session),
                Output::Event(Event::Lost { why }) => {
                    return Err(match session.refusal() {
                        Some(refusal) => StartError::Refused(refusal.to_owned()),
                        None => StartError::Lost(why),
                    });
                }
                Output::Event(event) => early.push(event),
                Output::Timeout(until, _) => break until,
            }
        };
        if let Some(welcome) = welcome {
            // The session detects an unresponsive peer itself; then the link is shut down.
            link.set_read_timeout(None).map_err(lost)?;
            return Ok((session, welcome, early));
        }
        // A zero timeout would mean none.
        let left = Duration::from_nanos(until.since(boot_time()).0).max(Duration::from_millis(1));
        link.set_read_timeout(Some(left)).map_err(lost)?;
        match link.read(&mut buffer) {
            Ok(0) => session.handle_disconnect(boot_time(), "it closed the connection"),
            Ok(length) => session.handle_input(boot_time(), &buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => session.handle_timeout(boot_time()),
            Err(error) => return Err(lost(error)),
        }
    }
}

/// The writer thread: runs until the mount ends.
pub(crate) fn write_link(driver: &Driver) {
    while let Some(Outgoing { link, mut frames, packer, last }) = driver.next_outgoing() {
        if let Some(pack) = packer {
            for frame in &mut frames {
                if let Some(packed) = pack(frame) {
                    *frame = packed.into();
                }
            }
        }
        if let Err(error) = write_frames(&link, &frames) {
            tracing::debug!(target: "nigh::link", %error, "cannot write");
            // The reader notices, and reconnects.
            link.shutdown();
        } else if last {
            link.shutdown();
        }
    }
}

/// Writes short frames together, and long ones alone.
fn write_frames(link: &Link, frames: &[Arc<Vec<u8>>]) -> io::Result<()> {
    let mut together = Vec::new();
    for frame in frames {
        let long = frame.len() > SHORT_BYTES;
        if long || together.len() + frame.len() > TOGETHER_BYTES {
            link.write_all(&together)?;
            together.clear();
        }
        if long {
            link.write_all(frame)?;
        } else {
            together.extend_from_slice(frame);
        }
    }
    link.write_all(&together)
}

/// The reader thread: runs until the mount ends, or the link is lost and there is no reconnection.
pub(crate) fn read_link(
    driver: &Driver,
    mut link: Link,
    stopping: &AtomicBool,
    begin: &Begin,
    reconnect: Option<Reconnect>,
) {
    let mut attempts = Attempts::default();
    loop {
        let begun = Instant::now();
        let why = read_to_the_end(driver, &link);
        // A writer must not block on a peer that is gone.
        link.shutdown();
        let Some(reconnect) = &reconnect else {
            return driver.with(|core, _| core.remote.handle_close(&why));
        };
        driver.with(|core, now| {
            // A server that closes connections at once is not contacted without pauses.
            if core.remote.is_connected() && begun.elapsed() > LONGEST_PAUSE {
                attempts = Attempts::default();
            }
            core.remote.handle_disconnect(now, &why);
        });
        if !stopping.load(Ordering::Relaxed) {
            attempts.say(driver, &why);
        }
        match connect_again(driver, stopping, begin, reconnect, &mut attempts) {
            Some(fresh) => link = fresh,
            None => return,
        }
    }
}

/// Handles all input until the end. Returns why it ended.
fn read_to_the_end(driver: &Driver, link: &Link) -> String {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match link.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => driver.with(|core, now| core.remote.handle_input(now, &buffer[..length])),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return error.to_string(),
        }
    }
    let known = driver.with(|core, _| core.remote.wants_connection().map(str::to_owned));
    known.unwrap_or_else(|| "the server closed the connection".to_owned())
}

/// Connection attempts after a lost connection.
#[derive(Default)]
struct Attempts {
    /// Pause before the next attempt; zero at first.
    pause: Duration,
    said: String,
}

impl Attempts {
    /// Logs each problem once; `nigh status` shows it until there is a connection.
    fn say(&mut self, driver: &Driver, problem: &str) {
        driver.with(|core, _| problem.clone_into(&mut core.problem));
        if problem != self.said {
            let mount = driver.mountpoint.get().map(|at| at.display().to_string());
            tracing::warn!(
                target: "nigh::link",
                problem,
                mount,
                "no connection to the server; trying again (what waits for it ends by `nigh umount --lazy`, not by umount)"
            );
            problem.clone_into(&mut self.said);
        }
    }

    fn wait(&mut self) {
        thread::sleep(self.pause);
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
    }
}

/// Makes links until one carries the session, or a new session replaces a lost one; `None`: the mount ends.
fn connect_again(
    driver: &Driver,
    stopping: &AtomicBool,
    begin: &Begin,
    reconnect: &Reconnect,
    attempts: &mut Attempts,
) -> Option<Link> {
    while !stopping.load(Ordering::Relaxed) {
        attempts.wait();
        let fresh = match reconnect() {
            Ok(fresh) => fresh,
            Err(error) => {
                attempts.say(driver, &error.to_string());
                continue;
            }
        };
        if let Some(note) = fresh.note() {
            tracing::warn!(target: "nigh::link", note);
        }
        let lost = driver.with(|core, now| {
            if !core.remote.is_lost() {
                core.connect(now, fresh.clone());
            }
            core.remote.is_lost()
        });
        if !lost {
            return Some(fresh);
        }
        match greet(&fresh, begin(boot_time(), true)) {
            Ok((remote, session, early)) => {
                driver.with(|core, now| {
                    core.replace_session(remote, fresh.clone());
                    core.cache.handle_event(now, Event::Attached(session));
                    for event in early {
                        core.cache.handle_event(now, event);
                    }
                });
                return Some(fresh);
            }
            Err(error) => attempts.say(driver, &error.to_string()),
        }
    }
    None
}
