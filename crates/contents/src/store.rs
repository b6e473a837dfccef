//! Extents of files within a budget.

use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A file: its inode number.
pub type FileKey = u64;

/// Contents of a larger file leave the store when its reader has them: the kernel keeps its pages (bytes).
const SMALL: u64 = crate::CHUNK;
/// Size of a page of the kernel, in bytes.
const PAGE: u64 = 4_096;
/// Memory of an extent and of a file beside their bytes.
const EXTENT_BYTES: u64 = 96;
const FILE_BYTES: u64 = 256;

/// What became of the bytes that were put in, over the store's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreUse {
    /// Bytes put in.
    pub fetched: u64,
    /// Of these, bytes that were read; each counts once.
    pub used: u64,
    /// Bytes that were dropped before they were read.
    pub wasted: u64,
}

impl StoreUse {
    /// Returns the bytes that are there and were not read.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.fetched - self.used - self.wasted
    }
}

/// Where bytes come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// They were read ahead.
    Ahead,
    /// A local write, for which the use of what was read ahead is not counted.
    Local,
}

/// Consecutive bytes of a file.
#[derive(Clone, Debug)]
struct Extent {
    bytes: Arc<Vec<u8>>,
    /// Length of the part that counts as read: up to the end of the furthest read.
    read_to: u64,
}

impl Extent {
    fn length(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn unread(&self) -> u64 {
        self.length() - self.read_to
    }
}

#[derive(Clone, Debug)]
struct File<T> {
    tag: T,
    /// By offset; they do not overlap.
    extents: BTreeMap<u64, Extent>,
    /// Offsets of those that local writes have left.
    local: BTreeSet<u64>,
    /// Size of the file, if a read came to its end.
    end: Option<u64>,
    used_at: u64,
}

impl<T> File<T> {
    /// Returns the extent that contains the byte at `offset`, with its own offset.
    fn extent_at(&self, offset: u64) -> Option<(u64, &Extent)> {
        let (at, extent) = self.extents.range(..=offset).next_back()?;
        (offset - at < extent.length()).then_some((*at, extent))
    }

    /// Puts in bytes of a local write; those behind others of the same page join them. Returns the memory that they take.
    fn insert_local(&mut self, offset: u64, bytes: Vec<u8>) -> u64 {
        let length = bytes.len() as u64;
        let before = self.local.range(..offset).next_back().copied();
        if let Some(at) = before
            && at / PAGE == offset / PAGE
            && let Some(extent) = self.extents.get_mut(&at).filter(|extent| at + extent.length() == offset)
        {
            Arc::make_mut(&mut extent.bytes).extend_from_slice(&bytes);
            extent.read_to += length;
            return length;
        }
        self.extents.insert(offset, Extent { bytes: Arc::new(bytes), read_to: length });
        self.local.insert(offset);
        length + EXTENT_BYTES
    }

    /// Returns the size of the file as far as it is known.
    fn known_size(&self) -> u64 {
        let last = self.extents.last_key_value().map_or(0, |(at, extent)| at + extent.length());
        self.end.unwrap_or(last)
    }
}

/// Contents of files, each with a tag of its owner.
#[derive(Clone, Debug)]
pub struct Store<T> {
    files: FxHashMap<FileKey, File<T>>,
    /// Files by their last use.
    by_use: BTreeMap<u64, FileKey>,
    uses: u64,
    bytes: u64,
    budget: u64,
    totals: StoreUse,
}

impl<T> Store<T> {
    /// Makes a store for at most `budget` bytes, its own records included. With none it keeps nothing.
    #[must_use]
    pub fn new(budget: u64) -> Store<T> {
        let (files, by_use) = (FxHashMap::default(), BTreeMap::new());
        Store { files, by_use, uses: 0, bytes: 0, budget, totals: StoreUse::default() }
    }

    #[must_use]
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Returns the memory in use, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    #[must_use]
    pub fn files(&self) -> usize {
        self.files.len()
    }

    #[must_use]
    pub fn totals(&self) -> StoreUse {
        self.totals
    }

    #[must_use]
    pub fn tag(&self, file: FileKey) -> Option<&T> {
        self.files.get(&file).map(|file| &file.tag)
    }

    /// Puts bytes in. `is_end`: the file ends behind them. What is there of the same part gives way; the tag replaces the
    /// file's earlier one. The caller has dropped contents of another version before. Returns the files that gave way.
    pub fn insert(
        &mut self,
        key: FileKey,
        tag: T,
        offset: u64,
        bytes: Vec<u8>,
        (is_end, origin): (bool, Origin),
    ) -> Vec<FileKey> {
        let length = bytes.len() as u64;
        if length + EXTENT_BYTES + FILE_BYTES > self.budget {
            return vec![key];
        }
        self.drop_part(key, offset, length);
        self.uses += 1;
        let used_at = self.uses;
        let end = is_end.then_some(offset + length);
        match self.files.get_mut(&key) {
            Some(file) => {
                self.by_use.remove(&file.used_at);
                (file.tag, file.used_at, file.end) = (tag, used_at, end.or(file.end));
            }
            None => {
                self.bytes += FILE_BYTES;
                self.files.insert(
                    key,
                    File { tag, extents: BTreeMap::new(), local: BTreeSet::new(), end, used_at },
                );
            }
        }
        self.by_use.insert(used_at, key);
        let Some(file) = self.files.get_mut(&key).filter(|_| length > 0) else {
            return self.trim(key);
        };
        if origin == Origin::Local {
            self.bytes += file.insert_local(offset, bytes);
            self.drop_local_behind(key, offset);
        } else {
            file.extents.insert(offset, Extent { bytes: Arc::new(bytes), read_to: 0 });
            self.bytes += length + EXTENT_BYTES;
            self.totals.fetched += length;
        }
        self.trim(key)
    }

    /// Replaces the tag of a file: a local change has made another version of it. Where the file ends is not known any more.
    pub fn retag(&mut self, key: FileKey, tag: T) {
        if let Some(file) = self.files.get_mut(&key) {
            (file.tag, file.end) = (tag, None);
        }
    }

    /// Drops the extents that overlap a part of a file, which is about to change, and forgets where the file ends.
    pub fn drop_changing(&mut self, key: FileKey, offset: u64, length: u64) {
        self.drop_part(key, offset, length);
        self.files.get_mut(&key).into_iter().for_each(|file| file.end = None);
    }

    /// Records where a file ends.
    pub fn note_end(&mut self, key: FileKey, end: u64) {
        self.files.get_mut(&key).into_iter().for_each(|file| file.end = Some(end));
    }

    /// Reads up to `length` bytes; fewer only at the end of the file. `None`: not all of them are there.
    pub fn read(&mut self, key: FileKey, offset: u64, length: u64) -> Option<Vec<u8>> {
        let file = self.files.get(&key)?;
        let end = offset.checked_add(length)?.min(file.end.unwrap_or(u64::MAX));
        let available = end.saturating_sub(offset);
        let is_whole = |extent: &Extent| extent.length() == available && available > 0;
        if file.known_size() > SMALL && file.extents.get(&offset).is_some_and(is_whole) {
            return self.take_extent(key, offset);
        }
        let mut data = Vec::with_capacity(usize::try_from(available).ok()?);
        let mut at = offset;
        while at < end {
            let (begin, extent) = file.extent_at(at)?;
            let until = end.min(begin + extent.length());
            data.extend_from_slice(&extent.bytes[index(at - begin)..index(until - begin)]);
            at = until;
        }
        self.note_read(key, offset..end.max(offset));
        Some(data)
    }

    /// Takes out an extent of a larger file that is read as a whole: the kernel keeps its pages.
    fn take_extent(&mut self, key: FileKey, offset: u64) -> Option<Vec<u8>> {
        self.note_use(key);
        let extent = self.files.get_mut(&key)?.extents.get_mut(&offset)?;
        self.totals.used += extent.unread();
        extent.read_to = extent.length();
        let bytes = Arc::clone(&extent.bytes);
        self.remove_extent(key, offset);
        Some(Arc::unwrap_or_clone(bytes))
    }

    /// Returns the end of the bytes that are there from `offset` on, as far as `until` or beyond; `offset` itself if there are
    /// none.
    #[must_use]
    pub fn covered_to(&self, key: FileKey, offset: u64, until: u64) -> u64 {
        let Some(file) = self.files.get(&key) else { return offset };
        let mut at = offset;
        while at < until
            && let Some((begin, extent)) = file.extent_at(at)
        {
            at = begin + extent.length();
        }
        at
    }

    /// Returns the offset of the first bytes that are there behind `offset`.
    #[must_use]
    pub fn next_after(&self, key: FileKey, offset: u64) -> Option<u64> {
        self.files.get(&key)?.extents.range(offset.checked_add(1)?..).next().map(|(at, _)| *at)
    }

    /// Counts bytes that came and could not be put in.
    pub fn note_not_kept(&mut self, bytes: u64) {
        self.totals.fetched += bytes;
        self.totals.wasted += bytes;
    }

    /// Of a larger file the kernel keeps the pages that local writes have filled: drops what they have left in others than the
    /// page at `offset`.
    fn drop_local_behind(&mut self, key: FileKey, offset: u64) {
        let Some(file) = self.files.get_mut(&key).filter(|file| file.known_size() > SMALL) else { return };
        let behind: Vec<u64> = file.local.iter().copied().filter(|at| at / PAGE != offset / PAGE).collect();
        file.local.retain(|at| at / PAGE == offset / PAGE);
        behind.into_iter().for_each(|at| self.remove_extent(key, at));
    }

    fn note_use(&mut self, key: FileKey) {
        let Some(file) = self.files.get_mut(&key) else { return };
        self.uses += 1;
        self.by_use.remove(&file.used_at);
        file.used_at = self.uses;
        self.by_use.insert(file.used_at, key);
    }

    fn note_read(&mut self, key: FileKey, part: std::ops::Range<u64>) {
        self.note_use(key);
        let Some(file) = self.files.get_mut(&key) else { return };
        let mut done = Vec::new();
        let first = file.extent_at(part.start).map_or(part.start, |(at, _)| at);
        for (at, extent) in file.extents.range_mut(first..part.end) {
            let read_to = part.end.saturating_sub(*at).min(extent.length()).max(extent.read_to);
            self.totals.used += read_to - extent.read_to;
            extent.read_to = read_to;
            if extent.unread() == 0 {
                done.push(*at);
            }
        }
        if file.known_size() > SMALL {
            done.into_iter().for_each(|at| self.remove_extent(key, at));
        }
    }

    fn remove_extent(&mut self, key: FileKey, at: u64) {
        let Some(file) = self.files.get_mut(&key) else { return };
        file.local.remove(&at);
        if let Some(extent) = file.extents.remove(&at) {
            self.bytes -= extent.length() + EXTENT_BYTES;
            self.totals.wasted += extent.unread();
        }
        if file.extents.is_empty() {
            self.drop_file(key);
        }
    }

    /// Drops the extents that overlap a part of a file.
    fn drop_part(&mut self, key: FileKey, offset: u64, length: u64) {
        let Some(file) = self.files.get(&key) else { return };
        let first = file.extent_at(offset).map_or(offset, |(at, _)| at);
        let met: Vec<u64> =
            file.extents.range(first..offset.saturating_add(length)).map(|(at, _)| *at).collect();
        met.into_iter().for_each(|at| self.remove_extent(key, at));
    }

    /// Drops all contents of a file. Returns its tag.
    pub fn drop_file(&mut self, key: FileKey) -> Option<T> {
        let file = self.files.remove(&key)?;
        self.by_use.remove(&file.used_at);
        self.bytes -= FILE_BYTES;
        for extent in file.extents.values() {
            self.bytes -= extent.length() + EXTENT_BYTES;
            self.totals.wasted += extent.unread();
        }
        Some(file.tag)
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        let unread = self.totals.unread();
        self.totals.wasted += unread;
        self.files.clear();
        self.by_use.clear();
        self.bytes = 0;
    }

    /// Keeps the budget: drops other files than `spared`, then the parts of that one that were read, then the others.
    fn trim(&mut self, spared: FileKey) -> Vec<FileKey> {
        let mut gone = Vec::new();
        while self.bytes > self.budget
            && let Some(key) = self.by_use.values().copied().find(|key| *key != spared)
        {
            self.drop_file(key);
            gone.push(key);
        }
        while self.bytes > self.budget
            && let Some(at) = self.files.get(&spared).and_then(|file| file.extents.keys().next().copied())
        {
            self.remove_extent(spared, at);
        }
        gone
    }
}

/// Returns an index into an extent, which is in memory.
fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: u64 = 1 << 20;

    fn of(byte: u8, length: u64) -> Vec<u8> {
        vec![byte; index(length)]
    }

    #[test]
    fn read_returns_what_was_put_in_up_to_the_end_of_the_file() {
        let mut store = Store::new(LARGE);
        store.insert(7, 'a', 0, b"01234".to_vec(), (false, Origin::Ahead));
        assert_eq!(store.read(7, 0, 5).unwrap(), b"01234");
        assert_eq!(store.read(7, 2, 2).unwrap(), b"23");
        assert_eq!(store.read(7, 2, 10), None, "more may follow");
        store.insert(7, 'b', 5, b"567".to_vec(), (true, Origin::Ahead));
        assert_eq!(store.tag(7), Some(&'b'));
        assert_eq!(store.read(7, 2, 10).unwrap(), b"234567", "over two extents");
        assert_eq!(store.read(7, 8, 10).unwrap(), b"", "at the end");
        assert_eq!(store.read(7, 9, 10).unwrap(), b"", "behind it");
        assert_eq!(store.read(8, 0, 1), None);
        assert_eq!(
            (store.covered_to(7, 1, 99), store.covered_to(7, 8, 99), store.covered_to(9, 3, 99)),
            (8, 8, 3)
        );
    }

    #[test]
    fn empty_file_has_an_end_and_no_bytes() {
        let mut store = Store::new(LARGE);
        store.insert(7, (), 0, Vec::new(), (true, Origin::Ahead));
        assert_eq!(store.read(7, 0, 4_096).unwrap(), b"");
        assert_eq!(store.totals(), StoreUse::default());
    }

    #[test]
    fn bytes_count_as_used_once_and_as_wasted_if_never_read() {
        let mut store = Store::new(LARGE);
        store.insert(7, (), 0, of(1, 1_000), (true, Origin::Ahead));
        store.insert(8, (), 0, of(2, 500), (true, Origin::Ahead));
        store.read(7, 0, 100).unwrap();
        store.read(7, 0, 100).unwrap();
        store.read(7, 50, 150).unwrap();
        assert_eq!(store.totals(), StoreUse { fetched: 1_500, used: 200, wasted: 0 });
        store.drop_file(8);
        store.clear();
        assert_eq!(store.totals(), StoreUse { fetched: 1_500, used: 200, wasted: 1_300 });
        assert_eq!((store.bytes(), store.files(), store.totals().unread()), (0, 0, 0));
    }

    #[test]
    fn extent_of_a_large_file_leaves_when_it_was_read_and_small_files_stay() {
        let mut store = Store::new(LARGE);
        store.insert(7, (), 0, of(1, SMALL), (false, Origin::Ahead));
        store.insert(7, (), SMALL, of(2, SMALL), (true, Origin::Ahead));
        assert!(store.read(7, 0, SMALL).is_some());
        assert_eq!((store.read(7, 0, SMALL), store.covered_to(7, SMALL, LARGE)), (None, 2 * SMALL));
        store.insert(8, (), 0, of(3, SMALL), (true, Origin::Ahead));
        assert!(store.read(8, 0, SMALL).is_some());
        assert!(store.read(8, 0, SMALL).is_some());
    }

    #[test]
    fn extent_of_a_large_file_that_is_read_as_a_whole_is_given_away() {
        let mut store = Store::new(LARGE);
        store.insert(7, (), 0, of(1, SMALL), (false, Origin::Ahead));
        store.insert(7, (), SMALL, of(2, SMALL), (true, Origin::Ahead));
        assert_eq!(store.read(7, 0, SMALL).unwrap(), of(1, SMALL));
        assert_eq!((store.covered_to(7, 0, 1), store.next_after(7, 0)), (0, Some(SMALL)));
        assert_eq!(store.read(7, SMALL, LARGE).unwrap(), of(2, SMALL), "up to the end");
        let totals = StoreUse { fetched: 2 * SMALL, used: 2 * SMALL, wasted: 0 };
        assert_eq!((store.totals(), store.bytes(), store.files()), (totals, 0, 0));
    }

    #[test]
    fn locally_written_bytes_are_read_with_a_new_tag_and_do_not_count() {
        let mut store = Store::new(LARGE);
        store.insert(7, 'a', 0, b"0123456789".to_vec(), (true, Origin::Ahead));
        store.drop_changing(7, 20, 5);
        assert_eq!(store.read(7, 0, 12), None, "the end is not known");
        store.retag(7, 'b');
        store.insert(7, 'b', 10, b"ab".to_vec(), (true, Origin::Local));
        assert_eq!(store.read(7, 0, 100).unwrap(), b"0123456789ab");
        assert_eq!((store.tag(7), store.totals().fetched), (Some(&'b'), 10));
        store.drop_changing(7, 4, 1);
        assert_eq!(
            (store.tag(7), store.covered_to(7, 0, 99), store.covered_to(7, 10, 99)),
            (Some(&'b'), 0, 12)
        );
        store.note_end(7, 12);
        assert_eq!(store.read(7, 11, 9).unwrap(), b"b");
    }

    #[test]
    fn local_writes_one_after_the_other_take_little_memory() {
        let mut store = Store::new(LARGE);
        for at in 0..8_000 {
            store.insert(7, (), at * 64, of(1, 64), (false, Origin::Local));
            store.note_end(7, (at + 1) * 64);
        }
        assert!(store.bytes() <= SMALL + 50 * EXTENT_BYTES, "{} bytes", store.bytes());
        assert_eq!(store.read(7, 512_000 - PAGE, PAGE).unwrap(), of(1, PAGE), "the tail is there");
    }

    #[test]
    fn newer_bytes_replace_the_extents_that_they_overlap() {
        let mut store = Store::new(LARGE);
        store.insert(7, (), 0, of(1, 10), (false, Origin::Ahead));
        store.insert(7, (), 10, of(2, 10), (true, Origin::Ahead));
        store.insert(7, (), 5, of(3, 10), (false, Origin::Ahead));
        assert_eq!(store.read(7, 5, 10).unwrap(), of(3, 10));
        assert_eq!((store.read(7, 0, 5), store.read(7, 15, 5)), (None, None));
    }

    #[test]
    fn least_recently_used_files_go_first_and_the_budget_holds() {
        let each = 1_000 + EXTENT_BYTES + FILE_BYTES;
        let mut store = Store::new(3 * each);
        for key in 1..=3 {
            store.insert(key, (), 0, of(1, 1_000), (true, Origin::Ahead));
        }
        store.read(1, 0, 1_000).unwrap();
        store.insert(4, (), 0, of(1, 1_000), (true, Origin::Ahead));
        assert_eq!([1, 2, 3, 4].map(|key| store.tag(key).is_some()), [true, false, true, true]);
        assert_eq!(store.bytes(), 3 * each);
        store.insert(5, (), 0, of(1, 3 * each), (true, Origin::Ahead));
        assert_eq!(store.tag(5), None, "it would not fit");
        for at in 0..100 {
            store.insert(6, (), at * 1_000, of(1, 1_000), (false, Origin::Ahead));
            assert!(store.bytes() <= store.budget());
        }
        assert_eq!(store.covered_to(6, 99_000, LARGE), 100_000, "the last part stays");
        assert_eq!(Store::<()>::new(0).budget(), 0);
    }
}
