//! What is known of a directory's names, in cookie order.
//!
//! Rows stand in chunks of at most [`CHUNK`]: a seek is two binary searches, an insertion moves at
//! most one chunk, and a listing that arrives in order fills chunks to the brim.

use crate::compact::CompactAttr;
use nigh_types::{Attr, Cookie, Entry, Kind, Name, NodeId};

const CHUNK: usize = 256;

/// A name and what it leads to.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub cookie: Cookie,
    pub name: Name,
    /// `None`: the directory has no such name.
    pub child: Option<Child>,
}

/// What a name leads to, and the facts about it that the directory's grant covers.
#[derive(Clone, Debug)]
pub(crate) struct Child {
    pub id: NodeId,
    /// See [`Child::attr`].
    pub compact: CompactAttr,
    pub attr_known: bool,
    pub no_xattrs: bool,
    pub target: Option<Box<Box<[u8]>>>,
}

impl Child {
    pub fn new(entry: &Entry) -> Child {
        Child {
            id: entry.id,
            compact: entry.attr.into(),
            attr_known: true,
            no_xattrs: entry.no_xattrs,
            target: entry.target.clone().map(Box::new),
        }
    }

    /// Of which nothing is known but, maybe, its type.
    pub fn bare(id: NodeId, kind: Option<Kind>) -> Child {
        let mode = kind.map_or(0, Kind::mode_bits);
        let compact = Attr { mode, ..Attr::default() }.into();
        Child { id, compact, attr_known: false, no_xattrs: false, target: None }
    }

    /// Served only while `attr_known`, and only if they are covered by the parent.
    pub fn attr(&self) -> Attr {
        self.compact.into()
    }
}

/// Rows of one directory. Invariant: sorted by (cookie, name), names unique, no chunk empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    chunks: Vec<Vec<Row>>,
    there: u64,
    missing: u64,
    heap: u64,
}

fn row_heap(row: &Row) -> u64 {
    // A small heap block costs its length rounded to 16, plus 8 for the allocator.
    let block = |length: usize| (length as u64 + 8).next_multiple_of(16).max(32);
    let target = row.child.as_ref().and_then(|c| c.target.as_ref());
    block(row.name.as_bytes().len()) + target.map_or(0, |t| 32 + block(t.len()))
}

impl Rows {
    /// Names that exist.
    pub fn there(&self) -> u64 {
        self.there
    }

    /// Names known not to exist.
    pub fn missing(&self) -> u64 {
        self.missing
    }

    /// Memory held, in bytes.
    pub fn bytes(&self) -> u64 {
        (self.there + self.missing) * size_of::<Row>() as u64 + self.heap
    }

    pub fn clear(&mut self) {
        *self = Rows::default();
    }

    pub fn find(&self, cookie: Cookie, name: &[u8]) -> Option<&Row> {
        let (chunk, row) = self.position(cookie, name).ok()?;
        self.chunks.get(chunk)?.get(row)
    }

    pub fn find_mut(&mut self, cookie: Cookie, name: &[u8]) -> Option<&mut Child> {
        let (chunk, row) = self.position(cookie, name).ok()?;
        self.chunks.get_mut(chunk)?.get_mut(row)?.child.as_mut()
    }

    /// Puts a row in, in place of one with the same name; returns the one replaced.
    pub fn insert(&mut self, row: Row) -> Option<Row> {
        self.count(&row, true);
        match self.position(row.cookie, row.name.as_bytes()) {
            Ok((chunk, at)) => {
                let old = std::mem::replace(&mut self.chunks[chunk][at], row);
                self.count(&old, false);
                Some(old)
            }
            Err((chunk, at)) => {
                self.place(chunk, at, row);
                None
            }
        }
    }

    pub fn remove(&mut self, cookie: Cookie, name: &[u8]) -> Option<Row> {
        let (chunk, at) = self.position(cookie, name).ok()?;
        let row = self.chunks[chunk].remove(at);
        if self.chunks[chunk].is_empty() {
            self.chunks.remove(chunk);
        }
        self.count(&row, false);
        Some(row)
    }

    /// Rows whose cookie is larger than `cookie`, in order.
    pub fn after(&self, cookie: Cookie) -> impl Iterator<Item = &Row> {
        let first = self.chunks.partition_point(|c| c.last().is_some_and(|r| r.cookie <= cookie));
        let skip = self.chunks.get(first).map_or(0, |c| c.partition_point(|r| r.cookie <= cookie));
        self.chunks[first..].iter().flatten().skip(skip)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Row> {
        self.chunks.iter().flatten()
    }

    /// The rows up to a cookie, of names that exist.
    pub fn up_to(&self, cookie: Cookie) -> Rows {
        let mut rows = Rows::default();
        for row in self.iter().take_while(|r| r.cookie <= cookie).filter(|r| r.child.is_some()) {
            rows.insert(row.clone());
        }
        rows
    }

    /// Forgets the rows of names that do not exist (a complete listing says so without them).
    pub fn drop_missing(&mut self) {
        if self.missing == 0 {
            return;
        }
        let chunks = std::mem::take(self).chunks;
        for row in chunks.into_iter().flatten().filter(|r| r.child.is_some()) {
            self.insert(row);
        }
    }

    fn count(&mut self, row: &Row, add: bool) {
        let counter = if row.child.is_some() { &mut self.there } else { &mut self.missing };
        let heap = row_heap(row);
        if add {
            *counter += 1;
            self.heap += heap;
        } else {
            *counter -= 1;
            self.heap -= heap;
        }
    }

    fn position(&self, cookie: Cookie, name: &[u8]) -> Result<(usize, usize), (usize, usize)> {
        let key = (cookie, name);
        let chunk =
            self.chunks.partition_point(|c| c.last().is_some_and(|r| (r.cookie, r.name.as_bytes()) < key));
        match self.chunks.get(chunk) {
            None => Err((chunk, 0)),
            Some(rows) => rows
                .binary_search_by(|r| (r.cookie, r.name.as_bytes()).cmp(&key))
                .map(|at| (chunk, at))
                .map_err(|at| (chunk, at)),
        }
    }

    fn place(&mut self, chunk: usize, at: usize, row: Row) {
        if chunk == self.chunks.len() {
            match self.chunks.last_mut() {
                Some(last) if last.len() < CHUNK => last.push(row),
                last => {
                    if let Some(full) = last {
                        full.shrink_to_fit();
                    }
                    self.chunks.push(vec![row]);
                }
            }
            return;
        }
        let rows = &mut self.chunks[chunk];
        rows.insert(at, row);
        if rows.len() > CHUNK {
            let upper = rows.split_off(CHUNK / 2);
            self.chunks.insert(chunk + 1, upper);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn row(cookie: u64, name: &[u8], there: bool) -> Row {
        let id = NodeId { ino: cookie + 1000, generation: 1 };
        let child = there.then(|| Child {
            id,
            compact: Attr::default().into(),
            attr_known: true,
            no_xattrs: true,
            target: None,
        });
        Row { cookie: Cookie(cookie), name: Name::new(name).unwrap(), child }
    }

    proptest! {
        #[test]
        fn behaves_like_a_sorted_map(steps in prop::collection::vec((0u64..600, 0u8..3, any::<bool>(), any::<bool>()), 1..2500)) {
            let mut rows = Rows::default();
            let mut model: BTreeMap<(u64, Vec<u8>), bool> = BTreeMap::new();
            for (cookie, suffix, insert, there) in steps {
                let name = vec![b'a' + suffix];
                if insert {
                    let old = rows.insert(row(cookie, &name, there));
                    prop_assert_eq!(old.map(|r| r.child.is_some()), model.insert((cookie, name), there));
                } else {
                    let old = rows.remove(Cookie(cookie), &name);
                    prop_assert_eq!(old.map(|r| r.child.is_some()), model.remove(&(cookie, name)));
                }
            }
            let seen: Vec<_> = rows.iter().map(|r| ((r.cookie.0, r.name.as_bytes().to_vec()), r.child.is_some())).collect();
            prop_assert_eq!(seen, model.clone().into_iter().collect::<Vec<_>>());
            for from in [0u64, 1, 77, 300, 599, 600] {
                let after: Vec<u64> = rows.after(Cookie(from)).map(|r| r.cookie.0).collect();
                let want: Vec<u64> = model.keys().map(|k| k.0).filter(|&c| c > from).collect();
                prop_assert_eq!(after, want);
            }
            prop_assert_eq!(rows.there(), model.values().filter(|t| **t).count() as u64);
            let bytes = rows.bytes();
            rows.drop_missing();
            prop_assert_eq!(rows.missing(), 0);
            prop_assert!(rows.bytes() <= bytes);
            rows.clear();
            prop_assert_eq!(rows.bytes(), 0);
        }
    }

    #[test]
    fn an_idle_row_costs_at_most_160_bytes() {
        let mut rows = Rows::default();
        for n in 0..10_000u64 {
            rows.insert(row(n, format!("file-{n:07}").as_bytes(), true));
        }
        assert!(rows.bytes() / 10_000 <= 160, "{} bytes", rows.bytes() / 10_000);
    }
}
