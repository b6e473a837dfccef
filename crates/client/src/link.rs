//! The link of a mount: saying hello on it, carrying bytes, and making another when it is lost.

use crate::clock::boot_time;
use crate::driver::Driver;
use crate::mount::StartError;
use nigh_link::Link;
use nigh_native::{ClientConfig, ClientSession};
use nigh_remote::{Event, Output, Remote, Session};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const READ_BYTES: usize = 256 << 10;
/// How long the remote may take to greet.
const GREETING: Duration = Duration::from_secs(30);
/// Pauses between attempts to reach a remote that was lost.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How often a link that may fall silent is asked whether its session still stands.
const GLANCE: Duration = Duration::from_secs(2);

/// The link of a session, by the session's number.
pub(crate) type Numbered = (u64, Link);

/// Makes a new link when the old one was lost. It must not wait for people.
pub type Reconnect = Box<dyn Fn() -> io::Result<Link> + Send>;

/// A session that stands, what was agreed, and events that came right behind the welcome.
pub(crate) type Greeted = (ClientSession, Session, Vec<Event>);

/// Says hello and waits for the welcome.
pub(crate) fn greet(link: &Link, config: ClientConfig) -> Result<Greeted, StartError> {
    let lost = |error: io::Error| StartError::Lost(error.to_string());
    let mut session = ClientSession::new(boot_time(), config);
    let mut welcome = None;
    let mut early = Vec::new();
    let mut buffer = vec![0; READ_BYTES];
    link.set_read_timeout(Some(GREETING)).map_err(lost)?;
    loop {
        loop {
            match session.poll_output() {
                Output::Transmit(bytes) => link.write_all(&bytes).map_err(lost)?,
                Output::Event(Event::Attached(session)) => welcome = Some(session),
                Output::Event(Event::Lost { why }) => {
                    return Err(match session.refused() {
                        Some(refused) => StartError::Refused(refused.message.clone()),
                        None => StartError::Lost(why),
                    });
                }
                Output::Event(event) => early.push(event),
                Output::Timeout(..) => break,
            }
        }
        if let Some(welcome) = welcome {
            // On one machine the kernel says when the other end is gone.
            let glance = (!link.kind().is_local()).then_some(GLANCE);
            link.set_read_timeout(glance).map_err(lost)?;
            return Ok((session, welcome, early));
        }
        let length = link.read(&mut buffer).map_err(lost)?;
        if length == 0 {
            session.handle_disconnect(boot_time(), "it closed the connection");
        } else {
            session.handle_input(boot_time(), &buffer[..length]);
        }
    }
}

/// The thread that writes: until the mount ends.
pub(crate) fn write_link(driver: &Driver, shared: &parking_lot::Mutex<Numbered>) {
    while let Some((session, bytes)) = driver.next_outgoing() {
        let link = {
            let shared = shared.lock();
            if shared.0 != session {
                continue;
            }
            shared.1.clone()
        };
        if let Err(error) = link.write_all(&bytes) {
            tracing::debug!(target: "nigh::link", %error, "cannot write");
            // The reader sees it, and mends it.
            link.shutdown();
        }
    }
}

/// The thread that reads: until the mount ends, or the link is lost and is not to be made again.
pub(crate) fn read_link(
    driver: &Driver,
    mut link: Link,
    shared: &parking_lot::Mutex<Numbered>,
    stopping: &AtomicBool,
    client: &ClientConfig,
    reconnect: Option<Reconnect>,
) {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let why = match link.read(&mut buffer) {
            Ok(0) => "the server closed the connection".to_owned(),
            Ok(length) => {
                driver.with(|core, now| core.remote.handle_input(now, &buffer[..length]));
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if driver.with(|core, _| core.cache.is_attached()) {
                    continue;
                }
                "the server was silent for too long".to_owned()
            }
            Err(error) => error.to_string(),
        };
        driver.with(|core, now| core.remote.handle_disconnect(now, &why));
        // Whoever still writes to it must not wait for a peer that is gone.
        link.shutdown();
        let Some(fresh) =
            reconnect.as_ref().and_then(|r| reattach(driver, stopping, shared, client, r, &why))
        else {
            return;
        };
        link = fresh;
    }
}

/// Makes a new session until one stands or the mount ends.
fn reattach(
    driver: &Driver,
    stopping: &AtomicBool,
    shared: &parking_lot::Mutex<Numbered>,
    client: &ClientConfig,
    reconnect: &Reconnect,
    why: &str,
) -> Option<Link> {
    let mut pause = FIRST_PAUSE;
    if !stopping.load(Ordering::Relaxed) {
        tracing::warn!(target: "nigh::link", why, "lost the server; trying again");
    }
    let mut said = String::new();
    // The same thing is said once.
    let mut say = |error: String| {
        if error != said {
            tracing::warn!(target: "nigh::link", error, "no connection yet");
            said = error;
        }
    };
    while !stopping.load(Ordering::Relaxed) {
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
        let fresh = match reconnect() {
            Ok(fresh) => fresh,
            Err(error) => {
                say(error.to_string());
                continue;
            }
        };
        if let Some(note) = fresh.note() {
            tracing::warn!(target: "nigh::link", note);
        }
        match greet(&fresh, client.clone()) {
            Ok((remote, session, early)) => {
                driver.with(|core, now| {
                    *shared.lock() = (core.adopt(remote), fresh.clone());
                    core.cache.handle_event(now, Event::Attached(session));
                    for event in early {
                        core.cache.handle_event(now, event);
                    }
                });
                return Some(fresh);
            }
            Err(error) => say(error.to_string()),
        }
    }
    None
}
