//! Deadlocks between write-backs.
//!
//! A client acknowledges a recall after its kernel has written back the pages stored into through mmap. That write-back
//! waits for acknowledgements of other holders, whose own write-backs may have to come first. So holders can wait in a
//! cycle, over files that share only their directory: the directory lease of each is recalled because the other writes
//! a file back, and each writes back before it acknowledges.
//!
//! Where one file is written, the write-back of the recalled holder goes first (`write_queue.rs`). In a cycle, a write-back
//! goes on once it has waited for a holder for a quarter of `patience`. By then that holder has dropped names and
//! attributes, which are dropped before pages, and only its own write-backs are missing. Before that time the cycle may
//! not be real: only holders are compared, not what was recalled from them, and an acknowledgement may wait for earlier
//! ones.

use super::{recalls, write_queue};
use crate::state::{ChangeState, Due, State};
use crate::types::{ChangeId, Holder, LeaseKey, LeaseReason};
use nigh_types::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};

/// A write-back that waits for an acknowledgement of `owes`.
#[derive(Clone, Copy)]
struct Wait {
    write_back: ChangeId,
    initiator: Holder,
    owes: Holder,
    /// Since when `owes` has owed the latest of these acknowledgements.
    since: Time,
    /// The key at which the write-back is queued behind the change that waits, if it does not wait itself.
    queued_at: Option<LeaseKey>,
}

/// Breaks any cycle in which a write-back waits, directly or transitively, for its own client. Called when a change
/// has begun to wait.
pub(crate) fn break_deadlock(table: &mut State, id: ChangeId) {
    let mut flushes = write_queue::blocked_write_backs(table, id);
    while let Some(flush) = flushes.pop() {
        while let Some(wait) = find_cycle(table, flush) {
            let due = wait.since.after(Span(table.config.patience.0 / 4));
            if table.now < due {
                let armed = &mut table.changes.get_mut(&flush).expect("it waits").part.armed;
                table.timers.arm(armed, Due::WriteBack(flush), (due, LeaseReason::Deadlock));
                break;
            }
            bypass_wait(table, wait);
            flushes.push(wait.write_back);
        }
    }
}

/// Checks a write-back for cycles when its timer fires.
pub(crate) fn handle_write_back_timer(table: &mut State, flush: ChangeId) {
    table.changes.get_mut(&flush).expect("its moment was set").part.armed.fired();
    break_deadlock(table, flush);
}

/// Finds a cycle through this write-back. Returns the longest wait for the write-back's own initiator.
fn find_cycle(table: &State, flush: ChangeId) -> Option<Wait> {
    let change = &table.changes[&flush];
    let maker = change.by?;
    if change.is_ready() || table.accounts.get(&maker).is_none_or(|account| account.owed.is_empty()) {
        return None;
    }
    let waits = waits(table);
    let first = waits.iter().filter(|wait| wait.write_back == flush);
    let mut reached: BTreeSet<Holder> = first.map(|wait| wait.owes).collect();
    loop {
        let before = reached.len();
        let next = waits.iter().filter(|wait| reached.contains(&wait.initiator)).map(|wait| wait.owes);
        let next: Vec<Holder> = next.collect();
        reached.extend(next);
        if reached.len() == before {
            break;
        }
    }
    let last = waits.into_iter().filter(|wait| wait.owes == maker && reached.contains(&wait.initiator));
    last.min_by_key(|wait| wait.since)
}

/// All waits of write-backs, direct and through the write queue.
fn waits(table: &State) -> Vec<Wait> {
    let waiting = || table.changes.iter().filter(|(_, change)| !change.is_ready());
    let mut writers = BTreeMap::<LeaseKey, BTreeMap<Holder, Time>>::new();
    for (_, change) in waiting() {
        if let Some(key) = change.part.writes {
            writers.entry(key).or_default().extend(owing(table, change));
        }
    }
    let mut waits = Vec::new();
    for (flush, change) in waiting().filter(|(_, change)| change.part.is_write_back) {
        let Some(maker) = change.by else { continue };
        let wait = |behind: Option<LeaseKey>| {
            move |(owes, since)| Wait { write_back: *flush, initiator: maker, owes, since, queued_at: behind }
        };
        waits.extend(owing(table, change).into_iter().map(wait(None)));
        let behind = change.part.waits_for;
        let before = behind.and_then(|key| writers.get(&key)).into_iter().flatten();
        waits.extend(before.map(|(owes, since)| (*owes, *since)).map(wait(behind)));
    }
    waits
}

/// The holders that a change waits for, and since when each has owed its latest acknowledgement to it.
fn owing(table: &State, change: &ChangeState) -> BTreeMap<Holder, Time> {
    let mut owing = BTreeMap::new();
    for recall in &change.owed {
        let holder = table.owing_holder(*recall);
        let since = table.accounts[&holder].owed[recall];
        owing.entry(holder).and_modify(|latest: &mut Time| *latest = since.max(*latest)).or_insert(since);
    }
    owing
}

/// Lets a write-back go on without waiting for that holder.
fn bypass_wait(table: &mut State, Wait { write_back: flush, owes, queued_at: behind, .. }: Wait) {
    if let Some(key) = behind {
        write_queue::leave_write_queue(table, flush);
        recalls::begin(table, flush, key, (Vec::new(), false));
    }
    let owed = std::mem::take(&mut table.changes.get_mut(&flush).expect("it waits").owed);
    let (left, owed) = owed.into_iter().partition(|recall| table.owing_holder(*recall) == owes);
    table.changes.get_mut(&flush).expect("it waits").owed = owed;
    write_queue::record_bypassed(table, flush, left);
    table.emit_if_ready(flush);
}
