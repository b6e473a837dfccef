//! Mounts with a killed, stopped or terminated daemon, or with a silent server: no process stays unkillable, and the
//! mount can be removed.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nigh_native::{ServerConfig, ServerEvent, ServerSession, SessionParams};
use nigh_remote::model_fs::{ModelFs, ModelFsConfig};
use nigh_types::{Features, Time};

use crate::process;
use crate::test::clean;
use crate::test::groups::Test;
use crate::test::mount::{Mount, MountParams, device_of};
use crate::test::world::{As, World};
use crate::wait;

/// Wait for a lease most of the time: run at once.
pub const WAITING: &[Test] = &[
    ("faults: daemon killed while its notifier waits leaves no unkillable process", |world| {
        killed(world, As::Us)
    }),
    ("faults: the same as an ordinary user", |world| {
        match world.tester.filter(|_| process::which("fusermount3").is_some()) {
            Some(who) => killed(world, who),
            None => skipped("needs an ordinary user and fusermount3"),
        }
    }),
];

pub const TESTS: &[Test] = &[
    ("faults: killed daemon of a mute server leaves a mount that can be removed", mute_server),
    ("faults: umount of a stopped daemon's mount in use ends what waits for it", stopped_daemon),
    ("faults: forced umount ends what waits, lazy umount does not", forced),
    ("faults: signals that end the daemon unmount", ending_signals),
    ("faults: signals while a mount is made unmount it", ending_early),
    ("faults: SIGTERM unmounts a mount in use and a background mount", ending_in_use),
    ("faults: umount right after mount does not find it in use", right_after),
];

const LIMIT: Duration = Duration::from_secs(30);

fn skipped(why: &str) -> Result<()> {
    println!("SKIPPED: {why}");
    Ok(())
}

fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    ensure!(wait::holds(LIMIT, || Ok(holds()))?, "{what}: not after {LIMIT:?}");
    Ok(())
}

/// Returns whether a thread of a process waits in a kernel function whose name contains `function`.
fn waits_in(pid: u32, function: &str) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let wchan = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("wchan")).unwrap_or_default();
    threads.flatten().any(|thread| wchan(thread).contains(function))
}

/// A program, killed when dropped.
struct Program(Child);

impl Program {
    fn start(world: &World, who: As, words: &[&str]) -> Result<Program> {
        let mut command = world.command(words[0], who);
        command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Program(command.spawn()?))
    }

    fn ends(&mut self) -> Result<()> {
        ensure!(process::wait(&mut self.0, LIMIT)?.is_some(), "a program that used the mount stays");
        Ok(())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = process::wait(&mut self.0, Duration::from_secs(1));
    }
}

fn umount(world: &World, who: As, words: &[&str], point: &Path) -> Result<process::CommandResult> {
    let mut command = world.command(world.nigh(), who);
    command.arg("umount").args(words).arg(point);
    world.run(command, LIMIT)
}

/// B is stopped and holds a grant on a directory, so a change on A waits with that directory locked. C changes another
/// name in the directory, and A's notifier invalidates it: the notifier waits for the lock. Then A's daemon is killed.
fn killed(world: &World, who: As) -> Result<()> {
    let dir = |name: &str| world.dir(&format!("stuck-{}-{name}", who.name()), who);
    let source = dir("source")?;
    fs::create_dir(source.join("d"))?;
    fs::write(source.join("d/old"), b"1")?;
    world.give_all(&source, who)?;
    let mount = |name: &str| Mount::new(world, &source, &dir(name)?, &MountParams::new(who));
    let (a, b, c) = (mount("mnt-1")?, mount("mnt-2")?, mount("mnt-3")?);
    let text = |path: PathBuf| path.display().to_string();
    for (point, name) in [(&a.point, "d"), (&b.point, "d"), (&b.point, "d/none"), (&c.point, "d/old")] {
        Program::start(world, who, &["ls", "-l", &text(point.join(name))])?.ends()?;
    }
    // A server that has just started makes changes wait for its predecessor's clients.
    Program::start(world, who, &["touch", &text(a.point.join("first"))])?.ends()?;
    let stopped = process::Stopped::new(b.daemon());
    let mut touch = Program::start(world, who, &["touch", &text(a.point.join("d/new"))])?;
    until("the change waits", || waits_in(touch.0.id(), "request_wait_answer"))?;
    std::thread::sleep(Duration::from_millis(300));
    let mut mv =
        Program::start(world, who, &["mv", &text(c.point.join("d/old")), &text(c.point.join("d/old2"))])?;
    until("the notifier waits for the directory", || waits_in(a.daemon(), "inval_entry"))?;
    process::signal(a.daemon(), libc::SIGKILL);
    touch.0.kill()?;
    touch.ends()?;
    let ended = umount(world, who, &[], &a.point)?;
    ensure!(ended.ok(), "nigh umount: {}", ended.tail(3));
    until("the daemon is gone", || {
        !Path::new(&format!("/proc/{}/task", a.daemon())).exists() || is_zombie(a.daemon())
    })?;
    drop(stopped);
    mv.ends()?;
    b.unmount()?;
    c.unmount()
}

/// Returns whether the whole process has exited, with its threads.
fn is_zombie(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    threads <= 1 && status.contains("State:\tZ")
}

/// Starts a server that accepts clients and then never replies, for as long as the test runs.
fn serve_mute(socket: &Path) -> Result<()> {
    let listener = UnixListener::bind(socket)?;
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let now = Time::default();
                let tree = ModelFs::new(ModelFsConfig::default());
                let mut connection = ServerSession::new(now, ServerConfig::default());
                let mut buffer = vec![0; 1 << 16];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    if connection.handle_input(now, &buffer[..length]).is_err() {
                        return;
                    }
                    while let Some(event) = connection.poll_event() {
                        if let ServerEvent::Attach { term, .. } = event {
                            connection.accept(SessionParams {
                                supports: Features { acls: true, ..Features::default() },
                                ..tree.session(term)
                            });
                        }
                    }
                    while let Some(frame) = connection.poll_transmit() {
                        if stream.write_all(&frame).is_err() {
                            return;
                        }
                    }
                }
            });
        }
    });
    Ok(())
}

/// No thread of the daemon waits in the daemon's own mount.
fn mute_server(world: &World) -> Result<()> {
    let socket = world.root.join("mute.sock");
    let _ = fs::remove_file(&socket);
    serve_mute(&socket)?;
    let point = world.dir("mnt", As::Us)?;
    let mut command = world.command(world.nigh(), As::Us);
    command.arg("mount").arg("--foreground").arg(format!("unix://{}:x", socket.display())).arg(&point);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut daemon = Program(command.spawn()?);
    until("the mount", || device_of(&point).is_some())?;
    let mut look = Program::start(world, As::Us, &["ls", &point.display().to_string()])?;
    until("a program waits", || waits_in(look.0.id(), "request_wait_answer"))?;
    ensure!(!waits_in(daemon.0.id(), "request_wait_answer"), "a thread of the daemon waits in its mount");
    let lazily = umount(world, As::Us, &["--lazy"], &point)?;
    ensure!(lazily.ok(), "nigh umount --lazy: {}", lazily.tail(3));
    ensure!(look.0.try_wait()?.is_none(), "a lazy umount leaves programs alone");
    daemon.0.kill()?;
    daemon.ends()?;
    look.ends()
}

fn mounted<'w>(world: &'w World, who: As) -> Result<(Mount<'w>, PathBuf)> {
    let source = world.dir("source", who)?;
    fs::write(source.join("file"), b"1")?;
    world.give_all(&source, who)?;
    let mount = Mount::new(world, &source, &world.dir("mnt", who)?, &MountParams::new(who))?;
    let file = mount.point.join("none");
    Ok((mount, file))
}

fn stopped_daemon(world: &World) -> Result<()> {
    let (mount, file) = mounted(world, As::Us)?;
    let stopped = process::Stopped::new(mount.daemon());
    let mut stat = Program::start(world, As::Us, &["stat", &file.display().to_string()])?;
    until("a program waits", || waits_in(stat.0.id(), "request_wait_answer"))?;
    let ended = umount(world, As::Us, &[], &mount.point)?;
    ensure!(ended.ok() && ended.said.contains("did not answer"), "nigh umount: {}", ended.tail(3));
    ensure!(device_of(&mount.point).is_none(), "still mounted");
    stat.ends()?;
    drop(stopped);
    until("the daemon is gone", || is_zombie(mount.daemon()))
}

fn forced(world: &World) -> Result<()> {
    let (mount, _) = mounted(world, As::Us)?;
    let mut user = world.command("sleep", As::Us);
    let user = Program(user.arg("1000").current_dir(&mount.point).spawn()?);
    let busy = umount(world, As::Us, &[], &mount.point)?;
    ensure!(!busy.ok() && busy.said.contains("in use"), "a mount that answers is in use: {}", busy.tail(3));
    let ended = umount(world, As::Us, &["--force"], &mount.point)?;
    ensure!(ended.ok(), "nigh umount --force: {}", ended.tail(3));
    ensure!(device_of(&mount.point).is_none(), "still mounted");
    until("the daemon is gone", || is_zombie(mount.daemon()))?;
    drop(user);
    Ok(())
}

fn ending_signals(world: &World) -> Result<()> {
    for (signal, name) in [(libc::SIGINT, "INT"), (libc::SIGTERM, "TERM"), (libc::SIGHUP, "HUP")] {
        let (mount, _) = mounted(world, As::Us)?;
        process::signal(mount.daemon(), signal);
        until(name, || device_of(&mount.point).is_none())?;
        ensure!(
            fs::read_dir(&mount.point)?.next().is_none(),
            "SIG{name} leaves a directory that can be used"
        );
        until(name, || is_zombie(mount.daemon()))?;
    }
    Ok(())
}

/// The signal comes as soon as the mount is visible, before the daemon answers.
fn ending_early(world: &World) -> Result<()> {
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP].repeat(3) {
        let mut command = world.command(world.nigh(), As::Us);
        command.arg("mount").arg(&source).arg(&point).arg("--foreground");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut daemon = Program(command.spawn()?);
        let end = Instant::now() + LIMIT;
        while device_of(&point).is_none() {
            ensure!(Instant::now() < end, "not mounted after {LIMIT:?}");
        }
        process::signal(daemon.0.id(), signal);
        let ended = process::wait(&mut daemon.0, LIMIT)?;
        let stays = device_of(&point).is_some();
        if stays {
            umount(world, As::Us, &["--lazy"], &point)?;
        }
        ensure!(
            ended.is_some() && !stays,
            "signal {signal}: the daemon ended with {ended:?}, mounted: {stays}"
        );
    }
    Ok(())
}

fn ending_in_use(world: &World) -> Result<()> {
    let (mount, _) = mounted(world, As::Us)?;
    let mut user = world.command("sleep", As::Us);
    let user = Program(user.arg("1000").current_dir(&mount.point).spawn()?);
    process::signal(mount.daemon(), libc::SIGTERM);
    until("the daemon of a mount in use", || is_zombie(mount.daemon()))?;
    ensure!(device_of(&mount.point).is_none(), "a mount in use stays mounted");
    drop((user, mount));
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    let mut command = world.command(world.nigh(), As::Us);
    command.arg("mount").arg(&source).arg(&point);
    let ended = world.run(command, LIMIT)?;
    ensure!(ended.ok(), "{}", ended.tail(3));
    let is_daemon = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).into_owned();
        words.contains("--ready-fd") && words.contains(&point.display().to_string())
    };
    let daemon = clean::processes().into_iter().find(is_daemon).context("the daemon in the background")?;
    process::signal(daemon, libc::SIGTERM);
    until("the background mount", || device_of(&point).is_none())
}

fn right_after(world: &World) -> Result<()> {
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    for _ in 0..if world.short { 5 } else { 20 } {
        let mut command: Command = world.command(world.nigh(), As::Us);
        command.arg("mount").arg(&source).arg(&point);
        let ended = world.run(command, LIMIT)?;
        ensure!(ended.ok(), "{}", ended.tail(3));
        let ended = umount(world, As::Us, &[], &point)?;
        ensure!(ended.ok(), "{}", ended.tail(3));
    }
    Ok(())
}
