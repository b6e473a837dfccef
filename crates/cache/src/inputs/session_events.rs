//! Begin, lapse, loss and restoration of the session: what ends with it, what waits, and which replies are given
//! meanwhile.

use crate::config::{OnDisconnect, Prefetch};
use crate::facts::{flush, inodes, leases};
use crate::inputs::reclaim;
use crate::op::OpReply;
use crate::ops::{aborting, locks, prefetching, restart};
use crate::out::{page_drops, pins, replies, sending};
use crate::page_cache::writeback;
use crate::session::SessionState;
use crate::state::State;
use nigh_types::{Errno, SessionParams, Time};

/// Ends all grants: the term has run out. Calls in flight stay in flight.
pub(crate) fn handle_lapsed(state: &mut State, now: Time, why: &str) {
    if state.session.is_attached() {
        prefetching::cancel_all_jobs(state, now);
        tracing::warn!(target: "nigh::session", why, "the server is away for longer than its term");
        flush::on_grants_ended(state);
        leave_active(state, now, SessionState::Expired);
    }
}

/// Ends the session: no call in flight gets a reply.
pub(crate) fn handle_lost(state: &mut State, now: Time, why: &str) {
    tracing::warn!(target: "nigh::session", why, "the session is lost");
    let stood = state.session.is_attached();
    state.calls.ids().into_iter().for_each(|call| aborting::log_unknown_outcome(state, call));
    let mut left_out = Vec::new();
    for flight in state.calls.take_all() {
        let pages = flight.purpose.pages().filter(|_| flight.drop_data);
        if let Some(sequence) = flight.sequence {
            state.calls.finish_mutation(sequence);
        }
        let answer = if flight.purpose.releases_locks() { OpReply::Done } else { OpReply::Failed(Errno::IO) };
        replies::reply_all(state, &flight.waiters, &answer);
        left_out.push((flight.waiters, pages));
    }
    state.session.take_deferred();
    state.prefetch.forget();
    state.contents.forget_calls();
    state.open.names.forget();
    state.store.dirs_mut().for_each(|directory| directory.listing = None);
    state.open.locks.mark_all_lost();
    state.open.locks.forget_calls();
    forget_session(state);
    if stood {
        flush::on_grants_ended(state);
        leave_active(state, now, SessionState::Lost);
    } else {
        state.session.lose();
    }
    left_out.into_iter().for_each(|(ops, pages)| page_drops::drop_after_reply(state, &ops, pages));
}

/// Drops messages to a session that is forgotten: they mean nothing to another one.
fn forget_session(state: &mut State) {
    state.kernel.forget_actions();
    state.session.forget();
    state.open.locks.forget_unwanted();
}

fn leave_active(state: &mut State, now: Time, to: SessionState) {
    let stale = state.config.on_disconnect == OnDisconnect::Stale;
    if !stale {
        // Handles released by this are released as in an active session.
        flush::flush_all(state, false);
    }
    state.session.leave(to);
    locks::end_signalled_waits(state);
    if !stale {
        return;
    }
    leases::mark_facts_stale(state);
    state.calls.waiting_ops().into_iter().for_each(|op| aborting::abort(state, op, Errno::IO));
    for (op, (caller, what)) in state.calls.take_queued() {
        let pages = what.pages();
        if let Some(answer) = restart::start_disconnected(state, now, op, caller, what) {
            replies::reply(state, op, answer);
            page_drops::drop_after_reply(state, &[op], pages);
        }
    }
}

/// Handles a new session. Without `kept` it knows no open file and no lock.
pub(crate) fn handle_session(state: &mut State, now: Time, session: SessionParams, kept: bool) {
    match state.session.state() {
        SessionState::Active | SessionState::Reclaiming => {
            prefetching::cancel_all_jobs(state, now);
            flush::on_grants_ended(state);
            flush::flush_all(state, !kept);
        }
        // Drops facts that were served after their grants had ended.
        SessionState::Expired | SessionState::Lost if state.config.on_disconnect == OnDisconnect::Stale => {
            flush::flush_all(state, false);
        }
        _ => {}
    }
    let first = state.session.state() == SessionState::Connecting;
    let same = first
        || (state.store.key() == session.cookie_key
            && state.store.id_of(state.store.root()) == Some(session.root));
    state.session.begin_reclaiming();
    if !kept {
        forget_session(state);
        reclaim::forget_reclaims(state);
        writeback::requeue_writebacks(state);
    }
    if !same {
        reclaim::on_export_replaced(state);
    }
    apply_session_params(state, session);
    if kept {
        let unreleased = state.session.take_unreleased();
        sending::release_handles(state, unreleased);
        pins::pin_open_all(state);
    } else if !first {
        reclaim::reclaim_all(state, now);
    }
    state.session.limit_flush(now, state.is_flushing_all());
    reclaim::finish_reclaim(state, now);
}

/// Prefetches the root's attributes, which callers ask for first, if prefetch is on.
pub(crate) fn prefetch_root(state: &mut State, now: Time) {
    state.clock = now;
    if state.prefetch.is_possible() && state.config.prefetch != Prefetch::Off && state.session.is_attached() {
        let _ = sending::fetch_attr(state, now, state.store.root());
    }
}

fn apply_session_params(state: &mut State, session: SessionParams) {
    if state.store.key() != session.cookie_key {
        // The server lost the secrets from which it makes ids, or is another one: it would take our ids for forged.
        state.store.invalidate_all_ids();
    }
    state.session.apply(&session);
    state.prefetch.set_possible(session.supports.prefetch);
    state.store.set_export(session.root.ino, session.cookie_key);
    inodes::record(state, session.root).kernel.note_root();
}
