//! A session whose connection is cut repeatedly under load (docs/decisions/0009-sessions-over-connections.md).

use crate::common::client::Client;
use crate::common::world::{World, again};
use crate::common::*;
use nigh_remote::Event;
use nigh_types::*;
use std::collections::BTreeSet;
use std::time::Duration;

#[derive(Clone, Copy)]
enum Asked {
    Append,
    Mkdir,
    Read,
    List,
}

/// Returns all parts of the reply to a call.
fn whole(client: &mut Client, call: CallId) -> Vec<Reply> {
    let mut parts = Vec::new();
    loop {
        let response = client.answer(call);
        parts.push(response.result.expect("nothing fails because of a cut"));
        if response.last {
            return parts;
        }
    }
}

/// Checks that each reply was correct when it was made, as far as the final state can show.
fn check_answers(answers: &[(Asked, Vec<Reply>)], written: &str) {
    let mut places = BTreeSet::new();
    for (asked, parts) in answers {
        match (asked, &parts[..]) {
            (Asked::Append, [Reply::Written { offset, count: 16 }]) => {
                assert!(places.insert(*offset), "two records are said to be at {offset}");
            }
            (Asked::Mkdir, [Reply::Created { existed: false, .. }]) => {}
            (Asked::Read, [Reply::Data(data)]) => {
                assert!(written.as_bytes().starts_with(data), "what is read was not written");
            }
            (Asked::List, parts) => {
                let name = |(name, _): &(Name, Entry)| name.as_bytes().to_vec();
                let listed = parts.iter().flat_map(|part| match part {
                    Reply::Listed(part) => part.entries.iter().map(name),
                    other => panic!("{other:?}"),
                });
                let mut listed: Vec<_> = listed.collect();
                listed.sort();
                assert_eq!(listed, [&b"d"[..], b"d2"]);
            }
            (_, other) => panic!("{other:?}"),
        }
    }
    assert_eq!(places, (0..800).map(|record| 8 + record * 16).collect());
}

/// A repeated append or exclusive create would be visible; reads return the written data.
#[test]
fn hundred_reconnects_under_load_lose_and_repeat_no_call() {
    // A long term, so that nothing expires on a slow machine.
    let world = World::with(|options| options.session_term = Span::from_secs(600));
    let mut client = world.client();
    client.obliging = true;
    let (root, d) = (client.root(), client.place("d"));
    let node = client.place("d/f");
    let handle = client.open(&node, BOTH);
    let mut dice = 7_u64;
    let mut below = |n: u64| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (dice >> 33) % n
    };
    let (mut calls, mut records) = (Vec::new(), 0);
    for round in 0..100 {
        for at in 0..8 {
            records += 1;
            calls.push((Asked::Append, client.send(append(&node, handle, records))));
            calls.push((Asked::Mkdir, client.send(mkdir(&d, &format!("made-{round}-{at}")))));
            let read = Call::Read { node: node.clone(), handle: Some(handle), offset: 0, length: 1 << 20 };
            calls.push((Asked::Read, client.send(read)));
            calls.push((Asked::List, client.send(Call::List { dir: root.clone() })));
        }
        std::thread::sleep(Duration::from_micros(below(3_000)));
        if below(2) == 0 {
            client.pump();
        }
        again(&world, &mut client);
    }
    let answers: Vec<_> = calls.into_iter().map(|(asked, call)| (asked, whole(&mut client, call))).collect();
    let written = std::fs::read_to_string(world.dir.path().join("d/f")).unwrap();
    let seen: Vec<u64> = written["12345678".len()..].lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(seen.len() as u64, records);
    assert_eq!(seen.iter().copied().collect::<BTreeSet<u64>>(), (1..=records).collect());
    let made: BTreeSet<_> =
        std::fs::read_dir(world.dir.path().join("d")).unwrap().map(|e| e.unwrap().file_name()).collect();
    let expected = (0..100).flat_map(|round| (0..8).map(move |at| format!("made-{round}-{at}").into()));
    assert_eq!(made, expected.chain(["e", "f", "h"].map(Into::into)).collect());
    check_answers(&answers, &written);
    assert!(!client.events.iter().any(|e| matches!(e, Event::Lost { .. } | Event::Expired { .. })));
    assert_eq!(world.server.session_count(), 1);
}
