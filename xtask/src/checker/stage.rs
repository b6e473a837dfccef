//! A server, mounts of one directory with a daemon each, a link for each mount, and worker processes.

use std::cell::Cell;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::link::client::Emulator;
use crate::load::moment;
use crate::process;
use crate::test::mount::{Mount, MountParams, no_orphans};
use crate::test::world::{As, World};
use crate::wait;

const WHO: As = As::Us;
pub const MOUNTS: u8 = 3;
/// Workers per mount.
pub const WORKERS: u8 = 2;
/// Longest time for which other servers may come in the way.
const OTHER_SERVERS: Duration = Duration::from_secs(30);

/// Returns the process that listens on a socket.
fn listener_of(socket: &Path) -> Option<u32> {
    process::peer_of(&UnixStream::connect(socket).ok()?)
}

/// The server's process.
pub struct Server<'w> {
    world: &'w World,
    child: Child,
    pub log: PathBuf,
}

impl<'w> Server<'w> {
    pub fn start(world: &'w World) -> Result<Server<'w>> {
        let log = world.log();
        let child = Server::spawn(world, &log)?;
        let mut server = Server { world, child, log };
        server.wait_until_ready()?;
        Ok(server)
    }

    fn spawn(world: &World, log: &PathBuf) -> Result<Child> {
        let file = File::options().create(true).append(true).open(log)?;
        let mut command = world.command(world.nigh(), WHO);
        // Mounts come and go; the server stays.
        command.args(["serve", "--listen", "user"]).env("NIGH_SERVER_IDLE_MS", "86400000");
        command.process_group(0).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        command.spawn().context("starting the server")
    }

    /// Waits for the server. It ends at once, with success, if another one runs: that of an earlier test, or one that a
    /// mount has started when this one was killed. That is killed too.
    fn wait_until_ready(&mut self) -> Result<()> {
        let socket = self.world.server_socket(WHO);
        let end = Instant::now() + OTHER_SERVERS;
        loop {
            let limit = Duration::from_secs(20);
            let own = self.child.id();
            let ready = wait::ready(&mut self.child, limit, || Ok(listener_of(&socket) == Some(own)));
            let has_yielded = self.child.try_wait()?.is_some_and(|status| status.success());
            if !has_yielded || Instant::now() > end {
                return ready.with_context(|| format!("the server: {}", self.said()));
            }
            listener_of(&socket).into_iter().for_each(|other| process::signal(other, libc::SIGKILL));
            std::thread::sleep(Duration::from_millis(100));
            self.child = Server::spawn(self.world, &self.log)?;
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process, and waits until it has exited.
    pub fn kill(&mut self) -> Result<()> {
        process::signal(self.child.id(), libc::SIGKILL);
        let ended = process::wait(&mut self.child, Duration::from_secs(10))?;
        ensure!(ended.is_some(), "the server lives 10 s after SIGKILL");
        Ok(())
    }

    pub fn start_again(&mut self) -> Result<()> {
        self.child = Server::spawn(self.world, &self.log)?;
        self.wait_until_ready()
    }

    /// Returns how often the server has fenced a mount.
    pub fn fences(&self) -> u64 {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        text.lines().filter(|line| line.contains("session fenced")).count() as u64
    }

    pub fn said(&self) -> String {
        process::last_lines(&self.log)
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        process::signal(self.child.id(), libc::SIGTERM);
        process::end(&mut self.child, Duration::from_secs(3));
    }
}

/// A worker process on a mount. Ended when dropped.
pub struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    said: Receiver<String>,
    log: PathBuf,
    /// The log of its present calls.
    pub calls: PathBuf,
    dead: bool,
}

impl Worker {
    fn start(world: &World, mount: &Mount<'_>, seed: u64) -> Result<Worker> {
        let log = world.log();
        let mut command = world.command(world.xtask(), WHO);
        command.arg("checker-worker").arg(&mount.point);
        command.args(["--seed", &seed.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&log)?).process_group(0);
        let mut child = command.spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take().context("no output")?);
        let (sender, said) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Worker { child, input, said, log, calls: PathBuf::new(), dead: false })
    }

    /// Gives it an order; [`Worker::is_done`] returns whether it has completed.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        if self.dead {
            return Ok(());
        }
        let input = self.input.as_mut().context("it was told to end")?;
        input.write_all(line.as_bytes()).context("a worker has ended")
    }

    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Returns whether it has been in one call for more than 5 ms.
    pub fn is_waiting(&self) -> bool {
        let text = std::fs::read_to_string(&self.calls).unwrap_or_default();
        let begun = text.lines().last().and_then(|line| line.strip_prefix("> "));
        let begin = begun.and_then(|line| line.split(' ').next()?.parse::<u64>().ok());
        begin.is_some_and(|begin| moment().saturating_sub(begin) > 5_000_000)
    }

    /// Returns whether the kernel has it wait for a reply of its mount's daemon.
    pub fn awaits_answer(&self) -> bool {
        let stack = std::fs::read_to_string(format!("/proc/{}/stack", self.child.id()));
        stack.is_ok_and(|stack| stack.contains("request_wait_answer"))
    }

    /// Sends SIGKILL; [`Worker::is_gone`] returns whether it has exited.
    pub fn kill(&mut self) {
        self.dead = true;
        process::signal(self.child.id(), libc::SIGKILL);
    }

    pub fn is_gone(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Returns whether it has completed its order, or is dead.
    pub fn is_done(&mut self) -> Result<bool> {
        if self.dead {
            return Ok(true);
        }
        match self.said.try_recv() {
            Ok(_) => Ok(true),
            Err(TryRecvError::Empty) => Ok(false),
            Err(TryRecvError::Disconnected) => {
                let said = std::fs::read_to_string(&self.log).unwrap_or_default();
                bail!("a worker ended: {}", said.trim())
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.input.take());
        process::end(&mut self.child, Duration::from_millis(500));
    }
}

/// One mount with its workers, its daemon and its link.
pub struct CheckedMount<'w> {
    pub workers: Vec<Worker>,
    pub mount: Mount<'w>,
    pub link: Emulator,
    /// The server grants it nothing for a while, because it has made other clients wait; so it is to be mounted again.
    pub is_penalised: bool,
}

/// The whole setup.
pub struct Stage<'w> {
    pub mounts: Vec<CheckedMount<'w>>,
    pub server: Server<'w>,
    pub world: &'w World,
    pub source: PathBuf,
    seed: u64,
    /// Number of started workers.
    started: Cell<u64>,
}

impl<'w> Stage<'w> {
    pub fn new(world: &'w World, seed: u64) -> Result<Stage<'w>> {
        let source = world.dir("source", WHO)?;
        let server = Server::start(world)?;
        let mut stage = Stage { mounts: Vec::new(), server, world, source, seed, started: Cell::new(0) };
        for number in 0..MOUNTS {
            let seat = stage.new_seat(number).with_context(|| format!("mount {number}"))?;
            stage.mounts.push(seat);
        }
        Ok(stage)
    }

    /// Returns the seed of the next worker.
    fn next_seed(&self) -> u64 {
        let started = self.started.get();
        self.started.set(started + 1);
        self.seed * 1_000_000 + started
    }

    pub fn seat(&mut self, number: u8) -> &mut CheckedMount<'w> {
        &mut self.mounts[usize::from(number)]
    }

    /// Returns a worker by its number over all mounts.
    pub fn worker(&mut self, number: u8) -> &mut Worker {
        &mut self.mounts[usize::from(number / WORKERS)].workers[usize::from(number % WORKERS)]
    }

    /// Replaces dead workers and penalised mounts. `parting` first collects the counters of such a mount.
    pub fn renew(&mut self, mut parting: impl FnMut(&CheckedMount<'w>) -> Result<()>) -> Result<()> {
        for number in 0..MOUNTS {
            let at = usize::from(number);
            if self.mounts[at].is_penalised {
                let seat = self.mounts.remove(at);
                parting(&seat)?;
                drop(seat.workers);
                seat.mount.unmount()?;
                drop(seat.link);
                let new = self.new_seat(number)?;
                self.mounts.insert(at, new);
            }
            for worker in 0..WORKERS {
                if self.mounts[at].workers[usize::from(worker)].is_dead() {
                    let new = Worker::start(self.world, &self.mounts[at].mount, self.next_seed())?;
                    self.mounts[at].workers[usize::from(worker)] = new;
                }
            }
        }
        Ok(())
    }

    fn new_seat(&self, number: u8) -> Result<CheckedMount<'w>> {
        let world = self.world;
        let rtt = format!("{}ms", 1 + (self.seed + u64::from(number)) % 5);
        let link = world.link(&rtt)?;
        let mut how = MountParams::new(WHO).with("--host-timeout=forever").through(&link);
        if self.seed.is_multiple_of(3) && number == 2 {
            how = how.set("NIGH_NOTIFY_LEVEL", "no-epoch");
        }
        let point = world.dir(&format!("mnt-{number}"), WHO)?;
        let mount = Mount::new(world, &self.source, &point, &how)?;
        let mut seat = CheckedMount { workers: Vec::new(), mount, link, is_penalised: false };
        for _ in 0..WORKERS {
            let worker = Worker::start(world, &seat.mount, self.next_seed())?;
            seat.workers.push(worker);
        }
        Ok(seat)
    }

    pub fn workers(&mut self) -> impl Iterator<Item = &mut Worker> {
        self.mounts.iter_mut().flat_map(|seat| &mut seat.workers)
    }

    /// Aborts all FUSE connections, so that no process hangs.
    pub fn abort(&self) {
        self.mounts.iter().for_each(|seat| seat.mount.abort());
    }

    /// Returns the last output of the server and the daemons.
    pub fn said(&self) -> String {
        let daemons = self.mounts.iter().map(|seat| seat.mount.said());
        let all = daemons.chain([self.server.said()]).filter(|said| !said.is_empty());
        all.collect::<Vec<_>>().join(" // ")
    }

    /// Ends the whole setup. A mount whose link has just been cut could not say goodbye, and its session would keep
    /// removed files for a term; so each mount first makes a request.
    pub fn close(self) -> Result<()> {
        let said = self.said();
        for CheckedMount { workers, mount, link, .. } in self.mounts {
            drop(workers);
            answers(&mount)?;
            mount.unmount()?;
            drop(link);
        }
        // Orphans of a killed server are removed when a term has passed without their clients.
        let end = Instant::now() + Duration::from_secs(20);
        while let Err(error) = no_orphans(&self.source) {
            if Instant::now() > end {
                return Err(error.context(format!("{said} // {}", self.server.said())));
            }
        }
        Ok(())
    }
}

/// Starts a process that makes a mount send a request to its server.
pub fn asks(mount: &Mount<'_>) -> Result<Child> {
    let mut command = Command::new("stat");
    command.arg("--cached=never").arg(&mount.point);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().context("stat")
}

/// Waits up to 20 s for a reply of the mount's server.
fn answers(mount: &Mount<'_>) -> Result<()> {
    let mut asked = asks(mount)?;
    let ended = process::wait(&mut asked, Duration::from_secs(20))?;
    if ended.is_none() {
        mount.abort();
        let _ = asked.wait();
        bail!("{} does not answer: {}", mount.point.display(), mount.said());
    }
    Ok(())
}
