use super::*;
use crate::Config;
use crate::cache::Cache;
use crate::op::{Caller, Op, OpReply, Output, Urgency};
use crate::test_fixtures::{T0, cache, calls, name, outputs};
use nigh_types::{
    Attr, CallId, Entry, Errno, Event, Grant, GrantId, Kind, Mode, OpId, Reply, Response, Span, Term,
};

const ROOT: NodeId = NodeId { ino: 1, generation: 1 };
const FILE: NodeId = NodeId { ino: 7, generation: 1 };

fn at(millis: u64) -> Time {
    T0.after(Span::from_millis(millis))
}

fn grant(node: NodeId, covers: LeaseScope, millis: u64) -> Grant {
    let term = Term::Limited(Span::from_millis(millis));
    Grant { id: GrantId(1), node, covers, mode: Mode::Read, term, recallable: false, shared: false }
}

fn file() -> Entry {
    let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
    Entry { id: FILE, attr, target: None, no_xattrs: false }
}

/// Replies of a remote without recalls: names for 1 s, absence for 2 s, attributes for 1 s.
fn answer(cache: &mut Cache, now: Time, call: CallId, reply: Result<Reply, Errno>, covers: &[LeaseScope]) {
    let grants = covers.iter().map(|covers| match covers {
        LeaseScope::NegativeDentry => grant(ROOT, *covers, 2_000),
        LeaseScope::Attributes => grant(FILE, *covers, 1_000),
        covers => grant(ROOT, *covers, 1_000),
    });
    let response = Response { grants: grants.collect(), ..Response::plain(reply) };
    cache.handle_event(now, Event::Response { call, response });
}

/// Returns the reply, or the one call that is sent for it.
fn ask(cache: &mut Cache, now: Time, op: Op) -> Result<OpReply, CallId> {
    match cache.handle_op(now, OpId(1), Caller::default(), op) {
        Some(answer) => Ok(answer),
        None => {
            let [call] = calls(cache)[..] else { panic!("one call") };
            Err(call)
        }
    }
}

fn look(cache: &mut Cache, now: Time, text: &str) -> Result<OpReply, CallId> {
    ask(cache, now, Op::Lookup { dir: 1, name: name(text) })
}

fn is_missing(found: &Result<OpReply, CallId>) -> bool {
    matches!(found, Ok(OpReply::Missing(_)))
}

/// Replies to a lookup with the file.
fn found(cache: &mut Cache, now: Time, call: CallId) {
    let covers = [LeaseScope::Dentry, LeaseScope::Attributes];
    answer(cache, now, call, Ok(Reply::Entry(Some(file()))), &covers);
    calls(cache);
}

fn missing(cache: &mut Cache, now: Time, text: &str) {
    let call = look(cache, now, text).unwrap_err();
    answer(cache, now, call, Ok(Reply::Entry(None)), &[LeaseScope::NegativeDentry]);
    calls(cache);
}

#[test]
fn missing_name_is_looked_up_once_within_its_grant() {
    let mut cache = cache(Config::default());
    missing(&mut cache, at(0), "a");
    missing(&mut cache, at(1_500), "b");
    assert!(is_missing(&look(&mut cache, at(1_999), "a")));
    assert!(look(&mut cache, at(2_000), "a").is_err(), "its time is over");
    assert!(is_missing(&look(&mut cache, at(3_499), "b")), "its own began later");
    assert!(look(&mut cache, at(3_500), "b").is_err());
}

#[test]
fn created_name_replaces_a_negative_dentry_at_once() {
    let makes: [fn(Name) -> Op; 3] = [
        |name| Op::Mkdir { dir: 1, name, mode: 0o755, umask: 0 },
        |name| Op::Symlink { dir: 1, name, target: b"t".to_vec() },
        |name| Op::Link { ino: 7, dir: 1, name },
    ];
    for make in makes {
        let mut cache = cache(Config::default());
        let call = look(&mut cache, at(0), "other").unwrap_err();
        found(&mut cache, at(0), call);
        missing(&mut cache, at(0), "a");
        let call = ask(&mut cache, at(1), make(name("a"))).unwrap_err();
        let made = Reply::Created { entry: file(), handle: None, existed: false };
        answer(&mut cache, at(2), call, Ok(made), &[LeaseScope::Dentry, LeaseScope::Attributes]);
        calls(&mut cache);
        assert!(matches!(look(&mut cache, at(3), "a"), Ok(OpReply::Node(_))));
    }
}

/// As above, if nothing may be kept.
#[test]
fn local_change_without_a_grant_drops_cached_names() {
    let mut cache = cache(Config::default());
    missing(&mut cache, at(0), "a");
    let call = ask(&mut cache, at(1), Op::Mkdir { dir: 1, name: name("a"), mode: 0, umask: 0 }).unwrap_err();
    let made = Reply::Created { entry: file(), handle: None, existed: false };
    answer(&mut cache, at(2), call, Ok(made), &[]);
    calls(&mut cache);
    assert!(look(&mut cache, at(3), "a").is_err(), "it is asked");
}

#[test]
fn removed_or_renamed_name_is_absent_at_once() {
    for moves in [false, true] {
        let mut cache = cache(Config::default());
        let call = look(&mut cache, at(0), "a").unwrap_err();
        found(&mut cache, at(0), call);
        missing(&mut cache, at(0), "b");
        if moves {
            let (from, to, exchange) = (1, 1, false);
            let rename = Op::Rename {
                from,
                name: name("a"),
                to,
                new_name: name("b"),
                no_replace: false,
                exchange,
                whiteout: false,
            };
            let call = ask(&mut cache, at(1), rename).unwrap_err();
            let renamed = Reply::Renamed { moved: FILE, replaced: None, pinned: None, whiteout: None };
            answer(&mut cache, at(1), call, Ok(renamed), &[LeaseScope::Dentry, LeaseScope::NegativeDentry]);
            calls(&mut cache);
        } else {
            let unlink = Op::Unlink { dir: 1, name: name("a") };
            let call = ask(&mut cache, at(1), unlink).unwrap_err();
            let removed = Reply::Removed { node: FILE, pinned: None };
            answer(&mut cache, at(1), call, Ok(removed), &[LeaseScope::NegativeDentry]);
            calls(&mut cache);
        }
        assert!(is_missing(&look(&mut cache, at(2), "a")), "moves: {moves}");
        let b = look(&mut cache, at(2), "b");
        assert_eq!(is_missing(&b), !moves, "{b:?}");
    }
}

/// The errno of a refused change says that a name exists, or does not, contrary to the cache.
#[test]
fn contradicting_error_drops_cached_names() {
    let mut cache = cache(Config::default());
    missing(&mut cache, at(0), "a");
    let call = ask(&mut cache, at(1), Op::Mkdir { dir: 1, name: name("a"), mode: 0, umask: 0 }).unwrap_err();
    answer(&mut cache, at(1), call, Err(Errno::EXIST), &[]);
    calls(&mut cache);
    assert!(look(&mut cache, at(2), "a").is_err());
}

fn list(cache: &mut Cache, now: Time, names: &[(&str, NodeId)]) {
    let call = ask(cache, now, Op::OpenDir { ino: 1 }).unwrap_err();
    let mut names: Vec<_> = names.iter().map(|(text, id)| (name(text), *id, Some(Kind::File))).collect();
    names.sort_by_key(|(name, ..)| cache.state.store.key().cookie(name.as_bytes()));
    answer(cache, now, call, Ok(Reply::Names(names)), &[LeaseScope::Directory]);
    calls(cache);
}

#[test]
fn listing_without_attributes_gives_names_types_and_absence() {
    let mut cache = cache(Config::default());
    list(&mut cache, at(0), &[("a", FILE)]);
    let Ok(OpReply::Opened(opened)) = ask(&mut cache, at(1), Op::OpenDir { ino: 1 }) else { panic!() };
    let read = Op::ReadDir { ino: 1, fh: opened.fh, offset: nigh_types::Cookie(0), size: 4096, plus: true };
    let Ok(OpReply::Page(page)) = ask(&mut cache, at(1), read) else { panic!("it is known") };
    let entry = page.entries.last().unwrap();
    assert_eq!((entry.ino, entry.mode, entry.node.is_none()), (7, 0o100_000, true));
    assert!(is_missing(&look(&mut cache, at(2), "b")));
    let call = look(&mut cache, at(2), "a").unwrap_err();
    found(&mut cache, at(2), call);
    assert!(matches!(look(&mut cache, at(1_001), "a"), Ok(OpReply::Node(_))), "the listing's time is over");
    assert!(look(&mut cache, at(1_001), "b").is_err());
}

#[test]
fn lookup_that_contradicts_a_listing_drops_the_listing() {
    let mut cache = cache(Config::default());
    list(&mut cache, at(0), &[("a", NodeId { ino: 6, generation: 1 }), ("b", FILE)]);
    let call = look(&mut cache, at(2), "a").unwrap_err();
    found(&mut cache, at(2), call);
    assert!(matches!(look(&mut cache, at(3), "a"), Ok(OpReply::Node(_))));
    assert!(look(&mut cache, at(3), "c").is_err(), "whether it is missing is not known");
}

#[test]
fn listing_replaces_dentry_leases() {
    let mut cache = cache(Config::default());
    missing(&mut cache, at(0), "a");
    missing(&mut cache, at(0), "b");
    list(&mut cache, at(1_000), &[("a", FILE)]);
    assert!(look(&mut cache, at(1_001), "a").is_err(), "it was listed, and its attributes are asked");
    assert!(is_missing(&look(&mut cache, at(1_001), "b")));
}

#[test]
fn dentry_leases_end_with_the_session() {
    let mut cache = cache(Config::default());
    missing(&mut cache, at(0), "a");
    cache.handle_event(at(1), Event::Expired { why: String::new() });
    let outputs = outputs(&mut cache);
    let urgency = |output: &Output| match output {
        Output::Invalidate { urgency, .. } => Some(*urgency),
        _ => None,
    };
    let found: Vec<Urgency> = outputs.iter().filter_map(urgency).collect();
    assert!(found.contains(&Urgency::AllGrantsEnded), "{outputs:?}");
    assert_eq!(cache.gauges().negative, 0);
}

/// Such a remote reuses the number of a removed directory for the next one.
#[test]
fn directory_found_by_another_name_loses_its_cached_names() {
    const DIR: NodeId = NodeId { ino: 9, generation: 2 };
    let found = |cache: &mut Cache, now: Time, text: &str| {
        let call = look(cache, now, text).unwrap_err();
        let attr = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
        let entry = Entry { id: DIR, attr, target: None, no_xattrs: false };
        answer(cache, now, call, Ok(Reply::Entry(Some(entry))), &[LeaseScope::Dentry]);
        calls(cache);
    };
    let below = || Op::Lookup { dir: DIR.ino, name: name("f") };
    let mut cache = cache(Config::default());
    found(&mut cache, at(0), "one");
    let call = ask(&mut cache, at(0), below()).unwrap_err();
    let response = Response {
        grants: vec![grant(DIR, LeaseScope::NegativeDentry, 9_000)],
        ..Response::plain(Ok(Reply::Entry(None)))
    };
    cache.handle_event(at(0), Event::Response { call, response });
    calls(&mut cache);
    assert!(is_missing(&ask(&mut cache, at(500), below())));
    found(&mut cache, at(1_500), "one");
    assert!(is_missing(&ask(&mut cache, at(1_500), below())), "it is where it was");
    found(&mut cache, at(1_500), "two");
    assert!(ask(&mut cache, at(1_500), below()).is_err(), "it may be another");
}
