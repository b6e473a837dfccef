//! Invalidations of the kernel, and timers for the ends of its timeouts.

use crate::calls::{CallKind, InflightCall};
use crate::kernel::{OnInvalidated, UntimedCopy};
use crate::op::{InvalidationId, KernelInvalidation, Output, Urgency};
use crate::out::queue;
use crate::state::State;
use crate::store::Inode;
use nigh_types::{Reply, Response, Span, Time};
use std::collections::BTreeSet;

/// Time before its end at which a data grant on an open file is renewed.
pub(crate) const RENEW_BEFORE: Span = Span::from_millis(1_000);

/// Invalidates the effects of a change whose caller was killed meanwhile: the kernel believes that it did not
/// happen.
pub(crate) fn invalidate_abandoned(state: &mut State, flight: &InflightCall, response: &Response) {
    if response.result.is_err() || !state.kernel.can_notify() {
        return;
    }
    let names = flight.purpose.names().into_iter();
    let entries = names.flat_map(|(dir, name)| {
        let listing = KernelInvalidation::Data { ino: dir, offset: 0, length: 0 };
        [KernelInvalidation::Entry { dir, name: name.clone() }, listing]
    });
    let touched = response.after.iter().map(|(id, _)| KernelInvalidation::Attr { ino: id.ino });
    let mut stale: Vec<KernelInvalidation> = entries.chain(touched).collect();
    match &response.result {
        Ok(Reply::Attr(id, _)) => stale.push(KernelInvalidation::Attr { ino: id.ino }),
        // A further name of an inode that the kernel knows.
        Ok(Reply::Created { entry, .. }) if state.store.has_inode(entry.id.ino) => {
            stale.push(KernelInvalidation::Attr { ino: entry.id.ino });
        }
        _ => {}
    }
    if let CallKind::Write { ino, .. } = flight.purpose {
        stale.push(KernelInvalidation::Data { ino, offset: 0, length: 0 });
    }
    invalidate(state, stale, None);
}

/// Clears timeouts of facts that the kernel is about to drop.
fn clear_timeouts(state: &mut State, stale: &KernelInvalidation) {
    if let KernelInvalidation::Data { ino, length: 0, .. } | KernelInvalidation::Attr { ino } = stale
        && let Some(inode) = state.store.inode_mut(*ino)
    {
        inode.kernel.note_copies_dropped(matches!(stale, KernelInvalidation::Data { .. }));
    }
    let ino = match stale {
        KernelInvalidation::Attr { ino } => Some(*ino),
        KernelInvalidation::Entry { dir, name } | KernelInvalidation::RemovedDentry { dir, name } => {
            state.store.child(*dir, name).map(|child| child.id.ino)
        }
        KernelInvalidation::AllDentries(_) => {
            state.counters.epoch_planned += 1;
            None
        }
        KernelInvalidation::Data { .. } => None,
    };
    if let Some(inode) = ino.and_then(|ino| state.store.inode_mut(ino)) {
        inode.kernel.end_attr_timeout();
    }
}

/// Invalidates the kernel, then does `then`.
pub(crate) fn invalidate(
    state: &mut State,
    mut stale: Vec<KernelInvalidation>,
    then: Option<crate::kernel::OnInvalidated>,
) -> InvalidationId {
    drop_untrusted(state, &mut stale);
    send_invalidation(state, stale, then)
}

fn send_invalidation(
    state: &mut State,
    stale: Vec<KernelInvalidation>,
    then: Option<crate::kernel::OnInvalidated>,
) -> InvalidationId {
    for one in &stale {
        clear_timeouts(state, one);
    }
    let (id, acknowledged) = (state.kernel.new_invalidation(), then.is_some());
    if let Some(then) = then {
        state.kernel.then(id, then);
    }
    let is_tracked = |i: &Inode| i.pages().has_data_version() || state.ungranted.has_any(i.id.ino);
    let tracked = |ino: &u64| state.store.inode(*ino).is_some_and(&is_tracked);
    let dropping = stale.iter().filter_map(|one| match one {
        KernelInvalidation::Data { ino, offset, length } if tracked(ino) => {
            Some((*ino, (*offset, *length) == (0, 0)))
        }
        _ => None,
    });
    let dropping: Vec<(u64, bool)> = dropping.collect();
    for (ino, _) in dropping.iter().filter(|(_, all)| *all) {
        let pages = state.store.inode_mut(*ino).and_then(|inode| inode.pages_if_any());
        pages.into_iter().for_each(|pages| pages.note_full_drop_sent(id));
    }
    state.kernel.note_page_drops(id, dropping);
    queue::enqueue_invalidation(state, id, stale, acknowledged);
    id
}

/// Invalidates before all queued invalidations. This leaves out pages that wait for the remote, so stale pages stay
/// so until the invalidation after reconnection (`drop_stale_pages`).
pub(crate) fn invalidate_first(
    state: &mut State,
    stale: Vec<KernelInvalidation>,
    urgency: Urgency,
) -> InvalidationId {
    for one in &stale {
        clear_timeouts(state, one);
    }
    let id = state.kernel.new_invalidation();
    state.out.push_back(Output::Invalidate { id, stale, urgency });
    id
}

/// Drops invalidations of attributes that the kernel does not trust and has not received since the last
/// invalidation. Such an invalidation would only make the kernel discard its next reply.
pub(crate) fn drop_untrusted(state: &mut State, stale: &mut Vec<KernelInvalidation>) {
    with_targets(state, stale);
    stale.retain(|one| match one {
        // The kernel keeps the set-user-ID bits of its last reply until the notifier has invalidated the
        // attributes.
        KernelInvalidation::Attr { ino } => {
            state.store.inode_mut(*ino).is_none_or(|inode| inode.kernel.note_attr_invalidated())
        }
        _ => true,
    });
}

/// Drops all stale pages: with an active session, write-back no longer blocks.
pub(crate) fn drop_stale_pages(state: &mut State) {
    let is_old = |ino: &u64| state.store.inode(*ino).is_some_and(|inode| inode.pages().has_stale());
    let open: BTreeSet<u64> = state.open.files.values().map(|file| file.ino).filter(is_old).collect();
    if state.kernel.can_notify() {
        for ino in open {
            invalidate(state, vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }], None);
        }
    }
}

/// Invalidates the kernel, then acts.
pub(crate) fn invalidate_then(state: &mut State, mut stale: Vec<KernelInvalidation>, then: OnInvalidated) {
    drop_untrusted(state, &mut stale);
    // The kernel may still be dropping facts of an earlier recall or discard: the action follows those.
    let nothing = stale.is_empty() && !state.kernel.has_pending();
    if nothing || !state.kernel.can_notify() {
        complete(state, then);
    } else {
        send_invalidation(state, stale, Some(then));
    }
}

pub(crate) fn complete(state: &mut State, then: OnInvalidated) {
    state.out.push_back(match then {
        OnInvalidated::Acknowledge(recall) => Output::Acknowledge(recall),
        OnInvalidated::Return(grants) => Output::Return(grants),
    });
}

/// Sets timers for the end of a grant on something that the kernel holds open.
pub(crate) fn set_timers(state: &mut State, deadline: Time, ino: u64) {
    if deadline != Time::FAR {
        // Not at once, or a grant for so short a time would be renewed without end.
        let half = Span(deadline.since(state.clock).0 / 2);
        let soon = Time(deadline.0.saturating_sub(RENEW_BEFORE.0)).max(state.clock.after(half));
        state.kernel.add_timer(soon, ino);
        state.kernel.add_timer(deadline, ino);
    }
}

/// Sets timers for the end of a data grant. Replies move that end: it is checked again when it would have come.
pub(crate) fn set_data_timers(state: &mut State, ino: u64) {
    let pages = state.store.inode_mut(ino).and_then(|inode| inode.pages_if_any());
    if let Some(deadline) = pages.and_then(|pages| pages.begin_timer()) {
        set_timers(state, deadline, ino);
    }
}

pub(crate) fn end_copies_at(state: &mut State, deadline: Time, ino: u64) {
    if deadline != Time::FAR {
        state.kernel.add_timer(deadline, ino);
    }
}

/// Returns the invalidation of a kernel copy whose grant has ended by its deadline.
pub(crate) fn ended_copies(state: &State, ino: u64) -> Option<KernelInvalidation> {
    let inode = state.store.inode(ino)?;
    if inode.kernel.has_copy(UntimedCopy::Target) {
        return Some(KernelInvalidation::Data { ino, offset: 0, length: 0 });
    }
    inode.kernel.has_copy(UntimedCopy::Acls).then_some(KernelInvalidation::Attr { ino })
}

/// Adds the target's page to an attribute invalidation of a symlink, if the kernel has the target.
fn with_targets(state: &State, stale: &mut Vec<KernelInvalidation>) {
    let has_target =
        |ino: &u64| state.store.inode(*ino).is_some_and(|inode| inode.kernel.has_copy(UntimedCopy::Target));
    let pages = stale.iter().filter_map(|one| match one {
        KernelInvalidation::Attr { ino } if has_target(ino) => {
            Some(KernelInvalidation::Data { ino: *ino, offset: 0, length: 0 })
        }
        _ => None,
    });
    let pages: Vec<KernelInvalidation> = pages.collect();
    stale.extend(pages);
}
