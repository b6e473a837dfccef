//! Changes by another process on the server's own disk (docs/decisions/0015-host-watch.md).

mod common;

use common::client::Client;
use common::other::{self, Other};
use common::world::World;
use common::{eventually, is_root, name};
use nigh_native::TRUSTS_WATCH;
use nigh_server::WatchMethod;
use nigh_types::*;
use std::fs;
use std::time::{Duration, Instant};

/// The requested term for what the server does not watch.
const LIMIT: Term = Term::Limited(Span::from_secs(5));

#[test]
fn another_process() {
    other::serve();
}

fn world(way: WatchMethod) -> World {
    World::with(|options| options.watch = way)
}

/// Watch methods that this process may use.
fn ways() -> Vec<WatchMethod> {
    if is_root() { vec![WatchMethod::Best, WatchMethod::Objects] } else { vec![WatchMethod::Objects] }
}

fn client(world: &World) -> Client {
    let stream = world.server.serve_in_process().unwrap();
    Client::wanting(stream, world.dir.path(), LIMIT, TRUSTS_WATCH)
}

/// A client that holds all leases without a time limit, and its nodes.
fn warm(world: &World) -> (Client, Vec<(&'static str, NodeRef)>) {
    let mut client = client(world);
    let names = ["", "d", "d2", "d/e", "d/f", "d/h", "d2/old"];
    let places: Vec<_> = names.iter().map(|name| (*name, client.place(name))).collect();
    for (path, place) in &places {
        let grants = if matches!(*path, "d/f" | "d/h" | "d2/old") {
            client.read(place).1
        } else {
            client.list(place).1
        };
        assert!(!grants.is_empty());
        let all = grants.into_iter().chain(client.attr(place).1);
        all.for_each(|grant| assert_eq!(grant.term, Term::Session, "{path}: {grant:?}"));
    }
    (client, places)
}

/// Waits until all of `wanted` were recalled.
fn recalled(client: &mut Client, places: &[(&str, NodeRef)], wanted: &[(&str, LeaseScope)], what: &str) {
    let node = |path: &str| places.iter().find(|(its, _)| *its == path).unwrap().1.node;
    eventually(what, || {
        client.pump();
        let recalls = client.recalls();
        let is_there = |(path, covers): &(&str, LeaseScope)| {
            recalls.iter().any(|recall| recall.node == node(path) && recall.covers == *covers)
        };
        wanted.iter().all(is_there)
    });
}

#[test]
fn name_created_locally_on_the_server_is_recalled_and_visible() {
    for way in ways() {
        let world = world(way);
        let mut other = Other::start("another_process");
        let (mut client, places) = warm(&world);
        other.run(&format!("create {}", world.dir.path().join("d/new").display()));
        recalled(
            &mut client,
            &places,
            &[("d", LeaseScope::Directory), ("d", LeaseScope::Attributes)],
            "create",
        );
        let recalls = client.recalls();
        let of_names = recalls.iter().find(|recall| recall.covers == LeaseScope::Directory).unwrap();
        assert_eq!(of_names.names, [name("new")]);
        assert!(recalls.iter().all(|recall| recall.node == places[1].1.node), "nothing else: {recalls:?}");
        client.give_back();
        assert_eq!(client.list(&places[1].1).0.len(), 4);
        assert_eq!(client.attr(&places[1].1).1[0].term, Term::Session);
    }
}

/// A command with paths below the export, and the leases that it invalidates.
type Deed = (&'static str, &'static [(&'static str, LeaseScope)]);

const DEEDS: &[Deed] = {
    use LeaseScope::{Attributes, Data, Directory};
    &[
        ("write d/f longer-than-it-was", &[("d", Directory), ("d/f", Data)]),
        ("append d/f more", &[("d", Directory), ("d/f", Data)]),
        ("truncate d/f 3", &[("d", Directory), ("d/f", Data)]),
        ("fallocate d/f 100000", &[("d", Directory), ("d/f", Data)]),
        ("copy d2/old d/f", &[("d", Directory), ("d/f", Data)]),
        ("splice d/f spliced", &[("d", Directory), ("d/f", Data)]),
        ("chmod d/f 600", &[("d", Directory)]),
        ("setxattr d/f value", &[("d", Directory)]),
        ("chmod d 700", &[("d", Attributes)]),
        ("chmod d/h 600", &[("d/h", Attributes)]),
        ("write d2/h2 by-its-other-name", &[("d/h", Attributes), ("d/h", Data), ("d2", Directory)]),
        ("unlink d2/h2", &[("d2", Directory), ("d/h", Attributes)]),
        ("link d/h d2/third", &[("d2", Directory), ("d/h", Attributes)]),
        ("unlink d/f", &[("d", Directory), ("d", Attributes)]),
        ("mkdir d/e/x", &[("d/e", Directory), ("d/e", Attributes)]),
        ("rmdir d/e", &[("d", Directory), ("d", Attributes)]),
        ("symlink f d/s", &[("d", Directory), ("d", Attributes)]),
        ("tmpfile d d/t", &[("d", Directory), ("d", Attributes)]),
        (
            "rename d2/old d/moved",
            &[("d2", Directory), ("d2", Attributes), ("d", Directory), ("d", Attributes)],
        ),
        ("rename d2/old d/f", &[("d2", Directory), ("d", Directory)]),
        ("rename d/f d/g", &[("d", Directory)]),
        ("rename d/e d2/e", &[("d", Directory), ("d2", Directory), ("d/e", Attributes)]),
        ("exchange d/f d2/old", &[("d", Directory), ("d2", Directory)]),
        ("exchange d/e d2", &[("", Directory), ("d", Directory), ("d2", Attributes), ("d/e", Attributes)]),
        ("rmtree d", &[("", Directory), ("", Attributes)]),
    ]
};

#[test]
fn every_local_change_on_the_server_is_recalled() {
    for way in ways() {
        let mut other = Other::start("another_process");
        for (deed, wanted) in DEEDS {
            let world = world(way);
            let (mut client, places) = warm(&world);
            let top = world.dir.path().display();
            let words = deed.split(' ').map(|word| match word {
                "d" => format!("{top}/d"),
                path if path.contains('/') => format!("{top}/{path}"),
                "d2" => format!("{top}/d2"),
                other => other.to_owned(),
            });
            other.run(&words.collect::<Vec<_>>().join(" "));
            recalled(&mut client, &places, wanted, &format!("{way:?}: {deed}"));
        }
    }
}

#[test]
fn local_write_to_an_unlinked_open_file_is_recalled() {
    for way in ways() {
        let world = world(way);
        let mut other = Other::start("another_process");
        let mut client = client(&world);
        let f = client.place("d/f");
        client.open(&f, common::READ);
        let path = world.dir.path().join("d/f");
        other.run(&format!("hold {}", path.display()));
        other.run(&format!("unlink {}", path.display()));
        eventually("its attributes are recalled", || {
            client.pump();
            !client.recalls().is_empty()
        });
        client.give_back();
        client.read(&f);
        client.attr(&f);
        other.run(&format!("held {} other", path.display()));
        eventually("and its data", || {
            client.pump();
            client.recalls().iter().any(|recall| recall.node == f.node && recall.covers == LeaseScope::Data)
        });
        client.give_back();
        assert_eq!(client.read(&f).0, b"other678");
    }
}

/// The mapper's kernel writes a page back on recall, when the host has changed the file already.
#[test]
fn mmap_write_back_does_not_overwrite_local_writes_on_the_server() {
    for way in ways() {
        for (deed, text, wanted) in [("held", " other", Err(Errno::CANCELED)), ("drop", "", Ok(()))] {
            let world = world(way);
            let mut other = Other::start("another_process");
            let mut client = client(&world);
            let node = client.place("d/f");
            let handle = Some(client.open(&node, common::BOTH));
            let read = client.call(Call::Read { node: node.clone(), handle, offset: 0, length: 4096 });
            let grant = read.grants.iter().find(|grant| grant.covers == LeaseScope::Data).unwrap();
            let under = Some((grant.id, LeaseScope::Data));
            let since = Some(WriteBackPrecondition { stamp: DataVersion::of(&read.after[0].1), under });
            let path = world.dir.path().join("d/f").display().to_string();
            other.run(&format!("hold {path}"));
            other.run(&format!("{deed} {path}{text}"));
            eventually("it is asked back", || {
                client.pump();
                client.recalls().iter().any(|recall| recall.covers == LeaseScope::Data)
            });
            let flags = WriteFlags { write_back: true, since, ..WriteFlags::default() };
            let flush = Call::Write { node, handle, offset: 0, data: b"1234567x"[..].into(), flags };
            assert_eq!(client.call(flush).result.map(drop), wanted, "{way:?}: {deed}");
        }
    }
}

/// A process may have its working directory in a directory that is removed with its contents.
#[test]
fn local_removal_of_a_directory_recalls_its_own_leases() {
    for way in ways() {
        let world = world(way);
        let mut other = Other::start("another_process");
        let path = world.dir.path().join("d/e");
        for nth in 0..10 {
            fs::write(path.join(nth.to_string()), "").unwrap();
        }
        let mut client = client(&world);
        let e = client.place("d/e");
        assert_eq!(client.list(&e).0.len(), 10);
        other.run(&format!("rmtree {}", path.display()));
        eventually(&format!("{way:?}: its names are gone"), || {
            client.pump();
            client
                .recalls()
                .iter()
                .any(|recall| recall.node == e.node && recall.covers == LeaseScope::Directory)
        });
    }
}

/// Changes by the server itself: their recalls were sent before the change.
#[test]
fn watch_events_of_the_servers_own_changes_recall_nothing() {
    for way in ways() {
        let world = world(way);
        let mut client = client(&world);
        let d = client.place("d");
        client.list(&d);
        let before = world.server.leases().counters.recalled;
        for nth in 0..500 {
            let text = name(&format!("n{nth}"));
            let made = client.call(common::mkdir(&d, &nth.to_string()));
            assert!(made.result.is_ok());
            let call = Call::Symlink { dir: d.clone(), name: text, target: b"x"[..].into() };
            assert!(client.call(call).result.is_ok());
        }
        let mut other = Other::start("another_process");
        other.run(&format!("create {}", world.dir.path().join("d2/last").display()));
        let d2 = client.place("d2");
        client.list(&d2);
        other.run(&format!("create {}", world.dir.path().join("d2/latest").display()));
        eventually("what another one did is heard of", || {
            client.pump();
            client.recalls().iter().any(|recall| recall.node == d2.node)
        });
        // A removal by another test may have freed an inode number, which is used again.
        let of_d = |recall: &Recall| recall.node == d.node && recall.covers == LeaseScope::Directory;
        assert!(!client.recalls().iter().any(of_d), "{:?}", client.recalls());
        let recalled = world.server.leases().counters.recalled - before;
        assert!(recalled <= 10, "{recalled}");
        let status = world.server.status();
        let own: u64 =
            status["watch"].as_array().unwrap().iter().map(|group| group["own"].as_u64().unwrap()).sum();
        assert!(own >= 1000, "{status}");
    }
}

/// Whenever the change happens, the listing contains it or its lease is recalled.
#[test]
fn local_change_during_the_first_grant_is_listed_or_recalled() {
    let rounds: u64 = std::env::var("NIGH_RACES").map_or(200, |text| text.parse().unwrap());
    for way in ways() {
        let world = world(way);
        let mut other = Other::start("another_process");
        let mut client = client(&world);
        let mut seen = (0, 0);
        for round in 0..rounds {
            let dir = world.dir.path().join(format!("r{round}"));
            fs::create_dir(&dir).unwrap();
            let place = client.place(&format!("r{round}"));
            client.give_back();
            other.tell(&format!("create {}", dir.join("n").display()));
            let pause = Duration::from_micros(round * 7 % 200);
            let begun = Instant::now();
            while begun.elapsed() < pause {}
            let (listed, grants) = client.list(&place);
            other.done();
            if !listed.is_empty() {
                seen.0 += 1;
            } else if grants.iter().any(|grant| grant.covers == LeaseScope::Directory) {
                assert!(grants.iter().all(|grant| grant.term == Term::Session));
                eventually("it is recalled", || {
                    client.recalls().iter().any(|r| r.node == place.node && r.covers == LeaseScope::Directory)
                        || {
                            client.pump();
                            false
                        }
                });
                seen.1 += 1;
            }
            client.give_back();
        }
        println!("{way:?}: {} listings had it, {} were recalled", seen.0, seen.1);
    }
}

#[test]
fn grants_without_a_watch_have_a_time_limit_with_a_reason() {
    let world = world(WatchMethod::Off);
    let mut one = client(&world);
    let d = one.place("d");
    assert!(one.list(&d).1.iter().all(|grant| grant.term == LIMIT));
    let bound = one.session().guarantees.staleness_bound;
    assert!(bound.contains("5000 ms") && bound.contains("watched"), "{bound}");
    // An explicitly requested term applies even to what is watched.
    let world = self::world(WatchMethod::Best);
    let mut other = world.client();
    let mut limited = Client::connect(&world.server, world.dir.path(), LIMIT);
    let d = limited.place("d");
    assert!(limited.list(&d).1.iter().all(|grant| grant.term == LIMIT));
    assert!(limited.session().guarantees.staleness_bound.contains("5000 ms"));
    assert!(other.session().guarantees.staleness_bound.contains("forever"));
    assert_eq!(client(&world).session().guarantees.staleness_bound, "");
}
