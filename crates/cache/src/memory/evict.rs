//! Eviction within the memory budget: whole directories, least recently used first.

use crate::facts::{forgetting, leases};
use crate::kernel::{NotifyLevel, OnInvalidated};
use crate::op::KernelInvalidation;
use crate::ops::{names_only, prefetch_use};
use crate::out::{invalidate, pins};
use crate::state::State;
use crate::view;
use nigh_types::{NodeId, Time};
use std::collections::BTreeSet;

/// Share of the budget by which memory grows before the next try to free what could not be freed.
const TRIM_STEP: u64 = 64;

/// Evicts directories until the budget is kept, with a second chance for those used since last time. Directories
/// that are being read stay, so up to twice the budget may be in use; beyond that only the one read last stays.
pub(crate) fn trim(state: &mut State, now: Time) {
    let budget = state.config.budget_bytes;
    if state.bytes() <= budget.max(state.trim_above) && !state.has_too_many_dirs() {
        return;
    }
    let reading = view::being_read(state);
    trim_prefetched(state, now, budget, &reading);
    evict_while(state, now, &reading, |cache| cache.exceeds(budget));
    if state.exceeds_bytes(budget.saturating_mul(2)) {
        let last_read = BTreeSet::from([state.open.dirs.last_read()]);
        evict_while(state, now, &last_read, |cache| cache.exceeds(budget));
    }
    if state.bytes() > budget {
        state.open.dirs.drop_snapshots();
        names_only::drop_name_streams(state, now);
    }
    let left = state.bytes();
    state.trim_above = if left > budget { left.saturating_add(budget / TRIM_STEP) } else { 0 };
}

/// Evicts prefetched directories that a walk has left behind, before all others.
fn trim_prefetched(state: &mut State, now: Time, budget: u64, spared: &BTreeSet<u64>) {
    let mut turns = state.prefetch.arrived();
    while state.exceeds(budget) && turns > 0 {
        turns -= 1;
        let Some(ino) = state.prefetch.pop_arrived() else { return };
        let Some(directory) = state.store.dir(ino) else { continue };
        if directory.prefetched_by.is_none() && directory.first_used_at.is_none() {
            continue;
        }
        if directory.listing.is_some() || spared.contains(&ino) {
            state.prefetch.push_arrived(ino);
            continue;
        }
        evict(state, now, directory.id);
    }
}

/// Evicts one directory after another; those used since last time get a second turn.
pub(crate) fn evict_while(
    state: &mut State,
    now: Time,
    spared: &BTreeSet<u64>,
    goes_on: impl Fn(&State) -> bool,
) {
    let mut turns = state.store.evictable() * 2;
    while goes_on(state) && turns > 0 {
        turns -= 1;
        let Some(ino) = state.store.next_to_evict() else { return };
        let Some(directory) = state.store.dir_mut(ino) else { continue };
        let used = std::mem::take(&mut directory.used);
        if used || directory.listing.is_some() || spared.contains(&ino) {
            state.store.evict_later(ino);
            continue;
        }
        let id = directory.id;
        evict(state, now, id);
    }
}

/// Invalidates dentries under grants without a deadline. The kernel's timeouts end the others; without their record
/// no code would invalidate these at the end of the session.
fn drop_dentries(state: &mut State, node: NodeId) {
    let Some(directory) = state.store.dir(node.ino).filter(|_| state.kernel.level() == NotifyLevel::NoEpoch)
    else {
        return;
    };
    let for_ever = directory.dentry_leases.names_without_deadline();
    let stale: Vec<KernelInvalidation> =
        for_ever.map(|name| KernelInvalidation::Entry { dir: node.ino, name: name.clone() }).collect();
    if !stale.is_empty() {
        invalidate::invalidate(state, stale, None);
    }
}

pub(crate) fn evict(state: &mut State, now: Time, node: NodeId) {
    state.counters.evictions += 1;
    tracing::debug!(target: "nigh::evict", ino = node.ino);
    let held = state.store.dir(node.ino).and_then(|d| d.held).filter(|h| h.is_live(now));
    // Under a deadline the kernel's timeouts end by themselves; else it must be invalidated first.
    pins::pin_open_below(state, node.ino);
    if let Some(held) = held.filter(|h| h.recallable && !h.stale) {
        leases::note_grant_returned(state, node, held.id);
        let stale = leases::invalidations_under_lease(state, node);
        if state.kernel.can_notify() && !stale.is_empty() {
            invalidate::invalidate(state, stale, Some(OnInvalidated::Return(vec![held.id])));
        } else {
            state.out.push_back(crate::Output::Return(vec![held.id]));
        }
    }
    let children: Vec<u64> = state
        .store
        .dir(node.ino)
        .into_iter()
        .flat_map(|d| {
            let rows = d.rows.iter().filter_map(|row| row.child.map(|c| c.id.ino));
            rows.chain(d.dentry_leases.inodes().map(|id| id.ino))
        })
        .collect();
    if let Some((call, cost)) = state.store.dir_mut(node.ino).and_then(|d| d.prefetched_by.take()) {
        prefetch_use::count_wasted(state, call, cost);
    }
    drop_dentries(state, node);
    leases::drop_dir_names(state, node.ino);
    state.store.remove_dir(node.ino);
    for ino in children {
        let Some(inode) = state.store.inode_mut(ino) else { continue };
        if !inode.kernel.is_known() && inode.drop_own_attr() {
            forgetting::drop_if_idle(state, ino);
        }
    }
}
