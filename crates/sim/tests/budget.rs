//! Memory: missing names cost none where the directory is known whole, and directories go when there are
//! too many.

use nigh_cache::{Answer, Config, Level, Op};
use nigh_remote::tree::TreeConfig;
use nigh_sim::world::World;
use nigh_types::{Access, Cookie, Name, Span};

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// Lists a directory whole; its names.
fn list(world: &mut World, at: usize, ino: u64) -> Vec<String> {
    world.answers.clear();
    world.ask(at, Op::OpenDir { ino });
    let Some((_, _, _, Answer::Opened(opened))) = world.answers.last() else { panic!("{:?}", world.answers) };
    let fh = opened.fh;
    let (mut names, mut offset) = (Vec::new(), Cookie(0));
    loop {
        world.ask(at, Op::ReadDir { ino, fh, offset, size: 32 << 10, plus: true });
        let Some((_, _, _, Answer::Page(page))) = world.answers.last() else { panic!() };
        let Some(last) = page.entries.last() else { break };
        offset = last.next;
        let mut rest = page.names.as_slice();
        let mut known = Vec::new();
        for entry in &page.entries {
            let (one, others) = rest.split_at(usize::from(entry.name_len));
            rest = others;
            names.push(String::from_utf8(one.to_vec()).unwrap());
            known.extend(entry.node.map(|node| node.id.ino));
        }
        // A kernel with other uses for its memory.
        known.iter().for_each(|ino| world.clients[at].cache.handle_forget(*ino, 1));
    }
    world.ask(at, Op::ReleaseDir { fh });
    names
}

#[test]
fn missing_names_cost_a_few_requests_and_no_memory() {
    let mut world = World::new(TreeConfig::default());
    let dir = world.server.edit(|tree| tree.plant_file(Default::default(), "d/there", b"x"));
    assert_ne!(dir.ino, 0);
    let dir = world.server.edit(|tree| tree.find("d")).unwrap().ino;
    let most = 1_000;
    let at = world.connect_with(Config { kernel_missing_most: most, ..Config::default() });
    world.ask(at, Op::Lookup { dir: 1, name: name("d") });
    let mut given = 0;
    for n in 0..20_000 {
        world.answers.clear();
        world.trace.clear();
        world.ask(at, Op::Lookup { dir, name: name(&format!("none-{n}")) });
        match world.answers.last() {
            Some((_, _, _, Answer::Missing(span))) => given += u64::from(*span > Span::ZERO),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(given, most, "beyond that the kernel is given none");
    assert!(world.clients[at].control.requests() <= 6, "{}", world.clients[at].control.requests());
    let gauges = world.clients[at].cache.gauges();
    assert_eq!((gauges.negative, gauges.complete_directories), (0, 1));
    assert!(gauges.bytes < 10_000, "{}", gauges.bytes);
}

#[test]
fn the_same_missing_name_is_asked_once() {
    let mut world = World::new(TreeConfig::default());
    let at = world.connect(Level::None);
    for _ in 0..1_000 {
        world.ask(at, Op::Lookup { dir: 1, name: name("none") });
    }
    assert_eq!(world.clients[at].control.requests(), 1);
    assert_eq!(world.clients[at].cache.counters().waits, 1);
}

#[test]
fn a_walk_larger_than_the_budget_stays_in_it() {
    let mut world = World::new(TreeConfig::default());
    for dir in 0..60 {
        for file in 0..400 {
            let path = format!("dir-{dir}/file-{file}");
            world.server.edit(|tree| tree.plant_file(Default::default(), &path, b""));
        }
    }
    let budget_bytes = 1 << 20;
    let at = world.connect_with(Config { budget_bytes, ..Config::default() });
    for round in 0..2 {
        for dir in 0..60 {
            let path = format!("dir-{dir}");
            world.ask(at, Op::Lookup { dir: 1, name: name(&path) });
            let ino = world.server.edit(|tree| tree.find(&path)).unwrap().ino;
            assert_eq!(list(&mut world, at, ino).len(), 402, "round {round}, {path}");
            let bytes = world.clients[at].cache.gauges().bytes;
            assert!(bytes <= budget_bytes, "{bytes} bytes after {path} in round {round}");
            world.check_kernels().unwrap();
            world.trace.clear();
        }
    }
    assert!(world.clients[at].cache.counters().evictions > 60);
}

/// With a directory goes the grant under which its open files were opened: the server is told to keep them first.
#[test]
fn open_files_are_kept_before_their_directory_is_given_back() {
    let mut world = World::new(TreeConfig::default());
    for dir in 0..12 {
        for file in 0..400 {
            let path = format!("dir-{dir}/file-{file}");
            world.server.edit(|tree| tree.plant_file(Default::default(), &path, b""));
        }
    }
    let at = world.connect_with(Config { budget_bytes: 1 << 18, ..Config::default() });
    let find = |world: &mut World, path: &str| world.server.edit(|tree| tree.find(path)).unwrap().ino;
    let file = find(&mut world, "dir-0/file-7");
    world.answer(at, Op::Lookup { dir: 1, name: name("dir-0") });
    let dir = find(&mut world, "dir-0");
    world.answer(at, Op::Lookup { dir, name: name("file-7") });
    let access = Access { read: true, write: false, truncate: false, direct: false, sync: false };
    let opened = world.answer(at, Op::Open { ino: file, access, append: false });
    let Answer::Opened(opened) = opened else { panic!("{opened:?}") };
    let control = world.clients[at].control.clone();
    assert_eq!((control.calls("open"), control.calls("keep")), (0, 0));
    for dir in 1..12 {
        let path = format!("dir-{dir}");
        world.ask(at, Op::Lookup { dir: 1, name: name(&path) });
        let ino = find(&mut world, &path);
        list(&mut world, at, ino);
    }
    assert!(world.clients[at].cache.counters().evictions > 0);
    assert_eq!((control.calls("keep"), control.open_handles()), (1, 1));
    world.answer(at, Op::Release { fh: opened.fh, flock: None });
    assert_eq!(control.open_handles(), 0);
}
