//! Write-back of several holders into one file: which write-back precedes another holder's acknowledgement, and what
//! that holder needs to merge its own (docs/decisions/0028).

use super::merge_base::{MergeBase, WroteBack};
use super::recalls::{ChangeState, OutstandingRecall};
use super::types::{ChangeId, Holder, LeaseKey};
use super::{Entry, LeaseTable};
use nigh_types::{GrantId, LeaseScope, RecallId, Time};
use std::collections::BTreeMap;

/// Memory used by the merge bases of all holders.
#[derive(Clone, Default, Debug)]
pub(super) struct MergeMemory {
    total: u64,
    by_holder: BTreeMap<Holder, u64>,
}

impl MergeMemory {
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Releases the memory of a recall that is no longer outstanding.
    pub(super) fn removed(&mut self, recall: Option<&OutstandingRecall>) {
        if let Some(OutstandingRecall { holder, base, .. }) = recall {
            self.resized(*holder, base.cost(), 0);
        }
    }

    fn resized(&mut self, holder: Holder, before: u64, after: u64) {
        if before == after {
            return;
        }
        self.total = self.total - before + after;
        let of_holder = self.by_holder.entry(holder).or_default();
        *of_holder = *of_holder - before + after;
        if *of_holder == 0 {
            self.by_holder.remove(&holder);
        }
    }

    fn largest(&self) -> Option<Holder> {
        self.by_holder.iter().max_by_key(|(_, bytes)| **bytes).map(|(holder, _)| *holder)
    }
}

impl LeaseTable {
    /// Returns the merge base for a write-back of this range (offset, length), whose pages its initiator read under
    /// this grant. `None`: another holder may have changed the file since, in an unknown way (rule 12).
    ///
    /// A grant recalled for another holder's change that is still to come counts until the recall is acknowledged or
    /// the grant ends. It does not count if the server's own disk has already changed the file.
    pub fn merge_base(
        &mut self,
        now: Time,
        id: ChangeId,
        (grant, covers): (GrantId, LeaseScope),
        (offset, length): (u64, u64),
    ) -> Option<MergeBase> {
        self.advance(now);
        let Some(ChangeState { by: Some(by), keys, .. }) = self.changes.get(&id) else { return None };
        keys.iter().filter(|key| key.covers == covers).find_map(|key| {
            let asked = self.keys.get(key).and_then(|state| state.recalls.get(by));
            match asked.map(|recall| &self.recalls[recall]) {
                Some(OutstandingRecall { grant: Some(_), held_exclusively_since: first, base, .. }) => {
                    (*first <= grant).then(|| base.part(offset, length))
                }
                Some(_) => None,
                None => {
                    let entry = self.entries.get(&(*key, *by));
                    entry
                        .filter(|entry| entry.held_exclusively_since() <= grant)
                        .map(|_| MergeBase::default())
                }
            }
        })
    }

    /// Whether another holder may still have to merge its pages with this write-back: then
    /// [`LeaseTable::handle_wrote_back`] needs the file's earlier content.
    #[must_use]
    pub fn needs_before_image(&self, id: ChangeId) -> bool {
        self.recalls_to_merge(id).next().is_some()
    }

    /// Notes a write-back that was applied and whose change has not ended.
    pub fn handle_wrote_back(&mut self, id: ChangeId, wrote: WroteBack<'_>) {
        let WroteBack { offset, before, pages, written } = wrote;
        if let Some(own) = self.own_base(id) {
            self.change_base(own, |base| base.note_own(offset, pages, written));
            self.counters.merged += 1;
        }
        if let Some(change) = self.changes.get_mut(&id) {
            let noted = &mut change.part.changes_reported;
            *noted = Some(before.is_some() && *noted != Some(false));
        }
        let Some(before) = before else { return };
        let others: Vec<RecallId> = self.recalls_to_merge(id).collect();
        for recall in others {
            self.change_base(recall, |base| base.note_changed(offset, before, written));
        }
        while self.merging.total > self.config.merge_bytes
            && let Some(largest) = self.merging.largest()
        {
            let owed: Vec<RecallId> = self.accounts[&largest].owed.keys().copied().collect();
            let merges = |id: &RecallId| self.recalls.get(id).is_some_and(|recall| !recall.base.is_empty());
            let merging: Vec<RecallId> = owed.into_iter().filter(merges).collect();
            merging.into_iter().for_each(|id| self.drop_base(id));
        }
    }

    /// Notes an applied change of data that is no write-back: its initiator's kernel has no older pages of that range
    /// (offset, length).
    pub fn handle_changed(&mut self, id: ChangeId, (offset, length): (u64, u64)) {
        if let Some(own) = self.own_base(id) {
            self.change_base(own, |base| base.discard_range(offset, length));
        }
    }

    /// Drops the merge base of a recall: the file content that its holder's pages came from is no longer known.
    pub(super) fn drop_base(&mut self, recall: RecallId) {
        self.change_base(recall, |base| *base = MergeBase::default());
        self.recalls.get_mut(&recall).expect("it is out").held_exclusively_since = Entry::ABOVE_ALL;
    }

    fn change_base(&mut self, recall: RecallId, change: impl FnOnce(&mut MergeBase)) {
        let OutstandingRecall { holder, base, .. } = self.recalls.get_mut(&recall).expect("it is out");
        let before = base.cost();
        change(base);
        self.merging.resized(*holder, before, base.cost());
    }

    /// Unacknowledged data recalls of holders other than the change's initiator, where the state of their pages is
    /// known.
    fn recalls_to_merge(&self, id: ChangeId) -> impl Iterator<Item = RecallId> + '_ {
        let change = self.changes.get(&id);
        let by = change.and_then(|change| change.by);
        let asked =
            self.data_keys(change).flat_map(|key| self.keys.get(key)).flat_map(|state| &state.recalls);
        let others = asked.filter(move |(holder, _)| Some(**holder) != by).map(|(_, recall)| *recall);
        others.filter(|id| {
            let recall = &self.recalls[id];
            recall.grant.is_some() && recall.held_exclusively_since != Entry::ABOVE_ALL
        })
    }

    fn own_base(&self, id: ChangeId) -> Option<RecallId> {
        let change = self.changes.get(&id)?;
        let by = change.by?;
        let asked = |key: &LeaseKey| self.keys.get(key)?.recalls.get(&by).copied();
        self.data_keys(Some(change)).find_map(asked).filter(|id| !self.recalls[id].base.is_unchanged())
    }

    fn data_keys<'a>(&self, change: Option<&'a ChangeState>) -> impl Iterator<Item = &'a LeaseKey> + use<'a> {
        change.into_iter().flat_map(|change| &change.keys).filter(|key| key.covers == LeaseScope::Data)
    }
}
