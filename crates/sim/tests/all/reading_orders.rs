//! Contents come ahead in the order in which programs read the files of a tree that has files and directories side by side.

use crate::far::files::{READ, open, read};
use crate::far::{Listed, answer, list, name, slow, waits};
use nigh_cache::{Config, Op, OpReply};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{Access, OpId, Span, Time, WriteFlags};

/// Directories and files side by side in three levels: 1,640 files.
fn mixed() -> Vec<String> {
    let mut paths = Vec::new();
    let mut fill = |dir: &str| paths.extend((0..4).map(|at| format!("{dir}{}file", at * 2)));
    fill("");
    for a in 0..8 {
        fill(&format!("{a}dir/"));
        for b in 0..7 {
            fill(&format!("{a}dir/{b}dir/"));
            (0..6).for_each(|c| fill(&format!("{a}dir/{b}dir/{c}dir/")));
        }
    }
    paths
}

/// Nearly a page, so that the window of a walk holds a part of the tree only.
fn contents_of(path: &str) -> Vec<u8> {
    path.bytes().cycle().take(4_000).collect()
}

fn world(paths: &[String]) -> World {
    let mut world = World::new(ModelFsConfig::default());
    world.server.edit(|tree| {
        for path in paths {
            assert_ne!(tree.plant_file(Time(0), path, &contents_of(path)).ino, 0);
        }
    });
    world.connect_with(Config::default());
    slow(&mut world);
    world
}

fn is_dir(entry: &Listed) -> bool {
    entry.is_dir
}

/// As rsync and `os.walk`: the files of a directory, then its directories.
fn read_files_first(world: &mut World, dir: u64, path: &str, sorted: bool) -> u64 {
    let mut found = list(world, dir, false);
    if sorted {
        found.sort();
    }
    let (dirs, files): (Vec<Listed>, Vec<Listed>) = found.into_iter().partition(is_dir);
    for file in &files {
        assert_eq!(read(world, dir, &file.name), contents_of(&format!("{path}{}", file.name)));
    }
    let below = dirs.into_iter();
    below.map(|dir| read_files_first(world, dir.ino, &format!("{path}{}/", dir.name), sorted)).sum::<u64>()
        + files.len() as u64
}

/// As rsync: directories are listed far ahead of the files that are read.
fn read_after_listings(world: &mut World, ahead: usize) -> u64 {
    let (mut dirs, mut listed, mut count) = (vec![(1, String::new())], std::collections::VecDeque::new(), 0);
    loop {
        while listed.len() < ahead
            && let Some((dir, path)) = dirs.pop()
        {
            let mut found = list(world, dir, false);
            found.sort();
            let (below, files): (Vec<Listed>, Vec<Listed>) = found.into_iter().partition(is_dir);
            dirs.extend(below.into_iter().rev().map(|one| (one.ino, format!("{path}{}/", one.name))));
            listed.extend(files.into_iter().map(|file| (dir, path.clone(), file.name)));
        }
        let Some((dir, path, file)) = listed.pop_front() else { return count };
        assert_eq!(read(world, dir, &file), contents_of(&format!("{path}{file}")));
        count += 1;
    }
}

#[test]
fn reader_that_takes_files_before_directories_waits_few_times() {
    for sorted in [false, true] {
        let mut world = world(&mixed());
        assert_eq!(read_files_first(&mut world, 1, "", sorted), 1_604);
        let waits = waits(&world);
        assert!(waits <= 16, "sorted: {sorted}: {waits} waits, {:?}", world.clients[0].cache.counters());
    }
}

#[test]
fn reader_that_lists_far_ahead_waits_few_times() {
    for ahead in [20, 100, 1_000] {
        let mut world = world(&mixed());
        assert_eq!(read_after_listings(&mut world, ahead), 1_604);
        let waits = waits(&world);
        assert!(waits <= 16, "{ahead} ahead: {waits} waits, {:?}", world.clients[0].cache.counters());
    }
}

/// As `cp`: all entries of a directory by their inode numbers, which other orders match by chance here and there.
fn read_by_number(world: &mut World, dir: u64, path: &str) -> u64 {
    let mut found = list(world, dir, false);
    found.sort_by_key(|entry| entry.ino);
    let read_one = |entry: Listed| {
        let path = format!("{path}{}", entry.name);
        if entry.is_dir {
            return read_by_number(world, entry.ino, &format!("{path}/"));
        }
        assert_eq!(read(world, dir, &entry.name), contents_of(&path));
        1
    };
    found.into_iter().map(read_one).sum()
}

/// XFS allocates the inodes of directories in groups by turns, so that some come before the files of their parent and some after
/// them.
#[test]
fn reader_by_inode_number_waits_few_times() {
    for seed in 1..=12_u64 {
        let mut paths = mixed();
        let mut state = seed;
        for at in (1..paths.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            paths.swap(at, usize::try_from(state >> 33).unwrap() % (at + 1));
        }
        let mut world = world(&paths);
        assert_eq!(read_by_number(&mut world, 1, ""), 1_604);
        let waits = waits(&world);
        assert!(waits <= 16, "seed {seed}: {waits} waits, {:?}", world.clients[0].cache.counters());
    }
}

/// In the order of the listing a walk takes a part of the directory at a time.
#[test]
fn reader_of_a_very_large_directory_waits_few_times() {
    let mut world = World::new(ModelFsConfig::default());
    world.server.edit(|tree| {
        for at in 0..70_000 {
            tree.plant_file(Time(0), &format!("f{at:05}"), b"seven..");
        }
    });
    world.connect_with(Config::default());
    slow(&mut world);
    let found = list(&mut world, 1, false);
    let before = waits(&world);
    for at in (60_000..62_000).chain(64_000..70_000) {
        assert_eq!(read(&mut world, 1, &found[at].name), b"seven..");
    }
    let waits = waits(&world) - before;
    assert!(waits <= 24, "{waits} waits, {:?}", world.clients[0].cache.counters());
}

/// Creates, writes and closes a file.
fn write(world: &mut World, dir: u64, text: &str, data: &[u8]) {
    let access = Access { write: true, ..READ };
    let op =
        Op::Create { dir, name: name(text), mode: 0o644, umask: 0, exclusive: true, access, append: false };
    let OpReply::Created(node, opened) = answer(world, op) else { panic!("{text}") };
    let (ino, fh) = (node.id.ino, opened.fh);
    let write = Op::Write { ino, fh, offset: 0, data: data.to_vec(), flags: WriteFlags::default() };
    assert_eq!(answer(world, write), OpReply::Written(data.len() as u64));
    answer(world, Op::Release { fh, flock: None });
}

/// A walk that finds nothing to ask for passes all entries of the directory.
#[test]
fn files_that_were_written_here_begin_few_walks() {
    let mut world = World::new(ModelFsConfig::default());
    world.connect_with(Config::default());
    slow(&mut world);
    let names: Vec<String> = (0..200).map(|at| format!("f{at:03}")).collect();
    for text in &names {
        write(&mut world, 1, text, b"written");
    }
    list(&mut world, 1, false);
    let before = world.clients[0].cache.counters();
    for text in &names {
        assert_eq!(read(&mut world, 1, text), b"written");
    }
    let after = world.clients[0].cache.counters();
    assert_eq!(after.contents_fetched, before.contents_fetched);
    let walks = after.file_walks - before.file_walks;
    assert!(walks <= 20, "{walks} walks for 200 files");
}

/// As `cp`: the kernel asks for two parts of a file at once.
#[test]
fn reader_of_large_files_among_small_ones_does_not_wait_at_each() {
    const PART: u32 = 128 << 10;
    let mut world = World::new(ModelFsConfig::default());
    let size = |at: u64| if at.is_multiple_of(10) { 700_000 } else { 9_000 };
    world.server.edit(|tree| {
        for at in 0..400 {
            let bytes = vec![u8::try_from(at % 251).unwrap(); usize::try_from(size(at)).unwrap()];
            tree.plant_file(Time(0), &format!("f{at:03}"), &bytes);
        }
    });
    world.connect_with(Config::default());
    slow(&mut world);
    list(&mut world, 1, false);
    let (before, began) = (waits(&world), world.now);
    for at in 0..400 {
        let (ino, fh) = open(&mut world, 1, &format!("f{at:03}"));
        let mut sent: Vec<OpId> = Vec::new();
        let mut offset = 0;
        while offset < size(at) {
            let both = (offset..size(at)).step_by(PART as usize).take(2);
            sent.extend(both.map(|offset| world.send_request(0, Op::Read { ino, fh, offset, size: PART })));
            while sent.iter().any(|op| world.is_pending(0, *op)) {
                world.advance(Span(100_000));
            }
            offset += 2 * u64::from(PART);
        }
        answer(&mut world, Op::Release { fh, flock: None });
    }
    let (waits, took) = (waits(&world) - before, Span(world.now.0 - began.0));
    let counters = world.clients[0].cache.counters();
    assert!(waits <= 12, "{waits} waits, {} ms, {counters:?}", took.as_millis());
    assert!(took < Span::from_millis(700), "{waits} waits, {} ms, {counters:?}", took.as_millis());
}

/// The kernel asks for more at a time than came ahead.
#[test]
fn read_that_came_in_part_asks_for_the_rest_alone() {
    const AT_ONCE: u32 = 1 << 20;
    const LARGE: u64 = 4 << 20;
    let mut world = World::new(ModelFsConfig::default());
    world.server.edit(|tree| {
        for at in 0..4 {
            tree.plant_file(Time(0), &format!("f{at}"), &[7; 4_000]);
        }
        tree.plant_file(Time(0), "f4", &vec![7; usize::try_from(LARGE).unwrap()]);
    });
    world.connect_with(Config::default());
    slow(&mut world);
    list(&mut world, 1, false);
    (0..4).for_each(|at| drop(read(&mut world, 1, &format!("f{at}"))));
    world.advance(Span::from_millis(100));
    let (ino, fh) = open(&mut world, 1, "f4");
    let before = waits(&world);
    for offset in (0..LARGE).step_by(AT_ONCE as usize) {
        let OpReply::Data(data) = answer(&mut world, Op::Read { ino, fh, offset, size: AT_ONCE }) else {
            panic!()
        };
        assert_eq!(data.len(), AT_ONCE as usize);
        if offset == 0 {
            assert_eq!(waits(&world), before + 1, "for the rest of the first part");
        }
    }
    let counters = world.clients[0].cache.counters();
    assert_eq!(counters.contents_wasted, 0);
    assert!(counters.contents_fetched <= LARGE + 4 * 4_000, "nothing came twice: {counters:?}");
}

/// What comes for the rest takes the place of what had come.
#[test]
fn read_that_does_not_fit_into_the_memory_for_contents_is_answered() {
    const PART: u32 = 256 << 10;
    for budget in [140, 200, 270, 300, 400, 530] {
        let mut world = World::new(ModelFsConfig::default());
        world.server.edit(|tree| {
            for at in 0..4 {
                tree.plant_file(Time(0), &format!("f{at}"), &[7; 4_000]);
            }
            tree.plant_file(Time(0), "f4", &vec![7; 2 << 20]);
        });
        world.connect_with(Config { data_budget_bytes: budget << 10, ..Config::default() });
        slow(&mut world);
        list(&mut world, 1, false);
        (0..4).for_each(|at| drop(read(&mut world, 1, &format!("f{at}"))));
        world.advance(Span::from_millis(100));
        let (ino, fh) = open(&mut world, 1, "f4");
        for offset in (0..2 << 20).step_by(PART as usize) {
            let began = world.now;
            let OpReply::Data(data) = answer(&mut world, Op::Read { ino, fh, offset, size: PART }) else {
                panic!()
            };
            assert_eq!(data.len(), PART as usize);
            assert!(world.now.since(began) < Span::from_millis(45), "{budget} KiB: at {offset}");
        }
    }
}

/// As `rg`: it looks for `.gitignore` in the directories above its own.
#[test]
fn directories_above_that_were_not_read_bring_no_contents() {
    let beside = (0..60).map(|file| format!("b-beside/{file:02}"));
    let own = (0..9).flat_map(|dir| (0..20).map(move |file| format!("a-own/{dir}/{file:02}")));
    let paths: Vec<String> = own.chain(beside).collect();
    let mut world = world(&paths);
    for ignored in [".gitignore", ".ignore", ".rgignore", ".git", "e", "f", "g", "h"] {
        answer(&mut world, Op::Lookup { dir: 1, name: name(ignored) });
    }
    world.advance(Span::from_millis(100));
    let OpReply::Node(own) = answer(&mut world, Op::Lookup { dir: 1, name: name("a-own") }) else { panic!() };
    read_files_first(&mut world, own.id.ino, "a-own/", true);
    world.advance(Span::from_millis(100));
    let reads = world.clients[0].control.calls("read");
    assert_eq!(reads, 180);
}

#[test]
fn search_for_holes_in_a_file_without_any_asks_for_nothing() {
    let mut world = World::new(ModelFsConfig::default());
    world.server.edit(|tree| tree.plant_file(Time(0), "full", &[7; 200_000]));
    world.connect_with(Config::default());
    slow(&mut world);
    list(&mut world, 1, false);
    let (ino, fh) = open(&mut world, 1, "full");
    let before = waits(&world);
    let seek = |world: &mut World, offset, data| answer(world, Op::Seek { ino, fh, offset, data });
    assert_eq!(seek(&mut world, 5, false), OpReply::Offset(200_000));
    assert_eq!(seek(&mut world, 5, true), OpReply::Offset(5));
    assert_eq!(seek(&mut world, 200_000, true), OpReply::Failed(nigh_types::Errno::NXIO));
    assert_eq!(waits(&world), before);
}

#[test]
fn search_for_holes_in_a_sparse_file_asks_the_server() {
    const BEHIND: u64 = 1 << 20;
    let mut world = World::new(ModelFsConfig::default());
    world.server.edit(|tree| tree.plant_file(Time(0), "sparse", b""));
    world.connect_with(Config::default());
    slow(&mut world);
    let OpReply::Node(node) = answer(&mut world, Op::Lookup { dir: 1, name: name("sparse") }) else {
        panic!()
    };
    let (ino, access) = (node.id.ino, Access { write: true, ..READ });
    let OpReply::Opened(opened) = answer(&mut world, Op::Open { ino, access, append: false }) else {
        panic!()
    };
    let fh = opened.fh;
    let write = Op::Write { ino, fh, offset: BEHIND, data: vec![7; 4_096], flags: WriteFlags::default() };
    assert_eq!(answer(&mut world, write), OpReply::Written(4_096));
    let seek = |world: &mut World, data| answer(world, Op::Seek { ino, fh, offset: 0, data });
    assert_eq!(seek(&mut world, true), OpReply::Offset(BEHIND));
    assert_eq!(seek(&mut world, false), OpReply::Offset(0));
}
