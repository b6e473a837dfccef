//! Exports that contain other filesystems.

use crate::common::client::Client;
use crate::common::*;
use nigh_remote::Event;
use nigh_server::{Server, ServerOptions};
use nigh_types::*;
use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A mount that is unmounted on drop.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn mount(args: &[&str], at: &Path) -> Option<Mounted> {
    fs::create_dir_all(at).unwrap();
    let done = Command::new("mount").args(args).arg(at).output();
    done.is_ok_and(|o| o.status.success()).then(|| Mounted(at.to_owned()))
}

#[test]
fn nested_tmpfs_has_distinct_ids_and_can_be_unmounted() {
    if !needs_root("a_nested_tmpfs_has_ids_of_its_own") {
        return;
    }
    let x = Exported::new();
    let Some(first) = mount(&["-t", "tmpfs", "none"], &x.path("a")) else {
        return println!("SKIPPED: cannot mount a tmpfs");
    };
    let _second = mount(&["-t", "tmpfs", "none"], &x.path("b")).unwrap();
    for dir in ["a", "b"] {
        fs::create_dir(x.path(&format!("{dir}/sub"))).unwrap();
        fs::write(x.path(&format!("{dir}/sub/f")), dir).unwrap();
    }
    let nodes = ["a", "b", "a/sub", "b/sub", "a/sub/f", "b/sub/f"].map(|path| x.place(path));
    assert!(nodes.iter().all(|place| place.node.ino >> 63 == 1));
    let distinct: std::collections::BTreeSet<_> = nodes.iter().map(|place| place.node.ino).collect();
    assert_eq!(distinct.len(), nodes.len());
    assert_eq!(x.read(&nodes[4], None).unwrap(), b"a");
    assert_eq!(x.read(&nodes[5], None).unwrap(), b"b");
    assert!(x.attr(&NodeRef::without_hint(nodes[2].node)).is_ok());
    let listed: Vec<_> = x.list(&x.top()).into_iter().map(|(_, entry)| entry.id).collect();
    assert!(listed.contains(&nodes[0].node) && listed.contains(&nodes[1].node));
    // A names-only listing has equal inode numbers; for a mount point it has the number of the covered directory.
    let numbers =
        |dir: NodeRef| -> Vec<u64> { x.dirents(&dir).into_iter().map(|dirent| dirent.ino).collect() };
    assert_eq!(numbers(nodes[0].clone()), [nodes[2].node.ino]);
    assert_eq!(numbers(nodes[2].clone()), [nodes[4].node.ino]);
    assert!(numbers(x.top()).iter().all(|ino| ino >> 63 == 0));
    let call = Call::Link { node: nodes[4].clone(), dir: x.top(), name: name("l") };
    assert_eq!(x.call(call), Err(Errno::XDEV));
    // Descriptors of the server do not keep the mount busy.
    let plain = Command::new("umount").arg(&first.0).output().unwrap();
    assert!(plain.status.success(), "{plain:?}");
    assert_eq!(x.attr(&nodes[2]), Err(Errno::STALE));
    assert!(x.place("a").node.ino >> 63 == 0);
}

#[test]
fn ids_of_a_nested_filesystem_survive_remounting_under_another_device_number() {
    if !needs_root("ids_of_a_nested_filesystem_survive_remounting") {
        return;
    }
    let x = Exported::new();
    let images = tempfile::tempdir().unwrap();
    let make = |name: &str| {
        let image = images.path().join(name);
        fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
        let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image).output();
        made.is_ok_and(|o| o.status.success()).then_some(image)
    };
    let (Some(one), Some(two)) = (make("one"), make("two")) else {
        return println!("SKIPPED: no mkfs.ext4");
    };
    let loop_mount = |image: &Path, at: &str| mount(&["-o", "loop", image.to_str().unwrap()], &x.path(at));
    let (before, other) = {
        let Some(_one) = loop_mount(&one, "one") else {
            return println!("SKIPPED: cannot mount a loop device");
        };
        let _two = loop_mount(&two, "two").unwrap();
        fs::write(x.path("one/f"), "").unwrap();
        fs::write(x.path("two/f"), "").unwrap();
        (x.place("one/f").node, x.place("two/f").node)
    };
    assert_ne!(before.ino, other.ino);
    let x = x.reopen();
    let loop_mount = |image: &Path, at: &str| mount(&["-o", "loop", image.to_str().unwrap()], &x.path(at));
    let _two = loop_mount(&two, "two").unwrap();
    assert_eq!(x.place("two/f").node, other, "met in another order");
    let _one = loop_mount(&one, "one").unwrap();
    assert_eq!(x.place("one/f").node, before);
}

#[test]
fn subvolumes_have_ids_of_their_own() {
    if !needs_root("subvolumes_have_ids_of_their_own") {
        return;
    }
    let images = tempfile::tempdir().unwrap();
    let image = images.path().join("btrfs");
    fs::File::create(&image).unwrap().set_len(256 << 20).unwrap();
    let run = |program: &str, args: &[&str]| {
        Command::new(program).args(args).output().is_ok_and(|o| o.status.success())
    };
    if !run("mkfs.btrfs", &["-q", image.to_str().unwrap()]) {
        return println!("SKIPPED: no mkfs.btrfs");
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(_mounted) = mount(&["-o", "loop", image.to_str().unwrap()], dir.path()) else {
        return println!("SKIPPED: cannot mount btrfs");
    };
    for sub in ["s", "t"] {
        assert!(run("btrfs", &["subvolume", "create", dir.path().join(sub).to_str().unwrap()]));
        fs::write(dir.path().join(sub).join("f"), sub).unwrap();
    }
    fs::write(dir.path().join("f"), "").unwrap();
    let x = Exported::of(dir);
    let ids = |x: &Exported| ["f", "s", "t", "s/f", "t/f"].map(|path| x.place(path).node);
    let before = ids(&x);
    assert_eq!(before.iter().map(|id| id.ino).collect::<std::collections::BTreeSet<_>>().len(), 5);
    assert!(before[0].ino >> 63 == 0 && before[1..].iter().all(|id| id.ino >> 63 == 1));
    let x = x.reopen();
    let _ = x.place("t/f");
    assert_eq!(ids(&x), before);
    let place = x.place("s/f");
    assert!(x.attr(&NodeRef::without_hint(place.path_hint.unwrap().0)).is_ok());
    drop(x.export);
}

#[test]
fn an_overlay_can_be_exported() {
    if !needs_root("an_overlay_can_be_exported") {
        return;
    }
    let layers = tempfile::tempdir().unwrap();
    // A filesystem of its own for the layers: they may not be on an overlay.
    let Some(_layers) = mount(&["-t", "tmpfs", "none"], layers.path()) else {
        return println!("SKIPPED: cannot mount a tmpfs");
    };
    let path = |name: &str| layers.path().join(name).to_str().unwrap().to_owned();
    for dir in ["lower", "upper", "work"] {
        fs::create_dir(path(dir)).unwrap();
    }
    fs::write(layers.path().join("lower/f"), "low").unwrap();
    let options = format!("lowerdir={},upperdir={},workdir={}", path("lower"), path("upper"), path("work"));
    let dir = tempfile::tempdir().unwrap();
    let Some(_overlay) = mount(&["-t", "overlay", "overlay", "-o", &options], dir.path()) else {
        return println!("SKIPPED: cannot mount an overlay");
    };
    let x = Exported::of(dir);
    let f = x.place("f");
    let flags = WriteFlags::default();
    let write = Call::Write { node: f.clone(), handle: None, offset: 0, data: b"up!".to_vec(), flags };
    assert_eq!(x.call(write), Ok(Reply::Written { offset: 0, count: 3 }));
    assert_eq!(fs::read(layers.path().join("upper/f")).unwrap(), b"up!");
    assert_eq!(x.place("f").node, f.node);
    assert_eq!(x.read(&f, None).unwrap(), b"up!");
    let given_up = x.export.session(&x.files).unwrap().guarantees.unsupported;
    assert!(given_up.iter().any(|lacking| lacking.name == "S4" && lacking.why.contains("overlayfs")));
}

#[test]
fn successive_mounts_on_one_mount_point_have_distinct_ids() {
    if !needs_root("successive_mounts_on_one_mount_point_have_distinct_ids") {
        return;
    }
    let x = Exported::new();
    let mut nodes = Vec::new();
    for _ in 0..3 {
        let Some(_mounted) = mount(&["-t", "tmpfs", "none"], &x.path("m")) else {
            return println!("SKIPPED: cannot mount a tmpfs");
        };
        fs::write(x.path("m/f"), "").unwrap();
        nodes.push([x.place("m").node.ino, x.place("m/f").node.ino]);
        // Not a lazy unmount, so that its device number is free again.
        assert!(Command::new("umount").arg(x.path("m")).status().unwrap().success());
    }
    let distinct: std::collections::BTreeSet<_> = nodes.iter().flatten().collect();
    assert_eq!(distinct.len(), 6, "{nodes:?}");
}

#[test]
fn exports_of_one_directory_use_their_own_mounts_and_share_leases() {
    if !needs_root("exports_of_one_directory_go_through_their_own_mounts") {
        return;
    }
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = |text: &str| dir.path().join(text);
    let Some(_disk) = mount(&["-t", "tmpfs", "none"], &path("disk")) else {
        return println!("SKIPPED: cannot mount a tmpfs");
    };
    fs::create_dir(path("disk/d")).unwrap();
    let source = path("disk/d");
    let source = source.to_str().unwrap();
    let _rw = mount(&["--bind", source], &path("rw")).unwrap();
    let _ro = mount(&["--bind", source], &path("ro")).unwrap();
    let remount = Command::new("mount").args(["-o", "remount,bind,ro"]).arg(path("ro")).status();
    assert!(remount.unwrap().success());
    let server = Server::new(ServerOptions::new(state.path().to_owned())).unwrap();
    let mut rw = Client::connect(&server, &path("rw"), Term::Session);
    let root = rw.root();
    let mut ro = Client::connect(&server, &path("ro"), Term::Session);
    assert_eq!(ro.root(), root);
    let mkdir = |text: &str| Call::Mkdir { dir: root.clone(), name: name(text), mode: 0o755, umask: 0 };
    assert_eq!(ro.call(mkdir("a")).result, Err(Errno::ROFS));
    assert!(rw.call(mkdir("b")).result.is_ok());
    assert_eq!(ro.entry(&root, "b").id, rw.entry(&root, "b").id);
    assert!(ro.list(&root).1.iter().any(|grant| grant.covers == LeaseScope::Directory));
    let call = rw.send(mkdir("c"));
    assert!(!rw.is_answered(call), "what the other holds is asked back");
    ro.wait(|events| events.iter().any(|e| matches!(e, Event::Recall(_))).then_some(()));
    ro.give_back();
    assert!(rw.answer(call).result.is_ok());
    // The order of attaching makes no difference.
    rw.leave();
    ro.leave();
    let mut ro = Client::connect(&server, &path("ro"), Term::Session);
    assert_eq!(ro.root(), root);
    let mut rw = Client::connect(&server, &path("rw"), Term::Session);
    assert_eq!(rw.root(), root);
    assert_eq!(ro.call(mkdir("d")).result, Err(Errno::ROFS));
    ro.obliging = true;
    assert!(rw.call(mkdir("d")).result.is_ok());
}

/// A FUSE mount whose daemon is gone.
fn dead_mount(at: &Path) -> Option<Mounted> {
    fs::create_dir_all(at).unwrap();
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").ok()?;
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    let path = CString::new(at.to_str().unwrap()).unwrap();
    let options = CString::new(options).unwrap();
    // SAFETY: all four are strings that live until the call returns.
    let done =
        unsafe { libc::mount(c"dead".as_ptr(), path.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast()) };
    (done == 0).then(|| Mounted(at.to_owned()))
}

#[test]
fn dead_mount_does_not_hide_sibling_names() {
    if !needs_root("dead_mount_does_not_hide_sibling_names") {
        return;
    }
    let x = Exported::new();
    for text in ["a", "b"] {
        fs::write(x.path(text), "").unwrap();
    }
    let Some(_dead) = dead_mount(&x.path("mnt")) else {
        return println!("SKIPPED: cannot mount a FUSE filesystem");
    };
    assert_eq!(fs::metadata(x.path("mnt")).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
    let parts = x.responses(&me(), Call::List { dir: x.top() });
    assert!(parts.iter().all(|part| part.grants.iter().all(|grant| grant.covers != LeaseScope::Directory)));
    let mut names: Vec<_> = x.list(&x.top()).into_iter().map(|(name, _)| name).collect();
    names.sort();
    assert_eq!(names, [name("a"), name("b")]);
    assert_eq!(x.call(Call::Lookup { dir: x.top(), name: name("mnt") }), Err(Errno::NOTCONN));
}

#[test]
fn late_noticed_dead_mount_recalls_the_directory_lease() {
    if !needs_root("late_noticed_dead_mount_recalls_the_directory_lease") {
        return;
    }
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::new(ServerOptions::new(state.path().to_owned())).unwrap();
    let mut client = Client::connect(&server, dir.path(), Term::Session);
    let key = client.session().cookie_key;
    let mut names: Vec<String> = (0..8_000).map(|n| format!("name-{n}")).collect();
    names.sort_by_key(|name| key.cookie(name.as_bytes()));
    let last = names.pop().unwrap();
    for name in &names {
        fs::write(dir.path().join(name), "").unwrap();
    }
    let Some(_dead) = dead_mount(&dir.path().join(last)) else {
        return println!("SKIPPED: cannot mount a FUSE filesystem");
    };
    let root = client.root();
    // The server may notice the mount during the listing; then it grants nothing yet.
    eventually("it was given before that was known", || {
        client.give_back();
        let (entries, grants) = client.list(&root);
        assert_eq!(entries.len(), names.len());
        grants.iter().any(|grant| grant.covers == LeaseScope::Directory)
    });
    client.wait(|events| events.iter().any(|e| matches!(e, Event::Recall(_))).then_some(()));
    client.give_back();
}

#[test]
fn file_that_a_mount_hides_is_not_found_by_number() {
    let x = Exported::new();
    if !needs_root("file_that_a_mount_hides_is_not_found_by_number")
        || !x.export.session(&x.files).unwrap().supports.lookup_number
    {
        return println!("SKIPPED: needs a filesystem whose inodes are opened by number");
    }
    let hides = tempfile::tempdir().unwrap();
    fs::create_dir_all(x.path("a/b")).unwrap();
    fs::create_dir(x.path("c")).unwrap();
    for file in ["a/b/f", "c/g"] {
        fs::write(x.path(file), "").unwrap();
    }
    let (f, g) = (x.place("a/b/f").node, x.place("c/g").node);
    let find = |node: NodeId| x.call(Call::LookupNumber { ino: node.ino }).map(drop);
    assert_eq!([find(f), find(g)], [Ok(()), Ok(())]);
    let source = hides.path().to_str().unwrap();
    let Some(over) = mount(&["--bind", source], &x.path("a")) else {
        return println!("SKIPPED: cannot mount");
    };
    assert_eq!(find(f), Err(Errno::STALE), "above its directory");
    drop(over);
    let over = mount(&["--bind", source], &x.path("a/b")).unwrap();
    assert_eq!(find(f), Err(Errno::STALE), "over its directory");
    drop(over);
    assert_eq!(find(f), Ok(()));
    // The mount over a name may not respond, so the server does not access it.
    let (from, at) = (x.path("c/g"), x.path("c/g"));
    assert!(Command::new("mount").arg("--bind").args([&from, &at]).status().unwrap().success());
    let over = Mounted(at);
    assert_eq!(find(g), Err(Errno::STALE), "over the file");
    drop(over);
    assert_eq!(find(g), Ok(()));
}
