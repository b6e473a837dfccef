//! Hard links and symlinks.

use super::Named;
use super::caller::{Caller, at, name, unlink};
use nigh_types::{Call, Errno, Kind, NodeRef, Reply};

pub(super) const CASES: &[Named] = &[
    ("links_count_and_share", links),
    ("link_fails_over_names_and_of_directories", link_fails),
    ("a_second_link_goes_and_the_first_stays", unlink_one),
    ("symlinks_keep_their_bytes", symlinks),
    ("readlink_of_another_type_is_einval", readlink_others),
];

fn link(node: &NodeRef, dir: &NodeRef, leaf: &[u8]) -> Call {
    Call::Link { node: node.clone(), dir: dir.clone(), name: name(leaf) }
}

fn links(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    let place = c.file(&root, b"a", b"one");
    let (entry, handle) = c.made(link(&place, &dir, b"b"));
    assert_eq!((entry.id, entry.attr.nlink, handle), (place.node, 2, None));
    let other = at(&dir, b"b", place.node);
    let handle = c.open(&other);
    c.write(&other, handle, 0, b"two");
    assert_eq!(c.read(&place, None, 0, 10), b"two");
    assert_eq!(c.getattr(&place), c.getattr(&other));
    assert_eq!(c.getattr(&place).nlink, 2);
    let nlinks: Vec<_> = c.list(&dir).iter().map(|(_, listee)| listee.attr.map(|a| a.nlink)).collect();
    assert!(matches!(nlinks[..], [None | Some(2)]), "{nlinks:?}");
}

fn link_fails(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    let place = c.file(&root, b"a", b"");
    assert_eq!(c.errno(link(&place, &root, b"a")), Errno::EXIST);
    assert_eq!(c.errno(link(&place, &root, b"d")), Errno::EXIST);
    assert_eq!(c.errno(link(&dir, &root, b"e")), Errno::PERM);
    assert_eq!(c.errno(link(&place, &place, b"x")), Errno::NOTDIR);
    assert_eq!(c.getattr(&place).nlink, 1);
}

fn unlink_one(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"a", b"x");
    c.made(link(&place, &root, b"b"));
    let response = c.call(unlink(&root, b"a"));
    assert_eq!(response.result, Ok(Reply::Removed { node: place.node, pinned: None }));
    let told =
        response.after.iter().find(|(id, _)| *id == place.node).expect("an unlinked file with links left");
    assert_eq!(told.1.nlink, 1);
    let other = at(&root, b"b", place.node);
    assert_eq!(c.getattr(&other).nlink, 1);
    assert_eq!(c.read(&other, None, 0, 10), b"x");
}

fn symlinks(c: &mut Caller<'_>) {
    let root = c.root();
    let long = vec![b'l'; 1000];
    let targets = [&b"plain"[..], b"/absolute/../path", b"../../up", b"\xff\xfe\n", b"dangling/", &long];
    for (target, i) in targets.into_iter().zip(b'0'..) {
        let call = Call::Symlink { dir: root.clone(), name: name(&[i]), target: target.to_vec() };
        let (entry, _) = c.made(call);
        assert_eq!(entry.attr.kind(), Kind::Symlink);
        assert_eq!(entry.attr.size, target.len() as u64);
        let node = at(&root, &[i], entry.id);
        assert_eq!(c.ok(Call::ReadLink { node }), Reply::Target(target.into()));
        let found = c.lookup(&root, &[i]).expect("it was made");
        assert!(found.target.is_none_or(|told| *told == *target));
    }
    let call = Call::Symlink { dir: root.clone(), name: name(b"0"), target: b"x".to_vec() };
    assert_eq!(c.errno(call), Errno::EXIST);
}

fn readlink_others(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"f", b"");
    assert_eq!(c.errno(Call::ReadLink { node: file }), Errno::INVAL);
    assert_eq!(c.errno(Call::ReadLink { node: root }), Errno::INVAL);
}
