//! The write queue of a file's data: one writer after the other, and readers between them (rule 10).
//!
//! Data that was written or read stays in a kernel's page cache, so a grant must cover it from the moment of the reply.
//! So of two writers of one object, the second begins after the first has ended and was granted the data that it wrote.
//! A reader that waits meanwhile is granted the data between the two.

use super::LeaseTable;
use super::key::KeyState;
use super::recalls::ChangeState;
use super::timers::{Armed, Due};
use super::types::{Change, ChangeId, Granted, Holder, LeaseKey};
use nigh_types::{Bug, LeaseScope, NodeId, RecallId, Time, planted};
use std::collections::{BTreeSet, VecDeque};

/// Write queue of a key: the present writer and the waiting changes.
#[derive(Clone, Default, Debug)]
pub(super) struct WriteQueue {
    /// The writing session (`None`: the server's own disk), and the number of its changes.
    writer: Option<(Option<Holder>, u64)>,
    /// Changes, and reads that wait for a grant.
    pub(super) queue: VecDeque<ChangeId>,
    /// Reads that wait for write-back outside the queue.
    pub(super) write_back_waiters: Vec<ChangeId>,
    /// The present writer waits for a suspect holder: no read waits.
    pub(super) blocked_by_suspect: bool,
    /// The server's own disk may have changed the data since the present writer began, possibly after its effect.
    host_changed: bool,
}

impl WriteQueue {
    pub(super) fn is_free(&self) -> bool {
        self.writer.is_none() && self.queue.is_empty() && self.write_back_waiters.is_empty()
    }

    /// Whether a reader has to wait in the queue.
    pub(super) fn must_wait(&self, reader: Holder) -> bool {
        self.writer.is_some_and(|(writer, _)| writer != Some(reader) || !self.queue.is_empty())
    }
}

impl KeyState {
    /// Changes and reads that wait in this key's queue.
    pub(super) fn queued(&self) -> impl Iterator<Item = ChangeId> + '_ {
        self.turn.queue.iter().copied()
    }
}

/// A change's entry in the write queue.
#[derive(Clone, Default, Debug)]
pub(super) struct QueueEntry {
    /// The key that it is writing.
    pub(super) writes: Option<LeaseKey>,
    /// The key whose queue it waits in.
    pub(super) waits_for: Option<LeaseKey>,
    /// A read instead of a change: it waits for a grant on this data, of the object with this node id.
    pub(super) reader: Option<(LeaseKey, NodeId)>,
    pub(super) granted: Option<Granted>,
    /// A write-back of stores through mmap.
    pub(super) is_write_back: bool,
    /// Whether [`LeaseTable::handle_wrote_back`] has reported for every attempt what it changed of the data.
    pub(super) changes_reported: Option<bool>,
    /// When to check whether it waits for its own initiator.
    pub(super) armed: Armed,
}

/// An acknowledgement that write-backs did not wait for.
#[derive(Clone, Default, Debug)]
pub(super) struct BypassedAck {
    /// The data that they write.
    data: BTreeSet<LeaseKey>,
    /// The syncs of that data that wait for the acknowledgement.
    pub(super) waiting: Vec<ChangeId>,
}

impl LeaseTable {
    /// Begins a change like `handle_change`, for mmap stores that a kernel writes back, perhaps because it has to drop
    /// them. While the initiator owes an acknowledgement for that data, the write-back waits for no other holder. A
    /// caller that needs other holders to see the stores waits for them with [`LeaseTable::handle_sync_barrier`].
    pub fn handle_write_back(&mut self, now: Time, by: Holder, changes: &[Change]) -> ChangeId {
        self.advance(now);
        let id = self.numbers.next_change();
        let mut change = ChangeState::new(Some(by), self.now);
        change.part.is_write_back = true;
        self.changes.insert(id, change);
        self.extend(id, changes);
        id
    }

    /// Ends a change like `handle_done`, and at once grants its initiator the data that it wrote, before another
    /// session changes it.
    pub fn handle_written(
        &mut self,
        now: Time,
        id: ChangeId,
        key: LeaseKey,
        node: NodeId,
    ) -> Option<Granted> {
        self.advance(now);
        self.end_change(id, Some((key, node)))
    }

    /// The key of a recall whose acknowledgement is owed.
    #[must_use]
    pub fn recalled_key(&self, recall: RecallId) -> Option<LeaseKey> {
        self.recalls.get(&recall).map(|outstanding| outstanding.key)
    }

    /// Begins a sync barrier: waits until all recalls of this key from holders other than `by` are acknowledged, and
    /// all acknowledgements that its write-backs bypassed. It is ended like a change.
    pub fn handle_sync_barrier(&mut self, now: Time, by: Holder, key: LeaseKey) -> ChangeId {
        self.advance(now);
        let id = self.numbers.next_change();
        let mut change = ChangeState::new(Some(by), self.now);
        let asked = self.keys.get(&key).into_iter().flat_map(|state| &state.recalls);
        let standing = |recall: &_| self.recalls[recall].grant.is_some();
        change.owed = asked.filter(|a| *a.0 != by).map(|a| *a.1).filter(standing).collect();
        for recall in &change.owed {
            self.recalls.get_mut(recall).expect("it is out").waiting.push(id);
        }
        let owes = |recall: &RecallId| {
            self.recalls
                .get(recall)
                .map_or_else(|| self.pending_updates[recall].holder, |recall| recall.holder)
        };
        for (recall, left) in &mut self.bypassed {
            if left.data.contains(&key) && owes(recall) != by {
                change.owed.insert(*recall);
                left.waiting.push(id);
            }
        }
        self.changes.insert(id, change);
        self.emit_if_ready(id);
        id
    }

    /// Returns whether a change may write this key now; otherwise the change is queued. A change writes one object: it
    /// leaves another key's queue.
    pub(super) fn enter_write_queue(&mut self, id: ChangeId, key: LeaseKey) -> bool {
        let change = &self.changes[&id];
        let QueueEntry { writes, waits_for, .. } = change.part;
        if writes == Some(key) || self.is_prioritised_at(id, key) {
            return true;
        }
        if waits_for == Some(key) {
            return false;
        }
        let by = change.by;
        self.leave_write_queue(id);
        let turn = &mut self.keys.entry(key).or_default().turn;
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
        let part = &mut self.changes.get_mut(&id).expect("just seen").part;
        *(if may_write { &mut part.writes } else { &mut part.waits_for }) = Some(key);
        may_write
    }

    /// Ends a change, and lets the changes queued behind it go on.
    pub(super) fn end_change(&mut self, id: ChangeId, wrote: Option<(LeaseKey, NodeId)>) -> Option<Granted> {
        let change = self.changes.get_mut(&id)?;
        let (by, keys, looked) = (change.by, std::mem::take(&mut change.keys), change.looked);
        let (facts, held) = (std::mem::take(&mut change.facts), std::mem::take(&mut change.suspended));
        if change.part.is_write_back {
            // A prioritised write-back may have waited for no holder.
            let noted = change.part.changes_reported == Some(true);
            let is_noted = |key: &&LeaseKey| noted && key.covers == LeaseScope::Data;
            keys.iter().filter(|key| !is_noted(key)).for_each(|key| self.note_changed(*key, by));
        }
        for key in &keys {
            self.keys.get_mut(key).expect("a key that is changed").end_change(self.now, by);
        }
        self.commit(&facts, held, looked);
        let wrote = by.zip(wrote);
        let granted = wrote.and_then(|(by, (key, node))| self.try_grant(by, key, node));
        let disturbed = |(_, (key, _)): &(_, (LeaseKey, _))| {
            self.keys.get(key).is_some_and(|state| state.turn.host_changed)
        };
        let disturbed = wrote.filter(disturbed);
        self.leave_write_queue(id);
        self.timers.disarm(self.changes[&id].part.armed, Due::WriteBack(id));
        if let Some((by, (key, _))) = disturbed
            && granted.is_some_and(|granted| self.is_live(by, granted.id))
        {
            // Its recall follows the reply, and covers what the kernel has of it by then.
            self.recall_missed((key, by));
        }
        self.changes.remove(&id);
        for key in keys {
            self.continue_reads_beside(key);
            self.update_key(key);
        }
        granted
    }

    /// Removes a change from its key's queue, as writer or waiter.
    pub(super) fn leave_write_queue(&mut self, id: ChangeId) {
        let part = &mut self.changes.get_mut(&id).expect("it is under way").part;
        let (writes, waits_for) = (part.writes.take(), part.waits_for.take());
        if let Some(key) = waits_for {
            let turn = &mut self.keys.get_mut(&key).expect("a writer waits there").turn;
            turn.queue.retain(|other| *other != id);
            turn.write_back_waiters.retain(|other| *other != id);
            self.update_key(key);
        }
        if let Some(key) = writes {
            let turn = &mut self.keys.get_mut(&key).expect("a writer is active there").turn;
            let (_, count) = turn.writer.as_mut().expect("it writes");
            *count -= 1;
            if *count == 0 {
                (turn.writer, turn.blocked_by_suspect, turn.host_changed) = (None, false, false);
                self.advance_write_queue(key);
            }
            self.update_key(key);
        }
    }

    /// Grants the data to queued reads up to the next writer; then that writer begins.
    fn advance_write_queue(&mut self, key: LeaseKey) {
        loop {
            let Some(turn) = self.keys.get_mut(&key).map(|state| &mut state.turn) else { return };
            let Some(id) = turn.queue.front().copied() else { return };
            let change = self.changes.get_mut(&id).expect("it waits");
            if change.part.reader.is_some() {
                if turn.writer.is_some() {
                    return;
                }
                turn.queue.pop_front();
                self.continue_read(id);
                continue;
            }
            match &mut turn.writer {
                writing @ None => *writing = Some((change.by, 1)),
                Some((maker, count)) if *maker == change.by => *count += 1,
                Some(_) => return,
            }
            turn.queue.pop_front();
            (change.part.writes, change.part.waits_for) = (Some(key), None);
            self.begin(id, key, (Vec::new(), false));
            self.prioritise_awaited(id);
            self.break_deadlock(id);
            self.emit_if_ready(id);
        }
    }

    /// Notes that the server's own disk may have changed a key: a session that is writing it gets a grant that lasts
    /// only until its reply.
    pub(super) fn note_host_change(&mut self, key: LeaseKey) {
        if let Some(KeyState { turn, .. }) = self.keys.get_mut(&key) {
            turn.host_changed = turn.writer.is_some();
        }
    }

    /// Registers a grant, and counts it or its refusal.
    pub(super) fn try_grant(&mut self, holder: Holder, key: LeaseKey, node: NodeId) -> Option<Granted> {
        match self.grant(holder, key, node) {
            Ok(granted) => {
                self.counters.granted += 1;
                Some(granted)
            }
            Err(refusal) => {
                *self.counters.refused.entry(refusal).or_default() += 1;
                None
            }
        }
    }

    /// Whether a write-back is prioritised: its initiator was recalled for that data, and the acknowledgement may wait
    /// for the write-back.
    pub(super) fn is_prioritised(&self, id: ChangeId) -> bool {
        let mut data = self.changes[&id].keys.iter().filter(|key| key.covers == LeaseScope::Data);
        data.any(|key| self.is_prioritised_at(id, *key))
    }

    fn is_prioritised_at(&self, id: ChangeId, key: LeaseKey) -> bool {
        if planted(Bug::WaitsForItself) {
            return false;
        }
        let change = &self.changes[&id];
        let Some(by) = change.by.filter(|_| change.part.is_write_back) else { return false };
        let Some(state) = self.keys.get(&key) else { return false };
        let others_write = state.turn.writer.is_some_and(|(maker, _)| maker != Some(by));
        state.recalls.contains_key(&by) || others_write && self.is_waited_for_at(by, key)
    }

    /// Whether the change that writes there waits for this holder, whatever was recalled from the holder: its kernel
    /// may drop a file's pages because of a recall of a directory's names.
    fn is_waited_for_at(&self, holder: Holder, key: LeaseKey) -> bool {
        let waits = |change: &ChangeState| {
            change.part.writes == Some(key)
                && change.owed.iter().any(|recall| self.owing_holder(*recall) == holder)
        };
        self.changes.values().any(waits)
    }

    /// Prioritises the write-backs of holders that a writing change waits for.
    pub(super) fn prioritise_awaited(&mut self, id: ChangeId) {
        let change = &self.changes[&id];
        let Some(key) = change.part.writes else { return };
        let others: BTreeSet<Holder> = change.owed.iter().map(|recall| self.owing_holder(*recall)).collect();
        others.into_iter().for_each(|holder| self.prioritise(key, holder));
    }

    /// Prioritises a holder's write-backs of data that is recalled from it, before the change that recalls it.
    pub(super) fn prioritise(&mut self, key: LeaseKey, holder: Holder) {
        let may_be = |turn: &WriteQueue| {
            !turn.queue.is_empty() || turn.writer.is_some_and(|(maker, _)| maker == Some(holder))
        };
        if key.covers != LeaseScope::Data || !self.keys.get(&key).is_some_and(|state| may_be(&state.turn)) {
            return;
        }
        let is_pressed = |change: &ChangeState| {
            let QueueEntry { is_write_back: flush, writes, waits_for, .. } = change.part;
            flush && change.by == Some(holder) && (writes == Some(key) || waits_for == Some(key))
        };
        let pressed = self.changes.iter().filter(|(_, change)| is_pressed(change));
        let pressed: Vec<ChangeId> = pressed.map(|(id, _)| *id).collect();
        for id in pressed {
            if self.changes[&id].part.waits_for.is_some() {
                self.leave_write_queue(id);
                self.begin(id, key, (Vec::new(), false));
            }
            self.bypass_all(id);
            self.emit_if_ready(id);
        }
    }

    /// Lets a write-back go on without the acknowledgements that it waits for.
    pub(super) fn bypass_all(&mut self, id: ChangeId) {
        let left = std::mem::take(&mut self.changes.get_mut(&id).expect("it is under way").owed);
        self.record_bypassed(id, left);
    }

    /// Records acknowledgements that a write-back bypasses; syncs of its data wait for them.
    pub(super) fn record_bypassed(&mut self, id: ChangeId, left: BTreeSet<RecallId>) {
        let data = self.changes[&id].keys.iter().filter(|key| key.covers == LeaseScope::Data);
        let data: Vec<LeaseKey> = data.copied().collect();
        for recall in left {
            self.bypassed.entry(recall).or_default().data.extend(data.iter().copied());
        }
    }

    /// Write-backs that a change may block: itself, and those queued until it has written.
    pub(super) fn blocked_write_backs(&self, id: ChangeId) -> Vec<ChangeId> {
        if planted(Bug::WaitsForItself) {
            return Vec::new();
        }
        let key = self.changes[&id].part.writes;
        let state = key.and_then(|key| self.keys.get(&key));
        let queue = state.into_iter().flat_map(|state| &state.turn.queue).copied();
        let is_flush = |id: &ChangeId| self.changes[id].part.is_write_back;
        std::iter::once(id).chain(queue).filter(is_flush).collect()
    }
}
