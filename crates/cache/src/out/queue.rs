//! Invalidations and replies that must follow an outstanding GETATTR reply (see `kernel/queue.rs`).

use crate::grants::LiveGrant;
use crate::kernel::{DeferredReply, QueuedKind};
use crate::op::{InvalidationId, KernelInvalidation, OpReply, Output, Urgency};
use crate::out::replies;
use crate::state::State;
use crate::view;
use nigh_types::{Attr, Name, NodeId, OpId, Span, Time};

/// Returns the attribute timeout of a reply with these attributes under such a grant.
pub(crate) fn attr_timeout(
    state: &mut State,
    now: Time,
    ino: u64,
    attr: &Attr,
    held: Option<LiveGrant>,
) -> Span {
    let valid = held.map_or(Span::ZERO, |held| state.kernel.level().attr_timeout(&held, now));
    if valid > Span::ZERO
        && let Some(inode) = state.store.inode_mut(ino)
    {
        inode.kernel.note_attr(attr);
    }
    valid
}

/// Queues an invalidation until no caller waits for attributes of its files. Dentries and listings are invalidated
/// at once unless a queued reply may create one, or `acknowledged` requires all of `stale` in one invalidation.
pub(crate) fn enqueue_invalidation(
    state: &mut State,
    id: InvalidationId,
    mut stale: Vec<KernelInvalidation>,
    acknowledged: bool,
) {
    let asked = attr_waiters(state, &stale);
    let waits = !asked.is_empty() || state.kernel.has_queued();
    if waits && !state.kernel.has_queued_replies() {
        let names = stale.iter().filter(|one| is_of_dentries(state, one)).count();
        if names == stale.len() {
            return emit(state, QueuedKind::Invalidate(id, stale));
        }
        if names > 0 && !acknowledged {
            let names = stale.extract_if(.., |one| is_of_dentries(state, one)).collect();
            let id = state.kernel.new_invalidation();
            emit(state, QueuedKind::Invalidate(id, names));
        }
    }
    enqueue(state, QueuedKind::Invalidate(id, stale), asked);
}

fn is_of_dentries(state: &State, stale: &KernelInvalidation) -> bool {
    match stale {
        KernelInvalidation::Entry { .. }
        | KernelInvalidation::RemovedDentry { .. }
        | KernelInvalidation::AllDentries(_) => true,
        KernelInvalidation::Data { ino, .. } => state.store.is_directory(*ino),
        KernelInvalidation::Attr { .. } => false,
    }
}

/// Queues a reply to a local change of `files`, which the kernel treats as newer than any outstanding reply.
pub(crate) fn enqueue_reply(state: &mut State, files: &[u64], ops: &[OpId], late: DeferredReply) {
    flush_due(state);
    let follows = state.kernel.inodes_of_queued_replies().any(|ino| files.contains(&ino));
    let files: Vec<KernelInvalidation> =
        files.iter().map(|ino| KernelInvalidation::Attr { ino: *ino }).collect();
    let asked = attr_waiters(state, &files);
    if ops.is_empty() || asked.is_empty() && !follows {
        return reply_without_older_attr(state, ops, late.answer, late.sent);
    }
    enqueue(state, QueuedKind::Answers(ops.to_vec(), late), asked);
}

/// Records the attributes of a reply: the caller may read up to their size until it applies a newer reply.
pub(crate) fn note_getattr_reply(state: &mut State, ino: u64, attr: Attr) {
    if view::reads_by_size(state, ino)
        && let Some(inode) = state.store.inode_mut(ino)
    {
        inode.opens_mut().note_getattr_reply(state.clock, attr);
    }
}

/// Delivers a reply without ungranted attributes that are older than those of another reply: the caller would read
/// up to the older size. A caller that needs exact attributes asks again.
fn reply_without_older_attr(state: &mut State, ops: &[OpId], mut answer: OpReply, sent: Option<Time>) {
    let (ino, attr, keeps) = match &mut answer {
        OpReply::Node(node) if node.attr_valid == Span::ZERO => (node.id.ino, &mut node.attr, false),
        OpReply::Attr(id, attr, Span::ZERO) => (id.ino, attr, true),
        _ => return replies::reply_all(state, ops, &answer),
    };
    let last = state.store.inode(ino).and_then(|inode| inode.opens().last_getattr());
    if let Some((_, last)) = last.filter(|(at, _)| sent.is_some_and(|sent| sent <= *at)) {
        *attr = if keeps { Attr { size: last.size, ..*attr } } else { *last };
    }
    replies::reply_all(state, ops, &answer);
}

fn enqueue(state: &mut State, what: QueuedKind, asked: Vec<OpId>) {
    if let Some(what) = state.kernel.enqueue(state.clock, what, asked) {
        emit(state, what);
    }
}

fn emit(state: &mut State, what: QueuedKind) {
    match what {
        QueuedKind::Invalidate(id, stale) => {
            state.out.push_back(Output::Invalidate { id, stale, urgency: Urgency::Ordinary })
        }
        QueuedKind::Answers(ops, late) => deliver_late(state, &ops, late),
    }
}

/// Delivers a queued reply with what is left of its entry and attribute timeouts.
pub(crate) fn deliver_late(
    state: &mut State,
    ops: &[OpId],
    DeferredReply { mut answer, sent, name }: DeferredReply,
) {
    match &mut answer {
        OpReply::Node(node) | OpReply::Created(node, _) => {
            node.entry_valid = node.entry_valid.min(remaining_entry_timeout(state, name.as_ref(), node.id));
            node.attr_valid = node.attr_valid.min(remaining_attr_timeout(state, node.id));
        }
        OpReply::Attr(id, _, valid) => *valid = (*valid).min(remaining_attr_timeout(state, *id)),
        _ => {}
    }
    reply_without_older_attr(state, ops, answer, sent);
}

/// Returns the entry timeout of a name that still leads to the inode.
fn remaining_entry_timeout(state: &State, name: Option<&(u64, Name)>, id: NodeId) -> Span {
    let now = state.clock;
    let named = || {
        let (dir, name) = name?;
        if state.changes_frequently(now, *dir)
            || state.watches.is_reporting(*dir)
            || state.store.suspended.has_name(*dir, name)
        {
            return None;
        }
        let directory = state.store.dir(*dir)?;
        let held = directory.held.filter(|held| held.is_live(now))?;
        let row = directory.rows.find(state.store.cookie(name), name.as_bytes())?;
        row.child.filter(|child| child.id == id)?;
        Some(state.kernel.level().entry_timeout(&held, now))
    };
    named().unwrap_or(Span::ZERO)
}

fn remaining_attr_timeout(state: &mut State, id: NodeId) -> Span {
    let Some((attr, held)) = view::cached_attr(state, state.clock, id) else { return Span::ZERO };
    attr_timeout(state, state.clock, id.ino, &attr, Some(held))
}

/// Returns the requests that wait for attributes of open files in `stale`.
fn attr_waiters(state: &State, stale: &[KernelInvalidation]) -> Vec<OpId> {
    if !state.calls.has_attr_calls() {
        return Vec::new();
    }
    let files = stale.iter().filter_map(|one| match one {
        KernelInvalidation::Attr { ino } | KernelInvalidation::Data { ino, .. }
            if view::reads_by_size(state, *ino) =>
        {
            Some(ino)
        }
        _ => None,
    });
    let flights = files.filter_map(|ino| state.calls.inflight(state.calls.attr_call(*ino)?));
    flights.flat_map(|flight| flight.waiters.iter().copied()).collect()
}

/// Returns whether a caller waits for attributes and will read up to the size in the reply.
pub(crate) fn has_size_waiter(state: &State, ino: u64) -> bool {
    !attr_waiters(state, &[KernelInvalidation::Attr { ino }]).is_empty()
}

/// Delivers the queued items that need not wait any longer.
pub(crate) fn flush_due(state: &mut State) {
    while queue_due(state).is_some_and(|due| due <= state.clock)
        && let Some(what) = state.kernel.dequeue()
    {
        emit(state, what);
    }
}

/// Returns when the first queued item is due. No reply is delivered while the kernel still drops what it held when
/// the session was lost.
pub(crate) fn queue_due(state: &State) -> Option<Time> {
    state.kernel.queue_due(state.waits_for_kernel(), |op| state.calls.is_waiting(op))
}

/// Delivers all queued invalidations at once: all grants have ended, so no reply will come.
pub(crate) fn flush_invalidations(state: &mut State) {
    state.kernel.dequeue_invalidations().into_iter().for_each(|item| emit(state, item));
}

#[cfg(test)]
mod tests;
