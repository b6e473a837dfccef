//! Lookup and creation of names.

use super::Named;
use super::caller::{Caller, at, create, name, steady, unlink};
use nigh_types::{Call, Errno, Kind, NodeRef, Reply};

pub(super) const CASES: &[Named] = &[
    ("lookup_finds_what_was_made_and_nothing_else", lookup),
    ("lookup_in_a_file_is_enotdir", lookup_in_file),
    ("create_is_open_empty_and_masked", create_is_masked),
    ("create_finds_an_existing_file_unless_exclusive", create_existing),
    ("create_truncates_only_on_request", create_truncates),
    ("create_over_a_directory_fails", create_over_directory),
    ("mkdir_makes_an_empty_directory", mkdir),
    ("mkdir_over_anything_is_eexist", mkdir_existing),
    ("making_in_a_file_is_enotdir", make_in_file),
    ("fifos_and_sockets_are_made_and_not_opened", special),
    ("unlink_removes_a_name", unlink_removes),
    ("unlink_of_a_directory_is_eisdir", unlink_directory),
    ("rmdir_removes_only_empty_directories", rmdir),
    ("names_are_bytes", bytes),
    ("names_of_255_bytes", long),
    ("many_calls_at_one_time", many),
    ("after_is_what_getattr_says", after),
];

fn lookup(c: &mut Caller<'_>) {
    let root = c.root();
    assert_eq!(c.lookup(&root, b"a"), None);
    let place = c.file(&root, b"a", b"xyz");
    let entry = c.lookup(&root, b"a").expect("it was made");
    assert_eq!((entry.id, entry.attr.size, entry.attr.kind()), (place.node, 3, Kind::File));
    assert_eq!(entry.attr.nlink, 1);
    assert_eq!(c.lookup(&root, b"A"), None);
    assert_eq!(steady(c.getattr(&place)), steady(entry.attr));
}

fn lookup_in_file(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"f", b"");
    assert_eq!(c.errno(Call::Lookup { dir: file.clone(), name: name(b"x") }), Errno::NOTDIR);
    assert_eq!(c.errno(Call::List { dir: file }), Errno::NOTDIR);
}

fn create_is_masked(c: &mut Caller<'_>) {
    let root = c.root();
    let mut call = create(&root, b"f", true);
    if let Call::Create { mode, umask, .. } = &mut call {
        (*mode, *umask) = (0o666, 0o027);
    }
    let (entry, handle) = c.made(call);
    assert_eq!((entry.attr.mode, entry.attr.size, entry.attr.nlink), (0o100_640, 0, 1));
    let place = at(&root, b"f", entry.id);
    assert_eq!(c.read(&place, handle, 0, 10), b"");
    let uid = c.getattr(&root).uid;
    assert_eq!(entry.attr.uid, uid, "it has the export's owner");
}

fn create_existing(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"kept");
    assert_eq!(c.errno(create(&root, b"f", true)), Errno::EXIST);
    let Reply::Created { entry, handle, existed } = c.ok(create(&root, b"f", false)) else {
        panic!("not made")
    };
    assert!(existed);
    assert_eq!((entry.id, entry.attr.size), (place.node, 4));
    assert_eq!(c.read(&place, handle, 0, 10), b"kept");
}

fn create_truncates(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"gone");
    let mut call = create(&root, b"f", false);
    if let Call::Create { access, .. } = &mut call {
        access.truncate = true;
    }
    let Reply::Created { entry, existed: true, .. } = c.ok(call) else { panic!("it existed") };
    assert_eq!((entry.id, entry.attr.size), (place.node, 0));
}

fn create_over_directory(c: &mut Caller<'_>) {
    let root = c.root();
    c.mkdir(&root, b"d");
    assert_eq!(c.errno(create(&root, b"d", true)), Errno::EXIST);
    assert_eq!(c.errno(create(&root, b"d", false)), Errno::ISDIR);
}

fn mkdir(c: &mut Caller<'_>) {
    let root = c.root();
    let call = Call::Mkdir { dir: root.clone(), name: name(b"d"), mode: 0o777, umask: 0o022 };
    let (entry, handle) = c.made(call);
    assert_eq!((entry.attr.mode & 0o170_777, handle), (0o040_755, None));
    let dir = at(&root, b"d", entry.id);
    assert_eq!(c.names(&dir), []);
    let inner = c.mkdir(&dir, b"e");
    assert_eq!(c.lookup(&dir, b"e").map(|entry| entry.id), Some(inner.node));
}

fn mkdir_existing(c: &mut Caller<'_>) {
    let root = c.root();
    c.file(&root, b"f", b"");
    c.mkdir(&root, b"d");
    for leaf in [&b"f"[..], b"d"] {
        let call = Call::Mkdir { dir: root.clone(), name: name(leaf), mode: 0o755, umask: 0 };
        assert_eq!(c.errno(call), Errno::EXIST);
    }
}

fn make_in_file(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.file(&root, b"f", b"");
    assert_eq!(c.errno(create(&dir, b"x", true)), Errno::NOTDIR);
    let call = Call::Mkdir { dir: dir.clone(), name: name(b"x"), mode: 0o755, umask: 0 };
    assert_eq!(c.errno(call), Errno::NOTDIR);
    let call = Call::Symlink { dir: dir.clone(), name: name(b"x"), target: b"t".to_vec() };
    assert_eq!(c.errno(call), Errno::NOTDIR);
    assert_eq!(c.errno(unlink(&dir, b"x")), Errno::NOTDIR);
}

fn special(c: &mut Caller<'_>) {
    let root = c.root();
    for (leaf, kind) in [(&b"fifo"[..], Kind::Fifo), (b"sock", Kind::Socket)] {
        let (dir, name) = (root.clone(), name(leaf));
        let (entry, _) = c.made(Call::Mknod { dir, name, kind, mode: 0o600, umask: 0, rdev: 0 });
        assert_eq!(entry.attr.kind(), kind);
        let node = at(&root, leaf, entry.id);
        assert_eq!(c.lookup(&root, leaf).map(|entry| entry.attr.kind()), Some(kind));
        c.errno(Call::Open { node, access: super::caller::READ_WRITE });
    }
}

fn unlink_removes(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"x");
    assert_eq!(c.ok(unlink(&root, b"f")), Reply::Removed { node: place.node, pinned: None });
    assert_eq!(c.lookup(&root, b"f"), None);
    assert_eq!(c.errno(unlink(&root, b"f")), Errno::NOENT);
    // It was created open.
    assert_eq!(c.errno_after_release(&Call::GetAttr { node: place }), Errno::STALE);
}

fn unlink_directory(c: &mut Caller<'_>) {
    let root = c.root();
    c.mkdir(&root, b"d");
    assert_eq!(c.errno(unlink(&root, b"d")), Errno::ISDIR);
    assert!(c.lookup(&root, b"d").is_some());
}

fn rmdir(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    c.file(&dir, b"f", b"");
    let call = |leaf| Call::Rmdir { dir: root.clone(), name: name(leaf) };
    assert_eq!(c.errno(call(b"d")), Errno::NOTEMPTY);
    c.ok(unlink(&dir, b"f"));
    assert_eq!(c.ok(call(b"d")), Reply::Removed { node: dir.node, pinned: None });
    assert_eq!(c.errno(call(b"d")), Errno::NOENT);
    c.file(&root, b"f", b"");
    assert_eq!(c.errno(call(b"f")), Errno::NOTDIR);
    assert_eq!(c.errno(create(&dir, b"x", true)), Errno::STALE);
}

fn bytes(c: &mut Caller<'_>) {
    let root = c.root();
    let leaves = [&b"\xff\xfe"[..], b"\n", b"...", b" ", b"-rf", b"\xc3\xa4", b"a\xcc\x88", b"\x01"];
    for leaf in leaves {
        c.file(&root, leaf, leaf);
    }
    let mut expected: Vec<_> = leaves.iter().map(|leaf| name(leaf)).collect();
    expected.sort();
    assert_eq!(c.names(&root), expected);
    for leaf in leaves {
        let entry = c.lookup(&root, leaf).expect("it was made");
        assert_eq!(c.read(&at(&root, leaf, entry.id), None, 0, 100), leaf);
    }
}

fn long(c: &mut Caller<'_>) {
    let root = c.root();
    let leaf = [b'n'; 255];
    let place = c.file(&root, &leaf, b"long");
    assert_eq!(c.names(&root), [name(&leaf)]);
    assert_eq!(c.getattr(&place).size, 4);
    c.ok(unlink(&root, &leaf));
    assert_eq!(c.names(&root), []);
}

fn many(c: &mut Caller<'_>) {
    let root = c.root();
    let leaf = |i: u32| format!("f{i}").into_bytes();
    let made: Vec<_> = (0..100).map(|i| c.start(create(&root, &leaf(i), true))).collect();
    for id in made {
        let responses = c.finish(id);
        assert!(matches!(responses[0].result, Ok(Reply::Created { .. })), "{responses:?}");
    }
    let lookup = |leaf: &[u8]| Call::Lookup { dir: root.clone(), name: name(leaf) };
    let found: Vec<_> = (0..200).map(|i| c.start(lookup(&leaf(i)))).collect();
    for (id, i) in found.into_iter().zip(0..200).rev() {
        let there = matches!(c.finish(id)[0].result, Ok(Reply::Entry(Some(_))));
        assert_eq!(there, i < 100, "file {i}");
    }
}

fn after(c: &mut Caller<'_>) {
    let root = c.root();
    let check = |c: &mut Caller<'_>, call: Call, dirs: &[&NodeRef]| {
        let response = c.call(call);
        assert!(response.result.is_ok(), "{response:?}");
        for dir in dirs {
            let told = response.after.iter().find(|(id, _)| *id == dir.node);
            let (_, told) = told.unwrap_or_else(|| panic!("no attributes of {dir:?} in {response:?}"));
            assert_eq!(steady(*told), steady(c.getattr(dir)));
        }
        response
    };
    let mkdir = |leaf| Call::Mkdir { dir: root.clone(), name: name(leaf), mode: 0o755, umask: 0 };
    check(c, mkdir(b"d"), &[&root]);
    let dir = at(&root, b"d", c.lookup(&root, b"d").expect("made").id);
    check(c, create(&dir, b"f", true), &[&dir]);
    let file = at(&dir, b"f", c.lookup(&dir, b"f").expect("made").id);
    check(c, Call::Symlink { dir: dir.clone(), name: name(b"s"), target: b"t".to_vec() }, &[&dir]);
    check(c, Call::Link { node: file, dir: root.clone(), name: name(b"g") }, &[&root]);
    let other = at(&root, b"g", c.lookup(&root, b"g").expect("made").id);
    check(c, unlink(&dir, b"f"), &[&dir, &other]);
    check(c, super::caller::rename(&root, b"g", &dir, b"h"), &[&root, &dir]);
    let flags = nigh_types::WriteFlags::default();
    let file = at(&dir, b"h", other.node);
    let write = Call::Write { node: file.clone(), handle: None, offset: 0, data: b"data".to_vec(), flags };
    // A reply to a write may omit the attributes of the file.
    let response = c.call(write);
    assert!(response.result.is_ok(), "{response:?}");
    for (_, told) in response.after.iter().filter(|(id, _)| *id == file.node) {
        assert_eq!(steady(*told), steady(c.getattr(&file)));
    }
    check(c, unlink(&dir, b"s"), &[&dir]);
    let gone = check(c, unlink(&dir, b"h"), &[&dir]);
    let gone = gone.after.iter().find(|(id, _)| *id == other.node).expect("what is gone is told");
    assert_eq!(gone.1.nlink, 0);
    check(c, Call::Rmdir { dir: root.clone(), name: name(b"d") }, &[&root]);
}
