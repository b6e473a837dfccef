//! Data reads that wait for a grant (rule 10).
//!
//! A page that is read stays in the client's page cache, and an application may store into it through mmap before it is
//! dropped. Its write-back names the grant under which it was read, so that other clients' stores are not undone
//! (docs/decisions/0028). So a read waits for whatever keeps the table from granting the data: another holder's write
//! in progress, another holder's write-back outside the write queue, or an acknowledgement that the reader's own
//! session owes for that data. No acknowledgement waits for a read, since a client has its kernel drop all pages except
//! those locked by its reads. A kernel that has no room for more reads (`fc->max_background`) locks pages that its
//! client does not know of, so only a few reads of a holder wait at a time.

use super::LeaseTable;
use super::key::KeyState;
use super::recalls::ChangeState;
use super::types::{ChangeId, Granted, Holder, LeaseKey};
use super::write_queue::QueueEntry;
use nigh_types::{NodeId, RecallId, Time};
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

impl LeaseTable {
    /// Waits for a data grant. `Ready` says that [`LeaseTable::take_granted`] has the grant, or that there is none to
    /// be had. The wait is ended like a change. `None`: there is nothing to wait for.
    pub fn handle_wait(
        &mut self,
        now: Time,
        holder: Holder,
        key: LeaseKey,
        node: NodeId,
    ) -> Option<ChangeId> {
        self.advance(now);
        let obstacle = self.obstacle(holder, key)?;
        let is_theirs = |change: &&ChangeState| change.part.reader.is_some() && change.by == Some(holder);
        if self.changes.values().filter(is_theirs).count() >= MAX_WAITING_READS {
            return None;
        }
        let id = self.numbers.next_change();
        let mut change = ChangeState::new(Some(holder), self.now);
        change.part = QueueEntry { reader: Some((key, node)), ..QueueEntry::default() };
        self.changes.insert(id, change);
        self.wait_for(id, key, &obstacle);
        Some(id)
    }

    /// Takes the grant that a waiting reader was given; returns it once.
    pub fn take_granted(&mut self, id: ChangeId) -> Option<Granted> {
        self.changes.get_mut(&id)?.part.granted.take()
    }

    /// What a read must wait for; `None` also for a holder that would be refused a grant afterwards.
    fn obstacle(&self, holder: Holder, key: LeaseKey) -> Option<Obstacle> {
        let account = self.accounts.get(&holder)?;
        let state = self.keys.get(&key)?;
        if state.turn.blocked_by_suspect || account.suspect.is_some() {
            return None;
        }
        if state.turn.must_wait(holder) {
            return Some(Obstacle::WriteQueue);
        }
        if self.penalised_until(account).is_some() {
            return None;
        }
        let owed = state.recalls.get(&holder).map(|recall| Obstacle::Acknowledgement(*recall));
        owed.or_else(|| self.is_written_back(state, holder, key).then_some(Obstacle::WriteBack))
    }

    fn is_written_back(&self, state: &KeyState, holder: Holder, key: LeaseKey) -> bool {
        let writes = |change: &ChangeState| {
            let QueueEntry { is_write_back: flush, writes, .. } = change.part;
            flush && change.by != Some(holder) && writes != Some(key) && change.keys.contains(&key)
        };
        state.is_changing_for(holder) && self.changes.values().any(writes)
    }

    fn wait_for(&mut self, id: ChangeId, key: LeaseKey, obstacle: &Obstacle) {
        let change = self.changes.get_mut(&id).expect("it waits");
        if let Obstacle::Acknowledgement(recall) = *obstacle {
            change.owed.insert(recall);
            self.recalls.get_mut(&recall).expect("it is out").waiting.push(id);
            return;
        }
        change.part.waits_for = Some(key);
        let turn = &mut self.keys.get_mut(&key).expect("it is changed").turn;
        match obstacle {
            Obstacle::WriteQueue => turn.queue.push_back(id),
            _ => turn.write_back_waiters.push(id),
        }
    }

    /// Goes on after an obstacle has ended: grants the reader the data, or waits for the next obstacle.
    pub(super) fn continue_read(&mut self, id: ChangeId) {
        let change = self.changes.get_mut(&id).expect("it waits");
        change.part.waits_for = None;
        let (holder, (key, node)) =
            (change.by.expect("a holder reads"), change.part.reader.expect("it reads"));
        if let Some(obstacle) = self.obstacle(holder, key) {
            return self.wait_for(id, key, &obstacle);
        }
        let granted = self.try_grant(holder, key, node);
        self.changes.get_mut(&id).expect("just seen").part.granted = granted;
        self.emit_if_ready(id);
    }

    /// Goes on with reads that wait for write-back outside the queue, some of which may have ended.
    pub(super) fn continue_reads_beside(&mut self, key: LeaseKey) {
        let beside = self.keys.get_mut(&key).map(|state| std::mem::take(&mut state.turn.write_back_waiters));
        beside.into_iter().flatten().for_each(|id| self.continue_read(id));
    }

    /// Stops reads from waiting for a holder that has become suspect; that holder's own waiting reads go on without a
    /// grant.
    pub(super) fn release_readers(&mut self, silent: Holder) {
        let owed = self.accounts[&silent].owed.keys();
        let waiting: Vec<ChangeId> = owed.flat_map(|recall| self.waiting_changes(*recall)).copied().collect();
        let is_reader =
            |id: &ChangeId| self.changes.get(id).is_some_and(|change| change.part.reader.is_some());
        let (own, waiting): (Vec<ChangeId>, Vec<ChangeId>) = waiting.into_iter().partition(is_reader);
        for id in own {
            self.changes.get_mut(&id).expect("just seen").owed.clear();
            self.emit_if_ready(id);
        }
        let writes = |id: ChangeId| self.changes.get(&id)?.part.writes;
        let keys: BTreeSet<LeaseKey> = waiting.into_iter().filter_map(writes).collect();
        for key in keys {
            let turn = &mut self.keys.get_mut(&key).expect("it is written").turn;
            turn.blocked_by_suspect = true;
            let is_reader = |id: &ChangeId| self.changes[id].part.reader.is_some();
            let (readers, writers): (VecDeque<_>, VecDeque<_>) =
                turn.queue.drain(..).partition(|id| is_reader(id));
            turn.queue = writers;
            for id in readers {
                self.changes.get_mut(&id).expect("it waits").part.waits_for = None;
                self.emit_if_ready(id);
            }
        }
    }
}
