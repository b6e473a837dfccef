//! Lease quota: the server recalls a client's oldest leases above its share, and no call waits for that.

use super::{ClientSetup, Native};
use crate::world::{Backend, World};
use nigh_cache::{Config, Op, OpReply, Prefetch};
use nigh_lease::{HolderReport, LeaseConfig, LeaseReport};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_types::{Cookie, Name, Span, Time};

const SHARE: u64 = 40;
const DIRS: u32 = 300;
const FILES: u32 = 3;
const ONE_WAY: Span = Span::from_millis(5);
const ROUND_TRIP: Span = Span::from_millis(10);

fn name(number: u32) -> Name {
    Name::new(format!("d{number}").as_bytes()).unwrap()
}

fn world() -> World<Native> {
    let leases = LeaseConfig { grants_per_holder: SHARE, ..LeaseConfig::default() };
    let mut world = World::over(Native::new(ModelFsConfig::default(), leases, 7));
    world.server.with(|net| net.server.dice = None);
    world.server.edit(|tree| {
        for (dir, file) in (0..DIRS).flat_map(|dir| (0..FILES).map(move |file| (dir, file))) {
            tree.plant_file(Time(0), &format!("d{dir}/{file}"), b"");
        }
    });
    let end = world.server.connect(world.now, ClientSetup::far(0, (ONE_WAY, ONE_WAY)));
    world.join(Config { prefetch: Prefetch::Off, ..Config::default() }, (), end);
    world.advance(Span::from_millis(100));
    world
}

fn report(world: &World<Native>) -> LeaseReport {
    world.server.with(|net| net.server.sequencer.report())
}

/// Returns a request's reply, and the time until the reply.
fn ask(world: &mut World<Native>, op: Op) -> (OpReply, Span) {
    let begun = world.now;
    let id = world.send_request(0, op);
    while world.is_pending(0, id) {
        world.advance(Span::from_millis(1));
        assert!(world.now.since(begun) < Span::from_secs(5), "it stalls");
    }
    let at = world.replies.iter().position(|(_, of, ..)| *of == id).expect("it was answered");
    (world.replies.swap_remove(at).3, world.now.since(begun))
}

/// Lists a directory; returns the number of entries, and the time taken.
fn list(world: &mut World<Native>, dir: u32) -> (usize, Span) {
    let (found, first) = ask(world, Op::Lookup { dir: 1, name: name(dir) });
    let OpReply::Node(node) = found else { panic!("{found:?}") };
    let ino = node.id.ino;
    let (opened, second) = ask(world, Op::OpenDir { ino });
    let OpReply::Opened(opened) = opened else { panic!("{opened:?}") };
    let whole = Op::ReadDir { ino, fh: opened.fh, offset: Cookie(0), size: 4096, plus: true };
    let (page, third) = ask(world, whole);
    let OpReply::Page(page) = page else { panic!("{page:?}") };
    ask(world, Op::ReleaseDir { fh: opened.fh });
    (page.entries.len(), Span(first.0 + second.0 + third.0))
}

#[test]
fn walk_over_more_directories_than_lease_quota_returns_oldest_leases_without_stall() {
    let mut world = world();
    for round in 0..2 {
        for dir in 0..DIRS {
            let (entries, took) = list(&mut world, dir);
            assert_eq!(entries, FILES as usize + 2);
            // A lookup, unless the dentry is cached, and a listing: neither waits for the returned leases.
            assert!(took <= Span(2 * ROUND_TRIP.0), "round {round}, directory {dir}: {took:?}");
            let HolderReport { grants, owed, .. } = report(&world).holders.swap_remove(0);
            // A lease being recalled counts until the acknowledgement.
            assert!(
                grants <= SHARE + SHARE / 64 + 1 && owed <= SHARE / 64 + 1,
                "{grants} grants, {owed} owed"
            );
        }
    }
    world.advance(Span::from_secs(1));
    let recalled = report(&world).counters.recalled;
    assert!(recalled >= 2 * (u64::from(DIRS) - SHARE), "{recalled} recalls");
    world.check_kernels().unwrap();
    // The last listed directory is cached, and the first is not.
    assert_eq!(list(&mut world, DIRS - 1), (FILES as usize + 2, Span::ZERO));
    assert!(list(&mut world, 0).1 >= ROUND_TRIP);
}
