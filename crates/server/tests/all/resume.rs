//! Sessions over ended connections, and over restarts (docs/decisions/0009-sessions-over-connections.md).

use crate::common::client::Client;
use crate::common::raw::{Heard, Raw, hello};
use crate::common::world::{World, again};
use crate::common::*;
use nigh_link::{Claims, Peer, Squash};
use nigh_native::{Hello, Message, Resume, WINDOW_BYTES};
use nigh_remote::{Event, Remote};
use nigh_types::*;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

/// Waits until the session's lease has expired, as the server sees it.
fn wait_dormant(world: &World, session: u64) {
    eventually("it is dormant", || {
        let status = world.server.status();
        let sessions = status["sessions"].as_array().unwrap();
        sessions.iter().any(|other| other["session"] == session && other["dormant"] == true)
    });
}

#[test]
fn files_locks_recalls_and_lock_waits_survive_a_reconnect() {
    let world = World::new();
    let (mut holder, mut other) = (world.client(), world.client());
    let (d, f) = (holder.place("d"), holder.place("d/f"));
    let handle = holder.open(&f, READ);
    assert!(holder.call(lock(&f, 1, false, false)).result.is_ok());
    holder.list(&d);
    let there = other.place("d/f");
    let waiting = other.send(lock(&there, 2, true, false));
    let dir = other.place("d");
    assert!(!other.is_answered(waiting));
    again(&world, &mut other);
    // The server sends the recall while the holder is disconnected.
    holder.session.handle_disconnect(holder.now(), "cut");
    holder.drain();
    let made = other.send(mkdir(&dir, "new"));
    assert!(!other.is_answered(made));
    again(&world, &mut holder);
    holder.obliging = true;
    assert_eq!(holder.wait_linked(), None);
    let read = Call::Read { node: f.clone(), handle: Some(handle), offset: 0, length: 9 };
    assert!(holder.call(read).result.is_ok());
    // The server also recalls the lease that the read granted.
    while !other.is_answered(made) {
        holder.pump();
    }
    assert!(other.answer(made).result.is_ok());
    assert!(!other.is_answered(waiting), "the lock is held");
    let unlock = Call::Unlock { node: f, owner: 1, flock: false, start: 0, end: u64::MAX };
    assert!(holder.call(unlock).result.is_ok());
    assert!(other.answer(waiting).result.is_ok());
}

#[test]
fn expired_session_keeps_files_and_locks_until_another_client_needs_them() {
    let world = World::hasty();
    let mut holder = world.client();
    let f = holder.place("d/f");
    let handle = holder.open(&f, READ);
    assert!(holder.call(lock(&f, 1, false, false)).result.is_ok());
    let read = Call::Read { node: f.clone(), handle: Some(handle), offset: 0, length: 9 };
    let stay_away = |client: &mut Client| {
        client.session.handle_disconnect(client.now(), "cut");
        wait_dormant(&world, client.session.session_id());
        client.tick();
        assert!(client.events.iter().any(|e| matches!(e, Event::Expired { .. })));
        client.events.clear();
    };
    stay_away(&mut holder);
    again(&world, &mut holder);
    assert_eq!(holder.wait_linked(), Some(true));
    assert!(holder.call(read.clone()).result.is_ok());
    let mut other = world.client();
    let there = other.place("d/f");
    assert_eq!(other.call(lock(&there, 2, false, false)).result, Err(Errno::AGAIN));
    let waiting = other.send(lock(&there, 2, true, false));
    assert!(!other.is_answered(waiting));
    holder.session.handle_disconnect(holder.now(), "cut");
    let give_up = Instant::now() + Duration::from_secs(10);
    while !other.is_answered(waiting) {
        other.tick();
        holder.tick();
        assert!(Instant::now() < give_up);
    }
    again(&world, &mut holder);
    assert_eq!(holder.wait_linked(), Some(false), "its locks are another's");
    let reopen = Call::Reopen { node: f.clone(), handle, access: READ };
    assert!(matches!(holder.call(reopen).result, Ok(Reply::Opened { handle: h, .. }) if h == handle));
    assert_eq!(holder.call(lock(&f, 1, false, true)).result, Err(Errno::AGAIN));
    let now = holder.now();
    holder.session.handle_reclaimed(now);
    assert!(holder.call(read).result.is_ok());
}

#[test]
fn session_is_resumed_only_by_its_own_client() {
    let world = World::new();
    let mut victim = world.client();
    let f = victim.place("d/f");
    let handle = victim.open(&f, READ);
    let resume = Some(Resume { session_id: victim.session.session_id(), received: 0 });
    let good = hello(&world, victim.incarnation, resume);
    let other = Claims::Only(Credentials { uid: 4000, gid: 4000, groups: vec![], privileges: None });
    let elsewhere = world.dir.path().join("d2").as_os_str().as_bytes().to_vec();
    let strangers = [
        (Some(Peer::new("another user", other, Squash::None).with_any_path()), good.clone()),
        (None, Hello { incarnation: good.incarnation ^ 1, ..good.clone() }),
        (None, Hello { client: 2, ..good.clone() }),
    ];
    std::fs::set_permissions(world.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    for (peer, hello) in strangers {
        if peer.is_some() && !needs_root("a peer of another user") {
            continue;
        }
        let mut raw = Raw::hello(&world, peer, hello);
        let welcome = raw.welcome();
        assert_eq!(welcome.resumed, None);
        assert_ne!(welcome.session_id, victim.session.session_id());
        let read = Call::Read { node: f.clone(), handle: Some(handle), offset: 0, length: 9 };
        raw.ask(1, read);
        assert_eq!(raw.answer().unwrap().result, Err(Errno::BADF));
        let read = Call::Read { node: f.clone(), handle: Some(handle), offset: 0, length: 9 };
        assert!(victim.call(read).result.is_ok(), "the session stands, over its own connection");
    }
    // Its own client may resume; a different export gets a new session.
    let mut raw = Raw::hello(&world, None, Hello { attach: elsewhere, ..good });
    assert_eq!(raw.welcome().resumed, None);
}

#[test]
fn last_of_several_connections_resuming_one_session_gets_it() {
    let world = World::new();
    let mut client = world.client();
    let root = client.root();
    client.call(Call::GetAttr { node: root });
    let (id, incarnation) = (client.session.session_id(), client.incarnation);
    let resume = Some(Resume { session_id: id, received: 1 });
    let mut connections: Vec<Raw> =
        (0..8).map(|_| Raw::hello(&world, None, hello(&world, incarnation, resume))).collect();
    // Each hello was accepted, and has the session until the next is.
    for raw in &mut connections {
        match raw.hear() {
            Heard::Message(Message::Welcome(welcome)) => assert_eq!(welcome.session_id, id),
            Heard::End => {}
            other => panic!("{other:?}"),
        }
    }
    // A hello overtaken by a later connection does not take the session from it.
    let mut late = Raw::hello(&world, None, Hello { moment: 5, ..hello(&world, incarnation, resume) });
    late.ends();
    let unknown = Some(Resume { session_id: id ^ 1, received: 0 });
    let mut late = Raw::hello(&world, None, Hello { moment: 5, ..hello(&world, incarnation, unknown) });
    assert!(matches!(late.message(), Message::Refused(_)));
    late.ends();
    let mut alive = 0;
    for raw in &mut connections {
        raw.say(&Message::Ping(2, 1));
        match raw.hear() {
            Heard::Message(Message::Pong(2, _)) => alive += 1,
            Heard::End => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(alive, 1);
    // The server discards an ended session after the end of its connection.
    eventually("one session is left", || world.server.session_count() == 1);
}

#[test]
fn impossible_received_counts_end_only_their_session() {
    let world = World::new();
    let mut good = world.client();
    let root = good.root();
    for received in [1, 100, u64::MAX] {
        let mut raw = Raw::hello(&world, None, hello(&world, 1 << 50, None));
        let session_id = raw.welcome().session_id;
        drop(raw);
        let resume = Some(Resume { session_id, received });
        let mut raw = Raw::hello(&world, None, hello(&world, 1 << 50, resume));
        assert!(matches!(raw.message(), Message::Bye(why) if why.contains("are said to have arrived")));
        raw.ends();
    }
    assert!(good.call(Call::GetAttr { node: root }).result.is_ok());
    // The server discards an ended session after the end of its connection.
    eventually("one session is left", || world.server.session_count() == 1);
}

#[test]
fn client_that_confirms_nothing_gets_one_window_over_reconnects() {
    let world = World::new();
    std::fs::write(world.dir.path().join("big"), vec![1; 4 << 20]).unwrap();
    let node = world.client().place("big");
    let mut raw = Raw::hello(&world, None, hello(&world, 1 << 51, None));
    raw.welcome();
    let read = || Call::Read { node: node.clone(), handle: None, offset: 0, length: 4 << 20 };
    for id in 0..4 {
        raw.ask(id, read());
    }
    let mut answers = 0;
    while answers < 1 + WINDOW_BYTES / (5 << 20) {
        assert!(raw.answer().is_some());
        answers += 1;
    }
    // Unconfirmed replies are kept, and no more are sent: one is read already, and the other waits.
    let held = |calls: u64| {
        eventually("the rest is held", || {
            let status = world.server.status();
            let session = &status["sessions"][1];
            session["calls"]["unanswered"] == calls && session["calls"]["running"] == 0
        });
        let unconfirmed = world.server.status()["sessions"][1]["bytes"]["unconfirmed"].as_u64().unwrap();
        assert!(unconfirmed <= WINDOW_BYTES + (5 << 20), "{unconfirmed}");
    };
    held(4 - answers);
    raw.say(&Message::Received(answers));
    while answers < 4 {
        assert!(raw.answer().is_some());
        answers += 1;
    }
    raw.say(&Message::Received(answers));
    for id in 10..80 {
        raw.ask(id, read());
    }
    let more = answers / 2;
    (0..more).for_each(|_| assert!(raw.answer().is_some()));
    held(70 - more);
    // They wait for confirmation over a new connection too.
    let status = world.server.status();
    let (id, received) = (status["sessions"][1]["session"].as_u64().unwrap(), answers + more);
    let resume = Some(Resume { session_id: id, received });
    let mut raw = Raw::hello(&world, None, hello(&world, 1 << 51, resume));
    assert!(raw.welcome().resumed.is_some());
    let mut arrived = received;
    while arrived < 4 + 70 {
        assert!(raw.answer().is_some(), "{arrived}");
        arrived += 1;
        raw.say(&Message::Received(arrived));
    }
}

#[test]
fn changes_after_a_restart_wait_until_recorded_sessions_reclaim() {
    let mut world = World::new();
    let (mut holder, mut other) = (world.client(), world.client());
    other.root();
    let f = holder.place("d/f");
    let handle = holder.open(&f, READ);
    assert!(holder.call(lock(&f, 1, false, false)).result.is_ok());
    world.restart();
    again(&world, &mut other);
    assert_eq!(other.wait_linked(), Some(false));
    let now = other.now();
    other.session.handle_reclaimed(now);
    let d = other.place("d");
    let made = other.send(mkdir(&d, "new"));
    let there = other.place("d/f");
    let locked = other.send(lock(&there, 2, false, false));
    assert!(other.call(Call::StatFs { node: d.clone() }).result.is_ok(), "reading goes on");
    assert!(!other.is_answered(made) && !other.is_answered(locked));
    let given_up = other.send(mkdir(&d, "not"));
    other.cancel(given_up);
    assert_eq!(other.answer(given_up).result, Err(Errno::INTR));
    again(&world, &mut holder);
    assert_eq!(holder.wait_linked(), Some(false));
    assert!(holder.call(Call::Reopen { node: f.clone(), handle, access: READ }).result.is_ok());
    assert!(holder.call(lock(&f, 1, false, true)).result.is_ok());
    assert!(!other.is_answered(made));
    let now = holder.now();
    holder.session.handle_reclaimed(now);
    holder.drain();
    // Reopening the file granted a lease.
    holder.obliging = true;
    while !other.is_answered(made) {
        holder.pump();
    }
    assert!(other.answer(made).result.is_ok());
    assert_eq!(other.answer(locked).result, Err(Errno::AGAIN), "its holder has it again");
    let read = Call::Read { node: f, handle: Some(handle), offset: 0, length: 9 };
    assert!(holder.call(read).result.is_ok());
}

#[test]
fn restarted_server_waits_for_an_absent_client_only_for_its_lease() {
    let mut world = World::hasty();
    drop(world.client().root());
    world.restart();
    let restarted = Instant::now();
    let mut other = world.client();
    let d = other.place("d");
    let made = other.send(mkdir(&d, "new"));
    while !other.is_answered(made) {
        other.tick();
        assert!(restarted.elapsed() < Duration::from_secs(8));
    }
    assert!(restarted.elapsed() > Duration::from_secs(2));
    // The server does not wait for a client that closed its session.
    other.session.handle_close("done");
    other.drain();
    eventually("it has left", || world.server.status()["totals"]["sessions"] == 0);
    world.restart();
    let mut other = world.client();
    let d = other.place("d");
    let began = Instant::now();
    assert!(other.call(mkdir(&d, "second")).result.is_ok());
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

#[test]
fn a_server_that_cannot_record_sessions_refuses_them() {
    let world = World::with(|options| options.state_dir = "/proc/nonexistent".into());
    let why = world.client().lost();
    assert!(why.contains("/proc/nonexistent") && !why.contains('\n'), "{why}");
}

#[test]
fn unlinked_open_file_lives_as_long_as_its_session() {
    let world = World::hasty();
    let mut client = world.client();
    let (d, f) = (client.place("d"), client.place("d/f"));
    let handle = client.open(&f, READ);
    let unlink = Call::Unlink { dir: d, name: name("f"), keep: None };
    assert!(client.call(unlink).result.is_ok());
    let aside = || match std::fs::read_dir(world.dir.path().join(".nigh-orphans")) {
        Ok(entries) => entries.count(),
        Err(_) => 0,
    };
    assert_eq!(aside(), 1);
    again(&world, &mut client);
    assert_eq!(client.wait_linked(), None);
    let read = Call::Read { node: f.clone(), handle: Some(handle), offset: 0, length: 9 };
    assert!(client.call(read.clone()).result.is_ok());
    client.session.handle_disconnect(client.now(), "cut");
    wait_dormant(&world, client.session.session_id());
    assert_eq!(aside(), 1, "its session is dormant");
    client.tick();
    again(&world, &mut client);
    assert_eq!(client.wait_linked(), Some(true));
    assert!(client.call(read).result.is_ok());
    client.leave();
    let give_up = Instant::now() + Duration::from_secs(10);
    while aside() > 0 {
        assert!(Instant::now() < give_up);
        std::thread::sleep(Duration::from_millis(5));
    }
}
