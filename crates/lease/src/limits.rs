//! Grants that end by themselves, and grants that changes on the server's own disk end
//! (docs/decisions/0015-host-watch.md).
//!
//! A holder has a time limit for its grants, and may have declared that the limit is only for unwatched objects: then
//! it gets grants on *watched* objects without a limit. On one key a limited grant never follows an unlimited one
//! without a recall between them. Otherwise the holder may not have received the limited grant, and would believe the
//! unlimited one for ever. So an object that ceases to be watched is recalled in the same step.

use super::holder_state::HolderState;
use super::types::{Holder, LeaseKey, Object};
use super::{Entry, GrantKey, LeaseTable};
use nigh_types::{GrantId, LeaseScope, Span, Time};
use std::collections::BTreeSet;
use std::ops::Bound;

/// Filesystems and objects whose changes by other processes are reported to the server.
#[derive(Clone, Default, Debug)]
pub(super) struct WatchSet {
    filesystems: BTreeSet<u64>,
    objects: BTreeSet<Object>,
}

impl WatchSet {
    fn has(&self, object: Object) -> bool {
        self.filesystems.contains(&object.filesystem) || self.objects.contains(&object)
    }
}

impl LeaseTable {
    /// Sets a time limit for grants registered from now on to this holder: it counts no more than `limit` from its
    /// request, the table 1.1 of it from registering. `Span::FOREVER`: no limit. Called when the session begins: after
    /// a grant with a longer limit, a later grant could outlive its own.
    pub fn handle_limit(&mut self, now: Time, holder: Holder, limit: Span) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.limit = limit;
        }
    }

    /// Grants watched objects to this holder without a limit. Called when the session begins.
    pub fn handle_trusts_watch(&mut self, now: Time, holder: Holder) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.trusts_watch = true;
        }
    }

    /// Marks a filesystem as watched: from now on the server reports every change by other processes to the table.
    pub fn handle_watched(&mut self, now: Time, filesystem: u64) {
        self.advance(now);
        self.watched.filesystems.insert(filesystem);
    }

    /// Marks one object as watched. Facts granted from now on are read afterwards.
    pub fn handle_watched_object(&mut self, now: Time, object: Object) {
        self.advance(now);
        self.watched.objects.insert(object);
    }

    /// Whether this object has a watch of its own.
    #[must_use]
    pub fn is_watched(&self, object: Object) -> bool {
        self.watched.objects.contains(&object)
    }

    /// Marks a filesystem and its objects as no longer watched. The caller recalls its unlimited grants at once
    /// ([`LeaseTable::handle_missed`]); until a key's recall is emitted, no grant follows on that key.
    pub fn handle_unwatched(&mut self, now: Time, filesystem: u64) {
        self.advance(now);
        self.watched.filesystems.remove(&filesystem);
        let first = Object { filesystem, ino: 0, birth: 0 };
        let mut objects = self.watched.objects.split_off(&first);
        let last = Object { filesystem, ino: u64::MAX, birth: u64::MAX };
        let mut others = objects.split_off(&last);
        others.remove(&last);
        self.watched.objects.append(&mut others);
    }

    /// Marks one object as no longer watched, and recalls its grants.
    pub fn handle_unwatched_object(&mut self, now: Time, object: Object) {
        self.advance(now);
        if self.watched.objects.remove(&object) && !self.watched.has(object) {
            self.note_host_change(LeaseKey { object, covers: LeaseScope::Data });
            let seats: Vec<GrantKey> =
                self.grant_keys_from(object, None).take_while(|seat| seat.0.object == object).collect();
            seats.into_iter().for_each(|seat| self.recall_missed(seat));
        }
    }

    /// Recalls grants on a filesystem whose changes may have been missed: those registered up to the grant `until`, not
    /// later ones. It waits for no holder and makes no key contended. It looks at no more than `most` grants after
    /// `after`, and returns where to go on if there may be more.
    pub fn handle_missed(
        &mut self,
        now: Time,
        filesystem: u64,
        until: GrantId,
        (after, most): (Option<MissedCursor>, u64),
    ) -> Option<MissedCursor> {
        self.advance(now);
        let first = Object { filesystem, ino: 0, birth: 0 };
        let of_it = |seat: &GrantKey| seat.0.object.filesystem == filesystem;
        if after.is_none() {
            self.note_host_changes(first);
        }
        let mut looked = Vec::new();
        for seat in self.grant_keys_from(first, after.map(|MissedCursor(seat)| seat)).take_while(of_it) {
            looked.push(seat);
            if looked.len() as u64 >= most {
                break;
            }
        }
        let goes_on =
            (looked.len() as u64 >= most).then(|| looked.last().copied().map(MissedCursor)).flatten();
        for seat in looked {
            if self.entries[&seat].may_predate(until) {
                self.recall_missed(seat);
            }
        }
        goes_on
    }

    /// Whether any holder has a grant on this object that was not recalled.
    #[must_use]
    pub fn has_holder(&self, object: Object) -> bool {
        self.grant_keys_from(object, None).next().is_some_and(|seat| seat.0.object == object)
    }

    /// How many grants were recalled since the table was made.
    #[must_use]
    pub fn recall_count(&self) -> u64 {
        self.counters.recalled
    }

    /// The id of the latest registered grant.
    #[must_use]
    pub fn latest_grant(&self) -> GrantId {
        GrantId(self.numbers.grant)
    }

    /// The time limit of a grant that is registered now.
    pub(super) fn limit_of(&self, account: &HolderState, key: LeaseKey) -> Span {
        if account.trusts_watch && self.watched.has(key.object) { Span::FOREVER } else { account.limit }
    }

    /// Whether a limited grant would follow an unlimited one, which is then recalled.
    pub(super) fn would_replace_unlimited(&mut self, seat: GrantKey, limit: Span) -> bool {
        let Some(entry) = self.entries.get(&seat) else { return false };
        let held = self.accounts.get(&seat.1).and_then(|account| account.grants.get(&entry.id));
        let outstays = limit != Span::FOREVER && held.is_some_and(|held| held.until == Time::FAR);
        if outstays {
            self.recall_missed(seat);
        }
        outstays
    }

    fn grant_keys_from(&self, first: Object, after: Option<GrantKey>) -> impl Iterator<Item = GrantKey> + '_ {
        let key = LeaseKey { object: first, covers: LeaseScope::Directory };
        let from = after.map_or(Bound::Included((key, Holder(0))), Bound::Excluded);
        self.entries.range((from, Bound::Unbounded)).map(|(seat, _)| *seat)
    }

    /// Marks every key on the filesystem of this object (the first one there) as possibly changed during a write.
    fn note_host_changes(&mut self, first: Object) {
        let keys =
            self.keys.range(LeaseKey { object: first, covers: LeaseScope::Directory }..).map(|(key, _)| *key);
        let keys: Vec<LeaseKey> = keys.take_while(|key| key.object.filesystem == first.filesystem).collect();
        keys.into_iter().for_each(|key| self.note_host_change(key));
    }

    /// Recalls a grant whose key may have changed already.
    pub(super) fn recall_missed(&mut self, seat: GrantKey) {
        self.entries.get_mut(&seat).expect("only what stands is missed").grants_since_other_change =
            Entry::CHANGED_BY_OTHER;
        self.recall(seat, Vec::new());
        self.note_holders(seat.0);
    }
}

/// Where [`LeaseTable::handle_missed`] goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissedCursor(GrantKey);
