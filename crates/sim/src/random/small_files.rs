//! Readers that go through the small files of one directory in order, so that contents come ahead, and clients that write
//! them meanwhile.

use super::{DIRS, RandomHistory, name};
use crate::world::Backend;
use nigh_cache::Op;
use nigh_types::{Access, Time, WriteFlags};

/// Files that keep their names.
pub(super) const SMALL: [&str; 6] = ["s0", "s1", "s2", "s3", "s4", "s5"];
const READ: Access =
    Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
const READ_WRITE: Access = Access { write: true, ..READ };

impl<B: Backend> RandomHistory<B> {
    /// Creates the files.
    pub(super) fn plant_small_files(&mut self, now: Time) {
        for file in SMALL {
            let path = format!("{}/{file}", DIRS[1]);
            self.world.server.edit(|tree| tree.plant_file(now, &path, b"text"));
            self.world.facts.paths.push(path);
        }
    }

    /// Returns a client's next request on the small files: it looks each up, opens it, reads it or, at times, writes it,
    /// and closes it.
    pub(super) fn use_small_file(&mut self, at: usize) -> Option<Op> {
        let dir = self.dirs[DIRS[1]];
        if self.dice.below(8) == 0 {
            return Some(Op::OpenDir { ino: dir });
        }
        let nth = self.next_small.get(&at).copied().unwrap_or(0);
        let file = name(SMALL[nth % SMALL.len()]);
        let Some(ino) = self.known(at, dir, &file) else { return Some(Op::Lookup { dir, name: file }) };
        let page_cache = &self.world.clients[at].kernel.page_cache;
        let Some((fh, _, can_write)) = page_cache.files().find(|(_, of, _)| *of == ino) else {
            // A file that is opened for reading alone can be stored in the page cache before the reply.
            let access = if self.dice.below(6) == 0 { READ_WRITE } else { READ };
            return Some(Op::Open { ino, access, append: false });
        };
        if self.world.has_locked_pages(at, ino) {
            return None;
        }
        if page_cache.is_dirty(ino) {
            self.world.write_back(at, ino);
            return None;
        }
        let has_page = page_cache.has_pages(ino);
        if can_write && self.dice.below(2) == 0 {
            let data = vec![b'a' + u8::try_from(self.dice.below(26)).unwrap_or(0); 4];
            return Some(Op::Write { ino, fh, offset: 0, data, flags: WriteFlags::default() });
        }
        // Pages without a grant are not kept.
        if !has_page && self.dice.below(3) != 0 {
            return Some(Op::Read { ino, fh, offset: 0, size: 4096 });
        }
        self.next_small.insert(at, nth + 1);
        Some(Op::Release { fh, flock: None })
    }
}
