//! How grants are given, and how they end.

use super::{delays, recalls};
use crate::state::{
    Due, Entry, GrantKey, HeldGrant, HolderState, KeyState, OutstandingRecall, PendingUpdate, State,
};
use crate::types::{GrantRequest, Granted, Holder, LeaseKey, Refusal, with_margin};
use nigh_types::{GrantId, LeaseScope, Mode, RecallId, Span, Time};

pub(crate) fn grant(table: &mut State, request: &GrantRequest) -> Result<Granted, Refusal> {
    let GrantRequest { holder, key, .. } = *request;
    let account =
        table.accounts.get(&holder).filter(|account| !account.disconnected).ok_or(Refusal::Detached)?;
    if account.suspect.is_some() || delays::penalised_until(table, account).is_some() {
        return Err(Refusal::Suspect);
    }
    let state = table.keys.get(&key);
    let changing = match key.covers {
        LeaseScope::Data => state.is_some_and(|state| state.is_changing_for(holder)),
        _ => state.is_some_and(KeyState::is_changing),
    };
    if changing {
        return Err(Refusal::Changing);
    }
    if state.is_some_and(KeyState::is_contended) {
        return Err(Refusal::Contended);
    }
    let none = table.config.grants_per_holder == 0;
    let full = none || account.grant_count() >= table.config.most_grants();
    if full && !table.entries.contains_key(&(key, holder)) {
        return Err(Refusal::Quota);
    }
    let limit = limit_of(table, account, key);
    if would_replace_unlimited(table, (key, holder), limit) {
        return Err(Refusal::Changing);
    }
    recall_conflicting(table, request)?;
    let shared = key.covers == LeaseScope::Directory && share(table, holder, key)?;
    let granted = register(table, request, (shared, limit));
    keep_quota(table, holder);
    Ok(granted)
}

fn register(table: &mut State, request: &GrantRequest, (shared, limit): (bool, Span)) -> Granted {
    let GrantRequest { holder, key, node, mode } = *request;
    let id = table.numbers.next_grant();
    let account = table.accounts.get_mut(&holder).expect("each grant has a holder");
    account.begin(id, HeldGrant { key, until: table.now.after(with_margin(limit)) });
    let unlisted = account.confined && key.covers == LeaseScope::Directory;
    let mark = |applies, mark| if applies { mark } else { 0 };
    let marks = mark(shared, Entry::SHARED)
        | mark(unlisted, Entry::WITHOUT_NAMES)
        | mark(mode == Mode::Write, Entry::WRITE);
    let mut entry =
        Entry { id, node, since: table.now, grants_since_acquired: 0, grants_since_other_change: 0, marks };
    if let Some(earlier) = table.entries.get(&(key, holder)) {
        entry.inherit(earlier);
        let held = account.grants.remove(&earlier.id);
        held.into_iter().for_each(|held| account.end(earlier.id, held.until));
    }
    let listed = !entry.is(Entry::WITHOUT_NAMES);
    table.entries.insert((key, holder), entry);
    table.arm_holder(holder);
    note_holders(table, key);
    Granted { id, mode, shared, limit, listed }
}

/// Page 0008, rule 1: a write grant on a key excludes the grants of all other holders. Recalls those that conflict with
/// this request, and refuses it until none of their holders has one.
///
/// No client changes facts locally yet. When one does, requests for its facts must wait for this recall, because a
/// reply without a grant would not show the local changes.
fn recall_conflicting(table: &mut State, request: &GrantRequest) -> Result<(), Refusal> {
    let GrantRequest { holder, key, mode, .. } = *request;
    let conflicts =
        |other: Holder, theirs: Mode| other != holder && (mode == Mode::Write || theirs == Mode::Write);
    // The holder of a write grant is the only one, so for a read request two holders tell as much as all.
    let looked_at = if mode == Mode::Write { usize::MAX } else { 2 };
    let standing = seats(table, key).take(looked_at).filter(|(other, entry)| conflicts(*other, entry.mode()));
    let standing: Vec<Holder> = standing.map(|(other, _)| other).collect();
    // A read request conflicts with a write grant alone, which is the only one on its key.
    let recalled = |recall: &RecallId| {
        let recall = &table.recalls[recall];
        recall.grant.is_some() && conflicts(recall.holder, recall.mode)
    };
    let is_owed = match mode {
        Mode::Read => table.write_recalls.get(&key).is_some_and(recalled),
        Mode::Write => table.keys.get(&key).is_some_and(|state| state.recalls.values().any(recalled)),
    };
    if standing.is_empty() && !is_owed {
        return Ok(());
    }
    for other in standing {
        // An earlier recall in this loop may have prioritised a write-back, which recalls too.
        if table.entries.contains_key(&(key, other)) {
            recalls::recall(table, (key, other), Vec::new());
        }
    }
    note_holders(table, key);
    Err(Refusal::Exclusive)
}

/// Page 0008, rule 9: a holder that needs exclusive directory leases never has an unshared one together with
/// another holder. Returns whether this grant is shared; refuses it if another holder must be recalled first.
fn share(table: &mut State, holder: Holder, key: LeaseKey) -> Result<bool, Refusal> {
    let others: Vec<(Holder, bool)> =
        holders(table, key).filter(|(other, _)| *other != holder).take(2).collect();
    let wants_alone = |holder: &Holder| table.accounts[holder].needs_exclusive_dir_lease;
    // A holder with an exclusive lease is the only one, so two holders tell as much as all.
    let alone: Vec<Holder> =
        others.iter().filter(|(other, shared)| !shared && wants_alone(other)).map(|o| o.0).collect();
    if !alone.is_empty() || (wants_alone(&holder) && !others.is_empty()) {
        table.keys.entry(key).or_default().share();
    }
    if !alone.is_empty() {
        for other in alone {
            recalls::recall(table, (key, other), Vec::new());
        }
        note_holders(table, key);
        return Err(Refusal::Exclusive);
    }
    let marked = table.keys.get(&key).is_some_and(KeyState::is_shared);
    Ok(marked || !others.is_empty())
}

/// Recalls the least recently registered grant of a holder above its quota; no change waits for it.
fn keep_quota(table: &mut State, holder: Holder) {
    let grants = &table.accounts[&holder].grants;
    if grants.len() as u64 > table.config.grants_per_holder
        && let Some((_, oldest)) = grants.first_key_value()
    {
        recalls::recall(table, (oldest.key, holder), Vec::new());
    }
}

/// Ends one grant; an outstanding recall of it still awaits its acknowledgement. Returns false if the grant had
/// ended.
pub(crate) fn end_grant(table: &mut State, holder: Holder, grant: GrantId) -> bool {
    let Some(account) = table.accounts.get_mut(&holder) else { return false };
    let key = if let Some(HeldGrant { key, until }) = account.grants.remove(&grant) {
        account.end(grant, until);
        let entry = table.entries.remove(&(key, holder));
        assert_eq!(entry.map(|entry| entry.id), Some(grant), "one grant for each holder and key");
        key
    } else if let Some(recalled) = account.recalled.remove(&grant) {
        account.end(grant, recalled.until);
        let outstanding = table.recalls.get_mut(&recalled.recall).expect("what was recalled is out");
        outstanding.grant = None;
        let key = outstanding.key;
        let waiting = std::mem::take(&mut outstanding.waiting);
        recalls::release_waiters(table, recalled.recall, waiting);
        key
    } else {
        return false;
    };
    note_holders(table, key);
    true
}

/// Ends a session with all its grants and owed acknowledgements.
pub(crate) fn end_holder(table: &mut State, holder: Holder) {
    let late = table.accounts.get(&holder).is_some_and(|a| a.exceeds_patience(table.now, &table.config));
    delays::note_delays(table, holder, late);
    let Some(account) = table.accounts.remove(&holder) else { return };
    table.timers.disarm(account.armed, Due::Holder(holder));
    if let Some(since) = account.suspect.or(account.owes_since().filter(|_| late)) {
        delays::penalise(table, account.client_origin, since, account.delays_others);
    }
    // In the order of the trees from which they are removed: for a million grants that takes a third of the time.
    let mut keys: Vec<LeaseKey> = account.grants.values().map(|held| held.key).collect();
    keys.sort_unstable();
    for key in keys {
        table.entries.remove(&(key, holder));
        note_holders(table, key);
    }
    for id in account.owed.keys() {
        if let Some(PendingUpdate { waiting, .. }) = table.pending_updates.remove(id) {
            recalls::release_waiters(table, *id, vec![waiting]);
            continue;
        }
        let recall = table.recalls.remove(id);
        table.merging.removed(recall.as_ref());
        let OutstandingRecall { key, waiting, .. } = recall.expect("what is owed is out");
        table.forget_write_recall(key, *id);
        table.keys.get_mut(&key).expect("a key with a recall").recalls.remove(&holder);
        note_holders(table, key);
        recalls::release_waiters(table, *id, waiting);
    }
}

/// The holders of this key that were not recalled, and whether their grants are shared.
fn holders(table: &State, key: LeaseKey) -> impl Iterator<Item = (Holder, bool)> + '_ {
    seats(table, key).map(|(holder, entry)| (holder, entry.is(Entry::SHARED)))
}

/// The grants on this key that were not recalled.
fn seats(table: &State, key: LeaseKey) -> impl Iterator<Item = (Holder, &Entry)> + '_ {
    let seats = table.entries.range((key, Holder(0))..=(key, Holder(u64::MAX)));
    seats.map(|((_, holder), entry)| (*holder, entry))
}

/// Updates a key's state; called when a holder has come to the key or left it.
pub(crate) fn note_holders(table: &mut State, key: LeaseKey) {
    let Some(state) = table.keys.get(&key) else { return };
    if state.is_shared() {
        let asked = state.recalls.values().filter(|recall| table.recalls[recall].grant.is_some());
        let alone = holders(table, key).take(2).count() + asked.take(2).count() < 2;
        table.keys.get_mut(&key).expect("just seen").note_holders(table.now, alone);
    }
    table.update_key(key);
}

/// Whether a limited grant would follow an unlimited one, which is then recalled.
fn would_replace_unlimited(table: &mut State, seat: GrantKey, limit: Span) -> bool {
    let Some(entry) = table.entries.get(&seat) else { return false };
    let held = table.accounts.get(&seat.1).and_then(|account| account.grants.get(&entry.id));
    let outstays = limit != Span::FOREVER && held.is_some_and(|held| held.until == Time::FAR);
    if outstays {
        recalls::recall_missed(table, seat);
    }
    outstays
}

/// The time limit of a grant that is registered now.
fn limit_of(table: &State, account: &HolderState, key: LeaseKey) -> Span {
    if account.trusts_watch && table.watched.has(key.object) { Span::FOREVER } else { account.limit }
}
