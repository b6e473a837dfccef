//! Listings.

use super::Named;
use super::caller::{Caller, create, name, steady, unlink};
use nigh_types::{Call, CallId, Cookie, Dirent, Errno, Kind, Name, NodeRef, Reply};

pub(super) const CASES: &[Named] = &[
    ("a_listing_is_complete_and_in_cookie_order", complete),
    ("entries_are_what_lookup_says", entries),
    ("cookies_are_stable", stable),
    ("an_empty_directory_lists_nothing", empty),
    ("what_stays_is_listed_once_whatever_changes", during_mutations),
    ("a_listing_ends_with_its_directorys_attributes", last_part),
    ("names_alone_are_those_of_a_listing", alone),
];

/// Creates files `f0` … and returns their names, sorted.
fn fill(c: &mut Caller<'_>, dir: &NodeRef, count: u32) -> Vec<Name> {
    let leaves: Vec<Vec<u8>> = (0..count).map(|i| format!("f{i}").into_bytes()).collect();
    let calls: Vec<CallId> = leaves.iter().map(|leaf| c.start(create(dir, leaf, true))).collect();
    for id in calls {
        let responses = c.finish(id);
        let Ok(Reply::Created { handle: Some(handle), .. }) = responses[0].result else {
            panic!("{responses:?}")
        };
        c.release(handle);
    }
    let mut names: Vec<Name> = leaves.iter().map(|leaf| name(leaf)).collect();
    names.sort();
    names
}

fn complete(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    let expected = fill(c, &dir, 1500);
    assert_eq!(c.names(&dir), expected);
    assert_eq!(c.names(&root), [name(b"d")]);
}

fn entries(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"file", b"12345");
    c.mkdir(&root, b"dir");
    c.made(Call::Symlink { dir: root.clone(), name: name(b"link"), target: b"file".to_vec() });
    c.made(Call::Link { node: file, dir: root.clone(), name: name(b"second") });
    let listed = c.list(&root);
    assert_eq!(listed.len(), 4);
    for (leaf, listee) in listed {
        let looked = c.lookup(&root, leaf.as_bytes()).expect("it is listed");
        let attr = listee.attr.unwrap_or(looked.attr);
        assert_eq!((listee.id, steady(attr)), (looked.id, steady(looked.attr)), "{leaf}");
    }
}

fn stable(c: &mut Caller<'_>) {
    let root = c.root();
    fill(c, &root, 100);
    let order =
        |c: &mut Caller<'_>| -> Vec<Name> { c.list(&root).into_iter().map(|(name, _)| name).collect() };
    let before = order(c);
    c.ok(unlink(&root, b"f3"));
    c.file(&root, b"new", b"");
    let after = order(c);
    let kept = |names: Vec<Name>| -> Vec<Name> {
        names.into_iter().filter(|leaf| ![&b"f3"[..], b"new"].contains(&leaf.as_bytes())).collect()
    };
    assert_eq!(kept(before), kept(after.clone()));
    let cookies: Vec<Cookie> =
        after.iter().map(|leaf| c.session.cookie_key.cookie(leaf.as_bytes())).collect();
    assert!(cookies.is_sorted());
}

fn empty(c: &mut Caller<'_>) {
    let root = c.root();
    assert_eq!(c.names(&root), []);
    let id = c.start(Call::List { dir: root });
    let responses = c.finish(id);
    assert!(responses.last().is_some_and(|part| part.last));
}

fn during_mutations(c: &mut Caller<'_>) {
    let root = c.root();
    let steady = fill(c, &root, 700);
    let going: Vec<Vec<u8>> = (0..50_u32).map(|i| format!("going{i}").into_bytes()).collect();
    for leaf in &going {
        c.file(&root, leaf, b"");
    }
    let list = c.start(Call::List { dir: root.clone() });
    let mut others: Vec<CallId> = going.iter().map(|leaf| c.start(unlink(&root, leaf))).collect();
    let coming = (0..50_u32).map(|i| format!("coming{i}").into_bytes());
    others.extend(coming.map(|leaf| c.start(create(&root, &leaf, true))));
    let responses = c.finish(list);
    let mut listed: Vec<Name> = c.listed(responses).into_iter().map(|(name, _)| name).collect();
    listed.sort();
    assert!(listed.windows(2).all(|pair| pair[0] != pair[1]), "no name twice");
    listed.retain(|leaf| leaf.as_bytes().starts_with(b"f"));
    assert_eq!(listed, steady);
    for id in others {
        let responses = c.finish(id);
        assert!(responses[0].result.is_ok(), "{responses:?}");
    }
    assert_eq!(c.names(&root).len(), 750);
}

fn last_part(c: &mut Caller<'_>) {
    let root = c.root();
    fill(c, &root, 600);
    let id = c.start(Call::List { dir: root.clone() });
    let responses = c.finish(id);
    let (last, earlier) = responses.split_last().expect("there is a part");
    assert!(earlier.iter().all(|part| part.after.is_empty()));
    let (_, told) = last.after.iter().find(|(id, _)| *id == root.node).expect("the directory's own");
    assert_eq!(steady(*told), steady(c.getattr(&root)));
}

/// A names-only listing after a cookie, checked to be in order and to bring nothing else.
fn dirents(c: &mut Caller<'_>, dir: &NodeRef, after: Cookie) -> Vec<Dirent> {
    let id = c.start(Call::ListNames { dir: dir.clone(), after });
    let mut all = Vec::new();
    for response in c.finish(id) {
        assert!(response.grants.is_empty() && response.after.is_empty(), "{response:?}");
        let Ok(Reply::Dirents(part)) = response.result else { panic!("{response:?}") };
        all.extend(part);
    }
    let cookies: Vec<Cookie> =
        all.iter().map(|dirent| c.session.cookie_key.cookie(dirent.name.as_bytes())).collect();
    assert!(cookies.is_sorted() && cookies.first().is_none_or(|first| *first > after));
    all
}

fn alone(c: &mut Caller<'_>) {
    if !c.session.supports.list_names {
        return;
    }
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    assert_eq!(dirents(c, &dir, Cookie(0)), []);
    fill(c, &dir, 600);
    c.mkdir(&dir, b"below");
    c.symlink(&dir, b"link", b"f0");
    let file = c.file(&root, b"file", b"1");
    let listed = c.list(&dir);
    let told = dirents(c, &dir, Cookie(0));
    assert_eq!(told.len(), listed.len());
    for (Dirent { name, ino, kind }, (listed, listee)) in told.iter().zip(&listed) {
        assert_eq!((name, *ino), (listed, listee.id.ino));
        let is_of = listee.attr.map(|attr| attr.kind());
        assert!(kind.is_none() || *kind == is_of, "{name:?} is {kind:?} and {is_of:?}");
    }
    assert!(told.iter().any(|dirent| dirent.kind == Some(Kind::Directory)));
    let middle = c.session.cookie_key.cookie(told[300].name.as_bytes());
    assert_eq!(dirents(c, &dir, middle), told[301..]);
    assert_eq!(dirents(c, &dir, Cookie(u64::MAX)), []);
    let goes = told[301..].iter().find(|dirent| dirent.kind == Some(Kind::File)).expect("there are many");
    c.ok(unlink(&dir, goes.name.as_bytes()));
    assert_eq!(dirents(c, &dir, middle).len(), told.len() - 302);
    assert_eq!(c.errno(Call::ListNames { dir: file, after: Cookie(0) }), Errno::NOTDIR);
}
