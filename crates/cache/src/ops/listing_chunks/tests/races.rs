//! Local changes that race with chunks of a listing.

use crate::Config;
use crate::cache::Cache;
use crate::op::{Caller, Op, OpReply, Output};
use crate::test_fixtures::{T0, answers, cache, calls, in_part, name, outputs, part};
use nigh_types::{
    Attr, CallId, CookieKey, Entry, Event, Grant, GrantId, Kind, LeaseScope, Mode, NodeId, OpId, Reply,
    Response, Term,
};

/// Four names in listing order.
fn names() -> [&'static str; 4] {
    let mut names = ["a", "b", "c", "d"];
    names.sort_by_key(|name| CookieKey::default().cookie(name.as_bytes()));
    names
}

fn ask(cache: &mut Cache, nth: u64, op: Op) -> CallId {
    assert_eq!(cache.handle_op(T0, OpId(nth), Caller::default(), op), None);
    let [call] = calls(cache)[..] else { panic!("the remote is asked") };
    call
}

fn unlink(cache: &mut Cache, nth: u64, text: &str) -> CallId {
    ask(cache, nth, Op::Unlink { dir: 1, name: name(text) })
}

fn arrives(cache: &mut Cache, call: CallId, response: Response) {
    cache.handle_event(T0, Event::Response { call, response });
}

/// The number that [`part`] gives the first of the last names.
fn removed() -> Response {
    Response::plain(Ok(Reply::Removed { node: NodeId { ino: 110, generation: 1 }, pinned: None }))
}

fn made() -> Response {
    let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
    let entry = Entry { id: NodeId { ino: 50, generation: 1 }, attr, target: None, no_xattrs: true };
    Response::plain(Ok(Reply::Created { entry, handle: None, existed: false }))
}

fn names_of(node: NodeId) -> Grant {
    let (id, covers, mode, term) = (GrantId(9), LeaseScope::Directory, Mode::Read, Term::Session);
    Grant { id, node, covers, mode, term, recallable: true, shared: false }
}

fn granted(response: Response) -> Response {
    Response { grants: vec![names_of(NodeId { ino: 1, generation: 1 })], ..response }
}

fn mknod(cache: &mut Cache, nth: u64, text: &str) -> CallId {
    let (name, kind) = (name(text), Kind::File);
    ask(cache, nth, Op::Mknod { dir: 1, name, kind, mode: 0o644, umask: 0, rdev: 0 })
}

fn look(cache: &mut Cache, text: &str) -> Option<OpReply> {
    cache.handle_op(T0, OpId(99), Caller::default(), Op::Lookup { dir: 1, name: name(text) })
}

/// Checks that the third name is known as absent and the listing as complete, without a call or an invalidation.
fn is_whole_without_the_third(cache: &mut Cache) {
    let names = names();
    let outputs = outputs(cache);
    assert!(!outputs.iter().any(|output| matches!(output, Output::Call { .. })), "{outputs:?}");
    assert!(matches!(look(cache, names[2]), Some(OpReply::Missing(_))));
    for there in [names[0], names[1], names[3]] {
        assert!(matches!(look(cache, there), Some(OpReply::Node(_))), "{there}");
    }
    let opened = cache.handle_op(T0, OpId(98), Caller::default(), Op::OpenDir { ino: 1 });
    assert!(matches!(opened, Some(OpReply::Opened(_))), "{opened:?}");
}

/// The server read the name before it was removed.
#[test]
fn name_removed_under_a_lease_stays_absent_when_a_later_chunk_lists_it() {
    let (mut cache, names) = (cache(Config::default()), names());
    let (listing, _) = in_part(&mut cache, &names[..2]);
    let change = unlink(&mut cache, 2, names[2]);
    arrives(&mut cache, change, removed());
    assert!(matches!(answers(&mut cache)[..], [(OpId(2), OpReply::Done)]));
    arrives(&mut cache, listing, part(&names[2..], true));
    is_whole_without_the_third(&mut cache);
}

/// As above, but the reply to the removal comes after the chunk.
#[test]
fn removal_in_flight_under_a_lease_wins_over_a_chunk_that_lists_the_name() {
    let (mut cache, names) = (cache(Config::default()), names());
    let (listing, _) = in_part(&mut cache, &names[..2]);
    let change = unlink(&mut cache, 2, names[2]);
    arrives(&mut cache, listing, part(&names[2..], true));
    arrives(&mut cache, change, removed());
    assert!(matches!(answers(&mut cache)[..], [(OpId(2), OpReply::Done)]));
    is_whole_without_the_third(&mut cache);
}

#[test]
fn name_created_under_a_lease_stays_when_a_later_chunk_lacks_it() {
    let (mut cache, names) = (cache(Config::default()), names());
    let (listing, _) = in_part(&mut cache, &names[..2]);
    let change = mknod(&mut cache, 2, names[2]);
    arrives(&mut cache, change, made());
    arrives(&mut cache, listing, part(&names[3..], true));
    assert!(matches!(answers(&mut cache)[..], [(OpId(2), OpReply::Node(_))]));
    let Some(OpReply::Node(node)) = look(&mut cache, names[2]) else { panic!("it is there") };
    assert_eq!(node.number, 50);
    assert!(matches!(look(&mut cache, names[3]), Some(OpReply::Node(_))));
}

/// Nothing was granted at the time of the call: another client may have made the name again since, without a recall.
#[test]
fn name_removed_before_the_lease_is_looked_up_again() {
    let (mut cache, names) = (cache(Config::default()), names());
    let listing = ask(&mut cache, 1, Op::OpenDir { ino: 1 });
    let change = unlink(&mut cache, 2, names[2]);
    arrives(&mut cache, listing, part(&names[..2], false));
    arrives(&mut cache, change, removed());
    assert_eq!(answers(&mut cache).len(), 2);
    arrives(&mut cache, listing, part(&names[2..], true));
    assert_eq!(look(&mut cache, names[2]), None);
    assert_eq!(look(&mut cache, names[3]), None);
}

/// That grant ended, and another has begun: no recall covered changes between the two.
#[test]
fn name_removed_under_an_earlier_lease_is_looked_up_again() {
    let (mut cache, names) = (cache(Config::default()), names());
    let (first, _) = in_part(&mut cache, &names[..2]);
    let second = {
        let change = unlink(&mut cache, 2, names[2]);
        arrives(&mut cache, first, part(&names[2..], true));
        crate::facts::leases::drop_dir_names(&mut cache.state, 1);
        let listing = ask(&mut cache, 3, Op::OpenDir { ino: 1 });
        arrives(&mut cache, change, removed());
        listing
    };
    arrives(&mut cache, second, part(&names[..2], false));
    answers(&mut cache);
    arrives(&mut cache, second, part(&names[2..], true));
    assert_eq!(look(&mut cache, names[2]), None);
    assert_eq!(look(&mut cache, names[3]), None);
}

/// The order of the two changes is not known.
#[test]
fn two_local_changes_of_a_name_in_unknown_order_cause_a_lookup() {
    let (mut cache, names) = (cache(Config::default()), names());
    let (listing, _) = in_part(&mut cache, &names[..2]);
    let (made_it, took_it) = (mknod(&mut cache, 2, names[2]), unlink(&mut cache, 3, names[2]));
    arrives(&mut cache, made_it, made());
    arrives(&mut cache, listing, part(&names[3..], true));
    arrives(&mut cache, took_it, removed());
    assert_eq!(answers(&mut cache).len(), 2);
    assert_eq!(look(&mut cache, names[2]), None);
    assert!(!calls(&mut cache).is_empty());
}

/// The name is made before the grant is given, and the reply comes without a grant. A concurrent lookup finds the name,
/// without a grant too.
#[test]
fn name_created_before_a_contradicting_grant_is_looked_up_again() {
    let (mut cache, names) = (cache(Config::default()), names());
    let change = mknod(&mut cache, 2, names[2]);
    let looked = ask(&mut cache, 3, Op::Lookup { dir: 1, name: name(names[2]) });
    let listing = ask(&mut cache, 1, Op::OpenDir { ino: 1 });
    arrives(&mut cache, listing, part(&names[..2], false));
    arrives(&mut cache, listing, part(&names[3..], true));
    let Response { result: Ok(Reply::Created { entry, .. }), .. } = made() else { panic!("it is made") };
    arrives(&mut cache, looked, Response::plain(Ok(Reply::Entry(Some(entry)))));
    arrives(&mut cache, change, made());
    assert_eq!(answers(&mut cache).len(), 3);
    assert_eq!(look(&mut cache, names[2]), None);
}

/// The chunk has a name in place of one that a local change removed: the number of names is as expected.
#[test]
fn name_missing_from_a_chunk_is_absent_when_the_chunk_lists_a_removed_name() {
    let (mut cache, names) = (cache(Config::default()), names());
    let (listing, _) = in_part(&mut cache, &names[..2]);
    let looked = ask(&mut cache, 3, Op::Lookup { dir: 1, name: name(names[3]) });
    let Response { result: Ok(Reply::Created { entry, .. }), grants, .. } = granted(made()) else { panic!() };
    let response = Response { grants, ..Response::plain(Ok(Reply::Entry(Some(entry)))) };
    arrives(&mut cache, looked, response);
    let change = unlink(&mut cache, 2, names[2]);
    arrives(&mut cache, change, removed());
    arrives(&mut cache, listing, part(&names[2..3], true));
    assert!(matches!(look(&mut cache, names[2]), Some(OpReply::Missing(_))));
    assert!(matches!(look(&mut cache, names[3]), Some(OpReply::Missing(_))));
}

/// A lookup finds the directory and a file is made in it before the reply to mkdir comes.
#[test]
fn new_directory_is_not_known_as_empty_after_a_create_in_it() {
    let mut cache = cache(Config::default());
    let dir = NodeId { ino: 40, generation: 1 };
    let attr = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
    let entry = Entry { id: dir, attr, target: None, no_xattrs: true };
    let made_it = ask(&mut cache, 1, Op::Mkdir { dir: 1, name: name("d"), mode: 0o755, umask: 0 });
    let looked = ask(&mut cache, 2, Op::Lookup { dir: 1, name: name("d") });
    arrives(&mut cache, looked, granted(Response::plain(Ok(Reply::Entry(Some(entry.clone()))))));
    let mknod = Op::Mknod { dir: 40, name: name("f"), kind: Kind::File, mode: 0o644, umask: 0, rdev: 0 };
    let change = ask(&mut cache, 3, mknod);
    arrives(&mut cache, change, made());
    let grants = vec![names_of(dir)];
    let reply = Reply::Created { entry, handle: None, existed: false };
    arrives(&mut cache, made_it, Response { grants, ..Response::plain(Ok(reply)) });
    assert_eq!(answers(&mut cache).len(), 2);
    let looked = cache.handle_op(T0, OpId(4), Caller::default(), Op::Lookup { dir: 40, name: name("f") });
    assert!(!matches!(looked, Some(OpReply::Missing(_))), "{looked:?}");
}
