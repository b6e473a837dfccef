//! Recalls, the changes that wait for them, and the fate of holders that owe acknowledgements.

use super::{deadlock, delays, grants, merging, read_grants, updates, write_queue};
use crate::merge_base::MergeBase;
use crate::state::{Entry, FactKey, GrantKey, OutstandingRecall, PendingUpdate, RecalledGrant, State};
use crate::types::{Change, ChangeId, Holder, LeaseKey, LeaseOutput, UpdatedKey};
use nigh_types::{LeaseScope, Mode, Name, RecallId};
use std::collections::BTreeMap;

/// Adds these keys to a change that has begun.
pub(crate) fn extend(table: &mut State, id: ChangeId, changes: &[Change]) {
    if !table.changes.contains_key(&id) {
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
        let may_write = write_queue::enter_write_queue(table, id, change.key);
        (!may_write).then_some(change.key)
    });
    for (key, (names, told)) in keys {
        if Some(key) != waits {
            begin(table, id, key, (names.unwrap_or_default(), told));
        }
    }
    emit_unsent_prepares(table, id);
    write_queue::prioritise_awaited(table, id);
    exempt(table, id);
    deadlock::break_deadlock(table, id);
    table.emit_if_ready(id);
}

/// Emits one prepare for each holder with facts to suspend.
fn emit_unsent_prepares(table: &mut State, id: ChangeId) {
    let unsaid = std::mem::take(&mut table.changes.get_mut(&id).expect("it is under way").unsaid);
    let mut asked = BTreeMap::<Holder, Vec<UpdatedKey>>::new();
    for (holder, told) in unsaid {
        asked.entry(holder).or_default().push(told);
    }
    updates::emit_prepares(table, id, asked);
}

/// Begins to invalidate a key for a change: all of it, or these names. `told`: the new value can be sent.
pub(crate) fn begin(table: &mut State, id: ChangeId, key: LeaseKey, (names, told): (Vec<Name>, bool)) {
    let change = table.changes.get_mut(&id).expect("it is under way");
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
    updates::begin_facts(table, id, &facts);
    let names: Vec<Name> = facts.into_iter().filter_map(|(_, name)| name).collect();
    let (owed, held) = recall_others(table, key, (by, new_key), (&names, told));
    for recall in owed {
        table.recalls.get_mut(&recall).expect("it is out").waiting.push(id);
        table.changes.get_mut(&id).expect("it has begun").owed.insert(recall);
    }
    table.changes.get_mut(&id).expect("it has begun").unsaid.extend(held);
    exempt(table, id);
}

/// Lets a prioritised write-back go on without waiting, whatever it recalled.
fn exempt(table: &mut State, id: ChangeId) {
    if write_queue::is_prioritised(table, id) {
        write_queue::bypass_all(table, id);
    }
}

/// Begins to change a key. Returns the recalls that must be acknowledged before the key may change, and the holders
/// that get a prepare instead.
fn recall_others(
    table: &mut State,
    key: LeaseKey,
    (by, new): (Option<Holder>, bool),
    (names, told): (&[Name], bool),
) -> (Vec<RecallId>, Vec<(Holder, UpdatedKey)>) {
    let state = table.keys.entry(key).or_default();
    let asked = state.recalls.iter().filter(|(holder, _)| Some(**holder) != by).map(|(_, recall)| *recall);
    let mut owed: Vec<RecallId> = asked.filter(|recall| table.recalls[recall].grant.is_some()).collect();
    let seats = table.entries.range((key, Holder(0))..=(key, Holder(u64::MAX)));
    let others = seats.map(|(seat, _)| *seat).filter(|seat| Some(seat.1) != by);
    let (told, others): (Vec<GrantKey>, Vec<GrantKey>) =
        others.partition(|seat| told && updates::can_update(table, seat.1, key, names));
    // Data never counts: while contended it would not be granted, and could still be in a kernel's page cache,
    // where no recall would drop it.
    let young = |seat: &GrantKey| table.now < table.entries[seat].since.after(table.config.young);
    let counts = key.covers != LeaseScope::Data && others.iter().any(young);
    if new {
        let state = table.keys.get_mut(&key).expect("just seen");
        state.begin_change(table.now, by, counts, &table.config);
    }
    if by.is_none() {
        write_queue::note_host_change(table, key);
        note_changed(table, key, None);
    }
    for seat in others {
        // An earlier recall in this loop may have prioritised a write-back, which recalls too.
        let asked = table.keys.get(&key).and_then(|state| state.recalls.get(&seat.1)).copied();
        owed.push(asked.unwrap_or_else(|| recall(table, seat, names.to_vec())));
    }
    let mut held = Vec::new();
    for (_, holder) in told {
        let node = updates::suspend_grant(table, key, holder);
        let each = |name| (holder, UpdatedKey { key, node, name });
        match names {
            [] => held.push(each(None)),
            names => held.extend(names.iter().cloned().map(Some).map(each)),
        }
    }
    table.update_key(key);
    (owed, held)
}

/// Notes that a key was changed without waiting for other holders: live grants on it, and recalls not yet
/// acknowledged, no longer prove that only their holder was there.
pub(crate) fn note_changed(table: &mut State, key: LeaseKey, by: Option<Holder>) {
    let others = |holder: &Holder| Some(*holder) != by;
    let seats = table.entries.range_mut((key, Holder(0))..=(key, Holder(u64::MAX)));
    seats
        .filter(|((_, holder), _)| others(holder))
        .for_each(|(_, entry)| entry.grants_since_other_change = Entry::CHANGED_BY_OTHER);
    let asked = table.keys.get(&key).into_iter().flat_map(|state| &state.recalls);
    let asked: Vec<RecallId> = asked.filter(|(holder, _)| others(holder)).map(|(_, id)| *id).collect();
    asked.into_iter().for_each(|recall| merging::drop_base(table, recall));
}

/// Recalls a live grant.
pub(crate) fn recall(table: &mut State, seat: GrantKey, names: Vec<Name>) -> RecallId {
    let (key, holder) = seat;
    let entry = table.entries.remove(&seat).expect("only what stands is recalled");
    // A recall without names is for all names.
    let names = if entry.is(Entry::WITHOUT_NAMES) { Vec::new() } else { names };
    let id = table.numbers.next_recall();
    let account = table.accounts.get_mut(&holder).expect("a grant has a holder");
    let held = account.grants.remove(&entry.id).expect("its holder has it");
    account.recalled.insert(entry.id, RecalledGrant { recall: id, until: held.until });
    account.owed.insert(id, table.now);
    let cut = account.disconnected;
    let (first, mode, Entry { id: grant, node, .. }) = (entry.held_exclusively_since(), entry.mode(), entry);
    let outstanding = OutstandingRecall {
        holder,
        key,
        node,
        names,
        grant: Some(grant),
        mode,
        held_exclusively_since: first,
        base: MergeBase::default(),
        waiting: Vec::new(),
    };
    if !cut {
        table.outputs.push_back(outstanding.output(id));
    }
    table.recalls.insert(id, outstanding);
    if mode == Mode::Write {
        table.write_recalls.insert(key, id);
    }
    let earlier = table.keys.entry(key).or_default().recalls.insert(holder, id);
    assert!(earlier.is_none(), "nothing is granted while a recall is out");
    table.counters.recalled += 1;
    table.arm_holder(holder);
    write_queue::prioritise(table, key, holder);
    id
}

/// Recalls a grant whose key may have changed already.
pub(crate) fn recall_missed(table: &mut State, seat: GrantKey) {
    table.entries.get_mut(&seat).expect("only what stands is missed").grants_since_other_change =
        Entry::CHANGED_BY_OTHER;
    recall(table, seat, Vec::new());
    grants::note_holders(table, seat.0);
}

/// Re-emits every outstanding recall and prepare of a holder, for its new connection.
pub(crate) fn resend_owed(table: &mut State, holder: Holder) {
    for id in table.accounts[&holder].owed.keys() {
        let output = match table.recalls.get(id) {
            Some(recall) => recall.output(*id),
            None => LeaseOutput::Prepare { holder, hold: table.pending_updates[id].hold.clone() },
        };
        table.outputs.push_back(output);
    }
}

/// Takes an acknowledgement. Returns false if the holder did not owe it.
pub(crate) fn acknowledge(table: &mut State, holder: Holder, id: RecallId) -> bool {
    delays::note_delay(table, holder, id);
    let Some(account) = table.accounts.get_mut(&holder) else { return false };
    if account.owed.remove(&id).is_none() {
        return false;
    }
    let recall = table.recalls.remove(&id);
    table.merging.removed(recall.as_ref());
    if let Some(grant) = recall.as_ref().and_then(|recall| recall.grant)
        && let Some(recalled) = account.recalled.remove(&grant)
    {
        account.end(grant, recalled.until);
    }
    if account.owed.is_empty()
        && let Some(since) = account.suspect.take()
    {
        let (party, delays_others) = (account.client_origin, std::mem::take(&mut account.delays_others));
        table.outputs.push_back(LeaseOutput::Trusted(holder));
        delays::penalise(table, party, since, delays_others);
    }
    match recall {
        Some(OutstandingRecall { key, waiting, .. }) => {
            table.forget_write_recall(key, id);
            table.keys.get_mut(&key).expect("a key with a recall").recalls.remove(&holder);
            grants::note_holders(table, key);
            release_waiters(table, id, waiting);
        }
        None => {
            let PendingUpdate { waiting, .. } =
                table.pending_updates.remove(&id).expect("what is owed is out");
            release_waiters(table, id, vec![waiting]);
        }
    }
    true
}

/// Ends the wait of these changes for an acknowledgement.
pub(crate) fn release_waiters(table: &mut State, recall: RecallId, mut waiting: Vec<ChangeId>) {
    waiting.extend(table.bypassed.remove(&recall).into_iter().flat_map(|left| left.waiting));
    for id in waiting {
        let Some(change) = table.changes.get_mut(&id) else { continue };
        if !change.owed.remove(&recall) {
            continue;
        }
        match change.part.reader {
            Some(_) => read_grants::continue_read(table, id),
            None => table.emit_if_ready(id),
        }
    }
}

/// Does what is due for a holder when its timer fires, which may be early.
pub(crate) fn handle_holder_timer(table: &mut State, holder: Holder) {
    while let Some(outlived) = table.accounts[&holder].first_expired(table.now) {
        table.counters.expired += 1;
        grants::end_grant(table, holder, outlived);
    }
    let account = table.accounts.get_mut(&holder).expect("its moment was set");
    if account.has_lapsed(table.now, &table.config) {
        table.counters.fenced += 1;
        // Before any change goes on that waited for this holder.
        table.outputs.push_back(LeaseOutput::Fenced(holder));
        grants::end_holder(table, holder);
        return;
    }
    if account.exceeds_patience(table.now, &table.config) {
        account.suspect = account.owes_since();
        table.counters.suspected += 1;
        table.outputs.push_back(LeaseOutput::Suspect(holder));
        delays::note_delays(table, holder, true);
        read_grants::release_readers(table, holder);
    }
    table.arm_holder(holder);
}
