//! Putting a mount together: session first, then the kernel, then threads.

use crate::adapter;
use crate::clock::boot_time;
use crate::control::Control;
use crate::driver::Driver;
use crate::interrupts::Interrupts;
use crate::status::{About, Source};
use nigh_cache::{Cache, Config};
use nigh_fuse::mount::{MountError, MountOptions};
use nigh_fuse::{DevFuse, Eager, Negotiated, Transport, Wanted, handshake};
use nigh_native::{ClientConfig, ClientSession};
use nigh_remote::{Event, Output, Remote, Session};
use nigh_types::Term;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const READ_BYTES: usize = 256 << 10;
/// How long the remote may take to greet.
const GREETING: Duration = Duration::from_secs(30);
/// Pauses between attempts to reach a remote that was lost.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A stream to a remote, both ways.
pub struct Link {
    stream: UnixStream,
}

impl From<UnixStream> for Link {
    fn from(stream: UnixStream) -> Link {
        Link { stream }
    }
}

/// The link of a session, by the session's number.
type Numbered = (u64, UnixStream);

/// Makes a new link when the old one was lost.
pub type Reconnect = Box<dyn Fn() -> io::Result<Link> + Send>;

/// What to mount and how.
pub struct MountConfig {
    pub options: MountOptions,
    pub cache: Config,
    pub wanted: Wanted,
    /// The most that the transport may notify; tests mask features with it.
    pub level: nigh_fuse::Level,
    /// What the server is asked to export: a path of its machine.
    pub attach: Vec<u8>,
    /// How long facts may be believed at the most.
    pub term: Term,
    /// Threads that take in requests of the kernel.
    pub threads: u32,
    pub reconnect: Option<Reconnect>,
    /// The directory of this user's sockets.
    pub runtime: std::path::PathBuf,
}

impl MountConfig {
    fn client(&self) -> ClientConfig {
        ClientConfig {
            client: self.cache.client,
            incarnation: self.cache.incarnation,
            attach: self.attach.clone(),
            term: self.term,
        }
    }
}

/// Why a mount could not be made: one line, with how to mend it.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error("the server refused: {0}")]
    Refused(String),
    #[error("the server went away before the mount stood ({0}): try again")]
    Lost(String),
    #[error("the kernel did not agree on FUSE: {0}")]
    Kernel(io::Error),
}

/// A mount that stands.
pub struct Mount {
    driver: Arc<Driver>,
    interrupts: Arc<Interrupts>,
    stopping: Arc<AtomicBool>,
    readers: Vec<JoinHandle<()>>,
    others: Vec<JoinHandle<()>>,
    control: Option<Control>,
    link: Arc<parking_lot::Mutex<Numbered>>,
    source: Arc<Source>,
}

impl Mount {
    /// Attaches to the remote, mounts, and serves. On an error nothing is left mounted.
    pub fn start(mut config: MountConfig, link: Link) -> Result<Mount, StartError> {
        let greeted = greet(&link.stream, config.client())?;
        let mounted = nigh_fuse::mount::mount(&config.options)?;
        let mountpoint = mounted.mountpoint.clone();
        let undo = |error: io::Error| {
            let _ = nigh_fuse::mount::unmount(&mountpoint, true);
            StartError::Kernel(error)
        };
        let device = DevFuse::new(mounted.device, nigh_fuse::Level::NoEpoch);
        let agreed = handshake(&device, &config.wanted).map_err(undo)?;
        device.probe_level(config.level);
        config.options.mountpoint.clone_from(&mountpoint);
        let mount = Mount::assemble(config, link, greeted, Box::new(device), agreed).map_err(undo)?;
        let _ = mount.driver.mountpoint.set(mountpoint.clone());
        Ok(mount)
    }

    /// Attaches to the remote and serves a transport that needs no mounting, on which `agreed` was agreed.
    pub fn start_on(
        config: MountConfig,
        link: Link,
        transport: Box<dyn Transport>,
        agreed: Negotiated,
    ) -> Result<Mount, StartError> {
        let greeted = greet(&link.stream, config.client())?;
        Mount::assemble(config, link, greeted, transport, agreed).map_err(StartError::Kernel)
    }

    fn assemble(
        config: MountConfig,
        link: Link,
        (remote, session, early): Greeted,
        transport: Box<dyn Transport>,
        agreed: Negotiated,
    ) -> io::Result<Mount> {
        let level = transport.level();
        let cache = Cache::new(Config { level: cache_level(level), ..config.cache });
        let about = About {
            mountpoint: std::path::absolute(&config.options.mountpoint)?,
            source: config.options.source.clone(),
            level,
            agreed,
            budget_bytes: config.cache.budget_bytes,
        };
        let driver = Arc::new(Driver::new(cache, remote, transport));
        driver.with(|core, now| {
            core.cache.handle_event(now, Event::Attached(session.clone()));
            for event in early {
                core.cache.handle_event(now, event);
            }
        });
        let client = config.client();
        let mut mount = Mount {
            source: Arc::new(Source::new(Arc::clone(&driver), about, session)),
            driver,
            interrupts: Arc::default(),
            stopping: Arc::default(),
            readers: Vec::new(),
            others: Vec::new(),
            control: None,
            link: Arc::new(parking_lot::Mutex::new((0, link.stream.try_clone()?))),
        };
        mount.start_threads(link.stream, client, config.reconnect, agreed, config.threads);
        mount.control = Control::start(&config.runtime, Arc::clone(&mount.source))
            .inspect_err(|error| tracing::warn!(%error, "nigh status cannot reach this mount"))
            .ok();
        Ok(mount)
    }

    fn start_threads(
        &mut self,
        stream: UnixStream,
        client: ClientConfig,
        reconnect: Option<Reconnect>,
        agreed: Negotiated,
        threads: u32,
    ) {
        let driver = Arc::clone(&self.driver);
        self.others.push(thread::spawn(move || driver.run_timer()));
        let driver = Arc::clone(&self.driver);
        self.others.push(thread::spawn(move || driver.notifier.run(&driver)));
        let (driver, interrupts) = (Arc::clone(&self.driver), Arc::clone(&self.interrupts));
        self.others.push(thread::spawn(move || interrupts.run(&driver)));
        let (driver, link) = (Arc::clone(&self.driver), Arc::clone(&self.link));
        self.others.push(thread::spawn(move || write_link(&driver, &link)));
        let (driver, link, stopping) =
            (Arc::clone(&self.driver), Arc::clone(&self.link), Arc::clone(&self.stopping));
        self.others
            .push(thread::spawn(move || read_link(&driver, stream, &link, &stopping, &client, reconnect)));
        for _ in 0..threads.max(1) {
            let (driver, interrupts) = (Arc::clone(&self.driver), Arc::clone(&self.interrupts));
            self.readers.push(thread::spawn(move || serve_kernel(&driver, &interrupts, &agreed)));
        }
    }

    /// What `nigh status --json` prints of this mount.
    #[must_use]
    pub fn status(&self) -> serde_json::Value {
        self.source.status()
    }

    /// The mount's status, for as long as it stands.
    #[must_use]
    pub fn source(&self) -> Arc<Source> {
        Arc::clone(&self.source)
    }

    /// Serves until the kernel has unmounted, then lets go of everything.
    pub fn wait(mut self) {
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        self.stopping.store(true, Ordering::Relaxed);
        drop(self.control.take());
        self.driver.with(|core, _| core.remote.handle_close("unmounted"));
        self.driver.stop();
        self.driver.notifier.stop();
        self.interrupts.stop();
        thread::sleep(Duration::from_millis(1));
        let _ = self.link.lock().1.shutdown(std::net::Shutdown::Both);
        for other in self.others.drain(..) {
            let _ = other.join();
        }
    }
}

fn cache_level(level: nigh_fuse::Level) -> nigh_cache::Level {
    match level {
        nigh_fuse::Level::All => nigh_cache::Level::All,
        nigh_fuse::Level::NoEpoch => nigh_cache::Level::NoEpoch,
        nigh_fuse::Level::None => nigh_cache::Level::None,
    }
}

/// A session that stands, what was agreed, and events that came right behind the welcome.
type Greeted = (ClientSession, Session, Vec<Event>);

/// Says hello and waits for the welcome.
fn greet(stream: &UnixStream, config: ClientConfig) -> Result<Greeted, StartError> {
    let lost = |error: io::Error| StartError::Lost(error.to_string());
    let mut session = ClientSession::new(boot_time(), config);
    let mut welcome = None;
    let mut early = Vec::new();
    let mut buffer = vec![0; READ_BYTES];
    stream.set_read_timeout(Some(GREETING)).map_err(lost)?;
    loop {
        loop {
            match session.poll_output() {
                Output::Transmit(bytes) => (&*stream).write_all(&bytes).map_err(lost)?,
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
            stream.set_read_timeout(None).map_err(lost)?;
            return Ok((session, welcome, early));
        }
        let length = (&*stream).read(&mut buffer).map_err(lost)?;
        if length == 0 {
            session.handle_disconnect(boot_time(), "it closed the connection");
        } else {
            session.handle_input(boot_time(), &buffer[..length]);
        }
    }
}

fn serve_kernel(driver: &Driver, interrupts: &Interrupts, agreed: &Negotiated) {
    let mut buffer = vec![0; agreed.buffer_len()];
    let mut eager = Eager::default();
    loop {
        eager.look(&*driver.transport);
        match driver.transport.receive(&mut buffer) {
            Ok(Some(length)) => {
                eager.received();
                adapter::receive(driver, interrupts, agreed, &buffer[..length]);
            }
            Ok(None) => return,
            Err(error) => {
                tracing::error!(target: "nigh::kernel", %error, "cannot receive requests");
                return;
            }
        }
    }
}

fn write_link(driver: &Driver, link: &parking_lot::Mutex<Numbered>) {
    while let Some((session, bytes)) = driver.next_outgoing() {
        let stream = {
            let link = link.lock();
            if link.0 != session {
                continue;
            }
            link.1.try_clone()
        };
        // A broken link shows itself to the reader, which mends it.
        if let Err(error) = stream.and_then(|stream| (&stream).write_all(&bytes)) {
            tracing::debug!(target: "nigh::link", %error, "cannot write");
        }
    }
}

fn read_link(
    driver: &Driver,
    mut stream: UnixStream,
    link: &parking_lot::Mutex<Numbered>,
    stopping: &AtomicBool,
    client: &ClientConfig,
    reconnect: Option<Reconnect>,
) {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let why = match (&stream).read(&mut buffer) {
            Ok(0) => "the server closed the connection".to_owned(),
            Ok(length) => {
                driver.with(|core, now| core.remote.handle_input(now, &buffer[..length]));
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => error.to_string(),
        };
        driver.with(|core, now| core.remote.handle_disconnect(now, &why));
        let Some(fresh) = reconnect.as_ref().and_then(|r| reattach(driver, stopping, link, client, r, &why))
        else {
            return;
        };
        stream = fresh;
    }
}

/// Makes a new session until one stands or the mount ends.
fn reattach(
    driver: &Driver,
    stopping: &AtomicBool,
    link: &parking_lot::Mutex<Numbered>,
    client: &ClientConfig,
    reconnect: &Reconnect,
    why: &str,
) -> Option<UnixStream> {
    let mut pause = FIRST_PAUSE;
    while !stopping.load(Ordering::Relaxed) {
        tracing::warn!(target: "nigh::link", why, "lost the server; trying again");
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
        let Ok(fresh) = reconnect() else { continue };
        let Ok(writing) = fresh.stream.try_clone() else { continue };
        match greet(&fresh.stream, client.clone()) {
            Ok((remote, session, early)) => {
                driver.with(|core, now| {
                    *link.lock() = (core.adopt(remote), writing);
                    core.cache.handle_event(now, Event::Attached(session));
                    for event in early {
                        core.cache.handle_event(now, event);
                    }
                });
                return Some(fresh.stream);
            }
            Err(error) => tracing::warn!(target: "nigh::link", %error),
        }
    }
    None
}
