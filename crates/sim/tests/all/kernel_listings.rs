//! Listings that the kernel caches of open directories end with their grant.

use nigh_cache::{Config, Fh, NotifyLevel, Op, OpReply};
use nigh_remote::fake::{CallFilter, CallPlan};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{Access, Cookie, Kind, Name, Span, Term, WriteFlags};

const TERM: Span = Span::from_secs(5);

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// A client whose kernel has cached the listing of an open directory.
fn world(config: Config) -> (World, u64, Fh) {
    let config_of_tree =
        ModelFsConfig { term: Term::Limited(TERM), recallable: false, ..ModelFsConfig::default() };
    let mut world = World::new(config_of_tree);
    let now = world.now;
    let dir = world.server.edit(|tree| {
        tree.plant_file(now, "d/f", b"");
        tree.find("d").unwrap().ino
    });
    world.connect_with(config);
    world.request(0, Op::Lookup { dir: 1, name: name("d") });
    let OpReply::Opened(opened) = world.request(0, Op::OpenDir { ino: dir }) else { panic!("not opened") };
    assert!(opened.cache_dir);
    read(&mut world, dir, opened.fh);
    (world, dir, opened.fh)
}

fn read(world: &mut World, ino: u64, fh: Fh) {
    let mut offset = Cookie(0);
    loop {
        let answer = world.request(0, Op::ReadDir { ino, fh, offset, size: 1 << 16, plus: false });
        let OpReply::Page(page) = answer else { panic!("{answer:?}") };
        let Some(last) = page.entries.last() else { return };
        offset = last.next;
    }
}

/// Returns how often the kernel invalidated a listing.
fn forgets(world: &World, dir: u64) -> usize {
    world.trace.iter().filter(|told| **told == format!("A's kernel forgets data of {dir}")).count()
}

#[test]
fn kernel_listing_is_dropped_at_grant_deadline() {
    let (mut world, dir, _) = world(Config::default());
    world.advance(Span::from_millis(4_999));
    assert_eq!(forgets(&world, dir), 0);
    world.advance(Span::from_millis(1));
    assert_eq!(forgets(&world, dir), 1);
}

/// A request arrives before the timer fires.
#[test]
fn kernel_listing_is_dropped_by_request_after_grant_deadline() {
    let (mut world, dir, _) = world(Config::default());
    world.now = world.now.after(TERM);
    world.request(0, Op::Lookup { dir, name: name("none") });
    assert_eq!(forgets(&world, dir), 1);
    world.advance(Span::from_millis(1));
    assert_eq!(forgets(&world, dir), 1, "once");
}

/// A directory that is read again is cached again.
#[test]
fn kernel_listing_read_again_is_dropped_at_next_grant_deadline() {
    let (mut world, dir, fh) = world(Config::default());
    for round in 1..=3 {
        world.advance(TERM);
        assert_eq!(forgets(&world, dir), round);
        read(&mut world, dir, fh);
    }
}

/// A listing without a grant is not cached.
#[test]
fn kernel_listing_without_grant_is_not_cached() {
    let (mut world, dir, fh) = world(Config::default());
    world.advance(TERM);
    let fate = CallPlan { ungranted: true, ..CallPlan::default() };
    world.clients[0].control.plan(CallFilter::Every, fate);
    read(&mut world, dir, fh);
    assert_eq!(forgets(&world, dir), 3, "with each page");
}

#[test]
fn kernel_listing_is_dropped_when_directory_is_evicted() {
    let (mut world, dir, _) = world(Config { budget_bytes: 50_000, ..Config::default() });
    let now = world.now;
    world.server.edit(|tree| {
        for file in 0..500 {
            tree.plant_file(now, &format!("large/file-{file}"), b"");
        }
    });
    let large = world.server.edit(|tree| tree.find("large")).unwrap().ino;
    world.advance(Span::from_secs(1));
    world.request(0, Op::Lookup { dir: 1, name: name("large") });
    let before = world.clients[0].cache.counters().evictions;
    world.request(0, Op::OpenDir { ino: large });
    assert!(world.clients[0].cache.counters().evictions > before);
    assert_eq!(forgets(&world, dir), 1);
}

#[test]
fn transport_without_notifications_caches_no_listing_in_kernel() {
    let mut world = World::new(ModelFsConfig::default());
    world.connect(NotifyLevel::None);
    let OpReply::Opened(opened) = world.request(0, Op::OpenDir { ino: 1 }) else { panic!("not opened") };
    assert!(!opened.cache_dir);
}

/// Another client moved a file that is open here, and a listing has brought its new name. A local write through the
/// open file, which was opened under the old name, must show under the new name too.
#[test]
fn write_through_open_file_shows_under_name_from_later_listing() {
    let mut world = World::new(ModelFsConfig::default());
    let now = world.now;
    let (dirs, file) = world.server.edit(|tree| {
        let dirs = (tree.plant_dir(now, "d").ino, tree.plant_dir(now, "e").ino);
        (dirs, tree.plant_file(now, "d/f", b"short").ino)
    });
    for client in [0, 1] {
        world.connect(NotifyLevel::All);
        for (dir, text) in [(1, "d"), (1, "e"), (dirs.0, "f")] {
            world.request(client, Op::Lookup { dir, name: name(text) });
        }
    }
    let access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    let OpReply::Opened(opened) = world.request(0, Op::Open { ino: file, access, append: false }) else {
        panic!("not opened")
    };
    let (from, to) = ((dirs.0, name("f")), (dirs.1, name("g")));
    let (no_replace, exchange) = (false, false);
    world.request(
        1,
        Op::Rename {
            from: from.0,
            name: from.1,
            to: to.0,
            new_name: to.1,
            no_replace,
            exchange,
            whiteout: false,
        },
    );
    world.request(0, Op::OpenDir { ino: dirs.1 });
    let (fh, data) = (opened.fh, b"rather long".to_vec());
    let write = Op::Write { ino: file, fh, offset: 0, data, flags: WriteFlags::default() };
    assert_eq!(world.request(0, write), OpReply::Written(11));
    let OpReply::Node(node) = world.request(0, Op::Lookup { dir: dirs.1, name: name("g") }) else {
        panic!("not there")
    };
    assert_eq!(node.attr.size, 11);
    world.check_kernels().unwrap();
}

/// A process has read a part of the listing, and a local change follows.
#[test]
fn kernel_listing_begun_before_local_change_is_dropped_before_next_read() {
    let (mut world, dir, fh) = world(Config::default());
    let mut part = |offset, change: bool| {
        if change {
            let (name, kind) = (name("g"), Kind::Fifo);
            let made = world.request(0, Op::Mknod { dir, name, kind, mode: 0o644, umask: 0, rdev: 0 });
            assert!(matches!(made, OpReply::Node(_)), "{made:?}");
        }
        let answer = world.request(0, Op::ReadDir { ino: dir, fh, offset, size: 64, plus: false });
        let OpReply::Page(page) = answer else { panic!("{answer:?}") };
        (page.entries.last().expect("some are left").next, page.drops)
    };
    let (next, drops) = part(Cookie(0), false);
    assert_eq!(drops, None, "it is all of one state so far");
    let (_, drops) = part(next, true);
    assert_eq!(drops, Some(dir));
    assert_eq!(part(Cookie(0), false).1, None, "what is left in the kernel is of this state");
}
