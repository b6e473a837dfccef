//! A peer's counts and lengths never decide how much is allocated.

mod common;

use common::{decode, samples};
use nigh_native::HEADER_BYTES;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Watching;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Puts huge numbers over every four bytes of every sample. The only test here: it watches the
/// allocations of the whole process.
#[test]
fn huge_counts_allocate_nothing() {
    for (group, messages) in samples::all() {
        for (name, message) in messages {
            let good = message.encode();
            for at in HEADER_BYTES as usize..good.len().saturating_sub(3) {
                for huge in [u32::MAX, 0x7fff_ffff, 0x0400_0000, 0x0001_0000] {
                    let mut bytes = good.clone();
                    bytes[at..at + 4].copy_from_slice(&huge.to_le_bytes());
                    LARGEST.store(0, Ordering::Relaxed);
                    let _ = decode(&bytes);
                    let largest = LARGEST.load(Ordering::Relaxed);
                    let bound = 16 * bytes.len() + 1024;
                    assert!(largest <= bound, "{group} {name}: {huge:#x} at {at} allocated {largest} bytes");
                }
            }
        }
    }
}
