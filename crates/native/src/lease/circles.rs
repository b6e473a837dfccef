//! Flushes that wait for one another.
//!
//! A client acknowledges when what was stored into its maps is written back, and writing it waits for what others owe, which may
//! wait for stores of theirs. So holders can wait in a circle, over files that have no more in common than their directory: each
//! is asked for its names because the other writes one of its files back, and each writes back before it gives them up.
//!
//! Where one file is written the flush of who is asked goes first (`turns.rs`). Of a circle the flush goes on that has waited for
//! somebody for a quarter of `patience`: by then that one has dropped names and attributes, which go before pages, and only
//! what it writes back itself is missing. Until then it may be no circle, since only holders are looked at, and not what they were asked for:
//! an acknowledgement may wait for others that came before it.

use super::LeaseTable;
use super::recalls::ChangeState;
use super::timers::Due;
use super::words::{ChangeId, Holder, LeaseKey, LeaseReason};
use nigh_types::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};

/// A flush that waits for what somebody owes.
#[derive(Clone, Copy)]
struct Wait {
    flush: ChangeId,
    maker: Holder,
    owes: Holder,
    /// The latest of it.
    since: Time,
    /// Not itself, but who writes there before it.
    behind: Option<LeaseKey>,
}

impl LeaseTable {
    /// A change has come to wait for others: no flush waits for its own maker by that, over whichever others.
    pub(super) fn untie(&mut self, id: ChangeId) {
        let mut flushes = self.held_up(id);
        while let Some(flush) = flushes.pop() {
            while let Some(wait) = self.circle(flush) {
                let due = wait.since.after(Span(self.config.patience.0 / 4));
                if self.now < due {
                    let armed = &mut self.changes.get_mut(&flush).expect("it waits").part.armed;
                    self.timers.arm(armed, Due::Flush(flush), (due, LeaseReason::Circle));
                    break;
                }
                self.go_before(wait);
                flushes.push(wait.flush);
            }
        }
    }

    /// Its moment has come.
    pub(super) fn tend_flush(&mut self, flush: ChangeId) {
        self.changes.get_mut(&flush).expect("its moment was set").part.armed.fired();
        self.untie(flush);
    }

    /// Where this flush waits for its own maker: who leads there, by the longest wait.
    fn circle(&self, flush: ChangeId) -> Option<Wait> {
        let change = &self.changes[&flush];
        let maker = change.by?;
        if change.is_ready() || self.accounts.get(&maker).is_none_or(|account| account.owed.is_empty()) {
            return None;
        }
        let waits = self.waits();
        let first = waits.iter().filter(|wait| wait.flush == flush);
        let mut reached: BTreeSet<Holder> = first.map(|wait| wait.owes).collect();
        loop {
            let before = reached.len();
            let next = waits.iter().filter(|wait| reached.contains(&wait.maker)).map(|wait| wait.owes);
            let next: Vec<Holder> = next.collect();
            reached.extend(next);
            if reached.len() == before {
                break;
            }
        }
        let last = waits.into_iter().filter(|wait| wait.owes == maker && reached.contains(&wait.maker));
        last.min_by_key(|wait| wait.since)
    }

    /// All flushes that wait, and for whom.
    fn waits(&self) -> Vec<Wait> {
        let waiting = || self.changes.iter().filter(|(_, change)| !change.is_ready());
        let mut writers = BTreeMap::<LeaseKey, BTreeMap<Holder, Time>>::new();
        for (_, change) in waiting() {
            if let Some(key) = change.part.writes {
                writers.entry(key).or_default().extend(self.owing(change));
            }
        }
        let mut waits = Vec::new();
        for (flush, change) in waiting().filter(|(_, change)| change.part.flush) {
            let Some(maker) = change.by else { continue };
            let wait = |behind: Option<LeaseKey>| {
                move |(owes, since)| Wait { flush: *flush, maker, owes, since, behind }
            };
            waits.extend(self.owing(change).into_iter().map(wait(None)));
            let behind = change.part.waits_for;
            let before = behind.and_then(|key| writers.get(&key)).into_iter().flatten();
            waits.extend(before.map(|(owes, since)| (*owes, *since)).map(wait(behind)));
        }
        waits
    }

    /// For whom a change waits, and since when for the latest that it owes.
    fn owing(&self, change: &ChangeState) -> BTreeMap<Holder, Time> {
        let mut owing = BTreeMap::new();
        for recall in &change.owed {
            let holder = self.owes(*recall);
            let since = self.accounts[&holder].owed[recall];
            owing.entry(holder).and_modify(|latest: &mut Time| *latest = since.max(*latest)).or_insert(since);
        }
        owing
    }

    /// It waits for that holder no more.
    fn go_before(&mut self, Wait { flush, owes, behind, .. }: Wait) {
        if let Some(key) = behind {
            self.leave_turn(flush);
            self.begin(flush, key, (Vec::new(), false));
        }
        let owed = std::mem::take(&mut self.changes.get_mut(&flush).expect("it waits").owed);
        let (left, owed) = owed.into_iter().partition(|recall| self.owes(*recall) == owes);
        self.changes.get_mut(&flush).expect("it waits").owed = owed;
        self.leave_behind(flush, left);
        self.announce(flush);
    }
}
