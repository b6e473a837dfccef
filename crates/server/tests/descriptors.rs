//! The limit on a server's descriptors for one peer, over all kinds (docs/attacks.md, "One user against the others").
//! In a test process of its own, because it counts descriptors of the process.

mod common;

use common::client::Client;
use common::raw;
use common::world::World;
use common::*;
use nigh_link::Peer;
use nigh_native::Message;
use nigh_types::*;
use std::fs;
use std::path::Path;

const LIMIT: u64 = 256 + 2_048;
const WITHIN: usize = 20;

fn descriptors() -> u64 {
    fs::read_dir("/proc/self/fd").unwrap().count() as u64
}

/// Attaches; `None` if the server refuses because a limit is reached.
fn attached(world: &World, path: &Path, client: u64) -> Option<raw::Raw> {
    use std::os::unix::ffi::OsStrExt;
    let attach = path.as_os_str().as_bytes().to_vec();
    let hello = nigh_native::Hello { client, attach, ..raw::hello(world, client, None) };
    let mut raw = raw::Raw::hello(world, Some(Peer::in_process()), hello);
    match raw.message() {
        Message::Welcome(_) => Some(raw),
        Message::Refused(refused) => {
            let why = refused.message;
            assert!(why.contains("directories mounted, which is all that it may"), "{why}");
            None
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_peers_exhaustive_use_leaves_the_server_descriptors() {
    let world = World::with(|options| {
        options.descriptors = Some(LIMIT);
        options.session_term = Span::from_secs(5);
    });
    let before = descriptors();
    let dirs: Vec<_> = (0..200).map(|n| world.dir.path().join(format!("x{n}"))).collect();
    for dir in &dirs {
        (0..WITHIN).for_each(|n| fs::create_dir_all(dir.join(format!("d{n}"))).unwrap());
        (0..WITHIN).for_each(|n| fs::write(dir.join(format!("f{n}")), "x").unwrap());
    }
    let mut clients = Vec::new();
    let full = dirs.iter().zip(1_000..).find(|(dir, number)| {
        let Some(probe) = attached(&world, dir, *number) else { return true };
        drop(probe);
        let mut client = world.client_of(dir);
        let root = client.root();
        for n in 0..WITHIN {
            client.entry(&root, &format!("d{n}"));
            let file = client.place(&format!("f{n}"));
            client.read(&file);
        }
        clients.push(client);
        false
    });
    let (mut opens, node): (Client, _) = (world.client_of(&dirs[0]), "f0");
    let node = opens.place(node);
    while opens.call(Call::Open { node: node.clone(), access: READ }).result.is_ok() {}
    // The client's end of each connection belongs to this process too.
    let taken = descriptors() - before - clients.len() as u64 - 1;
    eprintln!("{} exports, {taken} descriptors", clients.len());
    assert!(full.is_some(), "it is refused before {} exports are open", dirs.len());
    assert!(taken <= LIMIT, "{taken} descriptors for {} exports", clients.len());
    assert!(taken > LIMIT / 2, "most of them can be used");
    // The session of a disconnected client makes room, together with its export.
    let dir = full.unwrap().0;
    assert!(attached(&world, dir, 2_000).is_none());
    drop(clients.pop());
    eventually("a dormant one makes room", || {
        clients.iter_mut().for_each(Client::tick);
        opens.tick();
        attached(&world, dir, 2_000).is_some()
    });
}
