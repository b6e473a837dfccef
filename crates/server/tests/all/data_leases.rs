//! Data of files with several writers: a kernel may cache pages only under a data lease.

use crate::common::client::Client;
use crate::common::world::World;
use crate::common::*;
use nigh_remote::Remote;
use nigh_types::*;
use std::time::{Duration, Instant};

fn write_call(node: &NodeRef, text: &str, flush: bool) -> Call {
    let flags = WriteFlags { write_back: flush, ..WriteFlags::default() };
    Call::Write { node: node.clone(), handle: None, offset: 0, data: text.into(), flags }
}

fn read_call(node: &NodeRef) -> Call {
    Call::Read { node: node.clone(), handle: None, offset: 0, length: 4096 }
}

fn is_granted(response: &Response) -> bool {
    response.grants.iter().any(|grant| grant.covers == LeaseScope::Data)
}

fn recalls_data(client: &Client) -> bool {
    client.recalls().iter().any(|recall| recall.covers == LeaseScope::Data)
}

#[test]
fn writer_is_granted_a_data_lease_on_its_file() {
    let world = World::new();
    let (mut one, mut two) = (world.client(), world.client());
    let f = one.place("d/f");
    assert!(is_granted(&one.call(write_call(&f, "one", false))));
    let call = two.send(write_call(&f, "two", false));
    assert!(!two.is_answered(call));
    one.pump();
    assert!(recalls_data(&one), "it may have it in its kernel");
    one.give_back();
    assert!(is_granted(&two.answer(call)));
    assert_eq!(std::fs::read(world.dir.path().join("d/f")).unwrap(), b"two45678");
}

#[test]
fn read_waits_for_concurrent_write_and_is_granted_its_data() {
    let world = World::new();
    let (mut holder, mut writer, mut reader) = (world.client(), world.client(), world.client());
    let f = holder.place("d/f");
    holder.call(read_call(&f));
    let write = writer.send(write_call(&f, "new", false));
    assert!(!writer.is_answered(write));
    let read = reader.send(read_call(&f));
    assert!(!reader.is_answered(read));
    holder.give_back_next();
    let response = reader.answer(read);
    assert!(is_granted(&response));
    assert!(matches!(&response.result, Ok(Reply::Data(data)) if data.starts_with(b"new")), "{response:?}");
    assert!(is_granted(&writer.answer(write)));
}

/// A read counts against the limit of queued bytes only while it runs: otherwise a session with many blocked reads
/// could finally read nothing.
#[test]
fn reads_blocked_by_writes_free_their_share_of_the_queue() {
    let world = World::new();
    let (mut holder, mut writer, mut reader) = (world.client(), world.client(), world.client());
    let f = holder.place("d/f");
    let large = || Call::Read { node: f.clone(), handle: None, offset: 0, length: 1 << 20 };
    for round in 0..8 {
        holder.call(large());
        let write = writer.send(write_call(&f, &round.to_string(), false));
        assert!(!writer.is_answered(write));
        let read = reader.send(large());
        let begun = Instant::now();
        while !reader.is_answered(read) {
            assert!(begun.elapsed() < Duration::from_secs(20), "round {round}");
            for client in [&mut holder, &mut reader] {
                client.pump();
                client.give_back();
            }
        }
        assert!(reader.answer(read).result.is_ok() && writer.answer(write).result.is_ok());
        writer.pump();
        writer.give_back();
    }
}

#[test]
fn cancelled_read_stops_waiting_for_a_write() {
    let world = World::new();
    let (mut holder, mut writer, mut reader) = (world.client(), world.client(), world.client());
    let f = holder.place("d/f");
    holder.call(read_call(&f));
    let write = writer.send(write_call(&f, "new", false));
    assert!(!writer.is_answered(write));
    let read = reader.send(read_call(&f));
    assert!(!reader.is_answered(read));
    reader.cancel(read);
    assert_eq!(reader.answer(read).result, Err(Errno::INTR));
    holder.give_back_next();
    assert!(writer.answer(write).result.is_ok());
    assert!(reader.call(read_call(&f)).result.is_ok());
}

#[test]
fn mmap_write_back_precedes_the_acknowledgement_of_a_recall() {
    let world = World::new();
    let (mut mapper, mut writer) = (world.client(), world.client());
    let f = mapper.place("d/f");
    mapper.call(read_call(&f));
    writer.call(read_call(&f));
    let write = writer.send(write_call(&f, "a", false));
    assert!(!writer.is_answered(write));
    mapper.pump();
    assert!(recalls_data(&mapper));
    // The write-back waits for no lease, though the writer has a data lease too; fsync waits for the writer.
    assert!(mapper.call(write_call(&f, "xyz", true)).result.is_ok());
    let sync = mapper.send(Call::Fsync { node: f, handle: None, data_only: true });
    assert!(!mapper.is_answered(sync));
    writer.pump();
    assert!(recalls_data(&writer));
    writer.give_back();
    assert!(mapper.answer(sync).result.is_ok());
    mapper.give_back();
    assert!(writer.answer(write).result.is_ok());
    assert_eq!(std::fs::read(world.dir.path().join("d/f")).unwrap(), b"ayz45678");
}

/// The write-back of one mapper recalls the other mapper's lease, whose dirty page the server takes first.
#[test]
fn mmap_stores_of_two_sessions_into_one_page_are_merged() {
    let world = World::new();
    let (mut one, mut two) = (world.client(), world.client());
    let (ours, theirs) = (Mapped::open(&mut one, "d/f"), Mapped::open(&mut two, "d/f"));
    let first = one.send(ours.flush(0, "A2345678"));
    assert!(!one.is_answered(first));
    two.pump();
    assert!(recalls_data(&two));
    assert!(two.call(theirs.flush(0, "1234567B")).result.is_ok());
    one.pump();
    assert!(recalls_data(&one));
    two.give_back();
    assert!(one.answer(first).result.is_ok());
    assert_eq!(text(&world, "d/f"), "A234567B");
    // A repeated write-back, before the kernel has dropped the page; and a write by the mapper's own session.
    assert!(one.call(ours.flush(0, "AA345678")).result.is_ok());
    assert!(one.call(write_call(&ours.node, "w", false)).result.is_ok());
    assert!(one.call(ours.flush(0, "wA345678")).result.is_ok());
    assert_eq!(text(&world, "d/f"), "wA34567B");
    one.give_back();
    // A write-back of pages from before the acknowledged recall is refused.
    assert_eq!(one.call(ours.flush(0, "late....")).result, Err(Errno::CANCELED));
}

#[test]
fn a_file_is_opened_although_it_was_replaced_since_it_was_looked_up() {
    let world = World::new();
    let (mut one, mut two) = (world.client(), world.client());
    let f = one.place("d/f");
    let (d, d2) = (one.place("d"), one.place("d2"));
    let (no_replace, exchange, keep) = (false, false, None);
    let rename = Call::Rename {
        from: d2,
        name: name("old"),
        to: d,
        new_name: name("f"),
        no_replace,
        exchange,
        whiteout: false,
        keep,
    };
    done_beside(&mut one, &mut two, rename);
    let handle = one.open(&f, BOTH);
    let read = Call::Read { node: f.clone(), handle: Some(handle), offset: 0, length: 4096 };
    assert!(matches!(one.call(read).result, Ok(Reply::Data(data)) if data == b"12345678"));
}

/// Runs `call` on `two`, while `one` acknowledges recalls.
fn done_beside(one: &mut Client, two: &mut Client, call: Call) {
    one.obliging = true;
    let call = two.send(call);
    while !two.is_answered(call) {
        one.pump();
    }
    assert!(two.answer(call).result.is_ok());
}

/// Linux repeats a path lookup once, and then returns ESTALE. A file that lost the name must not use up that retry.
#[test]
fn a_file_is_found_although_it_was_moved_twice_since_it_was_looked_up() {
    let world = World::new();
    let (mut one, mut two) = (world.client(), world.client());
    let (f, old, h) = (one.place("d/f"), one.place("d2/old"), one.place("d/h"));
    let (d, d2) = (one.place("d"), one.place("d2"));
    // The server remembers the directory of the last name. The kernel may drop the dentry of that name at any moment.
    one.place("d2/h2");
    let rename = |from: &NodeRef, old: &str, to: &NodeRef, new: &str, exchange| Call::Rename {
        from: from.clone(),
        name: name(old),
        to: to.clone(),
        new_name: name(new),
        no_replace: false,
        exchange,
        whiteout: false,
        keep: None,
    };
    done_beside(&mut one, &mut two, rename(&d, "f", &d2, "old", true));
    done_beside(&mut one, &mut two, rename(&d2, "old", &d2, "g", false));
    done_beside(&mut one, &mut two, rename(&d, "f", &d, "g", false));
    let size = |one: &mut Client, node: &NodeRef| match one.call(Call::GetAttr { node: node.clone() }).result
    {
        Ok(Reply::Attr(id, attr)) if id == node.node => Ok((attr.size, attr.nlink)),
        other => Err(other.err()),
    };
    assert_eq!(size(&mut one, &f), Ok((8, 1)), "it is d2/g");
    assert_eq!(size(&mut one, &old), Ok((8, 1)), "it is d/g");
    // A change by a client that knows the old name recalls leases at the present name.
    let two_knows = two.place("d2/g");
    assert!(matches!(two.call(Call::GetAttr { node: two_knows.clone() }).result, Ok(Reply::Attr(..))));
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    done_beside(&mut two, &mut one, Call::SetAttr { node: f, handle: None, set });
    assert!(
        matches!(two.call(Call::GetAttr { node: two_knows }).result, Ok(Reply::Attr(_, attr)) if attr.mode & 0o777 == 0o600)
    );
    // The descriptor no longer gives the parent directory, but the inode number still finds the file.
    done_beside(&mut one, &mut two, Call::Unlink { dir: d, name: name("h"), keep: None });
    let left = if one.session().supports.lookup_number { Ok((8, 1)) } else { Err(Some(Errno::STALE)) };
    assert_eq!(size(&mut one, &h), left);
}

#[test]
fn a_symlink_is_read_although_it_was_removed_since_it_was_looked_up() {
    let world = World::new();
    std::os::unix::fs::symlink("far", world.dir.path().join("d/s")).unwrap();
    let (mut one, mut two) = (world.client(), world.client());
    let (s, d) = (one.place("d/s"), one.place("d"));
    done_beside(&mut one, &mut two, Call::Unlink { dir: d, name: name("s"), keep: None });
    assert!(
        matches!(one.call(Call::ReadLink { node: s.clone() }).result, Ok(Reply::Target(to)) if &*to == b"far")
    );
    assert!(
        matches!(one.call(Call::GetAttr { node: s }).result, Ok(Reply::Attr(_, attr)) if attr.nlink == 0)
    );
}

/// A file that a client has open and mapped, and the version of its pages.
struct Mapped {
    node: NodeRef,
    handle: Handle,
    since: WriteBackPrecondition,
}

impl Mapped {
    fn open(client: &mut Client, path: &str) -> Mapped {
        let node = client.place(path);
        let handle = client.open(&node, BOTH);
        let read = Call::Read { node: node.clone(), handle: Some(handle), offset: 0, length: 4096 };
        let response = client.call(read);
        let grant =
            response.grants.iter().find(|grant| grant.covers == LeaseScope::Data).expect("it is granted");
        let stamp = DataVersion::of(&response.after[0].1);
        Mapped {
            node,
            handle,
            since: WriteBackPrecondition { stamp, under: Some((grant.id, LeaseScope::Data)) },
        }
    }

    /// Writes back a dirty page of the mapping.
    fn flush(&self, offset: u64, text: &str) -> Call {
        let flags = WriteFlags { write_back: true, since: Some(self.since), ..WriteFlags::default() };
        Call::Write { node: self.node.clone(), handle: Some(self.handle), offset, data: text.into(), flags }
    }

    fn reopen(&self, client: &mut Client) {
        let (node, handle) = (self.node.clone(), self.handle);
        let opened = client.call(Call::Reopen { node, handle, access: BOTH }).result;
        assert!(opened.is_ok(), "{opened:?}");
    }
}

/// Runs a call, while the other client acknowledges recalls.
fn beside(client: &mut Client, other: &mut Client, call: Call) -> Result<Reply, Errno> {
    other.obliging = true;
    let began = Instant::now();
    let call = client.send(call);
    while !client.is_answered(call) {
        other.pump();
        let now = client.now();
        client.session.handle_timeout(now);
        client.drain();
        assert!(began.elapsed() < Duration::from_secs(8));
    }
    client.answer(call).result
}

fn reclaimed(client: &mut Client) {
    let now = client.now();
    client.session.handle_reclaimed(now);
    client.drain();
}

fn text(world: &World, path: &str) -> String {
    std::fs::read_to_string(world.dir.path().join(path)).unwrap()
}

#[test]
fn mmap_write_back_after_fencing_does_not_overwrite_newer_data() {
    let world = World::hasty();
    let mut away = world.client();
    let (f, h) = (Mapped::open(&mut away, "d/f"), Mapped::open(&mut away, "d/h"));
    away.session.handle_disconnect(away.now(), "cut");
    std::thread::sleep(Duration::from_millis(2_500));
    let now = away.now();
    away.session.handle_timeout(now);
    away.drain();
    let mut other = world.client();
    let there = other.place("d/f");
    assert!(other.call(write_call(&there, "other", false)).result.is_ok());
    away.go_on_over(world.server.serve_in_process().unwrap());
    assert_eq!(away.wait_linked(), Some(true));
    assert_eq!(beside(&mut away, &mut other, f.flush(0, "stale page")), Err(Errno::CANCELED));
    for (offset, text) in [(0, "one"), (5, "two")] {
        assert!(beside(&mut away, &mut other, h.flush(offset, text)).is_ok(), "no other client changed it");
    }
    // A new grant does not validate pages from before it.
    let anew = Mapped::open(&mut away, "d/f");
    assert_eq!(beside(&mut away, &mut other, f.flush(0, "stale page")), Err(Errno::CANCELED));
    assert!(beside(&mut away, &mut other, anew.flush(0, "new")).is_ok());
    assert_eq!((text(&world, "d/f"), text(&world, "d/h")), ("newer678".into(), "one45two".into()));
}

/// The session stays alive, and no holder has to acknowledge.
#[test]
fn mmap_write_back_after_grant_expiry_is_refused_if_data_changed() {
    let world = World::new();
    let limit = Term::Limited(Span::from_millis(500));
    let mut late = Client::connect(&world.server, world.dir.path(), limit);
    let mut other = world.client();
    let (f, h) = (Mapped::open(&mut late, "d/f"), Mapped::open(&mut late, "d/h"));
    for offset in [0, 4] {
        assert!(beside(&mut late, &mut other, f.flush(offset, "mine")).is_ok(), "it is granted");
    }
    std::thread::sleep(Duration::from_millis(700));
    let there = other.place("d/f");
    assert!(other.call(write_call(&there, "other", false)).result.is_ok());
    for _ in 0..2 {
        assert_eq!(beside(&mut late, &mut other, f.flush(0, "stale")), Err(Errno::CANCELED));
        drop(Mapped::open(&mut late, "d/f"));
    }
    assert!(beside(&mut late, &mut other, f.flush(0, "other")).is_ok(), "that stands there");
    for (offset, text) in [(0, "one"), (5, "two")] {
        assert!(beside(&mut late, &mut other, h.flush(offset, text)).is_ok(), "no other client changed it");
    }
    assert_eq!((text(&world, "d/f"), text(&world, "d/h")), ("otherine".into(), "one45two".into()));
}

/// The kernel reports the data version of its pages, which may be any version since it read them.
#[test]
fn mmap_write_back_is_accepted_over_its_own_sessions_changes() {
    let world = World::new();
    let limit = Term::Limited(Span::from_millis(500));
    let mut late = Client::connect(&world.server, world.dir.path(), limit);
    let mut other = world.client();
    let f = Mapped::open(&mut late, "d/f");
    let (node, handle) = (f.node.clone(), Some(f.handle));
    let mut since = vec![f.since.stamp];
    for text in ["one", "two"] {
        let response = late.call(f.flush(0, text));
        assert!(response.result.is_ok());
        since.push(DataVersion::of(&response.after[0].1));
    }
    let source = late.place("d/h");
    let from = late.open(&source, READ);
    let plain = WriteFlags::default();
    let utimes = SetAttr { mtime: Some(SetTime::At(Timestamp { secs: 7, nanos: 0 })), ..SetAttr::default() };
    for call in [
        Call::Write { node: node.clone(), handle, offset: 4, data: "plain".into(), flags: plain },
        Call::SetAttr { node: node.clone(), handle, set: SetAttr { size: Some(20), ..SetAttr::default() } },
        Call::Fallocate { node: node.clone(), handle, mode: 0, offset: 0, length: 30 },
        Call::CopyRange {
            from: source,
            from_handle: Some(from),
            from_offset: 0,
            to: node.clone(),
            to_handle: handle,
            to_offset: 20,
            length: 4,
        },
        Call::SetAttr { node, handle: None, set: utimes },
    ] {
        assert!(late.call(call).result.is_ok());
    }
    std::thread::sleep(Duration::from_millis(700));
    for (nth, stamp) in since.into_iter().enumerate() {
        let f = Mapped { since: WriteBackPrecondition { stamp, under: None }, node: f.node.clone(), ..f };
        assert!(beside(&mut late, &mut other, f.flush(0, "mine")).is_ok(), "state {nth}");
    }
    let there = other.place("d/f");
    assert!(beside(&mut other, &mut late, write_call(&there, "other", false)).is_ok());
    assert_eq!(beside(&mut late, &mut other, f.flush(0, "mine")), Err(Errno::CANCELED));
    // The kernel writes back through any writable descriptor; the server compares bytes through a readable one.
    let handle = late.open(&f.node, Access { read: false, ..BOTH });
    let f = Mapped { handle, ..f };
    assert!(beside(&mut late, &mut other, f.flush(0, "other")).is_ok(), "that stands there");
    assert_eq!(beside(&mut late, &mut other, f.flush(0, "mine")), Err(Errno::CANCELED));
    assert_eq!(&text(&world, "d/f")[..9], "otherlain");
}

#[test]
fn mmap_write_back_is_accepted_after_own_create_truncates_the_file() {
    let world = World::new();
    let limit = Term::Limited(Span::from_millis(500));
    let mut late = Client::connect(&world.server, world.dir.path(), limit);
    let mut other = world.client();
    let f = Mapped::open(&mut late, "d/f");
    // The server follows a session's own changes from its first change on.
    assert!(late.call(f.flush(0, "one")).result.is_ok());
    let dir = late.place("d");
    let access = Access { truncate: true, ..BOTH };
    let create = Call::Create { dir, name: name("f"), mode: 0o600, umask: 0, exclusive: false, access };
    assert!(late.call(create).result.is_ok());
    assert_eq!(text(&world, "d/f"), "");
    std::thread::sleep(Duration::from_millis(700));
    let f = Mapped { since: WriteBackPrecondition { under: None, ..f.since }, ..f };
    assert!(beside(&mut late, &mut other, f.flush(0, "mine")).is_ok(), "no other client changed it");
    assert_eq!(text(&world, "d/f"), "mine");
}

/// Grant ids of an earlier server are invalid after a restart, also in calls that it left unanswered.
#[test]
fn mmap_write_back_after_a_server_restart_is_compared_with_file_data() {
    let mut world = World::hasty();
    let (mut away, mut other) = (world.client(), world.client());
    let (f, h) = (Mapped::open(&mut away, "d/f"), Mapped::open(&mut away, "d/h"));
    let there = other.place("d/f");
    assert!(is_granted(&other.call(read_call(&there))));
    let out = away.send(f.flush(0, "stale"));
    assert!(!away.is_answered(out), "it waits for the other");
    world.restart();
    std::fs::write(world.dir.path().join("d/f"), "theirs78").unwrap();
    for client in [&mut other, &mut away] {
        client.go_on_over(world.server.serve_in_process().unwrap());
        assert_eq!(client.wait_linked(), Some(false));
    }
    // The client resolves the path first: a restarted server does not know the client's ids.
    for (file, path) in [(&f, "d/f"), (&h, "d/h")] {
        let names = path.split('/').map(name).collect();
        let walked = away.call(Call::ResolvePath { node: file.node.node, names }).result;
        assert!(walked.is_ok(), "{walked:?}");
        file.reopen(&mut away);
    }
    reclaimed(&mut other);
    reclaimed(&mut away);
    assert_eq!(away.answer(out).result, Err(Errno::CANCELED));
    assert_eq!(beside(&mut away, &mut other, f.flush(0, "stale")), Err(Errno::CANCELED));
    assert!(beside(&mut away, &mut other, h.flush(0, "page")).is_ok());
    assert_eq!((text(&world, "d/f"), text(&world, "d/h")), ("theirs78".into(), "page5678".into()));
}

/// The kernel may have looked the file up before the rename, without an open that the server knows of.
#[test]
fn file_replaced_by_its_own_session_can_still_be_opened() {
    let world = World::new();
    let mut client = world.client();
    let f = client.place("d/f");
    let (to, from) = (client.place("d"), client.place("d2"));
    let (no_replace, exchange, keep) = (false, false, None);
    let (old, new_name) = (name("old"), name("f"));
    let call = Call::Rename { from, name: old, to, new_name, no_replace, exchange, whiteout: false, keep };
    assert!(client.call(call).result.is_ok());
    assert!(client.call(Call::Open { node: f, access: READ }).result.is_ok());
}
