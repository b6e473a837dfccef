use crate::op::OpReply;
use crate::test_fixtures::{T0, cache, calls, name, session};
use crate::{Cache, Caller, Config, Op, Output};
use nigh_types::{
    Attr, Call, CallId, Entries, Entry, Event, Features, Grant, GrantId, Kind, LeaseScope, Mode, Name,
    NodeId, NodeRef, OpId, PrefetchedDir, Reply, Response, SessionParams, Span, Term, Time,
};

/// The server renumbers a grant with each reply, and ends it by its latest id.
#[test]
fn unused_prefetched_grants_are_returned_unless_held_otherwise() {
    let mut cache = cache(Config::default());
    let (root, other) = (NodeId { ino: 1, generation: 1 }, NodeId { ino: 50, generation: 1 });
    let (mode, term) = (Mode::Read, Term::Session);
    let grant = |id, node, covers| Grant {
        id: GrantId(id),
        node,
        covers,
        mode,
        term,
        recallable: true,
        shared: false,
    };
    let lookup = Op::Lookup { dir: 1, name: Name::new(b"d").unwrap() };
    assert_eq!(cache.handle_op(T0, OpId(1), Caller::default(), lookup), None);
    let [call] = calls(&mut cache)[..] else { panic!("it is asked for") };
    let attr = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
    let below = NodeId { ino: 7, generation: 1 };
    let entry = Entry { id: below, attr, target: None, no_xattrs: true };
    let grants = vec![grant(1, root, LeaseScope::Directory), grant(2, below, LeaseScope::Attributes)];
    let response = Response { grants, ..Response::plain(Ok(Reply::Entry(Some(entry)))) };
    cache.handle_event(T0, Event::Response { call, response });
    calls(&mut cache);
    crate::ops::prefetching::return_unused_grants(
        &mut cache.state,
        &[
            grant(11, root, LeaseScope::Directory),
            grant(12, below, LeaseScope::Attributes),
            grant(13, below, LeaseScope::Directory),
            grant(14, other, LeaseScope::Attributes),
        ],
    );
    assert_eq!(cache.poll_output(), Output::Return(vec![GrantId(13), GrantId(14)]));
}

const FILES: u64 = 8;

fn attached() -> Cache {
    let mut cache = Cache::new(Config::default());
    let supports = Features { prefetch: true, prefetch_in_session: true, ..Features::default() };
    cache.handle_event(T0, Event::Attached(SessionParams { supports, ..session() }));
    cache
}

fn file(nth: u64) -> (Name, NodeId) {
    (name(&format!("f{nth}")), NodeId { ino: 10 + nth, generation: 1 })
}

/// A session that prefetches itself, under limits of one second; its root is listed without attributes.
fn listed_by_names() -> Cache {
    listed(Kind::File)
}

fn listed(kind: Kind) -> Cache {
    let mut cache = attached();
    assert_eq!(cache.handle_op(T0, OpId(1), Caller::default(), Op::OpenDir { ino: 1 }), None);
    let [call] = calls(&mut cache)[..] else { panic!("it is listed") };
    let key = session().cookie_key;
    let mut names: Vec<(Name, NodeId, Option<Kind>)> =
        (0..FILES).map(file).map(|(name, id)| (name, id, Some(kind))).collect();
    names.sort_by_key(|(name, ..)| key.cookie(name.as_bytes()));
    let response = Response { grants: vec![listing(1)], ..Response::plain(Ok(Reply::Names(names))) };
    cache.handle_event(T0, Event::Response { call, response });
    calls(&mut cache);
    cache
}

fn listing(id: u64) -> Grant {
    let (node, covers, mode) = (session().root, LeaseScope::Directory, Mode::Read);
    let term = Term::Limited(Span::from_secs(1));
    Grant { id: GrantId(id), node, covers, mode, term, recallable: false, shared: false }
}

fn look_up(cache: &mut Cache, now: Time, nth: u64) -> Option<OpReply> {
    let (name, _) = file(nth);
    cache.handle_op(now, OpId(100 + nth), Caller::default(), Op::Lookup { dir: 1, name })
}

/// Looks up names until a job begins; returns its call, and the number of lookups.
fn begun_by_lookups(cache: &mut Cache) -> (CallId, u64) {
    for nth in 0..FILES {
        assert_eq!(look_up(cache, T0, nth), None, "the listing has no attributes");
        while let output = cache.poll_output()
            && !matches!(output, Output::Timeout(..))
        {
            if let Output::Call { id, call: Call::Prefetch { roots, .. }, .. } = output {
                assert!(roots.iter().map(|place| place.node).eq([session().root]));
                return (id, nth + 1);
            }
        }
    }
    panic!("no job begins");
}

fn prefetched() -> Response {
    prefetched_as(Attr { mode: 0o100_644, nlink: 1, ..Attr::default() })
}

fn prefetched_as(attr: Attr) -> Response {
    let key = session().cookie_key;
    let entry = |(name, id)| (name, Entry { id, attr, target: None, no_xattrs: false });
    let mut entries: Vec<(Name, Entry)> = (0..FILES).map(file).map(entry).collect();
    entries.sort_by_key(|(name, _)| key.cookie(name.as_bytes()));
    let step = PrefetchedDir { dir: session().root, listed: Some(Entries { entries }), last: true };
    let result = Ok(Reply::Prefetched(vec![step]));
    let of_entries = (0..FILES).map(|nth| (nth, file(nth).1)).filter(|_| !attr.covered_by_parent());
    let of_entry = |(nth, node)| Grant { node, covers: LeaseScope::Attributes, ..listing(20 + nth) };
    let grants = of_entries.map(of_entry).chain([listing(2)]).collect();
    Response { grants, last: false, ..Response::plain(result) }
}

#[test]
fn attributes_of_a_listed_directory_are_prefetched_after_four_lookups() {
    let mut cache = listed_by_names();
    let (call, lookups) = begun_by_lookups(&mut cache);
    assert_eq!(lookups, 4);
    cache.handle_event(T0, Event::Response { call, response: prefetched() });
    calls(&mut cache);
    assert!(matches!(look_up(&mut cache, T0, 7), Some(OpReply::Node(_))));
}

/// The session began to read the directory when it had emitted the reply before.
#[test]
fn limit_of_a_directory_prefetched_by_the_session_counts_from_the_reply_before() {
    let mut cache = listed_by_names();
    let (call, _) = begun_by_lookups(&mut cache);
    let at = |millis| T0.after(Span::from_millis(millis));
    let nothing = Response { last: false, ..Response::plain(Ok(Reply::Prefetched(Vec::new()))) };
    cache.handle_event(at(5_000), Event::Response { call, response: nothing });
    cache.handle_event(at(5_050), Event::Response { call, response: prefetched() });
    calls(&mut cache);
    assert!(matches!(look_up(&mut cache, at(5_990), 7), Some(OpReply::Node(_))), "within a second");
    assert_eq!(look_up(&mut cache, at(6_010), 6), None);
}

/// The listing has no attributes, so the cache has no records of the directories that no caller has looked up.
#[test]
fn walk_over_a_listing_without_attributes_prefetches_the_later_directories() {
    let mut cache = listed(Kind::Directory);
    let key = session().cookie_key;
    let mut dirs: Vec<(Name, NodeId)> = (0..FILES).map(file).collect();
    dirs.sort_by_key(|(name, _)| key.cookie(name.as_bytes()));
    let attr = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
    let mut begun = None;
    for (nth, (name, id)) in dirs[..2].iter().enumerate() {
        let op = Op::Lookup { dir: 1, name: name.clone() };
        assert_eq!(cache.handle_op(T0, OpId(200), Caller::default(), op), None);
        let [call] = calls(&mut cache)[..] else { panic!("it is looked up") };
        let entry = Entry { id: *id, attr, target: None, no_xattrs: false };
        let grant = Grant { node: *id, covers: LeaseScope::Attributes, ..listing(10 + nth as u64) };
        let found = Response { grants: vec![grant], ..Response::plain(Ok(Reply::Entry(Some(entry)))) };
        cache.handle_event(T0, Event::Response { call, response: found });
        calls(&mut cache);
        let open = Op::OpenDir { ino: id.ino };
        assert_eq!(cache.handle_op(T0, OpId(300 + nth as u64), Caller::default(), open), None);
        while let output = cache.poll_output()
            && !matches!(output, Output::Timeout(..))
        {
            if let Output::Call { id, call: Call::Prefetch { roots, .. }, .. } = output {
                begun = Some((id, roots));
            }
        }
    }
    let (call, roots) = begun.expect("the second one begins a walk");
    let hinted =
        |(name, id): &(Name, NodeId)| NodeRef { node: *id, path_hint: Some((session().root, name.clone())) };
    assert!(roots.into_iter().eq(dirs[1..].iter().map(hinted)));
    let last = dirs[7].1;
    assert!(cache.state.store.has_inode(last.ino));
    cache.handle_event(
        T0,
        Event::Response { call, response: Response::plain(Ok(Reply::Prefetched(Vec::new()))) },
    );
    assert!(!cache.state.store.has_inode(last.ino), "it did not come");
}

/// No FORGET comes for an inode that the kernel never looked up.
#[test]
fn records_of_prefetched_entries_end_with_the_listing() {
    let mut cache = listed_by_names();
    let (call, _) = begun_by_lookups(&mut cache);
    let links = Attr { mode: 0o100_644, nlink: 2, ..Attr::default() };
    cache.handle_event(T0, Event::Response { call, response: prefetched_as(links) });
    calls(&mut cache);
    let last = file(7).1.ino;
    assert!(cache.state.store.has_inode(last), "its attributes have a grant of their own");
    assert_eq!(look_up(&mut cache, T0.after(Span::from_secs(2)), 5), None);
    assert!(!cache.state.store.has_inode(last));
}
