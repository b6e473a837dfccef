//! A change recalls the other sessions' conflicting leases first (docs/decisions/0008-leases.md).

use crate::common::client::Client;
use crate::common::world::World;
use crate::common::*;
use nigh_remote::{Event, Remote};
use nigh_types::*;
use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

fn covers(text: &str) -> LeaseScope {
    match text {
        "names" => LeaseScope::Directory,
        "inode" => LeaseScope::Attributes,
        _ => LeaseScope::Data,
    }
}

type Place2<'a> = &'a dyn Fn(&str) -> NodeRef;

/// A client holds all leases; the server answers `change` (with `result`) only after recalls of exactly `expected`
/// are acknowledged.
fn recalls(what: &str, change: impl Fn(Place2<'_>) -> Call, expected: &[&str], result: Result<(), Errno>) {
    let world = World::new();
    let (mut holder, held) = world.warm();
    let mut mutator = world.client();
    let names = ["", "d", "d2", "d/e", "d/f", "d/h", "d2/old"];
    let places: Vec<NodeRef> = names.iter().map(|name| mutator.place(name)).collect();
    let find = |path: &str| places[names.iter().position(|n| *n == path).unwrap()].clone();
    let call = mutator.send(change(&find));
    let expected: BTreeSet<(NodeId, LeaseScope)> = expected
        .iter()
        .map(|text| {
            let (path, what) = text.split_once(' ').unwrap();
            let place = &held.iter().find(|(name, _)| *name == path).unwrap().1;
            (place.node, covers(what))
        })
        .collect();
    if expected.is_empty() {
        assert_eq!(mutator.answer(call).result.map(drop), result, "{what}");
        holder.pump();
        assert_eq!(holder.recalls(), [], "{what}");
        return;
    }
    assert!(!mutator.is_answered(call), "{what}: before it was given back");
    let recalled = |client: &Client| -> BTreeSet<_> {
        client.recalls().iter().map(|recall| (recall.node, recall.covers)).collect()
    };
    holder.wait(|events| {
        let count = events.iter().filter(|event| matches!(event, Event::Recall(_))).count();
        (count >= expected.len()).then_some(())
    });
    assert_eq!(recalled(&holder), expected, "{what}");
    let last = holder.recalls().last().unwrap().id;
    let others: Vec<_> = holder.recalls().iter().map(|recall| recall.id).filter(|id| *id != last).collect();
    let now = holder.now();
    others.into_iter().for_each(|id| holder.session.handle_acknowledge(now, id));
    holder.drain();
    assert!(!mutator.is_answered(call), "{what}: one is still out");
    holder.session.handle_acknowledge(now, last);
    holder.drain();
    assert_eq!(mutator.answer(call).result.map(drop), result, "{what}");
    mutator.pump();
    assert_eq!(mutator.recalls(), [], "{what}: its own session is not asked");
}

fn done(what: &str, change: impl Fn(Place2<'_>) -> Call, expected: &[&str]) {
    recalls(what, change, expected, Ok(()));
}

#[test]
fn creating_names_recalls_the_directory() {
    let both = ["d names", "d inode"];
    let create = |exclusive, truncate, text: &'static str| {
        move |at: Place2<'_>| Call::Create {
            dir: at("d"),
            name: name(text),
            mode: 0o600,
            umask: 0,
            exclusive,
            access: Access { truncate, ..BOTH },
        }
    };
    done("create", create(true, false, "new"), &both);
    done("create, not exclusive", create(false, true, "new"), &both);
    done("create of what is there", create(false, false, "f"), &[]);
    done("create that truncates", create(false, true, "f"), &["d names", "d/f data"]);
    recalls("exclusive create", create(true, true, "f"), &[], Err(Errno::EXIST));
    let mkdir = |text: &'static str| {
        move |at: Place2<'_>| Call::Mkdir { dir: at("d"), name: name(text), mode: 0o700, umask: 0 }
    };
    done("mkdir", mkdir("new"), &both);
    recalls("mkdir of what is there", mkdir("e"), &[], Err(Errno::EXIST));
    let fifo = |at: Place2<'_>| Call::Mknod {
        dir: at("d"),
        name: name("p"),
        kind: Kind::Fifo,
        mode: 0o600,
        umask: 0,
        rdev: 0,
    };
    done("mknod", fifo, &both);
    let symlink = |at: Place2<'_>| Call::Symlink { dir: at("d"), name: name("s"), target: b"t".to_vec() };
    done("symlink", symlink, &both);
    let tmpfile = |at: Place2<'_>| Call::Tmpfile { dir: at("d"), mode: 0o600, umask: 0, access: BOTH };
    done("tmpfile", tmpfile, &[]);
    let link = |from: &'static str, text: &'static str| {
        move |at: Place2<'_>| Call::Link { node: at(from), dir: at("d2"), name: name(text) }
    };
    done("link", link("d/f", "new"), &["d2 names", "d2 inode", "d names"]);
    done("third link", link("d/h", "new"), &["d2 names", "d2 inode", "d/h inode"]);
    recalls("link over a name", link("d/h", "old"), &[], Err(Errno::EXIST));
}

#[test]
fn removing_names_recalls_the_directory_and_the_removed_inodes() {
    let unlink = |text: &'static str| {
        move |at: Place2<'_>| Call::Unlink { dir: at("d"), name: name(text), keep: None }
    };
    done("unlink", unlink("f"), &["d names", "d inode", "d/f data"]);
    done("unlink of one of two", unlink("h"), &["d names", "d inode", "d/h inode", "d/h data"]);
    recalls("unlink of nothing", unlink("none"), &[], Err(Errno::NOENT));
    let rmdir = |at: Place2<'_>| Call::Rmdir { dir: at("d"), name: name("e") };
    done("rmdir", rmdir, &["d names", "d inode", "d/e names", "d/e inode"]);
}

#[test]
fn rename_recalls_both_directories_and_moved_and_replaced_inodes() {
    let both = ["d names", "d inode", "d2 names", "d2 inode"];
    let rename = |from: &'static str, to: &'static str, no_replace, exchange| {
        move |at: Place2<'_>| Call::Rename {
            from: at("d"),
            name: name(from),
            to: at("d2"),
            new_name: name(to),
            no_replace,
            exchange,
            whiteout: false,
            keep: None,
        }
    };
    done("rename", rename("f", "new", false, false), &both);
    let replaced = [&both[..], &["d2/old data"]].concat();
    done("rename over a file", rename("f", "old", false, false), &replaced);
    done("rename of a directory", rename("e", "e", false, false), &[&both[..], &["d/e inode"]].concat());
    done("exchange", rename("f", "old", false, true), &both);
    done("rename of a hard link", rename("h", "h3", false, false), &[&both[..], &["d/h inode"]].concat());
    done("rename to another name of the same", rename("h", "h2", false, false), &[]);
    recalls("rename without replacing", rename("f", "old", true, false), &[], Err(Errno::EXIST));
    recalls("rename of nothing", rename("none", "new", false, false), &[], Err(Errno::NOENT));
}

#[test]
fn inode_changes_recall_leases_on_its_attributes_and_data() {
    let set = |path: &'static str, set: SetAttr| {
        move |at: Place2<'_>| Call::SetAttr { node: at(path), handle: None, set }
    };
    let mode = SetAttr { mode: Some(0o700), ..SetAttr::default() };
    let times = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
    let size = SetAttr { size: Some(3), ..SetAttr::default() };
    done("chmod", set("d/f", mode), &["d names"]);
    done("chmod of a directory", set("d/e", mode), &["d/e inode"]);
    done("chmod of a hard link", set("d/h", mode), &["d/h inode"]);
    done("utimes", set("d/f", times), &["d names"]);
    done("setattr of nothing", set("d/f", SetAttr::default()), &[]);
    done("truncate", set("d/f", size), &["d names", "d/f data"]);
    done("truncate of a hard link", set("d/h", size), &["d/h inode", "d/h data"]);
    let write = |path: &'static str| {
        move |at: Place2<'_>| Call::Write {
            node: at(path),
            handle: None,
            offset: 0,
            data: b"x".to_vec(),
            flags: WriteFlags::default(),
        }
    };
    done("write", write("d/f"), &["d names", "d/f data"]);
    done("write to a hard link", write("d/h"), &["d/h inode", "d/h data"]);
    let open = |at: Place2<'_>| Call::Open { node: at("d/f"), access: Access { truncate: true, ..BOTH } };
    done("open that truncates", open, &["d names", "d/f data"]);
    done("open", |at| Call::Open { node: at("d/f"), access: BOTH }, &[]);
    let copy = |at: Place2<'_>| Call::CopyRange {
        from: at("d/f"),
        from_handle: None,
        from_offset: 0,
        to: at("d2/old"),
        to_handle: None,
        to_offset: 0,
        length: 4,
    };
    done("copy", copy, &["d2 names", "d2/old data"]);
    let fallocate =
        |at: Place2<'_>| Call::Fallocate { node: at("d/f"), handle: None, mode: 0, offset: 0, length: 99 };
    done("fallocate", fallocate, &["d names", "d/f data"]);
    done("fsync", |at| Call::Fsync { node: at("d/f"), handle: None, data_only: false }, &[]);
    let set_xattr = |at: Place2<'_>| Call::SetXattr {
        node: at("d/f"),
        name: b"user.a".to_vec(),
        value: b"b".to_vec(),
        flags: 0,
        kill_sgid: false,
    };
    done("setxattr", set_xattr, &["d names"]);
    let remove = |at: Place2<'_>| Call::RemoveXattr { node: at("d/f"), name: b"user.a".to_vec() };
    recalls("removexattr", remove, &["d names"], Err(Errno::NODATA));
}

#[test]
fn lookup_during_a_pending_change_does_not_wait_and_gets_no_grant() {
    let world = World::new();
    let (mut holder, _) = world.warm();
    let mut mutator = world.client();
    let d = mutator.place("d");
    let unlink = mutator.send(Call::Unlink { dir: d, name: name("f"), keep: None });
    assert!(!mutator.is_answered(unlink));
    let mut reader = world.client();
    for client in [&mut reader, &mut holder, &mut mutator] {
        let d = client.place("d");
        let response = client.call(Call::Lookup { dir: d.clone(), name: name("f") });
        assert!(matches!(response.result, Ok(Reply::Entry(Some(_)))), "it is still there");
        assert_eq!(response.grants, []);
        let (entries, grants) = client.list(&d);
        assert_eq!(entries.len(), 3);
        assert!(grants.iter().all(|grant| grant.node != d.node), "{grants:?}");
        assert_eq!(client.attr(&d).1, []);
    }
    holder.give_back();
    assert!(mutator.answer(unlink).result.is_ok());
    let d = reader.place("d");
    let response = reader.call(Call::Lookup { dir: d, name: name("f") });
    assert_eq!(response.result, Ok(Reply::Entry(None)));
    assert_eq!(response.grants.len(), 1, "and again it may be granted");
}

#[test]
fn two_clients_changing_each_others_leased_directories_both_finish() {
    let world = World::new();
    let (mut one, mut two) = (world.client(), world.client());
    let (d, d2) = (one.place("d"), two.place("d2"));
    one.list(&d);
    two.list(&d2);
    let make = |dir: &NodeRef| Call::Mkdir { dir: dir.clone(), name: name("new"), mode: 0o700, umask: 0 };
    let (first, second) = (one.send(make(&d2)), two.send(make(&d)));
    assert!(!one.is_answered(first) && !two.is_answered(second));
    one.give_back();
    two.give_back();
    assert!(one.answer(first).result.is_ok() && two.answer(second).result.is_ok());
}

#[test]
fn mutating_client_is_granted_leases_on_its_changes() {
    let world = World::new();
    let mut client = world.client();
    let d = client.place("d");
    let made = client.call(Call::Mkdir { dir: d.clone(), name: name("new"), mode: 0o700, umask: 0 });
    let Ok(Reply::Created { entry, .. }) = made.result else { panic!("{:?}", made.result) };
    let granted: BTreeSet<_> = made.grants.iter().map(|grant| (grant.node, grant.covers)).collect();
    let expected = [
        (d.node, LeaseScope::Directory),
        (entry.id, LeaseScope::Attributes),
        (entry.id, LeaseScope::Directory),
    ];
    assert_eq!(granted, expected.into_iter().collect());
    let set = SetAttr { mode: Some(0o711), ..SetAttr::default() };
    let f = client.place("d/f");
    let changed = client.call(Call::SetAttr { node: f, handle: None, set });
    assert_eq!(changed.grants.len(), 1);
    client.pump();
    assert_eq!(client.recalls(), []);
}

#[test]
fn exports_that_overlap_share_their_leases() {
    let world = World::new();
    let mut whole = world.client();
    let d = whole.place("d");
    whole.list(&d);
    let mut below = world.client_of(&world.dir.path().join("d"));
    let root = below.root();
    let call = below.send(Call::Mkdir { dir: root.clone(), name: name("new"), mode: 0o700, umask: 0 });
    whole.wait(|events| (events.iter().filter(|e| matches!(e, Event::Recall(_))).count() == 2).then_some(()));
    assert!(whole.recalls().iter().all(|recall| recall.node == d.node));
    assert!(!below.is_answered(call));
    whole.give_back();
    assert!(below.answer(call).result.is_ok());
    below.list(&root);
    whole.send(Call::Rmdir { dir: d, name: name("new") });
    let of_root = |event: &Event| matches!(event, Event::Recall(recall) if recall.node == root.node);
    below.wait(|events| events.iter().any(of_root).then_some(()));
}

#[test]
fn write_delayed_by_a_recall_rechecks_the_location_of_a_moved_file() {
    let world = World::new();
    let mut reader = world.client();
    let f = reader.place("d/f");
    let grants = reader.read(&f).1;
    let (mut writer, mut mover, mut watcher) = (world.client(), world.client(), world.client());
    let f = writer.place("d/f");
    let handle = writer.open(&f, BOTH);
    // The reader keeps its data lease alone.
    let d = reader.place("d");
    let held: Vec<_> = [reader.list(&d).1, reader.attr(&d).1].concat();
    let now = reader.now();
    reader.session.handle_return(now, held.iter().map(|grant| grant.id).collect());
    reader.drain();
    reader.call(Call::StatFs { node: d });
    let d = writer.place("d");
    let held: Vec<_> = [writer.list(&d).1, writer.attr(&d).1].concat();
    let now = writer.now();
    writer.session.handle_return(now, held.iter().map(|grant| grant.id).collect());
    writer.drain();
    writer.call(Call::StatFs { node: d });
    assert_eq!(grants.len(), 1);
    let (offset, flags) = (0, WriteFlags::default());
    let data = b"new".to_vec();
    let write = writer.send(Call::Write { node: f, handle: Some(handle), offset, data, flags });
    assert!(!writer.is_answered(write));
    let (from, to) = (mover.place("d"), mover.place("d2"));
    mover.obliging = true;
    let (name_f, new_name) = (name("f"), name("g"));
    let (no_replace, exchange, keep) = (false, false, None);
    let renamed = mover.call(Call::Rename {
        from,
        name: name_f,
        to,
        new_name,
        no_replace,
        exchange,
        whiteout: false,
        keep,
    });
    assert!(renamed.result.is_ok(), "no other client holds what it changes: {:?}", renamed.result);
    let d2 = watcher.place("d2");
    let (entries, _) = watcher.list(&d2);
    assert!(entries.iter().any(|(text, _)| *text == name("g")));
    reader.give_back_next();
    watcher.wait(|events| events.iter().any(|e| matches!(e, Event::Recall(_))).then_some(()));
    let recalled: Vec<_> = watcher.recalls().iter().map(|r| (r.node, r.covers, r.names.clone())).collect();
    assert_eq!(recalled, [(d2.node, LeaseScope::Directory, vec![name("g")])]);
    assert!(!writer.is_answered(write));
    watcher.give_back();
    mover.pump();
    assert!(writer.answer(write).result.is_ok());
    assert_eq!(fs::read(world.dir.path().join("d2/g")).unwrap(), b"new45678");
}

#[test]
fn link_count_change_recalls_the_lease_covering_the_file() {
    let world = World::new();
    let mut watcher = world.client();
    let (d, d2) = (watcher.place("d"), watcher.place("d2"));
    watcher.list(&d);
    let mut writer = world.client();
    writer.obliging = true;
    let (h, f) = (writer.place("d/h"), writer.place("d/f"));
    let handle = writer.open(&h, BOTH);
    let there = writer.place("d2");
    let oblige = |writer: &mut Client, watcher: &mut Client, call: Call| {
        let id = writer.send(call);
        let mut recalled = BTreeSet::new();
        let give_up = Instant::now() + Duration::from_secs(10);
        while !writer.is_answered(id) {
            assert!(Instant::now() < give_up);
            watcher.pump();
            recalled.extend(watcher.recalls().iter().map(|recall| (recall.node, recall.covers)));
            watcher.give_back();
        }
        (writer.answer(id), recalled)
    };
    // From one name to two: the server recalls the directory lease that covers the file.
    let link = Call::Link { node: f.clone(), dir: there, name: name("f2") };
    let (linked, recalled) = oblige(&mut writer, &mut watcher, link);
    assert!(linked.result.is_ok() && recalled.contains(&(d.node, LeaseScope::Directory)));
    // From two names to one, through a descriptor whose own name is gone: the server still knows the remaining
    // parent.
    let gone = Call::Unlink { dir: writer.place("d"), name: name("h"), keep: None };
    assert!(oblige(&mut writer, &mut watcher, gone).0.result.is_ok());
    let (entries, grants) = watcher.list(&d2);
    let left = entries.iter().find(|(text, _)| *text == name("h2")).unwrap();
    assert!(left.1.attr.covered_by_parent() && grants.iter().any(|grant| grant.node == d2.node));
    let (offset, flags, data) = (8, WriteFlags::default(), b"9".to_vec());
    let write = Call::Write { node: h, handle: Some(handle), offset, data, flags };
    let (written, recalled) = oblige(&mut writer, &mut watcher, write);
    assert!(written.result.is_ok(), "{:?}", written.result);
    assert_eq!(recalled.into_iter().collect::<Vec<_>>(), [(d2.node, LeaseScope::Directory)]);
}

#[test]
fn a_file_is_not_moved_while_it_is_changed() {
    let world = World::new();
    // A sparse source: slow to copy where the filesystem cannot clone it, and cheap to create.
    let length = 192 << 20;
    fs::File::create(world.dir.path().join("hole")).unwrap().set_len(length).unwrap();
    let (mut writer, mut mover) = (world.client(), world.client());
    (writer.obliging, mover.obliging) = (true, true);
    let (from, to) = (writer.place("hole"), writer.place("d/f"));
    let (dir, new_dir) = (mover.place("d"), mover.place("d2"));
    let copy = writer.send(Call::CopyRange {
        from,
        from_handle: None,
        from_offset: 0,
        to,
        to_handle: None,
        to_offset: 0,
        length,
    });
    while fs::metadata(world.dir.path().join("d/f")).unwrap().len() <= 8 {
        // The server recalls the mover's directory lease first.
        mover.pump();
    }
    let rename = mover.send(Call::Rename {
        from: dir,
        name: name("f"),
        to: new_dir,
        new_name: name("f"),
        no_replace: true,
        exchange: false,
        whiteout: false,
        keep: None,
    });
    while !mover.is_answered(rename) {
        writer.pump();
    }
    assert!(mover.answer(rename).result.is_ok());
    let copied = fs::metadata(world.dir.path().join("d2/f")).unwrap().len();
    assert_eq!(copied, length, "where it lies decides whose grants the copy makes false");
    assert!(writer.answer(copy).result.is_ok());
}
