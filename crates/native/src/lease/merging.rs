//! Write-back of several holders into one file: which of them overtakes whose acknowledgement, and what the others need to merge theirs
//! (docs/decisions/0028).

use super::merge_base::{MergeBase, WroteBack};
use super::recalls::{ChangeState, Outstanding};
use super::words::{ChangeId, Holder, LeaseKey};
use super::{Entry, LeaseTable};
use nigh_types::{Covers, GrantId, RecallId, Time};
use std::collections::BTreeMap;

/// Memory of the bases of all holders.
#[derive(Clone, Default, Debug)]
pub(super) struct Merging {
    total: u64,
    by_holder: BTreeMap<Holder, u64>,
}

impl Merging {
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// A recall is out no more.
    pub(super) fn removed(&mut self, recall: Option<&Outstanding>) {
        if let Some(Outstanding { holder, base, .. }) = recall {
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
    /// How the pages are to be merged that a change's maker writes back in this range (offset, length), and which it read under this grant.
    /// `None`: another holder may have changed the file since, and how is not known (rule 12).
    ///
    /// What was recalled for a change that others are about to make counts until it is acknowledged or ends; not so where the file was
    /// changed already by the server's own disk.
    pub fn merge_base(
        &mut self,
        now: Time,
        id: ChangeId,
        (grant, covers): (GrantId, Covers),
        (offset, length): (u64, u64),
    ) -> Option<MergeBase> {
        self.advance(now);
        let Some(ChangeState { by: Some(by), keys, .. }) = self.changes.get(&id) else { return None };
        keys.iter().filter(|key| key.covers == covers).find_map(|key| {
            let asked = self.keys.get(key).and_then(|state| state.recalls.get(by));
            match asked.map(|recall| &self.recalls[recall]) {
                Some(Outstanding { grant: Some(_), first, base, .. }) => {
                    (*first <= grant).then(|| base.part(offset, length))
                }
                Some(_) => None,
                None => {
                    let entry = self.entries.get(&(*key, *by));
                    entry.filter(|entry| entry.first() <= grant).map(|_| MergeBase::default())
                }
            }
        })
    }

    /// Whether another holder may yet have to merge its pages with what this change writes back: then
    /// [`LeaseTable::handle_wrote_back`] needs what the file had before.
    #[must_use]
    pub fn overtakes(&self, id: ChangeId) -> bool {
        self.overtaken(id).next().is_some()
    }

    /// Write-back was applied, and its change has not ended.
    pub fn handle_wrote_back(&mut self, id: ChangeId, wrote: WroteBack<'_>) {
        let WroteBack { offset, before, pages, written } = wrote;
        if let Some(own) = self.own_base(id) {
            self.change_base(own, |base| base.note_own(offset, pages, written));
            self.counters.merged += 1;
        }
        if let Some(change) = self.changes.get_mut(&id) {
            let noted = &mut change.part.noted;
            *noted = Some(before.is_some() && *noted != Some(false));
        }
        let Some(before) = before else { return };
        let others: Vec<RecallId> = self.overtaken(id).collect();
        for recall in others {
            self.change_base(recall, |base| base.note_changed(offset, before, written));
        }
        while self.merging.total > self.config.merge_bytes
            && let Some(largest) = self.merging.largest()
        {
            let owed: Vec<RecallId> = self.accounts[&largest].owed.keys().copied().collect();
            let merges = |id: &RecallId| self.recalls.get(id).is_some_and(|recall| !recall.base.is_empty());
            let merging: Vec<RecallId> = owed.into_iter().filter(merges).collect();
            merging.into_iter().for_each(|id| self.lose_base(id));
        }
    }

    /// A change of data that is no write-back was applied: its maker's kernel has no older pages of that range (offset, length).
    pub fn handle_changed(&mut self, id: ChangeId, (offset, length): (u64, u64)) {
        if let Some(own) = self.own_base(id) {
            self.change_base(own, |base| base.forget(offset, length));
        }
    }

    /// The file is not known any more in the state of which that holder's kernel has pages.
    pub(super) fn lose_base(&mut self, recall: RecallId) {
        self.change_base(recall, |base| *base = MergeBase::default());
        self.recalls.get_mut(&recall).expect("it is out").first = Entry::NEVER;
    }

    fn change_base(&mut self, recall: RecallId, change: impl FnOnce(&mut MergeBase)) {
        let Outstanding { holder, base, .. } = self.recalls.get_mut(&recall).expect("it is out");
        let before = base.cost();
        change(base);
        self.merging.resized(*holder, before, base.cost());
    }

    /// Recalls of data of other holders than a change's maker that are not acknowledged, where their pages are known.
    fn overtaken(&self, id: ChangeId) -> impl Iterator<Item = RecallId> + '_ {
        let change = self.changes.get(&id);
        let by = change.and_then(|change| change.by);
        let asked =
            self.data_keys(change).flat_map(|key| self.keys.get(key)).flat_map(|state| &state.recalls);
        let others = asked.filter(move |(holder, _)| Some(**holder) != by).map(|(_, recall)| *recall);
        others.filter(|id| {
            let recall = &self.recalls[id];
            recall.grant.is_some() && recall.first != Entry::NEVER
        })
    }

    fn own_base(&self, id: ChangeId) -> Option<RecallId> {
        let change = self.changes.get(&id)?;
        let by = change.by?;
        let asked = |key: &LeaseKey| self.keys.get(key)?.recalls.get(&by).copied();
        self.data_keys(Some(change)).find_map(asked).filter(|id| !self.recalls[id].base.is_unchanged())
    }

    fn data_keys<'a>(&self, change: Option<&'a ChangeState>) -> impl Iterator<Item = &'a LeaseKey> + use<'a> {
        change.into_iter().flat_map(|change| &change.keys).filter(|key| key.covers == Covers::Data)
    }
}
