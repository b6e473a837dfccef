//! Listings in cookie order.

use crate::common::*;
use nigh_types::*;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

#[test]
fn a_hundred_thousand_names_come_once_each_in_cookie_order() {
    let x = Exported::new();
    let count = 100_000;
    for n in 0..count {
        fs::File::create(x.path(&format!("file-{n:06}"))).unwrap();
    }
    let parts = x.responses(&me(), Call::List { dir: x.top() });
    assert!(parts.len() > 10);
    assert_eq!(parts[0].grants[0].covers, LeaseScope::Directory);
    let last = parts.last().unwrap();
    assert_eq!(last.after, [(x.root, x.attr(&x.top()).unwrap())]);
    assert!(last.grants.iter().any(|g| (g.node, g.covers) == (x.root, LeaseScope::Attributes)));
    let key = x.export.session(&x.files).unwrap().cookie_key;
    let mut names = BTreeSet::new();
    let mut cookie = Cookie(0);
    for part in &parts {
        let Ok(Reply::Listed(listed)) = &part.result else { panic!() };
        assert!(nigh_native::encode_response(CallId(1), part).len() < 256 << 10);
        for (name, entry) in &listed.entries {
            let next = key.cookie(name.as_bytes());
            assert!(next >= cookie);
            cookie = next;
            assert!(entry.no_xattrs && entry.attr.kind() == Kind::File);
            assert!(names.insert(name.clone()));
        }
    }
    assert_eq!(names, (0..count).map(|n| name(&format!("file-{n:06}"))).collect());
}

#[test]
fn listed_entries_equal_lookup_replies() {
    let x = Exported::new();
    fs::create_dir(x.path("d")).unwrap();
    fs::write(x.path("f"), "123").unwrap();
    fs::write(x.path("h1"), "").unwrap();
    fs::hard_link(x.path("h1"), x.path("h2")).unwrap();
    symlink("to", x.path("s")).unwrap();
    fs::write(x.path("odd").with_file_name(std::ffi::OsStr::from_bytes(b"\xff\xfe")), "").unwrap();
    fs::write(x.path(&"n".repeat(255)), "").unwrap();
    let listed = x.list(&x.top());
    assert_eq!(listed.len(), 7);
    for (name, entry) in &listed {
        let looked = x.call(Call::Lookup { dir: x.top(), name: name.clone() });
        let Ok(Reply::Entry(Some(mut looked))) = looked else { panic!() };
        if looked.target.is_some() {
            looked.attr.atime = entry.attr.atime; // Linux cannot read a symlink without changing its atime
        }
        assert_eq!(looked, *entry);
    }
    let grants = x.response(Call::List { dir: x.top() }).grants;
    let own: BTreeSet<_> =
        grants.iter().filter(|g| g.covers == LeaseScope::Attributes).map(|g| g.node).collect();
    assert_eq!(own, [x.root, x.place("d").node, x.place("h1").node].into());
    assert!(x.list(&x.place("d")).is_empty());
    assert_eq!(x.call(Call::List { dir: x.place("f") }), Err(Errno::NOTDIR));
}

#[test]
fn a_listed_directory_is_reached_without_a_hint() {
    let x = Exported::new();
    fs::create_dir_all(x.path("d/e")).unwrap();
    let d = x.list(&x.top()).remove(0).1.id;
    let e = x.list(&NodeRef::without_hint(d)).remove(0).1.id;
    assert!(x.attr(&NodeRef::without_hint(e)).is_ok());
}

#[test]
fn names_only_listing_has_the_names_of_a_full_listing() {
    let x = Exported::new();
    for n in 0..30_000 {
        fs::File::create(x.path(&format!("file-{n}"))).unwrap();
    }
    fs::create_dir(x.path("d")).unwrap();
    let told = x.responses(&me(), Call::ListNames { dir: x.top(), after: Cookie(0) });
    assert!(
        told.len() > 4
            && told.iter().all(|part| nigh_native::encode_response(CallId(1), part).len() < 256 << 10)
    );
    let listed: Vec<_> = x.list(&x.top()).into_iter().map(|(name, entry)| (name, entry.id.ino)).collect();
    let told: Vec<_> = x.dirents(&x.top()).into_iter().map(|dirent| (dirent.name, dirent.ino)).collect();
    assert_eq!(told, listed);
    let middle = x.export.session(&x.files).unwrap().cookie_key.cookie(told[15_000].0.as_bytes());
    let behind = x.responses(&me(), Call::ListNames { dir: x.top(), after: middle });
    let Some(Ok(Reply::Dirents(part))) = behind.first().map(|part| &part.result) else {
        panic!("{behind:?}")
    };
    assert_eq!(part[0].name, told[15_001].0);
}
