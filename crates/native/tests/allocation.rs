//! A peer's counts and lengths never decide how much is allocated.

mod common;

use common::{decode, samples};
use nigh_native::{FrameReader, HEADER_BYTES, MAX_BODY, Message, ProtocolError, compress, encode_request};
use nigh_types::{Call, CallId, GrantId};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Watching;

static LARGEST: AtomicUsize = AtomicUsize::new(0);
/// Bytes that are in use.
static HELD: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        HELD.fetch_add(size, Ordering::Relaxed);
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// The tests watch the allocations of the whole process: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Puts huge numbers over every four bytes of every sample.
#[test]
fn huge_announced_counts_cause_no_allocation() {
    let _alone = ALONE.lock().unwrap();
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

/// However the stream is cut: the buffer is no larger than the bytes that arrived, or twice that as it grows.
#[test]
fn announced_long_frame_causes_no_allocation() {
    let _alone = ALONE.lock().unwrap();
    let mut bytes = MAX_BODY.to_le_bytes().to_vec();
    bytes.extend([4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    bytes.resize(HEADER_BYTES as usize + 16, 7);
    for step in [1, 5, 16, 31, 32] {
        let mut frames = FrameReader::new(MAX_BODY);
        LARGEST.store(0, Ordering::Relaxed);
        for mut some in bytes.chunks(step) {
            assert_eq!(frames.next(&mut some), Ok(None));
        }
        let largest = LARGEST.load(Ordering::Relaxed);
        assert!(largest <= 1024, "cut in {step}: {largest} bytes for {}", bytes.len());
        assert_eq!(frames.partial_bytes(), bytes.len() as u64);
    }
    let mut frames = FrameReader::new(MAX_BODY);
    let mut arrived = bytes.len();
    assert_eq!(frames.next(&mut &bytes[..]), Ok(None));
    while arrived < 1 << 20 {
        let more = vec![7; 10_000];
        LARGEST.store(0, Ordering::Relaxed);
        assert_eq!(frames.next(&mut &more[..]), Ok(None));
        arrived += more.len();
        let largest = LARGEST.load(Ordering::Relaxed);
        assert!(largest <= 2 * arrived + 1024, "{largest} bytes for {arrived}");
    }
}

/// Neither its lists, which are too long, nor the decompressed body stay in memory.
#[test]
fn compressed_frame_memory_is_bounded_and_released() {
    let _alone = ALONE.lock().unwrap();
    // Its count precedes so many names, each with a length and a byte.
    let names = 1_500_000_u32;
    let call = Call::ResolvePath { node: samples::id(7), names: vec![] };
    let mut walk = encode_request(CallId(1), &samples::request(call));
    let (record, count) = (walk.len() - 24, walk.len() - 4);
    walk[count..].copy_from_slice(&names.to_le_bytes());
    walk.extend(b"\x01\0a".repeat(names as usize));
    for at in [0, record] {
        let length = u32::from_le_bytes(walk[at..at + 4].try_into().unwrap()) + 3 * names;
        walk[at..at + 4].copy_from_slice(&length.to_le_bytes());
    }
    let whole = walk.len();
    let walk = compress(&walk).unwrap();
    let mut frames = FrameReader::new(MAX_BODY);
    frames.allow_compressed(true);
    let before = HELD.load(Ordering::Relaxed);
    LARGEST.store(0, Ordering::Relaxed);
    let frame = frames.next(&mut &walk[..]).unwrap().unwrap();
    assert!(matches!(Message::decode(&frame), Err(ProtocolError::Malformed(_))));
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest <= whole, "{largest} bytes at once for {whole}");
    let grants = compress(&Message::Return(vec![GrantId(1); 65_536]).encode()).unwrap();
    let frame = frames.next(&mut &grants[..]).unwrap().unwrap();
    assert!(Message::decode(&frame).is_ok());
    assert_eq!(frames.next(&mut &[][..]), Ok(None));
    let kept = HELD.load(Ordering::Relaxed) - before - grants.capacity();
    assert!(kept <= 300 << 10, "{kept} bytes are kept");
}
