//! Properties of the tree beyond the conformance suite.

use super::*;
use nigh_types::{Access, Credentials, SetAttr, WriteFlags};

const T0: Time = Time(5_000_000_000);

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn execute(tree: &mut ModelFs, call: Call) -> Response {
    let request = Request {
        credentials: Credentials { uid: 3, gid: 4, groups: vec![], privileges: None },
        mutation_id: None,
        call,
    };
    tree.execute(T0, &request).remove(0)
}

fn facts(response: &Response) -> Vec<(NodeId, LeaseScope)> {
    response.grants.iter().map(|grant| (grant.node, grant.covers)).collect()
}

#[test]
fn tree_replies_carry_grants_of_the_documented_scopes() {
    let mut tree = ModelFs::default();
    let (root, dir) = (tree.root(), tree.plant_dir(T0, "d"));
    let file = tree.plant_file(T0, "d/f", b"x");
    let in_dir = NodeRef { node: file, path_hint: Some((dir, name("f"))) };
    let lookup = |dir, leaf| Call::Lookup { dir: NodeRef::without_hint(dir), name: name(leaf) };
    let found = execute(&mut tree, lookup(root, "d"));
    assert_eq!(facts(&found), [(root, LeaseScope::Directory), (dir, LeaseScope::Attributes)]);
    assert_eq!(facts(&execute(&mut tree, lookup(dir, "f"))), [(dir, LeaseScope::Directory)]);
    assert_eq!(facts(&execute(&mut tree, lookup(dir, "none"))), [(dir, LeaseScope::Directory)]);
    let getattr = Call::GetAttr { node: in_dir.clone() };
    assert_eq!(facts(&execute(&mut tree, getattr.clone())), [(dir, LeaseScope::Directory)]);
    let link = Call::Link { node: in_dir.clone(), dir: NodeRef::without_hint(root), name: name("g") };
    assert_eq!(
        facts(&execute(&mut tree, link)),
        [(root, LeaseScope::Directory), (file, LeaseScope::Attributes)]
    );
    assert_eq!(facts(&execute(&mut tree, getattr)), [(file, LeaseScope::Attributes)]);
    let access =
        Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
    let opened = execute(&mut tree, Call::Open { node: in_dir, access });
    assert_eq!(facts(&opened), [(file, LeaseScope::Data), (file, LeaseScope::Attributes)]);
    let listed = execute(&mut tree, Call::List { dir: NodeRef::without_hint(root) });
    let mut granted = facts(&listed);
    assert_eq!(granted.remove(0), (root, LeaseScope::Directory));
    granted.sort();
    assert_eq!(
        granted,
        [(root, LeaseScope::Attributes), (dir, LeaseScope::Attributes), (file, LeaseScope::Attributes)]
    );
    let ids: BTreeSet<GrantId> = listed.grants.iter().map(|grant| grant.id).collect();
    assert_eq!(ids.len(), listed.grants.len());
}

/// `affected` covers every fact that the call then changes.
#[test]
fn affected_facts_include_every_fact_that_the_call_changes() {
    let mut tree = ModelFs::default();
    let root = tree.root();
    let (dir, file) = (tree.plant_dir(T0, "d"), tree.plant_file(T0, "f", b"x"));
    let place = NodeRef { node: file, path_hint: Some((root, name("f"))) };
    let link = Call::Link { node: place.clone(), dir: NodeRef::without_hint(dir), name: name("g") };
    let said = tree.affected(&link);
    let change = |node, covers, names: &[&str]| {
        let names = names.iter().map(|leaf| name(leaf)).collect();
        Change { node, covers, names }
    };
    let expected = [
        change(dir, LeaseScope::Directory, &["g"]),
        change(dir, LeaseScope::Attributes, &[]),
        change(file, LeaseScope::Attributes, &[]),
        change(root, LeaseScope::Directory, &["f"]),
    ];
    assert_eq!(said, expected);
    execute(&mut tree, link);
    let write = Call::Write {
        node: place,
        handle: None,
        offset: 0,
        data: b"y".to_vec(),
        flags: WriteFlags::default(),
    };
    let expected = [
        change(file, LeaseScope::Attributes, &[]),
        change(root, LeaseScope::Directory, &["f"]),
        change(dir, LeaseScope::Directory, &["g"]),
        change(file, LeaseScope::Data, &[]),
    ];
    assert_eq!(tree.affected(&write), expected);
    assert_eq!(tree.affected(&Call::GetAttr { node: NodeRef::without_hint(file) }), []);
}

#[test]
fn inode_numbers_are_reused_only_if_configured_and_with_a_new_generation() {
    for reuse_inos in [false, true] {
        let mut tree = ModelFs::new(ModelFsConfig { reuse_inos, ..ModelFsConfig::default() });
        let first = tree.plant_file(T0, "a", b"");
        let unlink = Call::Unlink { dir: NodeRef::without_hint(tree.root()), name: name("a"), keep: None };
        assert!(tree.execute_as_host(T0, unlink).is_ok());
        let second = tree.plant_file(T0, "b", b"");
        assert_eq!(first.ino == second.ino, reuse_inos);
        assert_ne!(first.generation, second.generation);
        assert_eq!((tree.attr(first), tree.find("a")), (None, None));
        let stale = NodeRef { node: first, path_hint: Some((tree.root(), name("b"))) };
        assert_eq!(execute(&mut tree, Call::GetAttr { node: stale }).result, Err(Errno::STALE));
        assert_eq!(tree.find("b"), Some(second));
    }
}

#[test]
fn new_inode_gets_owner_of_its_creator_and_setgid_of_its_parent() {
    let mut tree = ModelFs::default();
    let dir = tree.plant_dir(T0, "d");
    let set = SetAttr { mode: Some(0o2775), gid: Some(9), ..SetAttr::default() };
    execute(&mut tree, Call::SetAttr { node: NodeRef::without_hint(dir), handle: None, set });
    let mkdir = Call::Mkdir { dir: NodeRef::without_hint(dir), name: name("e"), mode: 0o777, umask: 0o77 };
    let Ok(Reply::Created { entry, .. }) = execute(&mut tree, mkdir).result else { panic!("not made") };
    assert_eq!((entry.attr.uid, entry.attr.gid, entry.attr.mode), (3, 9, 0o042_700));
    assert_eq!(entry.attr.mtime, Timestamp { secs: 1_700_000_005, nanos: 0 });
    assert_eq!(tree.attr(dir).map(|attr| attr.nlink), Some(3));
}

#[test]
fn writers_lose_setuid_as_on_linux() {
    let mut tree = ModelFs::default();
    let file = NodeRef::without_hint(tree.plant_file(T0, "f", b"x"));
    let flags = WriteFlags { kill_suidgid: true, ..WriteFlags::default() };
    for (mode, left) in [(0o6755, 0o755), (0o6745, 0o2745)] {
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        execute(&mut tree, Call::SetAttr { node: file.clone(), handle: None, set });
        let (node, data) = (file.clone(), b"y".to_vec());
        execute(&mut tree, Call::Write { node, handle: None, offset: 0, data, flags });
        assert_eq!(tree.attr(file.node).map(|attr| attr.mode), Some(0o100_000 | left));
    }
}

#[test]
fn stale_hint_is_repaired_by_sending_the_path() {
    let mut tree = ModelFs::new(ModelFsConfig { by_hint_only: true, ..ModelFsConfig::default() });
    let (root, file) = (tree.root(), tree.plant_file(T0, "a", b"x"));
    let hinted = |leaf| NodeRef { node: file, path_hint: Some((root, name(leaf))) };
    let getattr = |tree: &mut ModelFs, node| execute(tree, Call::GetAttr { node }).result.map(|_| ());
    assert_eq!(getattr(&mut tree, hinted("a")), Ok(()));
    for place in [hinted("b"), NodeRef::without_hint(file)] {
        assert_eq!(getattr(&mut tree, place), Err(Errno::STALE));
    }
    let walk = |leaf| Call::ResolvePath { node: file, names: vec![name(leaf)] };
    assert_eq!(execute(&mut tree, walk("b")).result, Err(Errno::STALE));
    assert_eq!(execute(&mut tree, walk("a")).result, Ok(Reply::Done));
    assert_eq!(getattr(&mut tree, NodeRef::without_hint(file)), Ok(()));
}
