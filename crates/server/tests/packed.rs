//! Compressed bodies, of which a few bytes expand to very many: the server expands no more than its limit, and other
//! clients get timely replies (docs/protocol.md, "Packed bodies").

mod common;

use common::beside::{Rogue, alone, beside, eventually, lines};
use common::world::World;
use nigh_native::{COMPRESSED, HEADER_BYTES, MAX_BODY, Message, compress, encode_request};
use nigh_types::*;
use std::io::{Read, Write};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A frame with an empty list, as bytes; the number of bytes after its count, and after the length of the record that
/// contains it.
struct Listing {
    frame: Vec<u8>,
    item: &'static [u8],
    behind: usize,
    record: Option<usize>,
    /// Most items that the server accepts.
    most: u32,
}

impl Listing {
    /// All messages of a client that contain lists of variable length.
    fn all(node: NodeId) -> [Listing; 4] {
        let frame = |call| {
            let request = Request { credentials: Credentials::default(), mutation_id: None, call };
            encode_request(CallId(1), &request)
        };
        let (place, handle) = (NodeRef::without_hint(node), Handle(Handle::CLIENT_ASSIGNED | 1));
        let (name, number) = (&b"\x01\0a"[..], &[0; 8][..]);
        let walk = frame(Call::ResolvePath { node, names: vec![] });
        let keep = frame(Call::PinOpen { node: place, names: vec![], handle });
        let release = frame(Call::Release { handles: vec![] });
        let give_back = Message::Return(vec![]).encode();
        let listing = |frame, item, behind, record, most| Listing { frame, item, behind, record, most };
        [
            listing(walk, name, 0, Some(20), Call::MOST_NAMES),
            listing(keep, name, 8, Some(33), Call::MOST_NAMES),
            listing(release, number, 0, Some(4), Call::MOST_HANDLES),
            listing(give_back, number, 0, None, 65_536),
        ]
    }

    /// The frame with `count` items, compressed.
    fn of(&self, count: u32) -> Vec<u8> {
        let mut frame = self.frame.clone();
        let items = self.item.repeat(count as usize);
        if let Some(record) = self.record {
            let at = frame.len() - record - 4;
            add(&mut frame[at..at + 4], items.len());
        }
        let at = frame.len() - self.behind - 4;
        add(&mut frame[at..at + 4], count as usize);
        add(&mut frame[..4], items.len());
        frame.splice(at + 4..at + 4, items);
        compress(&frame).expect("equal items can be packed")
    }

    /// The frame with as many items as fit.
    fn longest(&self) -> Vec<u8> {
        let room = MAX_BODY + HEADER_BYTES - u32::try_from(self.frame.len()).unwrap();
        self.of(room / u32::try_from(self.item.len()).unwrap())
    }
}

/// Adds to a number in the frame.
fn add(number: &mut [u8], more: usize) {
    let sum = u32::from_le_bytes(number.try_into().unwrap()) + u32::try_from(more).unwrap();
    number.copy_from_slice(&sum.to_le_bytes());
}

#[test]
fn overlong_compressed_list_ends_the_session_before_expansion() {
    let _alone = alone();
    let world = World::new();
    let root = world.client().root().node;
    // As much as the server reads at a time.
    let much = |frame: Vec<u8>| frame.repeat((256 << 10) / frame.len());
    let all = Listing::all(root);
    let longest = all.iter().map(|listing| much(listing.longest()));
    let attacks: Vec<Vec<u8>> =
        longest.chain(all.iter().map(|listing| listing.of(listing.most + 1))).collect();
    let mut ended = 0;
    beside(&world, "packs lists that are too long", 64 << 20, |stop| {
        while !stop.load(Ordering::Relaxed) || ended == 0 {
            for attack in &attacks {
                let mut rogue = Rogue::wanting(&world, COMPRESSED);
                // The server may have ended the session by then.
                let _ = rogue.stream.write_all(attack);
                rogue.ended();
                ended += 1;
            }
        }
    });
    let broke =
        || lines(&["event=\"ended\"", "the client broke the protocol: ", "more names, handles"]).len();
    // Log lines are rate-limited.
    eventually("each has its line", Duration::from_secs(10), || broke() >= ended.min(400));
    println!("packs lists that are too long: {ended} sessions, {} lines", broke());
}

#[test]
fn longest_allowed_lists_do_not_delay_other_clients() {
    let _alone = alone();
    let world = World::new();
    let root = world.client().root().node;
    // These messages get no reply.
    let [_, keep, release, give_back] = Listing::all(root);
    let said: Vec<Vec<u8>> = [keep, release, give_back]
        .map(|listing| {
            let frame = listing.of(listing.most);
            frame.repeat((64 << 10) / frame.len())
        })
        .into();
    let mut count = 0;
    beside(&world, "packs long lists", 64 << 20, |stop| {
        let mut rogue = Rogue::wanting(&world, COMPRESSED);
        rogue.stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut buffer = vec![0; 1 << 16];
        while !stop.load(Ordering::Relaxed) || count == 0 {
            for some in &said {
                rogue.stream.write_all(some).unwrap();
                let _ = rogue.stream.read(&mut buffer);
                count += 1;
            }
        }
    });
    println!("packs long lists: {count} times 64 KiB");
    assert_eq!(lines(&["event=\"ended\"", "broke the protocol"]).len(), 0, "it broke no rule");
}
