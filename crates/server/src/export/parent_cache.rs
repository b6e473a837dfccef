//! Parent cache: the directory in which a file was last returned to a client, which the filesystem does not report
//! for an inode opened by number. See docs/decisions/0035-file-handles.md.
//!
//! The size is bounded and entries may be outdated: the caller searches the directory. The cache is periodically
//! saved for the next server.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Neighbouring inode numbers share a block, which occupies one page of the file.
const SLOTS: usize = 512;
const BLOCKS: usize = 2048;
const BLOCK_BYTES: usize = SLOTS * 8;
/// A slot holds 16 bits of a hash of its block's numbers, and the directory's inode number.
const DIRECTORY_BITS: u32 = 48;

/// Direct-mapped cache with a slot for each inode number modulo about a million.
#[derive(Debug)]
pub(crate) struct ParentCache {
    /// Allocated at first use: most exports need none.
    blocks: OnceLock<Box<[Block]>>,
    /// `None` if the cache is not saved.
    file: Option<PathBuf>,
}

#[derive(Debug, Default)]
struct Block {
    slots: OnceLock<Box<[AtomicU64]>>,
    dirty: AtomicBool,
}

impl ParentCache {
    pub(crate) fn new(file: Option<PathBuf>) -> ParentCache {
        ParentCache { blocks: OnceLock::new(), file }
    }

    fn blocks(&self) -> &[Block] {
        self.blocks.get_or_init(|| std::iter::repeat_with(Block::default).take(BLOCKS).collect())
    }

    /// Records that the file with the export's number `ino` was returned as a name in `directory`, a number on the
    /// directory's filesystem.
    pub(crate) fn note(&self, ino: u64, directory: u64) {
        if directory == 0 || directory >> DIRECTORY_BITS != 0 {
            return;
        }
        let (block, slot, tag) = place(ino);
        let (block, value) = (&self.blocks()[block], tag << DIRECTORY_BITS | directory);
        let slots = block.slots.get_or_init(|| self.read(place(ino).0));
        if slots[slot].load(Ordering::Relaxed) != value {
            slots[slot].store(value, Ordering::Relaxed);
            block.dirty.store(true, Ordering::Release);
        }
    }

    /// Returns the recorded directory's number.
    pub(crate) fn find(&self, ino: u64) -> Option<u64> {
        let (block, slot, tag) = place(ino);
        let slots = self.blocks()[block].slots.get_or_init(|| self.read(block));
        let value = slots[slot].load(Ordering::Relaxed);
        (value != 0 && value >> DIRECTORY_BITS == tag).then_some(value & ((1 << DIRECTORY_BITS) - 1))
    }

    /// Writes changed blocks for the next server.
    pub(crate) fn save(&self) {
        let (Some(path), Some(blocks)) = (&self.file, self.blocks.get()) else { return };
        let mut open = None;
        for (at, block) in blocks.iter().enumerate() {
            if block.dirty.swap(false, Ordering::Acquire)
                && let Err(error) = block.write(at, path, &mut open)
            {
                // Mostly a full disk; tried again later.
                tracing::debug!(%error, "where files lie cannot be noted");
                block.dirty.store(true, Ordering::Release);
                return;
            }
        }
    }

    fn read(&self, block: usize) -> Box<[AtomicU64]> {
        let mut bytes = [0; BLOCK_BYTES];
        // A block that was never written, or cannot be read, is empty.
        if let Some(file) = self.file.as_ref().and_then(|path| File::open(path).ok()) {
            let _ = file.read_exact_at(&mut bytes, (block * BLOCK_BYTES) as u64);
        }
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |n, &byte| (n << 8) | u64::from(byte));
        bytes.chunks_exact(8).map(|slot| AtomicU64::new(number(slot))).collect()
    }
}

impl Block {
    /// Writes the block. `open`: the file, once it is open.
    fn write(&self, at: usize, path: &Path, open: &mut Option<File>) -> io::Result<()> {
        let Some(slots) = self.slots.get() else { return Ok(()) };
        let bytes: Vec<u8> =
            slots.iter().flat_map(|slot| slot.load(Ordering::Relaxed).to_le_bytes()).collect();
        let file = match open {
            Some(file) => file,
            None => {
                open.insert(File::options().write(true).create(true).truncate(false).mode(0o600).open(path)?)
            }
        };
        file.write_all_at(&bytes, (at * BLOCK_BYTES) as u64)
    }
}

impl Drop for ParentCache {
    fn drop(&mut self) {
        self.save();
    }
}

/// Returns block, slot and tag of a number.
fn place(ino: u64) -> (usize, usize, u64) {
    let hash = (ino / SLOTS as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let narrow = |n: u64| usize::try_from(n).unwrap_or(0);
    (narrow(hash >> 53) % BLOCKS, narrow(ino % SLOTS as u64), hash >> 16 & 0xffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parent_cache_is_available_to_the_next_server() {
        let dir = tempfile::tempdir().unwrap();
        let open = || ParentCache::new(Some(dir.path().join("parents")));
        let notes = [(7, 2), (8, 2), (1 << 40, 3), (1 << 63 | 257, 256), (u64::MAX, (1 << 48) - 1)];
        {
            let parents = open();
            notes.into_iter().for_each(|(ino, directory)| parents.note(ino, directory));
            parents.note(8, 5);
        }
        let parents = open();
        for (ino, directory) in notes.into_iter().filter(|(ino, _)| *ino != 8) {
            assert_eq!(parents.find(ino), Some(directory), "{ino:x}");
        }
        assert_eq!((parents.find(8), parents.find(9), parents.find(0)), (Some(5), None, None));
        parents.note(9, 4);
        parents.save();
        assert_eq!(open().find(9), Some(4));
    }

    #[test]
    fn parent_cache_file_is_created_on_first_save_and_not_kept_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("parents");
        let is_open = || {
            let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            open.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|target| target == path)
        };
        let parents = ParentCache::new(Some(path.clone()));
        assert_eq!(parents.find(7), None);
        parents.save();
        assert!(!path.exists() && !is_open());
        parents.note(7, 2);
        parents.save();
        assert!(path.exists() && !is_open());
        let next = ParentCache::new(Some(path.clone()));
        assert_eq!(next.find(7), Some(2));
        assert!(!is_open());
    }

    #[test]
    fn parent_cache_distinguishes_inodes_that_share_a_slot() {
        let parents = ParentCache::new(None);
        parents.note(7, 2);
        let same_slot = |ino: &u64| place(*ino).0 == place(7).0 && place(*ino).1 == place(7).1;
        let other = (1..).map(|n| 7 + n * SLOTS as u64).find(same_slot).unwrap();
        assert_eq!((parents.find(7), parents.find(other)), (Some(2), None));
        parents.note(other, 3);
        assert_eq!((parents.find(7), parents.find(other)), (None, Some(3)));
    }

    #[test]
    fn parent_number_too_large_for_a_slot_is_not_cached() {
        let parents = ParentCache::new(None);
        [0, 1 << 48, u64::MAX].into_iter().for_each(|directory| parents.note(7, directory));
        assert_eq!(parents.find(7), None);
    }
}
