//! The lease table of one server: which session holds which grant, which grants must be recalled before a change, and
//! how long the server waits for a holder. Rule numbers refer to docs/decisions/0008.
//!
//! A **key** is an object and the lease scope on it. A **grant** is one holder's permission to serve facts of one key
//! from its cache:
//!
//! ```text
//!            handle_grant                     acknowledgement
//!   (none) ───────────────▶ live ── recall ▶ recalled ─────────────▶ (none)
//!                             │                 │ return, end of its limit
//!                             │                 ▼
//!                             │               ended, acknowledgement owed ── acknowledgement ─▶ (none)
//!                             └── return, end of its limit ─▶ (none)
//!                from each state: goodbye, or fenced ─▶ (none)
//! ```
//!
//! A **holder** is one session:
//!
//! ```text
//!               owes for `patience`               1.1 terms since its latest message
//!   trusted ──────────────────────▶ suspect ─────────────────────────────────────▶ fenced (forgotten)
//!      ▲                               │                                              ▲
//!      └───── owes nothing any more ───┘                                              │
//!   trusted ── 1.1 terms since its latest message ────────────────────────────────────┘
//! ```
//!
//! A message from a suspect or disconnected holder does not renew its lease. So every recall ends at most `patience`
//! and 1.1 terms after it was emitted, whatever its holder does. When a suspect is trusted again or its session ends,
//! its client receives no grants for a penalty period, in any session. Each further occasion doubles the penalty, so a
//! client does not delay others again and again. If a client of another origin waited, the penalty is on the suspect's
//! whole origin.
//!
//! A **change** is in progress from `handle_change` until `handle_done`. It is *ready* once every other
//! holder of its keys has acknowledged its recall or update prepare, or was fenced. (A holder that acknowledged a
//! prepare keeps its grant, with the changing facts suspended; write-back may go before an acknowledgement.) From its beginning to its end, and until the last recall of a
//! key is acknowledged, the table refuses new grants on that key to every holder. (A holder's own change of file data
//! does not refuse its own grants on that data.)
//!
//! # What the server must do for the table
//!
//! - The server registers a grant before it reads the covered facts (`handle_grant`, then read).
//! - A reply carries a grant only if the holder's grants on that key have followed each other without a gap since the
//!   grant was registered, and the latest is live when the reply is queued in the holder's stream. Recalls are queued
//!   there in the order in which the table emitted them, but a recall of data follows unsent replies with a grant on
//!   that data (`unsent_grants.rs`). One lock is held for both ([`LeaseSequencer`]). A grant that was registered and not sent is withdrawn (`handle_withdraw`), not returned.
//! - A change that is not ready occupies no resource that an acknowledgement could need. If the keys of a ready change
//!   have become others, `handle_extend` names them; `handle_done` follows the change's effect.
//!
//! A holder has one grant on a key. A later grant replaces the earlier one, and a return of the earlier one does
//! nothing: the client may have sent it before it received the later one.

mod deadlock;
mod grants;
mod holder_state;
mod key;
mod limits;
mod listing_rights;
mod locks;
mod merge_base;
mod merging;
mod penalty;
mod read_grants;
mod recalls;
mod report;
mod sequencer;
mod timers;
mod types;
mod unsent_grants;
mod updates;
mod write_history;
mod write_queue;

pub use limits::MissedCursor;
pub use locks::{LockOwner, LockRequest, LockResult, LockTable};
pub use merge_base::{MergeBase, WroteBack};
pub use report::{ChangeReport, HolderReport, LeaseCounters, LeaseReport};
pub use sequencer::{LeaseSequencer, ParkResult, ReadGrant, SequencerOutput};
pub use types::{
    Change, ChangeId, Client, ClientOrigin, Granted, Holder, LeaseConfig, LeaseKey, LeaseOutput, LeaseReason,
    Object, Refusal,
};
pub use updates::{ObservedAt, UpdatedKey};
pub use write_history::WriteHistory;

use holder_state::HolderState;
use key::KeyState;
use limits::WatchSet;
use merging::MergeMemory;
use nigh_types::{GrantId, NodeId, RecallId, Time};
use penalty::Penalties;
use recalls::{ChangeState, OutstandingRecall};
use std::collections::{BTreeMap, VecDeque};
use timers::{Due, Timers};
use updates::{FactKey, FactState, PendingUpdate};
use write_queue::BypassedAck;

/// A holder's place at a key: the index of a grant in the table.
type GrantKey = (LeaseKey, Holder);

/// A live grant that was not recalled.
#[derive(Clone, Debug)]
struct Entry {
    id: GrantId,
    /// The object's node id in its holder's export.
    node: NodeId,
    /// When the holder's uninterrupted possession of the key began.
    since: Time,
    /// The number of grants, of all holders, that were registered since that possession began; `u16::MAX`: too many.
    grants_since_acquired: u16,
    /// The number of grants registered since this holder has had the key without a change by others.
    /// [`Entry::CHANGED_BY_OTHER`]: another holder has changed the key or is about to, under an update prepare or
    /// without asking this holder first.
    grants_since_other_change: u32,
    marks: u8,
}

impl Entry {
    const CHANGED_BY_OTHER: u32 = u32::MAX;
    /// An id above that of every registered grant.
    const ABOVE_ALL: GrantId = GrantId(u64::MAX);

    /// Bits of `marks`. The directory lease is shared.
    const SHARED: u8 = 1;
    /// The grant replaced an earlier one, which its holder may have.
    const REPLACES: u8 = 2;
    /// The holder was not found to have the right to list the directory: its recall carries no names.
    const WITHOUT_NAMES: u8 = 4;

    fn is(&self, mark: u8) -> bool {
        self.marks & mark != 0
    }

    /// Carries over the history of the earlier grant that this one replaces.
    fn inherit(&mut self, earlier: &Entry) {
        let between = u32::try_from(self.id.0 - earlier.id.0).unwrap_or(u32::MAX);
        self.since = earlier.since;
        self.marks |= Entry::REPLACES;
        // A holder with the right to list keeps it until the directory's permissions change, which recalls the grant.
        if !earlier.is(Entry::WITHOUT_NAMES) {
            self.marks &= !Entry::WITHOUT_NAMES;
        }
        self.grants_since_acquired =
            earlier.grants_since_acquired.saturating_add(u16::try_from(between).unwrap_or(u16::MAX));
        self.grants_since_other_change = match earlier.grants_since_other_change {
            // If the distance does not fit, a later grant than the earlier one's successor.
            Entry::CHANGED_BY_OTHER => between.min(Entry::CHANGED_BY_OTHER - 1) - 1,
            unbroken => unbroken.saturating_add(between).min(Entry::CHANGED_BY_OTHER - 1),
        };
    }

    /// The id of the grant since which its holder has had the key without a gap or a change by others; a later id if
    /// that was too long ago.
    fn held_exclusively_since(&self) -> GrantId {
        match self.grants_since_other_change {
            Entry::CHANGED_BY_OTHER => Entry::ABOVE_ALL,
            unbroken => GrantId(self.id.0 - u64::from(unbroken)),
        }
    }

    /// Whether its holder may have had a grant on the key when grant `until` was registered.
    fn may_predate(&self, until: GrantId) -> bool {
        self.grants_since_acquired == u16::MAX || self.id.0 - u64::from(self.grants_since_acquired) <= until.0
    }
}

/// The latest id of each kind.
#[derive(Clone, Default, Debug)]
struct IdSpace {
    grant: u64,
    recall: u64,
    change: u64,
    /// Of ended changes.
    end: u64,
}

/// The leases of one server.
///
/// **Contract.** After each input drain `poll_output` until it says [`LeaseOutput::Timeout`], then call
/// `handle_timeout` no later than the moment that it names (never, for `Time::FAR`). A `now` before the latest one
/// counts as the latest one. Every input first does all that is due by then: a lapsed holder is fenced before its
/// message counts.
///
/// Inputs that name an unknown holder, grant, recall or change do nothing.
#[derive(Clone, Debug)]
pub struct LeaseTable {
    config: LeaseConfig,
    now: Time,
    entries: BTreeMap<GrantKey, Entry>,
    accounts: BTreeMap<Holder, HolderState>,
    keys: BTreeMap<LeaseKey, KeyState>,
    recalls: BTreeMap<RecallId, OutstandingRecall>,
    /// Update prepares that await acknowledgement. Their ids share one sequence with recalls.
    pending_updates: BTreeMap<RecallId, PendingUpdate>,
    facts: BTreeMap<FactKey, FactState>,
    changes: BTreeMap<ChangeId, ChangeState>,
    /// Acknowledgements that write-backs bypassed.
    bypassed: BTreeMap<RecallId, BypassedAck>,
    merging: MergeMemory,
    penalties: Penalties,
    watched: WatchSet,
    timers: Timers,
    outputs: VecDeque<LeaseOutput>,
    numbers: IdSpace,
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
            pending_updates: BTreeMap::new(),
            facts: BTreeMap::new(),
            changes: BTreeMap::new(),
            bypassed: BTreeMap::new(),
            merging: MergeMemory::default(),
            penalties: Penalties::default(),
            watched: WatchSet::default(),
            timers: Timers::default(),
            outputs: VecDeque::new(),
            numbers: IdSpace::default(),
            counters: LeaseCounters::default(),
        }
    }

    /// Begins a session, or resumes it over a new connection. On resumption the table re-emits every outstanding recall
    /// and prepare, and renews the lease unless the holder is suspect. `needs_exclusive_dir_lease` (rule 9) counts when
    /// the session begins.
    pub fn handle_attach(&mut self, now: Time, holder: Holder, needs_exclusive_dir_lease: bool) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.disconnected = false;
            if account.suspect.is_none() {
                account.last_renewed = self.now;
            }
            self.resend_owed(holder);
        } else {
            self.accounts.insert(holder, HolderState::new(self.now, needs_exclusive_dir_lease));
            self.arm_holder(holder);
        }
    }

    /// Renews a holder's lease after a message from it. Returns false if the holder is suspect, fenced or disconnected:
    /// then nothing is renewed, and the server does not reply.
    pub fn handle_renewal(&mut self, now: Time, holder: Holder) -> bool {
        self.advance(now);
        match self.accounts.get_mut(&holder) {
            Some(account) if account.suspect.is_none() && !account.disconnected => {
                account.last_renewed = self.now;
                true
            }
            _ => false,
        }
    }

    /// Registers a grant before its facts are read. `node` is the object's node id in the holder's export. `None`: the
    /// reply carries no grant.
    pub fn handle_grant(
        &mut self,
        now: Time,
        holder: Holder,
        key: LeaseKey,
        node: NodeId,
    ) -> Option<Granted> {
        self.advance(now);
        self.try_grant(holder, key, node)
    }

    /// Whether this grant is live: it is its holder's latest on its key, and neither recalled nor ended. Checked when a
    /// reply that carries it is queued in the stream.
    #[must_use]
    pub fn is_live(&self, holder: Holder, grant: GrantId) -> bool {
        self.accounts.get(&holder).is_some_and(|account| account.grants.contains_key(&grant))
    }

    /// Ends grants that the client returned.
    pub fn handle_return(&mut self, now: Time, holder: Holder, grants: &[GrantId]) {
        self.advance(now);
        for grant in grants {
            if self.end_grant(holder, *grant) {
                self.counters.returned += 1;
            }
        }
    }

    /// Withdraws grants that were registered and that no reply carries. A grant that replaced an earlier one stays
    /// live: the client may have the earlier one.
    pub fn handle_withdraw(&mut self, now: Time, holder: Holder, grants: &[GrantId]) {
        self.advance(now);
        for grant in grants {
            let held = self.accounts.get(&holder).and_then(|account| account.grants.get(grant));
            if held.is_some_and(|held| !self.entries[&(held.key, holder)].is(Entry::REPLACES))
                && self.end_grant(holder, *grant)
            {
                self.counters.returned += 1;
            }
        }
    }

    /// Takes an acknowledgement: the client's kernel holds none of the facts any more, and its cache has dropped
    /// (recall) or suspended (prepare) them.
    pub fn handle_acknowledge(&mut self, now: Time, holder: Holder, recall: RecallId) {
        self.advance(now);
        if self.acknowledge(holder, recall) {
            self.counters.acknowledged += 1;
        }
    }

    /// Begins a change on behalf of `by` (`None`: a change on the server's own disk), and sends each other
    /// holder a recall or an update prepare. `changes` may name a key several times, with different names.
    pub fn handle_change(&mut self, now: Time, by: Option<Holder>, changes: &[Change]) -> ChangeId {
        self.advance(now);
        let id = self.numbers.next_change();
        self.changes.insert(id, ChangeState::new(by, self.now));
        self.extend(id, changes);
        id
    }

    /// Adds keys to a change in progress: it is ready again once these are recalled too.
    pub fn handle_extend(&mut self, now: Time, id: ChangeId, changes: &[Change]) {
        self.advance(now);
        self.extend(id, changes);
    }

    #[must_use]
    pub fn is_ready(&self, id: ChangeId) -> bool {
        self.changes.get(&id).is_some_and(ChangeState::is_ready)
    }

    /// Ends a change that was applied or abandoned: its keys may be granted again. Each holder that was sent a prepare
    /// receives a commit with the values that [`LeaseTable::handle_observed`] observed.
    pub fn handle_done(&mut self, now: Time, id: ChangeId) {
        self.advance(now);
        self.end_change(id, None);
    }

    /// Ends a session that said goodbye: the client has dropped everything, and all its grants end at once.
    pub fn handle_goodbye(&mut self, now: Time, holder: Holder) {
        self.advance(now);
        self.end_holder(holder);
    }

    /// Notes that a holder's connection is lost. Its grants stay live until its lease runs out; recalls are sent when
    /// it is attached again.
    pub fn handle_disconnect(&mut self, now: Time, holder: Holder) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.disconnected = true;
        }
    }

    /// Whether this holder is attached or disconnected, and neither said goodbye nor was fenced.
    #[must_use]
    pub fn is_known(&self, holder: Holder) -> bool {
        self.accounts.contains_key(&holder)
    }

    /// Advances to a moment that `poll_output` named.
    pub fn handle_timeout(&mut self, now: Time) {
        self.advance(now);
    }

    /// Returns the next thing to do.
    pub fn poll_output(&mut self) -> LeaseOutput {
        while let Some(output) = self.outputs.pop_front() {
            if let LeaseOutput::Ready(id) = output {
                let Some(change) = self.changes.get_mut(&id) else { continue };
                change.ready_emitted = false;
                // The change was extended since; `Ready` comes again.
                if !change.is_ready() {
                    continue;
                }
            }
            return output;
        }
        let (moment, reason) = self.timers.next();
        LeaseOutput::Timeout(moment, reason)
    }

    /// Advances the clock and does what is due.
    fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
        while let Some(due) = self.timers.pop(self.now) {
            match due {
                Due::Holder(holder) => {
                    self.accounts.get_mut(&holder).expect("its moment was set").armed.fired();
                    self.handle_holder_timer(holder);
                }
                Due::Key(key) => {
                    self.keys.get_mut(&key).expect("its moment was set").armed.fired();
                    self.update_key(key);
                }
                Due::WriteBack(flush) => self.handle_write_back_timer(flush),
            }
        }
    }
}

impl IdSpace {
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
