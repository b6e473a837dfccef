//! Start of a mount: first the session, then the kernel, then the threads.

#[cfg(test)]
mod tests;

use crate::adapter;
use crate::clock::boot_time;
use crate::control::Control;
use crate::credentials::Callers;
use crate::driver::Driver;
use crate::events::{EventsConfig, Program};
use crate::host::{Host, LocalHost};
use crate::idmap::IdMapChoice;
use crate::interrupts::Interrupts;
use crate::link::{Begin, EstablishedSession, Reconnect, greet, read_link, write_link};
use crate::pressure::{Pressure, give_back_freed};
use crate::root_probe::RootProbe;
use crate::status::{About, Source, device_at};
use crate::stopper::Stopper;
use crate::watchdog::Watchdog;
use nigh_cache::{Cache, Config};
use nigh_fuse::abi::flags::init;
use nigh_fuse::mount::{MountError, MountOptions};
use nigh_fuse::{DevFuse, Eager, Negotiated, RequestedFeatures, Transport, handshake};
use nigh_link::Link;
use nigh_remote::Event;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// First FUSE minor version with `FUSE_NOTIFY_PRUNE`.
const PRUNES_SINCE: u32 = 45;
/// First FUSE minor version of which all kernels clear the rest of a stored file's last page (Linux 6.12; CVE-2024-44947).
const CLEARS_STORED_PAGES_SINCE: u32 = 41;
/// How long the mount's end waits for a running connection attempt; then it abandons the attempt.
const FAREWELL: Duration = Duration::from_secs(1);
const NOT_VOUCHED: &str = "the server must believe what this kernel has checked: mount as root, by root's own server on this machine, \
     without --idmap; or leave the option out";
const TOO_OLD: &str =
    "this kernel has no idmapped mounts of FUSE (Linux 6.12 has them): leave the option out";

/// Configuration of a mount.
pub struct MountConfig {
    pub options: MountOptions,
    pub cache: Config,
    pub wanted: RequestedFeatures,
    /// Highest notification level of the transport; tests mask features with it.
    pub level: nigh_fuse::Level,
    /// Begins a session with the remote.
    pub begin: Begin,
    pub idmap: IdMapChoice,
    /// Threads that read requests of the kernel.
    pub threads: u32,
    pub reconnect: Option<Reconnect>,
    /// Whether programs that watch by inotify(7) get events for changes by other clients; needs a mount point.
    pub events: Option<EventsConfig>,
    /// This program; with the id of this process behind the arguments it must call [`crate::watchdog::watch`].
    pub watchdog: Option<Program>,
    /// Source of memory pressure events.
    pub pressure: Option<Box<dyn Pressure>>,
    /// The directory of this user's sockets.
    pub runtime: std::path::PathBuf,
}

/// Whether the kernel cannot invalidate all dentries at once (`FUSE_NOTIFY_INC_EPOCH`, Linux 6.16), so directory
/// leases must be exclusive. Some servers must know this before there is a mount to test; a wrong guess only makes
/// sharing slower.
#[must_use]
pub fn needs_exclusive_dir_lease(level: nigh_fuse::Level) -> bool {
    match level {
        nigh_fuse::Level::All => kernel_release() < (6, 16),
        nigh_fuse::Level::NoEpoch => true,
        nigh_fuse::Level::None => false,
    }
}

/// Why a mount failed to start: one line, with a remedy.
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
    #[error("-o idmapped: {0}")]
    Idmapped(&'static str),
}

/// A running mount.
pub struct Mount {
    driver: Arc<Driver>,
    interrupts: Arc<Interrupts>,
    stopping: Arc<AtomicBool>,
    readers: Vec<JoinHandle<()>>,
    others: Vec<JoinHandle<()>>,
    /// May be reconnecting, which takes an unbounded time.
    link_reader: Option<JoinHandle<()>>,
    link_writer: Option<JoinHandle<()>>,
    control: Option<Control>,
    source: Arc<Source>,
    root_probe: Arc<RootProbe>,
    /// Id of the kernel's FUSE connection.
    connection: Option<u32>,
    /// Dropped last, because any thread may block before.
    _watchdog: Option<Watchdog>,
}

/// A session with a remote, before anything is mounted.
pub struct AttachedSession {
    config: MountConfig,
    link: Link,
    greeted: EstablishedSession,
}

impl AttachedSession {
    /// Attaches to the remote, which may take as long as the remote takes.
    ///
    /// # Errors
    /// The remote refuses or goes away.
    pub fn new(config: MountConfig, link: Link) -> Result<AttachedSession, StartError> {
        let greeted = greet(&link, (config.begin)(boot_time(), false))?;
        Ok(AttachedSession { config, link, greeted })
    }

    /// Mounts and serves; only the kernel is waited for. On an error nothing stays mounted. Call it on a thread that
    /// lives as long as the process does.
    ///
    /// # Errors
    /// The mount fails, or the kernel lacks what the configuration needs.
    pub fn mount(self) -> Result<Mount, StartError> {
        let AttachedSession { mut config, link, greeted } = self;
        let host: Arc<dyn Host> = Arc::new(LocalHost);
        let idmapped = config.wanted.flags & init::ALLOW_IDMAP != 0;
        if idmapped && !callers_of(&config.idmap, &greeted.1, &host).are_trusted() {
            return Err(StartError::Idmapped(NOT_VOUCHED));
        }
        let mounted = nigh_fuse::mount::mount(&config.options)?;
        let mountpoint = mounted.mountpoint.clone();
        let undo = |error: io::Error| {
            let _ = nigh_fuse::mount::unmount(&mountpoint, true);
            StartError::Kernel(error)
        };
        let device = DevFuse::new(mounted.device, nigh_fuse::Level::NoEpoch);
        // With FUSE_POSIX_ACL but without ACLs on the server, the kernel admits only owners (`fuse_get_acl`).
        let wanted = match greeted.1.supports.acls {
            true => config.wanted,
            false => config.wanted.without(init::POSIX_ACL),
        };
        // The kernel caches a symlink's target per inode number, which may belong to another symlink later.
        let wanted = match greeted.1.root.distinguishes_reuse() {
            true => wanted,
            false => wanted.without(init::CACHE_SYMLINKS),
        };
        let agreed = handshake(&device, &wanted).map_err(undo)?;
        if idmapped && !agreed.has(init::ALLOW_IDMAP) {
            let _ = nigh_fuse::mount::unmount(&mountpoint, true);
            return Err(StartError::Idmapped(TOO_OLD));
        }
        device.probe_level(config.level);
        config.options.mountpoint.clone_from(&mountpoint);
        let connection = nigh_fuse::mount::connection_id(&mountpoint);
        let watchdog = watchdog(config.watchdog.as_ref(), connection);
        let kernel = (Box::new(device) as Box<dyn Transport>, host);
        let mount =
            Mount::assemble(config, link, greeted, kernel, agreed, Some(mountpoint.clone())).map_err(undo)?;
        Ok(Mount { connection, _watchdog: watchdog, ..mount })
    }
}

impl Mount {
    /// Attaches to the remote and serves a transport that is already open, with the negotiated `agreed`. `host`: where
    /// the callers of its requests run; [`NoHost`](crate::NoHost) for a guest's.
    pub fn start_on(
        config: MountConfig,
        link: Link,
        transport: Box<dyn Transport>,
        host: Arc<dyn Host>,
        agreed: Negotiated,
    ) -> Result<Mount, StartError> {
        let greeted = greet(&link, (config.begin)(boot_time(), false))?;
        // The kernel sends no ids of callers; only its own checks allow their calls.
        if agreed.has(init::ALLOW_IDMAP) && !callers_of(&config.idmap, &greeted.1, &host).are_trusted() {
            return Err(StartError::Idmapped(NOT_VOUCHED));
        }
        Mount::assemble(config, link, greeted, (transport, host), agreed, None).map_err(StartError::Kernel)
    }

    fn assemble(
        config: MountConfig,
        link: Link,
        (remote, session, early): EstablishedSession,
        (transport, host): (Box<dyn Transport>, Arc<dyn Host>),
        agreed: Negotiated,
        mountpoint: Option<PathBuf>,
    ) -> io::Result<Mount> {
        let level = transport.level();
        let direct_appends = agreed.has(init::DIRECT_IO_ALLOW_MMAP);
        let kernel_keeps_targets = agreed.has(init::CACHE_SYMLINKS);
        let prunes = agreed.minor >= PRUNES_SINCE;
        let mut cache = Cache::new(Config {
            level: cache_level(level),
            direct_appends,
            prunes,
            stores_files: agreed.minor >= CLEARS_STORED_PAGES_SINCE,
            kernel_keeps_targets,
            ..config.cache
        });
        cache.show_paths_below(&config.options.mountpoint.to_string_lossy());
        let about = About {
            mountpoint: std::path::absolute(&config.options.mountpoint)?,
            source: config.options.source.clone(),
            link: link.kind(),
            agreed,
            budget_bytes: config.cache.budget_bytes,
            data_budget_bytes: config.cache.data_budget_bytes,
            device: mountpoint.as_deref().and_then(device_at),
        };
        let ids = config.idmap.map(&session);
        let callers = callers_of(&config.idmap, &session, &host).idmapped(agreed.has(init::ALLOW_IDMAP));
        let driver = Driver::new(
            cache,
            (remote, link.clone()),
            (transport, host),
            (ids, callers),
            Box::new(boot_time),
        )?;
        if let Some(mountpoint) = mountpoint {
            let _ = driver.mountpoint.set(mountpoint);
        }
        let driver = Arc::new(driver);
        driver.with(|core, now| {
            core.cache.handle_event(now, Event::Attached(session.clone()));
            for event in early {
                core.cache.handle_event(now, event);
            }
            core.cache.prefetch_root(now);
        });
        let mut mount = Mount {
            source: Arc::new(Source::new(Arc::clone(&driver), about, session)),
            driver,
            interrupts: Arc::default(),
            stopping: Arc::default(),
            readers: Vec::new(),
            others: Vec::new(),
            link_reader: None,
            link_writer: None,
            control: None,
            root_probe: RootProbe::begin(None),
            connection: None,
            _watchdog: None,
        };
        mount.start_threads(link, (config.begin, config.reconnect), agreed, config.threads);
        if let Some(events) = config.events {
            mount.start_events(events);
        }
        if let Some(pressure) = config.pressure {
            mount.watch_pressure(pressure);
        }
        mount.control = Control::start(&config.runtime, Arc::clone(&mount.source))
            .inspect_err(|error| tracing::warn!(%error, "nigh status cannot reach this mount"))
            .ok();
        Ok(mount)
    }

    fn start_threads(
        &mut self,
        link: Link,
        (begin, reconnect): (Begin, Option<Reconnect>),
        agreed: Negotiated,
        threads: u32,
    ) {
        let driver = Arc::clone(&self.driver);
        self.others.push(thread::spawn(move || driver.run_timer()));
        let driver = Arc::clone(&self.driver);
        let expires = agreed.has(init::HAS_EXPIRE_ONLY);
        self.root_probe = RootProbe::begin(driver.mountpoint.get().cloned());
        let first_look = Arc::clone(&self.root_probe);
        self.others.push(thread::spawn(move || {
            first_look.wait();
            driver.notifier.run(&driver, expires);
        }));
        let (driver, interrupts) = (Arc::clone(&self.driver), Arc::clone(&self.interrupts));
        self.others.push(thread::spawn(move || interrupts.run(&driver)));
        let driver = Arc::clone(&self.driver);
        self.link_writer = Some(thread::spawn(move || write_link(&driver)));
        let (driver, stopping) = (Arc::clone(&self.driver), Arc::clone(&self.stopping));
        self.link_reader = Some(thread::spawn(move || {
            read_link(&driver, link, &stopping, &begin, reconnect);
        }));
        for _ in 0..threads.max(1) {
            let (driver, interrupts) = (Arc::clone(&self.driver), Arc::clone(&self.interrupts));
            self.readers.push(thread::spawn(move || serve_kernel(&driver, &interrupts, &agreed)));
        }
    }

    /// Starts the thread that frees memory under memory pressure.
    fn watch_pressure(&mut self, mut pressure: Box<dyn Pressure>) {
        let driver = Arc::clone(&self.driver);
        self.others.push(thread::spawn(move || {
            loop {
                match pressure.wait(driver.notifier.ended()) {
                    Ok(true) => {
                        driver.with(|core, now| core.cache.handle_pressure(now));
                        give_back_freed();
                    }
                    Ok(false) => return,
                    Err(error) => {
                        return tracing::warn!(%error, "nothing says any more when memory is short");
                    }
                }
            }
        }));
    }

    fn start_events(&mut self, config: EventsConfig) {
        let Some(mountpoint) = self.driver.mountpoint.get().cloned() else { return };
        let Some(device) = device_at(&mountpoint) else {
            return tracing::warn!(
                "the mount is not seen in /proc/self/mountinfo: watchers are not told what others change"
            );
        };
        let all = config.all;
        let driver = Arc::clone(&self.driver);
        self.others.push(thread::spawn(move || driver.events.look(&driver, device, all)));
        let driver = Arc::clone(&self.driver);
        self.others.push(thread::spawn(move || driver.events.run(&driver, &mountpoint, device, config)));
    }

    /// The guarantees that the remote's protocol cannot give, in a line for people.
    #[must_use]
    pub fn unsupported_guarantees(&self) -> Option<String> {
        self.source.unsupported_guarantees()
    }

    /// The mount's status, as `nigh status --json` prints it.
    #[must_use]
    pub fn status(&self) -> serde_json::Value {
        self.source.status()
    }

    /// Source of the mount's status, while the mount lives.
    #[must_use]
    pub fn source(&self) -> Arc<Source> {
        Arc::clone(&self.source)
    }

    /// Waits until the mount answers and no process of its own is in it any more, for at most a second.
    pub fn settle(&self) {
        self.root_probe.wait();
    }

    /// Handle to unmount from another thread; `None` if nothing is mounted.
    #[must_use]
    pub fn stopper(&self) -> Option<Stopper> {
        Some(Stopper::new(self.connection?, Arc::clone(&self.stopping)))
    }

    /// Serves until the kernel has unmounted, then releases all resources.
    pub fn wait(mut self) {
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        self.stopping.store(true, Ordering::Relaxed);
        self.driver.with(|core, _| core.remote.handle_close("unmounted"));
        self.driver.stop();
        self.driver.notifier.stop();
        self.driver.events.stop();
        self.interrupts.stop();
        // Without the goodbye the server would wait for this mount until its lease expires.
        let give_up = Instant::now() + FAREWELL;
        let writer = self.link_writer.take();
        while writer.as_ref().is_some_and(|w| !w.is_finished()) && Instant::now() < give_up {
            thread::sleep(Duration::from_millis(1));
        }
        self.driver.shut_link_down();
        for other in self.others.drain(..) {
            let _ = other.join();
        }
        drop(self.control.take());
        let Some(reader) = self.link_reader.take() else { return };
        let give_up = Instant::now() + FAREWELL;
        while !reader.is_finished() && Instant::now() < give_up {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// How to determine the credentials of callers.
fn callers_of(choice: &IdMapChoice, session: &nigh_remote::SessionParams, host: &Arc<dyn Host>) -> Callers {
    let nigh_types::Features { privileges, uniform_rights, rights_by_uid, .. } = session.supports;
    let callers = Callers::new(Arc::clone(host), privileges && choice.map(session).is_empty());
    callers.identifying(!uniform_rights && !rights_by_uid)
}

/// Starts the watchdog. Without one, a killed daemon may leave unkillable programs behind; `nigh umount` frees them.
fn watchdog(program: Option<&Program>, connection: Option<u32>) -> Option<Watchdog> {
    let started = Watchdog::start(program?, connection?);
    started
        .inspect_err(|error| {
            tracing::info!(%error, "no watchdog: if this process is killed, `nigh umount` frees what waits for it");
        })
        .ok()
}

/// Major and minor version of the kernel; (0, 0) if they cannot be parsed.
fn kernel_release() -> (u32, u32) {
    let name = rustix::system::uname();
    let mut numbers = name.release().to_str().unwrap_or("").split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next().and_then(|n| n.parse().ok()).unwrap_or(0);
    (number(), number())
}

pub(crate) fn cache_level(level: nigh_fuse::Level) -> nigh_cache::NotifyLevel {
    match level {
        nigh_fuse::Level::All => nigh_cache::NotifyLevel::All,
        nigh_fuse::Level::NoEpoch => nigh_cache::NotifyLevel::NoEpoch,
        nigh_fuse::Level::None => nigh_cache::NotifyLevel::None,
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
