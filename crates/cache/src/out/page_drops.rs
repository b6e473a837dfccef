//! Pages that the kernel is to drop after a reply: it had them locked, or no grant covers them.

use crate::calls::{InflightCall, PageRange, attr_after};
use crate::op::{InvalidationId, KernelInvalidation};
use crate::out::invalidate;
use crate::state::State;
use nigh_types::{DataVersion, LeaseScope, NodeId, OpId, Response, WriteBackPrecondition};

/// Has the kernel drop the pages that it had locked for requests with replies. They may be stale, and an earlier
/// invalidation may have left them out.
pub(crate) fn drop_after_reply(state: &mut State, ops: &[OpId], pages: Option<PageRange>) {
    drop_pages_after_reply(state, ops, pages);
}

/// Does so, and returns the invalidation.
fn drop_pages_after_reply(
    state: &mut State,
    ops: &[OpId],
    pages: Option<PageRange>,
) -> Option<InvalidationId> {
    let (ino, (offset, length)) = pages.filter(|(_, (_, length))| *length > 0)?;
    if !state.kernel.can_notify() {
        return None;
    }
    let id = invalidate::invalidate(state, vec![KernelInvalidation::Data { ino, offset, length }], None);
    note_drop_after_reply(state, ops, ino, id);
    ungranted_behind(state, (ino, (offset, length)), id);
    Some(id)
}

/// Records the invalidation that drops the pages of answered requests.
pub(crate) fn note_drop_after_reply(state: &mut State, ops: &[OpId], ino: u64, id: InvalidationId) {
    let old = state.store.inode_mut(ino).and_then(|inode| inode.pages_if_any()?.stale_mut());
    old.into_iter().for_each(|old| old.note_drop_after_reply(ops, id));
}

/// Drops the pages of a file (offset, length) that a reply has brought.
pub(crate) fn drop_ungranted(
    state: &mut State,
    flight: &InflightCall,
    (node, range): (NodeId, (u64, u64)),
    response: &Response,
) {
    if let Some(until) = drop_pages_after_reply(state, &flight.waiters, Some((node.ino, range))) {
        note_ungranted(state, (node, range), until, response);
    }
}

/// Records such pages, which `until` drops. A file that is not open for writing has no stores.
pub(crate) fn note_ungranted(
    state: &mut State,
    (node, range): (NodeId, (u64, u64)),
    until: InvalidationId,
    response: &Response,
) {
    let Some(attr) = attr_after(response, node.ino) else { return };
    if !state.store.inode(node.ino).is_some_and(|inode| inode.id == node && inode.opens().is_written()) {
        return;
    }
    let grant = crate::grants::on(&response.grants, node, LeaseScope::Data).filter(|grant| grant.recallable);
    let under = grant.map(|grant| (grant.id, LeaseScope::Data));
    let since = WriteBackPrecondition { stamp: DataVersion::of(&attr), under };
    state.ungranted.add(node, range, since, until);
    state.kernel.note_page_drop(until, node.ino);
}

/// Records that `until` drops the pages that a request had locked until its reply.
fn ungranted_behind(state: &mut State, (ino, range): (u64, (u64, u64)), until: InvalidationId) {
    if state.ungranted.drop_with((ino, range), until) {
        state.kernel.note_page_drop(until, ino);
    }
}
