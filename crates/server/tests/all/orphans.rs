//! Files that are removed or replaced while a session has them open (docs/decisions/0013-orphans.md).

use crate::common::client::Client;
use crate::common::world::World;
use crate::common::*;
use nigh_remote::{Event, Remote};
use nigh_server::{Server, ServerOptions};
use nigh_types::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn unlink(dir: &NodeRef, text: &str) -> Call {
    Call::Unlink { dir: dir.clone(), name: name(text), keep: None }
}

fn rename(from: &NodeRef, old: &str, to: &NodeRef, new: &str) -> Call {
    let (from, to, name, new_name) = (from.clone(), to.clone(), name(old), name(new));
    Call::Rename { from, name, to, new_name, no_replace: false, exchange: false, whiteout: false, keep: None }
}

/// Names in the orphan directory; `None` if the directory does not exist.
fn aside(dir: &Path) -> Option<Vec<String>> {
    let entries = fs::read_dir(dir.join(".nigh-orphans")).ok()?;
    Some(entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect())
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(10);
    while !is_so() {
        assert!(Instant::now() < give_up, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn read(client: &mut Client, node: &NodeRef, handle: Handle) -> Result<Vec<u8>, Errno> {
    let call = Call::Read { node: node.clone(), handle: Some(handle), offset: 0, length: 4096 };
    client.call(call).result.map(|reply| match reply {
        Reply::Data(data) => data,
        other => panic!("{other:?}"),
    })
}

/// Runs a call, while the other client acknowledges recalls.
fn answered(client: &mut Client, call: Call, other: &mut Client) -> Response {
    let call = client.send(call);
    given_back(client, call, other)
}

fn given_back(client: &mut Client, call: CallId, other: &mut Client) -> Response {
    while !client.is_answered(call) {
        other.pump();
        other.give_back();
    }
    client.answer(call)
}

fn connect(world: &World) -> Client {
    let mut client = world.client();
    client.obliging = true;
    client
}

/// A change, given the directories `d` and `d2`.
type Way = fn(&NodeRef, &NodeRef) -> Call;

const CHOSEN: Handle = Handle(Handle::CLIENT_ASSIGNED | 7);

#[test]
fn unlinked_file_open_in_another_session_stays_readable() {
    let replace = |d: &NodeRef, d2: &NodeRef| rename(d2, "old", d, "f");
    let remove = |d: &NodeRef, _: &NodeRef| unlink(d, "f");
    let ways: [Way; 2] = [remove, replace];
    for change in ways {
        let world = World::new();
        let (mut holder, mut mutator) = (connect(&world), connect(&world));
        let f = holder.place("d/f");
        let handle = holder.open(&f, BOTH);
        let (d, d2) = (mutator.place("d"), mutator.place("d2"));
        let response = answered(&mut mutator, change(&d, &d2), &mut holder);
        assert!(response.result.is_ok());
        let gone = response.after.iter().find(|(id, _)| *id == f.node).unwrap().1;
        assert_eq!(gone.nlink, 0);
        assert_eq!(aside(world.dir.path()).unwrap().len(), 1);
        assert_eq!(fs::metadata(world.dir.path().join(".nigh-orphans")).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(read(&mut holder, &f, handle), Ok(b"12345678".to_vec()));
        let (data, flags) = (b"more".to_vec(), WriteFlags::default());
        let write = Call::Write { node: f.clone(), handle: Some(handle), offset: 8, data, flags };
        let written = holder.call(write);
        assert_eq!(written.result, Ok(Reply::Written { offset: 8, count: 4 }));
        assert!(written.after.iter().all(|(_, attr)| attr.nlink == 0), "{:?}", written.after);
        let set = SetAttr { size: Some(10), mode: Some(0o600), ..SetAttr::default() };
        match holder.call(Call::SetAttr { node: f.clone(), handle: Some(handle), set }).result {
            Ok(Reply::Attr(_, attr)) => assert_eq!((attr.size, attr.nlink), (10, 0)),
            other => panic!("{other:?}"),
        }
        assert_eq!(holder.attr(&f).0.nlink, 0);
        assert_eq!(read(&mut holder, &f, handle), Ok(b"12345678mo".to_vec()));
        // link(2) fails with ENOENT for a file without names.
        let link = Call::Link { node: f.clone(), dir: d2.clone(), name: name("again") };
        assert_eq!(answered(&mut mutator, link, &mut holder).result.map(drop), Err(Errno::NOENT));
        holder.send(Call::Release { handles: vec![handle] });
        eventually("it goes with the last close", || aside(world.dir.path()) == Some(vec![]));
        holder.leave();
        mutator.leave();
        eventually("the folder goes with the last session", || aside(world.dir.path()).is_none());
    }
}

#[test]
fn client_pins_open_file_before_acknowledging_a_recall() {
    let world = World::new();
    let (mut holder, mut mutator) = (world.client(), connect(&world));
    let d = holder.place("d");
    holder.list(&d);
    let f = holder.place("d/f");
    let call = mutator.place("d");
    let call = mutator.send(unlink(&call, "f"));
    assert!(!mutator.is_answered(call));
    holder.pump();
    holder.send(Call::PinOpen { node: f.clone(), names: vec![], handle: CHOSEN });
    // The number is already in use: the first pin stays.
    holder.send(Call::PinOpen { node: f.clone(), names: vec![], handle: CHOSEN });
    assert!(given_back(&mut mutator, call, &mut holder).result.is_ok());
    assert_eq!(aside(world.dir.path()).unwrap().len(), 1);
    assert_eq!(read(&mut holder, &f, CHOSEN), Ok(b"12345678".to_vec()));
    assert_eq!(holder.attr(&f).0.nlink, 0);
    holder.send(Call::Release { handles: vec![CHOSEN] });
    eventually("it goes with the last close", || aside(world.dir.path()) == Some(vec![]));
    // For a short time after the removal the server still finds the file for calls racing with it.
    std::thread::sleep(Duration::from_millis(2_200));
    assert_eq!(read(&mut holder, &f, CHOSEN), Err(Errno::STALE));
}

/// The lease is not renewed while acknowledgements are owed, but messages before an acknowledgement are still
/// processed.
#[test]
fn pinned_file_survives_a_late_acknowledgement() {
    let world = World::hasty();
    let (mut holder, mut mutator) = (world.client(), connect(&world));
    let d = holder.place("d");
    holder.list(&d);
    let f = holder.place("d/f");
    let there = mutator.place("d");
    let call = mutator.send(unlink(&there, "f"));
    let suspect = || world.server.leases().holders.iter().any(|holder| holder.suspect);
    eventually("it is suspect", suspect);
    holder.pump();
    holder.send(Call::PinOpen { node: f.clone(), names: vec![], handle: CHOSEN });
    assert!(given_back(&mut mutator, call, &mut holder).result.is_ok());
    assert_eq!(read(&mut holder, &f, CHOSEN), Ok(b"12345678".to_vec()));
}

#[test]
fn unopened_or_still_linked_file_is_not_moved_to_orphans() {
    let world = World::new();
    let mut client = connect(&world);
    let (d, h) = (client.place("d"), client.place("d/h"));
    assert!(client.call(unlink(&d, "f")).result.is_ok());
    client.open(&h, READ);
    assert!(client.call(unlink(&d, "h")).result.is_ok());
    assert_eq!(client.attr(&h).0.nlink, 1);
    assert_eq!(aside(world.dir.path()), None);
    // A file whose replacement fails keeps its only name, and gets no orphan name.
    let e = Call::Rename {
        from: d.clone(),
        name: name("e"),
        to: client.place("d2"),
        new_name: name("old"),
        no_replace: false,
        exchange: false,
        whiteout: false,
        keep: None,
    };
    let old = client.place("d2/old");
    client.open(&old, READ);
    assert_eq!(client.call(e).result.map(drop), Err(Errno::NOTDIR));
    assert_eq!(client.attr(&old).0.nlink, 1);
    assert_eq!(aside(world.dir.path()), Some(vec![]));
}

#[test]
fn creation_of_the_orphan_directory_recalls_its_parents_attributes() {
    let world = World::new();
    let (mut holder, mut mutator) = (world.client(), connect(&world));
    let root = holder.root();
    let before = holder.attr(&root).0;
    let f = mutator.place("d/f");
    mutator.open(&f, READ);
    let d = mutator.place("d");
    let call = mutator.send(unlink(&d, "f"));
    assert!(!mutator.is_answered(call));
    holder.wait(|events| events.iter().any(|e| matches!(e, Event::Recall(_))).then_some(()));
    let recalled: Vec<_> = holder.recalls().iter().map(|recall| (recall.node, recall.covers)).collect();
    assert_eq!(recalled, [(root.node, LeaseScope::Attributes)]);
    holder.give_back();
    let response = mutator.answer(call);
    let told = response.after.iter().find(|(id, _)| *id == root.node).unwrap().1;
    let after = holder.attr(&root).0;
    assert_eq!((told, after.mtime), (after, before.mtime));
}

/// By name, by path, by `..`, by a symlink, by a hard link, by renaming, by its inode number, as an export.
#[test]
fn orphan_directory_is_unreachable_for_clients() {
    let world = World::new();
    let mut client = connect(&world);
    let top = client.root();
    let (d, f) = (client.place("d"), client.place("d/f"));
    let handle = client.open(&f, READ);
    assert!(client.call(unlink(&d, "f")).result.is_ok());
    let hidden = || name(".nigh-orphans");
    let file = aside(world.dir.path()).unwrap().remove(0);
    assert_eq!(client.call(Call::Lookup { dir: top.clone(), name: hidden() }).result, Ok(Reply::Entry(None)));
    assert!(client.list(&top).0.iter().all(|(name, _)| *name != hidden()));
    for names in [vec![hidden()], vec![hidden(), name(&file)], vec![name("d"), hidden(), name(&file)]] {
        assert_eq!(client.call(Call::ResolvePath { node: f.node, names }).result, Err(Errno::STALE));
    }
    for bad in ["..", ".", "a/b", ".nigh-orphans/x"] {
        assert!(Name::new(bad.as_bytes()).is_err(), "{bad}");
    }
    symlink(".nigh-orphans", world.dir.path().join("way")).unwrap();
    let way = client.place("way");
    assert_eq!(client.call(Call::List { dir: way.clone() }).result.map(drop), Err(Errno::NOTDIR));
    let lookup = Call::Lookup { dir: way, name: name(&file) };
    assert_eq!(client.call(lookup).result.map(drop), Err(Errno::NOTDIR));
    let d2 = client.place("d2");
    let refused = [
        rename(&d2, "old", &top, ".nigh-orphans"),
        rename(&top, ".nigh-orphans", &d2, "mine"),
        rename(&top, ".nigh-orphans", &top, "mine"),
        Call::Link { node: client.place("d2/old"), dir: top.clone(), name: hidden() },
        Call::Mkdir { dir: d2.clone(), name: hidden(), mode: 0o700, umask: 0 },
        Call::Rmdir { dir: top.clone(), name: hidden() },
        unlink(&top, ".nigh-orphans"),
    ];
    for call in refused {
        assert_eq!(client.call(call.clone()).result.map(drop), Err(Errno::PERM), "{call:?}");
    }
    // The orphan directory's name is no hint for the directory itself, nor for others.
    let hint = NodeRef { node: d.node, path_hint: Some((top.node, hidden())) };
    assert!(client.call(Call::List { dir: hint }).result.is_ok(), "d itself, by its id");
    let mut other = connect(&world);
    let ino = fs::metadata(world.dir.path().join(".nigh-orphans")).unwrap().ino();
    let guess = NodeRef::without_hint(NodeId { ino, generation: f.node.generation });
    other.root();
    other.send(Call::GetAttr { node: guess });
    assert!(other.lost().contains("id"), "a made-up id ends the session");
    let mut inside = world.client_of(&world.dir.path().join(".nigh-orphans"));
    let why = inside.wait(|events| {
        events.iter().find_map(|event| match event {
            Event::Lost { why } => Some(why.clone()),
            Event::Attached(_) => panic!("it is exported"),
            _ => None,
        })
    });
    assert!(why.contains(".nigh-orphans"), "{why}");
    assert_eq!(read(&mut client, &f, handle), Ok(b"12345678".to_vec()));
}

struct Restart {
    dir: TempDir,
    state: TempDir,
}

impl Restart {
    fn server(&self, term_ms: u64) -> Arc<Server> {
        let mut options = ServerOptions::new(self.state.path().to_owned());
        options.session_term = Span::from_millis(term_ms);
        Server::new(options).unwrap()
    }

    /// Returns a server's directories after it stopped while a client had a removed file open.
    fn left() -> (Restart, NodeRef) {
        let x = Restart { dir: tempfile::tempdir().unwrap(), state: tempfile::tempdir().unwrap() };
        fs::create_dir(x.dir.path().join("d")).unwrap();
        fs::write(x.dir.path().join("d/f"), "content").unwrap();
        let server = x.server(15_000);
        let mut client = Client::connect(&server, x.dir.path(), Term::Session);
        let (d, f) = (client.place("d"), client.place("d/f"));
        client.open(&f, BOTH);
        assert!(client.call(unlink(&d, "f")).result.is_ok());
        server.end_sessions("the server stops");
        client.cut();
        eventually("its sessions are over", || server.session_count() == 0);
        assert_eq!(aside(x.dir.path()).unwrap().len(), 1);
        (x, f)
    }
}

#[test]
fn a_removed_file_is_found_by_its_id_after_a_restart() {
    let (x, f) = Restart::left();
    let server = x.server(1_000);
    let mut client = Client::connect(&server, x.dir.path(), Term::Session);
    client.root();
    let f = NodeRef::without_hint(f.node);
    assert_eq!(client.attr(&f).0.nlink, 0, "before it is opened again, too");
    let (first, second) = (client.open(&f, BOTH), client.open(&f, READ));
    assert_eq!(read(&mut client, &f, first), Ok(b"content".to_vec()));
    assert_eq!(client.attr(&f).0.nlink, 0);
    client.send(Call::Release { handles: vec![first] });
    assert_eq!(read(&mut client, &f, second), Ok(b"content".to_vec()));
    assert_eq!(aside(x.dir.path()).unwrap().len(), 1);
    client.send(Call::Release { handles: vec![second] });
    let give_up = Instant::now() + Duration::from_secs(10);
    while aside(x.dir.path()) != Some(vec![]) {
        assert!(Instant::now() < give_up, "it is deleted when no client is waited for any more");
        client.pump();
        client.session.handle_timeout(client.now());
        client.drain();
    }
    assert_eq!(client.call(Call::GetAttr { node: f }).result.map(drop), Err(Errno::STALE));
}

/// The first client that returns closes the file, or its session is replaced.
#[test]
fn removed_open_file_is_kept_for_every_client_that_may_return() {
    let (x, f) = Restart::left();
    let server = x.server(15_000);
    let mut first = Client::connect(&server, x.dir.path(), Term::Session);
    first.root();
    let f = NodeRef::without_hint(f.node);
    let handle = first.open(&f, BOTH);
    first.send(Call::Release { handles: vec![handle] });
    assert_eq!(first.attr(&f).0.nlink, 0);
    let mut second = Client::connect(&server, x.dir.path(), Term::Session);
    second.root();
    let handle = second.open(&f, BOTH);
    assert_eq!(second.attr(&f).0.nlink, 0);
    assert_eq!(read(&mut second, &f, handle), Ok(b"content".to_vec()));
}

/// The earlier server may still be ending, and a child of it between fork and exec holds its locks too.
#[test]
fn removed_open_file_is_found_while_the_folder_is_still_locked_for_a_moment() {
    let (x, f) = Restart::left();
    let folder = fs::File::open(x.dir.path().join(".nigh-orphans")).unwrap();
    rustix::fs::flock(&folder, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let unlocks = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        drop(folder);
    });
    let server = x.server(15_000);
    let mut client = Client::connect(&server, x.dir.path(), Term::Session);
    client.root();
    let f = NodeRef::without_hint(f.node);
    let handle = client.open(&f, READ);
    assert_eq!(read(&mut client, &f, handle), Ok(b"content".to_vec()));
    unlocks.join().unwrap();
}

#[test]
fn unclaimed_orphan_is_removed_after_a_term() {
    let (x, f) = Restart::left();
    // A file that the server did not create stays.
    fs::write(x.dir.path().join(".nigh-orphans/not ours"), "x").unwrap();
    let server = x.server(300);
    let mut client = Client::connect(&server, x.dir.path(), Term::Session);
    client.root();
    let give_up = Instant::now() + Duration::from_secs(10);
    while aside(x.dir.path()).unwrap().len() > 1 {
        assert!(Instant::now() < give_up, "{:?}", aside(x.dir.path()));
        client.pump();
        client.session.handle_timeout(client.now());
        client.drain();
    }
    assert_eq!(aside(x.dir.path()).unwrap(), ["not ours"]);
    let looked = client.call(Call::GetAttr { node: NodeRef::without_hint(f.node) });
    assert_eq!(looked.result.map(drop), Err(Errno::STALE));
}

/// The export stays open for it.
#[test]
fn unclaimed_orphan_is_removed_after_all_clients_have_left() {
    let (x, _) = Restart::left();
    let server = x.server(300);
    let mut client = Client::connect(&server, x.dir.path(), Term::Session);
    client.root();
    assert_eq!(aside(x.dir.path()).unwrap().len(), 1);
    client.leave();
    eventually("no client is there", || server.session_count() == 0);
    eventually("removed", || aside(x.dir.path()).unwrap().is_empty());
}

#[test]
fn without_orphan_directory_descriptors_keep_removed_files() {
    if !needs_root("without_orphan_directory_descriptors_keep_removed_files") {
        return;
    }
    let world = World::new();
    // The directory with this name belongs to another user.
    let folder = world.dir.path().join(".nigh-orphans");
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::chown(&folder, Some(1234), Some(1234)).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    let mut client = connect(&world);
    let not_given = client.session().guarantees.unsupported;
    assert!(not_given.iter().any(|lacking| lacking.name == "S4" && !lacking.why.is_empty()), "{not_given:?}");
    let (d, f) = (client.place("d"), client.place("d/f"));
    let handle = client.open(&f, READ);
    assert!(client.call(unlink(&d, "f")).result.is_ok());
    assert_eq!(aside(world.dir.path()), Some(vec![]));
    assert_eq!(read(&mut client, &f, handle), Ok(b"12345678".to_vec()));
    assert_eq!(client.attr(&f).0.nlink, 0);
}

/// Opens race with removals: a client that got an open reply never loses the file, and nothing is left over.
#[test]
fn opens_racing_with_removals_lose_no_file_and_leave_no_orphan() {
    let world = World::new();
    let path = world.dir.path().to_owned();
    let server = Arc::clone(&world.server);
    let opener = std::thread::spawn({
        let (server, path) = (Arc::clone(&server), path.clone());
        move || {
            let mut client = Client::connect(&server, &path, Term::Session);
            client.obliging = true;
            let d = client.place("d");
            let (mut open, mut missed) = (0, 0);
            let ends = Instant::now() + Duration::from_secs(2);
            while Instant::now() < ends {
                let looked = client.call(Call::Lookup { dir: d.clone(), name: name("g") }).result;
                let Ok(Reply::Entry(Some(entry))) = looked else { continue };
                let g = NodeRef { node: entry.id, path_hint: Some((d.node, name("g"))) };
                match client.call(Call::Open { node: g.clone(), access: READ }).result {
                    Ok(Reply::Opened { handle, .. }) => {
                        std::thread::sleep(Duration::from_micros(300));
                        let attr = client.attr(&g).0;
                        assert_eq!(read(&mut client, &g, handle), Ok(b"x".to_vec()));
                        if attr.nlink == 0 {
                            // In the orphan directory, or by its descriptor if the open came a moment later.
                            open += 1;
                        }
                        client.send(Call::Release { handles: vec![handle] });
                    }
                    Err(Errno::STALE) => missed += 1,
                    other => panic!("{other:?}"),
                }
            }
            println!("{open} were open when they were removed, {missed} opens came too late");
            open
        }
    });
    let mut mutator = connect(&world);
    let d = mutator.place("d");
    while !opener.is_finished() {
        fs::write(path.join("new"), "x").unwrap();
        fs::rename(path.join("new"), path.join("d/g")).unwrap();
        let gone = mutator.call(unlink(&d, "g"));
        assert!(gone.result.is_ok(), "{:?}", gone.result);
    }
    assert!(opener.join().unwrap() > 0);
    eventually("nothing is left", || aside(&path).is_none_or(|names| names.is_empty()));
}

/// The server creates the orphan name before it removes the last name.
#[test]
fn unlink_of_open_file_never_shows_two_links() {
    let world = World::new();
    let path = world.dir.path().to_owned();
    let server = Arc::clone(&world.server);
    let looker = std::thread::spawn({
        let path = path.clone();
        move || {
            let mut client = Client::connect(&server, &path, Term::Session);
            client.obliging = true;
            let d = client.place("d");
            let (mut lost, ends) = (0, Instant::now() + Duration::from_secs(2));
            while Instant::now() < ends {
                let looked = client.call(Call::Lookup { dir: d.clone(), name: name("g") }).result;
                let Ok(Reply::Entry(Some(entry))) = looked else { continue };
                let g = NodeRef { node: entry.id, path_hint: Some((d.node, name("g"))) };
                let opened = client.call(Call::Open { node: g.clone(), access: READ }).result;
                let Ok(Reply::Opened { handle, .. }) = opened else { continue };
                for _ in 0..200 {
                    let links = client.attr(&g).0.nlink;
                    assert!(links < 2, "{links} links");
                    if links == 0 {
                        lost += 1;
                        break;
                    }
                }
                client.send(Call::Release { handles: vec![handle] });
            }
            lost
        }
    });
    let mut mutator = connect(&world);
    let d = mutator.place("d");
    while !looker.is_finished() {
        fs::write(path.join("new"), "x").unwrap();
        fs::rename(path.join("new"), path.join("d/g")).unwrap();
        std::thread::sleep(Duration::from_micros(500));
        assert!(mutator.call(unlink(&d, "g")).result.is_ok());
    }
    let lost = looker.join().unwrap();
    assert!(lost > 10, "only {lost} lost their name while they were looked at");
}

/// The server links the file into the orphan directory before rename fails with ENOTDIR, and unlinks it again.
#[test]
fn failed_replacement_of_open_file_never_shows_two_links() {
    let world = World::new();
    let path = world.dir.path().to_owned();
    fs::create_dir(path.join("d/top")).unwrap();
    fs::write(path.join("d/one"), "x").unwrap();
    fs::write(path.join("d/other"), "x").unwrap();
    let ends = Instant::now() + Duration::from_secs(1);
    let server = Arc::clone(&world.server);
    let looker = std::thread::spawn(move || {
        let mut client = Client::connect(&server, &path, Term::Session);
        client.obliging = true;
        let d = client.place("d");
        let looks = |client: &mut Client, text: &str| {
            let looked = client.call(Call::Lookup { dir: d.clone(), name: name(text) }).result;
            let Ok(Reply::Entry(Some(entry))) = looked else { panic!("{looked:?}") };
            assert_eq!(entry.attr.nlink, 1);
            NodeRef { node: entry.id, path_hint: Some((d.node, name(text))) }
        };
        for text in ["one", "other"] {
            let node = looks(&mut client, text);
            let opened = client.call(Call::Open { node, access: READ }).result;
            assert!(opened.is_ok(), "{opened:?}");
        }
        // The orphan directory exists after this.
        assert!(client.call(unlink(&d, "other")).result.is_ok());
        while Instant::now() < ends {
            let g = looks(&mut client, "one");
            assert_eq!(client.attr(&g).0.nlink, 1);
        }
    });
    let mut mutator = connect(&world);
    let d = mutator.place("d");
    while !looker.is_finished() {
        assert_eq!(mutator.call(rename(&d, "top", &d, "one")).result, Err(Errno::NOTDIR));
    }
    looker.join().unwrap();
}

/// As on a local disk, for a process with its working directory in it. A new directory of that name is a different
/// one.
#[test]
fn directory_removed_by_one_session_is_empty_for_another_and_can_be_changed() {
    let world = World::new();
    fs::create_dir_all(world.dir.path().join("d/here")).unwrap();
    fs::create_dir(world.dir.path().join("d/there")).unwrap();
    let (mut one, mut two) = (world.client(), world.client());
    let d = one.place("d");
    let replaces = rename(&d, "there", &d, "here");
    let removes = Call::Rmdir { dir: d.clone(), name: name("here") };
    for (call, is_replaced) in [(replaces, true), (removes, false)] {
        let here = two.place("d/here");
        two.list(&here);
        assert!(answered(&mut one, call, &mut two).result.is_ok());
        if !is_replaced {
            assert!(one.call(mkdir(&d, "here")).result.is_ok());
        }
        let bare = NodeRef::without_hint(here.node);
        assert_eq!(two.attr(&bare).0.nlink, 0);
        assert_eq!(two.list(&here).0, []);
        let set = SetAttr { mode: Some(0o700), mtime: Some(SetTime::Now), ..SetAttr::default() };
        let Ok(Reply::Attr(node, attr)) =
            two.call(Call::SetAttr { node: bare.clone(), handle: None, set }).result
        else {
            panic!("it is not changed")
        };
        assert_eq!((node, attr.mode, attr.nlink), (here.node, 0o040_700, 0));
        let synced = two.call(Call::Fsync { node: bare.clone(), handle: None, data_only: false });
        assert_eq!(synced.result, Ok(Reply::Done));
        assert_eq!(two.call(mkdir(&bare, "in")).result, Err(Errno::NOENT));
    }
}

#[test]
fn directory_moved_by_one_session_is_not_removed_for_another() {
    let world = World::new();
    fs::create_dir_all(world.dir.path().join("d/here/below")).unwrap();
    let (mut one, mut two) = (world.client(), world.client());
    let (d, here) = (one.place("d"), two.place("d/here"));
    assert!(answered(&mut one, rename(&d, "here", &d, "elsewhere"), &mut two).result.is_ok());
    assert_eq!(two.attr(&here).0.nlink, 3);
    assert_eq!(two.list(&here).0.len(), 1);
}
