//! Node references: hints that lead elsewhere, deleted nodes, path resolution.

use super::Named;
use super::caller::{Caller, at, create, name, rename, unlink};
use nigh_types::{Attr, Call, Errno, Name, NodeRef, Reply};

pub(super) const CASES: &[Named] = &[
    ("a_moved_file_is_found_or_walked_to", moved_file),
    ("a_moved_directory_is_found_or_walked_to", moved_directory),
    ("a_hint_to_another_inode_never_answers_for_it", wrong_hint),
    ("a_node_that_is_gone_is_estale", gone),
    ("a_walk_that_leads_elsewhere_is_estale", bad_walk),
    ("the_root_is_reached_without_a_hint", root),
    ("an_inode_is_found_by_its_number_while_it_is_there", by_number),
];

/// Attributes of a node by a reference that may be stale; sends its path once if the remote needs it.
#[track_caller]
fn mended(c: &mut Caller<'_>, stale: &NodeRef, path: &[&[u8]], fresh: &NodeRef) -> Attr {
    match c.call(Call::GetAttr { node: stale.clone() }).result {
        Ok(Reply::Attr(id, attr)) => {
            assert_eq!(id, stale.node);
            attr
        }
        Err(Errno::STALE) => {
            let names: Vec<Name> = path.iter().map(|leaf| name(leaf)).collect();
            assert_eq!(c.ok(Call::ResolvePath { node: stale.node, names }), Reply::Done);
            c.getattr(fresh)
        }
        other => panic!("neither found nor stale: {other:?}"),
    }
}

fn moved_file(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    let old = c.file(&root, b"a", b"12345");
    c.ok(rename(&root, b"a", &dir, b"b"));
    let new = at(&dir, b"b", old.node);
    assert_eq!(mended(c, &old, &[b"d", b"b"], &new).size, 5);
}

fn moved_directory(c: &mut Caller<'_>) {
    let root = c.root();
    let (dir, other) = (c.mkdir(&root, b"d"), c.mkdir(&root, b"e"));
    let file = c.file(&dir, b"f", b"12345");
    c.ok(rename(&root, b"d", &other, b"moved"));
    assert_eq!(mended(c, &file, &[b"e", b"moved", b"f"], &file).size, 5);
    let moved = at(&other, b"moved", dir.node);
    assert!(mended(c, &dir, &[b"e", b"moved"], &moved).is_dir());
    assert_eq!(c.names(&moved), [name(b"f")]);
}

fn wrong_hint(c: &mut Caller<'_>) {
    let root = c.root();
    let (a, b) = (c.file(&root, b"a", b"1"), c.file(&root, b"b", b"22"));
    let wrong = at(&root, b"b", a.node);
    assert_eq!(mended(c, &wrong, &[b"a"], &a).size, 1);
    c.ok(unlink(&root, b"a"));
    assert_eq!(c.errno(Call::GetAttr { node: wrong }), Errno::STALE);
    assert_eq!(c.getattr(&b).size, 2);
}

fn gone(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    let file = c.file(&dir, b"f", b"");
    c.ok(unlink(&dir, b"f"));
    let again = c.file(&dir, b"f", b"new");
    assert_ne!(again.node, file.node);
    assert_eq!(c.errno(Call::GetAttr { node: file.clone() }), Errno::STALE);
    assert_eq!(c.errno(Call::Open { node: file, access: super::caller::READ_WRITE }), Errno::STALE);
    c.ok(unlink(&dir, b"f"));
    c.ok(Call::Rmdir { dir: root, name: name(b"d") });
    assert_eq!(c.errno(Call::List { dir: dir.clone() }), Errno::STALE);
    assert_eq!(c.errno(Call::Lookup { dir: dir.clone(), name: name(b"x") }), Errno::STALE);
    assert_eq!(c.errno(create(&dir, b"x", true)), Errno::STALE);
}

fn bad_walk(c: &mut Caller<'_>) {
    let root = c.root();
    let (a, _) = (c.file(&root, b"a", b""), c.file(&root, b"b", b""));
    for names in [vec![name(b"b")], vec![name(b"missing")], vec![name(b"a"), name(b"x")], vec![]] {
        assert_eq!(c.errno(Call::ResolvePath { node: a.node, names }), Errno::STALE);
    }
    assert_eq!(c.ok(Call::ResolvePath { node: a.node, names: vec![name(b"a")] }), Reply::Done);
    let names = vec![];
    assert_eq!(c.ok(Call::ResolvePath { node: root.node, names }), Reply::Done);
}

fn root(c: &mut Caller<'_>) {
    let root = c.root();
    let attr = c.getattr(&root);
    assert!(attr.is_dir());
    assert_eq!(attr.mode, c.session.root_attr.mode);
}

fn by_number(c: &mut Caller<'_>) {
    if !c.session.supports.lookup_number {
        return;
    }
    let found = |c: &mut Caller<'_>, ino| match c.call(Call::LookupNumber { ino }).result {
        Ok(Reply::Found { node, parent_entry: home, .. }) => Ok((node, home)),
        Err(errno) => Err(errno),
        other => panic!("neither found nor an error: {other:?}"),
    };
    let root = c.root();
    assert_eq!(found(c, root.node.ino), Ok((root.node, None)));
    let dir = c.mkdir(&root, b"d");
    let file = c.file(&dir, b"f", b"12345");
    assert_eq!(found(c, dir.node.ino), Ok((dir.node, Some((root.node, name(b"d"))))));
    assert_eq!(found(c, file.node.ino), Ok((file.node, Some((dir.node, name(b"f"))))));
    c.ok(rename(&dir, b"f", &root, b"g"));
    assert_eq!(found(c, file.node.ino), Ok((file.node, Some((root.node, name(b"g"))))));
    c.ok(unlink(&root, b"g"));
    c.ok(Call::Rmdir { dir: root, name: name(b"d") });
    for gone in [file.node, dir.node] {
        assert_ne!(found(c, gone.ino).map(|(node, _)| node), Ok(gone));
    }
    assert_eq!(found(c, 0), Err(Errno::STALE));
    assert_eq!(found(c, u64::MAX), Err(Errno::STALE));
}
