//! A file's bytes in pages, so that holes take no memory.

use std::collections::BTreeMap;

pub(super) const PAGE: u64 = 4096;

/// Sparse file contents: missing pages are zero. The size is in the attributes.
#[derive(Clone, Default, Debug)]
pub(super) struct Content {
    pages: BTreeMap<u64, Box<[u8]>>,
}

/// Offset of a byte in its page.
fn within(byte: u64) -> usize {
    within_page(byte % PAGE)
}

/// Splits a range at page boundaries: (page, from, to).
fn pieces(offset: u64, length: u64) -> impl Iterator<Item = (u64, usize, usize)> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let stop = end.min((at / PAGE + 1) * PAGE);
            let from = within(at);
            let piece = (at / PAGE, from, from + within_page(stop - at));
            at = stop;
            piece
        })
    })
}

fn within_page(length: u64) -> usize {
    usize::try_from(length).expect("a piece is no longer than a page")
}

impl Content {
    /// Allocated blocks, in units of 512 bytes.
    pub(super) fn blocks(&self) -> u64 {
        self.pages.len() as u64 * (PAGE / 512)
    }

    pub(super) fn read(&self, offset: u64, length: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (page, from, to) in pieces(offset, length) {
            match self.pages.get(&page) {
                Some(page) => bytes.extend_from_slice(&page[from..to]),
                None => bytes.resize(bytes.len() + (to - from), 0),
            }
        }
        bytes
    }

    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut rest = bytes;
        for (page, from, to) in pieces(offset, bytes.len() as u64) {
            let (piece, behind) = rest.split_at(to - from);
            rest = behind;
            let page = self.pages.entry(page).or_insert_with(|| vec![0; within_page(PAGE)].into());
            page[from..to].copy_from_slice(piece);
        }
    }

    /// Makes a range zero; whole pages in it become holes.
    pub(super) fn punch(&mut self, offset: u64, end: u64) {
        let touched: Vec<u64> =
            self.pages.range(offset / PAGE..end.div_ceil(PAGE)).map(|(page, _)| *page).collect();
        for page in touched {
            let from = offset.max(page * PAGE);
            let to = end.min((page + 1) * PAGE);
            if to - from == PAGE {
                self.pages.remove(&page);
            } else if let Some(bytes) = self.pages.get_mut(&page) {
                let start = within(from);
                bytes[start..start + within_page(to - from)].fill(0);
            }
        }
    }

    /// Where data begins at or after `offset`, in a file of `size` bytes.
    pub(super) fn next_data(&self, offset: u64, size: u64) -> Option<u64> {
        let (page, _) = self.pages.range(offset / PAGE..).next()?;
        Some(offset.max(page * PAGE)).filter(|at| *at < size)
    }

    /// Where a hole begins at or after `offset`; the end of the file counts as one.
    pub(super) fn next_hole(&self, offset: u64, size: u64) -> u64 {
        let mut page = offset / PAGE;
        while self.pages.contains_key(&page) {
            page += 1;
        }
        offset.max(page * PAGE).min(size)
    }
}
