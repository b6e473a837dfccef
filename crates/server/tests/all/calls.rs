//! Every call on an ordinary directory.

use crate::common::*;
use nigh_types::*;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};

#[test]
fn lookup_returns_targets_kinds_and_missing_names() {
    let x = Exported::new();
    fs::write(x.path("f"), "12345").unwrap();
    symlink("../nowhere", x.path("s")).unwrap();
    fs::create_dir(x.path("d")).unwrap();
    let f = x.entry(&x.top(), "f").unwrap();
    let on_disk = fs::metadata(x.path("f")).unwrap();
    assert_eq!(
        (f.id.ino, f.attr.size, f.attr.mode, f.attr.uid),
        (on_disk.ino(), 5, on_disk.mode(), on_disk.uid())
    );
    assert!(f.no_xattrs && f.target.is_none());
    assert_eq!(x.entry(&x.top(), "s").unwrap().target.as_deref(), Some(&b"../nowhere"[..]));
    assert_eq!(x.entry(&x.top(), "none"), None);
    assert_eq!(x.call(Call::Lookup { dir: x.place("f"), name: name("y") }), Err(Errno::NOTDIR));
    let d = x.response(Call::Lookup { dir: x.top(), name: name("d") });
    let covers: Vec<_> = d.grants.iter().map(|g| (g.node, g.covers)).collect();
    assert_eq!(covers, [(x.root, LeaseScope::Directory), (x.place("d").node, LeaseScope::Attributes)]);
    assert!(d.grants.iter().all(|g| g.term == Term::Limited(Span::from_secs(5)) && g.recallable));
}

#[test]
fn readlink_and_statfs_and_flags() {
    let x = Exported::new();
    symlink("/abs/olute", x.path("s")).unwrap();
    fs::write(x.path("f"), "").unwrap();
    assert_eq!(
        x.call(Call::ReadLink { node: x.place("s") }),
        Ok(Reply::Target(b"/abs/olute".as_slice().into()))
    );
    assert_eq!(x.call(Call::ReadLink { node: x.place("f") }), Err(Errno::INVAL));
    let Ok(Reply::Space(space)) = x.call(Call::StatFs { node: x.place("f") }) else { panic!() };
    assert!(space.block_size >= 512 && space.name_max == 255 && space.blocks >= space.blocks_free);
    match x.call(Call::GetFlags { node: x.place("f") }) {
        Ok(Reply::Flags(_)) | Err(Errno::NOTTY | Errno::OPNOTSUPP) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(x.call(Call::GetFlags { node: x.place("s") }), Err(Errno::NOTTY));
}

#[test]
fn xattrs_of_files_and_directories() {
    let x = Exported::new();
    fs::write(x.path("f"), "").unwrap();
    let f = x.place("f");
    let set = |name: &[u8], value: &[u8], flags| {
        x.call(Call::SetXattr {
            node: f.clone(),
            name: name.to_vec(),
            value: value.to_vec(),
            flags,
            kill_sgid: false,
        })
    };
    match set(b"user.a", b"1", 0) {
        Err(Errno::OPNOTSUPP) => return println!("SKIPPED: no user xattrs here"),
        other => assert!(matches!(other, Ok(Reply::Attr(id, _)) if id == f.node)),
    }
    assert_eq!(set(b"user.a", b"1", 1), Err(Errno::EXIST));
    assert_eq!(set(b"user.b", b"1", 2), Err(Errno::NODATA));
    assert!(set(b"user.empty", b"", 0).is_ok());
    let big = vec![7; 3000];
    assert!(set(b"user.big", &big, 0).is_ok());
    let Ok(Reply::Xattrs(all)) = x.call(Call::Xattrs { node: f.clone() }) else { panic!() };
    let mut items = all.items;
    items.retain(|(name, _)| name.starts_with(b"user."));
    items.sort();
    let item = |name: &str, value: &[u8]| (name.as_bytes().into(), Some(value.into()));
    assert_eq!(items, [item("user.a", b"1"), item("user.big", &big), item("user.empty", b"")]);
    assert_eq!(x.call(Call::Xattr { node: f.clone(), name: b"user.big".to_vec() }), Ok(Reply::Value(big)));
    assert_eq!(x.call(Call::Xattr { node: f.clone(), name: b"user.no".to_vec() }), Err(Errno::NODATA));
    assert!(!x.entry(&x.top(), "f").unwrap().no_xattrs);
    for one in ["user.a", "user.big", "user.empty"] {
        assert!(x.call(Call::RemoveXattr { node: f.clone(), name: one.into() }).is_ok());
    }
    assert!(x.entry(&x.top(), "f").unwrap().no_xattrs);
}

#[test]
fn xattrs_of_a_symlink_are_its_own() {
    if !needs_root("xattrs_of_a_symlink_are_its_own") {
        return;
    }
    let x = Exported::new();
    fs::write(x.path("f"), "").unwrap();
    symlink("f", x.path("s")).unwrap();
    let s = x.place("s");
    let set = Call::SetXattr {
        node: s.clone(),
        name: b"trusted.t".to_vec(),
        value: b"v".to_vec(),
        flags: 0,
        kill_sgid: false,
    };
    match x.call(set) {
        Err(Errno::OPNOTSUPP) => return println!("SKIPPED: no trusted xattrs here"),
        other => assert!(other.is_ok(), "{other:?}"),
    }
    assert_eq!(x.call(Call::Xattr { node: s, name: b"trusted.t".to_vec() }), Ok(Reply::Value(b"v".to_vec())));
    assert_eq!(x.call(Call::Xattr { node: x.place("f"), name: b"trusted.t".to_vec() }), Err(Errno::NODATA));
    assert!(!x.entry(&x.top(), "s").unwrap().no_xattrs);
}

#[test]
fn create_write_read_and_truncate() {
    let x = Exported::new();
    let (f, handle) = x.create(&x.top(), "f", 0o666);
    assert_eq!(fs::metadata(x.path("f")).unwrap().mode() & 0o777, 0o644);
    let write = |offset, data: &[u8], append| {
        let flags = WriteFlags { append, ..WriteFlags::default() };
        x.response(Call::Write { node: f.clone(), handle: Some(handle), offset, data: data.to_vec(), flags })
    };
    let wrote = write(2, b"cdef", false);
    assert_eq!(wrote.result, Ok(Reply::Written { offset: 2, count: 4 }));
    assert_eq!(wrote.after, [(f.node, x.attr(&f).unwrap())]);
    assert_eq!(write(0, b"ab", false).result, Ok(Reply::Written { offset: 0, count: 2 }));
    assert_eq!(write(0, b"gh", true).result, Ok(Reply::Written { offset: 6, count: 2 }));
    assert_eq!(x.read(&f, Some(handle)).unwrap(), b"abcdefgh");
    assert_eq!(x.read(&f, None).unwrap(), b"abcdefgh");
    let size = |size, handle| {
        x.call(Call::SetAttr {
            node: f.clone(),
            handle,
            set: SetAttr { size: Some(size), ..SetAttr::default() },
        })
    };
    fs::set_permissions(x.path("f"), fs::Permissions::from_mode(0o444)).unwrap();
    assert!(matches!(size(3, Some(handle)), Ok(Reply::Attr(_, attr)) if attr.size == 3));
    assert_eq!(fs::read(x.path("f")).unwrap(), b"abc");
    assert_eq!(
        x.call(Call::Fsync { node: f.clone(), handle: Some(handle), data_only: false }),
        Ok(Reply::Done)
    );
    assert_eq!(x.call(Call::Fsync { node: x.top(), handle: None, data_only: true }), Ok(Reply::Done));
    assert!(x.responses(&me(), Call::Release { handles: vec![handle] }).is_empty());
    assert_eq!(
        x.call(Call::Read { node: f.clone(), handle: Some(handle), offset: 0, length: 1 }),
        Err(Errno::BADF)
    );
    assert_eq!(x.read(&f, None).unwrap(), b"abc");
}

#[test]
fn an_existing_file_is_opened_and_truncated_by_create_unless_exclusive() {
    let x = Exported::new();
    fs::write(x.path("f"), "old").unwrap();
    fs::create_dir(x.path("d")).unwrap();
    symlink("f", x.path("s")).unwrap();
    let create = |text: &str, exclusive, truncate| {
        let access = Access { truncate, ..BOTH };
        x.call(Call::Create { dir: x.top(), name: name(text), mode: 0o600, umask: 0, exclusive, access })
    };
    assert_eq!(create("f", true, false), Err(Errno::EXIST));
    let Ok(Reply::Created { entry, existed: true, handle: Some(_) }) = create("f", false, false) else {
        panic!()
    };
    assert_eq!((entry.id, entry.attr.size), (x.place("f").node, 3));
    let Ok(Reply::Created { entry, existed: true, .. }) = create("f", false, true) else { panic!() };
    assert_eq!(entry.attr.size, 0);
    assert_eq!(create("d", false, false), Err(Errno::ISDIR));
    assert_eq!(create("s", false, false), Err(Errno::STALE));
}

#[test]
fn holes_are_found_and_made() {
    let x = Exported::new();
    let (f, handle) = x.create(&x.top(), "f", 0o600);
    let data = vec![1; 4096];
    for offset in [0, 1 << 33] {
        let flags = WriteFlags::default();
        let call = Call::Write { node: f.clone(), handle: Some(handle), offset, data: data.clone(), flags };
        assert_eq!(x.call(call), Ok(Reply::Written { offset, count: 4096 }));
    }
    let seek = |offset, data| x.call(Call::Seek { node: f.clone(), handle: None, offset, data });
    assert_eq!(seek(8192, true), Ok(Reply::Offset(1 << 33)));
    assert!(matches!(seek(0, false), Ok(Reply::Offset(at)) if (4096..=1 << 33).contains(&at)));
    assert_eq!(seek((1 << 33) + 4096, true), Err(Errno::NXIO));
    let punch = Call::Fallocate { node: f.clone(), handle: Some(handle), mode: 3, offset: 0, length: 4096 };
    match x.call(punch) {
        Ok(Reply::Attr(id, _)) => {
            assert_eq!(id, f.node);
            assert_eq!(seek(0, true), Ok(Reply::Offset(1 << 33)));
        }
        other => assert_eq!(other, Err(Errno::OPNOTSUPP)),
    }
}

#[test]
fn ranges_are_copied_also_between_filesystems() {
    let x = Exported::new();
    let data: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    fs::write(x.path("from"), &data).unwrap();
    let (to, handle) = x.create(&x.top(), "to", 0o600);
    let call = Call::CopyRange {
        from: x.place("from"),
        from_handle: None,
        from_offset: 100,
        to: to.clone(),
        to_handle: Some(handle),
        to_offset: 50,
        length: u64::MAX,
    };
    let copied = x.response(call);
    assert_eq!(copied.result, Ok(Reply::Written { offset: 50, count: 2_999_900 }));
    assert_eq!(copied.after, [(to.node, x.attr(&to).unwrap())]);
    assert_eq!(&fs::read(x.path("to")).unwrap()[50..], &data[100..]);
}

#[test]
fn tmpfile_has_no_name_until_it_is_linked() {
    let x = Exported::new();
    let made = x.call(Call::Tmpfile { dir: x.top(), mode: 0o640, umask: 0, access: BOTH });
    let (entry, handle) = match made {
        Ok(Reply::Created { entry, handle: Some(handle), .. }) => (entry, handle),
        Err(Errno::OPNOTSUPP) => return println!("SKIPPED: no O_TMPFILE here"),
        other => panic!("{other:?}"),
    };
    assert_eq!((entry.attr.nlink, entry.attr.mode), (0, 0o100_640));
    let file = NodeRef::without_hint(entry.id);
    assert!(x.list(&x.top()).is_empty());
    let write = Call::Write {
        node: file.clone(),
        handle: Some(handle),
        offset: 0,
        data: b"hi".to_vec(),
        flags: WriteFlags::default(),
    };
    assert!(x.call(write).is_ok());
    assert_eq!(x.attr(&file).unwrap().size, 2);
    let linked = x.response(Call::Link { node: file.clone(), dir: x.top(), name: name("named") });
    assert!(
        matches!(linked.result, Ok(Reply::Created { entry, .. }) if entry.id == file.node && entry.attr.nlink == 1)
    );
    assert_eq!(fs::read(x.path("named")).unwrap(), b"hi");
}

#[test]
fn fifos_sockets_directories_and_symlinks_are_made_but_never_opened() {
    let x = Exported::new();
    let make = |text: &str, kind| {
        x.call(Call::Mknod { dir: x.top(), name: name(text), kind, mode: 0o666, umask: 0o022, rdev: 0 })
    };
    assert!(
        make("fifo", Kind::Fifo).is_ok()
            && make("sock", Kind::Socket).is_ok()
            && make("reg", Kind::File).is_ok()
    );
    assert!(fs::symlink_metadata(x.path("fifo")).unwrap().file_type().is_fifo());
    assert!(fs::symlink_metadata(x.path("sock")).unwrap().file_type().is_socket());
    assert_eq!(fs::metadata(x.path("reg")).unwrap().mode(), 0o100_644);
    assert_eq!(make("dir", Kind::Directory), Err(Errno::INVAL));
    let made = x.response(Call::Mkdir { dir: x.top(), name: name("dir"), mode: 0o1777, umask: 0o027 });
    assert!(matches!(made.result, Ok(Reply::Created { entry, .. }) if entry.attr.mode == 0o041_750));
    assert_eq!(made.after, [(x.root, x.attr(&x.top()).unwrap())]);
    let linked = x.call(Call::Symlink { dir: x.top(), name: name("sym"), target: b"any\xffwhere".to_vec() });
    assert!(
        matches!(linked, Ok(Reply::Created { entry, .. }) if entry.target.as_deref() == Some(b"any\xffwhere"))
    );
    for (text, errno) in
        [("fifo", Errno::NXIO), ("sock", Errno::NXIO), ("dir", Errno::ISDIR), ("sym", Errno::LOOP)]
    {
        assert_eq!(x.call(Call::Open { node: x.place(text), access: READ }), Err(errno), "{text}");
        assert_eq!(x.read(&x.place(text), None), Err(errno), "{text}");
    }
    if is_root() {
        let call = Call::Mknod {
            dir: x.top(),
            name: name("dev"),
            kind: Kind::CharDevice,
            mode: 0o600,
            umask: 0,
            rdev: 0x0103,
        };
        match x.call(call) {
            Ok(Reply::Created { entry, .. }) => assert_eq!(entry.attr.rdev, 0x0103),
            other => assert_eq!(other, Err(Errno::PERM)),
        }
    }
}

#[test]
fn links_unlink_and_the_last_link_kept_open() {
    let x = Exported::new();
    fs::write(x.path("a"), "data").unwrap();
    let a = x.place("a");
    let linked = x.response(Call::Link { node: a.clone(), dir: x.top(), name: name("b") });
    assert!(matches!(&linked.result, Ok(Reply::Created { entry, .. }) if entry.attr.nlink == 2));
    assert!(linked.grants.iter().any(|g| g.covers == LeaseScope::Attributes && g.node == a.node));
    // `keep` names an inode that does not have this name, so this unlink returns no handle.
    let gone = x.response(Call::Unlink { dir: x.top(), name: name("b"), keep: Some(x.root) });
    assert_eq!(gone.result, Ok(Reply::Removed { node: a.node, pinned: None }));
    assert!(gone.after.contains(&(a.node, x.attr(&a).unwrap())));
    let gone = x.response(Call::Unlink { dir: x.top(), name: name("a"), keep: Some(a.node) });
    let Ok(Reply::Removed { pinned: Some(handle), .. }) = gone.result else { panic!() };
    assert!(gone.after.iter().any(|(id, attr)| *id == a.node && attr.nlink == 0));
    assert_eq!(x.read(&a, Some(handle)).unwrap(), b"data");
    let write = Call::Write {
        node: a.clone(),
        handle: Some(handle),
        offset: 4,
        data: b"+".to_vec(),
        flags: WriteFlags::default(),
    };
    assert!(x.call(write).is_ok());
    assert_eq!(x.attr(&a).unwrap().size, 5);
    x.responses(&me(), Call::Release { handles: vec![handle] });
    assert_eq!(x.attr(&a), Err(Errno::STALE));
    fs::create_dir(x.path("d")).unwrap();
    assert_eq!(x.call(Call::Unlink { dir: x.top(), name: name("d"), keep: None }), Err(Errno::ISDIR));
    assert_eq!(x.call(Call::Unlink { dir: x.top(), name: name("none"), keep: None }), Err(Errno::NOENT));
}

#[test]
fn rmdir_wants_an_empty_directory() {
    let x = Exported::new();
    fs::create_dir_all(x.path("d/e")).unwrap();
    fs::write(x.path("f"), "").unwrap();
    let rmdir = |text: &str| x.response(Call::Rmdir { dir: x.top(), name: name(text) });
    assert_eq!(rmdir("d").result, Err(Errno::NOTEMPTY));
    assert_eq!(rmdir("f").result, Err(Errno::NOTDIR));
    let d = x.place("d");
    fs::remove_dir(x.path("d/e")).unwrap();
    let gone = rmdir("d");
    assert_eq!(gone.result, Ok(Reply::Removed { node: d.node, pinned: None }));
    assert!(gone.after.iter().any(|(id, attr)| *id == d.node && attr.nlink == 0));
    assert!(gone.after.contains(&(x.root, x.attr(&x.top()).unwrap())));
}

#[test]
fn rename_replaces_refuses_and_exchanges() {
    let x = Exported::new();
    for text in ["a", "b", "c"] {
        fs::write(x.path(text), text).unwrap();
    }
    fs::create_dir_all(x.path("d/sub")).unwrap();
    let rename = |from: &str, to_dir: NodeRef, to: &str, no_replace, exchange, keep| {
        x.response(Call::Rename {
            from: x.top(),
            name: name(from),
            to: to_dir,
            new_name: name(to),
            no_replace,
            exchange,
            whiteout: false,
            keep,
        })
    };
    let (a, b, c, d) = (x.place("a").node, x.place("b").node, x.place("c").node, x.place("d"));
    assert_eq!(rename("a", x.top(), "b", true, false, None).result, Err(Errno::EXIST));
    let done = rename("a", x.top(), "b", false, true, None);
    assert_eq!(done.result, Ok(Reply::Renamed { moved: a, replaced: Some(b), pinned: None, whiteout: None }));
    assert_eq!(
        (fs::read(x.path("a")).unwrap(), fs::read(x.path("b")).unwrap()),
        (b"b".to_vec(), b"a".to_vec())
    );
    let done = rename("c", x.top(), "a", false, false, Some(b));
    let Ok(Reply::Renamed { moved, replaced: Some(replaced), pinned: Some(handle), whiteout: None }) =
        done.result
    else {
        panic!()
    };
    assert_eq!((moved, replaced), (c, b));
    assert!(done.after.iter().any(|(id, attr)| *id == b && attr.nlink == 0));
    assert_eq!(x.read(&NodeRef::without_hint(b), Some(handle)).unwrap(), b"b");
    let done = rename("a", d.clone(), "z", false, false, None);
    assert_eq!(done.result, Ok(Reply::Renamed { moved: c, replaced: None, pinned: None, whiteout: None }));
    for id in [x.root, d.node, c] {
        assert!(done.after.iter().any(|(touched, _)| *touched == id));
    }
    assert_eq!(rename("d", x.place("d/sub"), "under", false, false, None).result, Err(Errno::INVAL));
    assert_eq!(rename("none", x.top(), "n", false, false, None).result, Err(Errno::NOENT));
}

#[test]
fn a_renamed_directory_is_found_without_a_hint() {
    let x = Exported::new();
    fs::create_dir_all(x.path("a/b/c")).unwrap();
    fs::create_dir(x.path("z")).unwrap();
    let c = x.place("a/b/c");
    let call = Call::Rename {
        from: x.place("a"),
        name: name("b"),
        to: x.place("z"),
        new_name: name("y"),
        no_replace: false,
        exchange: false,
        whiteout: false,
        keep: None,
    };
    assert!(x.call(call).is_ok());
    assert!(x.attr(&NodeRef::without_hint(c.node)).is_ok());
    assert_eq!(x.place("z/y/c").node, c.node);
}

#[test]
fn setattr_sets_mode_and_times_also_of_a_symlink() {
    let x = Exported::new();
    fs::write(x.path("f"), "").unwrap();
    symlink("f", x.path("s")).unwrap();
    let at = |secs| Some(SetTime::At(Timestamp { secs, nanos: 999_999_999 }));
    let set = SetAttr { mode: Some(0o4751), atime: at(-5), mtime: at(1 << 31), ..SetAttr::default() };
    let Ok(Reply::Attr(_, attr)) = x.call(Call::SetAttr { node: x.place("f"), handle: None, set }) else {
        panic!()
    };
    assert_eq!((attr.mode, attr.mtime.pair()), (0o104_751, (1 << 31, 999_999_999)));
    let set = SetAttr { mtime: at(77), ..SetAttr::default() };
    let Ok(Reply::Attr(_, attr)) = x.call(Call::SetAttr { node: x.place("s"), handle: None, set }) else {
        panic!()
    };
    assert_eq!(attr.mtime.pair().0, 77);
    assert_eq!(x.attr(&x.place("f")).unwrap().mtime.pair().0, 1 << 31);
    let set = SetAttr { atime: Some(SetTime::Now), ..SetAttr::default() };
    let Ok(Reply::Attr(_, attr)) = x.call(Call::SetAttr { node: x.place("f"), handle: None, set }) else {
        panic!()
    };
    assert!(attr.atime.pair().0 > 1_700_000_000 && attr.mtime.pair().0 == 1 << 31);
    let set = SetAttr { size: Some(0), ..SetAttr::default() };
    assert_eq!(x.call(Call::SetAttr { node: x.top(), handle: None, set }), Err(Errno::ISDIR));
    let set = SetAttr { uid: Some(u32::MAX), ..SetAttr::default() };
    if is_root() {
        assert_eq!(x.call(Call::SetAttr { node: x.place("f"), handle: None, set }), Err(Errno::INVAL));
    }
}

#[test]
fn hostile_call_arguments_are_refused_without_effect() {
    let x = Exported::new();
    let (f, handle) = x.create(&x.top(), "f", 0o600);
    let flags = WriteFlags::default();
    for offset in [u64::MAX, 1 << 63, i64::MAX.cast_unsigned()] {
        let call = Call::Write { node: f.clone(), handle: Some(handle), offset, data: b"x".to_vec(), flags };
        assert!(x.call(call).is_err());
        assert!(x.call(Call::Seek { node: f.clone(), handle: None, offset, data: true }).is_err());
        let _ = x.call(Call::Read { node: f.clone(), handle: Some(handle), offset, length: u32::MAX });
        let set = SetAttr { size: Some(offset), ..SetAttr::default() };
        assert!(x.call(Call::SetAttr { node: f.clone(), handle: Some(handle), set }).is_err());
        let call =
            Call::Fallocate { node: f.clone(), handle: Some(handle), mode: 0, offset, length: u64::MAX };
        assert!(x.call(call).is_err());
    }
    for target in [&b"a\0b"[..], b"", &[b'x'; 5000]] {
        assert!(x.call(Call::Symlink { dir: x.top(), name: name("s"), target: target.to_vec() }).is_err());
    }
    for bad in [&b""[..], b"user.\0", b"nonsense", &[b'x'; 300]] {
        assert!(x.call(Call::Xattr { node: f.clone(), name: bad.to_vec() }).is_err());
    }
    let set =
        SetAttr { mtime: Some(SetTime::At(Timestamp { secs: 0, nanos: u32::MAX })), ..SetAttr::default() };
    assert_eq!(x.call(Call::SetAttr { node: f.clone(), handle: None, set }), Err(Errno::INVAL));
    assert_eq!(
        x.call(Call::Rmdir { dir: NodeRef::without_hint(NodeId { ino: 9, generation: 9 }), name: name("d") }),
        Err(Errno::STALE)
    );
    assert_eq!(x.attr(&f).unwrap().size, 0);
}

#[test]
fn orphan_directory_is_hidden() {
    let x = Exported::new();
    fs::create_dir_all(x.path(".nigh-orphans/x")).unwrap();
    fs::create_dir_all(x.path("d/.nigh-orphans")).unwrap();
    assert_eq!(x.entry(&x.top(), ".nigh-orphans"), None);
    assert_eq!(x.list(&x.top()).len(), 1);
    assert_eq!(x.list(&x.place("d")).len(), 0, "another export's, or another filesystem's");
    assert_eq!(x.call(Call::Rmdir { dir: x.top(), name: name(".nigh-orphans") }), Err(Errno::PERM));
    let ino = fs::metadata(x.path(".nigh-orphans")).unwrap().ino();
    let guess =
        NodeRef { node: NodeId { ino, generation: 0 }, path_hint: Some((x.root, name(".nigh-orphans"))) };
    assert_eq!(x.attr(&guess), Err(Errno::STALE));
    assert_eq!(
        x.call(Call::ResolvePath { node: guess.node, names: vec![name(".nigh-orphans")] }),
        Err(Errno::STALE)
    );
}
