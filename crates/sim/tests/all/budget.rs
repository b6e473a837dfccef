//! Memory budget: absent names cost no memory in a completely listed directory, and directories are evicted above the
//! budget.

use nigh_cache::{Config, Fh, NotifyLevel, Op, OpReply};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{Access, Cookie, LeaseScope, Name, Span};

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// Lists a whole directory, and returns its names.
fn list(world: &mut World, at: usize, ino: u64) -> Vec<String> {
    world.replies.clear();
    world.send_request(at, Op::OpenDir { ino });
    let Some((_, _, _, OpReply::Opened(opened))) = world.replies.last() else {
        panic!("{:?}", world.replies)
    };
    let fh = opened.fh;
    let (mut names, mut offset) = (Vec::new(), Cookie(0));
    loop {
        world.send_request(at, Op::ReadDir { ino, fh, offset, size: 32 << 10, plus: true });
        let Some((_, _, _, OpReply::Page(page))) = world.replies.last() else { panic!() };
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
        // A kernel that reclaims inodes.
        known.iter().for_each(|ino| world.clients[at].cache.handle_forget(*ino, 1));
    }
    world.send_request(at, Op::ReleaseDir { fh });
    names
}

#[test]
fn missing_names_cost_a_few_requests_and_no_memory() {
    let mut world = World::new(ModelFsConfig::default());
    let dir = world.server.edit(|tree| tree.plant_file(Default::default(), "d/there", b"x"));
    assert_ne!(dir.ino, 0);
    let dir = world.server.edit(|tree| tree.find("d")).unwrap().ino;
    let most = 1_000;
    let at = world.connect_with(Config { kernel_negative_most: most, ..Config::default() });
    world.send_request(at, Op::Lookup { dir: 1, name: name("d") });
    let mut given = 0;
    for n in 0..20_000 {
        world.replies.clear();
        world.trace.clear();
        world.send_request(at, Op::Lookup { dir, name: name(&format!("none-{n}")) });
        match world.replies.last() {
            Some((_, _, _, OpReply::Missing(span))) => given += u64::from(*span > Span::ZERO),
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
fn repeated_lookup_of_absent_name_sends_one_request() {
    let mut world = World::new(ModelFsConfig::default());
    let at = world.connect(NotifyLevel::None);
    for _ in 0..1_000 {
        world.send_request(at, Op::Lookup { dir: 1, name: name("none") });
    }
    assert_eq!(world.clients[at].control.requests(), 1);
    assert_eq!(world.clients[at].cache.counters().waits, 1);
}

#[test]
fn tree_walk_larger_than_budget_stays_within_budget() {
    let mut world = World::new(ModelFsConfig::default());
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
            world.send_request(at, Op::Lookup { dir: 1, name: name(&path) });
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

/// Each reply gives the grant a new id, and the server knows the latest.
#[test]
fn returned_grant_is_not_recalled() {
    let mut world = World::new(ModelFsConfig::default());
    let dir = world.server.edit(|tree| {
        for file in 0..1_000 {
            tree.plant_file(Default::default(), &format!("large/file-{file}"), b"");
        }
        tree.plant_file(Default::default(), "d/a", b"");
        tree.plant_file(Default::default(), "d/b", b"");
        tree.find("d").unwrap()
    });
    let at = world.connect_with(Config { budget_bytes: 100_000, ..Config::default() });
    let other = world.connect(NotifyLevel::All);
    for (dir, leaf) in [(1, "d"), (dir.ino, "a"), (dir.ino, "b"), (1, "large")] {
        world.request(at, Op::Lookup { dir, name: name(leaf) });
    }
    let large = world.server.edit(|tree| tree.find("large")).unwrap().ino;
    list(&mut world, at, large);
    assert!(world.clients[at].cache.counters().evictions > 0);
    assert!(!world.clients[at].control.has_granted(dir, LeaseScope::Directory));
    world.request(other, Op::Lookup { dir: 1, name: name("d") });
    world.trace.clear();
    world.request(other, Op::Mkdir { dir: dir.ino, name: name("c"), mode: 0o755, umask: 0 });
    assert!(
        !world.trace.iter().any(|line| line.starts_with("A is asked to give back Names")),
        "{:?}",
        world.trace
    );
}

/// Reads one page; returns its number of entries, and the cookie behind them.
fn page(world: &mut World, at: usize, ino: u64, fh: Fh, offset: Cookie) -> Option<(usize, Cookie)> {
    match world.request(at, Op::ReadDir { ino, fh, offset, size: 4_096, plus: false }) {
        OpReply::Page(page) => page.entries.last().map(|last| (page.entries.len(), last.next)),
        other => panic!("{other:?}"),
    }
}

fn opened(world: &mut World, at: usize, ino: u64) -> Fh {
    let OpReply::Opened(opened) = world.request(at, Op::OpenDir { ino }) else { panic!("not opened") };
    opened.fh
}

/// Creates a world with directories of `files` files, looked up by a client with the given budget.
fn directories(count: u64, files: u64, budget_bytes: u64) -> (World, Vec<u64>) {
    let mut world = World::new(ModelFsConfig::default());
    for dir in 0..count {
        for file in 0..files {
            let path = format!("dir-{dir}/file-{file}");
            world.server.edit(|tree| tree.plant_file(Default::default(), &path, b""));
        }
    }
    let at = world.connect_with(Config { budget_bytes, ..Config::default() });
    let mut inos = Vec::new();
    for dir in 0..count {
        match world.request(at, Op::Lookup { dir: 1, name: name(&format!("dir-{dir}")) }) {
            OpReply::Node(node) => inos.push(node.id.ino),
            other => panic!("{other:?}"),
        }
    }
    (world, inos)
}

/// Reading a directory larger than the budget takes one listing, which is dropped at the end.
#[test]
fn a_directory_larger_than_the_budget_is_listed_once() {
    let (mut world, inos) = directories(1, 1_200, 50_000);
    let fh = opened(&mut world, 0, inos[0]);
    let mut offset = Cookie(0);
    let mut names = 0;
    while let Some((count, next)) = page(&mut world, 0, inos[0], fh, offset) {
        (offset, names) = (next, names + count);
        // Another request comes in between.
        world.request(0, Op::GetFlags { ino: inos[0] });
    }
    assert_eq!(names, 1_202);
    assert_eq!(world.clients[0].control.calls("list"), 1);
    for n in 0..8 {
        world.request(0, Op::StatFs { ino: 1 });
        world.request(0, Op::Mkdir { dir: 1, name: name(&format!("new-{n}")), mode: 0o755, umask: 0 });
    }
    let bytes = world.clients[0].cache.gauges().bytes;
    assert!(bytes <= 50_000, "{bytes}");
}

/// Inodes that the kernel references cannot be evicted. Names are cached beside them all the same, and eviction does
/// not run in vain for each reply.
#[test]
fn names_are_cached_beside_inodes_that_kernel_references() {
    let budget = 400_000;
    let (mut world, inos) = directories(20, 200, budget);
    for &ino in &inos {
        let fh = opened(&mut world, 0, ino);
        world.request(0, Op::ReleaseDir { fh });
        for n in 0..200 {
            world.request(0, Op::Lookup { dir: ino, name: name(&format!("file-{n}")) });
        }
        world.trace.clear();
    }
    let gauges = world.clients[0].cache.gauges();
    assert!(gauges.bytes > budget, "the inodes alone");
    assert!(gauges.entries >= 400, "{gauges:?}");
    let evictions = world.clients[0].cache.counters().evictions;
    for n in 0..50 {
        world.request(0, Op::Lookup { dir: inos[19], name: name(&format!("file-{n}")) });
    }
    assert!(world.clients[0].cache.counters().evictions <= evictions + 1);
    world.check_kernels().unwrap();
}

/// Listings without a grant are shared by the requests that wait for them, counted, and dropped above the budget.
#[test]
fn listings_without_grant_count_toward_budget() {
    let budget = 300_000;
    let (mut world, inos) = directories(1, 1_000, budget);
    let dir = inos[0];
    let fate = nigh_remote::fake::CallPlan { ungranted: true, ..Default::default() };
    world.clients[0].control.plan(nigh_remote::fake::CallFilter::Every, fate);
    let readers: Vec<Fh> = (0..10).map(|_| opened(&mut world, 0, dir)).collect();
    let mut at: Vec<Option<Cookie>> = vec![Some(Cookie(0)); readers.len()];
    let mut names = 0;
    while at.iter().any(Option::is_some) {
        for (n, &fh) in readers.iter().enumerate() {
            if let Some(offset) = at[n] {
                let read = page(&mut world, 0, dir, fh, offset);
                names += read.map_or(0, |(count, _)| count);
                at[n] = read.map(|(_, next)| next);
            }
            let bytes = world.clients[0].cache.gauges().bytes;
            assert!(bytes <= budget, "{bytes}");
        }
    }
    assert_eq!(names, readers.len() * 1_002, "each name once for each reader");
    readers.into_iter().for_each(|fh| drop(world.request(0, Op::ReleaseDir { fh })));
    assert!(world.clients[0].cache.gauges().bytes < 10_000);
}

/// Eviction of a directory returns the grant under which its open files were opened: first the client asks the server
/// to pin them.
#[test]
fn open_files_are_pinned_before_their_directory_is_evicted() {
    let mut world = World::new(ModelFsConfig::default());
    for dir in 0..12 {
        for file in 0..400 {
            let path = format!("dir-{dir}/file-{file}");
            world.server.edit(|tree| tree.plant_file(Default::default(), &path, b""));
        }
    }
    let at = world.connect_with(Config { budget_bytes: 1 << 18, ..Config::default() });
    let find = |world: &mut World, path: &str| world.server.edit(|tree| tree.find(path)).unwrap().ino;
    let file = find(&mut world, "dir-0/file-7");
    world.request(at, Op::Lookup { dir: 1, name: name("dir-0") });
    let dir = find(&mut world, "dir-0");
    world.request(at, Op::Lookup { dir, name: name("file-7") });
    let access =
        Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
    let opened = world.request(at, Op::Open { ino: file, access, append: false });
    let OpReply::Opened(opened) = opened else { panic!("{opened:?}") };
    let control = world.clients[at].control.clone();
    assert_eq!((control.calls("open"), control.calls("keep")), (0, 0));
    for dir in 1..12 {
        let path = format!("dir-{dir}");
        world.send_request(at, Op::Lookup { dir: 1, name: name(&path) });
        let ino = find(&mut world, &path);
        list(&mut world, at, ino);
    }
    assert!(world.clients[at].cache.counters().evictions > 0);
    assert_eq!((control.calls("keep"), control.open_handles()), (1, 1));
    world.request(at, Op::Release { fh: opened.fh, flock: None });
    assert_eq!(control.open_handles(), 0);
}
