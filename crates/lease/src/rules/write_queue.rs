//! The write queue of a file's data: one writer after the other, and readers between them (rule 10).
//!
//! Data that was written or read stays in a kernel's page cache, so a grant must cover it from the moment of the reply.
//! So of two writers of one object, the second begins after the first has ended and was granted the data that it wrote.
//! A reader that waits meanwhile is granted the data between the two.

use super::{deadlock, grants, read_grants, recalls, updates};
use crate::state::{ChangeState, Due, KeyState, QueueEntry, State, WriteQueue};
use crate::types::{Change, ChangeId, GrantRequest, Granted, Holder, LeaseKey};
use nigh_types::{Bug, LeaseScope, RecallId, planted};
use std::collections::BTreeSet;

pub(crate) fn begin_write_back(table: &mut State, by: Holder, changes: &[Change]) -> ChangeId {
    let id = table.numbers.next_change();
    let mut change = ChangeState::new(Some(by), table.now);
    change.part.is_write_back = true;
    table.changes.insert(id, change);
    recalls::extend(table, id, changes);
    id
}

pub(crate) fn begin_sync_barrier(table: &mut State, by: Holder, key: LeaseKey) -> ChangeId {
    let id = table.numbers.next_change();
    let mut change = ChangeState::new(Some(by), table.now);
    let asked = table.keys.get(&key).into_iter().flat_map(|state| &state.recalls);
    let standing = |recall: &_| table.recalls[recall].grant.is_some();
    change.owed = asked.filter(|a| *a.0 != by).map(|a| *a.1).filter(standing).collect();
    for recall in &change.owed {
        table.recalls.get_mut(recall).expect("it is out").waiting.push(id);
    }
    let owes = |recall: &RecallId| {
        table.recalls.get(recall).map_or_else(|| table.pending_updates[recall].holder, |recall| recall.holder)
    };
    for (recall, left) in &mut table.bypassed {
        if left.data.contains(&key) && owes(recall) != by {
            change.owed.insert(*recall);
            left.waiting.push(id);
        }
    }
    table.changes.insert(id, change);
    table.emit_if_ready(id);
    id
}

/// Returns whether a change may write this key now; otherwise the change is queued. A change writes one object: it
/// leaves another key's queue.
pub(crate) fn enter_write_queue(table: &mut State, id: ChangeId, key: LeaseKey) -> bool {
    let change = &table.changes[&id];
    let QueueEntry { writes, waits_for, .. } = change.part;
    if writes == Some(key) || is_prioritised_at(table, id, key) {
        return true;
    }
    if waits_for == Some(key) {
        return false;
    }
    let by = change.by;
    leave_write_queue(table, id);
    let turn = &mut table.keys.entry(key).or_default().turn;
    let may_write = match &mut turn.writer {
        writing @ None => {
            *writing = Some((by, 1));
            true
        }
        Some((maker, count)) if *maker == by && turn.queue.is_empty() => {
            *count += 1;
            true
        }
        Some(_) => {
            turn.queue.push_back(id);
            false
        }
    };
    let part = &mut table.changes.get_mut(&id).expect("just seen").part;
    *(if may_write { &mut part.writes } else { &mut part.waits_for }) = Some(key);
    may_write
}

/// Ends a change, and lets the changes queued behind it go on.
pub(crate) fn end_change(table: &mut State, id: ChangeId, wrote: Option<GrantRequest>) -> Option<Granted> {
    let change = table.changes.get_mut(&id)?;
    let (by, keys, looked) = (change.by, std::mem::take(&mut change.keys), change.looked);
    let (facts, held) = (std::mem::take(&mut change.facts), std::mem::take(&mut change.suspended));
    if change.part.is_write_back {
        // A prioritised write-back may have waited for no holder.
        let noted = change.part.changes_reported == Some(true);
        let is_noted = |key: &&LeaseKey| noted && key.covers == LeaseScope::Data;
        keys.iter().filter(|key| !is_noted(key)).for_each(|key| recalls::note_changed(table, *key, by));
    }
    for key in &keys {
        table.keys.get_mut(key).expect("a key that is changed").end_change(table.now, by);
    }
    updates::commit(table, &facts, held, looked);
    let wrote = wrote.filter(|wrote| by == Some(wrote.holder));
    let granted = wrote.and_then(|wrote| try_grant(table, &wrote));
    let disturbed =
        |wrote: &GrantRequest| table.keys.get(&wrote.key).is_some_and(|state| state.turn.host_changed);
    let disturbed = wrote.filter(disturbed);
    leave_write_queue(table, id);
    table.timers.disarm(table.changes[&id].part.armed, Due::WriteBack(id));
    if let Some(GrantRequest { holder, key, .. }) = disturbed
        && granted.is_some_and(|granted| table.is_live(holder, granted.id))
    {
        // Its recall follows the reply, and covers what the kernel has of it by then.
        recalls::recall_missed(table, (key, holder));
    }
    table.changes.remove(&id);
    for key in keys {
        read_grants::continue_reads_beside(table, key);
        table.update_key(key);
    }
    granted
}

/// Removes a change from its key's queue, as writer or waiter.
pub(crate) fn leave_write_queue(table: &mut State, id: ChangeId) {
    let part = &mut table.changes.get_mut(&id).expect("it is under way").part;
    let (writes, waits_for) = (part.writes.take(), part.waits_for.take());
    if let Some(key) = waits_for {
        let turn = &mut table.keys.get_mut(&key).expect("a writer waits there").turn;
        turn.queue.retain(|other| *other != id);
        turn.write_back_waiters.retain(|other| *other != id);
        table.update_key(key);
    }
    if let Some(key) = writes {
        let turn = &mut table.keys.get_mut(&key).expect("a writer is active there").turn;
        let (_, count) = turn.writer.as_mut().expect("it writes");
        *count -= 1;
        if *count == 0 {
            (turn.writer, turn.blocked_by_suspect, turn.host_changed) = (None, false, false);
            advance_write_queue(table, key);
        }
        table.update_key(key);
    }
}

/// Grants the data to queued reads up to the next writer; then that writer begins.
fn advance_write_queue(table: &mut State, key: LeaseKey) {
    loop {
        let Some(turn) = table.keys.get_mut(&key).map(|state| &mut state.turn) else { return };
        let Some(id) = turn.queue.front().copied() else { return };
        let change = table.changes.get_mut(&id).expect("it waits");
        if change.part.reader.is_some() {
            if turn.writer.is_some() {
                return;
            }
            turn.queue.pop_front();
            read_grants::continue_read(table, id);
            continue;
        }
        match &mut turn.writer {
            writing @ None => *writing = Some((change.by, 1)),
            Some((maker, count)) if *maker == change.by => *count += 1,
            Some(_) => return,
        }
        turn.queue.pop_front();
        (change.part.writes, change.part.waits_for) = (Some(key), None);
        recalls::begin(table, id, key, (Vec::new(), false));
        prioritise_awaited(table, id);
        deadlock::break_deadlock(table, id);
        table.emit_if_ready(id);
    }
}

/// Notes that the server's own disk may have changed a key: a session that is writing it gets a grant that lasts
/// only until its reply.
pub(crate) fn note_host_change(table: &mut State, key: LeaseKey) {
    if let Some(KeyState { turn, .. }) = table.keys.get_mut(&key) {
        turn.host_changed = turn.writer.is_some();
    }
}

/// Registers a grant, and counts it or its refusal.
pub(crate) fn try_grant(table: &mut State, request: &GrantRequest) -> Option<Granted> {
    match grants::grant(table, request) {
        Ok(granted) => {
            table.counters.granted += 1;
            Some(granted)
        }
        Err(refusal) => {
            *table.counters.refused.entry(refusal).or_default() += 1;
            None
        }
    }
}

/// Whether a write-back is prioritised: its initiator was recalled for that data, and the acknowledgement may wait
/// for the write-back.
pub(crate) fn is_prioritised(table: &State, id: ChangeId) -> bool {
    let mut data = table.changes[&id].keys.iter().filter(|key| key.covers == LeaseScope::Data);
    data.any(|key| is_prioritised_at(table, id, *key))
}

fn is_prioritised_at(table: &State, id: ChangeId, key: LeaseKey) -> bool {
    if planted(Bug::WaitsForItself) {
        return false;
    }
    let change = &table.changes[&id];
    let Some(by) = change.by.filter(|_| change.part.is_write_back) else { return false };
    let Some(state) = table.keys.get(&key) else { return false };
    let others_write = state.turn.writer.is_some_and(|(maker, _)| maker != Some(by));
    state.recalls.contains_key(&by) || others_write && is_waited_for_at(table, by, key)
}

/// Whether the change that writes there waits for this holder, whatever was recalled from the holder: its kernel
/// may drop a file's pages because of a recall of a directory's names.
fn is_waited_for_at(table: &State, holder: Holder, key: LeaseKey) -> bool {
    let waits = |change: &ChangeState| {
        change.part.writes == Some(key)
            && change.owed.iter().any(|recall| table.owing_holder(*recall) == holder)
    };
    table.changes.values().any(waits)
}

/// Prioritises the write-backs of holders that a writing change waits for.
pub(crate) fn prioritise_awaited(table: &mut State, id: ChangeId) {
    let change = &table.changes[&id];
    let Some(key) = change.part.writes else { return };
    let others: BTreeSet<Holder> = change.owed.iter().map(|recall| table.owing_holder(*recall)).collect();
    others.into_iter().for_each(|holder| prioritise(table, key, holder));
}

/// Prioritises a holder's write-backs of data that is recalled from it, before the change that recalls it.
pub(crate) fn prioritise(table: &mut State, key: LeaseKey, holder: Holder) {
    let may_be = |turn: &WriteQueue| {
        !turn.queue.is_empty() || turn.writer.is_some_and(|(maker, _)| maker == Some(holder))
    };
    if key.covers != LeaseScope::Data || !table.keys.get(&key).is_some_and(|state| may_be(&state.turn)) {
        return;
    }
    let is_pressed = |change: &ChangeState| {
        let QueueEntry { is_write_back: flush, writes, waits_for, .. } = change.part;
        flush && change.by == Some(holder) && (writes == Some(key) || waits_for == Some(key))
    };
    let pressed = table.changes.iter().filter(|(_, change)| is_pressed(change));
    let pressed: Vec<ChangeId> = pressed.map(|(id, _)| *id).collect();
    for id in pressed {
        if table.changes[&id].part.waits_for.is_some() {
            leave_write_queue(table, id);
            recalls::begin(table, id, key, (Vec::new(), false));
        }
        bypass_all(table, id);
        table.emit_if_ready(id);
    }
}

/// Lets a write-back go on without the acknowledgements that it waits for.
pub(crate) fn bypass_all(table: &mut State, id: ChangeId) {
    let left = std::mem::take(&mut table.changes.get_mut(&id).expect("it is under way").owed);
    record_bypassed(table, id, left);
}

/// Records acknowledgements that a write-back bypasses; syncs of its data wait for them.
pub(crate) fn record_bypassed(table: &mut State, id: ChangeId, left: BTreeSet<RecallId>) {
    let data = table.changes[&id].keys.iter().filter(|key| key.covers == LeaseScope::Data);
    let data: Vec<LeaseKey> = data.copied().collect();
    for recall in left {
        table.bypassed.entry(recall).or_default().data.extend(data.iter().copied());
    }
}

/// Write-backs that a change may block: itself, and those queued until it has written.
pub(crate) fn blocked_write_backs(table: &State, id: ChangeId) -> Vec<ChangeId> {
    if planted(Bug::WaitsForItself) {
        return Vec::new();
    }
    let key = table.changes[&id].part.writes;
    let state = key.and_then(|key| table.keys.get(&key));
    let queue = state.into_iter().flat_map(|state| &state.turn.queue).copied();
    let is_flush = |id: &ChangeId| table.changes[id].part.is_write_back;
    std::iter::once(id).chain(queue).filter(is_flush).collect()
}
