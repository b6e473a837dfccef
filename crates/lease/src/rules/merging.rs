//! Write-back of several holders into one file: which write-back precedes another holder's acknowledgement, and what
//! that holder needs to merge its own (docs/decisions/0028).

use crate::merge_base::{MergeBase, WroteBack};
use crate::state::{ChangeState, Entry, OutstandingRecall, State};
use crate::types::{ChangeId, LeaseKey};
use nigh_types::{GrantId, LeaseScope, RecallId};

pub(crate) fn merge_base(
    table: &mut State,
    id: ChangeId,
    (grant, covers): (GrantId, LeaseScope),
    (offset, length): (u64, u64),
) -> Option<MergeBase> {
    let Some(ChangeState { by: Some(by), keys, .. }) = table.changes.get(&id) else { return None };
    keys.iter().filter(|key| key.covers == covers).find_map(|key| {
        let asked = table.keys.get(key).and_then(|state| state.recalls.get(by));
        match asked.map(|recall| &table.recalls[recall]) {
            Some(OutstandingRecall { grant: Some(_), held_exclusively_since: first, base, .. }) => {
                (*first <= grant).then(|| base.part(offset, length))
            }
            Some(_) => None,
            None => {
                let entry = table.entries.get(&(*key, *by));
                entry.filter(|entry| entry.held_exclusively_since() <= grant).map(|_| MergeBase::default())
            }
        }
    })
}

pub(crate) fn needs_before_image(table: &State, id: ChangeId) -> bool {
    recalls_to_merge(table, id).next().is_some()
}

pub(crate) fn note_write_back(table: &mut State, id: ChangeId, wrote: WroteBack<'_>) {
    let WroteBack { offset, before, pages, written } = wrote;
    if let Some(own) = own_base(table, id) {
        change_base(table, own, |base| base.note_own(offset, pages, written));
        table.counters.merged += 1;
    }
    if let Some(change) = table.changes.get_mut(&id) {
        let noted = &mut change.part.changes_reported;
        *noted = Some(before.is_some() && *noted != Some(false));
    }
    let Some(before) = before else { return };
    let others: Vec<RecallId> = recalls_to_merge(table, id).collect();
    for recall in others {
        change_base(table, recall, |base| base.note_changed(offset, before, written));
    }
    while table.merging.total() > table.config.merge_bytes
        && let Some(largest) = table.merging.largest()
    {
        let owed: Vec<RecallId> = table.accounts[&largest].owed.keys().copied().collect();
        let merges = |id: &RecallId| table.recalls.get(id).is_some_and(|recall| !recall.base.is_empty());
        let merging: Vec<RecallId> = owed.into_iter().filter(merges).collect();
        merging.into_iter().for_each(|id| drop_base(table, id));
    }
}

pub(crate) fn note_change(table: &mut State, id: ChangeId, (offset, length): (u64, u64)) {
    if let Some(own) = own_base(table, id) {
        change_base(table, own, |base| base.discard_range(offset, length));
    }
}

/// Drops the merge base of a recall: the file content that its holder's pages came from is no longer known.
pub(crate) fn drop_base(table: &mut State, recall: RecallId) {
    change_base(table, recall, |base| *base = MergeBase::default());
    table.recalls.get_mut(&recall).expect("it is out").held_exclusively_since = Entry::ABOVE_ALL;
}

fn change_base(table: &mut State, recall: RecallId, change: impl FnOnce(&mut MergeBase)) {
    let OutstandingRecall { holder, base, .. } = table.recalls.get_mut(&recall).expect("it is out");
    let before = base.cost();
    change(base);
    table.merging.resized(*holder, before, base.cost());
}

/// Unacknowledged data recalls of holders other than the change's initiator, where the state of their pages is
/// known.
fn recalls_to_merge(table: &State, id: ChangeId) -> impl Iterator<Item = RecallId> + '_ {
    let change = table.changes.get(&id);
    let by = change.and_then(|change| change.by);
    let asked = data_keys(change).flat_map(|key| table.keys.get(key)).flat_map(|state| &state.recalls);
    let others = asked.filter(move |(holder, _)| Some(**holder) != by).map(|(_, recall)| *recall);
    others.filter(|id| {
        let recall = &table.recalls[id];
        recall.grant.is_some() && recall.held_exclusively_since != Entry::ABOVE_ALL
    })
}

fn own_base(table: &State, id: ChangeId) -> Option<RecallId> {
    let change = table.changes.get(&id)?;
    let by = change.by?;
    let asked = |key: &LeaseKey| table.keys.get(key)?.recalls.get(&by).copied();
    data_keys(Some(change)).find_map(asked).filter(|id| !table.recalls[id].base.is_unchanged())
}

fn data_keys<'a>(change: Option<&'a ChangeState>) -> impl Iterator<Item = &'a LeaseKey> + use<'a> {
    change.into_iter().flat_map(|change| &change.keys).filter(|key| key.covers == LeaseScope::Data)
}
