//! Idle clients: one thread polls all their connections.

mod common;

use common::client::Client;
use common::raw::{Heard, Raw, hello};
use common::world::{World, again};
use common::*;
use nigh_link::Peer;
use nigh_link::tcp::{Acceptor, Target, Trust};
use nigh_native::{Message, encode_request};
use nigh_remote::Remote;
use nigh_types::*;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// After this time a connection counts as idle.
const QUIET: Duration = Duration::from_millis(500);

/// The tests count wakeups of this process's threads, so one test runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts the wakeups of each connection thread.
fn woken() -> BTreeMap<u64, u64> {
    let of_connection = |task: &fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "nigh-session")
    };
    let switches = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        Some((task.file_name().to_str()?.parse().ok()?, line.trim().parse().ok()?))
    };
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.filter(of_connection).filter_map(switches).collect()
}

fn mkdir_in(client: &mut Client, dir: &NodeRef, text: &str) -> CallId {
    client.send(Call::Mkdir { dir: dir.clone(), name: name(text), mode: 0o700, umask: 0 })
}

#[test]
fn idle_clients_acknowledge_and_renew_without_waking_their_threads() {
    const HOLDERS: u64 = 40;
    let _alone = alone();
    let world = World::new();
    let mut maker = world.client();
    let d = maker.place("d");
    let mut holders: Vec<Client> = (0..HOLDERS).map(|_| world.client()).collect();
    for holder in &mut holders {
        assert!(!holder.list(&d).1.is_empty());
    }
    std::thread::sleep(QUIET);
    let before = woken();
    let change = mkdir_in(&mut maker, &d, "new");
    for (nth, holder) in holders.iter_mut().enumerate() {
        // Recalls of the directory lease and of the attribute lease, which may arrive separately.
        while holder.recalls().len() < 2 {
            holder.pump();
        }
        let one_of_few = nth % 13 != 0;
        assert!(one_of_few || !maker.is_answered(change), "a client holds a negative entry for the name");
        holder.give_back();
    }
    assert!(maker.answer(change).result.is_ok());
    for holder in &mut holders {
        // The client renews long before the term of 15 s ends.
        let later = Time(holder.now().0 + 5_000_000_000);
        holder.session.handle_timeout(later);
        holder.drain();
        assert_eq!(holder.session.counters().renewals, 1);
    }
    std::thread::sleep(Duration::from_millis(50));
    let after = woken();
    let slept = before.iter().filter(|(thread, times)| after.get(thread) == Some(times)).count() as u64;
    // The thread of the changing client did run.
    assert_eq!((slept, before.len() as u64), (HOLDERS, HOLDERS + 1), "{before:?} and {after:?}");
    for holder in &mut holders {
        assert_eq!(holder.entry(&d, "new").attr.kind(), Kind::Directory);
    }
}

#[test]
fn messages_after_an_idle_period_arrive_complete_and_in_order() {
    let _alone = alone();
    let world = World::new();
    let mut client = world.client();
    let f = client.place("d/f");
    let handle = client.open(&f, BOTH);
    let data: Vec<u8> = (0..1 << 20).map(|n: u32| n.to_le_bytes()[n as usize % 3]).collect();
    for round in 0..3_u8 {
        std::thread::sleep(QUIET);
        // More than the server reads at a time, followed by further calls.
        let data: Vec<u8> = data.iter().map(|byte| byte ^ round).collect();
        let flags = WriteFlags::default();
        let write =
            Call::Write { node: f.clone(), handle: Some(handle), offset: 0, data: data.clone(), flags };
        assert_eq!(client.call(write).result, Ok(Reply::Written { offset: 0, count: 1 << 20 }));
        assert!(fs::read(world.dir.path().join("d/f")).unwrap() == data);
        assert!(client.attr(&f).0.size == 1 << 20);
    }
    // A partial frame, followed by a long pause.
    let mut raw = Raw::hello(&world, None, hello(&world, 77, None));
    let root = NodeRef::without_hint(raw.welcome().session.root);
    let call = Call::GetAttr { node: root };
    let frame = encode_request(CallId(1), &Request { credentials: me(), mutation_id: None, call });
    for part in [&frame[..3], &frame[3..20], &frame[20..]] {
        std::thread::sleep(QUIET);
        raw.stream.write_all(part).unwrap();
    }
    assert!(raw.answer().unwrap().result.is_ok());
    std::thread::sleep(QUIET);
    // A ping and a call in one write.
    let call = Call::GetAttr { node: NodeRef::without_hint(client.root().node) };
    let frame = encode_request(CallId(2), &Request { credentials: me(), mutation_id: None, call });
    raw.stream.write_all(&[Message::Ping(1, 1).encode(), frame].concat()).unwrap();
    assert!(matches!(raw.hear(), Heard::Message(Message::Pong(1, _))));
    assert!(raw.answer().unwrap().result.is_ok());
}

#[test]
fn violation_or_cut_of_an_idle_connection_is_handled_at_once() {
    let _alone = alone();
    let world = World::new();
    for wrong in [Message::Acknowledge(RecallId(9)), Message::Pong(1, 99), Message::Received(1 << 40)] {
        let mut raw = Raw::hello(&world, None, hello(&world, 88, None));
        raw.welcome();
        std::thread::sleep(QUIET);
        raw.say(&wrong);
        assert!(matches!(raw.message(), Message::Bye(why) if why.contains("protocol")), "{wrong:?}");
        raw.ends();
    }
    let mut client = world.client();
    let d = client.place("d");
    let mut holder = world.client();
    holder.list(&d);
    for _ in 0..3 {
        std::thread::sleep(QUIET);
        again(&world, &mut client);
        assert_eq!(client.wait_linked(), None, "it goes on, and nothing has ended");
        assert_eq!(client.attr(&d).0.kind(), Kind::Directory);
    }
    // A client that ends while idle acknowledges nothing; the server notices its end.
    std::thread::sleep(QUIET);
    holder.leave();
    let begun = Instant::now();
    let change = mkdir_in(&mut client, &d, "after");
    assert!(client.answer(change).result.is_ok());
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

#[test]
fn stopped_server_leaves_no_threads_of_idle_connections() {
    let _alone = alone();
    let mut world = World::new();
    let mut clients: Vec<Client> = (0..8).map(|_| world.client()).collect();
    let places: Vec<NodeRef> = clients.iter_mut().map(|client| client.place("d")).collect();
    std::thread::sleep(QUIET);
    world.restart();
    for (client, place) in clients.iter_mut().zip(&places) {
        client.cut();
        again(&world, client);
        assert_eq!(client.wait_linked(), Some(false));
        client.session.handle_reclaimed(client.now());
        client.drain();
        assert_eq!(client.attr(place).0.kind(), Kind::Directory);
    }
}

/// A proxy between two ends that can inject bytes towards the server.
fn on_the_way(to: SocketAddr) -> (SocketAddr, Sender<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, (say, said)) = (listener.local_addr().unwrap(), channel::<Vec<u8>>());
    std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(to).unwrap();
        let mut intruder = server.try_clone().unwrap();
        for (mut from, mut into) in [
            (client.try_clone().unwrap(), server.try_clone().unwrap()),
            (server.try_clone().unwrap(), client.try_clone().unwrap()),
        ] {
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut into);
                let _ = into.shutdown(std::net::Shutdown::Both);
            });
        }
        said.iter().for_each(|bytes| intruder.write_all(&bytes).unwrap());
    });
    (address, say)
}

#[test]
fn invalid_tls_record_ends_an_idle_connection_at_once() {
    let _alone = alone();
    let world = World::new();
    let keys = tempfile::tempdir().unwrap();
    let door = Acceptor::with_tls(&keys.path().join("server"), None).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, say) = on_the_way(listener.local_addr().unwrap());
    let target = Target {
        host: "127.0.0.1".into(),
        port: address.port(),
        trust: Trust::Known(keys.path().join("known")),
        token: None,
    };
    let client = std::thread::spawn(move || target.connect().unwrap());
    let link = door.accept(listener.accept().unwrap().0).unwrap();
    let client = client.join().unwrap();
    let server = world.server.clone();
    let served = std::thread::spawn(move || server.serve_link(link, Peer::in_process()));
    client.write_all(&Message::Hello(hello(&world, 99, None)).encode()).unwrap();
    assert!(client.read(&mut [0; 4096]).unwrap() > 0, "it is welcome");
    std::thread::sleep(QUIET);
    // Application data would have to be encrypted.
    say.send([&[23, 3, 3, 0, 32][..], &[7; 32]].concat()).unwrap();
    let begun = Instant::now();
    while !served.is_finished() {
        assert!(
            begun.elapsed() < Duration::from_secs(3),
            "the connection stands, and nothing is received on it"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(served.join().unwrap().is_err());
}
