use crate::test_fixtures::{T0, cache, calls};
use crate::{Caller, Config, Op, Output};
use nigh_types::{
    Attr, Entry, Event, Grant, GrantId, LeaseScope, Mode, Name, NodeId, OpId, Reply, Response, Term,
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
