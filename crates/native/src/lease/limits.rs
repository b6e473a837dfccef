//! Which grants end of themselves, and which the server's own disk ends by its events
//! (docs/decisions/0015-host-watch.md).
//!
//! A holder has a limit for its grants, and may have said that it is for what nobody watches: then what is
//! *watched* is granted to it without one. On one key a limited grant never follows an unlimited one without a
//! recall between: the holder may not have that later one, and would believe the earlier for ever. So what is
//! watched no more is recalled in the same step.

use super::account::Account;
use super::words::{Holder, LeaseKey, Object};
use super::{Entry, LeaseTable, Seat};
use nigh_types::{Covers, GrantId, Span, Time};
use std::collections::BTreeSet;
use std::ops::Bound;

/// What the server hears of when others change it.
#[derive(Clone, Default, Debug)]
pub(super) struct Watched {
    filesystems: BTreeSet<u64>,
    objects: BTreeSet<Object>,
}

impl Watched {
    fn has(&self, object: Object) -> bool {
        self.filesystems.contains(&object.filesystem) || self.objects.contains(&object)
    }
}

impl LeaseTable {
    /// Grants to this holder that are registered from now on end of themselves: it counts no more than
    /// `limit` from when it asked, the table 1.1 of it from registering. `Span::FOREVER`: they do not.
    /// Said when the session begins: behind a grant of a longer limit a later one may outstay its own.
    pub fn handle_limit(&mut self, now: Time, holder: Holder, limit: Span) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.limit = limit;
        }
    }

    /// What is watched is granted to this holder without a limit. Said when the session begins.
    pub fn handle_trusts_watch(&mut self, now: Time, holder: Holder) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.trusts_watch = true;
        }
    }

    /// From now on every change by others on this filesystem is told to the table.
    pub fn handle_watched(&mut self, now: Time, filesystem: u64) {
        self.advance(now);
        self.watched.filesystems.insert(filesystem);
    }

    /// The same for one object. What is granted from now on is read afterwards.
    pub fn handle_watched_object(&mut self, now: Time, object: Object) {
        self.advance(now);
        self.watched.objects.insert(object);
    }

    /// Whether this object is watched by itself.
    #[must_use]
    pub fn is_watched(&self, object: Object) -> bool {
        self.watched.objects.contains(&object)
    }

    /// Nobody watches this filesystem any more, nor an object on it. What is granted there without a limit
    /// is to be asked for in the same breath ([`LeaseTable::handle_missed`]); until that is out, nothing
    /// follows it on its key.
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

    /// The same for one object, whose grants are recalled.
    pub fn handle_unwatched_object(&mut self, now: Time, object: Object) {
        self.advance(now);
        if self.watched.objects.remove(&object) && !self.watched.has(object) {
            self.disturb(LeaseKey { object, covers: Covers::Data });
            let seats: Vec<Seat> =
                self.seats_from(object, None).take_while(|seat| seat.0.object == object).collect();
            seats.into_iter().for_each(|seat| self.miss(seat));
        }
    }

    /// Changes on this filesystem may have been missed: asks for what was registered there up to the grant `until`
    /// and not for what was later, without waiting for anybody and without making anything contended. At most
    /// `most` are looked at, behind `after`; where that was not all, the one to go on behind.
    pub fn handle_missed(
        &mut self,
        now: Time,
        filesystem: u64,
        until: GrantId,
        (after, most): (Option<Missed>, u64),
    ) -> Option<Missed> {
        self.advance(now);
        let first = Object { filesystem, ino: 0, birth: 0 };
        let of_it = |seat: &Seat| seat.0.object.filesystem == filesystem;
        if after.is_none() {
            self.disturb_all(first);
        }
        let mut looked = Vec::new();
        for seat in self.seats_from(first, after.map(|Missed(seat)| seat)).take_while(of_it) {
            looked.push(seat);
            if looked.len() as u64 >= most {
                break;
            }
        }
        let goes_on = (looked.len() as u64 >= most).then(|| looked.last().copied().map(Missed)).flatten();
        for seat in looked {
            if self.entries[&seat].may_be_from(until) {
                self.miss(seat);
            }
        }
        goes_on
    }

    /// Whether anybody has anything of this object.
    #[must_use]
    pub fn is_held(&self, object: Object) -> bool {
        self.seats_from(object, None).next().is_some_and(|seat| seat.0.object == object)
    }

    /// How many grants were recalled since the table was made.
    #[must_use]
    pub fn recalled(&self) -> u64 {
        self.counters.recalled
    }

    /// The number of the grant that was registered last.
    #[must_use]
    pub fn latest_grant(&self) -> GrantId {
        GrantId(self.numbers.grant)
    }

    /// The limit of a grant that is registered now.
    pub(super) fn limit_of(&self, account: &Account, key: LeaseKey) -> Span {
        if account.trusts_watch && self.watched.has(key.object) { Span::FOREVER } else { account.limit }
    }

    /// A limited grant would follow one without a limit, which is recalled then.
    pub(super) fn outstays(&mut self, seat: Seat, limit: Span) -> bool {
        let Some(entry) = self.entries.get(&seat) else { return false };
        let held = self.accounts.get(&seat.1).and_then(|account| account.grants.get(&entry.id));
        let outstays = limit != Span::FOREVER && held.is_some_and(|held| held.until == Time::FAR);
        if outstays {
            self.miss(seat);
        }
        outstays
    }

    fn seats_from(&self, first: Object, after: Option<Seat>) -> impl Iterator<Item = Seat> + '_ {
        let key = LeaseKey { object: first, covers: Covers::Names };
        let from = after.map_or(Bound::Included((key, Holder(0))), Bound::Excluded);
        self.entries.range((from, Bound::Unbounded)).map(|(seat, _)| *seat)
    }

    /// All on the filesystem of this object, which is the first one there.
    fn disturb_all(&mut self, first: Object) {
        let keys = self.keys.range(LeaseKey { object: first, covers: Covers::Names }..).map(|(key, _)| *key);
        let keys: Vec<LeaseKey> = keys.take_while(|key| key.object.filesystem == first.filesystem).collect();
        keys.into_iter().for_each(|key| self.disturb(key));
    }

    /// It may have been changed already.
    pub(super) fn miss(&mut self, seat: Seat) {
        self.entries.get_mut(&seat).expect("only what stands is missed").unbroken = Entry::HELD;
        self.recall(seat, Vec::new());
        self.note_holders(seat.0);
    }
}

/// How far [`LeaseTable::handle_missed`] came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Missed(Seat);
