//! Data and attributes of files.

use super::Named;
use super::caller::{Caller, READ_WRITE, at, name, steady, unlink};
use nigh_types::{
    Access, Call, DataVersion, Errno, Handle, Reply, SetAttr, SetTime, Timestamp, WriteBackPrecondition,
    WriteFlags,
};

pub(super) const CASES: &[Named] = &[
    ("data_comes_back", data),
    ("sparse_files_have_holes", sparse),
    ("append_goes_to_the_end", append),
    ("stores_are_written_back_to_what_they_were_made_from", stale_flush),
    ("truncation_cuts_and_extends", truncation),
    ("open_truncates_on_request", open_truncates),
    ("open_of_what_is_no_file_fails", open_others),
    ("handles_that_are_not_open_are_ebadf", bad_handle),
    ("files_are_opened_again_under_a_chosen_number", reopen),
    ("unlinked_files_live_while_open", unlinked),
    ("unlinked_files_are_cut_and_changed_while_open", unlinked_changed),
    ("unlink_keeps_a_file_on_request", keep),
    ("a_client_keeps_a_file_under_its_own_handle", keep_chosen),
    ("setattr_sets_mode_and_times", setattr),
    ("fallocate_extends", fallocate),
    ("fallocate_punches_holes", punch),
    ("copy_range_copies", copy_range),
    ("tmpfile_has_no_name_until_linked", tmpfile),
    ("fsync_and_statfs_and_flags", others),
    ("large_writes_and_reads", large),
];

fn data(c: &mut Caller<'_>) {
    let root = c.root();
    let (place, handle) = c.create(&root, b"f");
    c.write(&place, handle, 0, b"hello world");
    c.write(&place, handle, 6, b"there");
    assert_eq!(c.read(&place, Some(handle), 0, 100), b"hello there");
    assert_eq!(c.read(&place, None, 6, 3), b"the");
    assert_eq!(c.read(&place, Some(handle), 11, 10), b"");
    assert_eq!(c.read(&place, Some(handle), 1 << 40, 10), b"");
    assert_eq!(c.getattr(&place).size, 11);
    let again = c.open(&place);
    assert_eq!(c.read(&place, Some(again), 0, 5), b"hello");
    c.release(handle);
    assert_eq!(c.read(&place, Some(again), 0, 5), b"hello");
}

fn sparse(c: &mut Caller<'_>) {
    const FAR: u64 = 5 << 30;
    let root = c.root();
    let (place, handle) = c.create(&root, b"f");
    c.write(&place, handle, FAR, b"end");
    assert_eq!(c.getattr(&place).size, FAR + 3);
    assert_eq!(c.read(&place, Some(handle), 1 << 20, 4096), vec![0; 4096]);
    assert_eq!(c.read(&place, Some(handle), FAR - 2, 100), b"\0\0end");
    let seek = |offset, data| Call::Seek { node: place.clone(), handle: Some(handle), offset, data };
    let Reply::Offset(found) = c.ok(seek(0, true)) else { panic!("no offset") };
    assert!(found == 0 || found <= FAR && found > FAR - (1 << 20), "data begins at {found}");
    assert_eq!(c.ok(seek(FAR, true)), Reply::Offset(FAR));
    assert_eq!(c.ok(seek(FAR, false)), Reply::Offset(FAR + 3));
    assert_eq!(c.errno(seek(FAR + 3, true)), Errno::NXIO);
}

fn append(c: &mut Caller<'_>) {
    let root = c.root();
    let (place, handle) = c.create(&root, b"f");
    let flags = WriteFlags { append: true, ..WriteFlags::default() };
    for (data, offset) in [(&b"one"[..], 0), (b"two", 3), (b"three", 6)] {
        let data = data.to_vec();
        let count = data.len() as u64;
        let write = Call::Write { node: place.clone(), handle: Some(handle), offset: 0, data, flags };
        assert_eq!(c.ok(write), Reply::Written { offset, count });
    }
    assert_eq!(c.read(&place, Some(handle), 0, 100), b"onetwothree");
}

/// A write-back names the version of the data on which its pages are based.
fn stale_flush(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"0123456789");
    let handle = Some(c.open(&place));
    let then = DataVersion::of(&c.getattr(&place));
    let write = |offset, data: &[u8], flush, stamp| {
        let flags = WriteFlags {
            write_back: flush,
            since: Some(WriteBackPrecondition { stamp, under: None }),
            ..WriteFlags::default()
        };
        Call::Write { node: place.clone(), handle, offset, data: data.to_vec(), flags }
    };
    let written = |offset, count| Reply::Written { offset, count };
    assert_eq!(c.ok(write(0, b"A", true, then)), written(0, 1), "it is as it was");
    assert_eq!(c.ok(write(4, b"BC", true, then)), written(4, 2), "own changes do not count");
    assert_eq!(c.ok(write(9, b"D", false, then)), written(9, 1));
    assert_eq!(c.ok(write(1, b"E", true, then)), written(1, 1));
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    c.setattr(&place, mode);
    assert_eq!(c.ok(write(2, b"F", true, then)), written(2, 1), "its data is as it was");
    let other = DataVersion { size: then.size + 1, ..then };
    assert_eq!(c.errno(write(0, b"X", true, other)), Errno::CANCELED);
    assert_eq!(c.errno(write(9, b"DX", true, other)), Errno::CANCELED);
    assert_eq!(c.ok(write(4, b"BC", true, other)), written(4, 2), "that stands there");
    assert_eq!(c.ok(write(3, b"G", false, other)), written(3, 1), "the present writer may");
    assert_eq!(c.read(&place, handle, 0, 100), b"AEFGBC678D");
}

fn truncation(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"0123456789");
    let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    assert_eq!(c.setattr(&place, size(4)).size, 4);
    assert_eq!(c.setattr(&place, size(8)).size, 8);
    assert_eq!(c.read(&place, None, 0, 100), b"0123\0\0\0\0");
    let handle = Some(c.open(&place));
    let Reply::Attr(_, attr) = c.ok(Call::SetAttr { node: place.clone(), handle, set: size(0) }) else {
        panic!("no attributes")
    };
    assert_eq!(attr.size, 0);
    let dir = c.mkdir(&root, b"d");
    assert_eq!(c.errno(Call::SetAttr { node: dir, handle: None, set: size(0) }), Errno::ISDIR);
}

fn open_truncates(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"gone");
    let access = Access { truncate: true, ..READ_WRITE };
    let Reply::Opened { attr, .. } = c.ok(Call::Open { node: place.clone(), access }) else {
        panic!("not opened")
    };
    assert_eq!((attr.size, c.getattr(&place).size), (0, 0));
}

fn open_others(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    assert_eq!(c.errno(Call::Open { node: dir.clone(), access: READ_WRITE }), Errno::ISDIR);
    c.errno(Call::Read { node: dir, handle: None, offset: 0, length: 1 });
    let (link, _) = c.made(Call::Symlink { dir: root.clone(), name: name(b"s"), target: b"d".to_vec() });
    let node = at(&root, b"s", link.id);
    assert_eq!(c.errno(Call::Open { node, access: READ_WRITE }), Errno::LOOP);
}

fn bad_handle(c: &mut Caller<'_>) {
    let root = c.root();
    let (place, handle) = c.create(&root, b"f");
    let (other, _) = c.create(&root, b"g");
    let read = |node, handle| Call::Read { node, handle: Some(handle), offset: 0, length: 1 };
    assert_eq!(c.errno(read(other, handle)), Errno::BADF);
    c.release(handle);
    assert_eq!(c.errno_after_release(&read(place.clone(), handle)), Errno::BADF);
    assert_eq!(c.errno(read(place, Handle(u64::MAX >> 1))), Errno::BADF);
}

fn reopen(c: &mut Caller<'_>) {
    let root = c.root();
    let (place, first) = c.create(&root, b"f");
    c.write(&place, first, 0, b"again");
    let handle = Handle(1 << 40);
    let access = READ_WRITE;
    let call = |node: &nigh_types::NodeRef| Call::Reopen { node: node.clone(), handle, access };
    let Reply::Opened { handle: opened, attr } = c.ok(call(&place)) else { panic!("not opened") };
    assert_eq!((opened, attr.size), (handle, 5), "nothing is truncated");
    c.write(&place, handle, 5, b" and again");
    assert_eq!(c.read(&place, Some(handle), 0, 100), b"again and again");
    assert_eq!(c.errno(call(&place)), Errno::INVAL, "it is in use");
    assert_ne!(c.open(&place), handle);
    let dir = c.mkdir(&root, b"d");
    let other = Call::Reopen { node: dir, handle: Handle(1 << 41), access };
    assert_eq!(c.errno(other), Errno::ISDIR);
    let gone = c.file(&root, b"g", b"");
    c.ok(unlink(&root, b"g"));
    c.release(handle);
    assert_eq!(c.errno_after_release(&call(&gone)), Errno::STALE);
}

fn unlinked(c: &mut Caller<'_>) {
    let root = c.root();
    let (place, handle) = c.create(&root, b"f");
    c.write(&place, handle, 0, b"still");
    c.ok(unlink(&root, b"f"));
    c.write(&place, handle, 5, b" here");
    assert_eq!(c.read(&place, Some(handle), 0, 100), b"still here");
    let attr = c.getattr(&place);
    assert_eq!((attr.nlink, attr.size), (0, 10));
    let (new, _) = c.create(&root, b"f");
    assert_ne!(new.node, place.node, "another file of the same name");
    c.release(handle);
    assert_eq!(c.errno_after_release(&Call::GetAttr { node: place }), Errno::STALE);
}

fn unlinked_changed(c: &mut Caller<'_>) {
    let root = c.root();
    let (place, handle) = c.create(&root, b"f");
    c.write(&place, handle, 0, b"still here");
    c.ok(unlink(&root, b"f"));
    let set = SetAttr { size: Some(5), mode: Some(0o600), ..SetAttr::default() };
    let call = Call::SetAttr { node: place.clone(), handle: Some(handle), set };
    let Reply::Attr(_, attr) = c.ok(call) else { panic!("no attributes") };
    assert_eq!((attr.size, attr.mode), (5, 0o100_600));
    assert_eq!(c.read(&place, Some(handle), 0, 100), b"still");
}

fn keep(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"pinned");
    let call = Call::Unlink { dir: root.clone(), name: name(b"f"), keep: Some(place.node) };
    let Reply::Removed { node, pinned: Some(handle) } = c.ok(call) else { panic!("not kept") };
    assert_eq!(node, place.node);
    assert_eq!(c.read(&place, Some(handle), 0, 100), b"pinned");
    c.write(&place, handle, 0, b"P");
    assert_eq!(c.getattr(&place).nlink, 0);
    c.release(handle);
    assert_eq!(c.errno_after_release(&Call::GetAttr { node: place }), Errno::STALE);
}

fn keep_chosen(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"chosen");
    let chosen = |n| Handle(Handle::CLIENT_ASSIGNED | n);
    c.start(Call::PinOpen { node: place.clone(), names: vec![name(b"f")], handle: chosen(1) });
    // A handle whose pin failed: the remote finds the file by its node reference.
    assert_eq!(c.read(&place, Some(chosen(2)), 0, 100), b"chosen");
    c.ok(unlink(&root, b"f"));
    assert_eq!(c.read(&place, Some(chosen(1)), 0, 100), b"chosen");
    assert_eq!(c.getattr(&place).nlink, 0);
    c.release(chosen(1));
    assert_eq!(c.errno_after_release(&Call::GetAttr { node: place }), Errno::STALE);
}

fn setattr(c: &mut Caller<'_>) {
    let root = c.root();
    let place = c.file(&root, b"f", b"x");
    let (atime, mtime) = (Timestamp { secs: 1_000_000_000, nanos: 0 }, Timestamp { secs: -1000, nanos: 0 });
    let set = SetAttr {
        mode: Some(0o4755),
        atime: Some(SetTime::At(atime)),
        mtime: Some(SetTime::At(mtime)),
        ..SetAttr::default()
    };
    let attr = c.setattr(&place, set);
    assert_eq!((attr.mode, attr.atime, attr.mtime), (0o104_755, atime, mtime));
    assert_eq!(steady(c.getattr(&place)), steady(attr));
    let now = c.setattr(&place, SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() });
    assert!(now.mtime.pair() > atime.pair(), "{:?} is not now", now.mtime);
    assert_eq!(now.atime, atime);
    let dir = c.mkdir(&root, b"d");
    let attr = c.setattr(&dir, SetAttr { mode: Some(0o1711), ..SetAttr::default() });
    assert_eq!(attr.mode, 0o041_711);
}

fn fallocate(c: &mut Caller<'_>) {
    let root = c.root();
    let (place, handle) = c.create(&root, b"f");
    let call = |mode, offset, length| Call::Fallocate {
        node: place.clone(),
        handle: Some(handle),
        mode,
        offset,
        length,
    };
    let Reply::Attr(_, attr) = c.ok(call(0, 100, 900)) else { panic!("no attributes") };
    assert_eq!(attr.size, 1000);
    let Reply::Attr(_, attr) = c.ok(call(1, 0, 100_000)) else { panic!("no attributes") };
    assert_eq!(attr.size, 1000);
    assert_eq!(c.errno(call(0, 0, 0)), Errno::INVAL);
    assert_eq!(c.read(&place, Some(handle), 990, 100), [0; 10]);
}

fn punch(c: &mut Caller<'_>) {
    let root = c.root();
    let (node, handle) = c.create(&root, b"f");
    c.write(&node, handle, 0, &[b'x'; 20_000]);
    let handle = Some(handle);
    c.ok(Call::Fallocate { node: node.clone(), handle, mode: 3, offset: 5000, length: 10_000 });
    let data = c.read(&node, handle, 0, 30_000);
    assert_eq!(data.len(), 20_000);
    assert!(
        data.iter().zip(0..).all(|(byte, i)| *byte == if (5000..15_000).contains(&i) { 0 } else { b'x' })
    );
}

fn copy_range(c: &mut Caller<'_>) {
    let root = c.root();
    let from = c.file(&root, b"a", b"0123456789");
    let to = c.file(&root, b"b", b"abc");
    let (from_handle, to_handle) = (Some(c.open(&from)), Some(c.open(&to)));
    let copy = Call::CopyRange {
        from,
        from_handle,
        from_offset: 2,
        to: to.clone(),
        to_handle,
        to_offset: 3,
        length: 100,
    };
    assert_eq!(c.ok(copy), Reply::Written { offset: 3, count: 8 });
    assert_eq!(c.read(&to, to_handle, 0, 100), b"abc23456789");
}

fn tmpfile(c: &mut Caller<'_>) {
    let root = c.root();
    let call = Call::Tmpfile { dir: root.clone(), mode: 0o600, umask: 0, access: READ_WRITE };
    let (entry, handle) = c.made(call);
    let handle = handle.expect("it comes open");
    assert_eq!((entry.attr.nlink, entry.attr.mode), (0, 0o100_600));
    let nameless = nigh_types::NodeRef::without_hint(entry.id);
    c.write(&nameless, handle, 0, b"named now");
    assert_eq!(c.names(&root), []);
    let (linked, _) = c.made(Call::Link { node: nameless, dir: root.clone(), name: name(b"n") });
    assert_eq!((linked.id, linked.attr.nlink), (entry.id, 1));
    c.release(handle);
    assert_eq!(c.read(&at(&root, b"n", linked.id), None, 0, 100), b"named now");
}

fn others(c: &mut Caller<'_>) {
    let root = c.root();
    let (node, handle) = c.create(&root, b"f");
    c.write(&node, handle, 0, b"durable");
    let handle = Some(handle);
    assert_eq!(c.ok(Call::Fsync { node: node.clone(), handle, data_only: false }), Reply::Done);
    assert_eq!(c.ok(Call::Fsync { node: node.clone(), handle: None, data_only: true }), Reply::Done);
    assert_eq!(c.ok(Call::Fsync { node: root.clone(), handle: None, data_only: false }), Reply::Done);
    let Reply::Space(space) = c.ok(Call::StatFs { node: root }) else { panic!("no space") };
    assert!(space.block_size > 0 && space.blocks >= space.blocks_free && space.name_max >= 255, "{space:?}");
    let flags = c.call(Call::GetFlags { node }).result;
    let fits = matches!(flags, Ok(Reply::Flags(_)) | Err(Errno::NOTTY | Errno::OPNOTSUPP));
    assert!(fits, "{flags:?}");
}

fn large(c: &mut Caller<'_>) {
    let root = c.root();
    let (place, handle) = c.create(&root, b"f");
    let data: Vec<u8> = (0..1_000_003_u32).map(|i| i.to_le_bytes()[(i % 4) as usize]).collect();
    c.write(&place, handle, 7, &data);
    assert!(c.read(&place, Some(handle), 7, 1 << 20) == data, "a megabyte comes back as it was");
}
