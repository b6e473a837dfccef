//! Extended attributes.

use super::Named;
use super::caller::Caller;
use nigh_types::{Call, Errno, NodeRef, Reply};

pub(super) const CASES: &[Named] = &[
    ("xattrs_are_set_read_listed_and_removed", xattrs),
    ("xattrs_may_be_empty", empty),
    ("xattr_flags_create_and_replace", flags),
    ("an_inode_without_xattrs_says_so", absence),
];

fn set(node: &NodeRef, name: &[u8], value: &[u8], flags: u32) -> Call {
    let (name, value) = (name.to_vec(), value.to_vec());
    Call::SetXattr { node: node.clone(), name, value, flags, kill_sgid: false }
}

fn one(node: &NodeRef, name: &[u8]) -> Call {
    Call::Xattr { node: node.clone(), name: name.to_vec() }
}

/// An inode's xattrs in the `user.` namespace, sorted.
#[track_caller]
fn user(c: &mut Caller<'_>, node: &NodeRef) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    let Reply::Xattrs(all) = c.ok(Call::Xattrs { node: node.clone() }) else { panic!("no xattrs") };
    let items = all.items.into_iter().filter(|(name, _)| name.starts_with(b"user."));
    let mut items: Vec<_> = items.map(|(name, value)| (name.into(), value.map(Vec::from))).collect();
    items.sort();
    items
}

fn xattrs(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"");
    assert_eq!(c.errno(one(&place, b"user.a")), Errno::NODATA);
    let value = vec![0xa5; 1000];
    c.ok(set(&place, b"user.a", &value, 0));
    c.ok(set(&place, b"user.b", b"more", 0));
    assert_eq!(c.ok(one(&place, b"user.a")), Reply::Value(value.clone()));
    let listed = user(c, &place);
    assert_eq!(listed.iter().map(|(name, _)| &name[..]).collect::<Vec<_>>(), [&b"user.a"[..], b"user.b"]);
    assert!(listed[0].1.as_ref().is_none_or(|told| *told == value), "a value that is told is the value");
    let remove = Call::RemoveXattr { node: place.clone(), name: b"user.a".to_vec() };
    let Reply::Attr(id, _) = c.ok(remove.clone()) else { panic!("no attributes") };
    assert_eq!(id, place.node);
    assert_eq!(c.errno(remove), Errno::NODATA);
    assert_eq!(c.errno(one(&place, b"user.a")), Errno::NODATA);
    let dir = c.mkdir(&root, b"d");
    c.ok(set(&dir, b"user.d", b"on a directory", 0));
    assert_eq!(c.ok(one(&dir, b"user.d")), Reply::Value(b"on a directory".to_vec()));
}

fn empty(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"");
    c.ok(set(&place, b"user.empty", b"", 0));
    assert_eq!(c.ok(one(&place, b"user.empty")), Reply::Value(Vec::new()));
    assert_eq!(user(c, &place).len(), 1);
}

fn flags(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"");
    assert_eq!(c.errno(set(&place, b"user.a", b"1", 2)), Errno::NODATA);
    c.ok(set(&place, b"user.a", b"1", 1));
    assert_eq!(c.errno(set(&place, b"user.a", b"2", 1)), Errno::EXIST);
    c.ok(set(&place, b"user.a", b"3", 2));
    assert_eq!(c.ok(one(&place, b"user.a")), Reply::Value(b"3".to_vec()));
    assert_eq!(c.errno(set(&place, b"nonsense", b"", 0)), Errno::OPNOTSUPP);
}

fn absence(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"");
    assert_eq!(user(c, &place), []);
    c.ok(set(&place, b"user.a", b"1", 0));
    let entry = c.lookup(&root, b"f").expect("it was made");
    assert!(!entry.no_xattrs, "there is one");
    let listed = c.list(&root);
    assert!(!listed[0].1.no_xattrs, "there is one");
}
