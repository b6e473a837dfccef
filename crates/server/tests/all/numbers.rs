//! Lookup of inodes by number alone (docs/decisions/0035-file-handles.md): it finds inodes of the export only, and
//! only for peers that are vouched for, whose kernel checks access.

use crate::common::client::{Client, user_link};
use crate::common::*;
use nigh_link::{Claims, Peer, Squash};
use nigh_server::{Exports, Server, ServerOptions};
use nigh_types::*;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_OMIT};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const SOON: Term = Term::Limited(Span::from_secs(5));

fn number(path: impl AsRef<Path>) -> u64 {
    fs::symlink_metadata(path).unwrap().ino()
}

/// The node, and the parent directory and name that lead to it.
type Found = Result<(NodeId, Option<(NodeId, Name)>), Errno>;

fn found(result: Result<Reply, Errno>) -> Found {
    match result {
        Ok(Reply::Found { node, parent_entry: home, .. }) => Ok((node, home)),
        Err(errno) => Err(errno),
        other => panic!("{other:?}"),
    }
}

fn find(x: &Exported, ino: u64) -> Found {
    found(x.call(Call::LookupNumber { ino }))
}

/// Drops unused dentries and inodes of the server's kernel.
fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
}

/// Whether the filesystem under test supports opening inodes by number.
fn finds_numbers(x: &Exported, test: &str) -> bool {
    let finds = needs_root(test) && x.export.session(&x.files).unwrap().supports.lookup_number;
    if !finds {
        println!("SKIPPED: {test} needs a filesystem whose inodes are opened by number");
    }
    finds
}

fn rename(from: &NodeRef, text: &str, to: &NodeRef, new: &str) -> Call {
    Call::Rename {
        from: from.clone(),
        name: name(text),
        to: to.clone(),
        new_name: name(new),
        no_replace: false,
        exchange: false,
        whiteout: false,
        keep: None,
    }
}

fn tree(x: &Exported) {
    fs::create_dir_all(x.path("d/e")).unwrap();
    fs::write(x.path("d/e/f"), "data").unwrap();
    symlink("f", x.path("d/e/link")).unwrap();
    fs::write(x.path("top"), "").unwrap();
}

#[test]
fn inodes_are_found_by_number_after_a_restart_and_wherever_they_were_moved() {
    let x = Exported::new();
    if !finds_numbers(&x, "inodes_are_found_by_number_after_a_restart_and_wherever_they_were_moved") {
        return;
    }
    tree(&x);
    let names = ["d", "d/e", "d/e/f", "d/e/link", "top"];
    let places = names.map(|name| x.place(name));
    let x = x.reopen();
    drop_caches();
    for (name, place) in names.iter().zip(&places) {
        assert_eq!(find(&x, place.node.ino), Ok((place.node, place.path_hint.clone())), "{name}");
        assert!(x.attr(&NodeRef::without_hint(place.node)).is_ok(), "{name}");
    }
    assert_eq!(find(&x, x.root.ino), Ok((x.root, None)));
    assert!(x.call(rename(&places[1], "f", &x.top(), "moved")).is_ok());
    let x = x.reopen();
    drop_caches();
    let f = places[2].node;
    assert_eq!(find(&x, f.ino), Ok((f, Some((x.root, name("moved"))))));
    // By the id from before the restart.
    assert_eq!(x.attr(&places[2]).map(|attr| attr.size), Ok(4));
}

/// A client that knows the inode by its old name would take a directory lease as proof of that name.
#[test]
fn inode_found_by_number_under_another_name_is_covered_by_its_own_grant() {
    let x = Exported::new();
    if !finds_numbers(&x, "inode_found_by_number_under_another_name_is_covered_by_its_own_grant") {
        return;
    }
    tree(&x);
    let (dir, file) = (x.place("d/e"), x.place("d/e/f"));
    let there = x.response(Call::GetAttr { node: file.clone() });
    assert!(there.grants.iter().any(|grant| (grant.node, grant.covers) == (dir.node, LeaseScope::Directory)));
    let x = x.reopen();
    assert!(x.call(rename(&x.place("d/e"), "f", &x.place("d/e"), "moved")).is_ok());
    let x = x.reopen();
    drop_caches();
    let moved = x.response(Call::GetAttr { node: file.clone() });
    assert!(matches!(moved.result, Ok(Reply::Attr(node, _)) if node == file.node), "{moved:?}");
    let granted: Vec<_> = moved.grants.iter().map(|grant| (grant.node, grant.covers)).collect();
    assert_eq!(granted, [(file.node, LeaseScope::Attributes)]);
}

#[test]
fn inode_number_of_removed_or_outside_file_is_estale() {
    let outer = tempfile::tempdir().unwrap();
    let x = Exported::of(tempfile::tempdir_in(outer.path()).unwrap());
    if !finds_numbers(&x, "inode_number_of_removed_or_outside_file_is_estale") {
        return;
    }
    tree(&x);
    fs::write(outer.path().join("secret"), "").unwrap();
    fs::create_dir(outer.path().join("closed")).unwrap();
    let (moved, removed) = (x.place("d/e/f").node, x.place("top").node);
    assert!(find(&x, moved.ino).is_ok() && find(&x, removed.ino).is_ok());
    fs::rename(x.path("d/e/f"), outer.path().join("moved")).unwrap();
    let open = fs::File::open(x.path("top")).unwrap();
    fs::remove_file(x.path("top")).unwrap();
    let outside = ["secret", "closed", "moved", "."].map(|name| number(outer.path().join(name)));
    for _ in 0..2 {
        for ino in outside {
            assert_eq!(find(&x, ino), Err(Errno::STALE));
        }
        assert_eq!(find(&x, removed.ino), Err(Errno::STALE), "it is open, and has no name");
        assert_eq!(x.attr(&NodeRef::without_hint(moved)), Err(Errno::STALE));
        drop_caches();
    }
    drop(open);
    // Unused numbers, the filesystem's reserved inodes, and numbers that the server maps from other filesystems.
    for ino in [0, 1, 2, 8, 11, 1 << 40, 1 << 62, (1 << 63) + 5, (0xffff << 48) + 1, u64::MAX] {
        assert_eq!(find(&x, ino), Err(Errno::STALE), "{ino:x}");
    }
}

#[test]
fn reused_inode_number_resolves_to_the_new_inodes_id() {
    let x = Exported::new();
    if !finds_numbers(&x, "reused_inode_number_resolves_to_the_new_inodes_id") {
        return;
    }
    fs::write(x.path("f"), "").unwrap();
    let old = x.place("f").node;
    let reused = (0..200).any(|_| {
        fs::remove_file(x.path("f")).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
        fs::write(x.path("f"), "").unwrap();
        number(x.path("f")) == old.ino
    });
    if !reused {
        return println!("SKIPPED: this filesystem does not reuse inode numbers soon");
    }
    let (new, _) = find(&x, old.ino).unwrap();
    // The half of the generation that a file handle contains.
    let half = |node: NodeId| node.generation & 0xffff_ffff;
    assert!(half(new) != half(old));
    assert_eq!(x.attr(&NodeRef::without_hint(old)), Err(Errno::STALE));
}

#[test]
fn orphaned_files_are_not_found_by_number() {
    let x = Exported::new();
    if !finds_numbers(&x, "orphaned_files_are_not_found_by_number") {
        return;
    }
    fs::create_dir(x.path(".nigh-orphans")).unwrap();
    fs::write(x.path(".nigh-orphans/kept"), "").unwrap();
    for path in [".nigh-orphans", ".nigh-orphans/kept"] {
        assert_eq!(find(&x, number(x.path(path))), Err(Errno::STALE), "{path}");
    }
}

/// Attack: a user, or a peer with squashed root, asks for an inode that it has no search permission to reach.
#[test]
fn peer_that_is_not_vouched_for_finds_nothing_by_number() {
    if !needs_root("peer_that_is_not_vouched_for_finds_nothing_by_number") {
        return;
    }
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(dir.path().join("closed")).unwrap();
    fs::write(dir.path().join("closed/secret"), "").unwrap();
    fs::write(dir.path().join("open"), "").unwrap();
    fs::set_permissions(dir.path().join("closed"), fs::Permissions::from_mode(0o700)).unwrap();
    let mut exports = Exports::default();
    exports.add(format!("world={}", dir.path().display()).as_ref()).unwrap();
    let server =
        Server::new(ServerOptions { exports, ..ServerOptions::new(state.path().to_owned()) }).unwrap();
    let mut root = Client::connect(&server, dir.path(), SOON);
    if !root.session().supports.lookup_number {
        return println!("SKIPPED: this filesystem does not open inodes by number");
    }
    let numbers = ["", "open", "closed", "closed/secret", ".."].map(|path| number(dir.path().join(path)));
    let ask = |client: &mut Client, ino| found(client.call(Call::LookupNumber { ino }).result);
    assert!(numbers[..4].iter().all(|ino| ask(&mut root, *ino).is_ok()));
    assert_eq!(ask(&mut root, numbers[4]), Err(Errno::STALE));
    let squashed = |claims, squash| {
        let (theirs, ours) = std::os::unix::net::UnixStream::pair().unwrap();
        let (server, peer) = (Arc::clone(&server), Peer::new("test", claims, squash));
        std::thread::spawn(move || server.serve_link(ours.into(), peer));
        theirs
    };
    let links = [
        user_link(&server, 4_000),
        squashed(Claims::Any, Squash::Root),
        squashed(Claims::Any, Squash::All),
        squashed(Claims::Only(Credentials::default()), Squash::None),
    ];
    for link in links {
        let mut client = Client::wanting(link, Path::new("world"), SOON, 0);
        assert!(!client.session().supports.lookup_number);
        for who in [Credentials::default(), Credentials { uid: 4_000, gid: 4_000, ..Credentials::default() }]
        {
            for ino in numbers.into_iter().chain([1 << 40]) {
                let answer = client.call_as(&who, Call::LookupNumber { ino });
                assert_eq!((answer.result, answer.after, answer.grants), (Err(Errno::STALE), vec![], vec![]));
            }
        }
    }
}

/// Attack: only the number of state files of attached directories is bounded, and each file could grow to 8 MiB.
#[test]
fn calls_of_a_peer_that_is_not_vouched_for_write_no_table_of_directories() {
    let x = Exported::new();
    if !finds_numbers(&x, "calls_of_a_peer_that_is_not_vouched_for_write_no_table_of_directories") {
        return;
    }
    tree(&x);
    let is_written = |x: &Exported| {
        x.export.close_idle(Instant::now());
        let states = fs::read_dir(x.state.path()).unwrap();
        states.map(|state| state.unwrap().path().join("parents")).any(|table| table.exists())
    };
    let x = x.of_peer(false);
    let (f, d) = (x.place("d/e/f"), x.place("d"));
    x.list(f.path_hint.as_ref().map(|(e, _)| NodeRef::without_hint(*e)).as_ref().unwrap());
    let (made, _) = x.create(&d, "made", 0o600);
    let call = Call::Link { node: made.clone(), dir: x.top(), name: name("linked") };
    assert!(x.call(call).is_ok());
    assert!(x.call(rename(&d, "made", &x.top(), "moved")).is_ok());
    assert_eq!(find(&x, made.node.ino), Err(Errno::STALE));
    assert!(!is_written(&x));
    let x = x.of_peer(true);
    x.list(&x.place("d/e"));
    assert!(is_written(&x));
}

/// Each call that gives a file a name records where to find it after a restart.
#[test]
fn files_that_got_their_names_by_calls_are_found_by_number_after_a_restart() {
    let x = Exported::new();
    if !finds_numbers(&x, "files_that_got_their_names_by_calls_are_found_by_number_after_a_restart") {
        return;
    }
    tree(&x);
    let d = x.place("d");
    let (created, _) = x.create(&d, "created", 0o600);
    let (linked, _) = x.create(&x.top(), "linked", 0o600);
    let call = Call::Link { node: linked.clone(), dir: d.clone(), name: name("link") };
    assert!(x.call(call).is_ok());
    fs::remove_file(x.path("linked")).unwrap();
    let (moved, _) = x.create(&x.top(), "moved", 0o600);
    assert!(x.call(rename(&x.top(), "moved", &d, "here")).is_ok());
    let x = x.reopen();
    drop_caches();
    for (file, text) in [(created, "created"), (linked, "link"), (moved, "here")] {
        assert_eq!(find(&x, file.node.ino), Ok((file.node, Some((d.node, name(text))))), "{text}");
    }
}

/// Whether a directory was read meanwhile, judged by its access time; `None` if access times are not updated.
fn is_read(dir: &Path, what: impl FnOnce()) -> Option<bool> {
    let told = |what: &mut dyn FnMut()| {
        let (long_ago, omit) =
            (Timespec { tv_sec: 1, tv_nsec: 0 }, Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT });
        let times = Timestamps { last_access: long_ago, last_modification: omit };
        rustix::fs::utimensat(CWD, dir, &times, AtFlags::empty()).unwrap();
        what();
        fs::metadata(dir).unwrap().atime() != 1
    };
    let mut what = Some(what);
    let read = told(&mut || what.take().into_iter().for_each(|what| what()));
    told(&mut || assert!(fs::read_dir(dir).unwrap().count() > 0)).then_some(read)
}

/// Attack: repeated calls for such an inode, in a directory with very many names.
#[test]
fn directory_is_not_read_for_an_inode_that_is_open_or_has_its_only_name_elsewhere() {
    let outer = tempfile::tempdir().unwrap();
    let x = Exported::of(tempfile::tempdir_in(outer.path()).unwrap());
    let test = "directory_is_not_read_for_an_inode_that_is_open_or_has_its_only_name_elsewhere";
    if !finds_numbers(&x, test) {
        return;
    }
    tree(&x);
    ["removed", "moved", "open"].iter().for_each(|text| fs::write(x.path("d/e").join(text), "").unwrap());
    let [removed, moved, open] = ["removed", "moved", "open"].map(|text| x.place(&format!("d/e/{text}")));
    let held = fs::File::open(x.path("d/e/removed")).unwrap();
    fs::remove_file(x.path("d/e/removed")).unwrap();
    fs::rename(x.path("d/e/moved"), outer.path().join("moved")).unwrap();
    assert!(x.call(Call::Open { node: open.clone(), access: READ }).is_ok());
    fs::hard_link(x.path("d/e/open"), outer.path().join("link")).unwrap();
    fs::remove_file(x.path("d/e/open")).unwrap();
    let stale = |node: &NodeRef| assert_eq!(find(&x, node.node.ino), Err(Errno::STALE));
    let read = [
        is_read(&x.path("d/e"), || stale(&removed)),
        is_read(&x.path("d/e"), || stale(&moved)),
        is_read(&x.path("d/e"), || assert!(x.attr(&open).is_ok())),
    ];
    drop(held);
    if read.contains(&None) {
        return println!("SKIPPED: {test} needs a filesystem with access times");
    }
    assert_eq!(read, [Some(false); 3], "removed, moved, open");
}

/// Attack: an id from the time when the user had search permission must not bypass a directory closed since.
#[test]
fn id_of_a_moved_file_is_not_reached_by_number_for_a_peer_that_is_not_vouched_for() {
    let x = Exported::vouched(false);
    if !needs_root("id_of_a_moved_file_is_not_reached_by_number_for_a_peer_that_is_not_vouched_for") {
        return;
    }
    fs::write(x.path("f"), "").unwrap();
    fs::create_dir(x.path("closed")).unwrap();
    fs::set_permissions(x.path("closed"), fs::Permissions::from_mode(0o700)).unwrap();
    let f = x.place("f");
    fs::rename(x.path("f"), x.path("closed/f")).unwrap();
    assert_eq!(x.attr(&f), Err(Errno::STALE));
}

/// Runs where the tests' directory (`TMPDIR`) is on btrfs.
#[test]
fn inodes_of_inner_subvolumes_are_found_by_number() {
    let x = Exported::new();
    if !finds_numbers(&x, "inodes_of_inner_subvolumes_are_found_by_number") {
        return;
    }
    let made = std::process::Command::new("btrfs").args(["subvolume", "create"]).arg(x.path("sub")).output();
    if !made.is_ok_and(|made| made.status.success()) {
        return println!("SKIPPED: subvolumes are of btrfs alone");
    }
    fs::write(x.path("sub/f"), "").unwrap();
    let places = ["sub", "sub/f"].map(|path| x.place(path));
    let x = x.reopen();
    drop_caches();
    for place in places {
        assert_eq!(find(&x, place.node.ino), Ok((place.node, place.path_hint)));
    }
}
