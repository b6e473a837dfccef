//! ESTALE: the client resolves the inode by path on the remote, and sends the call once more.

use nigh_cache::{NotifyLevel, Op, OpReply};
use nigh_remote::fake::{CallFilter, CallPlan};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{Call, Errno, LeaseScope, Name, NodeId, NodeRef, Span};

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// A client that has looked up `p/f`.
fn world() -> (World, NodeId, NodeId) {
    let mut world = World::new(ModelFsConfig { by_hint_only: true, ..ModelFsConfig::default() });
    let now = world.now;
    let file = world.server.edit(|tree| tree.plant_file(now, "p/f", b"x"));
    let dir = world.server.edit(|tree| tree.find("p")).unwrap();
    world.connect(NotifyLevel::All);
    world.request(0, Op::Lookup { dir: 1, name: name("p") });
    world.request(0, Op::Lookup { dir: dir.ino, name: name("f") });
    (world, dir, file)
}

/// Calls sent now fail with ESTALE; later ones do not.
fn stale_once(world: &mut World, op: Op) -> OpReply {
    let control = world.clients[0].control.clone();
    let refuse = Some(Errno::STALE);
    let fate = CallPlan { refuse, answered_after: Span::from_millis(5), ..CallPlan::default() };
    control.plan(CallFilter::Every, fate);
    let id = world.send_request(0, op);
    control.plan_nothing();
    world.advance(Span::from_millis(5));
    let answer = world.replies.iter().find(|(_, of, ..)| *of == id).map(|(.., answer)| answer.clone());
    answer.expect("an answer")
}

#[test]
fn call_is_sent_again_after_path_resolution() {
    let (mut world, dir, file) = world();
    let control = world.clients[0].control.clone();
    let flags = stale_once(&mut world, Op::GetFlags { ino: file.ino });
    assert_eq!((flags, control.calls("walk"), control.calls("getflags")), (OpReply::Flags(0), 1, 2));
    let (from, to) = (dir.ino, 1);
    let rename = Op::Rename {
        from,
        name: name("f"),
        to,
        new_name: name("g"),
        no_replace: false,
        exchange: false,
        whiteout: false,
    };
    assert_eq!(stale_once(&mut world, rename), OpReply::Done);
    assert_eq!((control.calls("walk"), control.calls("rename")), (2, 2));
    assert_eq!(world.clients[0].cache.gauges().pending_operations, 0);
    assert_eq!(world.server.edit(|tree| tree.find("g")), Some(file));
    assert!(!matches!(
        stale_once(&mut world, Op::Link { ino: file.ino, dir: dir.ino, name: name("h") }),
        OpReply::Failed(_)
    ));
}

/// Each inode of a call is resolved once; then the reply is ESTALE.
#[test]
fn stale_inode_is_resolved_by_path_once_then_estale() {
    let (mut world, dir, file) = world();
    let control = world.clients[0].control.clone();
    let refuse = |what| {
        control.plan(CallFilter::Type(what), CallPlan { refuse: Some(Errno::STALE), ..CallPlan::default() })
    };
    refuse("getflags");
    refuse("rename");
    assert_eq!(world.request(0, Op::GetFlags { ino: file.ino }), OpReply::Failed(Errno::STALE));
    assert_eq!((control.calls("walk"), control.calls("getflags")), (1, 2));
    let (from, to, new_name) = (dir.ino, 1, name("g"));
    let rename = Op::Rename {
        from,
        name: name("f"),
        to,
        new_name,
        no_replace: false,
        exchange: false,
        whiteout: false,
    };
    assert_eq!(world.request(0, rename), OpReply::Failed(Errno::STALE));
    assert_eq!((control.calls("walk"), control.calls("rename")), (3, 3));
    assert_eq!(world.clients[0].cache.gauges().pending_operations, 0);
}

/// The caller is killed while the path is resolved: the change, which was not sent again, is not made.
#[test]
fn change_of_killed_caller_is_not_sent_after_path_resolution() {
    let (mut world, dir, file) = world();
    let control = world.clients[0].control.clone();
    control.plan(CallFilter::Type("unlink"), CallPlan { refuse: Some(Errno::STALE), ..CallPlan::default() });
    control.plan(CallFilter::Type("walk"), CallPlan { hold_reply: true, ..CallPlan::default() });
    let unlink = world.send_request(0, Op::Unlink { dir: dir.ino, name: name("f") });
    assert_eq!((control.calls("unlink"), control.calls("walk")), (1, 1));
    world.interrupt(0, unlink);
    control.plan_nothing();
    control.release(control.held()[0]);
    world.settle();
    assert_eq!(control.calls("unlink"), 1);
    assert_eq!(world.server.edit(|tree| tree.find("p/f")), Some(file));
    assert_eq!(world.clients[0].cache.gauges().pending_operations, 0);
    world.check_kernels().unwrap();
}

#[test]
fn file_moved_on_host_is_found_by_its_new_name() {
    let (mut world, dir, file) = world();
    let (now, place) = (world.now, NodeRef::without_hint(dir));
    let call = Call::Rename {
        from: place.clone(),
        name: name("f"),
        to: place,
        new_name: name("g"),
        no_replace: false,
        exchange: false,
        whiteout: false,
        keep: None,
    };
    world.server.edit(|tree| tree.execute_as_host(now, call)).unwrap();
    world.clients[0].control.recall(dir, LeaseScope::Directory, &[]);
    world.settle();
    assert_eq!(world.request(0, Op::GetAttr { ino: file.ino }), OpReply::Failed(Errno::STALE));
    assert_eq!(world.clients[0].control.calls("walk"), 1);
    assert!(matches!(world.request(0, Op::Lookup { dir: dir.ino, name: name("f") }), OpReply::Missing(_)));
    world.request(0, Op::Lookup { dir: dir.ino, name: name("g") });
    assert!(matches!(world.request(0, Op::GetAttr { ino: file.ino }), OpReply::Attr(..)));
}

/// The host changed a directory without a recall: the refusal shows that cached facts are wrong.
#[test]
fn refusal_that_contradicts_cached_facts_discards_them() {
    let (mut world, dir, file) = world();
    let now = world.now;
    let lookups = |world: &World| world.clients[0].control.calls("lookup");
    let look = |world: &mut World, leaf| world.request(0, Op::Lookup { dir: dir.ino, name: name(leaf) });
    assert!(matches!(look(&mut world, "new"), OpReply::Missing(_)));
    let call = Call::Unlink { dir: NodeRef::without_hint(dir), name: name("f"), keep: None };
    world.server.edit(|tree| tree.execute_as_host(now, call)).unwrap();
    let new = world.server.edit(|tree| tree.plant_file(now, "p/new", b""));
    let before = lookups(&world);
    look(&mut world, "f");
    assert_eq!(lookups(&world), before, "no client was notified");
    let unlink = Op::Unlink { dir: dir.ino, name: name("f") };
    assert_eq!(world.request(0, unlink), OpReply::Failed(Errno::NOENT));
    assert!(matches!(look(&mut world, "f"), OpReply::Missing(_)));
    assert_ne!(file, new);
    match look(&mut world, "new") {
        OpReply::Node(node) => assert_eq!(node.id, new),
        other => panic!("{other:?}"),
    }
    assert_eq!(lookups(&world), before + 2);
}
