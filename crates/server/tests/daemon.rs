//! One server per user: started once, found by every mount, ended when idle.

mod common;

use common::client::Client;
use common::needs_root;
use nigh_server::daemon::{ensure_running_at, run_server_at, serve};
use nigh_server::{Listen, ServerDirs, Serving};
use nigh_types::{Call, NodeRef, Term};
use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The body of the started program: not a test by itself.
#[test]
fn the_server_itself() {
    let Ok(idle) = std::env::var("NIGH_SERVER_IDLE_MS") else { return };
    let places = ServerDirs::of_user().unwrap();
    let _ =
        fs::OpenOptions::new().append(true).create(true).open(places.state.join("starts")).map(|mut file| {
            std::io::Write::write_all(&mut file, b"x").unwrap();
        });
    run_server_at(&places, Duration::from_millis(idle.parse().unwrap())).unwrap();
}

struct TestDirs {
    dir: TempDir,
    places: ServerDirs,
}

impl TestDirs {
    fn new() -> TestDirs {
        let dir = tempfile::tempdir().unwrap();
        let places = ServerDirs { runtime: dir.path().join("run"), state: dir.path().join("state") };
        fs::create_dir(&places.state).unwrap();
        TestDirs { dir, places }
    }

    /// A script that is called as `nigh` is.
    fn exe(&self, idle_ms: u64) -> PathBuf {
        let path = self.dir.path().join("nigh");
        let this = std::env::current_exe().unwrap();
        let text = format!(
            "#!/bin/sh\n[ \"$*\" = 'serve --listen user' ] || exit 9\n\
             NIGH_SERVER_IDLE_MS={idle_ms} exec '{}' --exact the_server_itself\n",
            this.display()
        );
        if !path.exists() {
            // Written by another process: other threads may fork while this process has a descriptor open for
            // writing, and the kernel refuses to execute a file that is open for writing (ETXTBSY).
            let mut write = std::process::Command::new("sh");
            write.args(["-c", "printf %s \"$1\" > \"$2\" && chmod 700 \"$2\"", "sh", &text]).arg(&path);
            assert!(write.status().unwrap().success());
        }
        path
    }

    fn starts(&self) -> usize {
        fs::read(self.places.state.join("starts")).map_or(0, |bytes| bytes.len())
    }

    fn wait_gone(&self) {
        let give_up = Instant::now() + Duration::from_secs(10);
        while self.places.socket().exists() {
            assert!(Instant::now() < give_up, "the server does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn pid_of(stream: &UnixStream) -> rustix::process::Pid {
    rustix::net::sockopt::socket_peercred(stream).unwrap().pid
}

#[test]
fn concurrent_starters_start_one_server_that_ends_when_idle() {
    let house = TestDirs::new();
    let exe = house.exe(400);
    let streams: Vec<_> = std::thread::scope(|scope| {
        let starters: Vec<_> =
            (0..8).map(|_| scope.spawn(|| ensure_running_at(&house.places, &exe).unwrap())).collect();
        starters.into_iter().map(|starter| starter.join().unwrap()).collect()
    });
    assert_eq!(house.starts(), 1);
    std::thread::sleep(Duration::from_millis(1_000));
    assert!(house.places.socket().exists(), "it has sessions");
    drop(streams);
    house.wait_gone();
    drop(ensure_running_at(&house.places, &exe).unwrap());
    assert_eq!(house.starts(), 2);
    house.wait_gone();
}

#[test]
fn server_without_its_socket_file_ends() {
    let house = TestDirs::new();
    let stream = ensure_running_at(&house.places, &house.exe(200)).unwrap();
    let server = rustix::process::pidfd_open(pid_of(&stream), rustix::process::PidfdFlags::empty()).unwrap();
    fs::remove_dir_all(&house.places.runtime).unwrap();
    drop(stream);
    let mut watched = [rustix::event::PollFd::new(&server, rustix::event::PollFlags::IN)];
    let limit = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut watched, Some(&limit)), Ok(1), "it goes on");
}

#[test]
fn server_starts_again_after_a_kill() {
    let house = TestDirs::new();
    let exe = house.exe(60_000);
    let first = ensure_running_at(&house.places, &exe).unwrap();
    rustix::process::kill_process(pid_of(&first), rustix::process::Signal::KILL).unwrap();
    let ended =
        first.set_read_timeout(Some(Duration::from_secs(5))).and_then(|()| (&first).read(&mut [0; 16]));
    assert!(matches!(ended, Ok(0)) || ended.is_err());
    assert!(house.places.socket().exists());
    let second = ensure_running_at(&house.places, &exe).unwrap();
    assert_eq!(house.starts(), 2);
    // On SIGTERM the server sends a goodbye and removes its socket.
    let asked = Instant::now();
    rustix::process::kill_process(pid_of(&second), rustix::process::Signal::TERM).unwrap();
    second.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let ended = (&second).read(&mut [0; 16]);
    assert!(matches!(ended, Ok(0)) || ended.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset));
    house.wait_gone();
    assert!(asked.elapsed() < Duration::from_secs(5));
}

#[test]
fn dying_server_that_accepts_no_connection_is_not_used() {
    let house = TestDirs::new();
    let exe = house.exe(400);
    house.places.make_runtime().unwrap();
    let dying = std::os::unix::net::UnixListener::bind(house.places.socket()).unwrap();
    let death = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(dying);
    });
    let stream = ensure_running_at(&house.places, &exe).unwrap();
    death.join().unwrap();
    assert_eq!(house.starts(), 1);
    // A session can begin on this connection.
    let dir = tempfile::tempdir().unwrap();
    let mut client = Client::over(stream, dir.path(), Term::Session, 1);
    let root = NodeRef::without_hint(client.session().root);
    assert!(client.call(Call::GetAttr { node: root }).result.is_ok());
    // Without a close the server would wait for this session for hours.
    client.leave();
    house.wait_gone();
}

#[test]
fn server_that_closes_every_connection_is_left_to_the_session_handshake() {
    let house = TestDirs::new();
    house.places.make_runtime().unwrap();
    let other = std::os::unix::net::UnixListener::bind(house.places.socket()).unwrap();
    let accepting = std::thread::spawn(move || {
        // An older version that does not know this question reads it and ends the connection.
        for stream in other.incoming() {
            let mut said = [0; 14];
            if (&stream.unwrap()).read_exact(&mut said).is_err() || &said[..4] != b"nigh" {
                return said;
            }
        }
        unreachable!("it accepts for ever")
    });
    let asked = Instant::now();
    let mut stream = ensure_running_at(&house.places, &house.exe(400)).unwrap();
    assert!(asked.elapsed() < Duration::from_secs(10));
    assert_eq!(house.starts(), 0);
    std::io::Write::write_all(&mut stream, b"the greeting..").unwrap();
    assert_eq!(&accepting.join().unwrap(), b"the greeting..");
}

#[test]
fn program_that_exits_instead_of_serving_is_reported_at_once() {
    let house = TestDirs::new();
    let error = ensure_running_at(&house.places, std::path::Path::new("/bin/false")).unwrap_err();
    assert!(error.to_string().contains("serve.log"), "{error}");
    assert!(ensure_running_at(&house.places, std::path::Path::new("/nonexistent")).is_err());
}

/// A user of this test alone, with a low limit of processes.
const POOR: u32 = 4_077_123;

/// The body of the program that the next test starts: not a test by itself.
#[test]
fn the_poor_server_itself() {
    let Ok(dir) = std::env::var("NIGH_TEST_POOR") else { return };
    let limit = libc::rlimit { rlim_cur: 60, rlim_max: 60 };
    // SAFETY: the limit is a live struct; the others take integers.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit), 0);
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setgid(POOR), 0);
        assert_eq!(libc::setuid(POOR), 0);
    }
    let dir = Path::new(&dir);
    let places = ServerDirs { runtime: dir.join("run"), state: dir.join("state") };
    let serving = Serving {
        exports: vec![format!("x={}", dir.join("x").display()).into()],
        listens: vec![Listen::Unix(dir.join("open/s.sock"))],
        ..Serving::default()
    };
    serve(&places, &serving).unwrap();
}

/// Kills the child with the test: a reader of its output would otherwise wait for ever.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn connections_that_exhaust_threads_do_not_end_the_server() {
    if !needs_root("connections_that_exhaust_threads_do_not_end_the_server") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for text in ["run", "state", "x", "open"] {
        fs::create_dir(dir.path().join(text)).unwrap();
        chown(dir.path().join(text), Some(POOR), Some(POOR)).unwrap();
    }
    fs::set_permissions(dir.path().join("run"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(dir.path().join("open"), fs::Permissions::from_mode(0o755)).unwrap();
    let server = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_poor_server_itself"])
        .env("NIGH_TEST_POOR", dir.path())
        .spawn()
        .unwrap();
    let mut server = Killed(server);
    let path = dir.path().join("open/s.sock");
    let give_up = Instant::now() + Duration::from_secs(20);
    let stream = loop {
        match UnixStream::connect(&path) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < give_up, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut old = Client::over(stream, Path::new("x"), Term::Session, 1);
    let root = NodeRef::without_hint(old.session().root);
    // The server has started all its threads when it replies.
    assert!(old.call(Call::GetAttr { node: root.clone() }).result.is_ok());
    let strangers: Vec<_> = (0..300).map(|_| UnixStream::connect(&path)).collect();
    // By now the last connections were accepted or dropped.
    std::thread::sleep(Duration::from_millis(500));
    assert!(server.0.try_wait().unwrap().is_none(), "it goes on");
    assert!(old.call(Call::GetAttr { node: root.clone() }).result.is_ok());
    drop(strangers);
    let give_up = Instant::now() + Duration::from_secs(20);
    loop {
        assert!(Instant::now() < give_up, "no client is accepted any more");
        let stream = UnixStream::connect(&path).unwrap();
        let mut new = Client::over(stream, Path::new("x"), Term::Session, 2);
        for _ in 0..10 {
            new.pump();
        }
        if new.events.iter().any(|event| matches!(event, nigh_remote::Event::Attached(_))) {
            break;
        }
    }
    assert!(old.call(Call::GetAttr { node: root }).result.is_ok());
}
