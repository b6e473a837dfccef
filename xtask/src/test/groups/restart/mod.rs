//! The server is killed under a mount: no call hangs, open files continue, and mounts below stay.

mod disconnect;
mod load;
mod stall;

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process;
use crate::report::TestReport;
use crate::root;
use crate::test::mount::{Mount, MountParams, no_orphans};
use crate::test::world::{As, World};
use crate::wait;

pub fn run(world: &World, tally: &mut TestReport) {
    let tests: &[super::Test] = &[
        ("a server that was killed: the mount goes on", goes_on),
        ("a server that was killed: what was removed while open is read on", removed_stays),
        (
            "a server that was killed: an open file that was replaced meanwhile fails",
            disconnect::replaced_fails,
        ),
        ("a server that is killed again and again under a load", load::killed_servers),
        ("a link that is cut again and again under a load", load::cut_links),
        ("the same over nigh://", load::cut_links_by_tcp),
    ];
    for (name, test) in tests {
        tally.test(name, || test(world));
    }
    if root::is_root() {
        tally.test("a server that was killed: mounts below the mount stay", || below_stays(world));
    }
    // Last: a server that is killed afterwards waits for the sessions that these leave.
    super::at_once(
        world,
        tally,
        &[
            ("a link that was cut: requests wait, and can be killed", disconnect::waits),
            (
                "a link that was cut: what was stored into a map is kept, whichever process is killed",
                disconnect::stores_are_kept,
            ),
            ("--on-disconnect=fail", disconnect::fails),
            ("-o soft,timeo=15", disconnect::fails_as_soft),
            ("--on-disconnect=stale", disconnect::answers_stale),
        ],
    );
}

/// Kills the process at the other end of the server's socket. If a server has just died, waits for the next one.
pub fn kill_server(world: &World) -> Result<()> {
    signal_server(world, libc::SIGKILL)
}

/// Sends another signal to the server.
pub fn signal_server(world: &World, signal: i32) -> Result<()> {
    let connect = || anyhow::Ok(UnixStream::connect(world.server_socket(As::Us)).ok());
    let stream = wait::until(Duration::from_secs(10), connect)?.context("no server after 10 s")?;
    signal_peer(&stream, signal)
}

/// Ends a user's server, if one runs; no mount may need it.
pub fn end_server(world: &World, who: As) -> Result<()> {
    let Ok(mut stream) = UnixStream::connect(world.server_socket(who)) else { return Ok(()) };
    signal_peer(&stream, libc::SIGTERM)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    while stream.read(&mut [0; 64]).context("the server does not end")? > 0 {}
    Ok(())
}

fn signal_peer(stream: &UnixStream, signal: i32) -> Result<()> {
    let pid = process::peer_of(stream).and_then(|pid| i32::try_from(pid).ok());
    let pid = pid.context("the server's process is not known")?;
    // SAFETY: it is the tests' own server.
    ensure!(unsafe { libc::kill(pid, signal) } == 0, "it cannot be told");
    Ok(())
}

fn goes_on(world: &World) -> Result<()> {
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    fs::write(source.join("file"), vec![b'x'; 200_000])?;
    let mount = Mount::new(world, &source, &point, &MountParams::new(As::Us).with("--host-timeout=forever"))?;
    let mut open = fs::File::open(point.join("file"))?;
    let mut first = [0; 10];
    open.read_exact(&mut first)?;
    for round in 0..5 {
        kill_server(world)?;
        let made = point.join(format!("made-{round}"));
        fs::write(&made, b"after").with_context(|| format!("round {round}"))?;
        ensure!(fs::read(source.join(format!("made-{round}")))? == b"after", "round {round}");
        ensure!(fs::read_dir(&point)?.count() == round + 2, "round {round}: the listing is wrong");
    }
    let mut rest = Vec::new();
    open.read_to_end(&mut rest)?;
    ensure!(
        rest.len() == 199_990 && rest.iter().all(|b| *b == b'x'),
        "an open file reads {} bytes",
        rest.len()
    );
    drop(open);
    mount.unmount()
}

/// Files that were removed, and replaced, while they were open for reading.
fn removed_stays(world: &World) -> Result<()> {
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    for name in ["removed", "replaced", "written", "new"] {
        fs::write(source.join(name), name.repeat(50_000))?;
    }
    let mount = Mount::new(world, &source, &point, &MountParams::new(As::Us).with("--host-timeout=forever"))?;
    let mut open = Vec::new();
    for name in ["removed", "replaced"] {
        let mut file = fs::File::open(point.join(name))?;
        file.read_exact(&mut [0; 10])?;
        open.push((name, file));
    }
    let written = fs::OpenOptions::new().read(true).write(true).open(point.join("written"))?;
    open.push(("written", written));
    fs::remove_file(point.join("removed"))?;
    fs::remove_file(point.join("written"))?;
    fs::rename(point.join("new"), point.join("replaced"))?;
    for round in 0..3_u32 {
        kill_server(world)?;
        fs::write(point.join("made"), b"after").with_context(|| format!("round {round}"))?;
        for (name, file) in &open {
            let mut got = vec![0; 4096];
            let at = 20_000 + u64::from(round) * 90_000;
            file.read_exact_at(&mut got, at).with_context(|| format!("{name}, round {round}"))?;
            let expected = name.repeat(50_000);
            let start = usize::try_from(at)?;
            ensure!(got == expected.as_bytes()[start..start + 4096], "{name}, round {round}: other data");
            let links = file.metadata()?.nlink();
            ensure!(links == 0, "{name}, round {round}: {links} links");
        }
        let (_, written) = open.last().context("three files")?;
        written.write_all_at(b"on", 7)?;
        let mut got = [0; 2];
        written.read_exact_at(&mut got, 7)?;
        ensure!(got == *b"on", "round {round}: not what was written");
        ensure!(fs::read_dir(&point)?.count() == 2, "round {round}: the listing is wrong");
    }
    drop(open);
    mount.unmount()?;
    no_orphans(&source)
}

fn below_stays(world: &World) -> Result<()> {
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    fs::create_dir_all(source.join("a/b"))?;
    let mount = Mount::new(world, &source, &point, &MountParams::new(As::Us).with("--host-timeout=forever"))?;
    let below = point.join("a/b");
    process::output(Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(&below))?;
    let result = (|| {
        fs::write(below.join("inside"), b"here")?;
        kill_server(world)?;
        fs::write(point.join("beside"), b"")?;
        ensure!(fs::read(below.join("inside"))? == b"here", "what was mounted below is gone");
        Ok(())
    })();
    process::output(Command::new("umount").arg(&below))?;
    result?;
    mount.unmount()
}
