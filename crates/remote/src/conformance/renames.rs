//! Renames.

use super::Named;
use super::caller::{Caller, at, name, rename};
use nigh_types::{Call, Errno, Kind, NodeId, NodeRef, Reply};

pub(super) const CASES: &[Named] = &[
    ("rename_moves_and_keeps_the_inode", moves),
    ("rename_replaces_a_file", replaces),
    ("rename_keeps_what_it_replaces_on_request", keeps_replaced),
    ("rename_keeps_nothing_but_files", keeps_only_files),
    ("rename_replaces_only_empty_directories", directories),
    ("rename_checks_types", types),
    ("rename_never_makes_a_loop", no_loop),
    ("rename_between_links_of_one_file_does_nothing", same_inode),
    ("rename_noreplace", no_replace),
    ("rename_exchange", exchange),
    ("rename_whiteout", whiteout),
];

fn with(call: Call, want_no_replace: bool, want_exchange: bool, want_keep: Option<NodeId>) -> Call {
    match call {
        Call::Rename { from, name, to, new_name, .. } => Call::Rename {
            from,
            name,
            to,
            new_name,
            no_replace: want_no_replace,
            exchange: want_exchange,
            whiteout: false,
            keep: want_keep,
        },
        other => other,
    }
}

fn renamed(moved: &NodeRef, replaced: Option<&NodeRef>) -> Reply {
    Reply::Renamed {
        moved: moved.node,
        replaced: replaced.map(|place| place.node),
        pinned: None,
        whiteout: None,
    }
}

fn moves(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    let file = c.file(&root, b"a", b"data");
    assert_eq!(c.ok(rename(&root, b"a", &dir, b"b")), renamed(&file, None));
    assert_eq!(c.lookup(&root, b"a"), None);
    assert_eq!(c.lookup(&dir, b"b").map(|entry| entry.id), Some(file.node));
    assert_eq!(c.read(&at(&dir, b"b", file.node), None, 0, 10), b"data");
    assert_eq!(c.errno(rename(&root, b"a", &dir, b"c")), Errno::NOENT);
    assert_eq!(c.ok(rename(&root, b"d", &root, b"e")), renamed(&dir, None));
    let dir = at(&root, b"e", dir.node);
    assert_eq!(c.names(&dir), [name(b"b")]);
}

fn replaces(c: &mut Caller<'_>) {
    let root = c.root();
    let (a, b) = (c.file(&root, b"a", b"new"), c.file(&root, b"b", b"old"));
    let response = c.call(rename(&root, b"a", &root, b"b"));
    assert_eq!(response.result, Ok(renamed(&a, Some(&b))));
    let gone = response.after.iter().find(|(id, _)| *id == b.node).expect("what is gone is told");
    assert_eq!(gone.1.nlink, 0);
    assert_eq!(c.names(&root), [name(b"b")]);
    assert_eq!(c.read(&at(&root, b"b", a.node), None, 0, 10), b"new");
    // A reference that was resolved just before the rename may still lead to the old file.
    match c.call(Call::GetAttr { node: b.clone() }).result {
        Ok(Reply::Attr(node, attr)) => assert_eq!((node, attr.nlink), (b.node, 0)),
        other => assert_eq!(other, Err(Errno::STALE)),
    }
}

fn keeps_replaced(c: &mut Caller<'_>) {
    let root = c.root();
    let (_, b) = (c.file(&root, b"a", b"new"), c.file(&root, b"b", b"old"));
    let call = with(rename(&root, b"a", &root, b"b"), false, false, Some(b.node));
    let Reply::Renamed { pinned: Some(handle), .. } = c.ok(call) else { panic!("not kept") };
    assert_eq!(c.read(&b, Some(handle), 0, 10), b"old");
}

/// A client may ask for a pin of an inode that reuses the number of a file that it had open.
fn keeps_only_files(c: &mut Caller<'_>) {
    let root = c.root();
    let (a, link) = (c.file(&root, b"a", b"new"), c.symlink(&root, b"link", b"there"));
    let call = with(rename(&root, b"a", &root, b"link"), false, false, Some(link.node));
    assert_eq!(c.ok(call), renamed(&a, Some(&link)));
    let link = c.symlink(&root, b"other", b"there");
    let call = Call::Unlink { dir: root.clone(), name: name(b"other"), keep: Some(link.node) };
    assert_eq!(c.ok(call), Reply::Removed { node: link.node, pinned: None });
    let dir = c.mkdir(&root, b"d");
    let call = Call::Unlink { dir: root.clone(), name: name(b"d"), keep: Some(dir.node) };
    assert_eq!(c.errno(call), Errno::ISDIR);
}

fn directories(c: &mut Caller<'_>) {
    let root = c.root();
    let (a, b) = (c.mkdir(&root, b"a"), c.mkdir(&root, b"b"));
    c.file(&a, b"in_a", b"");
    c.file(&b, b"in_b", b"");
    assert_eq!(c.errno(rename(&root, b"a", &root, b"b")), Errno::NOTEMPTY);
    c.ok(super::caller::unlink(&b, b"in_b"));
    assert_eq!(c.ok(rename(&root, b"a", &root, b"b")), renamed(&a, Some(&b)));
    assert_eq!(c.names(&root), [name(b"b")]);
    assert_eq!(c.names(&at(&root, b"b", a.node)), [name(b"in_a")]);
}

fn types(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"f", b"");
    c.mkdir(&root, b"d");
    assert_eq!(c.errno(rename(&root, b"f", &root, b"d")), Errno::ISDIR);
    assert_eq!(c.errno(rename(&root, b"d", &root, b"f")), Errno::NOTDIR);
    assert_eq!(c.errno(rename(&root, b"f", &file, b"x")), Errno::NOTDIR);
    assert_eq!(c.errno(rename(&file, b"x", &root, b"x")), Errno::NOTDIR);
}

fn no_loop(c: &mut Caller<'_>) {
    let root = c.root();
    let a = c.mkdir(&root, b"a");
    let b = c.mkdir(&a, b"b");
    assert_eq!(c.errno(rename(&root, b"a", &b, b"x")), Errno::INVAL);
    assert_eq!(c.errno(rename(&root, b"a", &a, b"x")), Errno::INVAL);
    assert_eq!(c.errno(rename(&a, b"b", &root, b"a")), Errno::NOTEMPTY);
    assert_eq!(c.names(&a), [name(b"b")]);
}

fn same_inode(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"a", b"");
    c.made(Call::Link { node: file.clone(), dir: root.clone(), name: name(b"b") });
    c.ok(rename(&root, b"a", &root, b"b"));
    assert_eq!(c.names(&root), [name(b"a"), name(b"b")]);
    c.ok(rename(&root, b"a", &root, b"a"));
    assert_eq!(c.getattr(&file).nlink, 2);
}

fn no_replace(c: &mut Caller<'_>) {
    let root = c.root();
    let (a, _) = (c.file(&root, b"a", b""), c.file(&root, b"b", b""));
    let call = |new| with(rename(&root, b"a", &root, new), true, false, None);
    assert_eq!(c.errno(call(b"b")), Errno::EXIST);
    assert_eq!(c.ok(call(b"c")), renamed(&a, None));
    assert_eq!(c.names(&root), [name(b"b"), name(b"c")]);
}

fn exchange(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    let inner = c.mkdir(&dir, b"inner");
    let file = c.file(&dir, b"f", b"file");
    let call = |old: &[u8], to: &NodeRef, new: &[u8]| with(rename(&dir, old, to, new), false, true, None);
    assert_eq!(c.errno(call(b"f", &root, b"missing")), Errno::NOENT);
    assert_eq!(c.ok(call(b"f", &dir, b"inner")), renamed(&file, Some(&inner)));
    assert_eq!(c.lookup(&dir, b"f").map(|entry| entry.id), Some(inner.node));
    assert_eq!(c.read(&at(&dir, b"inner", file.node), None, 0, 10), b"file");
    assert_eq!(c.errno(call(b"f", &root, b"d")), Errno::INVAL);
}

fn whiteout(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    let (a, b) = (c.file(&root, b"a", b"new"), c.file(&dir, b"b", b"old"));
    let call = |no_replace| match with(rename(&root, b"a", &dir, b"b"), no_replace, false, None) {
        Call::Rename { from, name, to, new_name, no_replace, exchange, keep, .. } => {
            Call::Rename { from, name, to, new_name, no_replace, exchange, whiteout: true, keep }
        }
        other => other,
    };
    assert_eq!(c.errno(call(true)), Errno::EXIST);
    let response = c.call(call(false));
    let Ok(Reply::Renamed { moved, replaced, pinned: None, whiteout: Some(left) }) = response.result else {
        panic!("{response:?}")
    };
    assert_eq!((moved, replaced), (a.node, Some(b.node)));
    let told = response.after.iter().find(|(id, _)| *id == left).expect("its attributes are told").1;
    assert_eq!((told.kind(), told.rdev, told.nlink), (Kind::CharDevice, 0, 1));
    assert_eq!(c.lookup(&root, b"a").map(|entry| (entry.id, entry.attr)), Some((left, told)));
    assert_eq!(c.read(&at(&dir, b"b", a.node), None, 0, 10), b"new");
    // A whiteout is an ordinary file.
    let moved = match call(false) {
        Call::Rename { from, name, to, keep, .. } => Call::Rename {
            from,
            name,
            to,
            new_name: super::caller::name(b"w"),
            no_replace: true,
            exchange: false,
            whiteout: true,
            keep,
        },
        other => other,
    };
    assert!(matches!(c.ok(moved), Reply::Renamed { moved, whiteout: Some(_), .. } if moved == left));
    assert_eq!(c.names(&root), [name(b"a"), name(b"d")]);
}
