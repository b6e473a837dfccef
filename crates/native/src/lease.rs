//! The leases of one server: who holds what, who has to be asked before it becomes false, and for how
//! long they are waited for. The rules, by number, are those of docs/decisions/0008.
//!
//! A **key** is an object and what is covered of it. A **grant** is one holder's permission to serve
//! facts of one key from memory:
//!
//! ```text
//!            handle_grant                     acknowledgement
//!   (none) ───────────────▶ stands ─ recall ▶ recalled ─────────────▶ (none)
//!                             │                 │ return, end of its limit
//!                             │                 ▼
//!                             │               ended, acknowledgement owed ── acknowledgement ─▶ (none)
//!                             └── return, end of its limit ─▶ (none)
//!                from everywhere: goodbye, or fenced ─▶ (none)
//! ```
//!
//! A **holder** is one session:
//!
//! ```text
//!               owes for `patience`                     1.1 terms since it was heard
//!   trusted ──────────────────────▶ suspect ─────────────────────────────────────▶ fenced (forgotten)
//!      ▲                               │                                              ▲
//!      └───── owes nothing any more ───┘                                              │
//!   trusted ── 1.1 terms since it was heard ──────────────────────────────────────────┘
//! ```
//!
//! Hearing a suspect, or one whose connection is cut, renews nothing. So every recall ends within
//! `patience` and 1.1 terms of being put out, whatever its holder does. When a suspect is trusted again or is no
//! more, its client is granted nothing for a while, in any session, which grows each time: so it does not let
//! others wait again and again. If a client of another origin waited, the suspect's whole origin is granted nothing.
//!
//! A **change** is under way from `handle_change` until `handle_done`, and *ready* while no grant that
//! others had on its keys when they were named still stands. From its beginning to its end, and until
//! the last recall of a key is acknowledged, nothing is granted on that key, to nobody.
//!
//! # What a server owes the table
//!
//! - A grant is registered before what it covers is read (`handle_grant`, then read).
//! - An answer carries a grant only if [`LeaseTable::stands`] says so at the moment when the answer takes
//!   its place in the holder's stream, and recalls take their place there in the order in which they
//!   were put out; one lock is held for both ([`Desk`]). What was registered and is not carried is withdrawn
//!   (`handle_withdraw`), not returned.
//! - A change that is not ready occupies nothing that an acknowledgement could need. When it is ready
//!   and its keys are others by now, they are named by `handle_extend`; `handle_done` follows its effect.
//!
//! A holder has one grant on a key. Asked again, a later one takes the earlier one's place, and a return
//! of the earlier one does nothing: the client may have sent it before it saw the later one.

mod account;
mod circles;
mod desk;
mod doubt;
mod grants;
mod holds;
mod key;
mod limits;
mod listing_rights;
mod merge_base;
mod merging;
mod own;
mod reading;
mod recalls;
mod report;
mod timers;
mod turns;
mod unsent;
mod words;

pub use desk::{Desk, DeskOutput, Parking, Reading};
pub use holds::{Looked, Told};
pub use limits::Missed;
pub use merge_base::{MergeBase, WroteBack};
pub use own::OwnChanges;
pub use report::{ChangeReport, HolderReport, LeaseCounters, LeaseReport};
pub use words::{
    Change, ChangeId, Client, Granted, Holder, LeaseConfig, LeaseKey, LeaseOutput, LeaseReason, Object,
    Party, Refusal,
};

use account::Account;
use doubt::Doubts;
use holds::{Fact, FactState, Holding};
use key::KeyState;
use limits::Watched;
use merging::Merging;
use nigh_types::{GrantId, NodeId, RecallId, Time};
use recalls::{ChangeState, Outstanding};
use std::collections::{BTreeMap, VecDeque};
use timers::{Due, Timers};
use turns::Left;

/// Where one holder's grant on one key stands.
type Seat = (LeaseKey, Holder);

/// A grant that stands and was not recalled.
#[derive(Clone, Debug)]
struct Entry {
    id: GrantId,
    /// The object's number in its holder's export.
    node: NodeId,
    /// Since when the holder has had one here.
    since: Time,
    /// How many grants, of anybody, before it that began; `u16::MAX`: too many.
    behind: u16,
    /// And before it that nobody else has changed it. [`Entry::HELD`]: somebody has, or is about to, which its holder
    /// held back or was not asked about before.
    unbroken: u32,
    marks: u8,
}

impl Entry {
    const HELD: u32 = u32::MAX;
    /// No grant that there was has a number so high.
    const NEVER: GrantId = GrantId(u64::MAX);

    /// Bits of `marks`. The directory's names are shared.
    const SHARED: u8 = 1;
    /// The grant took the place of an earlier one, which its holder may have.
    const AGAIN: u8 = 2;
    /// The holder was not seen to have the right to list the directory: its recall carries no names.
    const UNLISTED: u8 = 4;

    fn is(&self, mark: u8) -> bool {
        self.marks & mark != 0
    }

    /// It takes the place of an earlier one.
    fn follow(&mut self, earlier: &Entry) {
        let between = u32::try_from(self.id.0 - earlier.id.0).unwrap_or(u32::MAX);
        self.since = earlier.since;
        self.marks |= Entry::AGAIN;
        // A holder that may list does so until the directory's rights change, which recalls the grant.
        if !earlier.is(Entry::UNLISTED) {
            self.marks &= !Entry::UNLISTED;
        }
        self.behind = earlier.behind.saturating_add(u16::try_from(between).unwrap_or(u16::MAX));
        self.unbroken = match earlier.unbroken {
            // A later one than it was, where that was too long ago.
            Entry::HELD => between.min(Entry::HELD - 1) - 1,
            unbroken => unbroken.saturating_add(between).min(Entry::HELD - 1),
        };
    }

    /// The number of the grant since which its holder has had one here without a gap, and nobody else has changed it; or a
    /// later one where that was too long ago.
    fn first(&self) -> GrantId {
        match self.unbroken {
            Entry::HELD => Entry::NEVER,
            unbroken => GrantId(self.id.0 - u64::from(unbroken)),
        }
    }

    /// Whether its holder may have had one here when that grant was registered.
    fn may_be_from(&self, until: GrantId) -> bool {
        self.behind == u16::MAX || self.id.0 - u64::from(self.behind) <= until.0
    }
}

/// The latest number of each sort.
#[derive(Clone, Default, Debug)]
struct Numbers {
    grant: u64,
    recall: u64,
    change: u64,
    /// Of changes that have ended.
    end: u64,
}

/// The leases of one server.
///
/// **Contract.** After each input drain `poll_output` until it says [`LeaseOutput::Timeout`], then call
/// `handle_timeout` no later than the moment it names (never, for `Time::FAR`). A `now` before the latest
/// one counts as that. Whatever is due by then is done first, by every input: a holder that has lapsed is
/// fenced before it is heard.
///
/// Inputs that name an unknown holder, grant, recall or change do nothing.
#[derive(Clone, Debug)]
pub struct LeaseTable {
    config: LeaseConfig,
    now: Time,
    entries: BTreeMap<Seat, Entry>,
    accounts: BTreeMap<Holder, Account>,
    keys: BTreeMap<LeaseKey, KeyState>,
    recalls: BTreeMap<RecallId, Outstanding>,
    /// Of the same numbers.
    holds: BTreeMap<RecallId, Holding>,
    facts: BTreeMap<Fact, FactState>,
    changes: BTreeMap<ChangeId, ChangeState>,
    /// What flushes went before.
    left: BTreeMap<RecallId, Left>,
    merging: Merging,
    doubts: Doubts,
    watched: Watched,
    timers: Timers,
    outputs: VecDeque<LeaseOutput>,
    numbers: Numbers,
    counters: LeaseCounters,
}

impl LeaseTable {
    #[must_use]
    pub fn new(config: LeaseConfig) -> LeaseTable {
        LeaseTable {
            config,
            now: Time(0),
            entries: BTreeMap::new(),
            accounts: BTreeMap::new(),
            keys: BTreeMap::new(),
            recalls: BTreeMap::new(),
            holds: BTreeMap::new(),
            facts: BTreeMap::new(),
            changes: BTreeMap::new(),
            left: BTreeMap::new(),
            merging: Merging::default(),
            doubts: Doubts::default(),
            watched: Watched::default(),
            timers: Timers::default(),
            outputs: VecDeque::new(),
            numbers: Numbers::default(),
            counters: LeaseCounters::default(),
        }
    }

    /// A session begins; or it goes on over a new connection: what it owes is put out again, and it is
    /// heard unless it is suspect. `names_alone` (rule 9) counts when it begins.
    pub fn handle_attach(&mut self, now: Time, holder: Holder, names_alone: bool) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.cut = false;
            if account.suspect.is_none() {
                account.heard = self.now;
            }
            self.recall_again(holder);
        } else {
            self.accounts.insert(holder, Account::new(self.now, names_alone));
            self.arm_holder(holder);
        }
    }

    /// Something was heard of the holder. False: it is suspect, fenced or cut; it is not answered, and
    /// this renews nothing.
    pub fn handle_heard(&mut self, now: Time, holder: Holder) -> bool {
        self.advance(now);
        match self.accounts.get_mut(&holder) {
            Some(account) if account.suspect.is_none() && !account.cut => {
                account.heard = self.now;
                true
            }
            _ => false,
        }
    }

    /// Registers a grant before its facts are read. `node` is the object's number in the holder's export.
    /// `None`: the answer is given without a grant.
    pub fn handle_grant(
        &mut self,
        now: Time,
        holder: Holder,
        key: LeaseKey,
        node: NodeId,
    ) -> Option<Granted> {
        self.advance(now);
        self.give(holder, key, node)
    }

    /// Whether this grant stands: it is the latest of its holder on its key, and neither recalled nor
    /// ended. Asked at the moment when an answer that carries it takes its place in the stream.
    #[must_use]
    pub fn stands(&self, holder: Holder, grant: GrantId) -> bool {
        self.accounts.get(&holder).is_some_and(|account| account.grants.contains_key(&grant))
    }

    /// The client gave them back.
    pub fn handle_return(&mut self, now: Time, holder: Holder, grants: &[GrantId]) {
        self.advance(now);
        for grant in grants {
            if self.end_grant(holder, *grant) {
                self.counters.returned += 1;
            }
        }
    }

    /// They were registered, but no answer carries them. One that took the place of an earlier one
    /// stands: the client may have that.
    pub fn handle_withdraw(&mut self, now: Time, holder: Holder, grants: &[GrantId]) {
        self.advance(now);
        for grant in grants {
            let held = self.accounts.get(&holder).and_then(|account| account.grants.get(grant));
            if held.is_some_and(|held| !self.entries[&(held.key, holder)].is(Entry::AGAIN))
                && self.end_grant(holder, *grant)
            {
                self.counters.returned += 1;
            }
        }
    }

    /// The client holds nothing any more of what this recall named.
    pub fn handle_acknowledge(&mut self, now: Time, holder: Holder, recall: RecallId) {
        self.advance(now);
        if self.acknowledge(holder, recall) {
            self.counters.acknowledged += 1;
        }
    }

    /// Begins a change on behalf of `by` (`None`: the server's own disk changed): all other holders are
    /// asked. A key may stand in `changes` several times, with different names.
    pub fn handle_change(&mut self, now: Time, by: Option<Holder>, changes: &[Change]) -> ChangeId {
        self.advance(now);
        let id = self.numbers.next_change();
        self.changes.insert(id, ChangeState::new(by, self.now));
        self.extend(id, changes);
        id
    }

    /// More keys for a change that has begun: it is ready again once these are recalled too.
    pub fn handle_extend(&mut self, now: Time, id: ChangeId, changes: &[Change]) {
        self.advance(now);
        self.extend(id, changes);
    }

    #[must_use]
    pub fn is_ready(&self, id: ChangeId) -> bool {
        self.changes.get(&id).is_some_and(ChangeState::is_ready)
    }

    /// The change was applied or given up: its keys may be granted again. Who holds back what it made false is told
    /// what [`LeaseTable::handle_looked`] has seen of it.
    pub fn handle_done(&mut self, now: Time, id: ChangeId) {
        self.advance(now);
        self.end_change(id, None);
    }

    /// The session said goodbye: the client has dropped everything, and all ends at once.
    pub fn handle_gone(&mut self, now: Time, holder: Holder) {
        self.advance(now);
        self.end_holder(holder);
    }

    /// Its connection is lost: what it holds stands until its lease has run out. Recalls are put out
    /// when it is attached again.
    pub fn handle_cut(&mut self, now: Time, holder: Holder) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.cut = true;
        }
    }

    /// Whether this holder was attached and neither went nor was fenced.
    #[must_use]
    pub fn knows(&self, holder: Holder) -> bool {
        self.accounts.contains_key(&holder)
    }

    /// A moment that `poll_output` named was reached.
    pub fn handle_timeout(&mut self, now: Time) {
        self.advance(now);
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> LeaseOutput {
        while let Some(output) = self.outputs.pop_front() {
            if let LeaseOutput::Ready(id) = output {
                let Some(change) = self.changes.get_mut(&id) else { continue };
                change.telling = false;
                // It was extended since; `Ready` comes again.
                if !change.is_ready() {
                    continue;
                }
            }
            return output;
        }
        let (moment, reason) = self.timers.next();
        LeaseOutput::Timeout(moment, reason)
    }

    /// Time goes on; what is due happens.
    fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
        while let Some(due) = self.timers.pop(self.now) {
            match due {
                Due::Holder(holder) => {
                    self.accounts.get_mut(&holder).expect("its moment was set").armed.fired();
                    self.tend_holder(holder);
                }
                Due::Key(key) => {
                    self.keys.get_mut(&key).expect("its moment was set").armed.fired();
                    self.tend_key(key);
                }
                Due::Flush(flush) => self.tend_flush(flush),
            }
        }
    }
}

impl Numbers {
    fn next_grant(&mut self) -> GrantId {
        self.grant += 1;
        GrantId(self.grant)
    }

    fn next_recall(&mut self) -> RecallId {
        self.recall += 1;
        RecallId(self.recall)
    }

    fn next_change(&mut self) -> ChangeId {
        self.change += 1;
        ChangeId(self.change)
    }
}

#[cfg(test)]
mod tests;
