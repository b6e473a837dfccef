//! Stable ids, failing hints, and attempts to leave the export.

mod common;

use common::*;
use nigh_server::{Export, ExportError, ExportOptions};
use nigh_types::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

#[test]
fn node_ids_survive_reopening_the_export() {
    let x = Exported::new();
    fs::create_dir_all(x.path("a/b")).unwrap();
    fs::write(x.path("a/b/f"), "").unwrap();
    let key = |x: &Exported| x.export.session(&x.files).unwrap().cookie_key;
    let before = (x.root, x.place("a/b").node, x.place("a/b/f").node, key(&x));
    let order: Vec<_> = x.list(&x.top()).into_iter().map(|(name, _)| name).collect();
    let x = x.reopen();
    assert_eq!(before, (x.root, x.place("a/b").node, x.place("a/b/f").node, key(&x)));
    assert_eq!(order, x.list(&x.top()).into_iter().map(|(name, _)| name).collect::<Vec<_>>());
    assert_eq!(before.2.ino, fs::metadata(x.path("a/b/f")).unwrap().ino());
}

#[test]
fn reused_inode_number_has_a_new_node_id() {
    let x = Exported::new();
    fs::write(x.path("f"), "").unwrap();
    let old = x.place("f");
    let mut reused = None;
    for n in 0..200 {
        fs::remove_file(x.path("f")).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
        fs::write(x.path("f"), "").unwrap();
        if fs::metadata(x.path("f")).unwrap().ino() == old.node.ino {
            reused = Some(n);
            break;
        }
    }
    if reused.is_none() {
        return println!("SKIPPED: this filesystem does not reuse inode numbers soon");
    }
    let new = x.place("f");
    assert_eq!(new.node.ino, old.node.ino);
    assert_ne!(new.node.generation, old.node.generation);
    assert_eq!(x.attr(&old), Err(Errno::STALE));
}

#[test]
fn a_file_renamed_by_another_process_is_found_by_handle_or_after_a_walk() {
    let x = Exported::new();
    fs::create_dir(x.path("d")).unwrap();
    fs::write(x.path("f"), "data").unwrap();
    let f = x.place("f");
    assert_eq!(x.attr(&f).map(|a| a.size), Ok(4));
    let Ok(Reply::Opened { handle, .. }) = x.call(Call::Open { node: f.clone(), access: READ }) else {
        panic!()
    };
    x.responses(&me(), Call::Release { handles: vec![handle] });
    fs::rename(x.path("f"), x.path("d/g")).unwrap();
    if is_root() {
        assert_eq!(x.attr(&f).map(|a| a.size), Ok(4));
    } else {
        assert_eq!(x.attr(&f), Err(Errno::STALE));
    }
    assert_eq!(x.call(Call::ResolvePath { node: f.node, names: vec![name("f")] }), Err(Errno::STALE));
    assert_eq!(x.call(Call::ResolvePath { node: f.node, names: vec![name("d")] }), Err(Errno::STALE));
    assert_eq!(
        x.call(Call::ResolvePath { node: f.node, names: vec![name("d"), name("g")] }),
        Ok(Reply::Done)
    );
    assert_eq!(x.attr(&f).map(|a| a.size), Ok(4));
}

#[test]
fn directories_renamed_by_another_process_are_found_after_a_walk() {
    let x = Exported::new();
    fs::create_dir_all(x.path("a/b/c")).unwrap();
    fs::create_dir(x.path("z")).unwrap();
    fs::write(x.path("a/b/c/f"), "").unwrap();
    let f = x.place("a/b/c/f");
    let x = x.reopen().of_peer(false); // nothing is held open
    assert_eq!(x.attr(&f), Err(Errno::STALE), "its directory is not known");
    let parent = f.path_hint.as_ref().unwrap().0;
    let walk = |names: &[&str]| {
        x.call(Call::ResolvePath { node: parent, names: names.iter().map(|n| name(n)).collect() })
    };
    assert_eq!(walk(&["a", "b", "c"]), Ok(Reply::Done));
    assert!(x.attr(&f).is_ok());
    fs::rename(x.path("a/b"), x.path("z/y")).unwrap();
    assert!(walk(&["a", "b", "c"]).is_err());
    assert_eq!(walk(&["z", "y", "c"]), Ok(Reply::Done));
    assert!(x.attr(&f).is_ok());
}

#[test]
fn nothing_leads_out_of_the_export() {
    let outer = tempfile::tempdir().unwrap();
    fs::write(outer.path().join("secret"), "secret").unwrap();
    fs::create_dir(outer.path().join("x")).unwrap();
    let inside = tempfile::tempdir_in(outer.path()).unwrap();
    let x = Exported::of(inside);
    fs::create_dir(x.path("d")).unwrap();
    fs::write(x.path("d/f"), "").unwrap();
    let d = x.place("d");
    symlink("..", x.path("up")).unwrap();
    symlink(outer.path(), x.path("abs")).unwrap();
    for link in ["up", "abs"] {
        let place = x.place(link);
        assert_eq!(x.call(Call::Lookup { dir: place.clone(), name: name("secret") }), Err(Errno::NOTDIR));
        let at = |text: &str| NodeRef { node: place.node, path_hint: Some((place.node, name(text))) };
        // Its number finds the symlink itself.
        let itself = x.attr(&place).unwrap();
        assert!([Err(Errno::STALE), Ok(itself)].contains(&x.attr(&at("secret"))));
        let names = vec![name(link), name("secret")];
        assert_eq!(x.call(Call::ResolvePath { node: place.node, names }), Err(Errno::STALE));
        let create = Call::Create {
            dir: place.clone(),
            name: name("new"),
            mode: 0o600,
            umask: 0,
            exclusive: false,
            access: BOTH,
        };
        assert_eq!(x.call(create), Err(Errno::NOTDIR));
    }
    // A directory that is replaced by a symlink while its place is cached.
    let f = x.place("d/f");
    fs::rename(x.path("d"), x.path("e")).unwrap();
    symlink(outer.path(), x.path("d")).unwrap();
    fs::write(outer.path().join("f"), "other").unwrap();
    let _ = x.attr(&f);
    let Ok(Reply::Entry(Some(now))) = x.call(Call::Lookup { dir: x.top(), name: name("d") }) else {
        panic!()
    };
    assert_eq!(now.attr.kind(), Kind::Symlink);
    assert!(x.entry(&d, "secret").is_none());
    // An id from outside the export, with any hint.
    let secret = fs::metadata(outer.path().join("secret")).unwrap();
    for generation in [0, f.node.generation] {
        let node = NodeId { ino: secret.ino(), generation };
        assert_eq!(x.attr(&NodeRef::without_hint(node)), Err(Errno::STALE));
        assert_eq!(x.attr(&NodeRef { node, path_hint: Some((x.root, name("up"))) }), Err(Errno::STALE));
    }
}

#[test]
fn a_directory_moved_out_of_the_export_is_out_of_reach() {
    let outer = tempfile::tempdir().unwrap();
    let x = Exported::of(tempfile::tempdir_in(outer.path()).unwrap());
    fs::create_dir_all(x.path("d/e")).unwrap();
    fs::write(x.path("d/f"), "").unwrap();
    fs::write(x.path("d/e/g"), "").unwrap();
    let (d, f, e, g) = (x.place("d"), x.place("d/f"), x.place("d/e"), x.place("d/e/g"));
    let Ok(Reply::Opened { handle, .. }) = x.call(Call::Open { node: g.clone(), access: READ }) else {
        panic!()
    };
    x.responses(&me(), Call::Release { handles: vec![handle] });
    fs::rename(x.path("d"), outer.path().join("moved")).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(150));
    for place in [&d, &f, &e, &g, &NodeRef::without_hint(g.node)] {
        assert_eq!(x.attr(place), Err(Errno::STALE));
    }
    assert_eq!(x.call(Call::List { dir: d.clone() }), Err(Errno::STALE));
    let make = Call::Mkdir { dir: e.clone(), name: name("n"), mode: 0o700, umask: 0 };
    assert_eq!(x.call(make), Err(Errno::STALE));
    fs::rename(outer.path().join("moved"), x.path("back")).unwrap();
    assert_eq!(x.place("back/e/g").node, g.node);
    assert!(x.attr(&g).is_ok());
}

#[test]
fn sibling_directory_with_equal_name_prefix_is_outside_the_export() {
    let outer = tempfile::tempdir().unwrap();
    let base = outer.path().join("export");
    fs::create_dir(&base).unwrap();
    let state = tempfile::tempdir().unwrap();
    let (export, files, root) = open(&base, state.path());
    let x = Exported { dir: outer, state, export, files, root };
    fs::create_dir(base.join("d")).unwrap();
    let d = x.place("d");
    fs::rename(base.join("d"), x.path("export-d")).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(150));
    assert_eq!(x.attr(&d), Err(Errno::STALE));
}

#[test]
fn ten_thousand_opens_by_name_hold_few_descriptors() {
    let x = Exported::new();
    let count = || fs::read_dir("/proc/self/fd").unwrap().count();
    for n in 0..2_000 {
        fs::create_dir(x.path(&format!("d{n}"))).unwrap();
        fs::write(x.path(&format!("d{n}/f")), "x").unwrap();
    }
    let before = count();
    for n in 0..10_000 {
        let place = x.place(&format!("d{}/f", n % 2_000));
        assert_eq!(x.read(&place, None).unwrap(), b"x");
        let opened = x.call(Call::Open { node: place, access: READ });
        match opened {
            Ok(Reply::Opened { .. }) => assert!(n < 64),
            other => assert_eq!((other, n >= 64), (Err(Errno::NFILE), true)),
        }
    }
    // Other tests of this process open descriptors, too.
    assert!(count() < before + 512 + 64 + 64 + 400, "{} descriptors", count() - before);
    let later = std::time::Instant::now() + std::time::Duration::from_secs(60);
    x.export.close_idle(later);
}

#[test]
fn deep_trees_are_reached_without_recursion_and_beyond_path_max() {
    let x = Exported::new();
    let mut at = x.top();
    let long = "x".repeat(100);
    let mut names = Vec::new();
    for _ in 0..300 {
        let made = x.call(Call::Mkdir { dir: at.clone(), name: name(&long), mode: 0o700, umask: 0 });
        let Ok(Reply::Created { entry, .. }) = made else { panic!("{made:?}") };
        at = NodeRef { node: entry.id, path_hint: Some((at.node, name(&long))) };
        names.push(name(&long));
    }
    assert!(x.attr(&NodeRef::without_hint(at.node)).is_ok());
    let x = x.reopen();
    assert_eq!(x.attr(&at), Err(Errno::STALE));
    assert_eq!(x.call(Call::ResolvePath { node: at.node, names }), Ok(Reply::Done));
    assert!(x.attr(&at).is_ok());
    // The standard library's removal would be slow at this depth, so rm(1) does it.
    std::process::Command::new("rm").arg("-rf").arg(x.path(&long)).status().unwrap();
}

#[test]
fn unsuitable_export_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let open = |name: &str| Export::open(&dir.path().join(name), dir.path(), ExportOptions::default());
    fs::write(dir.path().join("file"), "").unwrap();
    let no_dir = open("file").unwrap_err();
    assert!(matches!(no_dir, ExportError::NotADirectory { .. }));
    assert_eq!(no_dir.errno(), Errno::NOTDIR);
    assert_eq!(open("none").unwrap_err().errno(), Errno::NOENT);
    assert!(!open("none").unwrap_err().to_string().contains('\n'));
}
