//! Facts are served alike under read grants and write grants.

use nigh_cache::{NotifyLevel, Op, OpReply};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{Mode, Name};

#[test]
fn facts_under_write_grant_are_served_like_those_under_read_grant() {
    let served = [Mode::Read, Mode::Write].map(|mode| {
        let mut world = World::new(ModelFsConfig { mode, ..ModelFsConfig::default() });
        let now = world.now;
        let file = world.server.edit(|tree| tree.plant_file(now, "f", b"data"));
        world.connect(NotifyLevel::All);
        let look = |name: &str| Op::Lookup { dir: 1, name: Name::new(name.as_bytes()).unwrap() };
        let requests = || [look("f"), look("absent"), Op::GetAttr { ino: file.ino }];
        let first = requests().map(|op| world.request(0, op));
        assert!(matches!(first[0], OpReply::Node(_)), "{first:?}");
        let asked = world.clients[0].control.requests();
        let again = requests().map(|op| world.request(0, op));
        assert_eq!(world.clients[0].control.requests(), asked, "{mode:?}: replies come from memory");
        (first, again)
    });
    assert_eq!(served[0], served[1]);
}
