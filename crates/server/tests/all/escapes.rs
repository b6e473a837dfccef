//! Escapes from an export with the help of a process on the server's own disk, and use of ids given to another client
//! (docs/attacks.md).

use crate::common::client::{Client, user_link};
use crate::common::*;
use nigh_native::UPDATES;
use nigh_remote::Event;
use nigh_server::{Exports, Server, ServerOptions};
use nigh_types::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the server may still find a moved directory at its old place (`crates/server/src/export/node_resolver.rs`).
const MOVED: Duration = Duration::from_millis(150);

fn create(dir: &NodeRef, text: &str) -> Call {
    Call::Create { dir: dir.clone(), name: name(text), mode: 0o600, umask: 0, exclusive: false, access: BOTH }
}

#[test]
fn directory_swapped_with_a_symlink_does_not_lead_out_of_the_export() {
    let outer = tempfile::tempdir().unwrap();
    fs::create_dir(outer.path().join("target")).unwrap();
    for text in ["f", "g"] {
        fs::write(outer.path().join("target").join(text), "outside").unwrap();
    }
    let foreign = fs::metadata(outer.path().join("target/f")).unwrap().ino();
    let x = Exported::of(tempfile::tempdir_in(outer.path()).unwrap());
    fs::create_dir(x.path("d")).unwrap();
    fs::write(x.path("d/f"), "inside").unwrap();
    let (d, f) = (x.place("d"), x.place("d/f"));
    let (stop, mut reached, mut missed, mut made) = (AtomicBool::new(false), 0, 0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                fs::rename(x.path("d"), x.path("real")).unwrap();
                symlink(outer.path().join("target"), x.path("d")).unwrap();
                std::thread::yield_now();
                fs::remove_file(x.path("d")).unwrap();
                fs::rename(x.path("real"), x.path("d")).unwrap();
            }
        });
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(1_500) {
            match x.read(&f, None) {
                Ok(data) => {
                    reached += 1;
                    assert_eq!(data, b"inside");
                }
                Err(_) => missed += 1,
            }
            if let Ok(Reply::Entry(Some(entry))) = x.call(Call::Lookup { dir: d.clone(), name: name("f") }) {
                assert_ne!(entry.id.ino, foreign);
            }
            let walk = Call::ResolvePath { node: f.node, names: vec![name("d"), name("f")] };
            let _ = x.call(walk);
            made += u64::from(x.call(create(&d, &format!("made-{reached}"))).is_ok());
            let now = x.call(Call::Lookup { dir: x.top(), name: name("d") });
            if let Ok(Reply::Entry(Some(entry))) = now {
                let at = NodeRef { node: entry.id, path_hint: Some((x.root, name("d"))) };
                let _ = x.call(create(&at, "through"));
                let _ = x.call(Call::Unlink { dir: at, name: name("g"), keep: None });
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    println!("{reached} reads reached it, {missed} did not; {made} files made");
    assert!(reached > 0 && made > 0, "nothing was tried");
    let left = fs::read_dir(outer.path().join("target")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut left: Vec<_> = left.collect();
    left.sort();
    assert_eq!(left, ["f", "g"], "something was made or removed outside");
    assert_eq!(fs::read(outer.path().join("target/f")).unwrap(), b"outside");
}

#[test]
fn file_whose_only_link_is_outside_the_export_is_unreachable() {
    let outer = tempfile::tempdir().unwrap();
    let x = Exported::of(tempfile::tempdir_in(outer.path()).unwrap());
    fs::write(x.path("f"), "data").unwrap();
    let f = x.place("f");
    let Ok(Reply::Opened { handle, .. }) = x.call(Call::Open { node: f.clone(), access: READ }) else {
        panic!()
    };
    x.responses(&me(), Call::Release { handles: vec![handle] });
    fs::hard_link(x.path("f"), outer.path().join("f")).unwrap();
    fs::remove_file(x.path("f")).unwrap();
    std::thread::sleep(MOVED);
    for place in [&f, &NodeRef::without_hint(f.node)] {
        assert_eq!(x.attr(place), Err(Errno::STALE));
        assert_eq!(x.read(place, None), Err(Errno::STALE));
        let set = SetAttr { mode: Some(0o777), ..SetAttr::default() };
        assert_eq!(x.call(Call::SetAttr { node: place.clone(), handle: None, set }), Err(Errno::STALE));
        let link = Call::Link { node: place.clone(), dir: x.top(), name: name("again") };
        assert_eq!(x.call(link), Err(Errno::STALE));
    }
    assert_eq!(fs::metadata(outer.path().join("f")).unwrap().nlink(), 1);
}

#[test]
fn node_id_given_to_another_client_gives_no_rights() {
    if !needs_root("node_id_given_to_another_client_gives_no_rights") {
        return;
    }
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(dir.path().join("private")).unwrap();
    fs::set_permissions(dir.path().join("private"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(dir.path().join("private/f"), "secret").unwrap();
    fs::set_permissions(dir.path().join("private/f"), fs::Permissions::from_mode(0o600)).unwrap();
    let mut exports = Exports::default();
    exports.add(format!("world={}", dir.path().display()).as_ref()).unwrap();
    let options = ServerOptions { exports, ..ServerOptions::new(state.path().to_owned()) };
    let server = Server::new(options).unwrap();
    let soon = Term::Limited(Span::from_secs(5));
    let mut root = Client::connect(&server, dir.path(), soon);
    let (private, f) = (root.place("private"), root.place("private/f"));
    root.open(&f, READ);

    let mut user = as_user(&server, Path::new("world"), 4_000);
    let node = f.clone();
    let attempts = [
        Call::Open { node: node.clone(), access: READ },
        Call::Read { node: node.clone(), handle: None, offset: 0, length: 6 },
        Call::Write {
            node: node.clone(),
            handle: None,
            offset: 0,
            data: b"forged".to_vec(),
            flags: WriteFlags::default(),
        },
        Call::SetAttr {
            node: node.clone(),
            handle: None,
            set: SetAttr { mode: Some(0o666), ..SetAttr::default() },
        },
        Call::List { dir: private.clone() },
        Call::Lookup { dir: private.clone(), name: name("f") },
        create(&private, "new"),
        Call::Unlink { dir: private, name: name("f"), keep: Some(node.node) },
    ];
    for call in attempts {
        let what = call.type_name();
        let result = user.call(call).result;
        assert!(matches!(result, Err(Errno::ACCES | Errno::PERM)), "{what}: {result:?}");
    }
    assert_eq!(fs::read(dir.path().join("private/f")).unwrap(), b"secret");
}

/// Update commits are not checked against a peer's rights, so a client limited to one user gets a recall instead, and
/// looks the name up again with that user's rights.
#[test]
fn client_that_is_not_vouched_for_gets_recalls_instead_of_updates() {
    if !needs_root("client_that_is_not_vouched_for_gets_recalls_instead_of_updates") {
        return;
    }
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for (name, mode) in [("public", 0o755), ("private", 0o700)] {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::set_permissions(dir.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut exports = Exports::default();
    exports.add(format!("world={}", dir.path().display()).as_ref()).unwrap();
    let options = ServerOptions { exports, ..ServerOptions::new(state.path().to_owned()) };
    let server = Server::new(options).unwrap();
    let mut root = Client::connect(&server, dir.path(), Term::Session);
    let (public, private) = (root.place("public"), root.place("private"));
    let mut user = Client::wanting(user_link(&server, 4_000), Path::new("world"), Term::Session, UPDATES);
    // Failed lookups leave no grant behind, even concurrent ones.
    let looks: Vec<_> =
        (0..8).map(|_| user.send(Call::Lookup { dir: private.clone(), name: name("x") })).collect();
    for look in looks {
        assert_eq!(user.answer(look).result, Err(Errno::ACCES));
    }
    assert!(root.call(create(&private, "x")).result.is_ok());
    user.list(&public);
    root.send(create(&public, "x"));
    let told = user.wait(|events| {
        let at =
            events.iter().position(|event| matches!(event, Event::Recall(_) | Event::UpdatePrepare(_)))?;
        Some(events.remove(at))
    });
    assert!(matches!(&told, Event::Recall(recall) if recall.node == public.node), "{told:?}");
}

fn as_user(server: &Arc<Server>, path: &Path, uid: u32) -> Client {
    Client::over(user_link(server, uid), path, Term::Session, 1 << 45)
}
