//! Contents of files: a reader of many files waits for the network a few times, a reader of a large file goes at the link's
//! rate, and what is not read is not fetched.

use crate::far::files::{PAGE, READ, open, read};
use crate::far::{Listed, ROUND_TRIP, answer, list, name, slow, waits};
use nigh_cache::{Config, Fh, NotifyLevel, Op, OpReply, Prefetch};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{Access, OpId, Span, Time, WriteFlags};

/// The order in which a reader takes the entries of a directory.
type Sort = fn(&mut [Listed]);

fn contents_of(path: &str) -> Vec<u8> {
    format!("contents of {path}").into_bytes()
}

fn world(paths: &[String], config: Config) -> World {
    let mut world = World::new(ModelFsConfig::default());
    world.server.edit(|tree| {
        for path in paths {
            assert_ne!(tree.plant_file(Time(0), path, &contents_of(path)).ino, 0);
        }
    });
    world.connect_with(config);
    slow(&mut world);
    world
}

/// Reads each file of a tree, depth first. Returns their number.
fn read_all(world: &mut World, dir: u64, path: &str, sort: Sort) -> u64 {
    let mut found = list(world, dir, false);
    sort(&mut found);
    let mut count = 0;
    for Listed { name, ino, is_dir } in found {
        let below = format!("{path}{name}");
        if is_dir {
            count += read_all(world, ino, &format!("{below}/"), sort);
        } else {
            assert_eq!(read(world, dir, &name), contents_of(&below));
            count += 1;
        }
    }
    count
}

fn as_listed(_: &mut [Listed]) {}

fn by_name(found: &mut [Listed]) {
    found.sort();
}

fn by_number(found: &mut [Listed]) {
    found.sort_by_key(|entry| entry.ino);
}

fn files_first(found: &mut [Listed]) {
    found.sort_by_key(|entry| entry.is_dir);
}

/// As a walker with a stack of directories.
fn last_first(found: &mut [Listed]) {
    files_first(found);
    let dirs = found.partition_point(|entry| !entry.is_dir);
    found[dirs..].reverse();
}

fn tree() -> Vec<String> {
    let digits = || 0..7;
    let leaves = digits().flat_map(|a| digits().flat_map(move |b| digits().map(move |c| (a, b, c))));
    leaves.flat_map(|(a, b, c)| (0..2).map(move |f| format!("d{a}/e{b}/g{c}/f{f}"))).collect()
}

#[test]
fn reader_of_each_file_of_a_tree_waits_few_times() {
    let orders = [
        ("as listed", as_listed as Sort),
        ("by name", by_name),
        ("by number", by_number),
        ("files first", files_first),
    ];
    for (order, sort) in orders {
        let mut world = world(&tree(), Config::default());
        let began = world.now;
        assert_eq!(read_all(&mut world, 1, "", sort), 686);
        let (waits, took) = (waits(&world), Span(world.now.0 - began.0));
        assert!(waits <= 10, "{order}: {waits} waits, {:?}", world.clients[0].cache.counters());
        assert!(took < Span::from_millis(1_000), "{order}: {} ms", took.as_millis());
        let counters = world.clients[0].cache.counters();
        assert!(counters.contents_wasted == 0, "{counters:?}");
    }
}

/// The tree is listed before, as the demonstration does.
#[test]
fn reader_with_a_stack_of_directories_waits_few_times_in_a_listed_tree() {
    let mut world = world(&tree(), Config::default());
    let mut dirs = vec![1];
    while let Some(dir) = dirs.pop() {
        let found = list(&mut world, dir, false);
        dirs.extend(found.into_iter().filter(|entry| entry.is_dir).map(|entry| entry.ino));
    }
    let before = waits(&world);
    assert_eq!(read_all(&mut world, 1, "", last_first), 686);
    let waits = waits(&world) - before;
    assert!(waits <= 12, "{waits} waits, {:?}", world.clients[0].cache.counters());
}

#[test]
fn tree_that_is_listed_or_looked_at_fetches_no_contents() {
    let mut world = world(&tree(), Config::default());
    let mut dirs = vec![1];
    while let Some(dir) = dirs.pop() {
        for entry in list(&mut world, dir, false) {
            if entry.is_dir {
                dirs.push(entry.ino);
            } else {
                answer(&mut world, Op::Lookup { dir, name: name(&entry.name) });
            }
        }
    }
    assert_eq!(world.clients[0].control.calls("read"), 0);
    assert_eq!(world.clients[0].cache.counters().contents_fetched, 0);
}

#[test]
fn one_file_of_many_that_is_read_again_and_again_brings_no_other() {
    let paths: Vec<String> = (0..1_000).map(|file| format!("f{file:04}")).collect();
    let mut world = world(&paths, Config::default());
    list(&mut world, 1, false);
    for _ in 0..5 {
        assert_eq!(read(&mut world, 1, "f0500"), contents_of("f0500"));
    }
    assert_eq!(world.clients[0].cache.counters().contents_fetched, 0);
}

#[test]
fn no_contents_come_ahead_without_prefetch_or_without_memory_for_them() {
    for config in [
        Config { prefetch: Prefetch::Off, ..Config::default() },
        Config { data_budget_bytes: 0, ..Config::default() },
    ] {
        let paths: Vec<String> = (0..40).map(|file| format!("f{file:02}")).collect();
        let mut world = world(&paths, config);
        assert_eq!(read_all(&mut world, 1, "", by_name), 40);
        assert_eq!(world.clients[0].control.calls("read"), 40);
        assert_eq!(world.clients[0].cache.counters().contents_fetched, 0);
    }
}

/// Contents are on their way, or there, when another client writes the file.
#[test]
fn contents_that_another_client_changes_meanwhile_are_not_served() {
    for after in [0, 5, 9, 10, 11, 15, 30] {
        let paths: Vec<String> = (0..40).map(|file| format!("f{file:02}")).collect();
        let mut world = world(&paths, Config::default());
        let other = world.connect(NotifyLevel::All);
        list(&mut world, 1, false);
        world.request(other, Op::Lookup { dir: 1, name: name("f20") });
        let ino = world.server.edit(|tree| tree.child_of(1, &name("f20"))).unwrap();
        let access = Access { write: true, ..READ };
        let opened = world.request(other, Op::Open { ino, access, append: false });
        let OpReply::Opened(opened) = opened else { panic!("{opened:?}") };
        assert_eq!(read(&mut world, 1, "f00"), contents_of("f00"));
        assert_eq!(read(&mut world, 1, "f01"), contents_of("f01"));
        assert!(world.clients[0].control.calls("read") > 20, "the others are asked for");
        world.advance(Span::from_millis(after));
        let data = b"something else".to_vec();
        let write = Op::Write { ino, fh: opened.fh, offset: 0, data, flags: WriteFlags::default() };
        let written: OpId = world.send_request(other, write);
        world.advance(Span::from_millis(100));
        assert!(!world.is_pending(other, written), "the writer waits for no contents");
        let mut wanted = contents_of("f20");
        wanted[..14].copy_from_slice(b"something else");
        assert_eq!(read(&mut world, 1, "f20"), wanted, "after {after} ms");
    }
}

#[test]
fn own_change_of_a_file_drops_its_contents() {
    let paths: Vec<String> = (0..40).map(|file| format!("f{file:02}")).collect();
    let mut world = world(&paths, Config::default());
    list(&mut world, 1, false);
    read(&mut world, 1, "f00");
    read(&mut world, 1, "f01");
    for after in [0, 20] {
        let text = if after == 0 { "f20" } else { "f21" };
        world.advance(Span::from_millis(after));
        let OpReply::Node(node) = answer(&mut world, Op::Lookup { dir: 1, name: name(text) }) else {
            panic!("{text}")
        };
        let (ino, access) = (node.id.ino, Access { write: true, ..READ });
        let OpReply::Opened(opened) = answer(&mut world, Op::Open { ino, access, append: false }) else {
            panic!("{text}")
        };
        let data = b"mine".to_vec();
        let write = Op::Write { ino, fh: opened.fh, offset: 0, data, flags: WriteFlags::default() };
        assert_eq!(answer(&mut world, write), OpReply::Written(4));
        answer(&mut world, Op::Release { fh: opened.fh, flock: None });
        let mut wanted = contents_of(text);
        wanted[..4].copy_from_slice(b"mine");
        assert_eq!(read(&mut world, 1, text), wanted);
    }
}

/// Reads two files, and a third one whose contents are on their way. Returns that request.
fn wait_for_contents(world: &mut World) -> OpId {
    let [first, second, third] = ["f00", "f01", "f02"].map(|text| open(world, 1, text));
    let ask = |world: &mut World, (ino, fh): (u64, Fh)| {
        world.send_request(0, Op::Read { ino, fh, offset: 0, size: PAGE })
    };
    ask(world, first);
    ask(world, second);
    let waiting = ask(world, third);
    assert!(world.is_pending(0, waiting));
    assert_eq!(world.clients[0].control.calls("read"), 40, "it has no call of its own");
    waiting
}

#[test]
fn reader_waiting_for_contents_is_answered_after_a_lapse_or_a_loss() {
    for lost in [false, true] {
        let paths: Vec<String> = (0..40).map(|file| format!("f{file:02}")).collect();
        let mut world = world(&paths, Config::default());
        list(&mut world, 1, false);
        let waiting = wait_for_contents(&mut world);
        let control = world.clients[0].control.clone();
        if lost {
            control.lose("gone");
        } else {
            control.lapse("away");
            world.advance(Span::from_millis(50));
            control.restore(true);
        }
        world.advance(Span::from_millis(200));
        let told = world.replies.iter().find(|(_, of, ..)| *of == waiting).map(|(.., answer)| answer.clone());
        match told {
            Some(OpReply::Data(data)) if !lost => assert_eq!(data, contents_of("f02")),
            // It waits for another session.
            None if lost => {}
            other => panic!("{lost}: {other:?}"),
        }
    }
}

/// A killed reader's request ends at once, though nothing of its own is in flight.
#[test]
fn reader_waiting_for_contents_can_be_killed() {
    let paths: Vec<String> = (0..40).map(|file| format!("f{file:02}")).collect();
    let mut world = world(&paths, Config::default());
    list(&mut world, 1, false);
    let waiting = wait_for_contents(&mut world);
    world.interrupt(0, waiting);
    assert!(!world.is_pending(0, waiting));
    assert_eq!(read(&mut world, 1, "f02"), contents_of("f02"));
}

/// A large file at 10 ms: after the first reads none waits for a whole round trip.
#[test]
fn sequential_reader_of_a_large_file_waits_few_round_trips() {
    const CHUNK: u64 = 128 << 10;
    let (chunks, mut world) = (256_u64, World::new(ModelFsConfig::default()));
    let large: Vec<u8> = (0..chunks * CHUNK).map(|at| (at / 1_000 % 251) as u8).collect();
    world.server.edit(|tree| tree.plant_file(Time(0), "large", &large));
    world.connect_with(Config::default());
    slow(&mut world);
    let (ino, fh) = open(&mut world, 1, "large");
    let began = world.now;
    for at in 0..chunks {
        let offset = at * CHUNK;
        let size = u32::try_from(CHUNK).unwrap();
        let OpReply::Data(data) = answer(&mut world, Op::Read { ino, fh, offset, size }) else {
            panic!("{at}")
        };
        let from = usize::try_from(offset).unwrap();
        assert!(data == large[from..from + data.len()] && data.len() as u64 == CHUNK, "chunk {at}");
    }
    let round_trips = (world.now.0 - began.0) / ROUND_TRIP.0;
    assert!(round_trips <= 12, "{round_trips} round trips, {} waits", waits(&world));
    let counters = world.clients[0].cache.counters();
    assert_eq!((counters.contents_wasted, counters.contents_used), (0, counters.contents_fetched));
    assert!(world.clients[0].cache.gauges().contents_bytes < 4 * CHUNK, "the kernel has the rest");
}

#[test]
fn random_reads_of_a_large_file_fetch_nothing_else() {
    let mut world = World::new(ModelFsConfig::default());
    let large = vec![7_u8; 16 << 20];
    world.server.edit(|tree| tree.plant_file(Time(0), "large", &large));
    world.connect_with(Config::default());
    slow(&mut world);
    let (ino, fh) = open(&mut world, 1, "large");
    let mut at = 1_u64;
    for _ in 0..500 {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let offset = (at >> 33) % (large.len() as u64 / 4_096) * 4_096;
        let OpReply::Data(data) = answer(&mut world, Op::Read { ino, fh, offset, size: PAGE }) else {
            panic!()
        };
        assert_eq!(data.len(), 4_096);
    }
    let fetched = world.clients[0].cache.counters().contents_fetched;
    assert!(fetched <= 500 * 4_096, "{fetched} bytes");
}
