//! Invalidations of a name that another client is about to change.

use super::*;
use crate::cache::Cache;
use crate::op::{Caller, OpReply, Output};
use crate::test_fixtures::{T0, cache, calls, name, outputs, session};
use crate::{Config, Op};
use nigh_types::{Event, Grant, GrantId, OpId, RecallId, Reply, Response, Span, Term};

const FILE: NodeId = NodeId { ino: 7, generation: 1 };

fn entry() -> Entry {
    let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
    Entry { id: FILE, attr, target: None, no_xattrs: true }
}

/// Grants names of the root, and gives the kernel one of them with a long timeout.
fn told() -> Cache {
    let mut cache = cache(Config::default());
    let root = session().root;
    assert_eq!(look(&mut cache), None);
    let [call] = calls(&mut cache)[..] else { panic!("it is not known") };
    let grant = Grant { node: root, recallable: true, ..crate::grants::fabricated(root) };
    let grants = vec![Grant { id: GrantId(1), term: Term::Session, ..grant }];
    let response = Response { grants, ..Response::plain(Ok(Reply::Entry(Some(entry())))) };
    cache.handle_event(T0, Event::Response { call, response });
    let told = outputs(&mut cache).into_iter();
    let mut valid = told.filter_map(|output| match output {
        Output::Answer { answer: OpReply::Node(node), .. } => Some(node.entry_valid),
        _ => None,
    });
    assert!(valid.next_back() > Some(Span::ZERO));
    cache
}

fn look(cache: &mut Cache) -> Option<Span> {
    look_at(cache, "x")
}

fn look_at(cache: &mut Cache, called: &str) -> Option<Span> {
    let answer =
        cache.handle_op(T0, OpId(1), Caller::default(), Op::Lookup { dir: 1, name: name(called) })?;
    if let OpReply::Node(node) = answer { Some(node.entry_valid) } else { panic!("{answer:?}") }
}

/// Another client changes a name of the root; returns whether the kernel drops the name before.
fn push(cache: &mut Cache, called: &str) -> bool {
    become_of(cache, called, (called == "x").then(entry))
}

fn become_of(cache: &mut Cache, called: &str, entry: Option<Entry>) -> bool {
    let (id, node) = (RecallId(7), session().root);
    let facts = vec![UpdateScope { node, covers: LeaseScope::Directory, names: vec![name(called)] }];
    cache.handle_event(T0, Event::UpdatePrepare(UpdatePrepare { id, facts }));
    let mut forgets = false;
    loop {
        match cache.poll_output() {
            Output::Timeout(..) => break,
            Output::Invalidate { id, stale, .. } => {
                forgets |= stale.contains(&KernelInvalidation::Entry { dir: 1, name: name(called) });
                cache.handle_invalidated(T0, id);
            }
            _ => {}
        }
    }
    let facts = vec![UpdatedFact::Name { dir: node, name: name(called), entry }];
    cache.handle_event(T0, Event::UpdateCommit(UpdateCommit { id, facts }));
    calls(cache);
    forgets
}

/// The kernel may have applied the replies in the reverse order.
#[test]
fn dentry_with_a_long_timeout_is_dropped_after_a_later_zero_timeout() {
    let mut cache = told();
    // Other clients change the directory again and again.
    assert!(!push(&mut cache, "y") && !push(&mut cache, "y"));
    assert_eq!(look(&mut cache), Some(Span::ZERO));
    assert!(push(&mut cache, "x"));
    assert_eq!(look(&mut cache), Some(Span::ZERO));
    assert!(!push(&mut cache, "x"), "it is dropped once");
}

/// The kernel has both names of the file; another client removes the later one, and the file is at the other name then.
#[test]
fn dentry_is_dropped_after_another_name_of_its_file_was() {
    let mut cache = told();
    let two = Entry { attr: Attr { nlink: 2, ..entry().attr }, ..entry() };
    become_of(&mut cache, "x", Some(two.clone()));
    become_of(&mut cache, "y", Some(two.clone()));
    let root = session().root;
    let later = T0.after(Span::from_secs(11));
    for (called, op) in [("x", OpId(2)), ("y", OpId(3))] {
        let look = Op::Lookup { dir: 1, name: name(called) };
        assert_eq!(
            cache.handle_op(later, op, Caller::default(), look),
            None,
            "nothing is granted of the file"
        );
        let call = calls(&mut cache)[0];
        let grant =
            |node, covers| Grant { node, covers, recallable: true, ..crate::grants::fabricated(node) };
        let grant = |id, node, covers| Grant { id: GrantId(id), term: Term::Session, ..grant(node, covers) };
        let grants = vec![grant(1, root, LeaseScope::Directory), grant(2, FILE, LeaseScope::Attributes)];
        let response = Response { grants, ..Response::plain(Ok(Reply::Entry(Some(two.clone())))) };
        cache.handle_event(later, Event::Response { call, response });
        let valid = std::iter::from_fn(|| Some(cache.poll_output())).find_map(|output| match output {
            Output::Answer { answer: OpReply::Node(node), .. } => Some(node.entry_valid),
            Output::Timeout(..) => panic!("{called} is not answered"),
            _ => None,
        });
        assert!(valid > Some(Span::ZERO), "{called}");
        crate::facts::leases::discard_uncertain_attr(&mut cache.state, FILE);
    }
    assert!(become_of(&mut cache, "y", None));
    // A listing says that it has one name.
    crate::facts::inodes::note_listed_at(&mut cache.state, FILE, (1, &name("x")));
    assert!(become_of(&mut cache, "x", None));
}
