//! Clients that take updates keep their grants: the server sends them the changes of others
//! (docs/decisions/0014-pushes.md).

use crate::common::client::Client;
use crate::common::world::World;
use crate::common::*;
use nigh_native::UPDATES;
use nigh_remote::{Event, Remote};
use nigh_types::*;
use std::collections::BTreeSet;

/// A client that takes updates and holds leases on all directories and attributes.
struct Watcher {
    client: Client,
    places: Vec<(&'static str, NodeRef)>,
}

impl Watcher {
    fn new(world: &World) -> Watcher {
        let stream = world.server.serve_in_process().unwrap();
        let mut client = Client::wanting(stream, world.dir.path(), Term::Session, UPDATES);
        let names = ["", "d", "d2", "d/e", "d/f", "d/h", "d2/old"];
        let places: Vec<_> = names.iter().map(|name| (*name, client.place(name))).collect();
        for (name, place) in &places {
            if !matches!(*name, "d/f" | "d/h" | "d2/old") {
                client.list(place);
            }
            client.attr(place);
        }

        Watcher { client, places }
    }

    fn at(&self, path: &str) -> NodeRef {
        self.places.iter().find(|(name, _)| *name == path).unwrap().1.clone()
    }

    /// Waits for the next update prepare, as text.
    fn held(&mut self) -> (RecallId, BTreeSet<String>) {
        let hold = self.client.wait(|events| {
            let at = events.iter().position(|event| matches!(event, Event::UpdatePrepare(_)))?;
            match events.remove(at) {
                Event::UpdatePrepare(hold) => Some(hold),
                _ => None,
            }
        });
        let mut facts = BTreeSet::new();
        for held in &hold.facts {
            let path = self.places.iter().find(|(_, place)| place.node == held.node).unwrap().0;
            match held.covers {
                LeaseScope::Directory => {
                    facts.extend(held.names.iter().map(|name| format!("{path}: {name}")))
                }
                _ => drop(facts.insert(format!("{path} itself"))),
            }
        }
        (hold.id, facts)
    }

    fn acknowledge(&mut self, id: RecallId) {
        let now = self.client.now();
        self.client.session.handle_acknowledge(now, id);
        self.client.drain();
    }

    /// Waits for the update commit, and returns its facts.
    fn became(&mut self, id: RecallId) -> Vec<UpdatedFact> {
        self.client.wait(|events| {
            events.iter().find_map(|event| match event {
                Event::UpdateCommit(commit) if commit.id == id => Some(commit.facts.clone()),
                _ => None,
            })
        })
    }
}

fn names(facts: &[UpdatedFact]) -> Vec<(String, Option<u64>)> {
    let name = |fact: &UpdatedFact| match fact {
        UpdatedFact::Name { name, entry, .. } => {
            Some((name.to_string(), entry.as_ref().map(|entry| entry.id.ino)))
        }
        UpdatedFact::Attr { .. } => None,
    };
    facts.iter().filter_map(name).collect()
}

fn attr_of(facts: &[UpdatedFact], node: NodeId) -> Option<Attr> {
    facts.iter().find_map(|fact| match fact {
        UpdatedFact::Attr { node: of, attr } if *of == node => Some(*attr),
        _ => None,
    })
}

/// Another client makes a change. Checks the facts that the watcher is asked to suspend, and returns those of the
/// update commit. The server recalls nothing from the watcher, and grants it nothing more.
fn update_for(what: impl FnOnce(&Watcher) -> Call, held: &[&str]) -> (Watcher, Vec<UpdatedFact>) {
    let world = World::new();
    let mut watcher = Watcher::new(&world);
    let mut mutator = world.client();
    mutator.root();
    let call = mutator.send(what(&watcher));
    let (id, facts) = watcher.held();
    assert_eq!(facts, held.iter().map(|&fact| fact.to_owned()).collect::<BTreeSet<String>>());
    assert!(!mutator.is_answered(call), "before it was held back");
    watcher.acknowledge(id);
    assert!(mutator.answer(call).result.is_ok());
    let became = watcher.became(id);
    assert_eq!(watcher.client.recalls(), [], "nothing is asked back");
    (watcher, became)
}

#[test]
fn created_name_is_sent_as_update() {
    let (watcher, facts) = update_for(|w| mkdir(&w.at("d"), "new"), &["d: new", "d itself"]);
    let [(new, Some(_))] = &names(&facts)[..] else { panic!("{facts:?}") };
    assert_eq!(new, "new");
    assert_eq!(attr_of(&facts, watcher.at("d").node).unwrap().nlink, 4);
}

#[test]
fn removed_name_is_sent_as_update() {
    let unlink = |w: &Watcher| Call::Unlink { dir: w.at("d"), name: name("f"), keep: None };
    let (_, facts) = update_for(unlink, &["d: f", "d itself"]);
    assert_eq!(names(&facts), [("f".to_owned(), None)]);
    let rest = |w: &Watcher| Call::Unlink { dir: w.at("d"), name: name("h"), keep: None };
    let (watcher, facts) = update_for(rest, &["d: h", "d itself", "d/h itself"]);
    assert_eq!(attr_of(&facts, watcher.at("d/h").node).unwrap().nlink, 1, "by its other name");
}

#[test]
fn rename_is_sent_as_one_update() {
    let rename = |w: &Watcher| Call::Rename {
        from: w.at("d"),
        name: name("f"),
        to: w.at("d2"),
        new_name: name("moved"),
        no_replace: false,
        exchange: false,
        whiteout: false,
        keep: None,
    };
    let (watcher, facts) = update_for(rename, &["d: f", "d2: moved", "d itself", "d2 itself"]);
    let ino = watcher.at("d/f").node.ino;
    let told: BTreeSet<_> = names(&facts).into_iter().collect();
    assert_eq!(told, BTreeSet::from([("f".to_owned(), None), ("moved".to_owned(), Some(ino))]));
}

#[test]
fn child_attributes_are_updated_with_the_name_or_under_their_own_lease() {
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let of = move |path: &'static str| {
        move |w: &Watcher| Call::SetAttr { node: w.at(path), handle: None, set: mode }
    };
    let (_, facts) = update_for(of("d/f"), &["d: f"]);
    let [UpdatedFact::Name { entry: Some(entry), .. }] = &facts[..] else { panic!("{facts:?}") };
    assert_eq!(entry.attr.mode & 0o777, 0o600);
    let (watcher, facts) = update_for(of("d/h"), &["d/h itself"]);
    assert_eq!(attr_of(&facts, watcher.at("d/h").node).unwrap().mode & 0o777, 0o600);
}

#[test]
fn size_and_times_of_a_written_file_are_sent_as_update() {
    let world = World::new();
    let mut watcher = Watcher::new(&world);
    let mut mutator = world.client();
    let f = mutator.place("d/f");
    let access =
        Access { read: false, write: true, truncate: false, direct: false, sync: false, append: false };
    let handle = mutator.open(&f, access);
    let data = b"much longer than it was".to_vec();
    let flags = WriteFlags::default();
    let call = mutator.send(Call::Write { node: f, handle: Some(handle), offset: 0, data, flags });
    let (id, held) = watcher.held();
    assert_eq!(held, BTreeSet::from(["d: f".to_owned()]));
    watcher.acknowledge(id);
    mutator.answer(call);
    let facts = watcher.became(id);
    let [UpdatedFact::Name { entry: Some(entry), .. }] = &facts[..] else { panic!("{facts:?}") };
    assert_eq!(entry.attr.size, 23);
}

#[test]
fn change_overtaken_by_a_local_process_sends_no_facts() {
    let world = World::new();
    let mut watcher = Watcher::new(&world);
    let mut mutator = world.client();
    let dir = mutator.place("d");
    let call = mutator.send(mkdir(&dir, "new"));
    let (id, _) = watcher.held();
    // A local process creates the name before the server continues.
    std::fs::create_dir(world.dir.path().join("d/new")).unwrap();
    watcher.acknowledge(id);
    assert_eq!(mutator.answer(call).result, Err(Errno::EXIST));
    assert_eq!(watcher.became(id), [], "the holder asks");
}

#[test]
fn cancelled_change_commits_its_update_without_facts() {
    let world = World::new();
    let mut watcher = Watcher::new(&world);
    let mut mutator = world.client();
    let dir = mutator.place("d");
    let call = mutator.send(mkdir(&dir, "new"));
    let (id, _) = watcher.held();
    mutator.cancel(call);
    assert_eq!(mutator.answer(call).result, Err(Errno::INTR));
    assert_eq!(watcher.became(id), []);
    watcher.acknowledge(id);
}

#[test]
fn lease_on_a_removed_directory_is_recalled_instead_of_updated() {
    let world = World::new();
    let mut watcher = Watcher::new(&world);
    let mut mutator = world.client();
    let (e, dir) = (watcher.at("d/e").node, mutator.place("d"));
    let call = mutator.send(Call::Rmdir { dir, name: name("e") });
    let (id, _) = watcher.held();
    watcher
        .client
        .wait(|events| (events.iter().filter(|e| matches!(e, Event::Recall(_))).count() == 2).then_some(()));
    assert!(watcher.client.recalls().iter().all(|recall| recall.node == e), "the directory that goes");
    watcher.client.give_back();
    assert!(!mutator.is_answered(call), "one is still held");
    watcher.acknowledge(id);
    assert!(mutator.answer(call).result.is_ok());
}

#[test]
fn ids_in_updates_are_those_of_the_clients_export() {
    let world = World::new();
    let (mut whole, mut below) = (Watcher::new(&world), {
        let stream = world.server.serve_in_process().unwrap();
        Client::wanting(stream, &world.dir.path().join("d"), Term::Session, UPDATES)
    });
    let root = below.root();
    below.list(&root);

    let mut mutator = world.client();
    let dir = mutator.place("d");
    let call = mutator.send(mkdir(&dir, "new"));
    let (id, _) = whole.held();
    whole.acknowledge(id);
    let hold = below.wait(|events| {
        events.iter().find_map(|event| match event {
            Event::UpdatePrepare(hold) => Some(hold.clone()),
            _ => None,
        })
    });
    assert!(hold.facts.iter().all(|held| held.node == root.node));
    let now = below.now();
    below.session.handle_acknowledge(now, hold.id);
    below.drain();
    assert!(mutator.answer(call).result.is_ok());
    let facts = below.wait(|events| {
        events.iter().find_map(|event| match event {
            Event::UpdateCommit(commit) => Some(commit.facts.clone()),
            _ => None,
        })
    });
    let told = facts.iter().find_map(|fact| match fact {
        UpdatedFact::Name { entry: Some(entry), .. } => Some(entry.id),
        _ => None,
    });
    // Each export has its own ids for the new directory.
    let (here, there) = (below.place("new").node, whole.client.place("d/new").node);
    assert_eq!(told, Some(here));
    assert_eq!(names(&whole.became(id)), [("new".to_owned(), Some(there.ino))]);
}

#[test]
fn orphan_directory_appears_in_no_update() {
    let world = World::new();
    let mut watcher = Watcher::new(&world);
    std::fs::create_dir(world.dir.path().join(".nigh-orphans")).unwrap();
    let mut mutator = world.client();
    let root = mutator.root();
    let call = mutator.send(mkdir(&root, ".nigh-orphans"));
    let (id, _) = watcher.held();
    watcher.acknowledge(id);
    assert!(mutator.answer(call).result.is_err());
    assert_eq!(names(&watcher.became(id)), [(".nigh-orphans".to_owned(), None)]);
}

/// The file is known by a descriptor without a directory, since the name under which it was opened is gone. So the
/// server must record its location, for both files of an exchange.
#[test]
fn write_after_an_exchange_recalls_the_files_present_parent() {
    let world = World::new();
    let mut watcher = Watcher::new(&world);
    let mut mutator = world.client();
    mutator.obliging = true;
    let (d, d2, h) = (mutator.place("d"), mutator.place("d2"), mutator.place("d/h"));
    let access =
        Access { read: false, write: true, truncate: false, direct: false, sync: false, append: false };
    let handle = mutator.open(&h, access);
    let goes = Call::Unlink { dir: d.clone(), name: name("h"), keep: None };
    let (from, to, of, new_name) = (d.clone(), d2, name("f"), name("h2"));
    let moves = Call::Rename {
        from,
        name: of,
        to,
        new_name,
        no_replace: false,
        exchange: true,
        whiteout: false,
        keep: None,
    };
    for call in [goes, moves] {
        let sent = mutator.send(call);
        let (id, _) = watcher.held();
        watcher.acknowledge(id);
        assert!(mutator.answer(sent).result.is_ok());
        watcher.became(id);
    }
    let (flags, data) = (WriteFlags::default(), b"text".to_vec());
    mutator.send(Call::Write { node: h, handle: Some(handle), offset: 0, data, flags });
    let is_asked = |event: &Event| matches!(event, Event::Recall(recall) if (recall.node, recall.covers) == (d.node, LeaseScope::Directory));
    watcher.client.wait(|events| events.iter().any(is_asked).then_some(()));
}
