//! State of expired or lost sessions (docs/decisions/0009-sessions-over-connections.md).

use crate::common::client::Client;
use crate::common::world::World;
use crate::common::*;
use nigh_remote::Remote;
use nigh_types::*;
use std::time::{Duration, Instant};

/// Waits for the reply to a call, while the client renews its lease.
fn answer(client: &mut Client, call: CallId) -> Result<Reply, Errno> {
    let give_up = Instant::now() + Duration::from_secs(20);
    while !client.is_answered(call) {
        assert!(Instant::now() < give_up);
        client.tick();
    }
    client.answer(call).result
}

fn ask(client: &mut Client, call: Call) -> Result<Reply, Errno> {
    let call = client.send(call);
    answer(client, call)
}

#[test]
fn calls_executed_before_a_session_expired_are_not_repeated() {
    let world = World::hasty();
    let mut holder = world.client();
    holder.obliging = true;
    let (d, f) = (holder.place("d"), holder.place("d/f"));
    let handle = holder.open(&f, BOTH);
    assert!(ask(&mut holder, lock(&f, 1, false, false)).is_ok());
    let create = Call::Create {
        dir: d.clone(),
        name: name("made"),
        mode: 0o400,
        umask: 0,
        exclusive: true,
        access: BOTH,
    };
    let unlink = Call::Unlink { dir: d.clone(), name: name("h"), keep: None };
    let calls = [mkdir(&d, "once"), append(&f, handle, 7), create, unlink].map(|call| holder.send(call));
    // The replies are sent, and never arrive.
    let there = |text: &str| world.dir.path().join("d").join(text).symlink_metadata().is_ok();
    let give_up = Instant::now() + Duration::from_secs(10);
    while !there("once") || !there("made") || there("h") {
        assert!(Instant::now() < give_up);
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(100));
    let mut other = world.client();
    let waiting = other.place("d/f");
    let waiting = other.send(lock(&waiting, 2, true, false));
    while !other.is_answered(waiting) {
        other.tick();
        assert!(Instant::now() < give_up);
    }
    holder.session.handle_disconnect(holder.now(), "cut");
    let now = holder.now();
    holder.session.handle_timeout(now);
    holder.drain();
    holder.go_on_over(world.server.serve_in_process().unwrap());
    assert_eq!(holder.wait_linked(), Some(false), "it is forgotten");
    assert!(ask(&mut holder, Call::Reopen { node: f.clone(), handle, access: BOTH }).is_ok());
    let now = holder.now();
    holder.session.handle_reclaimed(now);
    holder.drain();
    let [made, appended, created, removed] = calls.map(|call| answer(&mut holder, call));
    assert!(matches!(made, Ok(Reply::Created { existed: false, .. })), "{made:?}");
    assert_eq!(appended, Ok(Reply::Written { offset: 8, count: 16 }));
    assert!(matches!(removed, Ok(Reply::Removed { .. })), "{removed:?}");
    let Ok(Reply::Created { entry, handle: Some(file), existed: false }) = created else {
        panic!("{created:?}")
    };
    // Its leases would delay the calls below.
    other.leave();
    // The created file is open with the requested access, whatever its mode.
    let node = NodeRef { node: entry.id, path_hint: Some((d.node, name("made"))) };
    assert_eq!(ask(&mut holder, append(&node, file, 1)), Ok(Reply::Written { offset: 0, count: 16 }));
    assert_eq!(std::fs::read(world.dir.path().join("d/f")).unwrap().len(), 24);
    // New calls are executed, and a remembered reply is returned once.
    assert_eq!(ask(&mut holder, mkdir(&d, "once")), Err(Errno::EXIST));
}

/// The client's kernel may still cache facts, so the lost session's grants live until they are acknowledged or
/// expire.
#[test]
fn grants_of_a_lost_session_live_until_acknowledged_or_expired() {
    let world = World::hasty();
    let (mut lost, mut other) = (world.client(), world.client());
    let d = lost.place("d");
    assert!(!lost.list(&d).1.is_empty());
    let there = other.place("d");
    let began = Instant::now();
    lost.lose_and_begin_again(world.server.serve_in_process().unwrap());
    let made = other.send(mkdir(&there, "new"));
    assert!(!other.is_answered(made));
    while !other.is_answered(made) {
        other.tick();
        lost.tick();
        assert!(began.elapsed() < Duration::from_secs(8));
    }
    assert!(other.answer(made).result.is_ok());
    // A client that names no earlier session has dropped all its facts.
    let mut fresh = world.client();
    let d = fresh.place("d");
    assert!(!fresh.list(&d).1.is_empty());
    let made = other.send(mkdir(&there, "second"));
    assert!(!other.is_answered(made));
    let incarnation = fresh.incarnation;
    let stream = world.server.serve_in_process().unwrap();
    let mut after = Client::over(stream, world.dir.path(), Term::Session, incarnation);
    after.root();
    assert!(other.answer(made).result.is_ok());
}

/// A killed server remembers no replies, and this rename would succeed a second time.
#[test]
fn whiteout_rename_is_not_repeated_after_a_restart() {
    let mut world = World::new();
    let mut client = world.client();
    let d = client.place("d");
    let rename = Call::Rename {
        from: d.clone(),
        name: name("f"),
        to: d,
        new_name: name("moved"),
        no_replace: false,
        exchange: false,
        whiteout: true,
        keep: None,
    };
    let at = |text: &str| world.dir.path().join("d").join(text);
    let contents = std::fs::read(at("f")).unwrap();
    let renamed = client.send(rename.clone());
    eventually("it is renamed", || at("moved").exists());
    std::thread::sleep(Duration::from_millis(100));
    world.restart();
    client.session.handle_disconnect(client.now(), "cut");
    client.drain();
    client.go_on_over(world.server.serve_in_process().unwrap());
    assert_eq!(client.wait_linked(), Some(false));
    let now = client.now();
    client.session.handle_reclaimed(now);
    client.drain();
    assert_eq!(answer(&mut client, renamed), Err(Errno::NOENT));
    assert_eq!(std::fs::read(world.dir.path().join("d/moved")).unwrap(), contents);
    // A further request is a new rename, which moves the whiteout.
    assert!(ask(&mut client, rename).is_ok());
    assert!(std::fs::read(world.dir.path().join("d/moved")).is_err());
}
