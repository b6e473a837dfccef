//! Reads of file data that wait for a grant (rule 10).
//!
//! A page that is read stands in the client's kernel, and may be stored into there before it is dropped. Its write-back says under which
//! grant it was read, so that other clients' stores are not undone (docs/decisions/0028). So a read waits for what keeps the table
//! from granting the data: another holder's write that has its turn, write-back of another holder that takes no turn, and an acknowledgement
//! which the reader's own session owes for that data. No acknowledgement waits for a read, since a client has its kernel drop all
//! pages but those that its reads have locked. A kernel that has no room for more reads (`fc->max_background`) locks pages of which its
//! client does not know, so few reads of a holder wait at a time.

use super::LeaseTable;
use super::key::KeyState;
use super::recalls::ChangeState;
use super::turns::Part;
use super::words::{ChangeId, Granted, Holder, LeaseKey};
use nigh_types::{NodeId, RecallId, Time};
use std::collections::{BTreeSet, VecDeque};

/// So many reads of one holder wait at the most; others are answered without a grant. Half of what the client's kernel sends at a time.
const MOST: usize = 32;

/// What a read waits for next.
enum Obstacle {
    /// Another holder's write, or one that is queued.
    Turn,
    /// Write-back that takes no turn.
    WriteBack,
    Acknowledgement(RecallId),
}

impl LeaseTable {
    /// Waits for a grant on data; `Ready` says that [`LeaseTable::take_granted`] has it, or that it is not to be had. To be ended like a
    /// change. `None`: there is nothing to wait for.
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
        if self.changes.values().filter(is_theirs).count() >= MOST {
            return None;
        }
        let id = self.numbers.next_change();
        let mut change = ChangeState::new(Some(holder), self.now);
        change.part = Part { reader: Some((key, node)), ..Part::default() };
        self.changes.insert(id, change);
        self.wait_for(id, key, &obstacle);
        Some(id)
    }

    /// What a reader was granted that has waited; once.
    pub fn take_granted(&mut self, id: ChangeId) -> Option<Granted> {
        self.changes.get_mut(&id)?.part.granted.take()
    }

    /// A holder that would be granted nothing even so waits for nothing.
    fn obstacle(&self, holder: Holder, key: LeaseKey) -> Option<Obstacle> {
        let account = self.accounts.get(&holder)?;
        let state = self.keys.get(&key)?;
        if state.turn.slow || account.suspect.is_some() {
            return None;
        }
        if state.turn.keeps_waiting(holder) {
            return Some(Obstacle::Turn);
        }
        if self.doubted_until(account).is_some() {
            return None;
        }
        let owed = state.recalls.get(&holder).map(|recall| Obstacle::Acknowledgement(*recall));
        owed.or_else(|| self.is_written_back(state, holder, key).then_some(Obstacle::WriteBack))
    }

    fn is_written_back(&self, state: &KeyState, holder: Holder, key: LeaseKey) -> bool {
        let writes = |change: &ChangeState| {
            let Part { flush, writes, .. } = change.part;
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
            Obstacle::Turn => turn.queue.push_back(id),
            _ => turn.beside.push(id),
        }
    }

    /// What a reader has waited for is over: it is granted the data, or waits for the next obstacle.
    pub(super) fn read_on(&mut self, id: ChangeId) {
        let change = self.changes.get_mut(&id).expect("it waits");
        change.part.waits_for = None;
        let (holder, (key, node)) =
            (change.by.expect("a holder reads"), change.part.reader.expect("it reads"));
        if let Some(obstacle) = self.obstacle(holder, key) {
            return self.wait_for(id, key, &obstacle);
        }
        let granted = self.give(holder, key, node);
        self.changes.get_mut(&id).expect("just seen").part.granted = granted;
        self.announce(id);
    }

    /// Write-back that takes no turn may have ended there.
    pub(super) fn read_on_beside(&mut self, key: LeaseKey) {
        let beside = self.keys.get_mut(&key).map(|state| std::mem::take(&mut state.turn.beside));
        beside.into_iter().flatten().for_each(|id| self.read_on(id));
    }

    /// A holder has fallen silent: no read waits for it, nor does it read itself under a grant.
    pub(super) fn let_readers_go(&mut self, silent: Holder) {
        let owed = self.accounts[&silent].owed.keys();
        let waiting: Vec<ChangeId> = owed.flat_map(|recall| self.awaits(*recall)).copied().collect();
        let is_reader =
            |id: &ChangeId| self.changes.get(id).is_some_and(|change| change.part.reader.is_some());
        let (own, waiting): (Vec<ChangeId>, Vec<ChangeId>) = waiting.into_iter().partition(is_reader);
        for id in own {
            self.changes.get_mut(&id).expect("just seen").owed.clear();
            self.announce(id);
        }
        let writes = |id: ChangeId| self.changes.get(&id)?.part.writes;
        let keys: BTreeSet<LeaseKey> = waiting.into_iter().filter_map(writes).collect();
        for key in keys {
            let turn = &mut self.keys.get_mut(&key).expect("it is written").turn;
            turn.slow = true;
            let is_reader = |id: &ChangeId| self.changes[id].part.reader.is_some();
            let (readers, writers): (VecDeque<_>, VecDeque<_>) =
                turn.queue.drain(..).partition(|id| is_reader(id));
            turn.queue = writers;
            for id in readers {
                self.changes.get_mut(&id).expect("it waits").part.waits_for = None;
                self.announce(id);
            }
        }
    }
}
