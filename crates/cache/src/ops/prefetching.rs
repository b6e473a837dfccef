//! Prefetch jobs: directories that the server lists before a caller asks for them (docs/decisions/0019-walks-ahead.md).
//!
//! One call brings many directories. Each of them is a listing with a call id of its own that is never sent, so a
//! caller that needs the listing meanwhile joins it, and all rules for listings hold. The server reads the next
//! directory only after it has sent what came before. So a directory's race log needs only the changes since the reply
//! before the one that begins it.

use crate::calls::{CallKind, InflightCall, RaceLog};
use crate::facts::{forgetting, leases, order};
use crate::op::Output;
use crate::ops::{arrivals, listing_chunks, listings, prefetch_use};
use crate::out::{replies, sending};
use crate::state::State;
use crate::view::paths;
use nigh_types::{
    Attr, Call, CallId, Entries, Errno, Grant, LeaseScope, NodeId, NodeRef, OpId, PrefetchOrder,
    PrefetchedDir, Reply, Response, Time,
};
use rustc_hash::FxHashMap;

/// What a reply carries besides the directories.
struct PrefetchedFacts {
    grants: FxHashMap<NodeId, Vec<Grant>>,
    /// Attributes of the directories themselves, if the remote sends them.
    attrs: FxHashMap<NodeId, Attr>,
}

/// Returns the grants on a directory's names and its own attributes, and on those of its entries that its directory lease
/// does not cover.
fn granted_by(node: NodeId, listed: &Entries, facts: &PrefetchedFacts) -> Vec<Grant> {
    let own = &facts.grants;
    let covers = |grant: &&Grant| match grant.covers {
        LeaseScope::Attributes => facts.attrs.contains_key(&node),
        covers => covers == LeaseScope::Directory,
    };
    let names = own.get(&node).into_iter().flatten().filter(covers);
    let of_entries = listed.entries.iter().filter(|(_, e)| !e.attr.covered_by_parent());
    let of_entries = of_entries.filter_map(|(_, e)| own.get(&e.id)).flatten();
    names.chain(of_entries.filter(|grant| grant.covers == LeaseScope::Attributes)).copied().collect()
}

/// Starts a job at these directories.
pub(crate) fn start_job(
    state: &mut State,
    now: Time,
    order: PrefetchOrder,
    roots: Vec<NodeRef>,
    window: u64,
) -> Option<CallId> {
    cancel_oldest_jobs(state, now);
    let credit = u32::try_from(window).unwrap_or(u32::MAX);
    let dirs: Vec<u64> = roots.iter().map(|place| place.node.ino).collect();
    let call = sending::send(state, now, None, CallKind::Prefetch, Call::Prefetch { roots, order, credit });
    state.calls.inflight(call)?;
    state.counters.ahead_walks += 1;
    state.prefetch.begin(now, call, window, dirs.into_iter());
    Some(call)
}

fn cancel_oldest_jobs(state: &mut State, now: Time) {
    state.prefetch.beyond_limit().into_iter().for_each(|call| cancel_job(state, now, call));
}

pub(crate) fn cancel_job(state: &mut State, now: Time, call: CallId) {
    state.out.push_back(Output::Cancel(call));
    end_job(state, now, call);
}

/// Handles a reply of a job.
pub(crate) fn on_prefetch_reply(
    state: &mut State,
    now: Time,
    call: CallId,
    flight: InflightCall,
    response: Response,
) {
    let Ok(Reply::Prefetched(steps)) = response.result else {
        return end_job(state, now, call);
    };
    if !state.prefetch.is_running(call) {
        // The job was cancelled: nothing of it is kept, but the call stays until its last reply.
        order::refresh_grant_ids(state, &flight, &response.grants);
        return_unused_grants(state, &response.grants);
        if !response.last {
            state.calls.insert(call, flight);
        }
        return;
    }
    let attrs = response.after.into_iter().collect();
    let mut own = PrefetchedFacts { grants: FxHashMap::default(), attrs };
    for grant in response.grants {
        own.grants.entry(grant.node).or_default().push(grant);
    }
    // Listings that begin with this reply need the changes since the reply before; later ones do not.
    state.calls.insert(call, flight);
    for step in steps {
        if state.prefetch.is_running(call) {
            on_prefetched_dir(state, now, call, step, &own);
        } else {
            // An earlier step of this reply cancelled the job.
            return_prefetched_dir(state, call, &step, &own);
        }
    }
    if response.last {
        state.calls.remove(call);
        return end_job(state, now, call);
    }
    if let Some(walk) = state.calls.inflight_mut(call) {
        walk.race_log = RaceLog::default();
    }
    if state.session.prefetches_itself() {
        renew_begin(state, now, call);
    }
    request_awaited(state, now, call);
}

/// Limits in time count from a reply of the session itself: no link lies between the begin of its next calls and the reply.
/// That includes listings that callers wait for.
fn renew_begin(state: &mut State, now: Time, call: CallId) {
    let listings = state.prefetch.listings(call);
    for call in listings.into_iter().chain([call]) {
        if let Some(flight) = state.calls.inflight_mut(call).filter(|flight| !flight.has_chunk) {
            flight.sent = now;
        }
    }
}

fn on_prefetched_dir(
    state: &mut State,
    now: Time,
    walk_call: CallId,
    step: PrefetchedDir,
    own: &PrefetchedFacts,
) {
    let PrefetchedDir { dir: node, listed, last } = step;
    let (dir, cost) = (node.ino, cost_of(listed.as_ref(), last));
    state.prefetch.no_longer_expect(dir);
    let Some(listed) = listed.filter(|_| state.store.id_of(dir) == Some(node)) else {
        let names =
            own.grants.get(&node).into_iter().flatten().filter(|grant| grant.covers == LeaseScope::Directory);
        return_unused_grants(state, &names.copied().collect::<Vec<_>>());
        on_not_prefetched(state, now, walk_call, dir);
        forgetting::drop_if_idle(state, dir);
        return count_dropped(state, (walk_call, dir), cost, last);
    };
    let Some(call) = listings::begin_prefetched_listing(state, walk_call, node) else { return };
    // As for a listing call: a deadline that passed detaches the entries so far, before more come.
    leases::live_directory(state, now, dir);
    let Some(flight) = state.calls.remove(call) else {
        return count_dropped(state, (walk_call, dir), cost, last);
    };
    let below: Vec<u64> =
        listed.entries.iter().filter(|(_, e)| e.attr.is_dir()).map(|(_, e)| e.id.ino).collect();
    let grants = granted_by(node, &listed, own);
    let waited = !flight.waiters.is_empty();
    let after = own.attrs.get(&node).map(|attr| (node, *attr)).into_iter().collect();
    let response = Response { result: Ok(Reply::Listed(listed)), after, grants, last };
    if let Some(flight) = listing_chunks::on_listing_chunk(state, now, call, dir, flight, response) {
        state.calls.insert(call, flight);
    }
    arrivals::after_listing_chunk(state, now, dir);
    for dir in below {
        let known = state.store.dir(dir).is_some_and(|d| d.complete);
        if !known && state.store.has_inode(dir) && state.prefetch.is_running(walk_call) {
            state.prefetch.expect(dir, walk_call);
        }
    }
    count_prefetched(state, now, (walk_call, dir), cost, (waited, last));
}

fn return_prefetched_dir(state: &mut State, walk_call: CallId, step: &PrefetchedDir, own: &PrefetchedFacts) {
    let Some(flight) = state.calls.remove(walk_call) else { return };
    if let Some(listed) = &step.listed {
        let grants = granted_by(step.dir, listed, own);
        order::refresh_grant_ids(state, &flight, &grants);
        return_unused_grants(state, &grants);
    }
    state.calls.insert(walk_call, flight);
}

/// Returns the credit that a part of a directory takes; `last`: the directory is complete. One that is left out takes none.
fn cost_of(listed: Option<&Entries>, last: bool) -> u64 {
    listed.map_or(0, |listed| listed.entries.len() as u64 + u64::from(last))
}

/// Counts a part of a directory that came and is not kept: it has taken credit all the same.
fn count_dropped(state: &mut State, (walk_call, dir): (CallId, u64), cost: u64, last: bool) {
    if count_arrived(state, (walk_call, dir), cost, last) {
        prefetch_use::count_wasted(state, walk_call, cost);
    }
}

/// Counts the credit that a part of a directory has taken. Returns false if the job is not known.
fn count_arrived(state: &mut State, (walk_call, dir): (CallId, u64), cost: u64, last: bool) -> bool {
    let is_known = state.prefetch.count_arrived(walk_call, dir, cost, last);
    state.counters.ahead_fetched += if is_known { cost } else { 0 };
    is_known
}

/// Counts a part of a directory that came; `last`: the directory is complete.
fn count_prefetched(
    state: &mut State,
    now: Time,
    (walk_call, dir): (CallId, u64),
    cost: u64,
    (waited, last): (bool, bool),
) {
    let is_read = waited || state.store.inode(dir).is_some_and(|inode| inode.opens().is_open());
    if !count_arrived(state, (walk_call, dir), cost, last) {
        return;
    }
    let Some(directory) = state.store.dir_mut(dir) else {
        return prefetch_use::count_wasted(state, walk_call, cost);
    };
    let before = directory.prefetched_by.take().map_or(0, |(_, cost)| cost);
    directory.prefetched_by = Some((walk_call, before + cost));
    directory.used &= is_read;
    if last {
        state.prefetch.push_arrived(dir);
        state.prefetch.tidy_arrived(state.store.dir_count(), |dir| state.store.has_dir(dir));
    }
    if is_read && last {
        prefetch_use::use_prefetched(state, now, dir);
    }
}

/// Handles a directory that the server did not list after all: its waiters get a listing call.
fn on_not_prefetched(state: &mut State, now: Time, walk_call: CallId, dir: u64) {
    if let Some(call) = state.prefetch.remove_listing(walk_call, dir) {
        list_unfetched(state, now, dir, call);
    }
}

fn list_unfetched(state: &mut State, now: Time, dir: u64, call: CallId) {
    let Some(flight) = state.calls.remove(call) else { return };
    listings::end_listing(state, call, dir);
    let waiters: Vec<OpId> = flight.waiters.into_iter().filter(|op| state.calls.is_waiting(*op)).collect();
    if !waiters.is_empty() && paths::node_ref(state, dir).is_none() {
        return replies::reply_all(state, &waiters, &crate::op::OpReply::Failed(Errno::STALE));
    }
    listings::relist_for_late_joiners(state, now, dir, waiters);
}

/// Ends a job: nothing more comes of it.
fn end_job(state: &mut State, now: Time, call: CallId) {
    let (listings, unsent) = state.prefetch.end(call);
    for (dir, listing) in listings {
        list_unfetched(state, now, dir, listing);
    }
    unsent.into_iter().for_each(|dir| forgetting::drop_if_idle(state, dir));
    state.prefetch.drop_ended();
}

/// Cancels all jobs: all grants end.
pub(crate) fn cancel_all_jobs(state: &mut State, now: Time) {
    state.prefetch.running().into_iter().for_each(|call| cancel_job(state, now, call));
}

/// Asks a job first for the directories whose listings the cache has begun, and that the last reply did not bring: callers or
/// watches wait for them, or may join them later.
fn request_awaited(state: &mut State, now: Time, walk_call: CallId) {
    let mut listings = state.prefetch.unrequested_listings(walk_call);
    let is_awaited = |call: CallId| state.calls.inflight(call).is_some_and(|flight| !flight.has_chunk);
    listings.retain(|(_, call)| is_awaited(*call));
    for (dir, _) in listings {
        listings::request_directory(state, now, walk_call, dir);
    }
}

/// Returns unused grants. A grant that an earlier reply brought stays: it has the later id by now, and would end
/// with it.
fn return_unused_grants(state: &mut State, grants: &[Grant]) {
    let is_held = |grant: &&Grant| {
        let (id, inode) = (grant.node, state.store.inode(grant.node.ino));
        match grant.covers {
            LeaseScope::Directory => state.store.dir(id.ino).is_some_and(|d| d.id == id && d.held.is_some()),
            LeaseScope::Attributes => inode.is_some_and(|inode| inode.id == id && inode.own_attr().is_some()),
            _ => true,
        }
    };
    let unkept: Vec<&Grant> = grants.iter().filter(|grant| !is_held(grant)).collect();
    for grant in unkept.iter().filter(|grant| grant.covers == LeaseScope::Directory) {
        leases::note_grant_returned(state, grant.node, grant.id);
    }
    if !unkept.is_empty() {
        state.out.push_back(Output::Return(unkept.iter().map(|grant| grant.id).collect()));
    }
}

#[cfg(test)]
mod tests;
