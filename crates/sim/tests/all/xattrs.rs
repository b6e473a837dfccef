//! Extended attributes: either all or none of an inode's xattrs are cached, for as long as its attributes.

use nigh_cache::{NotifyLevel, Op, OpReply};
use nigh_remote::fake::{CallFilter, CallPlan};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{Call, Cookie, Errno, LeaseScope, Name, NodeId, NodeRef, SetAttr, Span, Term};

const NODATA: OpReply = OpReply::Failed(Errno::NODATA);

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn xattr(ino: u64, name: &str, size: u32) -> Op {
    Op::GetXattr { ino, name: name.as_bytes().to_vec(), size }
}

fn set(ino: u64, name: &str, value: &[u8]) -> Op {
    Op::SetXattr { ino, name: name.as_bytes().to_vec(), value: value.to_vec(), flags: 0, kill_sgid: false }
}

/// A client that has looked up `f`, which has one xattr.
fn world(config: ModelFsConfig) -> (World, NodeId) {
    let mut world = World::new(config);
    let now = world.now;
    let file = world.server.edit(|tree| tree.plant_file(now, "f", b"x"));
    beside(&world, file, "user.one", b"first");
    world.connect(NotifyLevel::All);
    world.request(0, Op::Lookup { dir: 1, name: name("f") });
    (world, file)
}

/// Sets an xattr on the host, without the server.
fn beside(world: &World, node: NodeId, name: &str, value: &[u8]) {
    let (node, name, value) = (NodeRef::without_hint(node), name.as_bytes().to_vec(), value.to_vec());
    let call = Call::SetXattr { node, name, value, flags: 0, kill_sgid: false };
    world.server.edit(|tree| tree.execute_as_host(world.now, call)).unwrap();
}

fn calls(world: &World) -> (u64, u64) {
    let control = &world.clients[0].control;
    (control.calls("xattrs"), control.calls("xattr"))
}

#[test]
fn one_call_answers_for_present_and_absent_xattrs() {
    let (mut world, file) = world(ModelFsConfig::default());
    for _ in 0..3 {
        assert_eq!(world.request(0, xattr(file.ino, "user.one", 0)), OpReply::Size(5));
        assert_eq!(world.request(0, xattr(file.ino, "user.one", 4)), OpReply::Failed(Errno::RANGE));
        assert_eq!(world.request(0, xattr(file.ino, "user.one", 5)), OpReply::Value(b"first".to_vec()));
        assert_eq!(world.request(0, xattr(file.ino, "user.none", 0)), NODATA);
        assert_eq!(world.request(0, Op::ListXattr { ino: file.ino, size: 0 }), OpReply::Size(9));
        let short = world.request(0, Op::ListXattr { ino: file.ino, size: 8 });
        assert_eq!(short, OpReply::Failed(Errno::RANGE));
        let names = world.request(0, Op::ListXattr { ino: file.ino, size: 9 });
        assert_eq!(names, OpReply::Value(b"user.one\0".to_vec()));
    }
    assert_eq!(calls(&world), (1, 0));
}

#[test]
fn attribute_that_is_absent_in_a_namespace_without_handler_is_not_supported() {
    let (mut world, file) = world(ModelFsConfig::default());
    let now = world.now;
    let plain = world.server.edit(|tree| tree.plant_file(now, "plain", b""));
    world.request(0, Op::Lookup { dir: 1, name: name("plain") });
    for node in [file, plain] {
        for _ in 0..2 {
            for unhandled in ["foo.bar", "user", "user.", "system.other", "x"] {
                let answer = world.request(0, xattr(node.ino, unhandled, 0));
                assert_eq!(answer, OpReply::Failed(Errno::OPNOTSUPP), "{unhandled}");
            }
            for handled in ["user.none", "trusted.none", "security.none"] {
                assert_eq!(world.request(0, xattr(node.ino, handled, 0)), NODATA, "{handled}");
            }
        }
    }
    assert_eq!(calls(&world), (1, 0));
}

#[test]
fn xattrs_of_inode_that_lookup_reported_without_xattrs_are_not_fetched() {
    let (mut world, _) = world(ModelFsConfig::default());
    let now = world.now;
    let plain = world.server.edit(|tree| tree.plant_file(now, "plain", b""));
    let dir = world.server.edit(|tree| tree.plant_dir(now, "dir"));
    for (leaf, node) in [("plain", plain), ("dir", dir)] {
        world.request(0, Op::Lookup { dir: 1, name: name(leaf) });
        assert_eq!(world.request(0, xattr(node.ino, "user.one", 0)), NODATA);
        assert_eq!(world.request(0, Op::ListXattr { ino: node.ino, size: 0 }), OpReply::Size(0));
    }
    assert_eq!(calls(&world), (0, 0));
}

#[test]
fn unsupported_xattr_names_fail_without_request() {
    let (mut world, file) = world(ModelFsConfig::default());
    for never in ["security.selinux", "system.posix_acl_access", "system.posix_acl_default"] {
        assert_eq!(world.request(0, xattr(file.ino, never, 0)), OpReply::Failed(Errno::OPNOTSUPP));
    }
    assert_eq!(calls(&world), (0, 0));
}

#[test]
fn large_xattr_value_is_fetched_each_time_by_call_of_its_own() {
    let (mut world, file) = world(ModelFsConfig::default());
    let large = vec![b'v'; 5_000];
    beside(&world, file, "user.large", &large);
    for round in 1..=3 {
        assert_eq!(world.request(0, xattr(file.ino, "user.large", 5_000)), OpReply::Value(large.clone()));
        assert_eq!(calls(&world), (1, round));
    }
    assert_eq!(world.request(0, xattr(file.ino, "user.one", 0)), OpReply::Size(5));
    assert_eq!(calls(&world), (1, 3));
    let refuse = CallPlan { refuse: Some(Errno::IO), ..CallPlan::default() };
    world.clients[0].control.plan(CallFilter::Type("xattr"), refuse);
    assert_eq!(world.request(0, xattr(file.ino, "user.large", 0)), OpReply::Failed(Errno::IO));
}

#[test]
fn xattr_changes_of_this_and_other_clients_are_seen() {
    let (mut world, file) = world(ModelFsConfig::default());
    world.connect(NotifyLevel::All);
    world.request(1, Op::Lookup { dir: 1, name: name("f") });
    for (at, value) in [(0, "own"), (1, "another"), (0, "own again"), (1, "")] {
        world.request(at, set(file.ino, "user.one", value.as_bytes()));
        for reader in [0, 1] {
            let got = world.request(reader, xattr(file.ino, "user.one", 100));
            assert_eq!(got, OpReply::Value(value.as_bytes().to_vec()));
        }
    }
    world.request(1, Op::RemoveXattr { ino: file.ino, name: b"user.one".to_vec() });
    for reader in [0, 1] {
        assert_eq!(world.request(reader, xattr(file.ino, "user.one", 0)), NODATA);
    }
    let gone = world.request(0, Op::RemoveXattr { ino: file.ino, name: b"user.one".to_vec() });
    assert_eq!(gone, NODATA);
}

/// A directory's entry in its parent stays cached when the directory's own grant is recalled.
#[test]
fn xattr_set_by_another_client_on_directory_without_xattrs_is_seen() {
    let (mut world, _) = world(ModelFsConfig::default());
    let now = world.now;
    let dir = world.server.edit(|tree| tree.plant_dir(now, "dir"));
    world.connect(NotifyLevel::All);
    for at in [0, 1] {
        world.request(at, Op::Lookup { dir: 1, name: name("dir") });
        assert_eq!(world.request(at, xattr(dir.ino, "user.one", 0)), NODATA);
    }
    world.request(1, set(dir.ino, "user.one", b"new"));
    world.request(0, Op::GetAttr { ino: dir.ino });
    assert_eq!(world.request(0, xattr(dir.ino, "user.one", 9)), OpReply::Value(b"new".to_vec()));
}

/// Each name of an inode has a cached entry; one of them holds its facts.
#[test]
fn xattrs_of_inode_with_two_names_are_cached_under_both() {
    let (mut world, _) = world(ModelFsConfig::default());
    let now = world.now;
    let file = world.server.edit(|tree| tree.plant_file(now, "a", b""));
    world.request(0, Op::Lookup { dir: 1, name: name("a") });
    world.request(0, Op::Link { ino: file.ino, dir: 1, name: name("b") });
    world.request(0, set(file.ino, "user.one", b"new"));
    for leaf in ["a", "b"] {
        world.request(0, Op::Lookup { dir: 1, name: name(leaf) });
        let got = world.request(0, xattr(file.ino, "user.one", 9));
        assert_eq!(got, OpReply::Value(b"new".to_vec()), "by {leaf}");
    }
}

/// An entry's facts about a file that had another name then are not kept coherent.
#[test]
fn xattr_set_after_known_name_of_file_without_xattrs_is_lost_is_seen() {
    let (mut world, _) = world(ModelFsConfig::default());
    let now = world.now;
    let file = world.server.edit(|tree| tree.plant_file(now, "a", b""));
    world.request(0, Op::Lookup { dir: 1, name: name("a") });
    world.request(0, Op::Link { ino: file.ino, dir: 1, name: name("b") });
    for leaf in ["b", "a"] {
        world.request(0, Op::Lookup { dir: 1, name: name(leaf) });
        assert_eq!(world.request(0, xattr(file.ino, "user.one", 0)), NODATA);
    }
    world.request(0, Op::Unlink { dir: 1, name: name("a") });
    world.request(0, set(file.ino, "user.one", b"new"));
    world.request(0, Op::Lookup { dir: 1, name: name("b") });
    let set = SetAttr { size: Some(7), ..SetAttr::default() };
    world.request(0, Op::SetAttr { ino: file.ino, fh: None, set });
    assert_eq!(world.request(0, xattr(file.ino, "user.one", 9)), OpReply::Value(b"new".to_vec()));
}

/// While a file has two names, a change of its xattrs updates neither cached entry, and a rename moves its entry
/// along.
#[test]
fn xattr_set_after_first_name_is_unlinked_is_read_after_rename_of_second() {
    let (mut world, _) = world(ModelFsConfig::default());
    let now = world.now;
    let file = world.server.edit(|tree| {
        let file = tree.plant_file(now, "a", b"");
        let (node, dir) = (NodeRef::without_hint(file), NodeRef::without_hint(tree.root()));
        tree.execute_as_host(now, Call::Link { node, dir, name: name("b") }).unwrap();
        file
    });
    let OpReply::Opened(opened) = world.request(0, Op::OpenDir { ino: 1 }) else { panic!("not opened") };
    let offset = Cookie(0);
    world.request(0, Op::ReadDir { ino: 1, fh: opened.fh, offset, size: 4_096, plus: false });
    world.request(0, Op::Lookup { dir: 1, name: name("a") });
    world.request(0, Op::Unlink { dir: 1, name: name("a") });
    world.request(0, set(file.ino, "user.one", b"new"));
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    world.request(0, Op::SetAttr { ino: file.ino, fh: None, set: mode });
    world.request(0, Op::Lookup { dir: 1, name: name("b") });
    world.request(0, Op::rename((1, name("b")), (1, name("c"))));
    assert_eq!(world.request(0, xattr(file.ino, "user.one", 9)), OpReply::Value(b"new".to_vec()));
}

#[test]
fn recall_or_deadline_discards_cached_xattrs() {
    let (mut world, file) = world(ModelFsConfig::default());
    world.request(0, xattr(file.ino, "user.one", 0));
    let root = world.server.edit(|tree| tree.root());
    world.clients[0].control.recall(root, LeaseScope::Directory, &[]);
    world.settle();
    beside(&world, file, "user.one", b"second");
    world.request(0, Op::GetAttr { ino: file.ino });
    assert_eq!(world.request(0, xattr(file.ino, "user.one", 9)), OpReply::Value(b"second".to_vec()));
    assert_eq!(calls(&world), (2, 0));

    let (mut world, file) =
        self::world(ModelFsConfig { term: Term::Limited(Span::from_secs(5)), ..ModelFsConfig::default() });
    world.request(0, xattr(file.ino, "user.one", 0));
    beside(&world, file, "user.one", b"second");
    world.advance(Span::from_millis(4_999));
    assert_eq!(world.request(0, xattr(file.ino, "user.one", 0)), OpReply::Size(5));
    world.advance(Span::from_millis(1));
    assert_eq!(world.request(0, xattr(file.ino, "user.one", 0)), OpReply::Size(6));
}

/// A file is moved into a directory that is recalled meanwhile: nothing is granted on it afterwards.
#[test]
fn cached_xattrs_are_discarded_when_file_moves_to_recalled_directory() {
    let (mut world, _) = world(ModelFsConfig::default());
    let now = world.now;
    let file = world.server.edit(|tree| tree.plant_file(now, "d/f", b"x"));
    let (d, e) = world.server.edit(|tree| {
        let e = tree.plant_dir(now, "e").ino;
        (tree.find("d").unwrap().ino, e)
    });
    beside(&world, file, "user.one", b"first");
    world.connect(NotifyLevel::All);
    for (dir, leaf) in [(1, "d"), (1, "e"), (d, "f"), (e, "none")] {
        world.request(0, Op::Lookup { dir, name: name(leaf) });
    }
    assert_eq!(world.request(0, xattr(file.ino, "user.one", 9)), OpReply::Value(b"first".to_vec()));
    let control = world.clients[0].control.clone();
    control.plan(CallFilter::Type("rename"), CallPlan { hold_reply: true, ..CallPlan::default() });
    let (from, to, leaf) = (d, e, name("f"));
    let (new_name, no_replace, exchange) = (leaf.clone(), false, false);
    let moved = world.send_request(
        0,
        Op::Rename { from, name: leaf, to, new_name, no_replace, exchange, whiteout: false },
    );
    world.request(1, Op::Lookup { dir: 1, name: name("e") });
    world.request(1, Op::Mkdir { dir: e, name: name("g"), mode: 0o755, umask: 0 });
    control.plan_nothing();
    control.release(control.held()[0]);
    world.settle();
    assert!(!world.is_pending(0, moved));
    world.request(1, Op::Lookup { dir: e, name: name("f") });
    world.request(1, set(file.ino, "user.one", b"second"));
    assert_eq!(world.request(0, xattr(file.ino, "user.one", 9)), OpReply::Value(b"second".to_vec()));
}

#[test]
fn xattr_request_joins_call_in_flight_unless_reply_may_be_older() {
    let (mut world, file) = world(ModelFsConfig::default());
    let control = world.clients[0].control.clone();
    control.plan(CallFilter::Type("xattrs"), CallPlan { hold_reply: true, ..CallPlan::default() });
    beside(&world, file, "user.large", &[b'v'; 5_000]);
    let first = world.send_request(0, xattr(file.ino, "user.one", 9));
    let joined = world.send_request(0, Op::ListXattr { ino: file.ino, size: 99 });
    let large = world.send_request(0, xattr(file.ino, "user.large", 0));
    assert_eq!(calls(&world), (1, 0));
    // The reply of a local change comes before.
    world.request(0, set(file.ino, "user.one", b"new"));
    let later = world.send_request(0, xattr(file.ino, "user.one", 9));
    assert_eq!(calls(&world), (2, 0));
    world.replies.clear();
    control.plan_nothing();
    for call in control.held() {
        control.release(call);
    }
    world.settle();
    let heard = |op| world.replies.iter().find(|(_, id, ..)| *id == op).map(|(.., answer)| answer.clone());
    assert_eq!(heard(first), Some(OpReply::Value(b"first".to_vec())));
    assert_eq!(heard(joined), Some(OpReply::Value(b"user.large\0user.one\0".to_vec())));
    assert_eq!(heard(large), Some(OpReply::Size(5_000)));
    assert_eq!(heard(later), Some(OpReply::Value(b"new".to_vec())));
    assert_eq!(world.request(0, xattr(file.ino, "user.one", 0)), OpReply::Size(3));
}

#[test]
fn xattr_error_is_passed_on_and_not_cached() {
    let (mut world, file) = world(ModelFsConfig::default());
    let control = world.clients[0].control.clone();
    control.plan(CallFilter::Type("xattrs"), CallPlan { refuse: Some(Errno::IO), ..CallPlan::default() });
    for ask in [xattr(file.ino, "user.one", 0), Op::ListXattr { ino: file.ino, size: 0 }] {
        assert_eq!(world.request(0, ask), OpReply::Failed(Errno::IO));
    }
    control.plan_nothing();
    assert_eq!(world.request(0, xattr(file.ino, "user.one", 0)), OpReply::Size(5));
    assert_eq!(world.request(0, xattr(77, "user.one", 0)), OpReply::Failed(Errno::STALE));
    assert_eq!(world.request(0, Op::ListXattr { ino: 77, size: 0 }), OpReply::Failed(Errno::STALE));
}

#[test]
fn name_that_is_never_read_is_neither_listed_nor_set() {
    let (mut world, file) = world(ModelFsConfig::default());
    for hidden in ["security.selinux", "system.posix_acl_access", "system.posix_acl_default"] {
        beside(&world, file, hidden, b"1");
        let refused = OpReply::Failed(Errno::OPNOTSUPP);
        assert_eq!(world.request(0, xattr(file.ino, hidden, 9)), refused, "{hidden}");
        assert_eq!(world.request(0, set(file.ino, hidden, b"2")), refused, "{hidden}");
        let remove = Op::RemoveXattr { ino: file.ino, name: hidden.as_bytes().to_vec() };
        assert_eq!(world.request(0, remove), refused, "{hidden}");
    }
    let names = world.request(0, Op::ListXattr { ino: file.ino, size: 99 });
    assert_eq!(names, OpReply::Value(b"user.one\0".to_vec()));
}

#[test]
fn trusted_xattr_names_are_marked_for_privileged_callers() {
    let (mut world, file) = world(ModelFsConfig::default());
    beside(&world, file, "trusted.secret", b"1");
    for _ in 0..2 {
        let names = world.request(0, Op::ListXattr { ino: file.ino, size: 0 });
        let OpReply::XattrNames { names, size: 0 } = names else { panic!("{names:?}") };
        assert_eq!(names.split(|&byte| byte == 0).filter(|name| !name.is_empty()).count(), 2);
    }
    assert_eq!(calls(&world), (1, 0));
}
