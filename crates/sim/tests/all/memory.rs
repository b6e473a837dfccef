//! Memory reclaim: of idle directories, above a number of directories, under memory pressure, and of kernel inodes.

use nigh_cache::{Config, NotifyLevel, Op, OpReply, Page};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{Cookie, LeaseScope, Name, NodeId, Span};

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// Creates directories with empty files.
fn planted(dirs: u32, files: u32) -> World {
    let world = World::new(ModelFsConfig::default());
    world.server.edit(|tree| {
        for dir in 0..dirs {
            for file in 0..files {
                tree.plant_file(Default::default(), &format!("dir-{dir}/file-{file}"), b"");
            }
        }
    });
    world
}

fn id(world: &mut World, dir: u32) -> NodeId {
    world.server.edit(|tree| tree.find(&format!("dir-{dir}"))).unwrap()
}

fn page(world: &mut World, at: usize, op: Op) -> Page {
    match world.request(at, op) {
        OpReply::Page(page) => page,
        other => panic!("{other:?}"),
    }
}

/// Lists a directory with attributes; returns the number of names, and of names with attributes for the kernel.
fn list(world: &mut World, at: usize, dir: u32) -> (usize, usize) {
    let ino = id(world, dir).ino;
    world.request(at, Op::Lookup { dir: 1, name: name(&format!("dir-{dir}")) });
    let OpReply::Opened(opened) = world.request(at, Op::OpenDir { ino }) else { panic!() };
    let (mut names, mut told, mut offset) = (0, 0, Cookie(0));
    loop {
        let page = page(world, at, Op::ReadDir { ino, fh: opened.fh, offset, size: 32 << 10, plus: true });
        let Some(last) = page.entries.last() else { break };
        offset = last.next;
        names += page.entries.len();
        told += page.entries.iter().filter(|entry| entry.node.is_some()).count();
    }
    world.request(at, Op::ReleaseDir { fh: opened.fh });
    (names, told)
}

fn is_granted(world: &mut World, at: usize, dir: u32) -> bool {
    let id = id(world, dir);
    world.clients[at].control.has_granted(id, LeaseScope::Directory)
}

#[test]
fn idle_directory_is_returned_after_directory_timeout() {
    let mut world = planted(3, 10);
    let limit = Span::from_secs(30);
    let at = world.connect_with(Config { dir_timeout: Some(limit), ..Config::default() });
    for dir in 0..3 {
        list(&mut world, at, dir);
    }
    world.advance(Span::from_secs(20));
    assert_eq!(list(&mut world, at, 1), (12, 0));
    assert!((0..3).all(|dir| is_granted(&mut world, at, dir)));
    world.advance(Span::from_secs(18));
    assert_eq!([0, 1, 2].map(|dir| is_granted(&mut world, at, dir)), [false, true, false]);
    world.advance(Span::from_secs(20));
    assert!(!is_granted(&mut world, at, 1));
    world.check_kernels().unwrap();
    let requests = world.clients[at].control.requests();
    world.advance(Span::from_secs(1_000));
    assert_eq!(world.clients[at].control.requests(), requests, "what is given back asks for nothing");
    assert_eq!(list(&mut world, at, 0).0, 12);
    assert!(is_granted(&mut world, at, 0));
}

#[test]
fn directory_being_read_is_not_evicted_as_idle() {
    let mut world = planted(1, 500);
    let at = world.connect_with(Config { dir_timeout: Some(Span::from_secs(30)), ..Config::default() });
    let ino = id(&mut world, 0).ino;
    world.request(at, Op::Lookup { dir: 1, name: name("dir-0") });
    let OpReply::Opened(opened) = world.request(at, Op::OpenDir { ino }) else { panic!() };
    let read = |offset| Op::ReadDir { ino, fh: opened.fh, offset, size: 4_096, plus: false };
    let first = page(&mut world, at, read(Cookie(0)));
    let requests = world.clients[at].control.requests();
    world.advance(Span::from_secs(100));
    page(&mut world, at, read(first.entries.last().unwrap().next));
    assert_eq!(world.clients[at].control.requests(), requests);
    world.request(at, Op::ReleaseDir { fh: opened.fh });
    world.advance(Span::from_secs(100));
    assert!(!is_granted(&mut world, at, 0));
}

#[test]
fn cached_directories_stay_within_their_limit() {
    let mut world = planted(40, 3);
    let at = world.connect_with(Config { most_dirs: 10, ..Config::default() });
    for round in 0..2 {
        for dir in 0..40 {
            assert_eq!(list(&mut world, at, dir).0, 5, "round {round}");
            let held = (0..40).filter(|dir| is_granted(&mut world, at, *dir)).count();
            assert!(held <= 10, "{held} after {dir} in round {round}");
        }
    }
    world.check_kernels().unwrap();
    assert!(is_granted(&mut world, at, 39), "the last one goes last");
}

/// A kernel that forgets nothing, so that only what the cache can free by itself is freed.
#[test]
fn memory_pressure_frees_half_of_cache_without_changing_replies() {
    let mut world = planted(30, 40);
    let at = world.connect_with(Config { prunes: true, ..Config::default() });
    let listed = |world: &mut World| -> Vec<usize> { (0..30).map(|dir| list(world, at, dir).0).collect() };
    let names = listed(&mut world);
    world.clients[at].cache.handle_timeout(world.now);
    let before = world.clients[at].cache.gauges();
    world.clients[at].cache.handle_pressure(world.now);
    world.settle();
    let after = world.clients[at].cache.gauges();
    assert!(after.bytes <= before.bytes / 2 || after.entries < before.entries / 10, "{before:?} {after:?}");
    assert!(
        after.entries > 0 || after.bytes * 2 + 20_000 > before.bytes,
        "no more than was asked for: {after:?}"
    );
    assert!(world.clients[at].pruned.len() as u64 >= before.inodes / 2 - 1, "the kernel is asked too");
    world.check_kernels().unwrap();
    assert_eq!(listed(&mut world), names);
    assert_eq!(world.clients[at].cache.counters().squeezed, 1);
}

#[test]
fn kernel_inodes_stay_within_limit_by_pruning_oldest() {
    let mut world = planted(20, 100);
    let most = 400;
    let config =
        Config { prunes: true, kernel_inodes_most: most, level: NotifyLevel::All, ..Config::default() };
    let at = world.connect_with(config);
    for dir in 0..20 {
        let (names, _) = list(&mut world, at, dir);
        assert_eq!(names, 102);
        let known = world.clients[at].cache.gauges().inodes;
        // Lookups always reach the kernel: here of the directories and the root.
        assert!(known <= most + 21, "{known}");
    }
    let pruned = std::mem::take(&mut world.clients[at].pruned);
    assert!(pruned.len() as u64 >= most / 8, "{}", pruned.len());
    let first = world.server.edit(|tree| tree.find("dir-0/file-0")).unwrap().ino;
    assert!(pruned.contains(&first), "one of those that it has known longest");
    for ino in pruned {
        world.clients[at].cache.handle_forget(ino, 1);
    }
    world.settle();
    assert!(list(&mut world, at, 19).1 > 0, "there is room again");
    world.check_kernels().unwrap();
}

#[test]
fn kernel_that_keeps_pruned_inodes_is_not_asked_repeatedly() {
    let mut world = planted(20, 100);
    let config = Config { prunes: true, kernel_inodes_most: 400, ..Config::default() };
    let at = world.connect_with(config);
    for dir in 0..20 {
        list(&mut world, at, dir);
    }
    let asked = world.clients[at].pruned.len();
    for round in 0..50 {
        list(&mut world, at, round % 20);
    }
    assert!(world.clients[at].pruned.len() <= asked + 400, "{asked} {}", world.clients[at].pruned.len());
}
