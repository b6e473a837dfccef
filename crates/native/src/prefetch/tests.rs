use super::*;
use nigh_types::{Attr, Entry, Name};

const KEY: CookieKey = CookieKey([0; 16]);
const CALL: CallId = CallId(1);

fn id(ino: u64) -> NodeId {
    NodeId { ino, generation: 1 }
}

fn listed(names: &[(&str, u64, u32)]) -> Entries {
    let entry = |&(text, ino, mode): &(&str, u64, u32)| {
        let attr = Attr { mode, nlink: 1, ..Attr::default() };
        (Name::new(text.as_bytes()).unwrap(), Entry { id: id(ino), attr, target: None, no_xattrs: true })
    };
    let mut entries: Vec<_> = names.iter().map(entry).collect();
    entries.sort_by_key(|(name, _)| KEY.cookie(name.as_bytes()));
    Entries { entries }
}

fn step(dir: u64, names: &[(&str, u64, u32)], last: bool) -> PrefetchedDir {
    PrefetchedDir { dir: id(dir), listed: Some(listed(names)), last }
}

fn walk(credit: u32) -> PrefetchValidator {
    PrefetchValidator::new(&[NodeRef::without_hint(id(2)), NodeRef::without_hint(id(3))], credit)
}

fn why(result: Result<(), ProtocolError>) -> &'static str {
    match result {
        Err(ProtocolError::WrongReply { call: CALL, what }) => what,
        other => panic!("{other:?}"),
    }
}

const DIR: u32 = 0o040_755;
const FILE: u32 = 0o100_644;

#[test]
fn prefetch_accepts_requested_directories_and_their_children_once() {
    let mut walk = walk(10);
    let steps = [step(2, &[("a", 4, DIR), ("b", 5, FILE)], true), step(4, &[], true), step(3, &[], true)];
    assert_eq!(walk.check(CALL, &steps, KEY), Ok(()));
    assert_eq!(why(walk.check(CALL, &[step(4, &[], true)], KEY)), "a directory that was not asked for");
}

#[test]
fn prefetch_rejects_unrequested_directory() {
    for other in [5, 6] {
        let mut walk = walk(10);
        assert_eq!(walk.check(CALL, &[step(2, &[("b", 5, FILE)], true)], KEY), Ok(()));
        let told = walk.check(CALL, &[step(other, &[], true)], KEY);
        assert_eq!(why(told), "a directory that was not asked for");
    }
}

#[test]
fn prefetch_without_credit_accepts_only_wanted_directory() {
    let mut walk = walk(3);
    assert_eq!(walk.check(CALL, &[step(2, &[("a", 4, DIR), ("b", 5, FILE)], true)], KEY), Ok(()));
    let mut spent = walk.clone();
    assert_eq!(why(spent.check(CALL, &[step(4, &[], true)], KEY)), "more than was asked for");
    walk.add_credit(0, Some(&NodeRef::without_hint(id(3))));
    assert_eq!(walk.check(CALL, &[step(3, &[("c", 6, FILE)], true)], KEY), Ok(()));
    walk.add_credit(1, None);
    assert_eq!(walk.check(CALL, &[step(4, &[], true)], KEY), Ok(()));
}

#[test]
fn prefetch_skipped_directory_costs_no_credit_and_is_not_sent_later() {
    let mut walk = walk(1);
    let out = |dir| PrefetchedDir { dir: id(dir), listed: None, last: true };
    assert_eq!(walk.check(CALL, &[out(2), out(3)], KEY), Ok(()));
    assert_eq!(why(walk.check(CALL, &[out(2)], KEY)), "a directory that was not asked for");
}

#[test]
fn prefetch_rejects_interleaved_directories() {
    let mut walk = walk(10);
    assert_eq!(walk.check(CALL, &[step(2, &[("a", 4, DIR)], false)], KEY), Ok(()));
    let told = walk.check(CALL, &[step(3, &[], true)], KEY);
    assert_eq!(why(told), "names of two directories among each other");
}

#[test]
fn prefetch_rejects_name_repeated_in_later_chunk() {
    let mut walk = walk(10);
    assert_eq!(walk.check(CALL, &[step(2, &[("a", 4, FILE)], false)], KEY), Ok(()));
    let again = walk.check(CALL, &[step(2, &[("a", 4, FILE)], true)], KEY);
    assert_eq!(again, Err(ProtocolError::Order(CALL)));
}

#[test]
fn prefetch_rejects_oversized_unrequested_directory() {
    let mut walk = PrefetchValidator::new(&[NodeRef::without_hint(id(2))], u32::MAX);
    let names: Vec<String> = (0..=Call::MOST_PREFETCHED_NAMES).map(|n| n.to_string()).collect();
    let entries: Vec<(&str, u64, u32)> = names.iter().map(|name| (name.as_str(), 9, FILE)).collect();
    let told = walk.check(CALL, &[step(2, &entries, false)], KEY);
    assert_eq!(why(told), "a larger directory than may come unasked");
}
