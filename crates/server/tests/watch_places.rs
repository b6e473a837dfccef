//! Changes by others on each kind of filesystem, below changing mounts, and beyond the limit of marks.

mod common;

use common::client::Client;
use common::other::{self, Other};
use common::world::World;
use common::{eventually, name, needs_root};
use nigh_native::TRUSTS_WATCH;
use nigh_server::{LeaseConfig, WatchMethod};
use nigh_types::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

const LIMIT: Term = Term::Limited(Span::from_secs(5));

#[test]
fn another_process() {
    other::serve();
}

fn client(world: &World, path: &Path) -> Client {
    let stream = world.server.serve_in_process().unwrap();
    Client::wanting(stream, path, LIMIT, TRUSTS_WATCH)
}

/// A mount that is unmounted on drop.
struct Mounted(PathBuf);

impl Mounted {
    /// Fails if the mount stays in use for 5 s: a call or an event that the server is at work on may have it open.
    fn unmount(self) {
        let give_up = Instant::now() + Duration::from_secs(5);
        loop {
            let done = Command::new("umount").arg(&self.0).output().unwrap();
            if done.status.success() {
                return;
            }
            assert!(Instant::now() < give_up, "{done:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-q", "-l"]).arg(&self.0).status();
    }
}

fn mount(args: &[&str], at: &Path) -> Option<Mounted> {
    fs::create_dir_all(at).unwrap();
    let done = Command::new("mount").args(args).arg(at).output();
    done.is_ok_and(|o| o.status.success()).then(|| Mounted(at.to_owned()))
}

/// Mounts a filesystem of this kind; `None` if that is impossible.
fn filesystem(kind: &str, below: &Path) -> Option<Mounted> {
    let at = below.join(kind);
    match kind {
        "tmpfs" => return mount(&["-t", "tmpfs", "none"], &at),
        "overlay" => {
            let parts = ["lower", "upper", "work"].map(|part| below.join(part));
            parts.iter().for_each(|part| fs::create_dir_all(part).unwrap());
            let [lower, upper, work] = parts.map(|part| part.display().to_string());
            let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
            return mount(&["-t", "overlay", "none", "-o", &options], &at);
        }
        _ => {}
    }
    let image = below.join(format!("{kind}.img"));
    fs::File::create(&image).unwrap().set_len(320 << 20).unwrap();
    let made = Command::new(format!("mkfs.{kind}")).arg("-q").arg(&image).output();
    if !made.is_ok_and(|o| o.status.success()) {
        return None;
    }
    mount(&["-o", "loop", image.to_str().unwrap()], &at)
}

/// Waits for a recall.
fn recalled(client: &mut Client, node: NodeId, covers: LeaseScope, what: &str) {
    eventually(what, || {
        client.pump();
        client.recalls().iter().any(|recall| recall.node == node && recall.covers == covers)
    });
    client.give_back();
}

#[test]
fn each_local_filesystem_is_watched_in_each_way() {
    if !needs_root("each_local_filesystem_is_watched") {
        return;
    }
    let below = tempfile::tempdir().unwrap();
    let mut other = Other::start("another_process");
    for kind in ["tmpfs", "ext4", "xfs", "btrfs"] {
        let Some(mounted) = filesystem(kind, below.path()) else {
            println!("SKIPPED: {kind} cannot be mounted");
            continue;
        };
        for way in [WatchMethod::Best, WatchMethod::Objects] {
            let what = format!("{kind}, {way:?}");
            let world = World::with(|options| options.watch = way);
            let top = mounted.0.join(format!("{way:?}"));
            fs::create_dir_all(top.join("d/e")).unwrap();
            fs::write(top.join("d/f"), "12345678").unwrap();
            let mut client = client(&world, &top);
            let (d, f, e) = (client.place("d"), client.place("d/f"), client.place("d/e"));
            for path in ["d/new", "d/newer"] {
                assert!(client.list(&d).1.iter().all(|grant| grant.term == Term::Session), "{what}");
                other.run(&format!("create {}", top.join(path).display()));
                recalled(&mut client, d.node, LeaseScope::Directory, &what);
            }
            assert_eq!(client.read(&f).1[0].term, Term::Session, "{what}");
            other.run(&format!("append {} more", top.join("d/f").display()));
            recalled(&mut client, f.node, LeaseScope::Data, &what);
            client.attr(&e);
            other.run(&format!("chmod {} 711", top.join("d/e").display()));
            recalled(&mut client, e.node, LeaseScope::Attributes, &what);
            let status = world.server.status();
            let wanted = if way == WatchMethod::Best { "filesystem" } else { "objects" };
            assert_eq!(status["watch"][0]["way"], wanted, "{what}: {status}");
            client.leave();
        }
        eventually("nothing keeps it busy", || {
            Command::new("umount").arg(&mounted.0).output().unwrap().status.success()
        });
    }
}

#[test]
fn grants_on_overlayfs_have_a_time_limit_with_a_reason() {
    if !needs_root("overlayfs_is_not_watched") {
        return;
    }
    let below = tempfile::tempdir().unwrap();
    let tmpfs = filesystem("tmpfs", below.path()).expect("a tmpfs can be mounted");
    let Some(overlay) = filesystem("overlay", &tmpfs.0) else {
        return println!("SKIPPED: overlayfs cannot be mounted");
    };
    let world = World::new();
    fs::create_dir(overlay.0.join("d")).unwrap();
    let mut client = client(&world, &overlay.0);
    let d = client.place("d");
    assert!(client.list(&d).1.iter().all(|grant| grant.term == LIMIT));
    assert!(
        client.session().guarantees.staleness_bound.contains("overlayfs"),
        "{}",
        client.session().guarantees.staleness_bound
    );
    drop(client);
    drop(overlay);
}

#[test]
fn mount_inside_an_export_is_noticed_and_can_be_unmounted() {
    if !needs_root("what_is_mounted_inside_an_export") {
        return;
    }
    let mut other = Other::start("another_process");
    for way in [WatchMethod::Best, WatchMethod::Objects] {
        let world = World::with(|options| {
            options.watch = way;
            // Otherwise a directory that changes again soon is not granted.
            options.leases = LeaseConfig { young: Span::ZERO, ..options.leases };
        });
        let mut client = client(&world, world.dir.path());
        let (d, before) = (client.place("d"), client.place("d/e"));
        client.list(&d);
        let at = world.dir.path().join("d/e");
        for round in ["once", "again"] {
            let Some(inner) = mount(&["-t", "tmpfs", "none"], &at) else {
                return println!("SKIPPED: cannot mount a tmpfs");
            };
            recalled(&mut client, d.node, LeaseScope::Directory, "the name leads elsewhere");
            let there = client.place("d/e");
            assert_ne!(there.node, before.node);
            for path in ["x", "y"] {
                let grants = client.list(&there).1;
                assert!(grants.iter().all(|grant| grant.term == Term::Session), "{round}: {grants:?}");
                other.run(&format!("create {}", at.join(path).display()));
                recalled(&mut client, there.node, LeaseScope::Directory, path);
            }
            client.list(&there);
            client.list(&d);
            inner.unmount();
            recalled(&mut client, d.node, LeaseScope::Directory, "it is as before");
            assert_eq!(client.place("d/e").node, before.node);
            client.list(&d);
        }
    }
}

/// A user that may mount filesystems chooses the mount point's name.
#[test]
fn mount_point_with_non_utf8_name_does_not_hide_other_mounts() {
    use std::os::unix::ffi::OsStrExt;
    if !needs_root("a_mount_whose_name_is_no_text") {
        return;
    }
    let below = tempfile::tempdir().unwrap();
    let odd = mount(&["-t", "tmpfs", "none"], &below.path().join(std::ffi::OsStr::from_bytes(b"\xff")));
    let world = World::new();
    let mut client = client(&world, world.dir.path());
    let d = client.place("d");
    client.list(&d);
    let inner = mount(&["-t", "tmpfs", "none"], &world.dir.path().join("d/e"));
    if odd.is_none() || inner.is_none() {
        return println!("SKIPPED: cannot mount a tmpfs");
    }
    recalled(&mut client, d.node, LeaseScope::Directory, "the name leads elsewhere");
}

/// Set in the child, which runs in a user namespace with few marks.
const FEW: &str = "NIGH_TEST_FEW_MARKS";

#[test]
fn marks_run_out() {
    if std::env::var_os(FEW).is_none() {
        let us = std::env::current_exe().unwrap();
        let script = "echo 20 > /proc/sys/user/max_fanotify_marks && exec unshare -U --map-user=1000 \
            --map-group=1000 \"$0\" marks_run_out --exact --nocapture";
        let few = Command::new("unshare").args(["-Ur", "sh", "-c", script]).arg(us).env(FEW, "1").output();
        let few = few.map(|done| (done.status.success(), String::from_utf8_lossy(&done.stdout).into_owned()));
        match few {
            Ok((true, said)) if said.contains("limited and not") => {}
            Ok((_, said)) if said.contains("panicked") || said.contains("FAILED") => panic!("{said}"),
            other => println!("SKIPPED: no user namespace of our own: {other:?}"),
        }
        return;
    }
    assert!(!common::is_root(), "an ordinary user of its namespace");
    let world = World::new();
    for nth in 0..40 {
        fs::create_dir(world.dir.path().join(format!("n{nth}"))).unwrap();
    }
    let mut client = client(&world, world.dir.path());
    let places: Vec<NodeRef> = (0..40).map(|nth| client.place(&format!("n{nth}"))).collect();
    let mut terms = Vec::new();
    for place in &places {
        let names = client.list(place).1.into_iter().find(|grant| grant.covers == LeaseScope::Directory);
        terms.push(names.unwrap().term);
    }
    let limited = terms.iter().filter(|term| **term == LIMIT).count();
    assert!((20..40).contains(&limited), "{terms:?}");
    let status = world.server.status();
    assert!(status["watch"][0]["unmarked"].as_u64().unwrap() > 0, "{status}");
    let mut other = Other::start("another_process");
    for (nth, _) in terms.iter().enumerate().filter(|(_, term)| **term == Term::Session) {
        other.run(&format!("create {}", world.dir.path().join(format!("n{nth}/x")).display()));
        recalled(&mut client, places[nth].node, LeaseScope::Directory, "what is marked is heard of");
    }
    // Marks of nodes without a lease are reused.
    client.leave();
    let mut client = self::client(&world, world.dir.path());
    client.obliging = true;
    let last = client.place("n39");
    eventually("there is room again", || {
        client.tick();
        client.list(&last).1.iter().all(|grant| grant.term == Term::Session)
    });
    println!("limited and not: {limited} of 40");
}

/// A name exchanged repeatedly while it is granted: the marked inode is the granted one.
#[test]
fn marks_match_grants_while_a_name_is_exchanged() {
    let world = World::with(|options| options.watch = WatchMethod::Objects);
    let mut client = client(&world, world.dir.path());
    client.obliging = true;
    let (one, two) = (world.dir.path().join("d/e"), world.dir.path().join("d2"));
    let mut swapper = Other::start("another_process");
    let mut other = Other::start("another_process");
    let d = client.place("d");
    for nth in 0..100 {
        for _ in 0..4 {
            swapper.tell(&format!("exchange {} {}", one.display(), two.display()));
        }
        let entry = client.call(Call::Lookup { dir: d.clone(), name: name("e") });
        let granted = match entry.result {
            Ok(Reply::Entry(Some(entry))) => entry.id,
            other => panic!("{other:?}"),
        };
        for _ in 0..4 {
            swapper.done();
        }
        let place = NodeRef::without_hint(granted);
        // The server may notice the exchanges only after the reply, and recall what it granted.
        client.obliging = false;
        let response = client.call(Call::GetAttr { node: place.clone() });
        if let Some(grant) = response.grants.first() {
            assert_eq!(grant.term, Term::Session);
            // Both directories are changed, one of which is the granted one.
            other.run(&format!("create {}", one.join(format!("x{nth}")).display()));
            other.run(&format!("create {}", two.join(format!("x{nth}")).display()));
            recalled(&mut client, granted, LeaseScope::Attributes, "what is granted is marked");
        }
        client.obliging = true;
    }
}
