//! Loss of the server under each disconnect policy: which calls wait, fail or get stale replies, and that no process
//! is unkillable.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::link::client::Emulator;
use crate::process;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};
use crate::wait;

const WHO: As = As::Us;

/// A mount over a link that can be cut. A second mount without the link keeps the server running.
struct Cut<'w> {
    link: Option<Emulator>,
    mount: Mount<'w>,
    _keeper: Mount<'w>,
}

impl<'w> Cut<'w> {
    /// `test` begins the names of its directories: several tests run at once.
    fn new(world: &'w World, test: &str, arguments: &[&str]) -> Result<Cut<'w>> {
        let dir = |name: &str| world.dir(&format!("{test}-{name}"), WHO);
        let (idle, keep) = (dir("keeper-source")?, dir("keeper")?);
        let keeper = Mount::new(world, &idle, &keep, &MountParams::new(WHO))?;
        let link = world.link("1ms")?;
        let (source, point) = (dir("source")?, dir("mnt")?);
        fs::write(source.join("file"), b"here")?;
        fs::create_dir(source.join("unknown"))?;
        fs::write(source.join("unknown/file"), b"there")?;
        let mut how = MountParams::new(WHO).through(&link);
        for argument in arguments {
            how = how.with(argument);
        }
        let mount = Mount::new(world, &source, &point, &how)?;
        ensure!(fs::read(point.join("file"))? == b"here", "before the link was cut");
        ensure!(fs::read_dir(&point)?.count() == 2, "before the link was cut");
        Ok(Cut { link: Some(link), mount, _keeper: keeper })
    }

    /// Ends the link for good; waits until the mount has noticed.
    fn cut(&mut self) -> Result<()> {
        self.link = None;
        let ended = || Ok(self.mount.status()?["remote"]["connected"] != true);
        let known = wait::holds(Duration::from_secs(20), ended)?;
        ensure!(known, "20 s after its link ended the mount does not know");
        let lapses = self.mount.status()?["remote"]["lapses"].as_u64();
        ensure!(lapses == Some(1), "remote.lapses is {lapses:?}");
        Ok(())
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.mount.point.join(name)
    }
}

fn errno<T>(result: std::io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

/// SIGKILL ends a waiting process within a second (and without a load far sooner: the group `signals`).
pub fn killed(words: &[&str], mount: &Mount<'_>) -> Result<()> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    std::thread::sleep(Duration::from_millis(150));
    ensure!(child.try_wait()?.is_none(), "{} did not wait", words.join(" "));
    process::signal(child.id(), libc::SIGKILL);
    if process::wait(&mut child, Duration::from_secs(1))?.is_none() {
        mount.abort();
        let _ = process::wait(&mut child, Duration::from_secs(5));
        anyhow::bail!("{} lives 1 s after SIGKILL", words.join(" "));
    }
    Ok(())
}

fn killed_in_all_ways(cut: &Cut<'_>) -> Result<()> {
    let text = |path: &Path| path.display().to_string();
    killed(&["stat", &text(&cut.at("unknown/file"))], &cut.mount)?;
    killed(&["mkdir", &text(&cut.at("new"))], &cut.mount)?;
    killed(&["flock", &text(&cut.at("file")), "true"], &cut.mount)
}

pub fn waits(world: &World) -> Result<()> {
    let mut cut = Cut::new(world, "waits", &[])?;
    cut.cut()?;
    killed_in_all_ways(&cut)?;
    drop(cut);
    Ok(())
}

/// Stores into a map are not lost with their process: it exits after their write-back, or when the connection ends.
pub fn stores_are_kept(world: &World) -> Result<()> {
    let mut cut = Cut::new(world, "stores", &[])?;
    let child = store_and_stay(&cut.at("file"))?;
    cut.cut()?;
    process::signal(child, libc::SIGKILL);
    let waited = !ends(child, Duration::from_secs(1))?;
    cut.mount.abort();
    ensure!(ends(child, Duration::from_secs(5))?, "it lives 5 s after the connection");
    ensure!(waited, "what it had stored was given up");
    Ok(())
}

/// Starts a process that stores into a shared map of a file and then sleeps; returns its id after the store.
fn store_and_stay(file: &Path) -> Result<u32> {
    let path = std::ffi::CString::new(file.as_os_str().as_encoded_bytes())?;
    let (mut reader, writer) = std::io::pipe()?;
    // SAFETY: the child makes system calls only.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: a mapping of one page of a file that is not empty, which stays until the end. No descriptor of
        // another test stays open here, which may wait for its end of file.
        unsafe {
            libc::dup2(writer.as_raw_fd(), 0);
            libc::close_range(1, libc::c_uint::MAX, 0);
            let fd = libc::open(path.as_ptr(), libc::O_RDWR);
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let at = libc::mmap(std::ptr::null_mut(), 4096, protection, libc::MAP_SHARED, fd, 0);
            if at == libc::MAP_FAILED {
                libc::_exit(1);
            }
            at.cast::<u8>().write_volatile(b'H');
            libc::write(0, at, 1);
            loop {
                libc::pause();
            }
        }
    }
    drop(writer);
    let mut stored = [0];
    reader.read_exact(&mut stored)?;
    ensure!(stored == *b"H", "{stored:?} was stored");
    Ok(u32::try_from(child)?)
}

fn ends(child: u32, limit: Duration) -> Result<bool> {
    // SAFETY: nothing is written.
    let gone = || unsafe { libc::waitpid(child.cast_signed(), std::ptr::null_mut(), libc::WNOHANG) };
    wait::holds(limit, || Ok(gone() != 0))
}

pub fn fails(world: &World) -> Result<()> {
    fails_with(world, "fail", &["--on-disconnect=fail", "--request-timeout=1500ms"])
}

pub fn fails_as_soft(world: &World) -> Result<()> {
    fails_with(world, "soft", &["-o", "soft,timeo=15"])
}

/// The limit applies whether the link is known to be cut or only silent.
fn fails_with(world: &World, test: &str, options: &[&str]) -> Result<()> {
    let mut cut = Cut::new(world, test, options)?;
    if let Some(link) = &cut.link {
        link.pause()?;
    }
    let mut took = Vec::new();
    for known in [false, true] {
        if known {
            cut.cut()?;
        }
        let start = Instant::now();
        ensure!(errno(fs::metadata(cut.at("unknown/file"))) == libc::EIO, "a question");
        took.push(start.elapsed());
        ensure!(errno(fs::create_dir(cut.at("new"))) == libc::EIO, "a change");
    }
    let fits = |took: &Duration| (1_400..4_000).contains(&took.as_millis());
    ensure!(took.iter().all(fits), "1.5 s were asked for, it took {took:?}");
    killed_in_all_ways(&cut)
}

pub fn answers_stale(world: &World) -> Result<()> {
    let mut cut = Cut::new(world, "stale", &["--on-disconnect=stale", "--host-timeout=500ms"])?;
    std::thread::sleep(Duration::from_millis(700));
    cut.cut()?;
    let known =
        fs::metadata(cut.at("file")).with_context(|| format!("what was known: {}", cut.mount.said()))?;
    ensure!(known.len() == 4, "what was known is answered");
    ensure!(errno(fs::metadata(cut.at("nothing"))) == libc::ENOENT, "what was known to be absent");
    let listing =
        fs::read_dir(&cut.mount.point).with_context(|| format!("a listing: {}", cut.mount.said()))?;
    ensure!(listing.count() == 2, "and a listing");
    let start = Instant::now();
    ensure!(errno(fs::metadata(cut.at("unknown/file"))) == libc::EIO, "a miss");
    ensure!(errno(fs::create_dir(cut.at("new"))) == libc::EROFS, "a change");
    let write = fs::OpenOptions::new().write(true).open(cut.at("file"));
    ensure!(errno(write) == libc::EROFS, "opening for writing");
    ensure!(start.elapsed() < Duration::from_secs(1), "none of them waits");
    let status = cut.mount.status()?;
    ensure!(status["guarantees"]["S1"] == false, "S1 is {}", status["guarantees"]["S1"]);
    Ok(())
}

/// A file that was replaced on the server's disk before its server died cannot be reopened: calls on it fail, and do
/// not reach its replacement.
pub fn replaced_fails(world: &World) -> Result<()> {
    let (source, point) = (world.dir("source", WHO)?, world.dir("mnt", WHO)?);
    fs::write(source.join("victim"), b"old")?;
    let mount = Mount::new(world, &source, &point, &MountParams::new(WHO))?;
    let mut victim = fs::OpenOptions::new().read(true).write(true).open(point.join("victim"))?;
    fs::write(source.join("new"), b"new")?;
    fs::rename(source.join("new"), source.join("victim"))?;
    super::kill_server(world)?;
    fs::write(point.join("after"), b"")?;
    ensure!(errno(victim.write(b"x")) == libc::EIO, "the file that was open is gone");
    ensure!(errno(victim.read(&mut [0; 3])) == libc::EIO, "and cannot be read");
    ensure!(fs::read(source.join("victim"))? == b"new", "the file in its place is untouched");
    drop(victim);
    mount.unmount()
}
