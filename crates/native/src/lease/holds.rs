//! Holds: in the place of a recall, where a holder takes pushes (docs/decisions/0014-pushes.md). The grant goes on.
//!
//! A **fact** is what of a key may be told when it has changed: a name, or an inode's attributes. Several changes of one
//! fact may be under way at the same time; what it has become is told by the last of them, if whoever looked did so
//! after all others had ended.

use super::words::{ChangeId, Holder, LeaseKey, LeaseOutput};
use super::{Entry, LeaseTable};
use nigh_types::{Covers, Held, Hold, Name, NodeId, RecallId, Time};
use std::collections::BTreeMap;

/// A key, and the name of those that are told name by name.
pub(super) type Fact = (LeaseKey, Option<Name>);

/// How often a fact is being changed, and which end of a change was the latest.
#[derive(Clone, Default, Debug)]
pub(super) struct FactState {
    under_way: u64,
    ended: u64,
}

/// A hold whose acknowledgement is owed.
#[derive(Clone, Debug)]
pub(super) struct Holding {
    pub(super) holder: Holder,
    pub(super) hold: Hold,
    pub(super) waiting: ChangeId,
}

/// What one holder holds back for a change.
#[derive(Clone, Debug)]
pub(super) struct HeldBack {
    holder: Holder,
    id: RecallId,
    facts: Vec<Told>,
}

/// A held fact, as its holder's export numbers it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Told {
    pub key: LeaseKey,
    pub node: NodeId,
    /// With [`Covers::Names`].
    pub name: Option<Name>,
}

/// When somebody looked what has become of a change.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Looked(u64);

impl LeaseTable {
    /// Debts of one holder beyond which it is told nothing more, but asked to give back.
    const MOST_HELD: u64 = 256;

    /// From now on this holder is told what others change, where that can be told.
    pub fn handle_pushes(&mut self, now: Time, holder: Holder) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.takes_pushes = true;
        }
    }

    /// Who is to be told what a change has made of what it named.
    pub fn awaiting(&self, id: ChangeId) -> impl Iterator<Item = Holder> + '_ {
        let held = self.changes.get(&id).into_iter().flat_map(|change| &change.held);
        held.map(|held| held.holder).filter(|holder| self.accounts.contains_key(holder))
    }

    /// To be asked after a change has had its effect, and before it is looked what has become of it.
    #[must_use]
    pub fn looks(&self) -> Looked {
        Looked(self.numbers.end)
    }

    /// It was seen then what has become of a change, which its end tells. False: others have ended meanwhile, and it is to
    /// be looked at again.
    pub fn handle_looked(&mut self, id: ChangeId, looked: Looked) -> bool {
        let Some(change) = self.changes.get_mut(&id) else { return true };
        change.looked = Some(looked);
        let told = change.held.iter().flat_map(|held| &held.facts);
        told.map(|told| &self.facts[&told.fact()]).all(|fact| fact.under_way > 1 || fact.ended <= looked.0)
    }

    /// A change names facts that it has not named before.
    pub(super) fn begin_facts(&mut self, id: ChangeId, facts: &[Fact]) {
        for fact in facts {
            self.facts.entry(fact.clone()).or_default().under_way += 1;
        }
        self.changes.get_mut(&id).expect("it is under way").facts.extend_from_slice(facts);
    }

    /// Whether this holder can be told what becomes of these names of a key.
    pub(super) fn takes(&self, holder: Holder, key: LeaseKey, names: &[Name]) -> bool {
        let tells = match key.covers {
            Covers::Names => !names.is_empty(),
            Covers::Inode => true,
            Covers::Data | Covers::Entry | Covers::Absence => false,
        };
        let account = &self.accounts[&holder];
        // Recalls end what is asked for, and so have an end themselves.
        let has_room = (account.owed.len() as u64) < Self::MOST_HELD;
        tells
            && has_room
            && account.takes_pushes
            && !account.confined
            && account.suspect.is_none()
            && !account.cut
    }

    /// What stands there goes on, and is about to be something else.
    pub(super) fn hold_entry(&mut self, key: LeaseKey, holder: Holder) -> NodeId {
        let entry = self.entries.get_mut(&(key, holder)).expect("only what stands is held");
        entry.unbroken = Entry::HELD;
        entry.node
    }

    /// One message for all that a change has named so far and this holder has not been told.
    pub(super) fn put_holds(&mut self, id: ChangeId, asked: BTreeMap<Holder, Vec<Told>>) {
        for (holder, facts) in asked {
            let number = self.numbers.next_recall();
            let hold = Hold { id: number, facts: by_key(&facts) };
            let account = self.accounts.get_mut(&holder).expect("a grant has a holder");
            account.owed.insert(number, self.now);
            self.outputs.push_back(LeaseOutput::Hold { holder, hold: hold.clone() });
            self.holds.insert(number, Holding { holder, hold, waiting: id });
            let change = self.changes.get_mut(&id).expect("it is under way");
            change.owed.insert(number);
            change.held.push(HeldBack { holder, id: number, facts });
            self.counters.held += 1;
            self.arm_holder(holder);
        }
    }

    /// A change has ended: who held back for it is told what it has become, as far as that was seen.
    pub(super) fn commit(&mut self, facts: &[Fact], held: Vec<HeldBack>, looked: Option<Looked>) {
        for HeldBack { holder, id, facts } in held {
            // Also where its lease has run out: the hold may lie in its stream, and it comes back.
            let told = facts.into_iter().filter(|told| self.is_told(told, looked)).collect();
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

    /// Not while others are at it: the last of them tells.
    fn is_told(&self, told: &Told, looked: Option<Looked>) -> bool {
        let fact = &self.facts[&told.fact()];
        looked.is_some_and(|looked| fact.under_way == 1 && fact.ended <= looked.0)
    }

    /// Of what a holder owes acknowledgements, as its export numbers it. Write-back of others may be applied before them (rule 10).
    pub fn owed_nodes(&self, holder: Holder) -> impl Iterator<Item = (NodeId, Covers)> + '_ {
        let owed = self.accounts.get(&holder).into_iter().flat_map(|account| account.owed.keys());
        owed.flat_map(|id| {
            let recalled = self.recalls.get(id).map(|recall| (recall.node, recall.key.covers));
            let held = self.holds.get(id).into_iter().flat_map(|holding| &holding.hold.facts);
            recalled.into_iter().chain(held.map(|held| (held.node, held.covers)))
        })
    }

    /// Who owes the acknowledgement of a recall or hold.
    pub(super) fn owes(&self, id: RecallId) -> Holder {
        self.recalls.get(&id).map(|recall| recall.holder).unwrap_or_else(|| self.holds[&id].holder)
    }

    /// Which changes wait for it.
    pub(super) fn awaits(&self, id: RecallId) -> &[ChangeId] {
        match self.recalls.get(&id) {
            Some(recall) => &recall.waiting,
            None => std::slice::from_ref(&self.holds[&id].waiting),
        }
    }
}

impl Told {
    fn fact(&self) -> Fact {
        (self.key, self.name.clone())
    }
}

/// Names of one key together.
fn by_key(facts: &[Told]) -> Vec<Held> {
    let mut held: Vec<(LeaseKey, Held)> = Vec::new();
    for Told { key, node, name } in facts {
        match held.iter_mut().find(|(of, _)| of == key) {
            Some((_, held)) => held.names.extend(name.clone()),
            None => {
                let names = name.iter().cloned().collect();
                held.push((*key, Held { node: *node, covers: key.covers, names }));
            }
        }
    }
    held.into_iter().map(|(_, held)| held).collect()
}
