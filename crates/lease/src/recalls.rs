//! Recalls, the changes that wait for them, and the fate of holders that owe acknowledgements.

use super::holder_state::RecalledGrant;
use super::merge_base::MergeBase;
use super::timers::Due;
use super::types::{Change, ChangeId, Holder, LeaseKey, LeaseOutput};
use super::updates::{FactKey, ObservedAt, PendingUpdate, SuspendedFacts, UpdatedKey};
use super::write_queue::QueueEntry;
use super::{Entry, GrantKey, LeaseTable};
use nigh_types::{GrantId, LeaseScope, Name, NodeId, Recall, RecallId, Time};
use std::collections::{BTreeMap, BTreeSet};

/// A recall whose acknowledgement is owed.
#[derive(Clone, Debug)]
pub(super) struct OutstandingRecall {
    pub(super) holder: Holder,
    pub(super) key: LeaseKey,
    pub(super) node: NodeId,
    names: Vec<Name>,
    /// The recalled grant; `None` once it has ended in another way. The acknowledgement is awaited even so: otherwise
    /// it would end a grant that was given before it arrived.
    pub(super) grant: Option<GrantId>,
    /// [`Entry::held_exclusively_since`] of the recalled grant.
    pub(super) held_exclusively_since: GrantId,
    /// For data: bytes that other holders' write-back has changed since. These do not count for `held_exclusively_since`.
    pub(super) base: MergeBase,
    pub(super) waiting: Vec<ChangeId>,
}

impl OutstandingRecall {
    fn output(&self, id: RecallId) -> LeaseOutput {
        let OutstandingRecall { holder, key, node, ref names, .. } = *self;
        LeaseOutput::Recall { holder, recall: Recall { id, node, covers: key.covers, names: names.clone() } }
    }
}

/// A change in progress.
#[derive(Clone, Debug)]
pub(super) struct ChangeState {
    pub(super) by: Option<Holder>,
    pub(super) since: Time,
    pub(super) keys: BTreeSet<LeaseKey>,
    /// Recalls and prepares whose acknowledgement it waits for.
    pub(super) owed: BTreeSet<RecallId>,
    /// The facts that it invalidates, each once.
    pub(super) facts: Vec<FactKey>,
    pub(super) suspended: Vec<SuspendedFacts>,
    pub(super) looked: Option<ObservedAt>,
    /// Facts named since the last prepare, with the holders that are to suspend them.
    unsaid: Vec<(Holder, UpdatedKey)>,
    /// A `Ready` is among the outputs.
    pub(super) ready_emitted: bool,
    pub(super) part: QueueEntry,
}

impl ChangeState {
    pub(super) fn new(by: Option<Holder>, since: Time) -> ChangeState {
        ChangeState {
            by,
            since,
            keys: BTreeSet::new(),
            owed: BTreeSet::new(),
            facts: Vec::new(),
            suspended: Vec::new(),
            looked: None,
            unsaid: Vec::new(),
            ready_emitted: false,
            part: QueueEntry::default(),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.owed.is_empty() && self.part.waits_for.is_none()
    }
}

impl LeaseTable {
    /// Adds these keys to a change that has begun.
    pub(super) fn extend(&mut self, id: ChangeId, changes: &[Change]) {
        if !self.changes.contains_key(&id) {
            return;
        }
        let mut keys = BTreeMap::<LeaseKey, (Option<Vec<Name>>, bool)>::new();
        for Change { key, names: some, can_update: told, .. } in changes {
            let (all, tells) = keys.entry(*key).or_insert_with(|| (Some(Vec::new()), true));
            *tells &= told;
            match all {
                Some(all) if !some.is_empty() => all.extend_from_slice(some),
                _ => *all = None,
            }
        }
        let waits = changes.iter().rev().find(|change| change.writes).and_then(|change| {
            let may_write = self.enter_write_queue(id, change.key);
            (!may_write).then_some(change.key)
        });
        for (key, (names, told)) in keys {
            if Some(key) != waits {
                self.begin(id, key, (names.unwrap_or_default(), told));
            }
        }
        self.emit_unsent_prepares(id);
        self.prioritise_awaited(id);
        self.exempt(id);
        self.break_deadlock(id);
        self.emit_if_ready(id);
    }

    /// Emits one prepare for each holder with facts to suspend.
    fn emit_unsent_prepares(&mut self, id: ChangeId) {
        let unsaid = std::mem::take(&mut self.changes.get_mut(&id).expect("it is under way").unsaid);
        let mut asked = BTreeMap::<Holder, Vec<UpdatedKey>>::new();
        for (holder, told) in unsaid {
            asked.entry(holder).or_default().push(told);
        }
        self.emit_prepares(id, asked);
    }

    /// Begins to invalidate a key for a change: all of it, or these names. `told`: the new value can be sent.
    pub(super) fn begin(&mut self, id: ChangeId, key: LeaseKey, (names, told): (Vec<Name>, bool)) {
        let change = self.changes.get_mut(&id).expect("it is under way");
        let by = change.by;
        let new_key = change.keys.insert(key);
        let whole = names.is_empty();
        let facts =
            if whole { vec![(key, None)] } else { names.into_iter().map(|name| (key, Some(name))).collect() };
        let facts: Vec<FactKey> = facts.into_iter().filter(|fact| !change.facts.contains(fact)).collect();
        // Since the change named the key before, no grant was given on it.
        if facts.is_empty() {
            return;
        }
        self.begin_facts(id, &facts);
        let names: Vec<Name> = facts.into_iter().filter_map(|(_, name)| name).collect();
        let (owed, held) = self.recall_others(key, (by, new_key), (&names, told));
        for recall in owed {
            self.recalls.get_mut(&recall).expect("it is out").waiting.push(id);
            self.changes.get_mut(&id).expect("it has begun").owed.insert(recall);
        }
        self.changes.get_mut(&id).expect("it has begun").unsaid.extend(held);
        self.exempt(id);
    }

    /// Lets a prioritised write-back go on without waiting, whatever it recalled.
    fn exempt(&mut self, id: ChangeId) {
        if self.is_prioritised(id) {
            self.bypass_all(id);
        }
    }

    /// Begins to change a key. Returns the recalls that must be acknowledged before the key may change, and the holders
    /// that get a prepare instead.
    fn recall_others(
        &mut self,
        key: LeaseKey,
        (by, new): (Option<Holder>, bool),
        (names, told): (&[Name], bool),
    ) -> (Vec<RecallId>, Vec<(Holder, UpdatedKey)>) {
        let state = self.keys.entry(key).or_default();
        let asked =
            state.recalls.iter().filter(|(holder, _)| Some(**holder) != by).map(|(_, recall)| *recall);
        let mut owed: Vec<RecallId> = asked.filter(|recall| self.recalls[recall].grant.is_some()).collect();
        let seats = self.entries.range((key, Holder(0))..=(key, Holder(u64::MAX)));
        let others = seats.map(|(seat, _)| *seat).filter(|seat| Some(seat.1) != by);
        let (told, others): (Vec<GrantKey>, Vec<GrantKey>) =
            others.partition(|seat| told && self.can_update(seat.1, key, names));
        // Data never counts: while contended it would not be granted, and could still be in a kernel's page cache,
        // where no recall would drop it.
        let young = |seat: &GrantKey| self.now < self.entries[seat].since.after(self.config.young);
        let counts = key.covers != LeaseScope::Data && others.iter().any(young);
        if new {
            let state = self.keys.get_mut(&key).expect("just seen");
            state.begin_change(self.now, by, counts, &self.config);
        }
        if by.is_none() {
            self.note_host_change(key);
            self.note_changed(key, None);
        }
        for seat in others {
            // An earlier recall in this loop may have prioritised a write-back, which recalls too.
            let asked = self.keys.get(&key).and_then(|state| state.recalls.get(&seat.1)).copied();
            owed.push(asked.unwrap_or_else(|| self.recall(seat, names.to_vec())));
        }
        let mut held = Vec::new();
        for (_, holder) in told {
            let node = self.suspend_grant(key, holder);
            let each = |name| (holder, UpdatedKey { key, node, name });
            match names {
                [] => held.push(each(None)),
                names => held.extend(names.iter().cloned().map(Some).map(each)),
            }
        }
        self.update_key(key);
        (owed, held)
    }

    /// Notes that a key was changed without waiting for other holders: live grants on it, and recalls not yet
    /// acknowledged, no longer prove that only their holder was there.
    pub(super) fn note_changed(&mut self, key: LeaseKey, by: Option<Holder>) {
        let others = |holder: &Holder| Some(*holder) != by;
        let seats = self.entries.range_mut((key, Holder(0))..=(key, Holder(u64::MAX)));
        seats
            .filter(|((_, holder), _)| others(holder))
            .for_each(|(_, entry)| entry.grants_since_other_change = Entry::CHANGED_BY_OTHER);
        let asked = self.keys.get(&key).into_iter().flat_map(|state| &state.recalls);
        let asked: Vec<RecallId> = asked.filter(|(holder, _)| others(holder)).map(|(_, id)| *id).collect();
        asked.into_iter().for_each(|recall| self.drop_base(recall));
    }

    /// Recalls a live grant.
    pub(super) fn recall(&mut self, seat: GrantKey, names: Vec<Name>) -> RecallId {
        let (key, holder) = seat;
        let entry = self.entries.remove(&seat).expect("only what stands is recalled");
        // A recall without names is for all names.
        let names = if entry.is(Entry::WITHOUT_NAMES) { Vec::new() } else { names };
        let id = self.numbers.next_recall();
        let account = self.accounts.get_mut(&holder).expect("a grant has a holder");
        let held = account.grants.remove(&entry.id).expect("its holder has it");
        account.recalled.insert(entry.id, RecalledGrant { recall: id, until: held.until });
        account.owed.insert(id, self.now);
        let cut = account.disconnected;
        let (first, Entry { id: grant, node, .. }) = (entry.held_exclusively_since(), entry);
        let outstanding = OutstandingRecall {
            holder,
            key,
            node,
            names,
            grant: Some(grant),
            held_exclusively_since: first,
            base: MergeBase::default(),
            waiting: Vec::new(),
        };
        if !cut {
            self.outputs.push_back(outstanding.output(id));
        }
        self.recalls.insert(id, outstanding);
        let earlier = self.keys.entry(key).or_default().recalls.insert(holder, id);
        assert!(earlier.is_none(), "nothing is granted while a recall is out");
        self.counters.recalled += 1;
        self.arm_holder(holder);
        self.prioritise(key, holder);
        id
    }

    /// Re-emits every outstanding recall and prepare of a holder, for its new connection.
    pub(super) fn resend_owed(&mut self, holder: Holder) {
        for id in self.accounts[&holder].owed.keys() {
            let output = match self.recalls.get(id) {
                Some(recall) => recall.output(*id),
                None => LeaseOutput::Prepare { holder, hold: self.pending_updates[id].hold.clone() },
            };
            self.outputs.push_back(output);
        }
    }

    /// Takes an acknowledgement. Returns false if the holder did not owe it.
    pub(super) fn acknowledge(&mut self, holder: Holder, id: RecallId) -> bool {
        self.note_delay(holder, id);
        let Some(account) = self.accounts.get_mut(&holder) else { return false };
        if account.owed.remove(&id).is_none() {
            return false;
        }
        let recall = self.recalls.remove(&id);
        self.merging.removed(recall.as_ref());
        if let Some(grant) = recall.as_ref().and_then(|recall| recall.grant)
            && let Some(recalled) = account.recalled.remove(&grant)
        {
            account.end(grant, recalled.until);
        }
        if account.owed.is_empty()
            && let Some(since) = account.suspect.take()
        {
            let (party, delays_others) = (account.client_origin, std::mem::take(&mut account.delays_others));
            self.outputs.push_back(LeaseOutput::Trusted(holder));
            self.penalise(party, since, delays_others);
        }
        match recall {
            Some(OutstandingRecall { key, waiting, .. }) => {
                self.keys.get_mut(&key).expect("a key with a recall").recalls.remove(&holder);
                self.note_holders(key);
                self.release_waiters(id, waiting);
            }
            None => {
                let PendingUpdate { waiting, .. } =
                    self.pending_updates.remove(&id).expect("what is owed is out");
                self.release_waiters(id, vec![waiting]);
            }
        }
        true
    }

    /// Ends the wait of these changes for an acknowledgement.
    pub(super) fn release_waiters(&mut self, recall: RecallId, mut waiting: Vec<ChangeId>) {
        waiting.extend(self.bypassed.remove(&recall).into_iter().flat_map(|left| left.waiting));
        for id in waiting {
            let Some(change) = self.changes.get_mut(&id) else { continue };
            if !change.owed.remove(&recall) {
                continue;
            }
            match change.part.reader {
                Some(_) => self.continue_read(id),
                None => self.emit_if_ready(id),
            }
        }
    }

    pub(super) fn emit_if_ready(&mut self, id: ChangeId) {
        let change = self.changes.get_mut(&id).expect("it is under way");
        if change.is_ready() && !change.ready_emitted {
            change.ready_emitted = true;
            self.outputs.push_back(LeaseOutput::Ready(id));
        }
    }

    /// Does what is due for a holder when its timer fires, which may be early.
    pub(super) fn handle_holder_timer(&mut self, holder: Holder) {
        while let Some(outlived) = self.accounts[&holder].first_expired(self.now) {
            self.counters.expired += 1;
            self.end_grant(holder, outlived);
        }
        let account = self.accounts.get_mut(&holder).expect("its moment was set");
        if account.has_lapsed(self.now, &self.config) {
            self.counters.fenced += 1;
            // Before any change goes on that waited for this holder.
            self.outputs.push_back(LeaseOutput::Fenced(holder));
            self.end_holder(holder);
            return;
        }
        if account.exceeds_patience(self.now, &self.config) {
            account.suspect = account.owes_since();
            self.counters.suspected += 1;
            self.outputs.push_back(LeaseOutput::Suspect(holder));
            self.note_delays(holder, true);
            self.release_readers(holder);
        }
        self.arm_holder(holder);
    }

    pub(super) fn arm_holder(&mut self, holder: Holder) {
        let account = self.accounts.get_mut(&holder).expect("a holder");
        let due = account.due(&self.config);
        if !account.armed.is_no_later_than(due.0) {
            self.timers.arm(&mut account.armed, Due::Holder(holder), due);
        }
    }

    /// Ends states of a key that are over, and arms its next timer.
    pub(super) fn update_key(&mut self, key: LeaseKey) {
        let Some(state) = self.keys.get_mut(&key) else { return };
        if state.end_expired_states(self.now, &self.config) {
            self.timers.disarm(state.armed, Due::Key(key));
            self.keys.remove(&key);
        } else {
            let due = state.due(&self.config);
            self.timers.arm(&mut state.armed, Due::Key(key), due);
        }
    }
}
