//! Free space: how old a statfs reply may be.

use nigh_cache::{NotifyLevel, Op, OpReply};
use nigh_remote::fake::{CallFilter, CallPlan};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{Errno, Name, Span, Term};

fn files(world: &mut World) -> u64 {
    match world.request(0, Op::StatFs { ino: 1 }) {
        OpReply::Space(space) => space.files,
        other => panic!("{other:?}"),
    }
}

#[test]
fn statfs_is_fetched_again_after_minute_term_or_local_change() {
    for (term, seconds) in [(Term::Session, 60), (Term::Limited(Span::from_secs(5)), 5)] {
        let mut world = World::new(ModelFsConfig { term, ..ModelFsConfig::default() });
        world.connect(NotifyLevel::All);
        let before = files(&mut world);
        let now = world.now;
        world.server.edit(|tree| tree.plant_file(now, "beside", b""));
        world.advance(Span::from_millis(seconds * 1_000 - 1));
        assert_eq!(files(&mut world), before);
        assert_eq!(world.clients[0].control.calls("statfs"), 1);
        world.advance(Span::from_millis(1));
        assert_eq!(files(&mut world), before + 1);
        let name = Name::new(b"own").unwrap();
        world.request(0, Op::Mkdir { dir: 1, name, mode: 0o755, umask: 0 });
        assert_eq!(files(&mut world), before + 2);
        assert_eq!(world.clients[0].control.calls("statfs"), 3);
    }
}

#[test]
fn statfs_reply_overtaken_by_local_change_is_not_cached_and_error_is_passed_on() {
    let mut world = World::new(ModelFsConfig::default());
    world.connect(NotifyLevel::All);
    let control = world.clients[0].control.clone();
    control.plan(CallFilter::Type("statfs"), CallPlan { hold_reply: true, ..CallPlan::default() });
    let early = world.send_request(0, Op::StatFs { ino: 1 });
    let name = Name::new(b"own").unwrap();
    world.request(0, Op::Mkdir { dir: 1, name, mode: 0o755, umask: 0 });
    control.plan_nothing();
    control.release(control.held()[0]);
    world.settle();
    assert!(!world.is_pending(0, early));
    let old = world.replies.iter().find_map(|(_, id, _, answer)| match answer {
        OpReply::Space(space) if *id == early => Some(space.files),
        _ => None,
    });
    assert_eq!(old.map(|old| old + 1), Some(files(&mut world)), "asked again");
    control.plan(CallFilter::Type("statfs"), CallPlan { refuse: Some(Errno::IO), ..CallPlan::default() });
    world.advance(Span::from_secs(60));
    assert_eq!(world.request(0, Op::StatFs { ino: 1 }), OpReply::Failed(Errno::IO));
    assert_eq!(world.request(0, Op::StatFs { ino: 99 }), OpReply::Failed(Errno::STALE));
}
