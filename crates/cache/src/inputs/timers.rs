//! Timeouts, and done invalidations.

use crate::calls::CallKind;
use crate::config::OnDisconnect;
use crate::facts::leases;
use crate::inputs::reclaim;
use crate::kernel::OnInvalidated;
use crate::memory::evict;
use crate::op::{InvalidationId, KernelInvalidation};
use crate::ops::{aborting, locks, restart};
use crate::out::invalidate::RENEW_BEFORE;
use crate::out::{invalidate, pins, sending};
use crate::page_cache::writeback;
use crate::state::State;
use crate::view::{self, paths};
use nigh_types::{Call, Errno, Span, Time};

/// Searches for idle directories within one idle time.
const LOOKS: u64 = 4;

/// Evicts directories that were not used for `--dir-timeout`.
fn evict_idle(state: &mut State, now: Time) {
    let Some(limit) = state.config.dir_timeout.filter(|_| state.idle_due.is_some_and(|due| due <= now))
    else {
        return;
    };
    let spared = view::being_read(state);
    let idle = |ino: u64| {
        let directory = state.store.dir(ino).filter(|d| d.listing.is_none() && !spared.contains(&ino))?;
        (directory.used_at.after(limit) <= now).then_some(directory.id)
    };
    let idle: Vec<_> = state.store.in_eviction_order().filter_map(idle).collect();
    idle.into_iter().for_each(|id| evict::evict(state, now, id));
    state.store.tidy_eviction_order();
    let next = Span(limit.0 / LOOKS).max(Span::from_millis(100));
    state.idle_due = (state.store.evictable() > 0).then(|| now.after(next));
}

/// Handles a done invalidation.
pub(crate) fn handle_invalidated(state: &mut State, now: Time, id: InvalidationId) {
    state.clock = now;
    let (then, dropped) = state.kernel.done(id);
    if let Some(then) = then {
        invalidate::complete(state, then);
    }
    for (ino, all) in dropped {
        state
            .store
            .inode_mut(ino)
            .into_iter()
            .for_each(|inode| inode.pages_mut().full_mut().note_drop_done(id));
        writeback::on_pages_dropped(state, id, ino, all);
    }
    reclaim::finish_reclaim(state, now);
}

pub(crate) fn handle_timeout(state: &mut State, now: Time) {
    state.clock = now;
    for op in state.calls.take_expired(now) {
        match state.config.on_disconnect {
            // The remote replies; a wait for another client's lock goes on.
            OnDisconnect::Fail(span) if locks::waits_for_lock(state, op) => {
                state.calls.begin_deadline(op, now.after(span))
            }
            _ => aborting::abort(state, op, Errno::IO),
        }
    }
    if state.session.give_up_flush(now) {
        tracing::warn!(target: "nigh::kernel", "the kernel is slow to forget what it held when the server went away");
        reclaim::finish_reclaim(state, now);
    }
    give_back_unfinished(state, now);
    evict_idle(state, now);
    let mut copies = Vec::new();
    while let Some(ino) = state.kernel.take_timer(now) {
        copies.extend(invalidate::ended_copies(state, ino));
        on_grant_end(state, now, ino);
    }
    if !copies.is_empty() {
        invalidate::invalidate(state, copies, None);
    }
}

/// Handles the end of a grant on an open inode: renews what may still be true, drops the rest.
fn on_grant_end(state: &mut State, now: Time, ino: u64) {
    pins::pin_open(state, ino);
    let Some(inode) = state.store.inode_mut(ino).filter(|i| i.opens().is_open()) else { return };
    if let Some(held) = inode.pages().grant().copied() {
        if held.is_live(now) {
            if inode.pages().is_timer_due(now) {
                return invalidate::set_data_timers(state, ino);
            }
            // Not if an earlier renewal has moved the end: each renewal would cause two others.
            let soon = held.deadline.since(now) <= RENEW_BEFORE;
            if soon
                && inode.pages().is_of_one_version()
                && let Some(node) = paths::node_ref(state, ino)
            {
                sending::send(state, now, None, CallKind::Revalidate { ino }, Call::GetAttr { node });
            }
            return;
        }
        inode.drop_pages();
        leases::mark_pages_stale(state, ino, false);
        invalidate::invalidate(state, vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }], None);
    }
    leases::live_directory(state, now, ino);
}

/// Gives back directories whose listings have waited for long enough, and lists them anew.
fn give_back_unfinished(state: &mut State, now: Time) {
    while let Some(dir) = state.store.suspended.overdue(now) {
        if let Some((id, held)) = state.store.dir(dir).and_then(|d| Some((d.id, d.held?))) {
            pins::pin_open_below(state, dir);
            leases::note_grant_returned(state, id, held.id);
            let stale = leases::invalidations_under_lease(state, id);
            leases::drop_dir_names(state, dir);
            invalidate::invalidate_then(state, stale, OnInvalidated::Return(vec![held.id]));
        }
        state.store.suspended.give_up(dir);
        restart::resume_listings(state, now, dir);
    }
}
