//! Order of replies and invalidations, and the timeouts of late replies.

use super::*;
use crate::cache::Cache;
use crate::kernel::MAX_REPLY_WAIT;
use crate::op::Caller;
use crate::test_fixtures::{T0, cache, outputs};
use crate::{Config, Op};
use nigh_types::{
    Access, Attr, Call, CallId, Entries, Entry, Event, Grant, GrantId, Handle, LeaseScope, Mode, Name,
    NodeId, Recall, RecallId, Reply, Response, SetAttr, Term,
};

const FILE: NodeId = NodeId { ino: 7, generation: 1 };

fn attr(size: u64) -> Attr {
    Attr { mode: 0o100_644, nlink: 1, size, ..Attr::default() }
}

fn ask(cache: &mut Cache, op: u64, what: Op) -> CallId {
    assert_eq!(cache.handle_op(T0, OpId(op), Caller::default(), what), None);
    let asked = outputs(cache).into_iter().rev().find_map(|output| match output {
        Output::Call { id, .. } => Some(id),
        _ => None,
    });
    asked.expect("the remote is asked")
}

fn answer(cache: &mut Cache, call: CallId, reply: Reply) -> Vec<Output> {
    cache.handle_event(T0, Event::Response { call, response: Response::plain(Ok(reply)) });
    outputs(cache)
}

fn answered(outputs: &[Output]) -> Vec<(u64, u64)> {
    let said = outputs.iter().filter_map(|output| match output {
        Output::Answer { op, answer: OpReply::Attr(_, attr, _) } => Some((op.0, attr.size)),
        _ => None,
    });
    said.collect()
}

/// File that is open, and of which nothing is granted.
fn opened() -> Cache {
    let mut cache = cache(Config::default());
    let looked = ask(&mut cache, 1, Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() });
    let entry = Entry { id: FILE, attr: attr(1), target: None, no_xattrs: true };
    answer(&mut cache, looked, Reply::Entry(Some(entry)));
    let access =
        Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
    let open = ask(&mut cache, 2, Op::Open { ino: 7, access, append: false });
    answer(&mut cache, open, Reply::Opened { handle: Handle(1), attr: attr(1) });
    cache
}

fn recall_data(cache: &mut Cache) -> Vec<Output> {
    let recall = Recall { id: RecallId(5), node: FILE, covers: LeaseScope::Data, names: vec![] };
    cache.handle_event(T0, Event::Recall(recall));
    outputs(cache)
}

#[test]
fn invalidation_of_a_file_waits_for_an_earlier_getattr_reply() {
    let mut cache = opened();
    let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    assert_eq!(recall_data(&mut cache), []);
    let said = answer(&mut cache, asked, Reply::Attr(FILE, attr(2)));
    assert_eq!(answered(&said[..1]), [(3, 2)]);
    assert!(matches!(said[1..], [Output::Invalidate { .. }]), "{said:?}");
}

/// Its number was that of a directory that a caller is still listing.
#[test]
fn invalidation_waits_for_getattr_of_a_file_that_reuses_a_directorys_number() {
    let mut cache = cache(Config::default());
    let look = |name: &[u8]| Op::Lookup { dir: 1, name: Name::new(name).unwrap() };
    let found =
        |id: NodeId, attr: Attr| Reply::Entry(Some(Entry { id, attr, target: None, no_xattrs: true }));
    let looked = ask(&mut cache, 1, look(b"d"));
    let directory = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
    answer(&mut cache, looked, found(NodeId { generation: 2, ..FILE }, directory));
    let listed = ask(&mut cache, 2, Op::OpenDir { ino: 7 });
    let looked = ask(&mut cache, 3, look(b"f"));
    answer(&mut cache, looked, found(FILE, attr(0)));
    let access =
        Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
    let open = ask(&mut cache, 4, Op::Open { ino: 7, access, append: false });
    answer(&mut cache, open, Reply::Opened { handle: Handle(1), attr: attr(0) });
    assert!(cache.reads_by_size(7));
    answer(&mut cache, listed, Reply::Listed(Entries { entries: Vec::new() }));
    assert!(cache.reads_by_size(7), "an answer about the directory makes it none");
}

/// Requests that take the file's name away or give it one, with their replies.
fn changes_of_names() -> [(Op, Reply); 3] {
    let name = |text: &[u8]| Name::new(text).unwrap();
    let (from, to, no_replace, exchange) = (1, 1, false, false);
    let rename = Op::Rename {
        from,
        name: name(b"g"),
        to,
        new_name: name(b"f"),
        no_replace,
        exchange,
        whiteout: false,
    };
    let moved = NodeId { ino: 8, generation: 1 };
    let attr = Attr { nlink: 2, ..attr(1) };
    let entry = Entry { id: FILE, attr, target: None, no_xattrs: true };
    [
        (Op::Unlink { dir: 1, name: name(b"f") }, Reply::Removed { node: FILE, pinned: None }),
        (rename, Reply::Renamed { moved, replaced: Some(FILE), pinned: None, whiteout: None }),
        (
            Op::Link { ino: 7, dir: 1, name: name(b"h") },
            Reply::Created { entry, handle: None, existed: false },
        ),
    ]
}

#[test]
fn namespace_change_reply_waits_for_an_earlier_getattr_reply() {
    for (change, reply) in changes_of_names() {
        let mut cache = opened();
        let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        let changed = ask(&mut cache, 4, change.clone());
        let said = answer(&mut cache, changed, reply);
        assert!(
            !said.iter().any(|o| matches!(o, Output::Answer { op: OpId(4), .. })),
            "{change:?}: {said:?}"
        );
        let said = answer(&mut cache, asked, Reply::Attr(FILE, attr(2)));
        let order: Vec<u64> = said.iter().filter_map(answered_op).collect();
        assert_eq!(order, [3, 4], "{change:?}: {said:?}");
    }
}

#[test]
fn ungranted_lookup_reply_waits_for_an_earlier_getattr_reply() {
    let mut cache = opened();
    let look = Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() };
    let looked = ask(&mut cache, 4, look);
    let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    let entry = Entry { id: FILE, attr: attr(1), target: None, no_xattrs: true };
    assert_eq!(answer(&mut cache, looked, Reply::Entry(Some(entry))), []);
    let said = answer(&mut cache, asked, Reply::Attr(FILE, attr(2)));
    assert_eq!(said.iter().filter_map(answered_op).collect::<Vec<_>>(), [3, 4]);
}

/// A lookup's reply waits for a GETATTR, and the file is unlinked.
#[test]
fn lookup_reply_is_delivered_before_the_reply_to_a_later_unlink() {
    let mut cache = opened();
    let looked = ask(&mut cache, 4, Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() });
    let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    let [(unlink, removed), ..] = changes_of_names();
    let unlinked = ask(&mut cache, 5, unlink);
    let entry = Entry { id: FILE, attr: attr(1), target: None, no_xattrs: true };
    let replies =
        [(looked, Reply::Entry(Some(entry))), (asked, Reply::Attr(FILE, attr(2))), (unlinked, removed)];
    for (call, reply) in replies {
        cache.handle_event(T0, Event::Response { call, response: Response::plain(Ok(reply)) });
    }
    assert_eq!(outputs(&mut cache).iter().filter_map(answered_op).collect::<Vec<_>>(), [3, 4, 5]);
}

/// Under a directory lease; the session is lost before the reply is delivered, or time passes.
#[test]
fn late_lookup_reply_has_the_remaining_timeout() {
    for (lost, valid) in [(false, Span::from_millis(600)), (true, Span::ZERO)] {
        let mut cache = opened();
        let looked = ask(&mut cache, 4, Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() });
        let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        let attr2 = Attr { nlink: 2, ..attr(1) };
        let entry = Entry { id: FILE, attr: attr2, target: None, no_xattrs: true };
        let root = NodeId { ino: 1, generation: 1 };
        let mut response = Response::plain(Ok(Reply::Entry(Some(entry))));
        response.grants.push(Grant {
            id: GrantId(1),
            node: root,
            covers: LeaseScope::Directory,
            mode: Mode::Read,
            term: Term::Limited(Span::from_millis(1_000)),
            recallable: false,
            shared: false,
        });
        cache.handle_event(T0, Event::Response { call: looked, response });
        assert_eq!(outputs(&mut cache), []);
        let later = T0.after(Span::from_millis(400));
        if lost {
            cache.handle_event(later, Event::Expired { why: "silence".into() });
            for output in outputs(&mut cache) {
                if let Output::Invalidate { id, .. } = output {
                    cache.handle_invalidated(later, id);
                }
            }
        }
        let reply = Response::plain(Ok(Reply::Attr(FILE, Attr { nlink: 2, ..attr(2) })));
        cache.handle_event(later, Event::Response { call: asked, response: reply });
        cache.handle_timeout(later);
        let told = outputs(&mut cache).into_iter().find_map(|output| match output {
            Output::Answer { op: OpId(4), answer: OpReply::Node(node) } => Some(node.entry_valid),
            _ => None,
        });
        assert_eq!(told, Some(valid), "{lost}");
    }
}

#[test]
fn link_reply_does_not_carry_an_older_size() {
    let mut cache = opened();
    let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    let [.., (link, made)] = changes_of_names();
    let linked = ask(&mut cache, 4, link);
    let told = attr(5);
    answer(&mut cache, asked, Reply::Attr(FILE, told));
    let said = answer(&mut cache, linked, made);
    let node = said.iter().find_map(|output| match output {
        Output::Answer { op: OpId(4), answer: OpReply::Node(node) } => {
            Some((node.attr.size, node.attr_valid))
        }
        _ => None,
    });
    assert_eq!(node, Some((5, Span::ZERO)));
}

#[test]
fn chmod_reply_carries_no_older_size_and_truncate_reply_its_own() {
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    for (set, size) in [(mode, 5), (SetAttr { size: Some(1), ..SetAttr::default() }, 1)] {
        let mut cache = opened();
        let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        let changed = ask(&mut cache, 4, Op::SetAttr { ino: 7, fh: None, set });
        answer(&mut cache, asked, Reply::Attr(FILE, attr(5)));
        let said = answer(&mut cache, changed, Reply::Attr(FILE, Attr { mode: 0o100_600, ..attr(1) }));
        let told = said.iter().find_map(|output| match output {
            Output::Answer { op: OpId(4), answer: OpReply::Attr(_, attr, _) } => Some((attr.size, attr.mode)),
            _ => None,
        });
        assert_eq!(told, Some((size, 0o100_600)));
    }
}

#[test]
fn interrupt_of_a_queued_reply_delivers_the_reply() {
    let mut cache = opened();
    ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    let [(unlink, removed), ..] = changes_of_names();
    let unlinked = ask(&mut cache, 4, unlink);
    let said = answer(&mut cache, unlinked, removed);
    assert!(!said.iter().any(|output| matches!(output, Output::Answer { .. })), "{said:?}");
    cache.handle_interrupt(OpId(4), true);
    let said = outputs(&mut cache);
    assert!(said.contains(&Output::Answer { op: OpId(4), answer: OpReply::Done }), "{said:?}");
}

/// The file has another name, which the late reply does not mention.
#[test]
fn late_lookup_reply_has_the_timeout_of_its_own_name() {
    let mut cache = opened();
    let root = NodeId { ino: 1, generation: 1 };
    let grant = Grant { recallable: true, ..crate::grants::fabricated(root) };
    let grants = vec![Grant { id: GrantId(1), term: Term::Session, ..grant }];
    let two = Entry { id: FILE, attr: Attr { nlink: 2, ..attr(1) }, target: None, no_xattrs: true };
    let look = |cache: &mut Cache, op: u64, called: &[u8]| {
        let looked = ask(cache, op, Op::Lookup { dir: 1, name: Name::new(called).unwrap() });
        let grants = grants.clone();
        let response = Response { grants, ..Response::plain(Ok(Reply::Entry(Some(two.clone())))) };
        cache.handle_event(T0, Event::Response { call: looked, response });
        outputs(cache)
    };
    look(&mut cache, 5, b"f");
    ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    assert_eq!(look(&mut cache, 4, b"g"), [], "it waits for the reply about the length");
    // Another name leads to it, which is its parent entry then.
    crate::facts::inodes::note_listed_at(&mut cache.state, FILE, (1, &Name::new(b"f").unwrap()));
    let (id, names) = (RecallId(9), vec![Name::new(b"g").unwrap()]);
    let facts = vec![nigh_types::UpdateScope { node: root, covers: LeaseScope::Directory, names }];
    cache.handle_event(T0, Event::UpdatePrepare(nigh_types::UpdatePrepare { id, facts }));
    cache.handle_timeout(T0.after(MAX_REPLY_WAIT));
    let said = outputs(&mut cache);
    let valid = said.iter().find_map(|output| match output {
        Output::Answer { op: OpId(4), answer: OpReply::Node(node) } => Some(node.entry_valid),
        _ => None,
    });
    assert_eq!(valid, Some(Span::ZERO), "{said:?}");
}

/// The cache invalidates only what it knows the kernel to have.
#[test]
fn attributes_of_a_late_reply_are_invalidated_on_recall() {
    let mut cache = opened();
    ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let changed = ask(&mut cache, 4, Op::SetAttr { ino: 7, fh: None, set });
    let grant = Grant { covers: LeaseScope::Attributes, ..crate::grants::fabricated(FILE) };
    let grants = vec![Grant { id: GrantId(2), term: Term::Session, ..grant }];
    let attr = Attr { mode: 0o100_600, nlink: 2, ..attr(1) };
    let response = Response { grants, ..Response::plain(Ok(Reply::Attr(FILE, attr))) };
    cache.handle_event(T0, Event::Response { call: changed, response });
    outputs(&mut cache);
    // Another invalidation drops everything that the kernel has of the file.
    crate::out::invalidate::drop_untrusted(&mut cache.state, &mut vec![KernelInvalidation::Attr { ino: 7 }]);
    cache.handle_timeout(T0.after(MAX_REPLY_WAIT));
    let said = outputs(&mut cache);
    let valid = said.iter().find_map(|output| match output {
        Output::Answer { op: OpId(4), answer: OpReply::Attr(.., valid) } => Some(*valid),
        _ => None,
    });
    assert!(valid > Some(Span::ZERO), "{said:?}");
    let recall = Recall { id: RecallId(5), node: FILE, covers: LeaseScope::Attributes, names: vec![] };
    cache.handle_event(T0, Event::Recall(recall));
    cache.handle_interrupt(OpId(3), true);
    let told = outputs(&mut cache);
    let forgets = |output: &Output| matches!(output, Output::Invalidate { stale, .. } if stale.contains(&KernelInvalidation::Attr { ino: 7 }));
    assert!(told.iter().any(forgets), "{told:?}");
}

#[test]
fn file_of_an_undelivered_create_reply_is_released() {
    let mut cache = opened();
    ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    let access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    let name = Name::new(b"f").unwrap();
    let create = Op::Create { dir: 1, name, mode: 0o644, umask: 0, exclusive: false, access, append: false };
    let created = ask(&mut cache, 4, create);
    let entry = Entry { id: FILE, attr: attr(1), target: None, no_xattrs: true };
    let made = Reply::Created { entry, handle: Some(Handle(8)), existed: true };
    let said = answer(&mut cache, created, made);
    assert!(!said.iter().any(|output| matches!(output, Output::Answer { .. })), "{said:?}");
    let (opens, lookups) = (
        cache.state.store.inode(7).unwrap().opens().count(),
        cache.state.store.inode(7).unwrap().kernel.lookups(),
    );
    cache.handle_event(T0, Event::Expired { why: "silence".into() });
    assert!(cache.state.waits_for_kernel());
    cache.handle_interrupt(OpId(4), true);
    let said = outputs(&mut cache);
    let failed = OpReply::Failed(nigh_types::Errno::INTR);
    assert!(said.contains(&Output::Answer { op: OpId(4), answer: failed }), "{said:?}");
    assert_eq!(
        (
            cache.state.store.inode(7).unwrap().opens().count(),
            cache.state.store.inode(7).unwrap().kernel.lookups()
        ),
        (opens - 1, lookups - 1)
    );
}

/// A GETATTR does not depend on names.
#[test]
fn dentry_invalidation_does_not_wait_for_getattr() {
    let mut cache = opened();
    let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    let entry = |name: &[u8]| KernelInvalidation::Entry { dir: 1, name: Name::new(name).unwrap() };
    cache.state.store.inode_mut(7).unwrap().kernel.note_attr(&attr(1));
    crate::out::invalidate::invalidate(
        &mut cache.state,
        vec![entry(b"f"), KernelInvalidation::Attr { ino: 7 }],
        None,
    );
    crate::out::invalidate::invalidate(&mut cache.state, vec![entry(b"g")], None);
    let told =
        |output: Output| if let Output::Invalidate { stale, .. } = output { stale } else { Vec::new() };
    let told: Vec<Vec<KernelInvalidation>> = outputs(&mut cache).into_iter().map(told).collect();
    assert_eq!(told, [[entry(b"f")], [entry(b"g")]]);
    let said = answer(&mut cache, asked, Reply::Attr(FILE, attr(2)));
    assert_eq!(answered(&said[..1]), [(3, 2)]);
    assert!(
        matches!(&said[1..], [Output::Invalidate { stale, .. }] if *stale == [KernelInvalidation::Attr { ino: 7 }])
    );
}

fn answered_op(output: &Output) -> Option<u64> {
    if let Output::Answer { op, .. } = output { Some(op.0) } else { None }
}

#[test]
fn queued_invalidation_waits_at_most_one_second() {
    let mut cache = opened();
    ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    assert_eq!(recall_data(&mut cache), []);
    let due = T0.after(MAX_REPLY_WAIT);
    assert_eq!(cache.poll_output(), Output::Timeout(due, crate::Reason::NotifierQueue));
    cache.handle_timeout(due);
    assert!(matches!(outputs(&mut cache)[..], [Output::Invalidate { .. }]));
}

#[test]
fn earlier_getattr_is_answered_with_the_later_one() {
    let mut cache = opened();
    let first = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    assert_eq!(cache.handle_op(T0, OpId(4), Caller::default(), Op::GetAttr { ino: 7 }), None);
    let again = answer(&mut cache, first, Reply::Attr(FILE, attr(2)));
    let [Output::Call { id: second, call: Call::GetAttr { .. }, .. }] = again[..] else {
        panic!("{again:?}")
    };
    assert_eq!(answered(&answer(&mut cache, second, Reply::Attr(FILE, attr(3)))), [(3, 3), (4, 3)]);
}

#[test]
fn getattr_before_a_recall_is_answered_with_the_one_after_it() {
    let mut cache = opened();
    let first = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
    recall_data(&mut cache);
    let second = ask(&mut cache, 4, Op::GetAttr { ino: 7 });
    assert_eq!(answered(&answer(&mut cache, first, Reply::Attr(FILE, attr(2)))), []);
    assert_eq!(answered(&answer(&mut cache, second, Reply::Attr(FILE, attr(3)))), [(3, 3), (4, 3)]);
}

#[test]
fn attributes_without_a_timeout_are_not_invalidated() {
    let mut cache = opened();
    let recall = Recall { id: RecallId(5), node: FILE, covers: LeaseScope::Attributes, names: vec![] };
    cache.handle_event(T0, Event::Recall(recall));
    assert_eq!(outputs(&mut cache), [Output::Acknowledge(RecallId(5))]);
}
