//! Listings of several directories run concurrently, and one listing of a directory serves all its readers.

use nigh_cache::{Config, Op, OpReply, Prefetch};
use nigh_remote::fake::{CallFilter, CallPlan};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{Cookie, Name, OpId, Span};

const PROCESSES: u64 = 8;
const ROUND_TRIP: Span = Span::from_millis(10);
/// Time between the four parts of a listing.
const PAUSE: Span = Span::from_millis(1);

/// Eight directories of which a client knows only the names.
fn world() -> (World, Vec<u64>) {
    let mut world = World::new(ModelFsConfig::default());
    let now = world.now;
    world.connect_with(Config { prefetch: Prefetch::Off, ..Config::default() });
    let dirs = (0..PROCESSES).map(|n| {
        let dir = format!("d{n}");
        world.server.edit(|tree| {
            for file in 0..1_000 {
                tree.plant_file(now, &format!("{dir}/file-{file}"), b"");
            }
        });
        match world.request(0, Op::Lookup { dir: 1, name: Name::new(dir.as_bytes()).unwrap() }) {
            OpReply::Node(node) => node.id.ino,
            other => panic!("{other:?}"),
        }
    });
    let dirs = dirs.collect();
    let fate = CallPlan { arrives_after: ROUND_TRIP, chunk_pause: PAUSE, ..CallPlan::default() };
    world.clients[0].control.plan(CallFilter::Every, fate);
    (world, dirs)
}

/// Each process opens one directory and reads it to its end, all concurrently. Returns the number of names per
/// process, and the time taken.
fn list(world: &mut World, dirs: &[u64]) -> (Vec<usize>, Span) {
    let begun = world.now;
    let mut asked: Vec<OpId> =
        dirs.iter().map(|ino| world.send_request(0, Op::OpenDir { ino: *ino })).collect();
    let (mut names, mut opened) = (vec![0; dirs.len()], vec![None; dirs.len()]);
    for _ in 0..1_000 {
        for (at, id) in asked.iter_mut().enumerate() {
            let Some(found) = world.replies.iter().position(|(_, of, ..)| of == id) else { continue };
            let offset = match world.replies.swap_remove(found).3 {
                OpReply::Opened(answer) => {
                    opened[at] = Some(answer.fh);
                    Some(Cookie(0))
                }
                OpReply::Page(page) => {
                    names[at] += page.entries.len();
                    page.entries.last().map(|last| last.next)
                }
                other => panic!("{other:?}"),
            };
            if let (Some(offset), Some(fh)) = (offset, opened[at]) {
                *id = world
                    .send_request(0, Op::ReadDir { ino: dirs[at], fh, offset, size: 1 << 15, plus: false });
            }
        }
        if names.iter().all(|count| *count == 1_002) {
            return (names, Span(world.now.0 - begun.0));
        }
        world.advance(Span::from_millis(1));
    }
    panic!("{names:?}")
}

#[test]
fn eight_processes_on_eight_directories_have_eight_listings_in_flight() {
    let (mut world, dirs) = world();
    let (_, alone) = list(&mut world, &dirs[..1]);
    let (mut world, dirs) = self::world();
    for ino in dirs {
        let id = world.send_request(0, Op::OpenDir { ino });
        assert!(world.is_pending(0, id));
    }
    assert_eq!(world.clients[0].control.calls("list"), PROCESSES, "nothing is answered yet");
    let (mut world, dirs) = self::world();
    let (_, together) = list(&mut world, &dirs);
    assert_eq!(world.clients[0].control.calls("list"), PROCESSES);
    assert_eq!(together, alone);
}

#[test]
fn eight_processes_on_one_cold_directory_cause_one_listing() {
    let (mut world, dirs) = world();
    let before = world.clients[0].cache.counters();
    list(&mut world, &[dirs[0]; 8]);
    let after = world.clients[0].cache.counters();
    assert_eq!(world.clients[0].control.calls("list"), 1);
    let alone = |counters: nigh_cache::Counters| counters.waits - counters.joins;
    assert_eq!(alone(after) - alone(before), 1, "the others join");
}
