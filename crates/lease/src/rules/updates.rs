//! Updates in place of recalls, for holders that take them (docs/decisions/0014-pushes.md). The grant goes on.
//!
//! A **fact** is the part of a key whose new value can be sent: a name, or an inode's attributes. Several changes of
//! one fact may be in progress at a time. The last of them sends the fact's value, if that value was observed after all
//! others had ended.

use crate::state::{Entry, FactKey, PendingUpdate, State, SuspendedFacts};
use crate::types::{ChangeId, Holder, LeaseKey, LeaseOutput, ObservedAt, UpdatedKey};
use nigh_types::{LeaseScope, Mode, Name, NodeId, UpdatePrepare, UpdateScope};
use std::collections::BTreeMap;

/// Acknowledgements owed by one holder beyond which it gets recalls instead of updates.
const MAX_OWED_FOR_UPDATES: u64 = 256;

pub(crate) fn awaiting_update(table: &State, id: ChangeId) -> impl Iterator<Item = Holder> + '_ {
    let held = table.changes.get(&id).into_iter().flat_map(|change| &change.suspended);
    held.map(|held| held.holder).filter(|holder| table.accounts.contains_key(holder))
}

pub(crate) fn observe(table: &mut State, id: ChangeId, looked: ObservedAt) -> bool {
    let Some(change) = table.changes.get_mut(&id) else { return true };
    change.looked = Some(looked);
    let told = change.suspended.iter().flat_map(|held| &held.facts);
    told.map(|told| &table.facts[&told.fact()]).all(|fact| fact.under_way > 1 || fact.ended <= looked.0)
}

/// Notes facts that a change names for the first time.
pub(crate) fn begin_facts(table: &mut State, id: ChangeId, facts: &[FactKey]) {
    for fact in facts {
        table.facts.entry(fact.clone()).or_default().under_way += 1;
    }
    table.changes.get_mut(&id).expect("it is under way").facts.extend_from_slice(facts);
}

/// Whether this holder can be sent the new values of these names of a key. A write grant excludes other holders'
/// changes, so it is recalled.
pub(crate) fn can_update(table: &State, holder: Holder, key: LeaseKey, names: &[Name]) -> bool {
    let tells = match key.covers {
        LeaseScope::Directory => !names.is_empty(),
        LeaseScope::Attributes => true,
        LeaseScope::Data | LeaseScope::Dentry | LeaseScope::NegativeDentry => false,
    };
    let account = &table.accounts[&holder];
    // A recall ends grants, so the number of recalls is bounded.
    let has_room = (account.owed.len() as u64) < MAX_OWED_FOR_UPDATES;
    tells
        && has_room
        && table.entries[&(key, holder)].mode() == Mode::Read
        && account.takes_updates
        && !account.confined
        && account.suspect.is_none()
        && !account.disconnected
}

/// Marks a live grant as about to be changed by another holder; the grant goes on.
pub(crate) fn suspend_grant(table: &mut State, key: LeaseKey, holder: Holder) -> NodeId {
    let entry = table.entries.get_mut(&(key, holder)).expect("only what stands is held");
    entry.grants_since_other_change = Entry::CHANGED_BY_OTHER;
    entry.node
}

/// Emits one prepare per holder for all facts that a change has named and this holder has not been asked about.
pub(crate) fn emit_prepares(table: &mut State, id: ChangeId, asked: BTreeMap<Holder, Vec<UpdatedKey>>) {
    for (holder, facts) in asked {
        let number = table.numbers.next_recall();
        let hold = UpdatePrepare { id: number, facts: by_key(&facts) };
        let account = table.accounts.get_mut(&holder).expect("a grant has a holder");
        account.owed.insert(number, table.now);
        table.outputs.push_back(LeaseOutput::Prepare { holder, hold: hold.clone() });
        table.pending_updates.insert(number, PendingUpdate { holder, hold, waiting: id });
        let change = table.changes.get_mut(&id).expect("it is under way");
        change.owed.insert(number);
        change.suspended.push(SuspendedFacts { holder, id: number, facts });
        table.counters.prepared += 1;
        table.arm_holder(holder);
    }
}

/// Ends a change: each holder that was sent a prepare receives a commit with the values that were observed.
pub(crate) fn commit(
    table: &mut State,
    facts: &[FactKey],
    held: Vec<SuspendedFacts>,
    looked: Option<ObservedAt>,
) {
    for SuspendedFacts { holder, id, facts } in held {
        // Also for a fenced holder: the prepare may be in its stream, and the session comes back.
        let told = facts.into_iter().filter(|told| is_final(table, told, looked)).collect();
        table.outputs.push_back(LeaseOutput::Commit { holder, id, told });
    }
    table.numbers.end += 1;
    for fact in facts {
        let state = table.facts.get_mut(fact).expect("it is being changed");
        (state.under_way, state.ended) = (state.under_way - 1, table.numbers.end);
        if state.under_way == 0 {
            table.facts.remove(fact);
        }
    }
}

/// Whether a change's observation of a fact is final: not while other changes of it are in progress, since the last
/// of them sends the value.
fn is_final(table: &State, told: &UpdatedKey, looked: Option<ObservedAt>) -> bool {
    let fact = &table.facts[&told.fact()];
    looked.is_some_and(|looked| fact.under_way == 1 && fact.ended <= looked.0)
}

pub(crate) fn owed_nodes(table: &State, holder: Holder) -> impl Iterator<Item = (NodeId, LeaseScope)> + '_ {
    let owed = table.accounts.get(&holder).into_iter().flat_map(|account| account.owed.keys());
    owed.flat_map(|id| {
        let recalled = table.recalls.get(id).map(|recall| (recall.node, recall.key.covers));
        let held = table.pending_updates.get(id).into_iter().flat_map(|holding| &holding.hold.facts);
        recalled.into_iter().chain(held.map(|held| (held.node, held.covers)))
    })
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
