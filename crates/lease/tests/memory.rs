//! Memory cost of a grant, and its release.

use nigh_lease::{Change, GrantRequest, Holder, LeaseConfig, LeaseKey, LeaseOutput, LeaseTable, Object};
use nigh_types::{LeaseScope, Mode, NodeId, Span, Time};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

struct Counting;

static LIVE: AtomicU64 = AtomicU64::new(0);

/// With the allocator's overhead of each block.
fn size(bytes: usize) -> u64 {
    bytes as u64 + 8
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(size(layout.size()), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(size(layout.size()), Ordering::Relaxed);
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        LIVE.fetch_add(size(new), Ordering::Relaxed);
        LIVE.fetch_sub(size(layout.size()), Ordering::Relaxed);
        unsafe { System.realloc(at, layout, new) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const GRANTS: u64 = 200_000;
const T0: Time = Time(1_000_000_000);

fn key(ino: u64) -> LeaseKey {
    LeaseKey { object: Object { filesystem: 8, ino, birth: ino }, covers: LeaseScope::Directory }
}

fn grant(table: &mut LeaseTable, holder: Holder, ino: u64) {
    let node = NodeId { ino, generation: ino };
    let request = GrantRequest { holder, key: key(ino), node, mode: Mode::Read };
    assert!(table.handle_grant(T0, request).is_some(), "nothing speaks against it");
}

/// Inode numbers in an order in which a scan may meet them.
fn scattered(nth: u64) -> u64 {
    nth.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
}

/// The only test here: it counts the allocations of the whole process.
#[test]
fn a_directory_grant_costs_at_most_256_bytes_and_leaves_nothing() {
    let before = LIVE.load(Ordering::Relaxed);
    let used = || LIVE.load(Ordering::Relaxed) - before;
    for order in [|nth| nth, scattered] {
        let mut table = LeaseTable::new(LeaseConfig::default());
        let (one, other) = (Holder(1), Holder(2));
        for (holders, holder) in [(1, one), (2, other)] {
            table.handle_attach(T0, holder, false);
            for nth in 0..GRANTS {
                grant(&mut table, holder, order(nth));
            }
            let each = used() / (holders * GRANTS);
            println!("{each} bytes a grant with {holders} holders");
            assert!(each <= 256, "{each} bytes with {holders} holders");
        }

        // Changes, recalls and returns leave only live grants.
        let with_two = used();
        for nth in 0..GRANTS / 2 {
            let change = Change { key: key(order(nth)), names: Vec::new(), writes: false, can_update: false };
            let id = table.handle_change(T0, Some(one), &[change]);
            while let LeaseOutput::Recall { holder, recall } = table.poll_output() {
                table.handle_acknowledge(T0, holder, recall.id);
            }
            assert!(table.is_ready(id));
            table.handle_done(T0, id);
            while !matches!(table.poll_output(), LeaseOutput::Timeout(..)) {}
        }
        let late = T0.after(Span::from_secs(12));
        table.handle_timeout(late);
        assert!(used() < with_two, "what was recalled is forgotten");
        table.handle_goodbye(late, one);
        table.handle_goodbye(late, other);
        // The test harness allocates too, now and then.
        let left = used();
        assert!(left < GRANTS / 4, "{left} bytes are left of nothing");
    }
}
