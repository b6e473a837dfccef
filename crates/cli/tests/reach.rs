//! The installed program at both ends: exports reached over each transport, and the rights of each peer.

mod common;

use common::{Client, NIGH, UNPRIVILEGED_UID, as_user, needs_root};
use nigh_link::ssh::Prompting;
use nigh_link::tcp::{Target, Trust};
use nigh_link::{Kind, Link, ssh, unix};
use nigh_remote::SessionParams;
use nigh_types::*;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Returns a port outside the range of ephemeral ports, and each port once: other tests connect and listen
/// concurrently.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let mut ports = std::iter::repeat_with(|| NEXT.fetch_add(1, Ordering::Relaxed)).take(5_000);
    ports.find(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a free port")
}

/// A server's directories, and the server process once it runs.
struct TestServer {
    dir: TempDir,
    port: u16,
    server: Option<Child>,
}

impl TestServer {
    fn new() -> TestServer {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir_all(dir.path().join("x/sub")).unwrap();
        fs::set_permissions(dir.path().join("x"), fs::Permissions::from_mode(0o777)).unwrap();
        TestServer { dir, port: free_port(), server: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn nigh(&self, words: &[&str]) -> Command {
        let mut command = Command::new(NIGH);
        command.args(words).stdin(Stdio::null());
        command.env("NIGH_RUNTIME_DIR", self.path("run")).env("NIGH_STATE_DIR", self.path("state"));
        command.env("NIGH_SERVER_IDLE_MS", "300").env_remove("NIGH_LINK").env_remove("NIGH_SSH");
        command
    }

    /// Serves `x` over TCP.
    fn serve(mut self, more: &[&str]) -> TestServer {
        let (export, listen) =
            (format!("{}", self.path("x").display()), format!("tcp://127.0.0.1:{}", self.port));
        let mut words = vec!["serve", "--export", &export, "--listen", &listen];
        words.extend(more);
        let log = fs::File::create(self.path("log")).unwrap();
        self.server = Some(self.nigh(&words).stderr(log).spawn().unwrap());
        let give_up = Instant::now() + Duration::from_secs(20);
        let sockets: Vec<&str> = words.iter().filter_map(|word| word.strip_prefix("unix://")).collect();
        let listens = || {
            std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok()
                && sockets.iter().all(|socket| UnixStream::connect(socket).is_ok())
        };
        while !listens() {
            assert!(Instant::now() < give_up, "{}", fs::read_to_string(self.path("log")).unwrap());
            std::thread::sleep(Duration::from_millis(10));
        }
        self
    }

    fn target(&self) -> Target {
        let token = self.path("token");
        Target {
            host: "127.0.0.1".into(),
            port: self.port,
            trust: Trust::Known(self.path("known_servers")),
            token: token.exists().then_some(token),
        }
    }

    /// Runs a command that must fail; returns its exit code and its one line of output.
    fn refused(&self, words: &[&str]) -> (Option<i32>, String) {
        let output = self.nigh(words).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said.lines().count(), 1, "{said}");
        (output.status.code(), said)
    }

    fn owner(&self, name: &str) -> (u32, u32) {
        let found = fs::metadata(self.path("x").join(name)).unwrap();
        (found.uid(), found.gid())
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

#[test]
fn export_is_attached_by_name_and_other_paths_are_refused() {
    let house = TestServer::new();
    let path = house.path("token").display().to_string();
    let house = house.serve(&["--token", &path]);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let link = house.target().connect().unwrap();
    assert_eq!(link.kind(), Kind::Tls);
    let (mut client, session) = Client::attach(link, "x").unwrap();
    assert!(client.must_renew());
    assert_eq!(session.root.ino, fs::metadata(house.path("x")).unwrap().ino());
    let attach =
        |what: &str| Client::attach(house.target().connect().unwrap(), what).map(|(_, s)| s.root.ino);
    assert_eq!(attach(""), Ok(session.root.ino));
    assert_eq!(attach("x/sub"), Ok(fs::metadata(house.path("x/sub")).unwrap().ino()));
    for (asked, says) in
        [("y", "no export is called y; there are x"), ("/etc", "only exports"), ("x/..", "x/..")]
    {
        let why = attach(asked).unwrap_err();
        assert!(why.contains(says), "{asked}: {why}");
    }
    let mount = house.path("mnt").display().to_string();
    fs::create_dir(&mount).unwrap();
    let source = format!("nigh://127.0.0.1:{}/nope", house.port);
    let (code, said) = house.refused(&["mount", &source, &mount, "--token", &path]);
    assert!(code == Some(1) && said.contains("no export is called nope"), "{said}");
    let (code, said) = house.refused(&["mount", &source, &mount]);
    assert!(code == Some(1) && said.contains("--token FILE"), "{said}");
    let (code, said) =
        house.refused(&["serve", "--export", "/", "--listen", "tcp://127.0.0.1:1", "--token", &path]);
    assert!(code == Some(1) && said.contains("--export /: give it a name"), "{said}");
}

#[test]
fn calls_run_as_the_tokens_user_for_any_claimed_uid() {
    if !needs_root("calls_run_as_the_tokens_user_for_any_claimed_uid") {
        return;
    }
    let house = TestServer::new();
    let path = house.path("token");
    fs::write(&path, format!("{}\nuser {UNPRIVILEGED_UID}\n", "5a".repeat(32))).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let path = path.display().to_string();
    let house = house.serve(&["--token", &path]);
    let (mut client, session) = Client::attach(house.target().connect().unwrap(), "x").unwrap();
    for (name, uid) in [("as-root", 0), ("as-another", 1000), ("as-itself", UNPRIVILEGED_UID)] {
        client.make(session.root, name, uid, &[0]).unwrap();
        assert_eq!(house.owner(name), (UNPRIVILEGED_UID, UNPRIVILEGED_UID), "{name}");
    }
    fs::set_permissions(house.path("x"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(client.make(session.root, "closed", 0, &[0]).unwrap_err(), Errno::ACCES);
}

#[test]
fn authenticated_connections_without_hello_do_not_block_other_clients() {
    let house = TestServer::new();
    let token = house.path("token").display().to_string();
    let house = house.serve(&["--token", &token]);
    let silent: Vec<Link> = (0..150).map(|_| house.target().connect().unwrap()).collect();
    let (mut client, session) = Client::attach(house.target().connect().unwrap(), "x").unwrap();
    let stands = |link: &&Link| {
        link.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        link.read(&mut [0; 16]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    let give_up = Instant::now() + Duration::from_secs(10);
    while silent.iter().filter(stands).count() > 64 {
        assert!(Instant::now() < give_up, "{} are kept", silent.iter().filter(stands).count());
    }
    client.make(session.root, "made", 0, &[0]).unwrap();
}

#[test]
fn trusted_client_claims_any_uid_except_root() {
    if !needs_root("trusted_client_claims_any_uid_except_root") {
        return;
    }
    let house = TestServer::new().serve(&["--trust-client-ids", "--plaintext"]);
    let target = Target { trust: Trust::Plaintext, ..house.target() };
    let (mut client, session) = Client::attach(target.connect().unwrap(), "x").unwrap();
    client.make(session.root, "as-root", 0, &[0]).unwrap();
    client.make(session.root, "as-user", UNPRIVILEGED_UID, &[]).unwrap();
    assert_eq!(house.owner("as-root"), (65534, 65534));
    assert_eq!(house.owner("as-user"), (UNPRIVILEGED_UID, UNPRIVILEGED_UID));
    drop(house);
    let house = TestServer::new().serve(&["--trust-client-ids", "--plaintext", "--squash", "none"]);
    let target = Target { trust: Trust::Plaintext, ..house.target() };
    let (mut client, session) = Client::attach(target.connect().unwrap(), "x").unwrap();
    client.make(session.root, "as-root", 0, &[0]).unwrap();
    assert_eq!(house.owner("as-root"), (0, 0));
}

fn connect_as(uid: u32, socket: &Path) -> Link {
    let socket = socket.to_owned();
    as_user(uid, move || unix::connect(&socket).unwrap())
}

#[test]
fn local_users_act_as_themselves_on_a_unix_socket() {
    if !needs_root("local_users_act_as_themselves_on_a_unix_socket") {
        return;
    }
    let house = TestServer::new();
    let socket = house.path("s.sock");
    let listen = format!("unix://{}", socket.display());
    let house = house.serve(&["--listen", &listen, "--trust-client-ids", "--plaintext"]);
    let (mut client, session) = Client::attach(connect_as(UNPRIVILEGED_UID, &socket), "x").unwrap();
    client.make(session.root, "as-root", 0, &[0]).unwrap();
    assert_eq!(house.owner("as-root"), (UNPRIVILEGED_UID, UNPRIVILEGED_UID));
    assert!(Client::attach(connect_as(UNPRIVILEGED_UID, &socket), "/etc").is_err());
    client.leave();
    let (mut client, session) = Client::attach(unix::connect(&socket).unwrap(), "x").unwrap();
    assert!(client.must_renew(), "the clients of every transport have leases");
    client.make(session.root, "by-root", 77, &[]).unwrap();
    assert_eq!(house.owner("by-root"), (77, 77));
}

/// Claims to be root several times; every call must run as `uid`, and the log must have one line about it.
fn check_forged_root(
    house: &TestServer,
    log: &str,
    (mut client, session): (Client, SessionParams),
    uid: u32,
) {
    for nth in 0..3 {
        let name = format!("{}-{nth}", log.replace('/', "-"));
        client.make(session.root, &name, 0, &[0]).unwrap();
        assert_eq!(house.owner(&name).0, uid);
    }
    client.leave();
    let give_up = Instant::now() + Duration::from_secs(20);
    let read = || fs::read_to_string(house.path(log)).unwrap();
    while !read().lines().any(|line| line.contains("replaced_claims=3")) {
        assert!(Instant::now() < give_up, "{}", read());
        std::thread::sleep(Duration::from_millis(10));
    }
    let told = read();
    let told: Vec<_> = told.lines().filter(|line| line.contains("event=\"claimed\"")).collect();
    let says = |part: &str| told.iter().all(|line| line.contains(part));
    assert!(told.len() == 1 && says("uid=") && says("rule="), "{told:#?}");
}

#[test]
fn forged_uid_0_is_logged_once_over_each_transport() {
    if !needs_root("forged_uid_0_is_logged_once_over_each_transport") {
        return;
    }
    for plaintext in [false, true] {
        let house = TestServer::new();
        let path = house.path("token");
        fs::write(&path, format!("{}\nuser {UNPRIVILEGED_UID}\n", "5a".repeat(32))).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let path = path.display().to_string();
        let words = ["--token", &path, "--plaintext"];
        let house = house.serve(if plaintext { &words } else { &words[..2] });
        let trust = if plaintext { Trust::Plaintext } else { house.target().trust };
        let link = Target { trust, ..house.target() }.connect().unwrap();
        assert_eq!(link.kind(), if plaintext { Kind::Tcp } else { Kind::Tls });
        check_forged_root(&house, "log", Client::attach(link, "x").unwrap(), UNPRIVILEGED_UID);
    }
    let house = TestServer::new();
    let socket = house.path("s.sock");
    let listen = format!("unix://{}", socket.display());
    let house = house.serve(&["--listen", &listen, "--trust-client-ids", "--plaintext"]);
    check_forged_root(
        &house,
        "log",
        Client::attach(connect_as(UNPRIVILEGED_UID, &socket), "x").unwrap(),
        UNPRIVILEGED_UID,
    );
}

/// Starts the relay that `ssh` would start, as an ordinary user; returns the process and its stream.
fn relay_as(house: &TestServer, uid: u32, run: &str, state: &str) -> (Child, UnixStream) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let mut command = house.nigh(&["serve", "--listen", "stdio"]);
    command.env("NIGH_RUNTIME_DIR", house.path(run)).env("NIGH_STATE_DIR", house.path(state));
    command.stdin(OwnedFd::from(ours.try_clone().unwrap())).stdout(OwnedFd::from(ours));
    let said = fs::File::create(house.path("relay.log")).unwrap();
    (command.stderr(said).uid(uid).gid(uid).current_dir("/").spawn().unwrap(), theirs)
}

#[test]
fn relay_of_an_ordinary_user_gives_only_that_users_rights() {
    if !needs_root("relay_of_an_ordinary_user_gives_only_that_users_rights") {
        return;
    }
    let house = TestServer::new();
    for dir in ["far-run", "far-state"] {
        fs::create_dir(house.path(dir)).unwrap();
        std::os::unix::fs::chown(house.path(dir), Some(UNPRIVILEGED_UID), Some(UNPRIVILEGED_UID)).unwrap();
        fs::set_permissions(house.path(dir), fs::Permissions::from_mode(0o700)).unwrap();
    }
    let house = house.serve(&["--trust-client-ids", "--plaintext"]);
    // The relay leads to that user's own server.
    let (mut relay, mut stream) = relay_as(&house, UNPRIVILEGED_UID, "far-run", "far-state");
    let mut banner = vec![0; ssh::READY.len()];
    stream.read_exact(&mut banner).unwrap();
    assert_eq!(banner, ssh::READY);
    let dir = house.path("x").display().to_string();
    check_forged_root(
        &house,
        "far-run/serve.log",
        Client::attach(stream.into(), &dir).unwrap(),
        UNPRIVILEGED_UID,
    );
    relay.wait().unwrap();
    // It does not lead to root's server, even if root's socket is open to all users.
    for (name, mode) in [("run", 0o755), ("run/serve.sock", 0o666)] {
        fs::set_permissions(house.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let (mut relay, mut stream) = relay_as(&house, UNPRIVILEGED_UID, "run", "state");
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    assert!(!relay.wait().unwrap().success() && said.is_empty(), "{said:?}");
    let why = fs::read_to_string(house.path("relay.log")).unwrap();
    assert_eq!(why.lines().count(), 1, "{why}");
    let link = connect_as(UNPRIVILEGED_UID, &house.path("run/serve.sock"));
    link.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert!(!link.read(&mut [0; 64]).is_ok_and(|count| count > 0));
}

/// A stand-in for ssh that runs the command on this machine, with nigh in the path or without.
fn fake_ssh(house: &TestServer, path: &str) -> PathBuf {
    let script = house.path("ssh");
    let text = format!(
        "#!/bin/sh\nexport PATH='{path}' HOME='{}' NIGH_RUNTIME_DIR='{}' NIGH_STATE_DIR='{}' NIGH_SERVER_IDLE_MS=300\n\
         while [ \"$1\" != -- ]; do shift; done\n[ \"$2\" = anna@host ] || {{ echo \"no route to $2\" >&2; exit 255; }}\n\
         echo welcome\neval \"$3\"\n",
        house.path("home").display(),
        house.path("far-run").display(),
        house.path("far-state").display(),
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    script
}

#[test]
fn ssh_relay_leads_to_the_login_users_server() {
    let house = TestServer::new();
    let bin = Path::new(NIGH).parent().unwrap().display().to_string();
    let command = fake_ssh(&house, &format!("{bin}:/usr/bin:/bin")).display().to_string();
    let target = ssh::Target { destination: "anna@host".into(), command: Some(command), installed: false };
    let dir = house.path("x").display().to_string();
    let mut clients: Vec<_> =
        (0..2).map(|_| Client::attach(target.connect(Prompting::Never).unwrap(), &dir).unwrap()).collect();
    let ino = fs::metadata(house.path("x")).unwrap().ino();
    assert!(clients.iter().all(|(_, session)| session.root.ino == ino));
    assert!(house.path("far-run/serve.sock").exists());
    let (client, session) = &mut clients[0];
    assert!(client.must_renew());
    let own = rustix::process::geteuid().as_raw();
    client.make(session.root, "made", own, &[]).unwrap();
    assert_eq!(house.owner("made").0, own);
    // The session of a client that sends no close would live until its lease expires.
    clients.into_iter().for_each(|(client, _)| client.leave());
    let give_up = Instant::now() + Duration::from_secs(20);
    while house.path("far-run/serve.sock").exists() {
        assert!(Instant::now() < give_up, "the relays do not end, or not their sessions");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A pseudo-terminal: the user's end and the program's end.
fn terminal() -> (fs::File, OwnedFd) {
    let (mut person, mut program) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: two integers to be filled in; a terminal of ordinary settings and size.
    let made = unsafe { libc::openpty(&raw mut person, &raw mut program, none, none.cast(), none.cast()) };
    assert_eq!(made, 0);
    // SAFETY: both were just opened, and no other code owns them.
    unsafe { (fs::File::from_raw_fd(person), OwnedFd::from_raw_fd(program)) }
}

/// Gives the command this controlling terminal and the default action of SIGINT, which a shell's background jobs
/// ignore.
fn at_terminal(command: &mut Command, program: &OwnedFd) {
    let number = program.as_raw_fd();
    // SAFETY: all are safe between fork and exec.
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            if libc::ioctl(number, libc::TIOCSCTTY, 0) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

#[test]
fn ssh_may_prompt_at_the_terminal_for_a_background_mount() {
    let house = TestServer::new();
    let ssh = house.path("ssh");
    fs::write(&ssh, "#!/bin/sh\nread word </dev/tty\necho \"heard $word\" >&2\nexit 255\n").unwrap();
    fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(house.path("mnt")).unwrap();
    let mut command = house.nigh(&["mount", "anna@host:/srv"]);
    command.arg(house.path("mnt")).arg("--ssh").arg(&ssh).stderr(Stdio::piped());
    let (mut person, program) = terminal();
    at_terminal(&mut command, &program);
    let child = command.spawn().unwrap();
    person.write_all(b"secret\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), said.as_str()), (Some(1), "nigh: ssh anna@host: heard secret\n"));
}

/// The daemon gets the same arguments: it must get as far as the unreachable machine.
#[test]
fn arguments_after_two_dashes_are_no_options_for_a_background_mount() {
    let house = TestServer::new();
    let ssh = fake_ssh(&house, "/usr/bin:/bin").display().to_string();
    let mount = house.path("mnt").display().to_string();
    fs::create_dir(&mount).unwrap();
    for words in [
        ["mount", "--ssh", &ssh, "--", "ben@other:/srv", &mount],
        ["mount", "--ssh", &ssh, "ben@other:/srv", "--", &mount],
    ] {
        let (code, said) = house.refused(&words);
        assert!(code == Some(1) && said.contains("no route to ben@other"), "{said}");
    }
}

/// Ctrl-C at ssh's prompt ends mount, daemon and ssh.
#[test]
fn interrupt_at_the_terminal_ends_ssh_during_its_prompt() {
    let house = TestServer::new();
    let ssh = house.path("ssh");
    let text = format!(
        "#!/bin/sh\necho $$ > '{0}.new'; mv '{0}.new' '{0}'\nread word </dev/tty\n",
        house.path("pid").display()
    );
    fs::write(&ssh, text).unwrap();
    fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(house.path("mnt")).unwrap();
    let mut command = house.nigh(&["mount", "anna@host:/srv"]);
    command.arg(house.path("mnt")).arg("--ssh").arg(&ssh).stderr(Stdio::null());
    let (mut person, program) = terminal();
    at_terminal(&mut command, &program);
    let mut child = command.spawn().unwrap();
    let give_up = Instant::now() + Duration::from_secs(60);
    let wait = |what: &str| {
        assert!(Instant::now() < give_up, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    };
    let pid = loop {
        match fs::read_to_string(house.path("pid")) {
            Ok(pid) => break pid.trim().to_owned(),
            Err(_) => wait("ssh was not started"),
        }
    };
    person.write_all(&[3]).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGINT));
    let ended = || fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "));
    while !ended() {
        wait("ssh goes on asking");
    }
}

#[test]
fn errors_of_remote_sources_are_one_line() {
    let house = TestServer::new();
    let command = fake_ssh(&house, "/usr/bin:/bin").display().to_string();
    let mount = house.path("mnt").display().to_string();
    fs::create_dir(&mount).unwrap();
    let (code, said) = house.refused(&["mount", "anna@host:/srv", &mount, "--ssh", &command]);
    assert!(code == Some(1) && said.contains("--install-server"), "{said}");
    let (code, said) = house.refused(&["mount", "ben@other:/srv", &mount, "--ssh", &command]);
    assert!(code == Some(1) && said.contains("no route to ben@other"), "{said}");
    let (code, said) = house.refused(&["mount", "anna@host:srv", &mount]);
    assert!(code == Some(2) && said.contains("anna@host:/DIR"), "{said}");
    let (code, said) = house.refused(&["serve", "--export", "/tmp", "--listen", "tcp://127.0.0.1:0"]);
    assert!(code == Some(2) && said.contains("--token"), "{said}");
    let (code, said) = house.refused(&["serve", "--listen", "ftp://x"]);
    assert!(code == Some(2) && said.contains("ftp://x"), "{said}");
}
