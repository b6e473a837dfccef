//! One server per user: started once, found by all, gone when idle.

use nigh_server::Places;
use nigh_server::daemon::{ensure_running_at, run_server_at};
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What the started program runs: not a test by itself.
#[test]
fn the_server_itself() {
    let Ok(idle) = std::env::var("NIGH_SERVER_IDLE_MS") else { return };
    let places = Places::of_user().unwrap();
    let _ =
        fs::OpenOptions::new().append(true).create(true).open(places.state.join("starts")).map(|mut file| {
            std::io::Write::write_all(&mut file, b"x").unwrap();
        });
    run_server_at(&places, Duration::from_millis(idle.parse().unwrap())).unwrap();
}

struct House {
    dir: TempDir,
    places: Places,
}

impl House {
    fn new() -> House {
        let dir = tempfile::tempdir().unwrap();
        let places = Places { runtime: dir.path().join("run"), state: dir.path().join("state") };
        fs::create_dir(&places.state).unwrap();
        House { dir, places }
    }

    /// A program that is called as `nigh` is.
    fn exe(&self, idle_ms: u64) -> PathBuf {
        let path = self.dir.path().join("nigh");
        let this = std::env::current_exe().unwrap();
        let text = format!(
            "#!/bin/sh\n[ \"$*\" = 'serve --listen user' ] || exit 9\n\
             NIGH_SERVER_IDLE_MS={idle_ms} exec '{}' --exact the_server_itself\n",
            this.display()
        );
        if !path.exists() {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
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
fn many_starters_start_one_which_ends_when_idle_and_starts_again() {
    let house = House::new();
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
fn a_killed_server_leaves_nothing_in_the_way() {
    let house = House::new();
    let exe = house.exe(60_000);
    let first = ensure_running_at(&house.places, &exe).unwrap();
    rustix::process::kill_process(pid_of(&first), rustix::process::Signal::KILL).unwrap();
    let ended =
        first.set_read_timeout(Some(Duration::from_secs(5))).and_then(|()| (&first).read(&mut [0; 16]));
    assert!(matches!(ended, Ok(0)) || ended.is_err());
    assert!(house.places.socket().exists());
    let second = ensure_running_at(&house.places, &exe).unwrap();
    assert_eq!(house.starts(), 2);
    // Told to stop, it says goodbye and takes its socket away.
    let asked = Instant::now();
    rustix::process::kill_process(pid_of(&second), rustix::process::Signal::TERM).unwrap();
    second.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let ended = (&second).read(&mut [0; 16]);
    assert!(matches!(ended, Ok(0)) || ended.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset));
    house.wait_gone();
    assert!(asked.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_program_that_does_not_serve_is_told_at_once() {
    let house = House::new();
    let error = ensure_running_at(&house.places, std::path::Path::new("/bin/false")).unwrap_err();
    assert!(error.to_string().contains("serve.log"), "{error}");
    assert!(ensure_running_at(&house.places, std::path::Path::new("/nonexistent")).is_err());
}
