//! How grants are given, and how they end.

use super::holder_state::HeldGrant;
use super::key::KeyState;
use super::recalls::OutstandingRecall;
use super::timers::Due;
use super::types::{Granted, Holder, LeaseKey, Refusal, with_margin};
use super::updates::PendingUpdate;
use super::{Entry, LeaseTable};
use nigh_types::{GrantId, LeaseScope, NodeId, Span};

impl LeaseTable {
    pub(super) fn grant(&mut self, holder: Holder, key: LeaseKey, node: NodeId) -> Result<Granted, Refusal> {
        let account =
            self.accounts.get(&holder).filter(|account| !account.disconnected).ok_or(Refusal::Detached)?;
        if account.suspect.is_some() || self.penalised_until(account).is_some() {
            return Err(Refusal::Suspect);
        }
        let state = self.keys.get(&key);
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
        let none = self.config.grants_per_holder == 0;
        let full = none || account.grant_count() >= self.config.most_grants();
        if full && !self.entries.contains_key(&(key, holder)) {
            return Err(Refusal::Quota);
        }
        let limit = self.limit_of(account, key);
        if self.would_replace_unlimited((key, holder), limit) {
            return Err(Refusal::Changing);
        }
        let shared = key.covers == LeaseScope::Directory && self.share(holder, key)?;
        let granted = self.register(holder, key, node, (shared, limit));
        self.keep_quota(holder);
        Ok(granted)
    }

    fn register(
        &mut self,
        holder: Holder,
        key: LeaseKey,
        node: NodeId,
        (shared, limit): (bool, Span),
    ) -> Granted {
        let id = self.numbers.next_grant();
        let account = self.accounts.get_mut(&holder).expect("each grant has a holder");
        account.begin(id, HeldGrant { key, until: self.now.after(with_margin(limit)) });
        let unlisted = account.confined && key.covers == LeaseScope::Directory;
        let marks = if shared { Entry::SHARED } else { 0 } | if unlisted { Entry::WITHOUT_NAMES } else { 0 };
        let mut entry = Entry {
            id,
            node,
            since: self.now,
            grants_since_acquired: 0,
            grants_since_other_change: 0,
            marks,
        };
        if let Some(earlier) = self.entries.get(&(key, holder)) {
            entry.inherit(earlier);
            let held = account.grants.remove(&earlier.id);
            held.into_iter().for_each(|held| account.end(earlier.id, held.until));
        }
        let listed = !entry.is(Entry::WITHOUT_NAMES);
        self.entries.insert((key, holder), entry);
        self.arm_holder(holder);
        self.note_holders(key);
        Granted { id, shared, limit, listed }
    }

    /// Page 0008, rule 9: a holder that needs exclusive directory leases never has an unshared one together with
    /// another holder. Returns whether this grant is shared; refuses it if another holder must be recalled first.
    fn share(&mut self, holder: Holder, key: LeaseKey) -> Result<bool, Refusal> {
        let others: Vec<(Holder, bool)> =
            self.holders(key).filter(|(other, _)| *other != holder).take(2).collect();
        let wants_alone = |holder: &Holder| self.accounts[holder].needs_exclusive_dir_lease;
        // A holder with an exclusive lease is the only one, so two holders tell as much as all.
        let alone: Vec<Holder> =
            others.iter().filter(|(other, shared)| !shared && wants_alone(other)).map(|o| o.0).collect();
        if !alone.is_empty() || (wants_alone(&holder) && !others.is_empty()) {
            self.keys.entry(key).or_default().share();
        }
        if !alone.is_empty() {
            for other in alone {
                self.recall((key, other), Vec::new());
            }
            self.note_holders(key);
            return Err(Refusal::Exclusive);
        }
        let marked = self.keys.get(&key).is_some_and(KeyState::is_shared);
        Ok(marked || !others.is_empty())
    }

    /// Recalls the least recently registered grant of a holder above its quota; no change waits for it.
    fn keep_quota(&mut self, holder: Holder) {
        let grants = &self.accounts[&holder].grants;
        if grants.len() as u64 > self.config.grants_per_holder
            && let Some((_, oldest)) = grants.first_key_value()
        {
            self.recall((oldest.key, holder), Vec::new());
        }
    }

    /// Ends one grant; an outstanding recall of it still awaits its acknowledgement. Returns false if the grant had
    /// ended.
    pub(super) fn end_grant(&mut self, holder: Holder, grant: GrantId) -> bool {
        let Some(account) = self.accounts.get_mut(&holder) else { return false };
        let key = if let Some(HeldGrant { key, until }) = account.grants.remove(&grant) {
            account.end(grant, until);
            let entry = self.entries.remove(&(key, holder));
            assert_eq!(entry.map(|entry| entry.id), Some(grant), "one grant for each holder and key");
            key
        } else if let Some(recalled) = account.recalled.remove(&grant) {
            account.end(grant, recalled.until);
            let outstanding = self.recalls.get_mut(&recalled.recall).expect("what was recalled is out");
            outstanding.grant = None;
            let key = outstanding.key;
            let waiting = std::mem::take(&mut outstanding.waiting);
            self.release_waiters(recalled.recall, waiting);
            key
        } else {
            return false;
        };
        self.note_holders(key);
        true
    }

    /// Ends a session with all its grants and owed acknowledgements.
    pub(super) fn end_holder(&mut self, holder: Holder) {
        let late = self.accounts.get(&holder).is_some_and(|a| a.exceeds_patience(self.now, &self.config));
        self.note_delays(holder, late);
        let Some(account) = self.accounts.remove(&holder) else { return };
        self.timers.disarm(account.armed, Due::Holder(holder));
        if let Some(since) = account.suspect.or(account.owes_since().filter(|_| late)) {
            self.penalise(account.client_origin, since, account.delays_others);
        }
        // In the order of the trees from which they are removed: for a million grants that takes a third of the time.
        let mut keys: Vec<LeaseKey> = account.grants.values().map(|held| held.key).collect();
        keys.sort_unstable();
        for key in keys {
            self.entries.remove(&(key, holder));
            self.note_holders(key);
        }
        for id in account.owed.keys() {
            if let Some(PendingUpdate { waiting, .. }) = self.pending_updates.remove(id) {
                self.release_waiters(*id, vec![waiting]);
                continue;
            }
            let recall = self.recalls.remove(id);
            self.merging.removed(recall.as_ref());
            let OutstandingRecall { key, waiting, .. } = recall.expect("what is owed is out");
            self.keys.get_mut(&key).expect("a key with a recall").recalls.remove(&holder);
            self.note_holders(key);
            self.release_waiters(*id, waiting);
        }
    }

    /// The holders of this key that were not recalled, and whether their grants are shared.
    fn holders(&self, key: LeaseKey) -> impl Iterator<Item = (Holder, bool)> + '_ {
        let seats = self.entries.range((key, Holder(0))..=(key, Holder(u64::MAX)));
        seats.map(|((_, holder), entry)| (*holder, entry.is(Entry::SHARED)))
    }

    /// Updates a key's state; called when a holder has come to the key or left it.
    pub(super) fn note_holders(&mut self, key: LeaseKey) {
        let Some(state) = self.keys.get(&key) else { return };
        if state.is_shared() {
            let asked = state.recalls.values().filter(|recall| self.recalls[recall].grant.is_some());
            let alone = self.holders(key).take(2).count() + asked.take(2).count() < 2;
            self.keys.get_mut(&key).expect("just seen").note_holders(self.now, alone);
        }
        self.update_key(key);
    }
}
