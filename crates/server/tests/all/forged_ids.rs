//! Attacks by node ids: made up, altered, of another export, or of a removed inode.

use crate::common::client::{Client, find, top};
use crate::common::*;
use nigh_server::{Server, ServerOptions};
use nigh_types::*;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

const SOON: Term = Term::Limited(Span::from_secs(5));

fn forged(world: &Path, server: &Arc<Server>, attack: impl FnOnce(&mut Client, &NodeRef) -> Call) {
    let mut client = Client::wanting(server.serve_in_process().unwrap(), world, SOON, 0);
    let top = top(&mut client);
    let call = attack(&mut client, &top);
    client.send(call);
    let why = client.lost();
    assert!(why.contains("ids cannot be made up") && !why.contains('\n'), "{why}");
}

#[test]
fn forged_node_id_ends_the_session() {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::new(ServerOptions::new(state.path().to_owned())).unwrap();
    fs::write(dir.path().join("f"), "").unwrap();
    let ino = fs::metadata(dir.path().join("f")).unwrap().ino();
    let birth_ns = {
        use rustix::fs::{AtFlags, StatxFlags, statx};
        let born = statx(rustix::fs::CWD, dir.path().join("f"), AtFlags::empty(), StatxFlags::BTIME).unwrap();
        u64::try_from(born.stx_btime.tv_sec).unwrap() * 1_000_000_000 + u64::from(born.stx_btime.tv_nsec)
    };
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut generations = vec![0, 1, birth_ns, u64::MAX];
    generations.extend((0..16).map(|_| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        random
    }));
    for generation in generations {
        let node = NodeId { ino, generation };
        forged(dir.path(), &server, |_, top| Call::GetAttr {
            node: NodeRef { node, path_hint: Some((top.node, name("f"))) },
        });
    }
    let altered = |client: &mut Client| {
        let real = find(client, "f").node;
        NodeId { generation: real.generation ^ 1 << 40, ..real }
    };
    forged(dir.path(), &server, |client, _| Call::ResolvePath {
        node: altered(client),
        names: vec![name("f")],
    });
    forged(dir.path(), &server, |client, top| {
        let keep = Some(altered(client));
        Call::Unlink { dir: top.clone(), name: name("f"), keep }
    });
    forged(dir.path(), &server, |client, _| {
        let hint = Some((altered(client), name("f")));
        Call::GetAttr { node: NodeRef { node: find(client, "f").node, path_hint: hint } }
    });
    assert!(dir.path().join("f").exists());
}

#[test]
fn node_id_of_another_export_ends_the_session() {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::new(ServerOptions::new(state.path().to_owned())).unwrap();
    fs::create_dir(dir.path().join("inner")).unwrap();
    fs::write(dir.path().join("inner/f"), "").unwrap();
    let mut inner = Client::wanting(server.serve_in_process().unwrap(), &dir.path().join("inner"), SOON, 0);
    let theirs = find(&mut inner, "f");
    assert!(inner.call(Call::GetAttr { node: theirs.clone() }).result.is_ok());
    // One inode that is reachable through both exports.
    forged(dir.path(), &server, |_, _| Call::GetAttr { node: NodeRef::without_hint(theirs.node) });
    assert!(inner.call(Call::GetAttr { node: theirs }).result.is_ok(), "others are left in peace");
}

#[test]
fn node_id_of_a_removed_inode_is_estale_without_ending_the_session() {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::new(ServerOptions::new(state.path().to_owned())).unwrap();
    fs::write(dir.path().join("f"), "").unwrap();
    let mut client = Client::wanting(server.serve_in_process().unwrap(), dir.path(), SOON, 0);
    let old = find(&mut client, "f");
    fs::remove_file(dir.path().join("f")).unwrap();
    let getattr = || Call::GetAttr { node: old.clone() };
    assert_eq!(client.call(getattr()).result, Err(Errno::STALE));
    let mut reused = false;
    for _ in 0..200 {
        std::thread::sleep(std::time::Duration::from_millis(5));
        fs::write(dir.path().join("f"), "other").unwrap();
        if fs::metadata(dir.path().join("f")).unwrap().ino() == old.node.ino {
            reused = true;
            break;
        }
        fs::remove_file(dir.path().join("f")).unwrap();
    }
    if !reused {
        return println!("SKIPPED: this filesystem does not reuse inode numbers soon");
    }
    assert_eq!(client.call(getattr()).result, Err(Errno::STALE));
    let read = Call::Read { node: old.clone(), handle: None, offset: 0, length: 9 };
    assert_eq!(client.call(read).result, Err(Errno::STALE));
    let new = find(&mut client, "f");
    assert_ne!(new.node, old.node);
    assert!(client.call(Call::GetAttr { node: new }).result.is_ok());
}

#[test]
fn node_ids_stay_valid_over_a_server_restart() {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(dir.path().join("f"), "").unwrap();
    let start = || Server::new(ServerOptions::new(state.path().to_owned())).unwrap();
    let server = start();
    let mut client = Client::wanting(server.serve_in_process().unwrap(), dir.path(), SOON, 0);
    let kept = find(&mut client, "f");
    drop((client, server));
    let server = start();
    let mut client = Client::wanting(server.serve_in_process().unwrap(), dir.path(), SOON, 0);
    client.session();
    assert!(client.call(Call::GetAttr { node: kept }).result.is_ok());
}
