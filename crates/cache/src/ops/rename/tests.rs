//! Facts about a file that a local change has moved.

use super::*;
use crate::Config;
use crate::cache::Cache;
use crate::op::Output;
use crate::test_fixtures::{T0, ask, cache, name, outputs, session};
use nigh_types::{
    Attr, CallId, Entry, Event, Grant, GrantId, Kind, OpId, RecallId, Term, UpdateCommit, UpdatePrepare,
};

const FILE: NodeId = NodeId { ino: 7, generation: 1 };

fn attr() -> Attr {
    Attr { mode: 0o100_644, nlink: 1, ..Attr::default() }
}

/// Returns the invalidations after the reply.
fn answer(cache: &mut Cache, call: CallId, response: Response) -> Vec<KernelInvalidation> {
    cache.handle_event(T0, Event::Response { call, response });
    let outputs = outputs(cache).into_iter();
    outputs
        .filter_map(|o| if let Output::Invalidate { stale, .. } = o { Some(stale) } else { None })
        .flatten()
        .collect()
}

/// A file is known to have no xattrs.
fn looked(cache: &mut Cache) {
    let looked = ask(cache, Op::Lookup { dir: 1, name: name("x") });
    let entry = Entry { id: FILE, attr: attr(), target: None, no_xattrs: true };
    answer(cache, looked, granted(Reply::Entry(Some(entry))));
    assert_eq!(value(cache), Some(OpReply::Failed(Errno::NODATA)));
}

fn granted(reply: Reply) -> Response {
    let grant = Grant { id: GrantId(1), term: Term::Session, ..crate::grants::fabricated(session().root) };
    Response { grants: vec![grant], ..Response::plain(Ok(reply)) }
}

fn value(cache: &mut Cache) -> Option<OpReply> {
    let get = Op::GetXattr { ino: 7, name: b"user.a".to_vec(), size: 9 };
    cache.handle_op(T0, OpId(2), Caller::default(), get)
}

fn renamed(cache: &mut Cache) {
    let (from, to, no_replace, exchange) = (1, 1, false, false);
    let rename =
        Op::Rename { from, name: name("x"), to, new_name: name("z"), no_replace, exchange, whiteout: false };
    let call = ask(cache, rename);
    let reply = Reply::Renamed { moved: FILE, replaced: None, pinned: None, whiteout: None };
    answer(cache, call, Response { after: vec![(FILE, attr())], ..granted(reply) });
}

/// Another client has set one while another name of the file, which is gone since, was its parent entry.
#[test]
fn rename_does_not_carry_no_xattrs_from_an_entry_that_is_not_the_parent_entry() {
    let mut cache = cache(Config::default());
    looked(&mut cache);
    crate::facts::inodes::set_parent_entry(&mut cache.state, FILE, (1, &name("y")));
    crate::facts::leases::drop_xattrs(&mut cache.state, FILE.ino);
    renamed(&mut cache);
    assert_eq!(value(&mut cache), None, "the remote is asked");
}

/// Other clients set an xattr, and the name is gone when their commit comes.
#[test]
fn rename_does_not_carry_no_xattrs_from_an_entry_under_update() {
    let mut cache = cache(Config::default());
    looked(&mut cache);
    let (id, node, names) = (RecallId(7), session().root, vec![name("x")]);
    let facts = vec![nigh_types::UpdateScope { node, covers: nigh_types::LeaseScope::Directory, names }];
    cache.handle_event(T0, Event::UpdatePrepare(UpdatePrepare { id, facts }));
    renamed(&mut cache);
    cache.handle_event(T0, Event::UpdateCommit(UpdateCommit { id, facts: Vec::new() }));
    assert_eq!(value(&mut cache), None, "the remote is asked");
}

const LEFT: NodeId = NodeId { ino: 9, generation: 1 };

/// `x` is renamed to `z` and leaves a whiteout, which the reply names.
fn left_a_whiteout(cache: &mut Cache, whiteout: Option<NodeId>) -> Vec<KernelInvalidation> {
    let (from, to, no_replace, exchange) = (1, 1, false, false);
    let rename =
        Op::Rename { from, name: name("x"), to, new_name: name("z"), no_replace, exchange, whiteout: true };
    let call = ask(cache, rename);
    let reply = Reply::Renamed { moved: FILE, replaced: None, pinned: None, whiteout };
    let mut after = vec![(FILE, attr())];
    after.extend(whiteout.map(|id| (id, Attr { mode: 0o020_000, nlink: 1, ..Attr::default() })));
    answer(cache, call, Response { after, ..granted(reply) })
}

fn look(cache: &mut Cache, at: &str) -> Option<OpReply> {
    cache.handle_op(T0, OpId(2), Caller::default(), Op::Lookup { dir: 1, name: name(at) })
}

#[test]
fn rename_with_whiteout_caches_both_names_and_invalidates_nothing() {
    let mut cache = cache(Config::default());
    looked(&mut cache);
    assert_eq!(left_a_whiteout(&mut cache, Some(LEFT)), []);
    for (at, id, kind) in [("x", LEFT, Kind::CharDevice), ("z", FILE, Kind::File)] {
        match look(&mut cache, at) {
            Some(OpReply::Node(node)) => assert_eq!((node.id, node.attr.kind()), (id, kind)),
            other => panic!("{at}: {other:?}"),
        }
    }
}

/// The whiteout was gone when the remote looked, or the look failed.
#[test]
fn rename_without_a_whiteout_in_the_reply_drops_the_old_name() {
    let mut cache = cache(Config::default());
    looked(&mut cache);
    left_a_whiteout(&mut cache, None);
    assert_eq!(look(&mut cache, "x"), None, "the remote is asked");
}

/// Holders of an `O_PATH` descriptor (overlayfs) do not look its name up again.
#[test]
fn inode_without_its_latest_name_is_reached_by_its_earlier_name() {
    let mut cache = cache(Config::default());
    let entry = |nlink| {
        let attr = Attr { mode: 0o020_000, nlink, ..Attr::default() };
        Entry { id: LEFT, attr, target: None, no_xattrs: true }
    };
    let call = ask(&mut cache, Op::Lookup { dir: 1, name: name("x") });
    answer(&mut cache, call, granted(Reply::Entry(Some(entry(1)))));
    let call = ask(&mut cache, Op::Link { ino: 9, dir: 1, name: name("y") });
    answer(&mut cache, call, granted(Reply::Created { entry: entry(2), handle: None, existed: false }));
    let at = |cache: &Cache| {
        crate::view::paths::node_ref(&cache.state, 9).and_then(|place| place.path_hint).map(|(_, name)| name)
    };
    assert_eq!(at(&cache), Some(name("y")));
    let call = ask(&mut cache, Op::Unlink { dir: 1, name: name("y") });
    answer(&mut cache, call, granted(Reply::Removed { node: LEFT, pinned: None }));
    assert_eq!(at(&cache), Some(name("x")));
}
