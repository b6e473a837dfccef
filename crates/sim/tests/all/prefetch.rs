//! Directory prefetch: a tree walk waits for the network a few times, and other access patterns transfer little in
//! vain.

use crate::far::{self, ROUND_TRIP, answer, name, slow, waits};
use nigh_cache::{Config, NotifyLevel, Op, OpReply, Prefetch};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{SetAttr, Span, Time};
use std::collections::BTreeSet;

/// The order in which a walker visits the subdirectories of a directory.
type Sort = fn(&mut [(String, u64)]);

fn world(paths: &[String]) -> World {
    world_with(paths, Prefetch::Auto)
}

fn world_with(paths: &[String], prefetch: Prefetch) -> World {
    let mut world = World::new(ModelFsConfig::default());
    world
        .server
        .edit(|tree| paths.iter().for_each(|path| assert_ne!(tree.plant_file(Time(0), path, b"x").ino, 0)));
    world.connect_with(Config { prefetch, ..Config::default() });
    slow(&mut world);
    world
}

/// Returns the names in a directory, and the inodes of its subdirectories.
fn list(world: &mut World, ino: u64) -> (Vec<String>, Vec<(String, u64)>) {
    let found = far::list(world, ino, true);
    let dirs = found.iter().filter(|entry| entry.is_dir).map(|entry| (entry.name.clone(), entry.ino));
    let dirs = dirs.collect();
    (found.into_iter().map(|entry| entry.name).collect(), dirs)
}

/// Walks depth first, and returns the number of names.
fn walk(world: &mut World, ino: u64, sort: Sort) -> u64 {
    let (names, mut dirs) = list(world, ino);
    sort(&mut dirs);
    let below: u64 = dirs.into_iter().map(|(_, ino)| walk(world, ino, sort)).sum();
    names.len() as u64 + below
}

/// Returns the number of names, the requests that waited for data not yet in transit, and the time taken.
fn cost(world: &mut World, sort: Sort) -> (u64, u64, Span) {
    let began = world.now;
    let count = walk(world, 1, sort);
    (count, waits(world), Span(world.now.0 - began.0))
}

fn as_listed(_: &mut [(String, u64)]) {}

fn by_name(dirs: &mut [(String, u64)]) {
    dirs.sort();
}

fn by_number(dirs: &mut [(String, u64)]) {
    dirs.sort_by_key(|(_, ino)| *ino);
}

/// A walker with a stack of directories.
fn last_first(dirs: &mut [(String, u64)]) {
    dirs.reverse();
}

fn backwards(dirs: &mut [(String, u64)]) {
    dirs.sort_by(|a, b| b.cmp(a));
}

/// An order that no rule gives.
fn scattered(dirs: &mut [(String, u64)]) {
    let place =
        |text: &str| text.bytes().fold(7_u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x9e37_79b9));
    dirs.sort_by_key(|(text, _)| place(text) % 8_191);
}

fn tree() -> Vec<String> {
    let digits = || 0..8;
    let leaves = digits().flat_map(|a| digits().flat_map(move |b| digits().map(move |c| (a, b, c))));
    leaves.flat_map(|(a, b, c)| (0..2).map(move |f| format!("d{a}/e{b}/g{c}/f{f}"))).collect()
}

fn chain(depth: usize) -> Vec<String> {
    vec![format!("{}f", "d/".repeat(depth))]
}

/// Walks a chain of directories without recursion: a thousand levels are too many for a test's stack.
fn walk_chain(world: &mut World) -> u64 {
    let (mut dir, mut levels) = (1, 0);
    loop {
        let (_, dirs) = list(world, dir);
        let Some((_, next)) = dirs.first() else { return levels };
        (dir, levels) = (*next, levels + 1);
    }
}

#[test]
fn tree_walk_in_any_regular_order_waits_few_times() {
    let reversed = [(last_first as Sort, 4), (backwards, 4)];
    for (sort, most) in [(as_listed as Sort, 4), (by_name, 4), (by_number, 4)].into_iter().chain(reversed) {
        let mut world = world(&tree());
        let (count, waits, took) = cost(&mut world, sort);
        assert_eq!(count, 8 + 64 + 512 + 1_024);
        assert!(waits <= most, "{waits} waits");
        // 585 directories arrive at 50 µs each; the rest are round trips.
        let round_trips = (took.0 - 585 * 50_000) / ROUND_TRIP.0;
        assert!(round_trips <= 8, "{round_trips} round trips");
    }
}

#[test]
fn walk_in_unpredictable_order_waits_no_more_than_without_prefetch() {
    let mut ahead = world(&tree());
    let (_, waits, took) = cost(&mut ahead, scattered);
    let mut plain = world_with(&tree(), Prefetch::Off);
    let (_, waits_without, took_without) = cost(&mut plain, scattered);
    assert!(
        waits <= waits_without && took <= took_without,
        "{waits} {waits_without} {took:?} {took_without:?}"
    );
    assert_eq!(plain.clients[0].control.calls("ahead"), 0);
}

#[test]
fn prefetched_chain_of_directories_is_walked_in_few_round_trips() {
    let mut world = world(&chain(1_000));
    let began = world.now;
    assert_eq!(walk_chain(&mut world), 1_000);
    let counters = world.clients[0].cache.counters();
    assert!(counters.waits - counters.joins <= 3, "{counters:?}");
    let round_trips = (world.now.0 - began.0 - 1_001 * 50_000) / ROUND_TRIP.0;
    assert!(round_trips <= 8, "{round_trips}");
    assert_eq!(counters.ahead_wasted, 0);
}

#[test]
fn prefetch_all_walks_whole_tree_after_one_wait() {
    let mut world = world_with(&tree(), Prefetch::All);
    let (_, waits, _) = cost(&mut world, backwards);
    assert_eq!(waits, 1);
}

/// A directory out of order is requested at once, instead of after all earlier ones.
#[test]
fn directory_out_of_prefetch_order_is_listed_at_once() {
    let paths: Vec<String> = (0..400).flat_map(|d| (0..30).map(move |f| format!("d{d:03}/f{f}"))).collect();
    let mut world = world(&paths);
    let (_, mut dirs) = list(&mut world, 1);
    by_name(&mut dirs);
    for (_, dir) in &dirs[..2] {
        list(&mut world, *dir);
    }
    assert_eq!(world.clients[0].control.calls("ahead"), 1);
    let began = world.now;
    list(&mut world, dirs[399].1);
    let took = Span(world.now.0 - began.0);
    assert!(took < Span(ROUND_TRIP.0 * 2), "{took:?}");
    let counters = world.clients[0].cache.counters();
    assert_eq!((counters.waits - counters.joins, world.clients[0].control.calls("steer")), (3, 1));
}

#[test]
fn random_directory_opens_prefetch_few_unused_entries() {
    let paths: Vec<String> = (0..3_000).map(|d| format!("d{d}/f")).collect();
    let mut world = world(&paths);
    let (_, dirs) = list(&mut world, 1);
    let (mut at, mut opened) = (1_u64, BTreeSet::new());
    while opened.len() < 1_500 {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let dir = dirs[usize::try_from((at >> 33) % 3_000).unwrap()].1;
        if opened.insert(dir) {
            list(&mut world, dir);
        }
    }
    let counters = world.clients[0].cache.counters();
    let vain = counters.ahead_fetched - counters.ahead_used;
    // Each opened directory has one and a half of thousands of entries. The limit is a tenth of the entries, and the
    // free first attempt.
    assert!(vain <= 2_048 + 600, "{counters:?}");
}

#[test]
fn change_of_another_client_during_prefetch_is_seen() {
    let mut world = world(&tree());
    let other = world.connect(NotifyLevel::All);
    let (_, dirs) = list(&mut world, 1);
    list(&mut world, dirs[0].1);
    let (_, below) = list(&mut world, dirs[1].1);
    // The prefetch is in progress: the second directory below this one has arrived, or is about to.
    let (text, dir) = below[3].clone();
    world.send_request(other, Op::Lookup { dir: 1, name: name(&dirs[1].0) });
    world.send_request(other, Op::Lookup { dir: dirs[1].1, name: name(&text) });
    let made = Op::Mkdir { dir, name: name("new"), mode: 0o755, umask: 0 };
    world.send_request(other, made);
    world.advance(Span::from_millis(100));
    let (names, _) = list(&mut world, dir);
    assert!(names.contains(&"new".to_owned()), "{text}: {names:?}");
    let gone = Op::Rmdir { dir, name: name("new") };
    world.send_request(other, gone);
    world.advance(Span::from_millis(100));
    assert!(!list(&mut world, dir).0.contains(&"new".to_owned()));
}

#[test]
fn request_waiting_for_prefetch_is_answered_after_session_lapse_or_loss() {
    for lost in [false, true] {
        let mut world = world(&tree());
        let (_, dirs) = list(&mut world, 1);
        list(&mut world, dirs[0].1);
        let op = Op::OpenDir { ino: dirs[1].1 };
        let id = world.send_request(0, op);
        world.advance(Span::from_millis(1));
        assert!(world.clients[0].cache.is_waiting(id));
        let control = world.clients[0].control.clone();
        if lost {
            control.lose("gone");
            world.advance(Span::from_millis(50));
        } else {
            control.lapse("away");
            world.advance(Span::from_millis(50));
            control.restore(true);
            world.advance(Span::from_millis(100));
        }
        let told = world.replies.iter().find(|(_, of, ..)| *of == id).map(|(.., answer)| answer);
        match told {
            Some(OpReply::Opened(_)) if !lost => {}
            Some(OpReply::Failed(_)) if lost => {}
            other => panic!("{lost}: {other:?}"),
        }
    }
}

/// A prefetch larger than the budget stays within it, and evicts nothing that is used elsewhere.
#[test]
fn prefetch_larger_than_budget_evicts_no_directory_in_use() {
    let mut paths: Vec<String> =
        (0..100).flat_map(|d| (0..100).map(move |f| format!("all/d{d:03}/file-{f}"))).collect();
    paths.extend((0..8).flat_map(|d| (0..100).map(move |f| format!("mine/m{d}/file-{f}"))));
    let mut world = World::new(ModelFsConfig::default());
    world
        .server
        .edit(|tree| paths.iter().for_each(|path| assert_ne!(tree.plant_file(Time(0), path, b"x").ino, 0)));
    let budget_bytes = 1 << 20;
    world.connect_with(Config { budget_bytes, ..Config::default() });
    slow(&mut world);
    let (_, dirs) = list(&mut world, 1);
    let of = |text: &str| dirs.iter().find(|(name, _)| name == text).unwrap().1;
    let (all, mine) = (of("all"), of("mine"));
    let (_, below) = list(&mut world, mine);
    // The walker has come back since, and works there.
    for _ in 0..2 {
        below.iter().for_each(|(_, dir)| drop(list(&mut world, *dir)));
        world.advance(Span::from_secs(3));
    }
    let before = world.clients[0].control.requests();
    assert_eq!(walk(&mut world, all, as_listed), 100 + 100 * 100);
    let gauges = world.clients[0].cache.gauges();
    assert!(world.clients[0].control.calls("ahead") > 0);
    assert!(gauges.bytes <= budget_bytes, "{gauges:?}");
    assert!(world.clients[0].cache.counters().evictions > 20);
    let walked = world.clients[0].control.requests();
    assert!(walked > before);
    for (_, dir) in &below {
        list(&mut world, *dir);
    }
    assert_eq!(world.clients[0].control.requests(), walked, "all is there");
}

/// As `git status` does: it looks up every tracked file in path order, and opens no directory.
#[test]
fn lookups_in_successive_directories_start_prefetch() {
    let paths: Vec<String> =
        (0..60).flat_map(|dir| (0..20).map(move |file| format!("d{dir:02}/f{file:02}"))).collect();
    let mut world = world(&paths);
    let look = |world: &mut World, dir: u64, name_of: &str| match answer(
        world,
        Op::Lookup { dir, name: name(name_of) },
    ) {
        OpReply::Node(node) => node.id.ino,
        other => panic!("{name_of}: {other:?}"),
    };
    for dir in 0..60 {
        let ino = look(&mut world, 1, &format!("d{dir:02}"));
        for file in 0..20 {
            look(&mut world, ino, &format!("f{file:02}"));
        }
    }
    let waits = world.clients[0].cache.counters().waits;
    assert!(waits <= 24, "{waits} waits for 1,260 names");
    assert!(world.clients[0].control.requests() <= 30, "{}", world.clients[0].control.requests());
    world.check_kernels().unwrap();
}

/// The kernel forgets directories that another client changes while a job brings them. Their listings are dropped, but
/// the server has spent its credit on them: the cache must not expect more of the job before it gives more.
#[test]
fn directories_forgotten_in_transit_count_against_the_credit_of_their_job() {
    const DIRS: u64 = 400;
    let dirs = || (0..DIRS).map(|n| format!("d{n:03}"));
    let paths: Vec<String> = dirs().flat_map(|dir| (0..7).map(move |n| format!("{dir}/f{n}"))).collect();
    let mut world = world(&paths);
    let other = world.connect(NotifyLevel::All);
    let (_, mut dirs) = list(&mut world, 1);
    dirs.sort();
    for (dir, _) in &dirs[2..] {
        world.request(other, Op::Lookup { dir: 1, name: name(dir) });
    }
    list(&mut world, dirs[0].1);
    let second = world.send_request(0, Op::OpenDir { ino: dirs[1].1 });
    for (_, ino) in &dirs[2..] {
        let set = SetAttr { mode: Some(0o711), ..SetAttr::default() };
        world.request(other, Op::SetAttr { ino: *ino, fh: None, set });
        world.clients[0].cache.handle_forget(*ino, 1);
    }
    world.advance(Span::from_millis(100));
    assert!(world.replies.iter().any(|(_, of, ..)| *of == second));
    for (text, _) in &dirs[2..] {
        let OpReply::Node(node) = answer(&mut world, Op::Lookup { dir: 1, name: name(text) }) else {
            panic!("no {text}")
        };
        assert_eq!(list(&mut world, node.id.ino).0.len(), 7);
    }
}

/// The caller that began to wait for a directory of a job is killed; later the job has no credit.
#[test]
fn directory_of_a_job_is_listed_for_the_next_caller_after_the_first_is_killed() {
    let paths = (0..400).flat_map(|dir| (0..30).map(move |n| format!("d{dir:03}/f{n}")));
    let mut world = world(&paths.collect::<Vec<_>>());
    let (_, mut dirs) = list(&mut world, 1);
    dirs.sort();
    list(&mut world, dirs[0].1);
    world.send_request(0, Op::OpenDir { ino: dirs[1].1 });
    let killed = world.send_request(0, Op::OpenDir { ino: dirs[300].1 });
    world.interrupt(0, killed);
    world.advance(Span::from_millis(100));
    assert_eq!(list(&mut world, dirs[300].1).0.len(), 30);
}

/// Two callers wait for large directories of one job, which has credit for one of them.
#[test]
fn requested_directory_is_not_delayed_by_those_below_another() {
    let dirs = (0..600).map(|dir| format!("d{dir:03}/f"));
    let below = [560, 580].into_iter().flat_map(|dir| (0..2_000).map(move |n| format!("d{dir}/e{n}/f")));
    let mut world = world(&dirs.chain(below).collect::<Vec<_>>());
    let (_, mut dirs) = list(&mut world, 1);
    dirs.sort();
    list(&mut world, dirs[0].1);
    let requests = [1, 560, 580].map(|dir: usize| world.send_request(0, Op::OpenDir { ino: dirs[dir].1 }));
    world.advance(Span::from_secs(1));
    for request in requests {
        assert!(world.replies.iter().any(|(_, of, ..)| *of == request), "{request:?} is not answered");
    }
}
