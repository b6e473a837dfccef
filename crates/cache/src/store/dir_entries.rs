//! Directory entries in cookie order.
//!
//! Entries are stored in chunks of at most [`CHUNK`], each with its names in one block. A seek is two binary searches,
//! an insertion moves at most one chunk, and a listing that arrives in order fills chunks completely.

use crate::store::packed_attr::PackedAttr;
use nigh_types::{Attr, Cookie, Entry, Kind, Name, NodeId};

/// Entries of a chunk. So many of the longest names have at most `u16::MAX` bytes.
const CHUNK: usize = 256;

/// Directory entry, borrowed from its chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirEntryRef<'a> {
    pub cookie: Cookie,
    pub name: &'a [u8],
    /// `None`: the directory has no such name.
    pub child: Option<&'a CachedEntry>,
}

impl DirEntryRef<'_> {
    pub fn to_name(self) -> Name {
        Name::new(self.name).expect("it was put in as a name")
    }
}

/// Inode that a name leads to, with the facts that the directory lease covers.
#[derive(Clone, Debug)]
pub(crate) struct CachedEntry {
    pub id: NodeId,
    /// See [`CachedEntry::attr`].
    pub packed: PackedAttr,
    pub attr_known: bool,
    pub no_xattrs: bool,
    pub target: Option<Box<Box<[u8]>>>,
}

impl CachedEntry {
    pub fn new(entry: &Entry) -> CachedEntry {
        CachedEntry {
            id: entry.id,
            packed: entry.attr.into(),
            attr_known: true,
            no_xattrs: entry.no_xattrs,
            target: entry.target.clone().map(Box::new),
        }
    }

    /// Returns a child of which at most the type is known.
    pub fn bare(id: NodeId, kind: Option<Kind>) -> CachedEntry {
        let mode = kind.map_or(0, Kind::mode_bits);
        let packed = Attr { mode, ..Attr::default() }.into();
        CachedEntry { id, packed, attr_known: false, no_xattrs: false, target: None }
    }

    /// Whether the directory lease covers the attributes and the absence of xattrs, so that a recall or an update keeps them true.
    pub fn is_covered(&self) -> bool {
        self.attr_known && self.attr().covered_by_parent()
    }

    /// Returns the attributes. They are served only while [`CachedEntry::is_covered`].
    pub fn attr(&self) -> Attr {
        self.packed.into()
    }
}

/// Entries of one directory. Invariant: sorted by (cookie, name), names unique, no chunk empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct DirEntries {
    chunks: Vec<Chunk>,
    existing: u64,
    absent: u64,
    /// Memory of `chunks`, and of the symlink targets of their entries.
    bytes_used: u64,
}

/// Some entries, and their names. Invariant: each entry's name lies in `names`; `live` is the total length of these
/// names.
#[derive(Clone, Debug, Default)]
struct Chunk {
    rows: Vec<PackedEntry>,
    names: Vec<u8>,
    live: u32,
}

#[derive(Clone, Debug)]
struct PackedEntry {
    cookie: Cookie,
    child: Option<CachedEntry>,
    name_at: u16,
    name_len: u8,
}

/// Returns the size of a memory block with the allocator's overhead.
fn block(length: usize) -> u64 {
    if length == 0 { 0 } else { (length as u64 + 8).next_multiple_of(16).max(32) }
}

fn target_bytes(child: Option<&CachedEntry>) -> u64 {
    child.and_then(|child| child.target.as_ref()).map_or(0, |target| 32 + block(target.len()))
}

impl Chunk {
    fn bytes(&self) -> u64 {
        block(self.rows.capacity() * size_of::<PackedEntry>()) + block(self.names.capacity())
    }

    fn name(&self, row: &PackedEntry) -> &[u8] {
        let at = usize::from(row.name_at);
        &self.names[at..at + usize::from(row.name_len)]
    }

    fn row(&self, at: usize) -> Option<DirEntryRef<'_>> {
        let row = self.rows.get(at)?;
        Some(DirEntryRef { cookie: row.cookie, name: self.name(row), child: row.child.as_ref() })
    }

    fn iter(&self) -> impl Iterator<Item = DirEntryRef<'_>> {
        self.rows.iter().map(|row| DirEntryRef {
            cookie: row.cookie,
            name: self.name(row),
            child: row.child.as_ref(),
        })
    }

    fn last(&self) -> Option<DirEntryRef<'_>> {
        self.row(self.rows.len().checked_sub(1)?)
    }

    fn insert(&mut self, at: usize, cookie: Cookie, name: &[u8], child: Option<CachedEntry>) {
        if self.names.len() + name.len() > usize::from(u16::MAX) {
            self.tidy_names();
        }
        let name_at = u16::try_from(self.names.len()).expect("a chunk's names fit");
        let name_len = u8::try_from(name.len()).expect("a name has at most 255 bytes");
        self.names.extend_from_slice(name);
        self.live += u32::from(name_len);
        self.rows.insert(at, PackedEntry { cookie, child, name_at, name_len });
    }

    fn remove(&mut self, at: usize) -> Option<CachedEntry> {
        let row = self.rows.remove(at);
        self.live -= u32::from(row.name_len);
        if self.names.len() > 2 * self.live as usize + 64 {
            self.tidy_names();
        }
        row.child
    }

    /// Removes the names of removed entries.
    fn tidy_names(&mut self) {
        let mut names = Vec::with_capacity(self.live as usize);
        for row in &mut self.rows {
            let at = usize::from(row.name_at);
            row.name_at = u16::try_from(names.len()).expect("a chunk's names fit");
            names.extend_from_slice(&self.names[at..at + usize::from(row.name_len)]);
        }
        self.names = names;
    }

    /// Splits off the entries from `at` on.
    fn split_off(&mut self, at: usize) -> Chunk {
        let rows = self.rows.split_off(at);
        let live = rows.iter().map(|row| u32::from(row.name_len)).sum();
        let mut upper = Chunk { rows, names: self.names.clone(), live };
        upper.tidy_names();
        self.live -= live;
        self.tidy_names();
        upper
    }

    /// Frees spare capacity.
    fn shrink(&mut self) {
        self.rows.shrink_to_fit();
        self.names.shrink_to_fit();
    }
}

impl DirEntries {
    /// Returns the number of names that exist.
    pub fn existing(&self) -> u64 {
        self.existing
    }

    /// Returns the number of names known not to exist.
    pub fn absent(&self) -> u64 {
        self.absent
    }

    /// Returns the memory in use, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes_used + block(self.chunks.capacity() * size_of::<Chunk>())
    }

    pub fn clear(&mut self) {
        *self = DirEntries::default();
    }

    pub fn find(&self, cookie: Cookie, name: &[u8]) -> Option<DirEntryRef<'_>> {
        let (chunk, row) = self.position(cookie, name).ok()?;
        self.chunks.get(chunk)?.row(row)
    }

    /// Returns a child for a change; its symlink target must stay as it is.
    pub fn find_mut(&mut self, cookie: Cookie, name: &[u8]) -> Option<&mut CachedEntry> {
        let (chunk, row) = self.position(cookie, name).ok()?;
        self.chunks.get_mut(chunk)?.rows.get_mut(row)?.child.as_mut()
    }

    /// Inserts an entry, or replaces the entry of that name and returns the old child.
    pub fn insert(
        &mut self,
        cookie: Cookie,
        name: &[u8],
        child: Option<CachedEntry>,
    ) -> Option<Option<CachedEntry>> {
        self.count(child.as_ref(), true);
        match self.position(cookie, name) {
            Ok((chunk, at)) => {
                let old = std::mem::replace(&mut self.chunks[chunk].rows[at].child, child);
                self.count(old.as_ref(), false);
                Some(old)
            }
            Err((chunk, at)) => {
                self.place(chunk, at, cookie, name, child);
                None
            }
        }
    }

    /// Removes an entry and returns its child.
    pub fn remove(&mut self, cookie: Cookie, name: &[u8]) -> Option<Option<CachedEntry>> {
        let (chunk, at) = self.position(cookie, name).ok()?;
        let child = self.changing(chunk, |rows| rows.remove(at));
        if self.chunks[chunk].rows.is_empty() {
            self.bytes_used -= self.chunks.remove(chunk).bytes();
        }
        self.count(child.as_ref(), false);
        Some(child)
    }

    /// Returns the entries whose cookie is larger than `cookie`, in order.
    pub fn after(&self, cookie: Cookie) -> impl Iterator<Item = DirEntryRef<'_>> {
        let first = self.chunks.partition_point(|c| c.last().is_some_and(|r| r.cookie <= cookie));
        let skip = self.chunks.get(first).map_or(0, |c| c.rows.partition_point(|r| r.cookie <= cookie));
        self.chunks[first..].iter().flat_map(Chunk::iter).skip(skip)
    }

    pub fn iter(&self) -> impl Iterator<Item = DirEntryRef<'_>> {
        self.chunks.iter().flat_map(Chunk::iter)
    }

    /// Copies the entries of existing names up to a cookie.
    pub fn up_to(&self, cookie: Cookie) -> DirEntries {
        let mut rows = DirEntries::default();
        for row in self.iter().take_while(|r| r.cookie <= cookie).filter(|r| r.child.is_some()) {
            rows.insert(row.cookie, row.name, row.child.cloned());
        }
        rows
    }

    /// Completes a listing: removes the entries of names that do not exist (a complete listing says so without them),
    /// and frees spare capacity.
    pub fn complete(&mut self) {
        if self.absent > 0 {
            let old = std::mem::take(self);
            for mut chunk in old.chunks {
                for row in std::mem::take(&mut chunk.rows) {
                    let Some(child) = row.child else { continue };
                    let at = usize::from(row.name_at);
                    let name = &chunk.names[at..at + usize::from(row.name_len)];
                    self.insert(row.cookie, name, Some(child));
                }
            }
        }
        if let Some(last) = self.chunks.len().checked_sub(1) {
            self.changing(last, Chunk::shrink);
        }
        self.chunks.shrink_to_fit();
    }

    fn count(&mut self, child: Option<&CachedEntry>, add: bool) {
        let counter = if child.is_some() { &mut self.existing } else { &mut self.absent };
        if add {
            *counter += 1;
            self.bytes_used += target_bytes(child);
        } else {
            *counter -= 1;
            self.bytes_used -= target_bytes(child);
        }
    }

    /// Changes a chunk, and updates the count of its memory.
    fn changing<T>(&mut self, chunk: usize, change: impl FnOnce(&mut Chunk) -> T) -> T {
        let chunk = &mut self.chunks[chunk];
        let before = chunk.bytes();
        let changed = change(chunk);
        self.bytes_used = self.bytes_used + chunk.bytes() - before;
        changed
    }

    fn position(&self, cookie: Cookie, name: &[u8]) -> Result<(usize, usize), (usize, usize)> {
        let key = (cookie, name);
        let chunk = self.chunks.partition_point(|c| c.last().is_some_and(|r| (r.cookie, r.name) < key));
        match self.chunks.get(chunk) {
            None => Err((chunk, 0)),
            Some(found) => found
                .rows
                .binary_search_by(|r| (r.cookie, found.name(r)).cmp(&key))
                .map(|at| (chunk, at))
                .map_err(|at| (chunk, at)),
        }
    }

    fn place(
        &mut self,
        mut chunk: usize,
        mut at: usize,
        cookie: Cookie,
        name: &[u8],
        child: Option<CachedEntry>,
    ) {
        if chunk == self.chunks.len() {
            if let Some(last) = chunk.checked_sub(1) {
                if self.chunks[last].rows.len() < CHUNK {
                    (chunk, at) = (last, self.chunks[last].rows.len());
                } else {
                    self.changing(last, Chunk::shrink);
                }
            } else {
                self.chunks.reserve_exact(1);
            }
            if chunk == self.chunks.len() {
                self.chunks.push(Chunk::default());
            }
        } else if self.chunks[chunk].rows.len() == CHUNK {
            let upper = self.changing(chunk, |rows| {
                let upper = rows.split_off(CHUNK / 2);
                rows.shrink();
                upper
            });
            self.bytes_used += upper.bytes();
            self.chunks.insert(chunk + 1, upper);
            if at > CHUNK / 2 {
                (chunk, at) = (chunk + 1, at - CHUNK / 2);
            }
        }
        self.changing(chunk, |rows| rows.insert(at, cookie, name, child));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn put(rows: &mut DirEntries, cookie: u64, name: &[u8], there: bool) -> Option<Option<CachedEntry>> {
        let id = NodeId { ino: cookie + 1000, generation: 1 };
        let child = there.then(|| CachedEntry {
            id,
            packed: Attr::default().into(),
            attr_known: true,
            no_xattrs: true,
            target: cookie.is_multiple_of(7).then(|| Box::new(b"target".as_slice().into())),
        });
        rows.insert(Cookie(cookie), name, child)
    }

    /// Counts the memory from scratch.
    fn counted(rows: &DirEntries) -> u64 {
        let chunks: u64 = rows.chunks.iter().map(Chunk::bytes).sum();
        let targets: u64 = rows.iter().map(|row| target_bytes(row.child)).sum();
        chunks + targets + block(rows.chunks.capacity() * size_of::<Chunk>())
    }

    proptest! {
        #[test]
        fn behaves_like_a_sorted_map(
            steps in prop::collection::vec((0u64..600, 0u8..3, any::<bool>(), any::<bool>()), 1..2500),
            long in any::<bool>(),
        ) {
            let mut rows = DirEntries::default();
            let mut model: BTreeMap<(u64, Vec<u8>), bool> = BTreeMap::new();
            for (cookie, suffix, insert, there) in steps {
                let name = vec![b'a' + suffix; if long { 255 - usize::from(suffix) } else { 1 }];
                if insert {
                    let old = put(&mut rows, cookie, &name, there);
                    prop_assert_eq!(old.map(|r| r.is_some()), model.insert((cookie, name), there));
                } else {
                    let old = rows.remove(Cookie(cookie), &name);
                    prop_assert_eq!(old.map(|r| r.is_some()), model.remove(&(cookie, name)));
                }
            }
            let seen: Vec<_> = rows.iter().map(|r| ((r.cookie.0, r.name.to_vec()), r.child.is_some())).collect();
            prop_assert_eq!(seen, model.clone().into_iter().collect::<Vec<_>>());
            for from in [0u64, 1, 77, 300, 599, 600] {
                let after: Vec<u64> = rows.after(Cookie(from)).map(|r| r.cookie.0).collect();
                let want: Vec<u64> = model.keys().map(|k| k.0).filter(|&c| c > from).collect();
                prop_assert_eq!(after, want);
            }
            prop_assert_eq!(rows.existing(), model.values().filter(|t| **t).count() as u64);
            prop_assert_eq!(rows.bytes(), counted(&rows));
            let bytes = rows.bytes();
            rows.complete();
            prop_assert_eq!(rows.absent(), 0);
            prop_assert_eq!(rows.bytes(), counted(&rows));
            prop_assert!(rows.bytes() <= bytes);
            let seen: Vec<_> = rows.iter().map(|r| (r.cookie.0, r.name.to_vec())).collect();
            let want: Vec<_> = model.into_iter().filter(|(_, there)| *there).map(|(key, _)| key).collect();
            prop_assert_eq!(seen, want);
            rows.clear();
            prop_assert_eq!(rows.bytes(), 0);
        }
    }

    /// In one large directory, and in many small ones.
    #[test]
    fn idle_directory_entry_takes_at_most_150_bytes() {
        for (each, most) in [(10_000u64, 140), (1_000, 140), (100, 145), (10, 150)] {
            let mut rows = DirEntries::default();
            for n in 0..each {
                put(&mut rows, n * 7 + 1, format!("file-{n:07}").as_bytes(), true);
            }
            rows.complete();
            assert!(rows.bytes() / each <= most, "{} bytes of {each}", rows.bytes() / each);
        }
    }
}
