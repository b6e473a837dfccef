//! Files that a distant client reads.

use super::{answer, name};
use nigh_cache::{Fh, Op, OpReply};
use nigh_sim::world::World;
use nigh_types::Access;

pub const PAGE: u32 = 4_096;
pub const READ: Access =
    Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };

pub fn open(world: &mut World, dir: u64, text: &str) -> (u64, Fh) {
    let OpReply::Node(node) = answer(world, Op::Lookup { dir, name: name(text) }) else { panic!("{text}") };
    let ino = node.id.ino;
    match answer(world, Op::Open { ino, access: READ, append: false }) {
        OpReply::Opened(opened) => (ino, opened.fh),
        other => panic!("{text}: {other:?}"),
    }
}

/// Opens, reads and closes a file of at most a page.
pub fn read(world: &mut World, dir: u64, text: &str) -> Vec<u8> {
    let (ino, fh) = open(world, dir, text);
    let answered = answer(world, Op::Read { ino, fh, offset: 0, size: PAGE });
    let OpReply::Data(data) = answered else { panic!("{text}: {answered:?}") };
    answer(world, Op::Release { fh, flock: None });
    data
}
