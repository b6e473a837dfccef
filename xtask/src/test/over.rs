//! The kinds of links between mounted tests and their servers, and the servers at the other ends.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use super::mount::MountParams;
use super::world::{As, TESTER, World};
use crate::wait;
use crate::{process, root};

/// How a mount reaches its server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, clap::ValueEnum)]
pub enum LinkKind {
    /// `nigh mount DIR`: the user's own server.
    Local,
    /// `unix:///SOCKET`.
    Unix,
    /// `nigh://HOST`, by TLS.
    Nigh,
    /// `USER@HOST:/DIR`, by a real sshd.
    Ssh,
    /// `9p://HOST`, by a real diod.
    Ninep,
}

impl LinkKind {
    pub const LINKS: [LinkKind; 3] = [LinkKind::Unix, LinkKind::Nigh, LinkKind::Ssh];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            LinkKind::Local => "local",
            LinkKind::Unix => "unix://",
            LinkKind::Nigh => "nigh://",
            LinkKind::Ssh => "ssh",
            LinkKind::Ninep => "9p://",
        }
    }
}

/// A server process; ended when dropped.
pub struct Serving {
    pub child: Child,
    /// Its TCP port, if it has one.
    pub port: u16,
    log: PathBuf,
}

impl Drop for Serving {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            // Its process id may be another process's by now.
            return;
        }
        process::signal(self.child.id(), libc::SIGTERM);
        process::end(&mut self.child, Duration::from_secs(2));
    }
}

impl Serving {
    /// Waits until it listens on `port`.
    pub fn start(world: &World, mut command: Command, port: u16) -> Result<Serving> {
        let log = world.log();
        let file = File::create(&log)?;
        // diod may crash at its end, and its core file is removed with the test directory.
        command.current_dir(&world.root);
        command.process_group(0).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().context("starting a server")?;
        let mut serving = Serving { child, port, log };
        let listens = || Ok(TcpStream::connect(("127.0.0.1", port)).is_ok());
        let ready = wait::ready(&mut serving.child, Duration::from_secs(20), listens);
        ready.with_context(|| format!("a server: {}", serving.said()))?;
        Ok(serving)
    }

    /// Returns its last output.
    #[must_use]
    pub fn said(&self) -> String {
        process::last_lines(&self.log)
    }
}

/// Returns a port without a listener.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Returns the SOURCE for `nigh mount` that leads to the directory `source` over a link, and the mount options; starts
/// the server if it does not run. With `port` the link passes through that port (an emulator in front of the server).
pub fn reach(
    world: &World,
    over: LinkKind,
    source: &Path,
    how: &MountParams,
    port: Option<u16>,
) -> Result<(String, MountParams)> {
    let how = how.clone();
    match over {
        LinkKind::Local => Ok((source.display().to_string(), how)),
        LinkKind::Unix => {
            serve(world, how.who)?;
            let socket = socket(world, how.who);
            Ok((format!("unix://{}:all/{}", socket.display(), below(world, source)?), how))
        }
        LinkKind::Nigh => {
            let port = port.map_or_else(|| serve(world, how.who), Ok)?;
            let token = format!("--token={}", token(world, how.who).display());
            // Both sides have the same users.
            let how = how.with(&token).with("--idmap=none");
            Ok((format!("nigh://127.0.0.1:{port}/all/{}", below(world, source)?), how))
        }
        LinkKind::Ssh => {
            let port = port.map_or_else(|| ssh_server(world), Ok)?;
            let dir = ssh_dir(world);
            let ssh = format!(
                "ssh -F none -p {port} -i {0}/key -oIdentitiesOnly=yes -oUserKnownHostsFile={0}/known \
                 -oHostKeyAlias=nigh-test -oStrictHostKeyChecking=yes",
                dir.join(how.who.name()).display()
            );
            let login = if how.who.name() == "root" { "root".into() } else { login(how.who)? };
            let how = how.set("NIGH_SSH", &ssh).with("--idmap=none");
            Ok((format!("{login}@127.0.0.1:{}", source.display()), how))
        }
        LinkKind::Ninep => {
            let port = port.map_or_else(|| diod(world), Ok)?;
            Ok((format!("9p://127.0.0.1:{port}{}", source.display()), how))
        }
    }
}

/// Returns a directory's path below the test directory, which is the server's export.
fn below(world: &World, source: &Path) -> Result<String> {
    let rest =
        source.strip_prefix(&world.root).context("only what lies in the test's directory is served")?;
    Ok(rest.display().to_string())
}

fn home(world: &World, who: As) -> PathBuf {
    world.root.join(match who {
        As::Us => "home",
        As::Tester { .. } => "home-tester",
    })
}

/// Returns the socket of a user's `nigh serve`.
pub fn socket(world: &World, who: As) -> PathBuf {
    home(world, who).join("served.sock")
}

/// Returns the token file of a user's `nigh serve`.
pub fn token(world: &World, who: As) -> PathBuf {
    home(world, who).join("token")
}

/// Returns the port of a user's `nigh serve`.
pub fn serve(world: &World, who: As) -> Result<u16> {
    let mut servers = world.servers.lock().map_err(|_| anyhow::anyhow!("a test died"))?;
    let name = format!("serve {}", who.name());
    if let Some(serving) = servers.get_mut(&name) {
        if serving.child.try_wait()?.is_none() {
            return Ok(serving.port);
        }
        servers.remove(&name);
    }
    end_own_server(world, who);
    let port = free_port()?;
    let mut command = world.command(world.nigh(), who);
    command.arg("serve").arg("--export").arg(format!("all={}", world.root.display()));
    command.args(["--listen", &format!("unix://{}", socket(world, who).display())]);
    command.args(["--listen", &format!("tcp://127.0.0.1:{port}"), "--trust-client-ids", "--squash", "none"]);
    command.arg("--token").arg(token(world, who));
    servers.insert(name, Serving::start(world, command, port)?);
    Ok(port)
}

/// Returns the port of a diod that exports the test directory, without authentication, with ids as they come.
pub fn diod(world: &World) -> Result<u16> {
    let mut servers = world.servers.lock().map_err(|_| anyhow::anyhow!("a test died"))?;
    if let Some(serving) = servers.get("diod") {
        return Ok(serving.port);
    }
    let port = free_port()?;
    servers.insert("diod".to_owned(), diod_on(world, &world.root, port)?);
    Ok(port)
}

/// Starts a diod that exports a directory on a port.
pub fn diod_on(world: &World, export: &Path, port: u16) -> Result<Serving> {
    let mut command = Command::new("/usr/sbin/diod");
    command.args(["-f", "-n", "-N", "-l", &format!("127.0.0.1:{port}"), "-L", "stderr", "-e"]);
    command.arg(export);
    Serving::start(world, command, port)
}

/// A user has one server. The server of earlier mounts stays for a minute after the last of them.
fn end_own_server(world: &World, who: As) {
    let uid = match who {
        As::Us => unsafe { libc::geteuid() },
        As::Tester { uid, .. } => uid,
    };
    let is_it = |pid: &u32| {
        let dir = PathBuf::from(format!("/proc/{pid}"));
        let said = fs::read(dir.join("cmdline")).unwrap_or_default();
        fs::metadata(&dir).is_ok_and(|meta| meta.uid() == uid)
            && fs::read_link(dir.join("exe")).is_ok_and(|exe| exe == world.nigh())
            && said.split(|byte| *byte == 0).skip(1).take(3).eq([b"serve".as_slice(), b"--listen", b"user"])
    };
    let Ok(entries) = fs::read_dir("/proc") else { return };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
    for pid in pids.filter(is_it) {
        process::signal(pid, libc::SIGTERM);
        let _ = wait::holds(Duration::from_secs(5), || Ok(!Path::new(&format!("/proc/{pid}")).exists()));
    }
}

fn ssh_dir(world: &World) -> PathBuf {
    world.root.join("ssh")
}

fn login(who: As) -> Result<String> {
    match who {
        As::Tester { .. } => Ok(TESTER.to_owned()),
        As::Us => Ok(process::output(Command::new("id").arg("-un"))?.trim().to_owned()),
    }
}

/// Returns the port of the tests' own sshd.
pub fn ssh_server(world: &World) -> Result<u16> {
    let mut servers = world.servers.lock().map_err(|_| anyhow::anyhow!("a test died"))?;
    if let Some(serving) = servers.get("sshd") {
        return Ok(serving.port);
    }
    // A copy, so that it is found, and ended, by its path.
    let sshd = world.root.join("bin/sshd");
    fs::copy("/usr/sbin/sshd", &sshd).context("sshd is missing: install the package openssh-server")?;
    let port = free_port()?;
    configure(world, port)?;
    let mut command = world.command(&sshd, As::Us);
    command.args(["-D", "-e", "-f"]).arg(ssh_dir(world).join("config"));
    servers.insert("sshd".to_owned(), Serving::start(world, command, port)?);
    Ok(port)
}

fn configure(world: &World, port: u16) -> Result<()> {
    let dir = world.dir("ssh", As::Us)?;
    let keygen = |path: &Path| {
        let path = path.display().to_string();
        process::output(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", &path]))
    };
    keygen(&dir.join("host"))?;
    let host = fs::read_to_string(dir.join("host.pub"))?;
    let mut config = format!(
        "Port {port}\nListenAddress 127.0.0.1\nHostKey {0}/host\nPidFile none\nUsePAM no\nStrictModes no\n\
         PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n\
         AuthorizedKeysFile {0}/authorized-%u\nMaxStartups 100\nMaxSessions 100\n",
        dir.display()
    );
    for who in world.users() {
        let own = world.dir(&format!("ssh/{}", who.name()), who)?;
        keygen(&own.join("key"))?;
        fs::write(own.join("known"), format!("nigh-test {host}"))?;
        let login = login(who)?;
        fs::copy(own.join("key.pub"), dir.join(format!("authorized-{login}")))?;
        world.give_all(&own, who)?;
        config +=
            &format!("Match User {login}\nSetEnv PATH={}:/usr/bin:/bin", world.root.join("bin").display());
        if who != As::Us || !root::is_root() {
            let home = home(world, who);
            let (run, state) = (home.join("run"), home.join("state"));
            config += &format!(" XDG_RUNTIME_DIR={} XDG_STATE_HOME={}", run.display(), state.display());
        }
        config.push('\n');
    }
    fs::write(dir.join("config"), config)?;
    if root::is_root() {
        // The privilege separation directory of sshd.
        fs::create_dir_all("/run/sshd")?;
        fs::set_permissions("/run/sshd", fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}
