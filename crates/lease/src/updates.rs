//! Updates in place of recalls, for holders that take them (docs/decisions/0014-pushes.md). The grant goes on.
//!
//! A **fact** is the part of a key whose new value can be sent: a name, or an inode's attributes. Several changes of
//! one fact may be in progress at a time. The last of them sends the fact's value, if that value was observed after all
//! others had ended.

use super::types::{ChangeId, Holder, LeaseKey, LeaseOutput};
use super::{Entry, LeaseTable};
use nigh_types::{LeaseScope, Name, NodeId, RecallId, Time, UpdatePrepare, UpdateScope};
use std::collections::BTreeMap;

/// A key, and the name if the key is updated name by name.
pub(super) type FactKey = (LeaseKey, Option<Name>);

/// How many changes of a fact are in progress, and which end of a change was the latest.
#[derive(Clone, Default, Debug)]
pub(super) struct FactState {
    under_way: u64,
    ended: u64,
}

/// An update prepare whose acknowledgement is owed.
#[derive(Clone, Debug)]
pub(super) struct PendingUpdate {
    pub(super) holder: Holder,
    pub(super) hold: UpdatePrepare,
    pub(super) waiting: ChangeId,
}

/// The facts that one holder suspends during a change.
#[derive(Clone, Debug)]
pub(super) struct SuspendedFacts {
    holder: Holder,
    id: RecallId,
    facts: Vec<UpdatedKey>,
}

/// An updated fact, with the node id in its holder's export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpdatedKey {
    pub key: LeaseKey,
    pub node: NodeId,
    /// With [`LeaseScope::Directory`].
    pub name: Option<Name>,
}

/// When the result of a change was observed, as a count of ended changes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ObservedAt(u64);

impl LeaseTable {
    /// Acknowledgements owed by one holder beyond which it gets recalls instead of updates.
    const MAX_OWED_FOR_UPDATES: u64 = 256;

    /// Notes that this holder takes updates: changes by others are sent to it where possible.
    pub fn handle_takes_updates(&mut self, now: Time, holder: Holder) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.takes_updates = true;
        }
    }

    /// The holders that await the result of a change.
    pub fn awaiting_update(&self, id: ChangeId) -> impl Iterator<Item = Holder> + '_ {
        let held = self.changes.get(&id).into_iter().flat_map(|change| &change.suspended);
        held.map(|held| held.holder).filter(|holder| self.accounts.contains_key(holder))
    }

    /// The observation time for a change, to be asked after its effect and before its result is read.
    #[must_use]
    pub fn observation_point(&self) -> ObservedAt {
        ObservedAt(self.numbers.end)
    }

    /// Notes when a change's result was read, which its commit sends. Returns false if other changes have ended since:
    /// the result must be read again.
    pub fn handle_observed(&mut self, id: ChangeId, looked: ObservedAt) -> bool {
        let Some(change) = self.changes.get_mut(&id) else { return true };
        change.looked = Some(looked);
        let told = change.suspended.iter().flat_map(|held| &held.facts);
        told.map(|told| &self.facts[&told.fact()]).all(|fact| fact.under_way > 1 || fact.ended <= looked.0)
    }

    /// Notes facts that a change names for the first time.
    pub(super) fn begin_facts(&mut self, id: ChangeId, facts: &[FactKey]) {
        for fact in facts {
            self.facts.entry(fact.clone()).or_default().under_way += 1;
        }
        self.changes.get_mut(&id).expect("it is under way").facts.extend_from_slice(facts);
    }

    /// Whether this holder can be sent the new values of these names of a key.
    pub(super) fn can_update(&self, holder: Holder, key: LeaseKey, names: &[Name]) -> bool {
        let tells = match key.covers {
            LeaseScope::Directory => !names.is_empty(),
            LeaseScope::Attributes => true,
            LeaseScope::Data | LeaseScope::Dentry | LeaseScope::NegativeDentry => false,
        };
        let account = &self.accounts[&holder];
        // A recall ends grants, so the number of recalls is bounded.
        let has_room = (account.owed.len() as u64) < Self::MAX_OWED_FOR_UPDATES;
        tells
            && has_room
            && account.takes_updates
            && !account.confined
            && account.suspect.is_none()
            && !account.disconnected
    }

    /// Marks a live grant as about to be changed by another holder; the grant goes on.
    pub(super) fn suspend_grant(&mut self, key: LeaseKey, holder: Holder) -> NodeId {
        let entry = self.entries.get_mut(&(key, holder)).expect("only what stands is held");
        entry.grants_since_other_change = Entry::CHANGED_BY_OTHER;
        entry.node
    }

    /// Emits one prepare per holder for all facts that a change has named and this holder has not been asked about.
    pub(super) fn emit_prepares(&mut self, id: ChangeId, asked: BTreeMap<Holder, Vec<UpdatedKey>>) {
        for (holder, facts) in asked {
            let number = self.numbers.next_recall();
            let hold = UpdatePrepare { id: number, facts: by_key(&facts) };
            let account = self.accounts.get_mut(&holder).expect("a grant has a holder");
            account.owed.insert(number, self.now);
            self.outputs.push_back(LeaseOutput::Prepare { holder, hold: hold.clone() });
            self.pending_updates.insert(number, PendingUpdate { holder, hold, waiting: id });
            let change = self.changes.get_mut(&id).expect("it is under way");
            change.owed.insert(number);
            change.suspended.push(SuspendedFacts { holder, id: number, facts });
            self.counters.prepared += 1;
            self.arm_holder(holder);
        }
    }

    /// Ends a change: each holder that was sent a prepare receives a commit with the values that were observed.
    pub(super) fn commit(
        &mut self,
        facts: &[FactKey],
        held: Vec<SuspendedFacts>,
        looked: Option<ObservedAt>,
    ) {
        for SuspendedFacts { holder, id, facts } in held {
            // Also for a fenced holder: the prepare may be in its stream, and the session comes back.
            let told = facts.into_iter().filter(|told| self.is_final(told, looked)).collect();
            self.outputs.push_back(LeaseOutput::Commit { holder, id, told });
        }
        self.numbers.end += 1;
        for fact in facts {
            let state = self.facts.get_mut(fact).expect("it is being changed");
            (state.under_way, state.ended) = (state.under_way - 1, self.numbers.end);
            if state.under_way == 0 {
                self.facts.remove(fact);
            }
        }
    }

    /// Whether a change's observation of a fact is final: not while other changes of it are in progress, since the last
    /// of them sends the value.
    fn is_final(&self, told: &UpdatedKey, looked: Option<ObservedAt>) -> bool {
        let fact = &self.facts[&told.fact()];
        looked.is_some_and(|looked| fact.under_way == 1 && fact.ended <= looked.0)
    }

    /// The nodes and scopes whose acknowledgement a holder owes, numbered as in its export. Others' write-back may be
    /// applied before them (rule 10).
    pub fn owed_nodes(&self, holder: Holder) -> impl Iterator<Item = (NodeId, LeaseScope)> + '_ {
        let owed = self.accounts.get(&holder).into_iter().flat_map(|account| account.owed.keys());
        owed.flat_map(|id| {
            let recalled = self.recalls.get(id).map(|recall| (recall.node, recall.key.covers));
            let held = self.pending_updates.get(id).into_iter().flat_map(|holding| &holding.hold.facts);
            recalled.into_iter().chain(held.map(|held| (held.node, held.covers)))
        })
    }

    /// The holder that owes the acknowledgement of a recall or prepare.
    pub(super) fn owing_holder(&self, id: RecallId) -> Holder {
        self.recalls.get(&id).map(|recall| recall.holder).unwrap_or_else(|| self.pending_updates[&id].holder)
    }

    /// The changes that wait for this acknowledgement.
    pub(super) fn waiting_changes(&self, id: RecallId) -> &[ChangeId] {
        match self.recalls.get(&id) {
            Some(recall) => &recall.waiting,
            None => std::slice::from_ref(&self.pending_updates[&id].waiting),
        }
    }
}

impl UpdatedKey {
    fn fact(&self) -> FactKey {
        (self.key, self.name.clone())
    }
}

/// Groups the names of each key.
fn by_key(facts: &[UpdatedKey]) -> Vec<UpdateScope> {
    let mut held: Vec<(LeaseKey, UpdateScope)> = Vec::new();
    for UpdatedKey { key, node, name } in facts {
        match held.iter_mut().find(|(of, _)| of == key) {
            Some((_, held)) => held.names.extend(name.clone()),
            None => {
                let names = name.iter().cloned().collect();
                held.push((*key, UpdateScope { node: *node, covers: key.covers, names }));
            }
        }
    }
    held.into_iter().map(|(_, held)| held).collect()
}
