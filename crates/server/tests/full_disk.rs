//! A full disk under the server's state directory: existing sessions continue, new clients are refused in one line,
//! and the server recovers when there is room again.

mod common;

use common::client::Client;
use common::raw::{Raw, hello};
use common::world::World;
use common::*;
use nigh_native::{Message, Resume};
use nigh_remote::Event;
use nigh_server::{Server, ServerOptions};
use nigh_types::*;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// A filesystem of a few pages, unmounted on drop.
struct Small(TempDir);

impl Small {
    fn mount() -> Option<Small> {
        let dir = tempfile::tempdir().unwrap();
        let done =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "none"]).arg(dir.path()).output();
        done.is_ok_and(|o| o.status.success()).then(|| Small(dir))
    }

    fn state(&self) -> PathBuf {
        self.0.path().join("state")
    }

    /// Fills the filesystem, except for the rest of pages already begun.
    fn fill(&self) {
        let mut filler = fs::File::create(self.filler()).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
        assert!(fs::write(self.0.path().join("more"), [0; 4096]).is_err(), "it is full");
        fs::remove_file(self.0.path().join("more")).unwrap();
    }

    fn empty(&self) {
        fs::remove_file(self.filler()).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.0.path().join("filler")
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Attaches; `Err`: the server's refusal.
fn attach(server: &Arc<Server>, dir: &Path) -> Result<Client, String> {
    let mut client = Client::connect(server, dir, Term::Session);
    let told = client.wait(|events| {
        events.iter().find_map(|event| match event {
            Event::Attached(_) => Some(Ok(())),
            Event::Lost { why } => Some(Err(why.clone())),
            _ => None,
        })
    });
    told.map(|()| client)
}

fn says_how_to_mend(why: &str, dir: &Path) {
    let there = dir.to_str().unwrap();
    assert!(why.contains(there) && why.contains("make room there") && !why.contains('\n'), "{why}");
}

#[test]
fn full_disk_refuses_new_clients_and_keeps_existing_sessions() {
    if !needs_root("a_full_disk_refuses_who_is_new") {
        return;
    }
    let Some(small) = Small::mount() else { return println!("SKIPPED: cannot mount a tmpfs") };
    let state = small.state();
    let mut world = World::with(|options| options.state_dir = state.clone());
    let mut first = world.client();
    let d = first.place("d");
    small.fill();
    // One client's line crosses a page boundary.
    let (mut others, mut told) = (Vec::new(), None);
    while told.is_none() && others.len() < 200 {
        match attach(&world.server, world.dir.path()) {
            Ok(client) => others.push(client),
            Err(why) => told = Some(why),
        }
    }
    says_how_to_mend(&told.expect("it is refused when nothing fits any more"), &state);
    says_how_to_mend(&attach(&world.server, world.dir.path()).err().unwrap(), &state);
    let lines = fs::read_to_string(state.join("sessions")).unwrap();
    assert!(lines.ends_with('\n') && lines.len() < 4096, "no half line is left: {} bytes", lines.len());
    let mkdir = |text| Call::Mkdir { dir: d.clone(), name: name(text), mode: 0o700, umask: 0 };
    first.obliging = true;
    assert!(first.call(mkdir("on")).result.is_ok(), "sessions that stand go on");
    // A session ends meanwhile, and its end cannot be written either.
    let count = world.server.session_count();
    others.pop().unwrap().leave();
    while world.server.session_count() == count {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    small.empty();
    others.push(attach(&world.server, world.dir.path()).expect("there is room again"));
    // The session that left is counted out before its line is marked.
    eventually("each session has one line", || {
        let lines = fs::read_to_string(state.join("sessions")).unwrap();
        lines.lines().filter(|line| line.starts_with('+')).count() == 1 + others.len()
    });
    drop(others);
    world.restart();
    assert!(attach(&world.server, world.dir.path()).is_ok(), "the next server can read what stands there");
}

#[test]
fn server_started_on_a_full_disk_accepts_clients_once_there_is_room() {
    if !needs_root("a_server_that_begins_on_a_full_disk") {
        return;
    }
    let Some(small) = Small::mount() else { return println!("SKIPPED: cannot mount a tmpfs") };
    let dir = tempfile::tempdir().unwrap();
    let begin = |state: &Path| Server::new(ServerOptions::new(state.to_owned())).unwrap();
    // An earlier server stopped in this state directory, with one client still attached.
    let before = small.state();
    let server = begin(&before);
    let mut client = attach(&server, dir.path()).unwrap();
    client.root();
    server.end_sessions("the test starts it again");
    drop(client);
    while Arc::strong_count(&server) > 1 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    drop(server);
    small.fill();
    for state in [before.clone(), small.0.path().join("none/yet")] {
        let server = begin(&state);
        says_how_to_mend(&attach(&server, dir.path()).err().expect("it is full"), &state);
        small.empty();
        assert!(attach(&server, dir.path()).is_ok(), "there is room again");
        server.end_sessions("the test is done with it");
        small.fill();
    }
}

#[test]
fn lost_locks_are_recorded_even_on_a_full_disk() {
    if !needs_root("lost_locks_are_recorded_even_on_a_full_disk") {
        return;
    }
    let Some(small) = Small::mount() else { return println!("SKIPPED: cannot mount a tmpfs") };
    let state = small.state();
    let mut world = World::with(|options| options.state_dir = state.clone());
    let mut other = world.client();
    let f = other.place("d/f");
    let lock = |wait, reclaim| {
        let (kind, start, end) = (LockKind::Write, 0, u64::MAX);
        Call::Lock { node: f.clone(), owner: 1, flock: false, kind, start, end, wait, pid: 1, reclaim }
    };
    let who = 1 << 41;
    let mut holder = Raw::hello(&world, None, hello(&world, who, None));
    holder.welcome();
    holder.ask(1, lock(false, false));
    assert!(holder.answer().unwrap().result.is_ok());
    small.fill();
    while attach(&world.server, world.dir.path()).is_ok() {}
    let waiting = other.send(lock(true, false));
    // The holder breaks the protocol, so the server discards its session.
    holder.say(&Message::Hello(hello(&world, who, None)));
    assert_eq!(other.answer(waiting).result, Ok(Reply::Done));
    small.empty();
    world.restart();
    let resume = Some(Resume { session_id: 0, received: 0 });
    let mut holder = Raw::hello(&world, None, hello(&world, who, resume));
    holder.welcome();
    holder.ask(1, Call::ResolvePath { node: f.node, names: vec![name("d"), name("f")] });
    assert_eq!(holder.answer().unwrap().result, Ok(Reply::Done));
    holder.ask(2, lock(false, true));
    assert_eq!(holder.answer().unwrap().result, Err(Errno::AGAIN), "another had it");
}
