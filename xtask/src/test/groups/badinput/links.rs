//! Errors about a server at the other end of a link, as `nigh mount` reports them, and a server that becomes unusable
//! under an existing mount.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nigh_native::{Message, Refused};
use nigh_types::Errno;

use super::{refused, text};
use crate::link::client::Emulator;
use crate::process;
use crate::report::TestReport;
use crate::root;
use crate::test::clean;
use crate::test::mount::{Mount, MountParams};
use crate::test::over::{self, LinkKind, Serving};
use crate::test::world::{As, World};
use crate::wait;

const WHO: As = As::Us;

pub fn run(world: &World, tally: &mut TestReport) {
    let tests: &[crate::test::groups::Test] = &[
        ("nigh://: an unknown host", unknown_host),
        ("nigh://: a port without a listener", port_without_listener),
        ("nigh://: an export that is not there", unknown_export),
        ("nigh://: no token", no_token),
        ("nigh://: a token that is not there", missing_token),
        ("nigh://: a token that others may read", open_token),
        ("nigh://: another token", another_token),
        ("nigh://: the server's key has changed", changed_key),
        ("unix://: an export that is not there", unknown_export_by_unix),
        ("unix://: a socket that is not there", no_socket),
        ("unix://: a server of another version", another_version),
        (
            "unix://: a server of another version takes the place of one that was mounted",
            another_version_later,
        ),
    ];
    for (name, test) in tests {
        tally.test(name, || test(world));
    }
    let name = "unix://: a full disk under the server's state";
    if root::is_root() {
        tally.test(name, || full_disk(world));
    } else {
        tally.skip(name, "needs root to make one");
    }
}

/// `nigh mount SOURCE` fails with one line that names each of `names`; nothing is mounted, and no process remains.
fn cannot_mount(world: &World, source: &str, options: &[&str], names: &[&str]) -> Result<()> {
    let point = world.dir("mnt", WHO)?;
    let point = text(&point);
    let words = [&["mount", source, &point], options].concat();
    for name in names {
        refused(world, WHO, &words, &[1, 2], name)?;
    }
    let ours = |pid: &u32| {
        let said = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = said.split(|byte| *byte == 0);
        words.any(|word| word == b"mount") && words.any(|word| word == point.as_bytes())
    };
    let left = || clean::processes().into_iter().find(ours);
    let none = wait::holds(Duration::from_secs(5), || Ok(left().is_none()))?;
    ensure!(none, "process {:?} stays", left());
    ensure!(fs::read_dir(&point)?.next().is_none(), "something is left in the mount point");
    Ok(())
}

fn token_option(world: &World) -> String {
    format!("--token={}", over::token(world, WHO).display())
}

fn unknown_host(world: &World) -> Result<()> {
    over::serve(world, WHO)?;
    cannot_mount(world, "nigh://nowhere.invalid/all", &[&token_option(world)], &["nowhere.invalid"])
}

fn port_without_listener(world: &World) -> Result<()> {
    over::serve(world, WHO)?;
    let port = over::free_port()?.to_string();
    cannot_mount(world, &format!("nigh://127.0.0.1:{port}/all"), &[&token_option(world)], &[&port, "refused"])
}

fn unknown_export(world: &World) -> Result<()> {
    let port = over::serve(world, WHO)?;
    let source = format!("nigh://127.0.0.1:{port}/no-such-export");
    cannot_mount(world, &source, &[&token_option(world)], &["no-such-export"])
}

fn no_token(world: &World) -> Result<()> {
    let port = over::serve(world, WHO)?;
    cannot_mount(world, &format!("nigh://127.0.0.1:{port}/all"), &[], &["token"])
}

fn missing_token(world: &World) -> Result<()> {
    let port = over::serve(world, WHO)?;
    cannot_mount(
        world,
        &format!("nigh://127.0.0.1:{port}/all"),
        &["--token=/nonexistent/token"],
        &["/nonexistent/token"],
    )
}

/// Writes a token file with this text and mode.
fn write_token(world: &World, text: &str, mode: u32) -> Result<PathBuf> {
    let path = world.dir("tokens", WHO)?.join("token");
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
    Ok(path)
}

fn open_token(world: &World) -> Result<()> {
    let port = over::serve(world, WHO)?;
    let path = write_token(world, &fs::read_to_string(over::token(world, WHO))?, 0o644)?;
    let option = format!("--token={}", path.display());
    cannot_mount(world, &format!("nigh://127.0.0.1:{port}/all"), &[&option], &[&text(&path), "chmod 600"])
}

fn another_token(world: &World) -> Result<()> {
    let port = over::serve(world, WHO)?;
    // A token with equal length and digits, but another value.
    let other: String = fs::read_to_string(over::token(world, WHO))?.chars().rev().collect();
    let path = write_token(world, &format!("{}\n", other.trim()), 0o600)?;
    let option = format!("--token={}", path.display());
    cannot_mount(world, &format!("nigh://127.0.0.1:{port}/all"), &[&option], &["token"])
}

/// The socket directory of a server that is not the user's own.
fn other_run(world: &World) -> Result<PathBuf> {
    let dir = world.dir("other-run", WHO)?;
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700))?;
    Ok(dir)
}

/// Two servers with different keys, one after the other on one port.
fn changed_key(world: &World) -> Result<()> {
    let port = over::free_port()?;
    let source = world.dir("source", WHO)?;
    let token = world.dir("tokens", WHO)?.join("token");
    let serve = |state: &str| {
        let mut command = world.command(world.nigh(), WHO);
        command.env("NIGH_STATE_DIR", world.dir(state, WHO)?).env("NIGH_RUNTIME_DIR", other_run(world)?);
        command.arg("serve").arg("--export").arg(format!("all={}", source.display()));
        command.args(["--listen", &format!("tcp://127.0.0.1:{port}"), "--token"]).arg(&token);
        Serving::start(world, command, port)
    };
    let (address, option) = (format!("nigh://127.0.0.1:{port}/all"), format!("--token={}", token.display()));
    let first = serve("state-1")?;
    let point = text(&world.dir("mnt", WHO)?);
    let mounted = super::nigh(world, WHO, &["mount", &address, &point, &option])?;
    ensure!(mounted.ok(), "{}", mounted.tail(3));
    let umount = super::nigh(world, WHO, &["umount", &point])?;
    ensure!(umount.ok(), "{}", umount.tail(3));
    drop(first);
    let _second = serve("state-2")?;
    cannot_mount(world, &address, &[&option], &["key", "known_servers", &port.to_string()])
}

fn unknown_export_by_unix(world: &World) -> Result<()> {
    over::serve(world, WHO)?;
    let source = format!("unix://{}:no-such-export", over::socket(world, WHO).display());
    cannot_mount(world, &source, &[], &["no-such-export"])
}

fn no_socket(world: &World) -> Result<()> {
    let socket = text(&world.root.join("no-such.sock"));
    cannot_mount(world, &format!("unix://{socket}:all"), &[], &[&socket])
}

/// A server that refuses each hello, as one of a later version does (docs/protocol.md, "A session"). It listens until
/// dropped.
struct Later {
    socket: PathBuf,
    over: Arc<AtomicBool>,
}

const TOO_OLD: &str = "the client speaks versions 3 to 3 of the nigh protocol, the server 9 to 9: update nigh on the client's machine";

impl Later {
    fn listen(socket: &Path) -> Result<Later> {
        let _ = fs::remove_file(socket);
        let listener = UnixListener::bind(socket)?;
        let over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&over);
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                let refused = Refused { errno: Errno::PROTO, message: TOO_OLD.to_owned() };
                let mut hello = [0; 4096];
                if matches!(stream.read(&mut hello), Ok(1..)) {
                    let _ = stream.write_all(&Message::Refused(refused).encode());
                }
            }
        });
        Ok(Later { socket: socket.to_owned(), over })
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        let _ = std::os::unix::net::UnixStream::connect(&self.socket);
        let _ = fs::remove_file(&self.socket);
    }
}

fn another_version(world: &World) -> Result<()> {
    let socket = world.root.join("later.sock");
    let _later = Later::listen(&socket)?;
    cannot_mount(world, &format!("unix://{}:all", socket.display()), &[], &[TOO_OLD])
}

/// The mount reports it in its status and keeps trying; it continues when the server has the old version again.
fn another_version_later(world: &World) -> Result<()> {
    over::serve(world, WHO)?;
    let link = || {
        let xtask = world.xtask();
        Emulator::start(&xtask, &world.root, &over::socket(world, WHO), "1ms", "1Gbit")
    };
    let first = link()?;
    // The path stays, whichever server listens there.
    let socket = world.root.join("changing.sock");
    let lead_to = |target: &Path| -> Result<()> {
        let _ = fs::remove_file(&socket);
        Ok(std::os::unix::fs::symlink(target, &socket)?)
    };
    lead_to(&first.socket)?;
    let (source, point) = (world.dir("source", WHO)?, world.dir("mnt", WHO)?);
    fs::write(source.join("file"), b"here")?;
    let mut how = MountParams::new(WHO);
    how.over = Some((LinkKind::Local, None));
    let address = PathBuf::from(format!("unix://{}:all/source", socket.display()));
    let mount = Mount::new(world, &address, &point, &how)?;
    ensure!(fs::read(point.join("file"))? == b"here", "before");
    let later = Later::listen(&world.root.join("later.sock"))?;
    lead_to(&later.socket)?;
    drop(first);
    let problem = |mount: &Mount<'_>| -> Result<String> {
        Ok(mount.status()?["remote"]["problem"].as_str().unwrap_or_default().to_owned())
    };
    let said = wait::holds(Duration::from_secs(10), || Ok(problem(&mount)? == TOO_OLD))?;
    ensure!(said, "nigh status says {:?}", problem(&mount)?);
    let page = super::nigh(world, WHO, &["status", &text(&point)])?;
    ensure!(page.said.contains(TOO_OLD), "the page does not say it: {}", page.said);
    ensure!(mount.said().contains(TOO_OLD), "the log does not say it: {}", mount.said());
    let second = link()?;
    lead_to(&second.socket)?;
    drop(later);
    fs::write(point.join("after"), b"")?;
    ensure!(source.join("after").exists(), "what was written after is not there");
    ensure!(mount.status()?["remote"]["problem"].is_null(), "there is a problem still: {}", problem(&mount)?);
    mount.unmount()
}

/// A server with a full disk cannot record sessions, so it accepts none.
fn full_disk(world: &World) -> Result<()> {
    let (state, run) = (world.dir("full-state", WHO)?, other_run(world)?);
    process::output(Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "nigh-test"]).arg(&state))?;
    let port = over::free_port()?;
    let socket = world.root.join("full.sock");
    let token = world.dir("tokens", WHO)?.join("token");
    let mut command = world.command(world.nigh(), WHO);
    command.env("NIGH_STATE_DIR", &state).env("NIGH_RUNTIME_DIR", run);
    command.arg("serve").arg("--export").arg(format!("all={}", world.dir("source", WHO)?.display()));
    command.args(["--listen", &format!("unix://{}", socket.display())]);
    command.args(["--listen", &format!("tcp://127.0.0.1:{port}"), "--token"]).arg(&token);
    let result = (|| {
        let _serving = Serving::start(world, command, port)?;
        let mut fill = fs::File::create(state.join("fill")).context("filling the disk")?;
        while fill.write_all(&[1; 512]).is_ok() {}
        cannot_mount(
            world,
            &format!("unix://{}:all", socket.display()),
            &[],
            &[&text(&state), "No space left"],
        )
    })();
    process::output(Command::new("umount").arg("--lazy").arg(&state))?;
    result
}
