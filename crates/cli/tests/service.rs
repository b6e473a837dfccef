//! `nigh serve` as a service: socket activation, status queries and shutdown.

mod common;

use common::{Client, NIGH, UNPRIVILEGED_UID, as_user, needs_root};
use nigh_link::unix;
use nigh_remote::Event;
use nigh_types::*;
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const SECRET: &str = "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a";

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < give_up, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

struct TestServer {
    dir: TempDir,
    server: Option<Child>,
}

impl TestServer {
    fn new() -> TestServer {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir_all(dir.path().join("x/d")).unwrap();
        fs::write(dir.path().join("token"), format!("{SECRET}\n")).unwrap();
        fs::set_permissions(dir.path().join("token"), fs::Permissions::from_mode(0o600)).unwrap();
        TestServer { dir, server: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn nigh(&self, words: &[&str]) -> Command {
        self.with_test_env(Command::new(NIGH), words)
    }

    fn with_test_env(&self, mut command: Command, words: &[&str]) -> Command {
        command.args(words).stdin(Stdio::null());
        command.env("NIGH_RUNTIME_DIR", self.path("run")).env("NIGH_STATE_DIR", self.path("state"));
        for name in ["NIGH_LINK", "NIGH_LOG", "NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID"] {
            command.env_remove(name);
        }
        command
    }

    fn start(&mut self, mut command: Command) {
        let log = fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        self.server = Some(command.stderr(log).spawn().unwrap());
    }

    /// Serves `x` on `s.sock`, which all users may open.
    fn serve(mut self, more: &[&str]) -> TestServer {
        let (export, listen) = (self.text("x"), format!("unix://{}", self.text("s.sock")));
        let words = [&["serve", "--export", &export, "--listen", &listen], more].concat();
        let command = self.nigh(&words);
        self.start(command);
        until("listening", || UnixStream::connect(self.path("s.sock")).is_ok());
        self
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    fn signal(&self) {
        let pid = rustix::process::Pid::from_child(self.server.as_ref().unwrap());
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        let mut server = self.server.take().unwrap();
        let mut ended = None;
        until("ended", || {
            ended = server.try_wait().unwrap();
            ended.is_some()
        });
        ended.unwrap()
    }

    fn status(&self, words: &[&str]) -> Value {
        let output = self.nigh(&[&["status"], words, &["--json"]].concat()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs a command that must fail with exit code 1; returns its one line of output.
    fn refused(&self, mut command: Command) -> String {
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let line = said.lines().filter(|line| line.starts_with("nigh: ")).collect::<Vec<_>>();
        assert_eq!((output.status.code(), line.len()), (Some(1), 1), "{said}");
        line[0].to_owned()
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

/// Returns a holder of the export's directory lease that acknowledges nothing, and a client whose call therefore
/// waits.
fn start_blocked_call(house: &TestServer) -> (Client, Client) {
    let attach = |incarnation| {
        Client::attach_as(unix::connect(&house.path("s.sock")).unwrap(), "x", incarnation).unwrap()
    };
    let ((mut holder, session), (mut waiter, _)) = (attach(11), attach(12));
    holder.send(Call::List { dir: NodeRef::without_hint(session.root) });
    assert!(matches!(holder.next(), Event::Response { .. }));
    let name = Name::new(b"new").unwrap();
    waiter.send(Call::Mkdir { dir: NodeRef::without_hint(session.root), name, mode: 0o700, umask: 0 });
    until("parked", || house.status(&["--server"])["totals"]["calls"]["parked"] == 1);
    (holder, waiter)
}

#[test]
fn sigterm_ends_connections_and_removes_sockets() {
    let mut house = TestServer::new().serve(&[]);
    let (mut client, _) = Client::attach_as(unix::connect(&house.path("s.sock")).unwrap(), "x", 1).unwrap();
    house.signal();
    client.wait_for_the_end();
    assert_eq!(house.wait().code(), Some(0), "{}", house.log());
    assert!(!house.path("s.sock").exists() && !house.path("run/serve.sock").exists());
    let mut house = house.serve(&[]);
    house.signal();
    assert_eq!(house.wait().code(), Some(0));
}

#[test]
fn sigterm_waits_for_accepted_calls_and_second_signal_does_not() {
    let mut house = TestServer::new().serve(&[]);
    let (mut holder, mut waiter) = start_blocked_call(&house);
    house.signal();
    std::thread::sleep(Duration::from_millis(500));
    assert!(house.server.as_mut().unwrap().try_wait().unwrap().is_none(), "it waits for the call");
    // Several grants may block the call.
    let holder = std::thread::spawn(move || holder.wait_for_the_end());
    let answer = waiter.next();
    let done = matches!(&answer, Event::Response { response, .. } if response.result.is_ok());
    assert!(done, "{answer:?} {}", house.log());
    waiter.wait_for_the_end();
    holder.join().unwrap();
    assert_eq!(house.wait().code(), Some(0));
    assert!(house.path("x/new").is_dir());
    fs::remove_dir(house.path("x/new")).unwrap();

    let mut house = house.serve(&[]);
    let (_holder, _waiter) = start_blocked_call(&house);
    house.signal();
    std::thread::sleep(Duration::from_millis(300));
    let again = Instant::now();
    house.signal();
    assert_eq!(house.wait().code(), Some(1));
    assert!(again.elapsed() < Duration::from_secs(2), "{:?}", again.elapsed());
    assert!(!house.path("x/new").exists());
}

/// Passes descriptors as systemd does: from 3 on, with environment variables.
fn activated(house: &TestServer, fds: Vec<OwnedFd>, names: &str, words: &[&str]) -> Command {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "LISTEN_PID=$$ WATCHDOG_PID=$$ exec \"$@\"", "sh", NIGH]);
    let mut command = house.with_test_env(shell, words);
    command.env("LISTEN_FDS", fds.len().to_string()).env("LISTEN_FDNAMES", names);
    // SAFETY: fcntl and dup2 are safe between fork and exec. Passed descriptors are first moved out of the way.
    unsafe {
        command.pre_exec(move || {
            let high: Vec<i32> =
                fds.iter().map(|fd| libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 100)).collect();
            for (at, fd) in (3..).zip(high) {
                if libc::dup2(fd, at) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    command
}

#[test]
fn socket_activated_server_notifies_its_service_manager() {
    let mut house = TestServer::new();
    fs::create_dir(house.path("run")).unwrap();
    fs::set_permissions(house.path("run"), fs::Permissions::from_mode(0o700)).unwrap();
    let manager = UnixDatagram::bind(house.path("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let hear = || {
        let mut buffer = [0; 4096];
        let count = manager.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..count].to_vec()).unwrap()
    };
    let unix = UnixListener::bind(house.path("s.sock")).unwrap();
    let own = UnixListener::bind(house.path("run/serve.sock")).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    let (export, token) = (house.text("x"), house.text("token"));
    let words = ["serve", "--export", &export, "--token", &token];
    // Connections made before the server runs wait in the listener's queue.
    let early = unix::connect(&house.path("s.sock")).unwrap();
    let mut command =
        activated(&house, vec![unix.into(), own.into(), tcp.into()], "nigh.socket:user:tcp", &words);
    command.env("NOTIFY_SOCKET", house.path("notify")).env("WATCHDOG_USEC", "400000");
    house.start(command);
    let ready = hear();
    assert!(ready.contains("READY=1") && ready.contains("STATUS=0 sessions"), "{ready} {}", house.log());
    let (mut client, _) = Client::attach_as(early, "x", 1).unwrap();
    assert!(TcpStream::connect(("127.0.0.1", port)).is_ok());
    let listening = house.status(&["--server"])["listening"].to_string();
    assert!(listening.contains(&format!("tcp://127.0.0.1:{port} (from the service manager)")), "{listening}");
    let (mut fed, mut one_session, begin) = (0, false, Instant::now());
    while begin.elapsed() < Duration::from_secs(3) {
        let heard = hear();
        fed += u64::from(heard.contains("WATCHDOG=1"));
        one_session |= heard.contains("STATUS=1 session");
    }
    assert!(fed >= 4 && one_session, "{fed} {one_session}");
    house.signal();
    until("stopping", || hear().contains("STOPPING=1"));
    client.wait_for_the_end();
    assert_eq!(house.wait().code(), Some(0));
    assert!(house.path("s.sock").exists() && house.path("run/serve.sock").exists(), "they are the manager's");
}

#[test]
fn unsuitable_activation_sockets_are_refused_in_one_line() {
    let house = TestServer::new();
    let (export, token) = (house.text("x"), house.text("token"));
    let served = ["serve", "--export", export.as_str()];
    let bind = |name: &str| OwnedFd::from(UnixListener::bind(house.path(name)).unwrap());
    let datagram = UnixDatagram::pair().unwrap().0.into();
    let file = fs::File::open("/dev/null").unwrap().into();
    let tcp = || OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap());
    for (fd, name, words, says) in [
        (datagram, "a", served.as_slice(), "ListenStream="),
        (file, "b", served.as_slice(), "no socket"),
        (bind("1"), "user", served.as_slice(), "serve.sock"),
        (tcp(), "user", served.as_slice(), "unix socket"),
    ] {
        let said = house.refused(activated(&house, vec![fd], name, words));
        assert!(said.contains(says), "{said}");
    }
    for (fd, words, says) in [
        (tcp(), served.to_vec(), "--token"),
        (bind("2"), vec!["serve"], "--export"),
        (bind("3"), vec!["serve", "--export", &export, "--token", &token], "--listen tcp"),
    ] {
        let output = activated(&house, vec![fd], "x", &words).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
        assert!(said.contains(says), "{said}");
    }
}

fn connect_as(uid: u32, socket: &Path) -> UnixStream {
    let socket = socket.to_owned();
    as_user(uid, move || UnixStream::connect(&socket).unwrap())
}

fn ask(mut stream: UnixStream, bytes: &[u8]) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(bytes).unwrap();
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    said
}

#[test]
fn only_root_and_the_servers_user_get_its_status() {
    let house = TestServer::new().serve(&[]);
    let socket = house.path("s.sock");
    let connect = || UnixStream::connect(&socket).unwrap();
    let own: Value = serde_json::from_slice(&ask(connect(), b"nigh status 1\n")).unwrap();
    assert_eq!(own["pid"], house.server.as_ref().unwrap().id());
    for garbage in [
        &b"nigh status 2\n"[..],
        b"nigh status 1 \n and more",
        b"n",
        b"nigh status 1",
        &[0xff; 5000],
        &[0; 64],
    ] {
        let stream = connect();
        let answer = if garbage.len() < 14 {
            // Too short for a request: the server drops a peer that closes early.
            (&stream).write_all(garbage).unwrap();
            drop(stream);
            Vec::new()
        } else {
            ask(stream, garbage)
        };
        assert!(!String::from_utf8_lossy(&answer).contains("sessions"), "{garbage:?}");
    }
    // Peers that ask without reading the reply, and silent peers, block no other peer.
    let idle: Vec<_> = (0..50)
        .map(|n| {
            let stream = connect();
            (&stream).write_all(if n % 2 == 0 { b"nigh status 1\n" } else { b"" }).unwrap();
            stream
        })
        .collect();
    let begin = Instant::now();
    assert_eq!(house.status(&["--server", &house.text("s.sock")])["server"], own["server"]);
    assert_eq!(house.status(&["--server", &format!("unix://{}", house.text("s.sock"))])["pid"], own["pid"]);
    assert!(Client::attach_as(unix::connect(&socket).unwrap(), "x", 1).is_ok());
    assert!(begin.elapsed() < Duration::from_secs(4));
    drop(idle);
    let said = house.refused(house.nigh(&["status", "--server", "/nonexistent/s.sock"]));
    assert!(said.contains("/nonexistent/s.sock"), "{said}");
    let page = house.nigh(&["status", "--server"]).output().unwrap();
    assert!(String::from_utf8(page.stdout).unwrap().contains("  export      x = "));
    let mounts = house.nigh(&["status"]).output().unwrap();
    assert!(String::from_utf8(mounts.stdout).unwrap().contains("your server (pid "));
    if needs_root("only_root_and_the_servers_user_get_its_status") {
        let said = ask(connect_as(UNPRIVILEGED_UID, &socket), b"nigh status 1\n");
        let said: Value = serde_json::from_slice(&said).unwrap();
        assert_eq!(said.as_object().unwrap().keys().collect::<Vec<_>>(), ["refused"]);
        fs::set_permissions(house.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    }
}

#[test]
fn session_events_are_logged_in_one_line_without_secrets() {
    let token = TestServer::new();
    let path = token.text("token");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let listen = format!("tcp://127.0.0.1:{port}");
    let mut house = TestServer::new().serve(&["--listen", &listen, "--token", &path]);
    let socket = house.path("s.sock");
    let (client, _) = Client::attach_as(unix::connect(&socket).unwrap(), "x", 0x7777_7777_7777).unwrap();
    assert!(Client::attach_as(unix::connect(&socket).unwrap(), "no\nsuch\u{1b}[31m", 2).is_err());
    let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let _ = stranger.read_to_end(&mut Vec::new());
    drop(client);
    let count = |log: &str, event: &str| log.matches(&format!("event=\"{event}\"")).count();
    until("cut", || count(&house.log(), "cut") == 1);
    house.signal();
    house.wait();
    let log = house.log();
    let events = ["connected", "attached", "cut", "ended"];
    assert_eq!(events.map(|event| count(&log, event)), [2, 1, 1, 2], "{log}");
    assert!(count(&log, "refused") >= 2, "{log}");
    let line = log.lines().find(|line| line.contains("no export is called")).unwrap();
    assert!(line.contains("event=\"refused\"") && line.contains("rule=") && line.contains("peer="), "{line}");
    assert!(!log.contains(SECRET) && !log.contains("\u{1b}[31m"), "{log}");
    assert!(!log.contains(&0x7777_7777_7777_u64.to_string()) && !log.contains("777777777777"), "{log}");
}

#[test]
fn refused_connections_do_not_fill_the_log() {
    let house = TestServer::new().serve(&[]);
    for _ in 0..300 {
        let _ = ask(UnixStream::connect(house.path("s.sock")).unwrap(), &[0; 64]);
    }
    let lines = house.log().lines().count();
    assert!(lines < 80, "{lines} lines for 300 connections");
    assert!(house.log().contains("unsaid="));
}

#[test]
fn startup_errors_are_one_line() {
    let house = TestServer::new();
    let export = house.text("x");
    let mut command = house.nigh(&["serve", "--export", &export]);
    command.env("NIGH_STATE_DIR", "/proc/nowhere");
    let said = house.refused(command);
    assert!(said.contains("/proc/nowhere") && said.contains("NIGH_STATE_DIR"), "{said}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("tcp://{}", taken.local_addr().unwrap());
    let token = house.text("token");
    let said =
        house.refused(house.nigh(&["serve", "--export", &export, "--listen", &listen, "--token", &token]));
    assert!(said.contains(&listen) && said.contains("choose another"), "{said}");
    let missing = house.text("missing");
    let said = house.refused(house.nigh(&["serve", "--export", &missing]));
    assert!(said.contains(&format!("--export {missing}")), "{said}");

    let house = house.serve(&[]);
    let attach = || Client::attach_as(unix::connect(&house.path("s.sock")).unwrap(), "x", 1).map(drop);
    attach().unwrap();
    fs::rename(house.path("x"), house.path("moved")).unwrap();
    let said = attach().unwrap_err();
    assert!(said.contains(&export) && said.contains("on the server") && said.lines().count() == 1, "{said}");
    fs::rename(house.path("moved"), house.path("x")).unwrap();
    attach().unwrap();
}

#[test]
fn full_disk_at_startup_is_reported_in_one_line() {
    if !needs_root("full_disk_at_startup_is_reported_in_one_line") {
        return;
    }
    let house = TestServer::new();
    let (state, export) = (house.text("state"), house.text("x"));
    fs::create_dir(&state).unwrap();
    let script = format!(
        "mount -t tmpfs -o size=64k none '{state}' && \
         {{ head -c 1M /dev/zero > '{state}/fill' 2>/dev/null; exec \"$@\"; }}"
    );
    let mut unshare = Command::new("unshare");
    unshare.args(["-m", "sh", "-c", &script, "sh", NIGH]);
    let said = house.refused(house.with_test_env(unshare, &["serve", "--export", &export]));
    assert!(said.contains(&state) && said.contains("No space left") && said.contains("make room"), "{said}");
}

/// Runs a further `nigh serve` beside the server that runs, listening at `socket` for `export`.
fn start_second_serve(house: &TestServer, export: &str, socket: &str) -> Child {
    let (at, listen) = (house.path(socket), format!("unix://{}", house.text(socket)));
    let log = fs::File::options().create(true).append(true).open(house.path("log")).unwrap();
    let child = house.nigh(&["serve", "--export", export, "--listen", &listen]).stderr(log).spawn().unwrap();
    until("listening", || UnixStream::connect(&at).is_ok());
    child
}

#[test]
fn running_server_serves_exports_of_another_serve_while_it_lives() {
    let mut house = TestServer::new();
    fs::create_dir_all(house.path("y/e")).unwrap();
    let alone = house.nigh(&["serve", "--listen", "user"]);
    house.start(alone);
    until("serving", || UnixStream::connect(house.path("run/serve.sock")).is_ok());
    let root = house.server.as_ref().unwrap().id();
    let mut first = start_second_serve(&house, &house.text("x"), "s.sock");
    let mut second = start_second_serve(&house, &house.text("y"), "t.sock");
    let attach = |socket: &str, what: &str, incarnation: u64| {
        Client::attach_as(unix::connect(&house.path(socket)).unwrap(), what, incarnation)
    };
    let (mut of_first, session) = attach("s.sock", "x", 21).unwrap();
    let (_of_second, _) = attach("t.sock", "", 22).unwrap();
    // Each listener leads only to the exports of its own process.
    for (socket, what) in [("s.sock", "y"), ("t.sock", "x"), ("s.sock", "/")] {
        let refused = attach(socket, what, 23).map(|_| ()).unwrap_err();
        assert!(refused.contains("no export") || refused.contains("only exports"), "{refused}");
    }
    let status = house.status(&["--server"]);
    assert_eq!(
        (status["pid"].as_u64(), status["sessions"].as_array().map(Vec::len)),
        (Some(root.into()), Some(2))
    );
    let exports: Vec<_> =
        status["exports"].as_array().unwrap().iter().map(|export| &export["name"]).collect();
    assert_eq!(exports, ["x", "y"]);
    let taken = house.refused(house.nigh(&["serve", "--export", "nowhere", "--listen", "unix:///nowhere/s"]));
    assert!(taken.contains("--export") && taken.contains("nowhere"), "{taken}");

    let pid = rustix::process::Pid::from_child(&first);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(first.wait().unwrap().code(), Some(0));
    of_first.wait_for_the_end();
    until("gone", || !house.path("s.sock").exists());
    let (_again, _) = attach("t.sock", "y", 24).unwrap();

    // A guest that returns finds its sessions; a second guest with equal exports is refused.
    let twice = house.nigh(&[
        "serve",
        "--export",
        &house.text("y"),
        "--listen",
        &format!("unix://{}", house.text("t.sock")),
    ]);
    assert!(house.refused(twice).contains("another process of yours has the same exports"));
    let mut first = start_second_serve(&house, &house.text("x"), "s.sock");
    let sessions = |house: &TestServer| house.status(&["--server"])["sessions"].as_array().map(Vec::len);
    let before = sessions(&house);
    of_first.link = unix::connect(&house.path("s.sock")).unwrap();
    of_first.session.handle_connect(Time(3));
    of_first.send(Call::GetAttr { node: NodeRef::without_hint(session.root) });
    while !matches!(of_first.next(), Event::Response { .. }) {}
    assert_eq!(sessions(&house), before, "the session goes on");
    first.kill().unwrap();
    first.wait().unwrap();

    // When the server ends, the guest serves by itself.
    house.signal();
    assert_eq!(house.server.as_mut().unwrap().wait().unwrap().code(), Some(0), "{}", house.log());
    until("serving", || house.path("t.sock").exists() && UnixStream::connect(house.path("t.sock")).is_ok());
    assert_eq!(house.status(&["--server"])["pid"].as_u64(), Some(second.id().into()));
    let (_last, _) = Client::attach_as(unix::connect(&house.path("t.sock")).unwrap(), "y", 25).unwrap();
    second.kill().unwrap();
    second.wait().unwrap();
}
