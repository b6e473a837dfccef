//! Data of files that several clients write: whatever a kernel keeps of it stands under a grant.

mod common;

use common::client::Client;
use common::world::World;
use common::*;
use nigh_types::*;
use std::time::{Duration, Instant};

fn write_call(node: &Place, text: &str, flush: bool) -> Call {
    let flags = WriteFlags { flush, ..WriteFlags::default() };
    Call::Write { node: node.clone(), handle: None, offset: 0, data: text.into(), flags }
}

fn read_call(node: &Place) -> Call {
    Call::Read { node: node.clone(), handle: None, offset: 0, length: 4096 }
}

fn is_granted(response: &Response) -> bool {
    response.grants.iter().any(|grant| grant.covers == Covers::Data)
}

fn recalls_data(client: &Client) -> bool {
    client.recalls().iter().any(|recall| recall.covers == Covers::Data)
}

#[test]
fn who_writes_is_granted_what_it_wrote() {
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
fn a_reader_waits_for_a_write_under_way_and_is_granted_what_it_wrote() {
    let world = World::new();
    let (mut holder, mut writer, mut reader) = (world.client(), world.client(), world.client());
    let f = holder.place("d/f");
    holder.call(read_call(&f));
    let write = writer.send(write_call(&f, "new", false));
    assert!(!writer.is_answered(write));
    let read = reader.send(read_call(&f));
    assert!(!reader.is_answered(read));
    holder.pump();
    holder.give_back();
    let response = reader.answer(read);
    assert!(is_granted(&response));
    assert!(matches!(&response.result, Ok(Reply::Data(data)) if data.starts_with(b"new")), "{response:?}");
    assert!(is_granted(&writer.answer(write)));
}

/// What such reads are to bring counts as queued only while they are executed: else a session that often waits
/// would come to read nothing any more.
#[test]
fn reads_that_had_to_wait_leave_room_for_others() {
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
fn a_reader_that_nobody_waits_for_is_forgotten() {
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
    holder.pump();
    holder.give_back();
    assert!(writer.answer(write).result.is_ok());
    assert!(reader.call(read_call(&f)).result.is_ok());
}

#[test]
fn stores_into_a_map_are_written_back_before_their_client_gives_back() {
    let world = World::new();
    let (mut mapper, mut writer) = (world.client(), world.client());
    let f = mapper.place("d/f");
    mapper.call(read_call(&f));
    writer.call(read_call(&f));
    let write = writer.send(write_call(&f, "a", false));
    assert!(!writer.is_answered(write));
    mapper.pump();
    assert!(recalls_data(&mapper));
    // It waits for nobody, though the writer holds the data too; who syncs does.
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

#[test]
fn a_file_is_opened_although_it_was_replaced_since_it_was_looked_up() {
    let world = World::new();
    let (mut one, mut two) = (world.client(), world.client());
    let f = one.place("d/f");
    let (d, d2) = (one.place("d"), one.place("d2"));
    let (no_replace, exchange, keep) = (false, false, None);
    let rename =
        Call::Rename { from: d2, name: name("old"), to: d, new_name: name("f"), no_replace, exchange, keep };
    one.obliging = true;
    let call = two.send(rename);
    while !two.is_answered(call) {
        one.pump();
    }
    assert!(two.answer(call).result.is_ok());
    let handle = one.open(&f, BOTH);
    let read = Call::Read { node: f.clone(), handle: Some(handle), offset: 0, length: 4096 };
    assert!(matches!(one.call(read).result, Ok(Reply::Data(data)) if data == b"12345678"));
}

/// Its kernel may have been led there, and not be known to have it open.
#[test]
fn a_file_that_its_own_session_replaced_is_opened_too() {
    let world = World::new();
    let mut client = world.client();
    let f = client.place("d/f");
    let (to, from) = (client.place("d"), client.place("d2"));
    let (no_replace, exchange, keep) = (false, false, None);
    let (old, new_name) = (name("old"), name("f"));
    let call = Call::Rename { from, name: old, to, new_name, no_replace, exchange, keep };
    assert!(client.call(call).result.is_ok());
    assert!(client.call(Call::Open { node: f, access: READ }).result.is_ok());
}
