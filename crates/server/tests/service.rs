//! The server as a service: its status, and its shutdown.

mod common;

use common::client::Client;
use common::world::World;
use common::*;
use nigh_remote::Event;
use nigh_server::{LeaseConfig, status_page};
use nigh_types::*;
use serde_json::{Value, json};

fn session(status: &Value, number: u64) -> Value {
    let sessions = status["sessions"].as_array().unwrap();
    sessions.iter().find(|session| session["session"] == number).cloned().unwrap_or(Value::Null)
}

#[test]
fn status_lists_lease_holders_and_clients_waiting_for_them() {
    let world = World::hasty();
    let mut holder = world.client();
    let d = holder.place("d");
    holder.list(&d);
    let f = holder.place("d/f");
    holder.open(&f, READ);
    let mut mutator = world.client();
    let here = mutator.place("d");
    let call = mutator.send(mkdir(&here, "new"));
    eventually("parked", || session(&world.server.status(), 2)["calls"]["parked"] == 1);
    let status = world.server.status();
    let (one, two) = (session(&status, 1), session(&status, 2));
    assert_eq!(one["open_files"], 1);
    assert!(
        one["grants"]["read"].as_u64().unwrap() > 0 && one["recalls"]["owed"].as_u64().unwrap() > 0,
        "{one}"
    );
    assert!(one["recalls"]["oldest_ms"].is_u64() && two["recalls"]["oldest_ms"].is_null());
    assert_eq!((&two["waits"][0]["call"], &two["waits"][0]["for"]), (&json!("mkdir"), &json!([1])));
    assert_eq!(one["export"], world.dir.path().display().to_string());
    let bytes = |session: &Value| {
        (session["bytes"]["in"].as_u64().unwrap(), session["bytes"]["out"].as_u64().unwrap())
    };
    assert!(bytes(&one).0 > 100 && bytes(&one).1 > 100);
    eventually("suspect", || session(&world.server.status(), 1)["suspect"] == true);
    assert!(status_page(&world.server.status()).contains("mkdir waits for session 1"));
    holder.give_back_next();
    assert!(mutator.answer(call).result.is_ok());
    let status = world.server.status();
    assert_eq!((&session(&status, 1)["suspect"], &session(&status, 2)["waits"]), (&json!(false), &json!([])));
    assert_eq!((&status["totals"]["suspected"], &status["totals"]["sessions"]), (&json!(1), &json!(2)));
}

#[test]
fn status_lists_lock_waits_contended_directories_and_lost_clients() {
    // Long windows, so that on a slow machine too the recalls count as contention.
    let long = Span::from_secs(600);
    let world = World::with(|options| {
        options.leases =
            LeaseConfig { young: long, contention_window: long, cooldown: long, ..options.leases };
    });
    let mut one = world.client();
    let f = one.place("d/f");
    let mut two = world.client();
    let g = two.place("d/f");
    one.obliging = true;
    two.obliging = true;
    let lock = |node: &NodeRef, wait| Call::Lock {
        node: node.clone(),
        owner: 7,
        flock: true,
        kind: LockKind::Write,
        start: 0,
        end: u64::MAX,
        wait,
        pid: 1,
        reclaim: false,
    };
    assert!(one.call(lock(&f, false)).result.is_ok());
    two.send(lock(&g, true));
    eventually("waiting", || session(&world.server.status(), 2)["calls"]["waiting_for_locks"] == 1);
    let status = world.server.status();
    assert_eq!(session(&status, 1)["locks"], 1);
    assert_eq!(session(&status, 2)["waits"][0], json!({ "call": "lock", "for": [1], "since_ms": null }));
    eventually("a call that waits for a lock does not count", || world.server.calls_under_way() == 0);
    let (d, e) = (one.place("d"), two.place("d"));
    for round in 0..3 {
        one.list(&d);
        two.list(&e);
        let a = one.send(mkdir(&d, &format!("a{round}")));
        eventually("given back", || {
            two.pump();
            one.is_answered(a)
        });
        let b = two.send(mkdir(&e, &format!("b{round}")));
        eventually("given back", || {
            one.pump();
            two.is_answered(b)
        });
    }
    let status = world.server.status();
    let path = world.dir.path().join("d").display().to_string();
    let contended = status["contended"].as_array().unwrap();
    assert!(contended.iter().any(|c| c["path"] == path && c["covers"] == "names"), "{contended:?}");
    one.list(&d);
    drop(one);
    eventually("lost", || session(&world.server.status(), 1)["connected"] == false);
    assert_eq!(session(&world.server.status(), 1)["dormant"], false);
    assert!(status_page(&world.server.status()).contains("connection lost"));
}

#[test]
fn status_contains_no_client_secrets() {
    let world = World::new();
    let (client, incarnation) = (1_u64, 0x1234_5678_9abc_def0_u64);
    let stream = world.server.serve_in_process().unwrap();
    let mut attached = Client::over(stream, world.dir.path(), Term::Session, incarnation);
    attached.session();
    let status = world.server.status();
    let text = status.to_string();
    for secret in [format!("{incarnation}"), format!("{incarnation:x}"), format!("{client:016x}")] {
        assert!(!text.contains(&secret), "{secret}: {text}");
    }
    assert_eq!(session(&status, 1)["client"], "00000000");
}

#[test]
fn stopping_server_finishes_accepted_calls_and_accepts_no_more() {
    let world = World::new();
    let mut holder = world.client();
    let d = holder.place("d");
    holder.list(&d);
    let mut mutator = world.client();
    let here = mutator.place("d");
    let parked = mutator.send(mkdir(&here, "new"));
    eventually("parked", || session(&world.server.status(), 2)["calls"]["parked"] == 1);
    world.server.stop_taking();
    // A call counts until its thread is done with it, which may be after the client has the reply.
    eventually("one under way", || world.server.calls_under_way() == 1);
    let late = mutator.send(mkdir(&here, "late"));
    assert!(!mutator.is_answered(late) && !mutator.is_answered(parked));
    let mut stranger = world.client();
    assert!(stranger.lost().contains("the server stops"));
    holder.give_back_next();
    assert!(mutator.answer(parked).result.is_ok());
    eventually("done", || world.server.calls_under_way() == 0);
    assert!(!mutator.is_answered(late));
    world.server.end_sessions("the server stops; come again");
    mutator.cut();
    let is_lost = mutator.events.iter().any(|event| matches!(event, Event::Lost { .. }));
    assert!(!is_lost, "it is told nothing, and goes on with the next one");
    assert!(world.dir.path().join("d/new").is_dir() && !world.dir.path().join("d/late").exists());
}
