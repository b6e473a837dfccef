//! Several sessions at once, each with cached facts: no client uses an outdated fact, and no call waits for long.

use crate::common::client::Client;
use crate::common::*;
use nigh_remote::Event;
use nigh_server::{Server, ServerOptions};
use nigh_types::*;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn server() -> (Arc<Server>, TempDir, TempDir) {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut options = ServerOptions::new(state.path().to_owned());
    // Contention would otherwise stop all grants after the first changes.
    options.leases.contention_recalls = u32::MAX;
    (Server::new(options).unwrap(), state, dir)
}

fn connect(server: &Arc<Server>, dir: &TempDir) -> Client {
    let mut client = Client::connect(server, dir.path(), Term::Session);
    client.obliging = true;
    client
}

/// A model cache: a recall drops facts, and taints a reply that is under way.
struct Facts {
    client: Client,
    recalled: Vec<(NodeId, LeaseScope)>,
}

impl Facts {
    fn new(mut client: Client) -> Facts {
        client.obliging = false;
        Facts { client, recalled: Vec::new() }
    }

    /// Processes received events, and acknowledges and returns recalls.
    fn pump(&mut self) -> Vec<(NodeId, LeaseScope)> {
        let recalls = self.client.recalls();
        let ended: Vec<_> = recalls.iter().map(|recall| (recall.node, recall.covers)).collect();
        self.recalled.extend(&ended);
        self.client.give_back();
        ended
    }

    /// Returns the reply, and whether its grant lets the client cache it. The order of events tells recalls before
    /// the reply from recalls after it.
    fn ask(&mut self, call: Call, node: NodeId, covers: LeaseScope) -> (Reply, bool) {
        self.recalled.clear();
        let id = self.client.send(call);
        let response = loop {
            let is_it = |event: &Event| matches!(event, Event::Response { call, .. } if *call == id);
            if let Some(at) = self.client.events.iter().position(is_it) {
                let later = self.client.events.split_off(at + 1);
                let Some(Event::Response { response, .. }) = self.client.events.pop() else { panic!() };
                self.pump();
                self.client.events.extend(later);
                break response;
            }
            self.pump();
            self.client.pump();
        };
        let granted = response.grants.iter().any(|grant| (grant.node, grant.covers) == (node, covers));
        let keep = granted && !self.recalled.contains(&(node, covers));
        (response.result.unwrap(), keep)
    }
}

/// Duration of the test.
const LONG: Duration = Duration::from_secs(3);
/// Time limit for a single call.
const STALL: Duration = Duration::from_secs(5);

/// Caches a number until a recall, then asks again. Returns the counts of cache hits and of calls.
fn read_until(
    ends: Instant,
    facts: &mut Facts,
    look: impl Fn(&mut Facts) -> (u64, NodeId, LeaseScope, bool),
    published: &AtomicU64,
) -> (u64, u64) {
    let mut kept: Option<(u64, NodeId, LeaseScope)> = None;
    let (mut hits, mut asked) = (0, 0);
    while Instant::now() < ends {
        let ended = facts.pump();
        kept = kept.filter(|(_, node, covers)| !ended.contains(&(*node, *covers)));
        let known = published.load(Ordering::SeqCst);
        if let Some((value, ..)) = kept {
            assert!(value >= known, "kept {value}, but {known} had returned");
            hits += 1;
            facts.client.pump();
        } else {
            let (value, node, covers, keep) = look(facts);
            assert!(value >= known, "told {value}, but {known} had returned");
            asked += 1;
            kept = keep.then_some((value, node, covers));
        }
    }
    facts.client.obliging = true;
    facts.client.give_back();
    let leave = Instant::now() + STALL;
    while published.load(Ordering::SeqCst) != u64::MAX && Instant::now() < leave {
        facts.client.pump();
    }
    (hits, asked)
}

/// One client changes a number while others cache it. No cached number may be older than the last change that
/// returned.
fn no_client_keeps_older_data(
    change: impl Fn(&mut Client, u64) -> bool + Send + 'static,
    look: impl Fn(&mut Facts) -> (u64, NodeId, LeaseScope, bool) + Send + Sync + Clone + 'static,
    prepare: impl Fn(&TempDir),
) {
    no_client_keeps_concurrent_data(change, look, prepare, |_| thread::sleep(Duration::from_millis(50)));
}

/// As above, with a third client that runs `beside` in a loop.
fn no_client_keeps_concurrent_data(
    change: impl Fn(&mut Client, u64) -> bool + Send + 'static,
    look: impl Fn(&mut Facts) -> (u64, NodeId, LeaseScope, bool) + Send + Sync + Clone + 'static,
    prepare: impl Fn(&TempDir),
    beside: impl Fn(&mut Client) + Send + 'static,
) {
    let (server, _state, dir) = server();
    prepare(&dir);
    let published = Arc::new(AtomicU64::new(0));
    let ends = Instant::now() + LONG;
    let mut readers = Vec::new();
    for _ in 0..2 {
        let mut facts = Facts::new(connect(&server, &dir));
        let (look, published) = (look.clone(), Arc::clone(&published));
        readers.push(thread::spawn(move || read_until(ends, &mut facts, &look, &published)));
    }
    let mut third = connect(&server, &dir);
    let third = thread::spawn(move || {
        while Instant::now() < ends {
            beside(&mut third);
        }
        third.session.handle_close("done");
        third.drain();
    });
    let mut writer = connect(&server, &dir);
    let mut number = 0;
    while Instant::now() < ends {
        number += 1;
        let began = Instant::now();
        if !change(&mut writer, number) {
            break;
        }
        assert!(began.elapsed() < STALL, "a change took {:?}", began.elapsed());
        published.store(number, Ordering::SeqCst);
        if number % 50 == 0 {
            thread::sleep(Duration::from_millis(5));
        }
    }
    // Other clients may still wait for its acknowledgements.
    writer.session.handle_close("done");
    writer.drain();
    third.join().unwrap();
    published.store(u64::MAX, Ordering::SeqCst);
    let mut kept = 0;
    for reader in readers {
        let (hits, asked) = reader.join().unwrap();
        assert!(asked > 0);
        kept += hits;
    }
    println!("{number} changes, {kept} answers from what was kept");
    assert!(number > 10);
}

#[test]
fn cached_data_is_never_older_than_a_returned_write() {
    no_client_keeps_older_data(
        |client, number| {
            let node = client.place("f");
            let data = number.to_le_bytes().to_vec();
            let flags = WriteFlags::default();
            client.call(Call::Write { node, handle: None, offset: 0, data, flags }).result.is_ok()
        },
        |facts| {
            let f = facts.client.place("f");
            let read = Call::Read { node: f.clone(), handle: None, offset: 0, length: 8 };
            let (reply, keep) = facts.ask(read, f.node, LeaseScope::Data);
            let Reply::Data(data) = reply else { panic!() };
            (u64::from_le_bytes(data.try_into().unwrap()), f.node, LeaseScope::Data, keep)
        },
        |dir| fs::write(dir.path().join("f"), [0; 8]).unwrap(),
    );
}

#[test]
fn cached_attributes_are_never_older_than_a_returned_setattr() {
    no_client_keeps_older_data(
        |client, number| {
            let node = client.place("f");
            let set = SetAttr { size: Some(number), ..SetAttr::default() };
            client.call(Call::SetAttr { node, handle: None, set }).result.is_ok()
        },
        |facts| {
            let f = facts.client.place("f");
            let dir = f.path_hint.as_ref().unwrap().0;
            let (reply, keep) = facts.ask(Call::GetAttr { node: f }, dir, LeaseScope::Directory);
            let Reply::Attr(_, attr) = reply else { panic!() };
            (attr.size, dir, LeaseScope::Directory, keep)
        },
        |dir| fs::write(dir.path().join("f"), "").unwrap(),
    );
}

#[test]
fn cached_names_are_never_older_than_a_returned_rename() {
    no_client_keeps_older_data(
        |client, number| {
            let (from, to) = (client.root(), client.root());
            let (old, new_name) = (name(&format!("n{}", number - 1)), name(&format!("n{number}")));
            let (no_replace, exchange, keep) = (true, false, None);
            let call =
                Call::Rename { from, name: old, to, new_name, no_replace, exchange, whiteout: false, keep };
            client.call(call).result.is_ok()
        },
        |facts| {
            let dir = facts.client.root();
            loop {
                let (reply, keep) =
                    facts.ask(Call::List { dir: dir.clone() }, dir.node, LeaseScope::Directory);
                let Reply::Listed(listed) = reply else { panic!() };
                // During the rename a listing may contain the file under both names, or under none.
                let number =
                    |name: &Name| std::str::from_utf8(&name.as_bytes()[1..]).unwrap().parse().unwrap();
                if let Some(newest) = listed.entries.iter().map(|(name, _)| number(name)).max() {
                    assert!(!keep || listed.entries.len() == 1, "what is granted is true");
                    return (newest, dir.node, LeaseScope::Directory, keep);
                }
                assert!(!keep);
            }
        },
        |dir| fs::write(dir.path().join("n0"), "").unwrap(),
    );
}

#[test]
fn cached_attributes_of_a_moving_file_are_never_older_than_a_returned_setattr() {
    let open: Mutex<Option<(NodeRef, Handle)>> = Mutex::new(None);
    let turn = AtomicU64::new(0);
    no_client_keeps_concurrent_data(
        move |client, number| {
            let mut open = open.lock().unwrap();
            let (node, handle) = open.get_or_insert_with(|| {
                let node = client.place("stay/f");
                let handle = client.open(&node, BOTH);
                let (from, to) = (client.place("stay"), client.place("d0"));
                let (no_replace, exchange, keep) = (true, false, None);
                let (name, new_name) = (name("f"), name("f"));
                let call =
                    Call::Rename { from, name, to, new_name, no_replace, exchange, whiteout: false, keep };
                assert!(client.call(call).result.is_ok());
                (node, handle)
            });
            let set = SetAttr { size: Some(number), ..SetAttr::default() };
            let call = Call::SetAttr { node: node.clone(), handle: Some(*handle), set };
            client.call(call).result.is_ok()
        },
        |facts| loop {
            for dir in ["d0", "d1"] {
                let dir = facts.client.place(dir);
                let lookup = Call::Lookup { dir: dir.clone(), name: name("f") };
                let (reply, keep) = facts.ask(lookup, dir.node, LeaseScope::Directory);
                let Reply::Entry(found) = reply else { panic!() };
                if let Some(entry) = found {
                    return (entry.attr.size, dir.node, LeaseScope::Directory, keep);
                }
            }
        },
        |dir| {
            ["d0", "d1", "stay"].iter().for_each(|name| fs::create_dir(dir.path().join(name)).unwrap());
            fs::write(dir.path().join("stay/f"), "").unwrap();
        },
        move |client| {
            let turn = turn.fetch_add(1, Ordering::SeqCst);
            let [from, to] = [turn % 2, (turn + 1) % 2].map(|n| client.place(&format!("d{n}")));
            let (no_replace, exchange, keep) = (true, false, None);
            let (name, new_name) = (name("f"), name("f"));
            // Early iterations may not find the file in this directory yet.
            client.call(Call::Rename {
                from,
                name,
                to,
                new_name,
                no_replace,
                exchange,
                whiteout: false,
                keep,
            });
        },
    );
}

#[test]
fn concurrent_changes_of_one_directory_all_succeed() {
    let (server, _state, dir) = server();
    fs::create_dir(dir.path().join("d")).unwrap();
    let workers: Vec<_> = (0..4_u64)
        .map(|worker| {
            let mut client = connect(&server, &dir);
            thread::spawn(move || {
                let d = client.place("d");
                let mut longest = Duration::ZERO;
                for round in 0..100 {
                    let began = Instant::now();
                    let text = name(&format!("{worker}-{round}"));
                    let make = Call::Mkdir { dir: d.clone(), name: text.clone(), mode: 0o700, umask: 0 };
                    assert!(client.call(make).result.is_ok());
                    let (entries, _) = client.list(&d);
                    assert!(entries.iter().any(|(there, _)| *there == text));
                    assert!(client.call(Call::Rmdir { dir: d.clone(), name: text }).result.is_ok());
                    longest = longest.max(began.elapsed());
                }
                // Other clients may still wait for its acknowledgements.
                client.session.handle_close("done");
                client.drain();
                longest
            })
        })
        .collect();
    for worker in workers {
        let longest = worker.join().unwrap();
        assert!(longest < STALL, "one round took {longest:?}");
    }
    assert_eq!(fs::read_dir(dir.path().join("d")).unwrap().count(), 0);
}
