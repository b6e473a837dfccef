//! State of the lease table: grants, holders, keys, changes, and the acknowledgements that are owed. The functions that
//! change it are in `rules`.

mod change;
mod entry;
mod facts;
mod holder;
mod key;
mod merge_memory;
mod outstanding;
mod penalties;
mod timers;
mod watch_set;

pub(crate) use change::{ChangeState, QueueEntry};
pub(crate) use entry::Entry;
pub(crate) use facts::{FactKey, FactState, SuspendedFacts};
pub(crate) use holder::{HeldGrant, HolderState, RecalledGrant};
pub(crate) use key::{KeyState, WriteQueue};
pub(crate) use outstanding::{BypassedAck, OutstandingRecall, PendingUpdate};
pub(crate) use timers::Due;

use crate::types::{ChangeId, Holder, LeaseConfig, LeaseCounters, LeaseKey, LeaseOutput};
use merge_memory::MergeMemory;
use nigh_types::{GrantId, RecallId, Time};
use penalties::Penalties;
use std::collections::{BTreeMap, VecDeque};
use timers::Timers;
use watch_set::WatchSet;

/// A holder's place at a key: the index of a grant in the table.
pub(crate) type GrantKey = (LeaseKey, Holder);

/// Where [`LeaseTable::handle_missed`](crate::LeaseTable::handle_missed) goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissedCursor(pub(crate) GrantKey);

/// The latest id of each kind.
#[derive(Clone, Default, Debug)]
pub(crate) struct IdSpace {
    pub(crate) grant: u64,
    recall: u64,
    change: u64,
    /// Of ended changes.
    pub(crate) end: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) config: LeaseConfig,
    pub(crate) now: Time,
    pub(crate) entries: BTreeMap<GrantKey, Entry>,
    pub(crate) accounts: BTreeMap<Holder, HolderState>,
    pub(crate) keys: BTreeMap<LeaseKey, KeyState>,
    pub(crate) recalls: BTreeMap<RecallId, OutstandingRecall>,
    /// The recall of each key's latest write grant, as long as it is outstanding.
    pub(crate) write_recalls: BTreeMap<LeaseKey, RecallId>,
    /// Update prepares that await acknowledgement. Their ids share one sequence with recalls.
    pub(crate) pending_updates: BTreeMap<RecallId, PendingUpdate>,
    pub(crate) facts: BTreeMap<FactKey, FactState>,
    pub(crate) changes: BTreeMap<ChangeId, ChangeState>,
    /// Acknowledgements that write-backs bypassed.
    pub(crate) bypassed: BTreeMap<RecallId, BypassedAck>,
    pub(crate) merging: MergeMemory,
    pub(crate) penalties: Penalties,
    pub(crate) watched: WatchSet,
    pub(crate) timers: Timers,
    pub(crate) outputs: VecDeque<LeaseOutput>,
    pub(crate) numbers: IdSpace,
    pub(crate) counters: LeaseCounters,
}

impl State {
    pub(crate) fn new(config: LeaseConfig) -> State {
        State {
            config,
            now: Time(0),
            entries: BTreeMap::new(),
            accounts: BTreeMap::new(),
            keys: BTreeMap::new(),
            recalls: BTreeMap::new(),
            write_recalls: BTreeMap::new(),
            pending_updates: BTreeMap::new(),
            facts: BTreeMap::new(),
            changes: BTreeMap::new(),
            bypassed: BTreeMap::new(),
            merging: MergeMemory::default(),
            penalties: Penalties::default(),
            watched: WatchSet::default(),
            timers: Timers::default(),
            outputs: VecDeque::new(),
            numbers: IdSpace::default(),
            counters: LeaseCounters::default(),
        }
    }

    /// Forgets that a recall of a write grant is outstanding.
    pub(crate) fn forget_write_recall(&mut self, key: LeaseKey, id: RecallId) {
        if self.write_recalls.get(&key) == Some(&id) {
            self.write_recalls.remove(&key);
        }
    }

    /// Whether this grant is live: it is its holder's latest on its key, and neither recalled nor ended.
    pub(crate) fn is_live(&self, holder: Holder, grant: GrantId) -> bool {
        self.accounts.get(&holder).is_some_and(|account| account.grants.contains_key(&grant))
    }

    pub(crate) fn emit_if_ready(&mut self, id: ChangeId) {
        let change = self.changes.get_mut(&id).expect("it is under way");
        if change.is_ready() && !change.ready_emitted {
            change.ready_emitted = true;
            self.outputs.push_back(LeaseOutput::Ready(id));
        }
    }

    pub(crate) fn arm_holder(&mut self, holder: Holder) {
        let account = self.accounts.get_mut(&holder).expect("a holder");
        let due = account.due(&self.config);
        if !account.armed.is_no_later_than(due.0) {
            self.timers.arm(&mut account.armed, Due::Holder(holder), due);
        }
    }

    /// Ends states of a key that are over, and arms its next timer.
    pub(crate) fn update_key(&mut self, key: LeaseKey) {
        let Some(state) = self.keys.get_mut(&key) else { return };
        if state.end_expired_states(self.now, &self.config) {
            self.timers.disarm(state.armed, Due::Key(key));
            self.keys.remove(&key);
        } else {
            let due = state.due(&self.config);
            self.timers.arm(&mut state.armed, Due::Key(key), due);
        }
    }

    /// The holder that owes the acknowledgement of a recall or prepare.
    pub(crate) fn owing_holder(&self, id: RecallId) -> Holder {
        self.recalls.get(&id).map(|recall| recall.holder).unwrap_or_else(|| self.pending_updates[&id].holder)
    }

    /// The changes that wait for this acknowledgement.
    pub(crate) fn waiting_changes(&self, id: RecallId) -> &[ChangeId] {
        match self.recalls.get(&id) {
            Some(recall) => &recall.waiting,
            None => std::slice::from_ref(&self.pending_updates[&id].waiting),
        }
    }
}

impl IdSpace {
    pub(crate) fn next_grant(&mut self) -> GrantId {
        self.grant += 1;
        GrantId(self.grant)
    }

    pub(crate) fn next_recall(&mut self) -> RecallId {
        self.recall += 1;
        RecallId(self.recall)
    }

    pub(crate) fn next_change(&mut self) -> ChangeId {
        self.change += 1;
        ChangeId(self.change)
    }
}
