//! The server over streams, with the client's end of the protocol.

use crate::common::client::Client;
use crate::common::*;
use nigh_server::{Server, ServerOptions};
use nigh_types::*;
use std::fs;
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn server() -> (Arc<Server>, TempDir, TempDir) {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    (Server::new(ServerOptions::new(state.path().to_owned())).unwrap(), state, dir)
}

const SOON: Term = Term::Limited(Span::from_secs(5));

#[test]
fn a_client_attaches_works_and_leaves() {
    let (server, _state, dir) = server();
    let mut client = Client::connect(&server, dir.path(), SOON);
    let root = client.session().root;
    let made =
        client.call(Call::Mkdir { dir: NodeRef::without_hint(root), name: name("d"), mode: 0o700, umask: 0 });
    assert!(matches!(made.result, Ok(Reply::Created { .. })));
    assert!(dir.path().join("d").is_dir());
    let listed = client.call(Call::List { dir: NodeRef::without_hint(root) });
    assert!(matches!(listed.result, Ok(Reply::Listed(part)) if part.entries.len() == 1));
    assert_eq!(server.session_count(), 1);
    client.session.handle_close("done");
    client.drain();
    let give_up = Instant::now() + Duration::from_secs(5);
    while server.session_count() > 0 {
        assert!(Instant::now() < give_up);
        std::thread::sleep(Duration::from_millis(5));
    }
    // The state directory is unlocked again.
    let mut client = Client::connect(&server, dir.path(), SOON);
    assert_eq!(client.session().root, root);
}

#[test]
fn a_wrong_export_is_refused_in_one_line() {
    let (server, _state, dir) = server();
    fs::write(dir.path().join("f"), "").unwrap();
    for (path, word) in [
        (dir.path().join("f"), "no directory"),
        (dir.path().join("none"), "none"),
        ("rel".into(), "absolute"),
    ] {
        let why = Client::connect(&server, &path, SOON).lost();
        assert!(why.contains(word) && !why.contains('\n'), "{why}");
    }
    assert!(Client::connect(&server, dir.path(), SOON).session().root.ino > 0);
}

#[test]
fn large_listings_and_data_arrive_while_small_calls_are_answered() {
    let (server, _state, dir) = server();
    for n in 0..20_000 {
        fs::File::create(dir.path().join(format!("name-{n}"))).unwrap();
    }
    fs::write(dir.path().join("big"), vec![9; 4 << 20]).unwrap();
    let mut client = Client::connect(&server, dir.path(), SOON);
    let root = NodeRef::without_hint(client.session().root);
    let lists: Vec<_> = (0..6).map(|_| client.send(Call::List { dir: root.clone() })).collect();
    let Ok(Reply::Entry(Some(big))) =
        client.call(Call::Lookup { dir: root.clone(), name: name("big") }).result
    else {
        panic!()
    };
    let node = NodeRef { node: big.id, path_hint: Some((root.node, name("big"))) };
    let read = client.call(Call::Read { node, handle: None, offset: 0, length: 4 << 20 });
    assert!(matches!(read.result, Ok(Reply::Data(data)) if data.len() == 4 << 20));
    for id in lists {
        let mut count = 0;
        loop {
            let response = client.answer(id);
            let Ok(Reply::Listed(part)) = response.result else { panic!("{:?}", response.result) };
            count += part.entries.len();
            if response.last {
                break;
            }
        }
        assert_eq!(count, 20_001);
    }
}

#[test]
fn garbage_ends_the_session_and_nothing_else() {
    let (server, _state, dir) = server();
    let mut good = Client::connect(&server, dir.path(), SOON);
    let root = NodeRef::without_hint(good.session().root);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[0; 64]] {
        let mut stream = server.serve_in_process().unwrap();
        stream.write_all(garbage).unwrap();
        let mut rest = Vec::new();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.read_to_end(&mut rest).unwrap();
    }
    assert!(good.call(Call::GetAttr { node: root }).result.is_ok());
}

#[test]
fn ended_server_closes_connections_and_accepts_no_more() {
    let (server, _state, dir) = server();
    let mut client = Client::connect(&server, dir.path(), SOON);
    client.session();
    server.end_sessions("maintenance at noon");
    client.cut();
    let mut stream = server.serve_in_process().unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    let give_up = Instant::now() + Duration::from_secs(5);
    while server.session_count() > 0 {
        assert!(Instant::now() < give_up);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn listings_to_a_client_that_does_not_read_do_not_delay_others() {
    let (server, _state, dir) = server();
    fs::create_dir(dir.path().join("large")).unwrap();
    let count = 30_000;
    for n in 0..count {
        fs::File::create(dir.path().join(format!("large/a-name-of-some-length-{n:06}"))).unwrap();
    }
    let mut lazy = Client::connect(&server, dir.path(), SOON);
    let large = lazy.place("large");
    // More than may be listed at a time, and more than the pool has threads.
    let lists: Vec<_> = (0..12).map(|_| lazy.send(Call::List { dir: large.clone() })).collect();
    std::thread::sleep(Duration::from_secs(1));
    let mut other = Client::connect(&server, dir.path(), SOON);
    let root = other.root();
    let begun = Instant::now();
    let fsync = Call::Fsync { node: root.clone(), handle: None, data_only: false };
    assert_eq!(other.call(fsync).result, Ok(Reply::Done));
    assert_eq!(other.list(&root).0.len(), 1);
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    // A waiting listing can be cancelled.
    lazy.cancel(lists[11]);
    for id in &lists {
        let mut names = std::collections::BTreeSet::new();
        loop {
            let response = lazy.answer(*id);
            match response.result {
                Ok(Reply::Listed(part)) => {
                    assert!(
                        part.entries.into_iter().all(|(name, _)| names.insert(name)),
                        "a name comes once"
                    );
                }
                Err(Errno::INTR) if *id == lists[11] => break,
                other => panic!("{other:?}"),
            }
            if response.last {
                assert_eq!(names.len(), count);
                break;
            }
        }
    }
}

/// More often than the limit of concurrent calls.
#[test]
fn cancelled_names_only_listings_free_their_slots() {
    let (server, _state, dir) = server();
    let count = 30_000;
    for n in 0..count {
        fs::File::create(dir.path().join(format!("{n:0200}"))).unwrap();
    }
    let mut lazy = Client::connect(&server, dir.path(), SOON);
    let root = lazy.root();
    let dirents = || Call::ListNames { dir: root.clone(), after: Cookie(0) };
    let mut all = |cancels: bool| {
        let id = lazy.send(dirents());
        if cancels {
            // Until the link is full.
            std::thread::sleep(Duration::from_millis(200));
            lazy.cancel(id);
            // While nothing is read, the listing cannot come to its end before the server reads the cancel.
            std::thread::sleep(Duration::from_millis(200));
        }
        let mut names = 0;
        loop {
            let response = lazy.answer(id);
            match response.result {
                Ok(Reply::Dirents(part)) => names += part.len(),
                Err(Errno::INTR) => return None,
                other => panic!("{other:?}"),
            }
            if response.last {
                return Some(names);
            }
        }
    };
    // One may end before its link is full.
    let cancelled = (0..20).filter(|_| all(true).is_none()).take(5).count();
    assert_eq!(cancelled, 5);
    assert_eq!(all(false), Some(count));
}

#[test]
fn bodies_are_compressed_only_if_negotiated() {
    let (server, _state, dir) = server();
    fs::write(dir.path().join("f"), "many words ".repeat(100_000)).unwrap();
    let received = |features: u64| {
        let stream = server.serve_in_process().unwrap();
        let mut client = Client::wanting(stream, dir.path(), SOON, features);
        let node = client.place("f");
        let read = Call::Read { node: node.clone(), handle: None, offset: 0, length: 1 << 20 };
        let before = client.session.counters().bytes_received;
        let Ok(Reply::Data(data)) = client.call(read).result else { panic!() };
        assert!(data.starts_with(b"many words many") && data.len() == 1 << 20);
        (client.session.compresses(), client.session.counters().bytes_received - before)
    };
    let (plain, packed) = (received(0), received(nigh_native::COMPRESSED));
    assert!(!plain.0 && plain.1 > 1 << 20);
    assert!(packed.0 && packed.1 < 1 << 16, "{packed:?}");
}

#[test]
fn client_may_send_compressed_bodies_only_if_negotiated() {
    let (server, _state, dir) = server();
    fs::write(dir.path().join("f"), "").unwrap();
    for features in [nigh_native::COMPRESSED, 0] {
        let mut client = Client::wanting(server.serve_in_process().unwrap(), dir.path(), SOON, features);
        let node = client.place("f");
        let write = Call::Write {
            node,
            handle: None,
            offset: 0,
            data: vec![7; 100_000],
            flags: WriteFlags::default(),
        };
        let call = client.send_packed(write);
        if features == 0 {
            assert!(client.lost().contains("which was not negotiated"));
        } else {
            assert_eq!(client.answer(call).result, Ok(Reply::Written { offset: 0, count: 100_000 }));
        }
    }
    assert_eq!(fs::read(dir.path().join("f")).unwrap(), vec![7; 100_000]);
}
