//! Write-back of shared mappings (docs/decisions/0008, rule 12, and 0028).

use super::open::DataFile;
use super::write_tracking::TrackedWrite;
use super::{Context, Outcome};
use crate::os::error::{Fault, Result};
use nigh_lease::{MergeBase, WroteBack};
use nigh_types::{Errno, NodeId, Reply, WriteBackPrecondition};

/// Write-back of a range of pages, from reading the file's present data until the write. No other change of the file
/// intervenes.
pub(super) struct WriteBack {
    /// The file's data before the write, if needed and readable.
    before: Option<Vec<u8>>,
    /// Merged data to write; `None` to write the pages as they are.
    merged: Option<Vec<u8>>,
}

impl WriteBack {
    /// Returns `None` if another client has changed the file since the pages were read, and the pages cannot be
    /// merged.
    pub(super) fn begin(
        cx: Context<'_>,
        change: &TrackedWrite<'_>,
        (node, file): (NodeId, &DataFile),
        since: Option<WriteBackPrecondition>,
        (offset, pages): (u64, &[u8]),
    ) -> Result<Option<WriteBack>> {
        let range = (offset, pages.len() as u64);
        let Some(base) = base(cx, change, since, range)? else { return Ok(None) };
        let needed = !base.is_empty() || cx.call_leases.may_need_merge();
        let before = if needed { current_data(cx, node, file, range)? } else { None };
        // A kernel writes no page beyond its known end of the file.
        let before = before.map(|mut before| {
            before.resize(pages.len(), 0);
            before
        });
        let merged = match &before {
            Some(before) if !base.is_empty() => Some(base.merge(offset, pages, before)),
            None if !base.is_empty() => return Ok(None),
            _ => None,
        };
        Ok(Some(WriteBack { before, merged }))
    }

    /// The data to write for these pages.
    pub(super) fn bytes<'d>(&'d self, pages: &'d [u8]) -> &'d [u8] {
        self.merged.as_deref().unwrap_or(pages)
    }

    /// Records that `count` bytes were written.
    pub(super) fn end(self, cx: Context<'_>, (offset, pages): (u64, &[u8]), count: u64) {
        let is_known = self.before.is_some() || count == 0;
        // Without a record the data counts as changed; but an attempt that failed for lack of space may have recorded
        // it as unchanged.
        if !is_known && !cx.call_leases.has_written_back() {
            return;
        }
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(pages.len());
        let before = self.before.as_deref().unwrap_or_default();
        let before = is_known.then(|| &before[..count.min(before.len())]);
        let written = &self.bytes(pages)[..count];
        cx.call_leases.wrote_back(WroteBack { offset, before, pages: &pages[..count], written });
    }
}

/// Returns how to merge the pages. The change has begun, so no other session changes the file now.
fn base(
    cx: Context<'_>,
    change: &TrackedWrite<'_>,
    since: Option<WriteBackPrecondition>,
    range: (u64, u64),
) -> Result<Option<MergeBase>> {
    let Some(since) = since else { return Ok(Some(MergeBase::default())) };
    if let Some(base) = since.under.and_then(|under| cx.call_leases.merge_base(under, range)) {
        if base.is_unchanged() {
            change.note_vouched_since(since.stamp);
        }
        return Ok(Some(base));
    }
    Ok(change.is_unchanged_by_others(since.stamp)?.then(MergeBase::default))
}

/// Handles write-back to a file that another client has changed. If the file holds these bytes already, they may come
/// from an earlier attempt whose reply was lost, and the call succeeds. The reply carries no attributes: the writer
/// must not take the other change for its own.
pub(super) fn after_conflict(
    cx: Context<'_>,
    node: NodeId,
    file: &DataFile,
    offset: u64,
    pages: &[u8],
) -> Result<Outcome> {
    // No data is changed.
    cx.call_leases.wrote_back(WroteBack { offset, before: Some(&[]), pages: &[], written: &[] });
    if current_data(cx, node, file, (offset, pages.len() as u64))?.is_none_or(|there| there != pages) {
        return Err(Fault(Errno::CANCELED));
    }
    let grants = Vec::from_iter(cx.call_leases.written(node, file.object()));
    let reply = Reply::Written { offset, count: pages.len() as u64 };
    Ok(Outcome { reply, after: Vec::new(), grants })
}

/// Reads the file's present data in a range (offset, length), up to its end. `None` if the client has the file open
/// only for writing. (A kernel writes back through any writable descriptor.)
fn current_data(
    cx: Context<'_>,
    node: NodeId,
    file: &DataFile,
    (offset, length): (u64, u64),
) -> Result<Option<Vec<u8>>> {
    let readable = cx.files.readable(node);
    let fd = match (&readable, file) {
        (Some(open), _) => &open.fd,
        (None, DataFile::Open(open)) if open.readable => &open.fd,
        (None, _) => return Ok(None),
    };
    let mut there = vec![0_u8; usize::try_from(length).unwrap_or(0)];
    let mut done = 0;
    while done < there.len() {
        let at = offset.checked_add(done as u64).ok_or(Fault(Errno::FBIG))?;
        match rustix::io::pread(fd, &mut there[done..], at) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    there.truncate(done);
    Ok(Some(there))
}
