//! Data reads that wait for a grant (rule 10).
//!
//! A page that is read stays in the client's page cache, and an application may store into it through mmap before it is
//! dropped. Its write-back names the grant under which it was read, so that other clients' stores are not undone
//! (docs/decisions/0028). So a read waits for whatever keeps the table from granting the data: another holder's write
//! in progress, another holder's write-back outside the write queue, or an acknowledgement that the reader's own
//! session owes for that data. No acknowledgement waits for a read, since a client has its kernel drop all pages except
//! those locked by its reads. A kernel that has no room for more reads (`fc->max_background`) locks pages that its
//! client does not know of, so only a few reads of a holder wait at a time.

use super::{delays, write_queue};
use crate::state::{ChangeState, KeyState, QueueEntry, State};
use crate::types::{ChangeId, GrantRequest, Holder, LeaseKey};
use nigh_types::RecallId;
use std::collections::{BTreeSet, VecDeque};

/// The most reads of one holder that wait; others get a reply without a grant. Half of what the client's kernel sends
/// at a time.
const MAX_WAITING_READS: usize = 32;

/// The next obstacle before a read.
enum Obstacle {
    /// Another holder's write, or a queued one.
    WriteQueue,
    /// Write-back outside the write queue.
    WriteBack,
    Acknowledgement(RecallId),
}

pub(crate) fn wait(table: &mut State, request: GrantRequest) -> Option<ChangeId> {
    let GrantRequest { holder, key, .. } = request;
    let obstacle = obstacle(table, holder, key)?;
    let is_theirs = |change: &&ChangeState| change.part.reader.is_some() && change.by == Some(holder);
    if table.changes.values().filter(is_theirs).count() >= MAX_WAITING_READS {
        return None;
    }
    let id = table.numbers.next_change();
    let mut change = ChangeState::new(Some(holder), table.now);
    change.part = QueueEntry { reader: Some(request), ..QueueEntry::default() };
    table.changes.insert(id, change);
    wait_for(table, id, key, &obstacle);
    Some(id)
}

/// What a read must wait for; `None` also for a holder that would be refused a grant afterwards.
fn obstacle(table: &State, holder: Holder, key: LeaseKey) -> Option<Obstacle> {
    let account = table.accounts.get(&holder)?;
    let state = table.keys.get(&key)?;
    if state.turn.blocked_by_suspect || account.suspect.is_some() {
        return None;
    }
    if state.turn.must_wait(holder) {
        return Some(Obstacle::WriteQueue);
    }
    if delays::penalised_until(table, account).is_some() {
        return None;
    }
    let owed = state.recalls.get(&holder).map(|recall| Obstacle::Acknowledgement(*recall));
    owed.or_else(|| is_written_back(table, state, holder, key).then_some(Obstacle::WriteBack))
}

fn is_written_back(table: &State, state: &KeyState, holder: Holder, key: LeaseKey) -> bool {
    let writes = |change: &ChangeState| {
        let QueueEntry { is_write_back: flush, writes, .. } = change.part;
        flush && change.by != Some(holder) && writes != Some(key) && change.keys.contains(&key)
    };
    state.is_changing_for(holder) && table.changes.values().any(writes)
}

fn wait_for(table: &mut State, id: ChangeId, key: LeaseKey, obstacle: &Obstacle) {
    let change = table.changes.get_mut(&id).expect("it waits");
    if let Obstacle::Acknowledgement(recall) = *obstacle {
        change.owed.insert(recall);
        table.recalls.get_mut(&recall).expect("it is out").waiting.push(id);
        return;
    }
    change.part.waits_for = Some(key);
    let turn = &mut table.keys.get_mut(&key).expect("it is changed").turn;
    match obstacle {
        Obstacle::WriteQueue => turn.queue.push_back(id),
        _ => turn.write_back_waiters.push(id),
    }
}

/// Goes on after an obstacle has ended: grants the reader the data, or waits for the next obstacle.
pub(crate) fn continue_read(table: &mut State, id: ChangeId) {
    let change = table.changes.get_mut(&id).expect("it waits");
    change.part.waits_for = None;
    let request = change.part.reader.expect("it reads");
    let GrantRequest { holder, key, .. } = request;
    if let Some(obstacle) = obstacle(table, holder, key) {
        return wait_for(table, id, key, &obstacle);
    }
    let granted = write_queue::try_grant(table, &request);
    table.changes.get_mut(&id).expect("just seen").part.granted = granted;
    table.emit_if_ready(id);
}

/// Goes on with reads that wait for write-back outside the queue, some of which may have ended.
pub(crate) fn continue_reads_beside(table: &mut State, key: LeaseKey) {
    let beside = table.keys.get_mut(&key).map(|state| std::mem::take(&mut state.turn.write_back_waiters));
    beside.into_iter().flatten().for_each(|id| continue_read(table, id));
}

/// Stops reads from waiting for a holder that has become suspect; that holder's own waiting reads go on without a
/// grant.
pub(crate) fn release_readers(table: &mut State, silent: Holder) {
    let owed = table.accounts[&silent].owed.keys();
    let waiting: Vec<ChangeId> = owed.flat_map(|recall| table.waiting_changes(*recall)).copied().collect();
    let is_reader = |id: &ChangeId| table.changes.get(id).is_some_and(|change| change.part.reader.is_some());
    let (own, waiting): (Vec<ChangeId>, Vec<ChangeId>) = waiting.into_iter().partition(is_reader);
    for id in own {
        table.changes.get_mut(&id).expect("just seen").owed.clear();
        table.emit_if_ready(id);
    }
    let writes = |id: ChangeId| table.changes.get(&id)?.part.writes;
    let keys: BTreeSet<LeaseKey> = waiting.into_iter().filter_map(writes).collect();
    for key in keys {
        let turn = &mut table.keys.get_mut(&key).expect("it is written").turn;
        turn.blocked_by_suspect = true;
        let is_reader = |id: &ChangeId| table.changes[id].part.reader.is_some();
        let (readers, writers): (VecDeque<_>, VecDeque<_>) =
            turn.queue.drain(..).partition(|id| is_reader(id));
        turn.queue = writers;
        for id in readers {
            table.changes.get_mut(&id).expect("it waits").part.waits_for = None;
            table.emit_if_ready(id);
        }
    }
}
