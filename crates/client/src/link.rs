//! The link of a mount: saying hello on it, carrying bytes, and making another when it is lost.

use crate::clock::boot_time;
use crate::driver::{Driver, Outgoing};
use crate::mount::StartError;
use nigh_link::Link;
use nigh_remote::{Carried, Event, Output, Session};
use nigh_types::Time;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const READ_BYTES: usize = 256 << 10;
/// Pauses between attempts to reach a remote that was lost.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Frames up to this length are written together.
const SHORT_BYTES: usize = 16 << 10;
/// So many bytes of them.
const TOGETHER_BYTES: usize = 64 << 10;

/// Makes a new link when the old one was lost. It must not wait for people.
pub type Reconnect = Box<dyn Fn() -> io::Result<Link> + Send>;

/// Begins a session: at that moment, and whether an earlier one of this mount was lost. Which kind of remote it is of, nobody here
/// asks.
pub type Begin = Box<dyn Fn(Time, bool) -> Box<dyn Carried> + Send>;

/// A session that stands, what was agreed, and events that came right behind the welcome.
pub(crate) type Greeted = (Box<dyn Carried>, Session, Vec<Event>);

/// Says hello and waits for the welcome.
pub(crate) fn greet(link: &Link, mut session: Box<dyn Carried>) -> Result<Greeted, StartError> {
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
            // The session knows when nothing is to be hoped for; then the link is shut down.
            link.set_read_timeout(None).map_err(lost)?;
            return Ok((session, welcome, early));
        }
        // The kernel takes a timeout of nothing for none.
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

/// The thread that writes: until the mount ends.
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
            // The reader sees it, and mends it.
            link.shutdown();
        } else if last {
            link.shutdown();
        }
    }
}

/// Short frames go together, long ones as they are.
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

/// The thread that reads: until the mount ends, or the link is lost and is not to be made again.
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
        // Whoever still writes to it must not wait for a peer that is gone.
        link.shutdown();
        let Some(reconnect) = &reconnect else {
            return driver.with(|core, _| core.remote.handle_close(&why));
        };
        driver.with(|core, now| {
            // A server that lets go at once is not asked all the time.
            if core.remote.is_linked() && begun.elapsed() > LONGEST_PAUSE {
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

/// Takes in all that comes; why nothing comes any more.
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

/// Attempts to reach a server that was lost.
#[derive(Default)]
struct Attempts {
    /// Before the next one: at first none.
    pause: Duration,
    said: String,
}

impl Attempts {
    /// The same thing is said once; `nigh status` says it until there is a connection.
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

/// Makes links until the session goes on over one, or a new one stands in the place of a lost one; `None`:
/// the mount ends.
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
                    core.adopt(remote, fresh.clone());
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
