//! What the kernel is to forget of a name that others are about to change.

use super::*;
use crate::lookup::tests::{T0, cache, calls, session};
use crate::op::Output;
use crate::{Config, Op};
use nigh_types::{Event, Grant, GrantId, Reply, Response, Term};

const FILE: NodeId = NodeId { ino: 7, generation: 1 };

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn entry() -> Entry {
    let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
    Entry { id: FILE, attr, target: None, no_xattrs: true }
}

/// Names of the root are granted, and the kernel was told of one for long.
fn told() -> Cache {
    let mut cache = cache(Config::default());
    let root = session().root;
    assert_eq!(look(&mut cache), None);
    let [call] = calls(&mut cache)[..] else { panic!("it is not known") };
    let grant = Grant { node: root, recallable: true, ..crate::grants::made_up(root) };
    let grants = vec![Grant { id: GrantId(1), term: Term::Session, ..grant }];
    let response = Response { grants, ..Response::plain(Ok(Reply::Looked(Some(entry())))) };
    cache.handle_event(T0, Event::Response { call, response });
    let told = std::iter::from_fn(|| Some(cache.poll_output()).filter(|o| !matches!(o, Output::Timeout(..))));
    let valid = told.filter_map(|output| match output {
        Output::Answer { answer: Answer::Node(node), .. } => Some(node.entry_valid),
        _ => None,
    });
    assert!(valid.last() > Some(Span::ZERO));
    cache
}

fn look(cache: &mut Cache) -> Option<Span> {
    let answer = cache.handle_op(T0, OpId(1), Caller::default(), Op::Lookup { dir: 1, name: name("x") })?;
    if let Answer::Node(node) = answer { Some(node.entry_valid) } else { panic!("{answer:?}") }
}

/// Others change a name of the root; whether the kernel is to forget it before.
fn push(cache: &mut Cache, called: &str) -> bool {
    let (id, node) = (RecallId(7), session().root);
    let facts = vec![Held { node, covers: Covers::Names, names: vec![name(called)] }];
    cache.handle_event(T0, Event::Hold(Hold { id, facts }));
    let mut forgets = false;
    loop {
        match cache.poll_output() {
            Output::Timeout(..) => break,
            Output::Invalidate { id, stale, .. } => {
                forgets |= stale.contains(&Stale::Entry { dir: 1, name: name(called) });
                cache.handle_invalidated(T0, id);
            }
            _ => {}
        }
    }
    let entry = (called == "x").then(entry);
    let facts = vec![Fact::Name { dir: node, name: name(called), entry }];
    cache.handle_event(T0, Event::Commit(Commit { id, facts }));
    calls(cache);
    forgets
}

/// The kernel may have taken the answers in the other way round.
#[test]
fn a_name_that_was_told_for_long_is_dropped_though_it_was_told_for_no_time_since() {
    let mut cache = told();
    // Others change its directory again and again.
    assert!(!push(&mut cache, "y") && !push(&mut cache, "y"));
    assert_eq!(look(&mut cache), Some(Span::ZERO));
    assert!(push(&mut cache, "x"));
    assert_eq!(look(&mut cache), Some(Span::ZERO));
    assert!(!push(&mut cache, "x"), "it is dropped once");
}
