//! Write-back of mmap stores, at a time that the kernel chooses (docs/decisions/0008-leases.md, rule 12).
//!
//! A page with an mmap store also holds the bytes that were there when the page was read. It must not overwrite what
//! another client has written since. While the data grant lives no other client has, and a recall is acknowledged after
//! the pages are gone. A grant that ends otherwise (deadline, end of session) leaves pages behind: the file has *stale
//! pages* until the kernel has dropped all pages.
//!
//! Each write-back therefore carries a precondition ([`WriteBackPrecondition`]): the data version of its pages. The
//! remote writes only if no other client has changed that version. The version follows from the grant:
//!
//! ```text
//!                   a grant lives: the latest version in a reply
//!   base (none) ──────────────────────────────────────────▶ base ── dropped for a recall ──▶ base (none)
//!                                                            │ the grant ends otherwise
//!                                                            ▼
//!                                                    old: the version then ── all pages dropped ──▶ not old
//! ```
//!
//! Reads and writes while a file has stale pages begin another page base beside them. Pages of replies without a grant
//! have a version of their own (`ungranted.rs`). An invalidation of all pages leaves out the pages that local requests
//! have locked. These are dropped after the replies: of requests in flight at that moment, not of later ones, or the
//! stale state would never end.

use crate::calls::{InflightCall, attr_after};
use crate::facts::inodes;
use crate::grants::LiveGrant;
use crate::op::{InvalidationId, Output};
use crate::page_cache::ranges;
use crate::pages::StalePages;
use crate::state::State;
use crate::view::paths;
use nigh_types::{
    Attr, CallId, DataVersion, Errno, LeaseScope, NodeId, OpId, Response, Time, WriteBackPrecondition,
};
use std::collections::BTreeSet;

/// Records the data version of a file under a live grant, from the reply to that call or from the cache.
pub(crate) fn note_page_base(
    state: &mut State,
    now: Time,
    flight: Option<&InflightCall>,
    ino: u64,
    stamp: DataVersion,
) {
    if !state.kernel.can_notify() {
        return;
    }
    let Some(inode) = state.store.inode_mut(ino) else { return };
    let grant = inode.pages().live_grant(now);
    let Some(held) = grant.filter(|h| h.recallable && !h.stale) else { return };
    let (node, covers) = held.on;
    if flight.is_some_and(|flight| flight.recalled(node, covers)) {
        return;
    }
    // Replies to local changes came after the call was sent. The reply to a concurrent change may be the last; no
    // other reply is newer.
    let crossed = flight.is_none_or(|flight| flight.race_log.local_inodes.contains(&ino));
    let is_own = flight.is_some_and(|flight| flight.is_mutation());
    inode.pages_mut().note_base(stamp, (held.id, covers), crossed, is_own);
}

/// Records the data version in a reply to a write or a read.
pub(crate) fn note_page_base_after(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    ino: u64,
    response: &Response,
) {
    if let Some(attr) = attr_after(response, ino) {
        note_page_base(state, now, Some(flight), ino, DataVersion::of(&attr));
    }
}

/// Returns the precondition of a write-back (offset, length): the oldest version of which the kernel may have pages
/// there. `EIO`: another client has written the file since.
pub(crate) fn writeback_precondition(
    state: &State,
    ino: u64,
    range: (u64, u64),
) -> Result<Option<WriteBackPrecondition>, Errno> {
    let Some(inode) = state.store.inode(ino) else { return Ok(None) };
    let ungranted: Vec<WriteBackPrecondition> = state.ungranted.versions_in(inode.id, range).collect();
    let kept = inode.pages().precondition()?;
    // A file's times may be set back; grant ids on a file ascend.
    let grant = |since: &WriteBackPrecondition| since.under.map(|(grant, _)| grant);
    let before = |since: &&WriteBackPrecondition| {
        grant(since) < kept.as_ref().and_then(grant) && grant(since).is_some()
    };
    if let Some(earlier) = ungranted.iter().filter(before).min_by_key(|since| grant(since)) {
        return Ok(Some(*earlier));
    }
    Ok(kept.into_iter().chain(ungranted).min_by_key(|since| since.stamp.mtime.pair()))
}

/// Handles a done invalidation of pages, of `all` pages or of some. Pages locked by local requests were left out.
pub(crate) fn on_pages_dropped(state: &mut State, id: InvalidationId, ino: u64, all: bool) {
    state.ungranted.dropped(id, ino, all);
    let left_out = if all { requests_with_locked_pages(state, ino) } else { BTreeSet::new() };
    let kernel = &state.kernel;
    if let Some(pages) = state.store.inode_mut(ino).and_then(|inode| inode.pages_if_any()) {
        pages.note_dropped(id, all, left_out, |drop| kernel.is_pending(drop));
    }
}

/// Returns the requests that have pages locked which the kernel was to drop.
fn requests_with_locked_pages(state: &State, ino: u64) -> BTreeSet<OpId> {
    let locks = |(_, length): (u64, u64)| length > 0;
    let out = state.calls.values().filter(|flight| flight.drop_data);
    let out = out.filter(|flight| flight.purpose.locks_pages(ino, false).is_some_and(locks));
    let parked = ranges::queued_pages(state, ino, false).filter(|(_, range)| locks(*range)).map(|(op, _)| op);
    out.flat_map(|flight| flight.waiters.iter().copied()).chain(parked).collect()
}

/// Keeps the pages of a file that was reopened in a new session, if they are under a grant of that session, and no
/// other client could change the file meanwhile or none did.
pub(crate) fn keep_pages_in_new_session(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (id, attr): (NodeId, &Attr),
    response: &Response,
) {
    let granted = flight.granted(&response.grants, id, LeaseScope::Data);
    let Some(grant) = granted.filter(|grant| LiveGrant::begin(grant, flight.sent).is_live(now)) else {
        return;
    };
    if let Some(pages) = inodes::record(state, id).pages_if_any() {
        pages.keep_in_new_session(DataVersion::of(attr), grant.id);
    }
}

/// Queues write-backs of a lost session for the next one, with a precondition computed then.
pub(crate) fn requeue_writebacks(state: &mut State) {
    // The server forgot with the session which versions are local writes.
    let old = state.store.inodes_mut().filter_map(|inode| inode.pages_if_any()?.stale_mut());
    old.for_each(StalePages::forget_write_backs);
    let flushes = state.calls.iter().filter(|(_, flight)| flight.purpose.is_writeback());
    let calls: Vec<CallId> = flushes.map(|(call, _)| call).collect();
    for call in calls {
        let Some(flight) = state.calls.remove(call) else { continue };
        if let Some(sequence) = flight.sequence {
            state.calls.finish_mutation(sequence);
        }
        state.out.push_back(Output::Cancel(call));
        let waiting = flight.waiters.first().and_then(|op| Some((*op, state.calls.remove_waiter(*op)?)));
        if let (Some((op, waiting)), Some(what)) = (waiting, flight.writeback_op) {
            state.calls.queue(op, waiting.caller, *what);
        }
    }
}

/// Records the data version after a write-back.
pub(crate) fn on_writeback_reply(state: &mut State, ino: u64, response: &Response) {
    let old = state.store.inode_mut(ino).and_then(|inode| inode.pages_if_any()?.stale_mut());
    if let (Some(old), Some(attr)) = (old, attr_after(response, ino)) {
        old.note_write_back(DataVersion::of(&attr));
    }
}

/// Fails write-back: the remote refused it because another client has changed the file.
pub(crate) fn fail_writeback(state: &mut State, ino: u64) {
    let old = state.store.inode_mut(ino).and_then(|inode| inode.pages_if_any()?.stale_mut());
    if !old.is_some_and(StalePages::note_overwritten) {
        let path = paths::shown_path(state, ino);
        tracing::error!(
            target: "nigh::stores",
            path,
            "stores into a map are lost: another client, or the server's own disk, changed the file before they were written back"
        );
    }
}

#[cfg(test)]
mod tests;
