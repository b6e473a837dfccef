//! Limits on one client's use of server resources, so that other clients are not affected
//! (docs/decisions/0009-sessions-over-connections.md, "Bounds").

mod common;

use common::client::Client;
use common::raw::{Raw, hello};
use common::world::World;
use common::*;
use nigh_link::{Claims, Peer, Squash};
use nigh_native::{Hello, Message, Resume};
use nigh_remote::{Event, Remote};
use nigh_server::ServerLimits;
use nigh_types::*;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

/// Counts the sessions in the status whose `key` has this value.
fn count(world: &World, key: &str, value: bool) -> usize {
    let status = world.server.status();
    status["sessions"].as_array().unwrap().iter().filter(|session| session[key] == value).count()
}

/// Attaches a session and opens a file; returns the connection and the session id.
fn opened(world: &World, who: (u64, u64), node: &NodeRef) -> (Raw, u64) {
    let mut raw = Raw::hello(world, None, Hello { client: who.0, ..hello(world, who.1, None) });
    let session = raw.welcome().session_id;
    raw.ask(1, Call::Open { node: node.clone(), access: READ });
    assert!(raw.answer().unwrap().result.is_ok());
    (raw, session)
}

/// Returns the reason for a refused hello: one line, followed by the end of the connection.
fn refusal(mut raw: Raw) -> String {
    let why = match raw.message() {
        Message::Refused(refused) => refused.message,
        other => panic!("{other:?}"),
    };
    assert!(!why.contains('\n'), "{why}");
    raw.ends();
    why
}

/// Whether the server still has the session.
fn resumes(world: &World, who: (u64, u64), session_id: u64) -> bool {
    let resume = Some(Resume { session_id, received: 1 });
    let mut raw = Raw::hello(world, None, Hello { client: who.0, ..hello(world, who.1, resume) });
    raw.welcome().resumed.is_some()
}

#[test]
fn hundreds_of_briefly_disconnected_clients_all_resume_their_sessions() {
    const CLIENTS: u64 = 300;
    let world = World::with(|options| options.session_term = Span::from_secs(60));
    let node = world.client().place("d/f");
    let sessions: Vec<(Raw, u64)> = (0..CLIENTS).map(|n| opened(&world, (1, 1000 + n), &node)).collect();
    let numbers: Vec<u64> = sessions.iter().map(|(_, number)| *number).collect();
    drop(sessions);
    eventually("all are away", || {
        assert!(world.server.session_count() >= CLIENTS, "none is forgotten");
        count(&world, "connected", false) as u64 == CLIENTS + 1
    });
    // The session reaper runs every second.
    std::thread::sleep(Duration::from_millis(1_200));
    for (n, number) in numbers.into_iter().enumerate() {
        assert!(resumes(&world, (1, 1000 + n as u64), number), "session {number}");
    }
}

#[test]
fn dormant_sessions_have_a_limit_per_client() {
    let world = World::with(|options| {
        options.session_term = Span::from_secs(2);
        options.bounds = ServerLimits { courtesy_per_client: 8, ..options.bounds };
    });
    let node = world.client().place("d/f");
    // The victim disconnects first, so it is the longest disconnected.
    let (victim, number) = opened(&world, (2, 1), &node);
    drop(victim);
    std::thread::sleep(Duration::from_millis(300));
    let rogues: Vec<_> = (0..40).map(|n| opened(&world, (1, 1000 + n), &node)).collect();
    drop(rogues);
    eventually("eight are left, and the victim", || count(&world, "dormant", true) == 9);
    std::thread::sleep(Duration::from_millis(1_200));
    assert_eq!(count(&world, "dormant", true), 9);
    assert!(resumes(&world, (2, 1), number), "who did nothing is not forgotten");
}

#[test]
fn session_limit_refuses_in_one_line_and_dormant_sessions_make_room() {
    let world = World::with(|options| {
        options.session_term = Span::from_secs(2);
        options.bounds = ServerLimits { sessions_per_origin: 6, ..options.bounds };
    });
    let mut first = world.client();
    let node = first.place("d/f");
    let mut many: Vec<_> = (0..5).map(|n| opened(&world, (10 + n, 1), &node)).collect();
    let stay = |raws: &mut [(Raw, u64)]| {
        raws.iter_mut().for_each(|(raw, _)| raw.say(&Message::Ping(1, 1)));
    };
    let why = refusal(Raw::hello(&world, None, Hello { client: 99, ..hello(&world, 1, None) }));
    assert!(why.contains("has 6 sessions") && why.contains("unmount what is not needed there"), "{why}");
    assert!(first.call(Call::GetAttr { node: node.clone() }).result.is_ok(), "those that stand go on");
    // One client disconnects; its session makes room once it is dormant.
    drop(many.pop());
    let begun = Instant::now();
    while count(&world, "dormant", true) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(20));
        stay(&mut many);
        first.pump();
        let now = first.now();
        first.session.handle_timeout(now);
        first.drain();
        std::thread::sleep(Duration::from_millis(50));
    }
    let (_late, _) = opened(&world, (99, 1), &node);
    assert_eq!(count(&world, "dormant", true), 0);
    assert!(first.call(Call::GetAttr { node }).result.is_ok());
    assert_eq!(count(&world, "connected", true), 6);
}

#[test]
fn server_at_its_session_limit_tells_a_new_origin_the_reason() {
    let world = World::with(|options| options.bounds = ServerLimits { sessions: 3, ..options.bounds });
    let many = [(); 3].map(|()| world.client().session());
    let stranger = Peer::new("tcp", Claims::Only(me()), Squash::None).from_host("10.0.0.1".parse().unwrap());
    let hello = Hello { client: 99, ..hello(&world, 1, None) };
    let why = refusal(Raw::hello(&world, Some(stranger.with_any_path()), hello));
    assert!(why.contains("this server has 3 sessions") && why.contains("other machines"), "{why}");
    drop(many);
}

#[test]
fn connection_without_hello_times_out_despite_dripped_bytes() {
    let world = World::with(|options| options.session_term = Span::from_secs(1));
    let mut stranger = world.server.serve_in_process().unwrap();
    // A frame of an unknown type, with the flag that lets receivers ignore it.
    let mut ignored = [0; 16];
    (ignored[4], ignored[5]) = (99, 1);
    let begun = Instant::now();
    while stranger.write_all(&ignored).is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(10), "it is listened to for ever");
        std::thread::sleep(Duration::from_millis(20));
    }
    eventually("no session is left", || world.server.session_count() == 0);
}

/// Queued replies must be freed with the session, not kept uncounted until the write timeout.
#[test]
fn replies_queued_for_a_violating_client_are_freed_with_its_session() {
    let world = World::new();
    std::fs::write(world.dir.path().join("d/large"), vec![b'x'; 4 << 20]).unwrap();
    let node = world.client().place("d/large");
    let mut rogue = Raw::hello(&world, None, Hello { client: 9, ..hello(&world, 1, None) });
    let session = rogue.welcome().session_id;
    (1..4).for_each(|id| {
        rogue.ask(id, Call::Read { node: node.clone(), handle: None, offset: 0, length: 4 << 20 });
    });
    let shown = || {
        let status = world.server.status();
        let sessions = status["sessions"].as_array().unwrap().clone();
        sessions.into_iter().find(|shown| shown["session"] == session && shown["connected"] == true)
    };
    eventually("an answer is queued for it", || {
        shown().is_some_and(|shown| shown["bytes"]["unconfirmed"].as_u64().unwrap() > 4 << 20)
    });
    rogue.stream.write_all(&[0xff; 64]).unwrap();
    eventually("its session is over", || shown().is_none());
    std::thread::sleep(Duration::from_millis(200));
    let mut left = Vec::new();
    let _ = rogue.stream.read_to_end(&mut left);
    assert!(left.len() < 2 << 20, "{} bytes were still kept for it", left.len());
}

#[test]
fn names_of_blocked_listings_count_as_session_memory() {
    const NAMES: u64 = 20_000;
    let world = World::new();
    for n in 0..NAMES {
        std::fs::write(world.dir.path().join(format!("d/e/{n:0>200}")), "").unwrap();
    }
    let dir = world.client().place("d/e");
    let mut slow = Raw::hello(&world, None, Hello { client: 9, ..hello(&world, 1, None) });
    let session = slow.welcome().session_id;
    slow.ask(1, Call::List { dir });
    let bytes = |key: &str| {
        let status = world.server.status();
        let sessions = status["sessions"].as_array().unwrap().iter();
        let shown = sessions.clone().find(|shown| shown["session"] == session);
        shown.map_or(0, |shown| shown["bytes"][key].as_u64().unwrap())
    };
    let names = || bytes("held").saturating_sub(bytes("unconfirmed"));
    eventually("its names are counted", || names() >= NAMES * 224);
    slow.stream.write_all(&[0xff; 64]).unwrap();
    let held = || world.server.status()["totals"]["bytes"]["held"].as_u64().unwrap();
    eventually("nothing is kept any more", || held() < 1 << 20);
}

/// The limit of unanswered bytes per client is lower if the server's limit for all clients is low.
#[test]
fn large_concurrent_writes_do_not_expire_their_sessions() {
    let world = World::with(|options| options.bounds = ServerLimits { bytes: 64 << 20, ..options.bounds });
    for n in 0..4 {
        std::fs::write(world.dir.path().join(format!("d/w{n}")), "12345678").unwrap();
    }
    // Writes stay unanswered as long as this holder acknowledges no recall.
    let mut holder = world.client();
    let nodes = [0, 1, 2, 3].map(|n| holder.place(&format!("d/w{n}")));
    nodes.iter().for_each(|node| drop(holder.read(node)));
    let mut writers = nodes.map(|node| {
        let mut writer = world.client();
        writer.session();
        for nth in 0..20 {
            let (node, offset, data) = (node.clone(), nth << 20, vec![7; 1 << 20]);
            writer.send(Call::Write { node, handle: None, offset, data, flags: WriteFlags::default() });
        }
        writer
    });
    let held = || world.server.status()["totals"]["bytes"]["held"].as_u64().unwrap();
    eventually("what each may have out is there", || {
        writers.iter_mut().for_each(Client::pump);
        held() >= 48 << 20
    });
    std::thread::sleep(Duration::from_millis(200));
    assert!(held() <= 64 << 20, "{} bytes", held());
    holder.obliging = true;
    let written = |writer: &Client| {
        let done = |e: &&Event| matches!(e, Event::Response { response, .. } if response.result.is_ok());
        writer.events.iter().filter(done).count()
    };
    eventually("all is written", || {
        holder.pump();
        writers.iter_mut().for_each(Client::pump);
        writers.iter().all(|writer| written(writer) == 20)
    });
    assert_eq!(world.server.session_count(), 5, "all of them stand");
}

#[test]
fn memory_limit_of_all_sessions_ends_a_session_of_the_largest_client() {
    let world = World::with(|options| options.bounds = ServerLimits { bytes: 7 << 20, ..options.bounds });
    let mut good = world.client();
    let node = good.place("d/f");
    let mut half = (4_u32 << 20).to_le_bytes().to_vec();
    half.extend([4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    half.resize(2 << 20, 0);
    let mut rogues: Vec<_> = (0..3).map(|n| opened(&world, (10, n), &node)).collect();
    let (mut other, number) = opened(&world, (11, 1), &node);
    other.stream.write_all(&half).unwrap();
    for (rogue, _) in &mut rogues {
        let _ = rogue.stream.write_all(&half);
    }
    let held = || world.server.status()["totals"]["bytes"]["held"].as_u64().unwrap();
    eventually("one of them makes room", || world.server.session_count() == 4 && held() <= 7 << 20);
    let numbers = || {
        let status = world.server.status();
        let sessions = status["sessions"].as_array().unwrap().iter();
        sessions.map(|session| session["session"].as_u64().unwrap()).collect::<Vec<u64>>()
    };
    assert!(numbers().contains(&number), "another client's, who has less, stays");
    assert!(good.call(Call::GetAttr { node }).result.is_ok());
    drop((rogues, other));
    eventually("what went away keeps nothing of a frame", || held() < 1 << 20);
}
