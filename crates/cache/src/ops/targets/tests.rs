use super::*;
use crate::Config;
use crate::cache::Cache;
use crate::op::{Op, Output};
use crate::test_fixtures::{T0, cache, calls, outputs, session};
use nigh_types::{
    Attr, CallId, Entry, Event, Grant, GrantId, LeaseScope, Mode, Name, Recall, RecallId, Span, Term,
    XattrSet,
};

/// Inode ids on a filesystem with birth times, and on one without.
const LINK: NodeId = NodeId { ino: 7, generation: 7 << 32 };
const REUSABLE: NodeId = NodeId { ino: 7, generation: 1 };
const SECOND: Term = Term::Limited(Span::from_secs(1));

fn later(ms: u64) -> Time {
    T0.after(Span::from_millis(ms))
}

fn grants(id: NodeId, term: Term) -> Vec<Grant> {
    let grant = |node, covers| Grant {
        id: GrantId(1),
        node,
        covers,
        mode: Mode::Read,
        term,
        recallable: term == Term::Session,
        shared: true,
    };
    vec![grant(session().root, LeaseScope::Dentry), grant(id, LeaseScope::Attributes)]
}

fn answer(cache: &mut Cache, now: Time, reply: Reply, grants: Vec<Grant>) -> Vec<Output> {
    let call: CallId = calls(cache).pop().expect("it is asked");
    let response = Response { grants, ..Response::plain(Ok(reply)) };
    cache.handle_event(now, Event::Response { call, response });
    outputs(cache)
}

/// Returns the invalidations that are put out.
fn dropped(outputs: &[Output]) -> Vec<KernelInvalidation> {
    let stale = outputs.iter().filter_map(|output| match output {
        Output::Invalidate { stale, .. } => Some(stale.clone()),
        _ => None,
    });
    stale.flatten().collect()
}

fn ask(cache: &mut Cache, now: Time, op: Op) -> Option<OpReply> {
    cache.handle_op(now, OpId(now.0), Caller::default(), op)
}

fn look(cache: &mut Cache, now: Time, id: NodeId, term: Term) -> Vec<Output> {
    let attr = Attr { mode: 0o120_777, nlink: 1, ..Attr::default() };
    let entry = Entry { id, attr, target: None, no_xattrs: false };
    assert_eq!(ask(cache, now, Op::Lookup { dir: 1, name: Name::new(b"l").unwrap() }), None);
    answer(cache, now, Reply::Entry(Some(entry)), grants(id, term))
}

fn read(cache: &mut Cache, now: Time, target: &[u8]) -> Vec<Output> {
    assert_eq!(ask(cache, now, Op::ReadLink { ino: 7 }), None, "it is asked");
    answer(cache, now, Reply::Target(target.into()), Vec::new())
}

const PAGE: KernelInvalidation = KernelInvalidation::Data { ino: 7, offset: 0, length: 0 };

#[test]
fn target_under_a_limited_grant_is_invalidated_at_its_deadline() {
    let mut cache = cache(Config::default());
    look(&mut cache, T0, LINK, SECOND);
    assert_eq!(dropped(&read(&mut cache, later(500), b"one")), []);
    cache.handle_timeout(later(999));
    assert_eq!(dropped(&outputs(&mut cache)), []);
    cache.handle_timeout(later(1_000));
    assert_eq!(dropped(&outputs(&mut cache)), [PAGE]);
    cache.handle_timeout(later(9_000));
    assert_eq!(dropped(&outputs(&mut cache)), [], "once");
}

/// The attributes may be those of another symlink that was made within the same tick of the server's clock.
#[test]
fn target_is_read_again_after_its_grant_ended_with_equal_attributes() {
    let mut cache = cache(Config { kernel_keeps_targets: false, ..Config::default() });
    look(&mut cache, T0, REUSABLE, SECOND);
    read(&mut cache, T0, b"one");
    assert_eq!(ask(&mut cache, later(900), Op::ReadLink { ino: 7 }), Some(OpReply::Target(b"one".to_vec())));
    look(&mut cache, later(1_100), REUSABLE, SECOND);
    read(&mut cache, later(1_100), b"two");
    assert_eq!(
        ask(&mut cache, later(1_200), Op::ReadLink { ino: 7 }),
        Some(OpReply::Target(b"two".to_vec()))
    );
}

#[test]
fn target_of_a_reusable_inode_number_is_invalidated_after_each_reply() {
    let mut cache = cache(Config::default());
    look(&mut cache, T0, REUSABLE, Term::Session);
    let first = read(&mut cache, T0, b"one");
    let at = |wanted: fn(&Output) -> bool| first.iter().position(wanted);
    let answered = at(|output| matches!(output, Output::Answer { .. }));
    assert!(answered.is_some() && answered < at(|output| matches!(output, Output::Invalidate { .. })));
    assert_eq!(dropped(&first), [PAGE]);
    assert_eq!(ask(&mut cache, later(1), Op::ReadLink { ino: 7 }), Some(OpReply::Target(b"one".to_vec())));
    assert_eq!(dropped(&outputs(&mut cache)), [PAGE]);
}

#[test]
fn recall_of_attributes_invalidates_the_target() {
    let mut cache = cache(Config::default());
    look(&mut cache, T0, LINK, Term::Session);
    assert_eq!(dropped(&read(&mut cache, T0, b"one")), []);
    let recall = Recall { id: RecallId(1), node: LINK, covers: LeaseScope::Attributes, names: Vec::new() };
    cache.handle_event(T0, Event::Recall(recall));
    assert_eq!(dropped(&outputs(&mut cache)), [KernelInvalidation::Attr { ino: 7 }, PAGE]);
    read(&mut cache, T0, b"two");
}

/// The kernel has the page locked until READLINK is answered, so the recall leaves it out.
#[test]
fn target_read_before_a_recall_is_invalidated_after_its_reply() {
    let mut cache = cache(Config::default());
    look(&mut cache, T0, LINK, Term::Session);
    read(&mut cache, T0, b"one");
    let recall = Recall { id: RecallId(1), node: LINK, covers: LeaseScope::Attributes, names: Vec::new() };
    cache.handle_event(T0, Event::Recall(recall));
    let why = outputs(&mut cache).iter().find_map(|output| match output {
        Output::Invalidate { id, .. } => Some(*id),
        _ => None,
    });
    // The kernel had dropped the page by itself.
    assert_eq!(ask(&mut cache, T0, Op::ReadLink { ino: 7 }), None);
    let free = cache.droppable_ranges(why.expect("an invalidation was put out"), 7, (0, 0));
    assert!(free.iter().all(|(offset, _)| *offset >= 4096), "{free:?}");
    assert_eq!(dropped(&answer(&mut cache, T0, Reply::Target(b"one".as_slice().into()), Vec::new())), [PAGE]);
}

#[test]
fn acl_under_a_limited_grant_is_invalidated_at_its_deadline() {
    let (mut cache, acl) = (cache(Config::default()), b"system.posix_acl_access");
    cache.state.session.set_features(Some(true), None);
    let get = |size| Op::GetXattr { ino: 7, name: acl.to_vec(), size };
    look(&mut cache, T0, LINK, SECOND);
    assert_eq!(ask(&mut cache, T0, get(100)), None);
    let set = XattrSet { items: vec![(acl.as_slice().into(), Some(b"value".as_slice().into()))] };
    assert_eq!(dropped(&answer(&mut cache, T0, Reply::Xattrs(set.clone()), Vec::new())), []);
    cache.handle_timeout(later(1_000));
    assert_eq!(dropped(&outputs(&mut cache)), [KernelInvalidation::Attr { ino: 7 }]);
    // Without a grant it is dropped after the reply.
    assert_eq!(ask(&mut cache, later(1_001), get(101)), None);
    assert_eq!(
        dropped(&answer(&mut cache, later(1_001), Reply::Xattrs(set), Vec::new())),
        [KernelInvalidation::Attr { ino: 7 }]
    );
}

#[test]
fn acl_value_fetched_alone_is_invalidated_at_its_deadline() {
    let (mut cache, acl) = (cache(Config::default()), b"system.posix_acl_access");
    cache.state.session.set_features(Some(true), None);
    let get = |size| Op::GetXattr { ino: 7, name: acl.to_vec(), size };
    let value = || Reply::Value(b"value".to_vec());
    look(&mut cache, T0, LINK, SECOND);
    // The set of all xattrs has no room for the value.
    assert_eq!(ask(&mut cache, T0, Op::ListXattr { ino: 7, size: 100 }), None);
    let set = XattrSet { items: vec![(acl.as_slice().into(), None)] };
    answer(&mut cache, T0, Reply::Xattrs(set), Vec::new());
    assert_eq!(ask(&mut cache, later(1), get(100)), None);
    assert_eq!(dropped(&answer(&mut cache, later(1), value(), Vec::new())), []);
    // An ACL that arrives after the end of its grant is dropped after the reply.
    assert_eq!(ask(&mut cache, later(2), get(101)), None);
    let late = calls(&mut cache).pop().unwrap();
    cache.handle_timeout(later(1_000));
    assert_eq!(dropped(&outputs(&mut cache)), [KernelInvalidation::Attr { ino: 7 }]);
    cache.handle_event(later(1_001), Event::Response { call: late, response: Response::plain(Ok(value())) });
    assert_eq!(dropped(&outputs(&mut cache)), [KernelInvalidation::Attr { ino: 7 }]);
}
