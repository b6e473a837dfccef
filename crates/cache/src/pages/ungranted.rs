//! Pages of replies without a valid grant: the reply carried none, or a recall has passed it.
//!
//! The kernel drops such pages right after the reply. In between a process may store into them through an mmap, and the
//! kernel writes them back. That write-back names the data version of the pages, and the grant under which the remote
//! read them if the reply had one. So it does not undo what another client has stored since
//! (docs/decisions/0028-merging-write-back.md).

use crate::byte_ranges::pages_overlap;
use crate::op::InvalidationId;
use nigh_types::{NodeId, WriteBackPrecondition};
use std::collections::BTreeMap;

/// Pages of one reply, until the kernel has dropped them.
#[derive(Clone, Debug)]
struct Ungranted {
    node: NodeId,
    range: (u64, u64),
    since: WriteBackPrecondition,
    /// The invalidation that drops the pages: at the time of the reply, and now.
    first: InvalidationId,
    until: InvalidationId,
    /// Last invalidation that left them out, because a local write had them locked. They are dropped after its reply.
    left_out: Option<InvalidationId>,
}

/// Such pages of all files.
#[derive(Clone, Debug, Default)]
pub(crate) struct UngrantedPages {
    of: BTreeMap<u64, Vec<Ungranted>>,
}

impl UngrantedPages {
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    pub fn has_any(&self, ino: u64) -> bool {
        self.of.contains_key(&ino)
    }

    /// Records pages (offset, length) of a reply, which `until` drops.
    pub fn add(
        &mut self,
        node: NodeId,
        range: (u64, u64),
        since: WriteBackPrecondition,
        until: InvalidationId,
    ) {
        let pages = Ungranted { node, range, since, first: until, until, left_out: None };
        self.of.entry(node.ino).or_default().push(pages);
    }

    /// Returns the data versions of such pages that the kernel may have in a range of a file.
    pub fn versions_in(
        &self,
        node: NodeId,
        range: (u64, u64),
    ) -> impl Iterator<Item = WriteBackPrecondition> + '_ {
        let of_file = self.of.get(&node.ino).into_iter().flatten();
        of_file
            .filter(move |pages| pages.node == node && pages_overlap(pages.range, range))
            .map(|pages| pages.since)
    }

    /// Records an invalidation of a range of a file (length 0: to the end), which leaves out pages that local writes
    /// have locked (`written`).
    pub fn leave_out(
        &mut self,
        why: InvalidationId,
        ino: u64,
        (offset, length): (u64, u64),
        written: &[(u64, u64)],
    ) {
        let range = (offset, if length == 0 { u64::MAX - offset } else { length });
        let of_file = self.of.get_mut(&ino).into_iter().flatten();
        for pages in of_file.filter(|pages| pages_overlap(pages.range, range)) {
            if written.iter().any(|written| pages_overlap(*written, pages.range)) {
                pages.left_out = Some(why);
            }
        }
    }

    /// Handles a done invalidation, of `all` pages of a file or of some. Later replies have brought other pages.
    pub fn dropped(&mut self, id: InvalidationId, ino: u64, all: bool) {
        let Some(of_file) = self.of.get_mut(&ino) else { return };
        of_file.retain(|pages| {
            let goes = pages.until == id || all && pages.first < id;
            !goes || pages.left_out == Some(id)
        });
        if of_file.is_empty() {
            self.of.remove(&ino);
        }
    }

    /// Records that `until` drops the pages that a request had locked until its reply. Returns whether there are any.
    pub fn drop_with(&mut self, (ino, range): (u64, (u64, u64)), until: InvalidationId) -> bool {
        let of_file = self.of.get_mut(&ino).into_iter().flatten();
        let mut is_any = false;
        let waits = |pages: &&mut Ungranted| pages.left_out.is_some_and(|last| last >= pages.until);
        for pages in of_file.filter(waits).filter(|pages| pages_overlap(pages.range, range)) {
            (pages.until, is_any) = (until, true);
        }
        is_any
    }

    /// Forgets the pages of a file: it is no longer open for writing.
    pub fn forget(&mut self, ino: u64) {
        self.of.remove(&ino);
    }

    /// Removes grants from the records: they ended with the session, and another session may give others with the same
    /// ids.
    pub fn end_grants(&mut self) {
        self.of.values_mut().flatten().for_each(|pages| pages.since.under = None);
    }
}
