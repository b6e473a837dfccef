//! Model of the kernel's page cache and its cached listings of open directories.

use nigh_cache::{Fh, KernelInvalidation, Op, OpReply, Page};
use nigh_types::WriteFlags;
use std::collections::{BTreeMap, BTreeSet};

/// A cached listing: names and inode numbers.
pub type Listing = BTreeMap<Vec<u8>, u64>;

/// The part of a page that a local write changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PendingWrite {
    pub from: usize,
    pub to: usize,
    /// The kernel had the whole page. Then the page has the written bytes at once and is not locked until the reply
    /// (`fuse_fill_write_pages`). Otherwise the page stays locked until the reply, and is not whole afterwards.
    whole: bool,
}

/// Page cache and cached listings of one mount. Files here are smaller than a page.
#[derive(Clone, Default, Debug)]
pub struct PageCache {
    /// Open files: the inode, and whether this descriptor is writable.
    files: BTreeMap<Fh, (u64, bool)>,
    /// Open directories whose listing may be cached.
    dirs: BTreeSet<Fh>,
    pages: BTreeMap<u64, Vec<u8>>,
    /// Local writes in flight; a kernel sends one per file at a time.
    pending_writes: BTreeMap<u64, PendingWrite>,
    /// Files with dirty pages from stores into maps.
    dirty: BTreeMap<u64, Fh>,
    listings: BTreeMap<u64, Listing>,
    /// Symlink targets (`FUSE_CACHE_SYMLINKS`), cached until the inode's pages are invalidated.
    targets: BTreeMap<u64, String>,
}

impl PageCache {
    /// Applies a reply.
    pub fn apply_reply(&mut self, op: &Op, answer: &OpReply) {
        match (op, answer) {
            (Op::Open { ino, access, .. }, OpReply::Opened(opened)) => {
                self.opened(*ino, opened.fh, access.write, opened.keep_cache);
            }
            (Op::Create { access, .. }, OpReply::Created(node, opened)) => {
                self.opened(node.id.ino, opened.fh, access.write, opened.keep_cache);
            }
            (Op::Release { fh, .. }, _) => drop(self.files.remove(fh)),
            // An empty file has no page to read from.
            (Op::Read { ino, fh, offset: 0, .. }, OpReply::Data(data))
                if self.files.contains_key(fh) && !data.is_empty() =>
            {
                self.pages.insert(*ino, data.clone());
            }
            (
                Op::Write { ino, data, flags: WriteFlags { write_back: true, .. }, .. },
                OpReply::Written(_),
            ) => {
                if let Some(pages) = self.pages.get_mut(ino) {
                    pages.clone_from(data);
                }
            }
            (Op::Write { ino, .. }, OpReply::Written(_)) => drop(self.pending_writes.remove(ino)),
            (Op::Write { ino, .. }, _) => {
                self.pending_writes.remove(ino);
                if !self.is_dirty(*ino) {
                    self.pages.remove(ino);
                }
            }
            (Op::ReadLink { ino }, OpReply::Target(target)) => {
                self.targets.insert(*ino, String::from_utf8_lossy(target).into_owned());
            }
            (Op::OpenDir { ino }, OpReply::Opened(opened)) => {
                if !opened.keep_cache {
                    self.listings.remove(ino);
                }
                if opened.cache_dir {
                    self.dirs.insert(opened.fh);
                }
            }
            (Op::ReadDir { ino, fh, .. }, OpReply::Page(page)) if self.dirs.contains(fh) => {
                self.listings.insert(*ino, listing(page));
            }
            _ => {}
        }
    }

    /// Returns the cached symlink targets, by inode.
    pub fn targets(&self) -> impl Iterator<Item = (u64, &str)> {
        self.targets.iter().map(|(ino, target)| (*ino, target.as_str()))
    }

    /// Stores a whole file that is not open, before the reply that opens it (`fuse_notify_store`).
    pub fn fill(&mut self, ino: u64, data: Vec<u8>) {
        self.pages.insert(ino, data);
    }

    /// Begins a request.
    pub fn begin_request(&mut self, op: &Op) {
        let Op::Write { ino, offset, data, flags: WriteFlags { write_back: false, .. }, .. } = op else {
            return;
        };
        // Offsets are within a page.
        let at = u16::try_from(*offset).unwrap_or(0);
        let from = usize::from(at);
        let to = from + data.len();
        let page = self.pages.get_mut(ino);
        let whole = page.is_some();
        if let Some(page) = page {
            page.resize(page.len().max(to), 0);
            page[from..to].copy_from_slice(data);
        }
        self.pending_writes.insert(*ino, PendingWrite { from, to, whole });
    }

    /// Returns what a local write in flight has changed in a cached page.
    #[must_use]
    pub fn pending_write(&self, ino: u64) -> Option<PendingWrite> {
        self.pending_writes.get(&ino).copied().filter(|_| self.has_pages(ino))
    }

    /// Returns whether invalidating the file's page waits for a local write.
    #[must_use]
    pub fn is_locked(&self, ino: u64) -> bool {
        self.pending_writes.get(&ino).is_some_and(|written| !written.whole)
    }

    fn opened(&mut self, ino: u64, fh: Fh, write: bool, keep_cache: bool) {
        if !keep_cache && !self.is_dirty(ino) {
            self.pages.remove(&ino);
        }
        self.files.insert(fh, (ino, write));
    }

    /// Drops a directory's listing, as the kernel does after a local change (`fuse_dir_changed`).
    pub fn drop_listing(&mut self, dir: u64) {
        self.listings.remove(&dir);
    }

    /// Applies a notification.
    pub fn invalidate(&mut self, stale: &KernelInvalidation) {
        if let KernelInvalidation::Data { ino, offset: 0, .. } = stale {
            self.pages.remove(ino);
            self.listings.remove(ino);
            self.targets.remove(ino);
        }
    }

    /// Stores into a map of an open file, in a present page.
    pub fn store(&mut self, ino: u64, fh: Fh, (offset, bytes): (u64, &[u8])) {
        let page = self.pages.entry(ino).or_default();
        let at = u16::try_from(offset).unwrap_or(0);
        let from = usize::from(at);
        page.resize(page.len().max(from + bytes.len()), 0);
        page[from..from + bytes.len()].copy_from_slice(bytes);
        self.dirty.insert(ino, fh);
    }

    /// Returns whether a file has dirty pages.
    #[must_use]
    pub fn is_dirty(&self, ino: u64) -> bool {
        self.dirty.contains_key(&ino)
    }

    /// Returns one file with dirty pages, if any.
    #[must_use]
    pub fn first_dirty(&self) -> Option<u64> {
        self.dirty.keys().next().copied()
    }

    /// Writes the dirty pages back (`fuse_writepages`, `fuse_launder_folio`).
    pub fn write_back(&mut self, ino: u64) -> Option<Op> {
        let fh = self.dirty.remove(&ino)?;
        let data = self.pages.get(&ino).cloned().unwrap_or_default();
        Some(Op::Write {
            ino,
            fh,
            offset: 0,
            data,
            flags: WriteFlags { write_back: true, ..WriteFlags::default() },
        })
    }

    /// Returns the open files: number, inode, and whether it is writable.
    pub fn files(&self) -> impl Iterator<Item = (Fh, u64, bool)> {
        self.files.iter().map(|(fh, (ino, write))| (*fh, *ino, *write))
    }

    /// Returns whether a file is open.
    #[must_use]
    pub fn is_open(&self, ino: u64) -> bool {
        self.files.values().any(|(of, _)| *of == ino)
    }

    /// Returns whether the page cache answers reads of an open file.
    #[must_use]
    pub fn has_pages(&self, ino: u64) -> bool {
        self.pages.contains_key(&ino)
    }

    /// Returns what processes read of open files from the page cache.
    pub fn pages(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let open = |ino: &u64| self.files.values().any(|(of, _)| of == ino);
        self.pages.iter().filter(move |(ino, _)| open(ino)).map(|(ino, data)| (*ino, data.as_slice()))
    }

    /// Returns the cached listings of open directories.
    pub fn listings(&self) -> impl Iterator<Item = (u64, &Listing)> {
        self.listings.iter().map(|(dir, listing)| (*dir, listing))
    }
}

fn listing(page: &Page) -> Listing {
    let mut names = page.names.as_slice();
    let mut listing = Listing::new();
    for entry in &page.entries {
        let (name, rest) = names.split_at(usize::from(entry.name_len));
        names = rest;
        listing.insert(name.to_vec(), entry.ino);
    }
    listing
}
