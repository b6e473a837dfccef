//! One misbehaving client beside twenty honest clients: honest clients get timely replies, the server's memory stays
//! bounded, and the log names once the rule that ended the misbehaving client (docs/attacks.md).

mod common;

use common::beside::{Rogue, alone, beside, eventually, lines};
use common::client::Client;
use common::raw::{Raw, hello};
use common::world::World;
use common::*;
use nigh_native::{Hello, Message, WINDOW_BYTES, encode_request};
use nigh_remote::Remote;
use nigh_server::LeaseConfig;
use nigh_types::*;
use std::fs;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn client_that_acknowledges_nothing_is_fenced_and_delays_others_once() {
    let _alone = alone();
    // Longer than an honest client of this process may have to wait for a core.
    let patience = Duration::from_secs(1);
    let world = World::with_patience(Span::from_millis(1_000));
    beside(&world, "acknowledges nothing", 32 << 20, |_| {
        // This holder has no lease on what the honest clients change, so they do not wait for it.
        let mut holder = world.client();
        let places = ["d", "d/f"].map(|path| holder.place(path));
        assert!(!holder.list(&places[0]).1.is_empty());
        places.iter().for_each(|place| assert!(!holder.attr(place).1.is_empty()));
        let mut maker = world.client();
        maker.obliging = true;
        let d = maker.place("d");
        let make = |maker: &mut Client, text: &str| {
            let begun = Instant::now();
            let mkdir = Call::Mkdir { dir: d.clone(), name: name(text), mode: 0o700, umask: 0 };
            let call = maker.send(mkdir);
            while !maker.is_answered(call) {
                let now = maker.now();
                maker.session.handle_timeout(now);
                maker.drain();
                assert!(begun.elapsed() < Duration::from_secs(10), "it waits for ever");
            }
            assert!(maker.answer(call).result.is_ok());
            begun.elapsed()
        };
        // `patience`, and 1.1 times the session term.
        let first = make(&mut maker, "first");
        assert!(first < patience + Duration::from_millis(2_200 + 3_000), "{first:?}");
        assert!(first > patience, "it was waited for: {first:?}");
        holder.cut();
        for text in ["second", "third"] {
            holder.go_on_over(world.server.serve_in_process().unwrap());
            holder.wait_linked();
            for place in &places {
                assert_eq!(holder.attr(place).1, [], "it is answered, and granted nothing");
            }
            assert_eq!(holder.list(&places[0]).1, []);
            let again = make(&mut maker, text);
            assert!(again < patience, "no change waits for it again: {again:?}");
        }
        maker.leave();
    });
    assert_eq!(lines(&["event=\"fenced\"", "rule="]).len(), 1, "{:#?}", lines(&[]));
    assert_eq!(lines(&["event=\"suspect\"", "rule="]).len(), 1);
}

#[test]
fn client_requesting_every_lease_gets_its_share_and_delays_no_other() {
    const SHARE: u64 = 500;
    let _alone = alone();
    let world = World::with(|options| {
        options.leases = LeaseConfig { grants_per_holder: SHARE, ..options.leases };
    });
    let many = 1_000;
    for nth in 0..many {
        fs::create_dir_all(world.dir.path().join(format!("many/{nth}"))).unwrap();
    }
    let (mut most, mut rounds) = (0, 0);
    beside(&world, "asks for every lease", 32 << 20, |stop| {
        let mut greedy = world.client();
        greedy.obliging = true;
        let here = greedy.place("many");
        let entries = greedy.list(&here).0;
        while !stop.load(Ordering::Relaxed) || rounds == 0 {
            rounds += 1;
            for some in entries.chunks(100) {
                let place = |(text, entry): &(Name, Entry)| NodeRef {
                    node: entry.id,
                    path_hint: Some((here.node, text.clone())),
                };
                let calls = some.iter().flat_map(|entry| {
                    let dir = place(entry);
                    [Call::GetAttr { node: dir.clone() }, Call::Lookup { dir, name: name("absent") }]
                });
                let calls: Vec<CallId> = calls.map(|call| greedy.send(call)).collect();
                calls.into_iter().for_each(|call| assert!(greedy.answer(call).result.is_ok()));
                let holders = world.server.leases().holders;
                most = holders.iter().map(|holder| holder.grants).max().unwrap_or(0).max(most);
            }
        }
    });
    println!("asks for every lease: {rounds} times {} leases, {most} held at the most", many * 2);
    assert!((SHARE..=SHARE + SHARE / 64 + 1).contains(&most), "{most} leases of one client");
    assert_eq!(lines(&["event=\"ended\"", "broke the protocol"]).len(), 0, "it broke no rule");
}

#[test]
fn client_holding_many_leases_without_acknowledging_delays_others_once() {
    let _alone = alone();
    let world = World::hasty();
    let many = 500;
    for nth in 0..many {
        fs::create_dir_all(world.dir.path().join(format!("many/{nth}"))).unwrap();
    }
    let mut held = 0;
    beside(&world, "takes every lease", 32 << 20, |_| {
        let mut greedy = world.client();
        let here = greedy.place("many");
        let entries = greedy.list(&here).0;
        let places: Vec<NodeRef> = entries
            .iter()
            .map(|(text, entry)| NodeRef { node: entry.id, path_hint: Some((here.node, text.clone())) })
            .collect();
        for dir in &places {
            greedy.attr(dir);
            assert!(greedy.call(Call::Lookup { dir: dir.clone(), name: name("absent") }).result.is_ok());
        }
        held = world.server.leases().holders.iter().map(|holder| holder.grants).max().unwrap_or(0);
        let mut maker = world.client();
        maker.obliging = true;
        let begun = Instant::now();
        // All calls at once: the lease timeouts do not add up.
        let mkdir =
            |dir: &NodeRef| Call::Mkdir { dir: dir.clone(), name: name("new"), mode: 0o700, umask: 0 };
        let calls: Vec<CallId> = places.iter().map(|dir| maker.send(mkdir(dir))).collect();
        while !maker.is_answered(calls[0]) {
            let now = maker.now();
            maker.session.handle_timeout(now);
            maker.drain();
            assert!(begun.elapsed() < Duration::from_secs(10), "it waits for ever");
        }
        calls.into_iter().for_each(|call| assert!(maker.answer(call).result.is_ok()));
        assert!(begun.elapsed() < Duration::from_millis(300 + 2_200 + 3_000), "{:?}", begun.elapsed());
        maker.leave();
        greedy.cut();
    });
    assert!(held >= 2 * many, "{held} leases");
    assert_eq!(lines(&["event=\"fenced\"", "rule="]).len(), 1, "{:#?}", lines(&[]));
}

#[test]
fn client_that_confirms_nothing_gets_one_window_beside_other_clients() {
    const LONG: usize = 4_000;
    let _alone = alone();
    let world = World::new();
    std::os::unix::fs::symlink("x".repeat(LONG), world.dir.path().join("long")).unwrap();
    let mut answered = 0;
    beside(&world, "confirms nothing", 32 << 20, |stop| {
        let mut raw = Raw::hello(&world, None, Hello { client: 66, ..hello(&world, 1 << 52, None) });
        raw.welcome();
        let node = world.client().place("long");
        raw.waits(Duration::from_millis(300));
        let (mut id, mut silent) = (0, 0);
        // Many calls outstanding all the time, until no more replies arrive.
        while !stop.load(Ordering::Relaxed) || silent == 0 {
            while id < answered + 500 {
                id += 1;
                raw.ask(id, Call::ReadLink { node: node.clone() });
            }
            match raw.answer() {
                Some(_) => answered += 1,
                None => silent += 1,
            }
        }
        assert!(answered * LONG as u64 <= WINDOW_BYTES + (1 << 20), "{answered} answers");
        assert!(answered * LONG as u64 >= WINDOW_BYTES / 2, "{answered} answers");
        // The client only has to confirm what it has received.
        raw.say(&Message::Received(answered));
        assert!(raw.answer().is_some(), "the session stands");
        answered += 1;
    });
    println!("confirms nothing: {answered} answers");
}

#[test]
fn garbage_ends_its_senders_session_with_one_log_line() {
    let _alone = alone();
    let world = World::new();
    let mut ended = 0_u64;
    beside(&world, "garbage", 32 << 20, |stop| {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        while !stop.load(Ordering::Relaxed) || ended == 0 {
            let mut garbage: Vec<u8> = (0..4096)
                .map(|_| {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (random >> 56) as u8
                })
                .collect();
            // A frame of unknown type, short enough to be decoded; the rest belongs to a request.
            garbage[..4].copy_from_slice(&64_u32.to_le_bytes());
            garbage[4] = if ended.is_multiple_of(2) { 0xee } else { 4 };
            garbage[5] = 0;
            let mut rogue = Rogue::attached(&world);
            // The server may have ended the session by then.
            let _ = rogue.stream.write_all(&garbage);
            rogue.ended();
            ended += 1;
        }
    });
    eventually("all who sent garbage are gone", Duration::from_secs(10), || {
        world.server.session_count() == 0
    });
    let broke = || lines(&["event=\"ended\"", "the client broke the protocol: "]).len() as u64;
    // Log lines are rate-limited, so that many sessions cannot fill the disk.
    eventually("each has its line, while there are not too many", Duration::from_secs(10), || {
        broke() >= ended.min(400)
    });
    println!("garbage: {ended} sessions, {} lines", broke());
    assert!(broke() <= ended, "{} of {ended}", broke());
}

/// Names that an honest client cannot send, in every place where a request carries a name.
#[test]
fn invalid_name_in_any_request_ends_the_session_with_one_log_line() {
    let _alone = alone();
    let world = World::new();
    let mut good = world.client();
    let (root, d) = (good.root(), good.place("d"));
    let calls = |leaf: Name| {
        let (from, to, new) = (d.clone(), d.clone(), leaf.clone());
        [
            Call::Lookup { dir: d.clone(), name: leaf.clone() },
            Call::GetAttr { node: NodeRef { node: d.node, path_hint: Some((root.node, leaf.clone())) } },
            Call::ResolvePath { node: root.node, names: vec![leaf.clone(), name("secret")] },
            Call::Mkdir { dir: d.clone(), name: leaf.clone(), mode: 0o700, umask: 0 },
            Call::Unlink { dir: d.clone(), name: leaf, keep: None },
            Call::Rename {
                from,
                name: name("f"),
                to,
                new_name: new,
                no_replace: false,
                exchange: false,
                whiteout: false,
                keep: None,
            },
        ]
    };
    let mut sent = 0;
    for bad in [&b".."[..], b".", b"../x", b"/etc", b"d/f", b"x\0"] {
        let stand_in = vec![b'@'; bad.len()];
        for call in calls(Name::new(&stand_in).unwrap()) {
            let name = MutationId { client: 66, incarnation: 1, sequence: 1 };
            let name = call.is_mutation().then_some(name);
            let mut frame =
                encode_request(CallId(1), &Request { credentials: me(), mutation_id: name, call });
            // Searched together with its length prefix: the bytes alone may occur elsewhere.
            let prefix = u16::try_from(bad.len()).unwrap().to_le_bytes();
            let (sought, put) = ([&prefix, &stand_in[..]].concat(), [&prefix, bad].concat());
            let at = frame.windows(sought.len()).position(|window| window == sought).unwrap();
            frame[at..at + put.len()].copy_from_slice(&put);
            let mut rogue = Rogue::attached(&world);
            rogue.stream.write_all(&frame).unwrap();
            rogue.ended();
            sent += 1;
        }
    }
    eventually("all who sent such a name are gone", Duration::from_secs(10), || {
        world.server.session_count() == 1
    });
    let broke = || lines(&["event=\"ended\"", "the client broke the protocol: ", "name"]).len();
    eventually("it is said of each of them", Duration::from_secs(10), || broke() >= sent);
    assert_eq!(broke(), sent, "{:#?}", lines(&[]));
    assert_eq!(good.list(&d).0.len(), 3, "nothing was made, moved or removed");
}

#[test]
fn partial_frame_uses_only_received_memory_and_ends_with_the_lease() {
    let _alone = alone();
    let world = World::hasty();
    let (rogues, arrived) = (50_u32, 16 << 10);
    beside(&world, "half a frame", 48 << 20, |stop| {
        let mut half = (4_u32 << 20).to_le_bytes().to_vec();
        half.extend([4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        half.resize(arrived, 0);
        let rogues: Vec<Rogue> = (0..rogues)
            .map(|_| {
                let mut rogue = Rogue::attached(&world);
                rogue.stream.write_all(&half).unwrap();
                rogue
            })
            .collect();
        let mut stranger = world.server.serve_in_process().unwrap();
        stranger.write_all(b"\x40\0\0\0\x01\0\0\0").unwrap();
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(10));
        }
        rogues.into_iter().for_each(Rogue::ended);
        stranger.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut rest = Vec::new();
        stranger.read_to_end(&mut rest).unwrap();
    });
    let fenced = || lines(&["event=\"fenced\"", "rule="]).len();
    eventually("there is a line for each", Duration::from_secs(5), || fenced() >= rogues as usize);
    assert_eq!(fenced(), rogues as usize, "one line for each");
    eventually("the stranger's end stands in the log", Duration::from_secs(5), || {
        lines(&["event=\"ended\"", "it did not say hello in time"]).len() == 1
    });
}

#[test]
fn client_that_reads_nothing_is_cut_and_delays_no_other() {
    let _alone = alone();
    let world = World::new();
    // The bound on a client's send queue (`Outbox::LIMIT`), and some memory for its calls.
    beside(&world, "asks and reads nothing", 48 << 20, |stop| {
        let mut rogue = Rogue::attached(&world);
        let node = NodeRef::without_hint(world.client().root().node);
        let mut frame = rogue.request(1, Call::GetAttr { node });
        let (mut id, number) = (1_u64, rogue.session.session_id());
        rogue.stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
        let seen = |key: &str| {
            let status = world.server.status();
            let mut sessions = status["sessions"].as_array().unwrap().iter();
            let session = sessions.find(|session| session["session"] == number);
            session.map_or(0, |session| session.pointer(key).unwrap().as_u64().unwrap())
        };
        let mut sent = seen("/bytes/in");
        while !stop.load(Ordering::Relaxed) {
            // Stay below the limit of outstanding calls, which would end the session.
            if seen("/bytes/in") < sent || seen("/calls/unanswered") > 512 {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
            // The call id follows length, type and flags.
            let batch: Vec<u8> = (0..256)
                .flat_map(|_| {
                    id += 1;
                    frame[8..16].copy_from_slice(&id.to_le_bytes());
                    frame.clone()
                })
                .collect();
            if rogue.stream.write_all(&batch).is_err() {
                break;
            }
            sent += batch.len() as u64;
        }
        println!("asks and reads nothing: {id} calls");
        // The server waits 20 s for the peer to read; calls sent meanwhile renew the lease.
        eventually("it is cut off", Duration::from_secs(40), || {
            std::thread::sleep(Duration::from_millis(200));
            id += 1;
            frame[8..16].copy_from_slice(&id.to_le_bytes());
            let _ = rogue.stream.write(&frame);
            lines(&["event=\"cut\"", "the client does not read"]).len() == 1
        });
    });
}

#[test]
fn client_flooding_confirmations_does_not_delay_idle_clients() {
    // One thread polls all connections that were idle for 200 ms.
    const QUIET: Duration = Duration::from_millis(300);
    let _alone = alone();
    let world = World::new();
    let rogue = Rogue::attached(&world);
    // A small send buffer, so that the bytes in flight never fill the server's read buffer.
    rustix::net::sockopt::set_socket_send_buffer_size(&rogue.stream, 1).unwrap();
    let mut others: Vec<Client> = (0..3).map(|_| world.client()).collect();
    let places: Vec<NodeRef> = others.iter_mut().map(|other| other.place("d")).collect();
    let stop = AtomicBool::new(false);
    let (said, times) = std::thread::scope(|scope| {
        let talk = || {
            std::thread::sleep(QUIET);
            let (frame, mut said) = (Message::Received(0).encode(), 0_u64);
            while !stop.load(Ordering::Relaxed) && (&rogue.stream).write_all(&frame).is_ok() {
                said += 1;
            }
            said
        };
        let talkers = [scope.spawn(talk), scope.spawn(talk)];
        let mut times = Vec::new();
        for _ in 0..8 {
            std::thread::sleep(QUIET);
            for (other, place) in others.iter_mut().zip(&places) {
                let begun = Instant::now();
                other.attr(place);
                times.push(begun.elapsed());
            }
        }
        stop.store(true, Ordering::Relaxed);
        (talkers.map(|talker| talker.join().unwrap()).iter().sum::<u64>(), times)
    });
    let longest = times.iter().max().unwrap();
    println!("{said} signs of life; others who were quiet waited {longest:.1?} at the most");
    assert!(said > 10_000, "{said}");
    assert!(*longest < Duration::from_millis(500), "{times:?}");
}
