//! The order of recalls, replies that carry grants, and blocked calls. Rules: docs/decisions/0008.
//!
//! The lease table decides what is recalled. What a client may believe also depends on the order of recalls and replies
//! in its stream, which is decided here.

use crate::types::{
    Change, ChangeId, GrantRequest, Granted, Holder, LeaseConfig, LeaseKey, LeaseOutput, LeaseReason,
};
use crate::unsent_grants::{CarryOutcome, UnsentGrants};
use crate::{LeaseReport, LeaseTable, UpdatedKey};
use nigh_types::{Bug, Grant, GrantId, Recall, RecallId, Time, UpdatePrepare, planted};
use std::collections::BTreeMap;

/// Lease sequencer of a server: its lease table, and the blocked calls `P`, each with the change that it waits for.
///
/// **Contract.** The caller holds one lock over each input, until `poll_output` has said [`SequencerOutput::Timeout`],
/// and while it does what the outputs say: so recalls and replies are queued in the streams in that order. Calls that
/// go on are executed after the lock is released. `handle_timeout` follows as with [`LeaseTable`].
#[derive(Clone, Debug)]
pub struct LeaseSequencer<P> {
    table: LeaseTable,
    unsent_grants: UnsentGrants,
    parked: BTreeMap<ChangeId, P>,
    /// Calls that wait for a grant.
    readers: BTreeMap<ChangeId, WaitingRead>,
    /// The reply that is queued once the table has no more output.
    pending_reply: Option<PendingReply>,
}

/// What the server has to do for the sequencer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SequencerOutput<P> {
    /// Queue this recall in the holder's stream.
    Recall {
        holder: Holder,
        recall: Recall,
    },
    /// Queue this update prepare in the holder's stream.
    Prepare {
        holder: Holder,
        hold: UpdatePrepare,
    },
    Commit {
        holder: Holder,
        id: RecallId,
        told: Vec<UpdatedKey>,
    },
    /// Queue the reply passed to [`LeaseSequencer::handle_reply`], with these grants. `same`: the grants are unchanged.
    Reply {
        holder: Holder,
        grants: Vec<Grant>,
        same: bool,
    },
    /// This call may go on.
    Ready(P),
    /// As in [`LeaseOutput`], as are those below.
    Suspect(Holder),
    Trusted(Holder),
    Fenced(Holder),
    Timeout(Time, LeaseReason),
}

/// Result of asking for a grant before data is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadGrant {
    Granted(Granted),
    /// The call waits until this change is ready, takes its grant by [`LeaseSequencer::take_granted`], and ends the wait like a
    /// change.
    Waits(ChangeId),
    /// The server replies without a grant.
    Refused,
}

/// Result of blocking a call on its change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ParkResult<P> {
    Parked,
    /// The change is ready: the call need not wait.
    Ready(P),
    /// The caller has given up the call.
    Cancelled(P),
}

/// A call that waits for a data grant.
#[derive(Clone, Debug)]
struct WaitingRead {
    request: GrantRequest,
    /// Its grant, until the call takes it.
    granted: Option<Granted>,
}

#[derive(Clone, Debug)]
struct PendingReply {
    holder: Holder,
    grants: Vec<Grant>,
    /// Those whose recall follows the reply in the stream.
    recalled: Vec<GrantId>,
    same: bool,
}

impl<P> LeaseSequencer<P> {
    #[must_use]
    pub fn new(config: LeaseConfig) -> LeaseSequencer<P> {
        LeaseSequencer {
            table: LeaseTable::new(config),
            unsent_grants: UnsentGrants::default(),
            parked: BTreeMap::new(),
            readers: BTreeMap::new(),
            pending_reply: None,
        }
    }

    #[must_use]
    pub fn table(&self) -> &LeaseTable {
        &self.table
    }

    /// The lease table, for inputs that neither register nor withdraw a grant. Its outputs are polled through
    /// [`LeaseSequencer::poll_output`].
    pub fn table_mut(&mut self) -> &mut LeaseTable {
        &mut self.table
    }

    #[must_use]
    pub fn report(&self) -> LeaseReport {
        self.table.report()
    }

    /// Blocked calls, in the order in which their changes began.
    pub fn parked(&self) -> impl Iterator<Item = (ChangeId, &P)> {
        self.parked.iter().map(|(change, parked)| (*change, parked))
    }

    /// Registers a grant before the covered facts are read. `None`: the reply carries no grant.
    pub fn handle_grant(&mut self, now: Time, request: GrantRequest) -> Option<Granted> {
        self.unsent_grants.register(&mut self.table, now, request)
    }

    /// Registers a grant before data is read, or begins to wait for one (rule 10).
    pub fn handle_read(&mut self, now: Time, request: GrantRequest) -> ReadGrant {
        if let Some(granted) = self.handle_grant(now, request) {
            return ReadGrant::Granted(granted);
        }
        let Some(id) = self.table.handle_wait(now, request) else { return ReadGrant::Refused };
        self.readers.insert(id, WaitingRead { request, granted: None });
        ReadGrant::Waits(id)
    }

    /// Takes the grant that a waiting call was given; returns it once.
    pub fn take_granted(&mut self, reader: ChangeId) -> Option<Granted> {
        self.readers.get_mut(&reader)?.granted.take()
    }

    /// Withdraws grants that were registered and that no reply carries.
    pub fn handle_withdraw(&mut self, now: Time, holder: Holder, grants: &[GrantId]) {
        grants.iter().for_each(|grant| self.unsent_grants.drop(*grant));
        self.table.handle_withdraw(now, holder, grants);
    }

    /// Recalls a key from all holders, without waiting for their acknowledgements.
    pub fn handle_recall(&mut self, now: Time, key: LeaseKey) {
        let change = self.table.handle_change(
            now,
            None,
            &[Change { key, names: Vec::new(), writes: false, can_update: false }],
        );
        self.table.handle_done(now, change);
    }

    /// Ends a change of data that took effect, and grants its initiator the data that it wrote.
    pub fn handle_written(&mut self, now: Time, id: ChangeId, wrote: GrantRequest) -> Option<Granted> {
        let gap = self.unsent_grants.has_gap(&self.table, wrote.seat());
        let granted = self.table.handle_written(now, id, wrote)?;
        self.unsent_grants.note(wrote, granted, gap);
        Some(granted)
    }

    /// Ends a change, or a call's wait for a grant.
    pub fn handle_done(&mut self, now: Time, id: ChangeId) {
        if let Some(WaitingRead { request, granted: Some(granted) }) = self.readers.remove(&id) {
            self.handle_withdraw(now, request.holder, &[granted.id]);
        }
        self.table.handle_done(now, id);
    }

    /// Offers a reply with these grants for queueing. [`SequencerOutput::Reply`] says when, and which grants it
    /// carries.
    ///
    /// # Panics
    /// If the outputs of the previous reply were not polled.
    pub fn handle_reply(&mut self, now: Time, holder: Holder, mut grants: Vec<Grant>) {
        assert!(self.pending_reply.is_none(), "one answer takes its place before the next");
        let (mut same, mut recalled) = (true, Vec::new());
        grants.retain_mut(|grant| {
            let id = grant.id;
            let carried = self.unsent_grants.carry(&mut self.table, now, grant);
            same &= carried != CarryOutcome::No && grant.id == id;
            recalled.extend((carried == CarryOutcome::Recalled).then_some(grant.id));
            carried != CarryOutcome::No || planted(Bug::CarriesWhatEnded)
        });
        self.pending_reply = Some(PendingReply { holder, grants, recalled, same });
    }

    /// Blocks a call until its change is ready.
    pub fn park(&mut self, change: ChangeId, call: P, is_wanted: impl FnOnce(&P) -> bool) -> ParkResult<P> {
        if self.table.is_ready(change) {
            return ParkResult::Ready(call);
        }
        if !is_wanted(&call) {
            return ParkResult::Cancelled(call);
        }
        self.parked.insert(change, call);
        ParkResult::Parked
    }

    /// Takes back the blocked calls that satisfy `is_such`. Their changes go on until they are ended.
    pub fn take_parked(&mut self, is_such: impl Fn(&P) -> bool) -> Vec<P> {
        let such: Vec<ChangeId> = self.parked().filter(|(_, call)| is_such(call)).map(|(id, _)| id).collect();
        such.iter().filter_map(|change| self.parked.remove(change)).collect()
    }

    pub fn handle_timeout(&mut self, now: Time) {
        self.table.handle_timeout(now);
    }

    /// Returns the next thing to do.
    pub fn poll_output(&mut self) -> SequencerOutput<P> {
        loop {
            match self.table.poll_output() {
                LeaseOutput::Recall { holder, recall } => {
                    let key = self.table.recalled_key(recall.id);
                    let now_or_later = match key {
                        Some(key) => self.unsent_grants.recall(holder, key, recall),
                        None => Some(recall),
                    };
                    if let Some(recall) = now_or_later {
                        return SequencerOutput::Recall { holder, recall };
                    }
                }
                LeaseOutput::Prepare { holder, hold } => return SequencerOutput::Prepare { holder, hold },
                LeaseOutput::Commit { holder, id, told } => {
                    return SequencerOutput::Commit { holder, id, told };
                }
                LeaseOutput::Ready(change) => {
                    self.note_granted(change);
                    if let Some(call) = self.parked.remove(&change) {
                        return SequencerOutput::Ready(call);
                    }
                }
                LeaseOutput::Suspect(holder) => return SequencerOutput::Suspect(holder),
                LeaseOutput::Trusted(holder) => return SequencerOutput::Trusted(holder),
                LeaseOutput::Fenced(holder) => return SequencerOutput::Fenced(holder),
                LeaseOutput::Timeout(due, reason) => {
                    return self.emit_reply().unwrap_or_else(|| match self.unsent_grants.take_due() {
                        Some((holder, recall)) => SequencerOutput::Recall { holder, recall },
                        None => SequencerOutput::Timeout(due, reason),
                    });
                }
            }
        }
    }

    /// Returns the pending reply as an output. Recalls that it delayed follow it.
    fn emit_reply(&mut self) -> Option<SequencerOutput<P>> {
        let PendingReply { holder, mut grants, recalled, same } = self.pending_reply.take()?;
        let before = grants.len();
        // The new grant ids may have put the holder above its quota.
        let ended = |grant: &Grant| !recalled.contains(&grant.id) && !self.table.is_live(holder, grant.id);
        grants.retain(|grant| !ended(grant) || planted(Bug::CarriesWhatEnded));
        Some(SequencerOutput::Reply { holder, same: same && grants.len() == before, grants })
    }

    /// Notes the data grant of a waiting read; at the earliest, its recall follows the reply. (No earlier grant of the
    /// session is in an unsent reply: the writer meanwhile waited for those.)
    fn note_granted(&mut self, reader: ChangeId) {
        if let Some(WaitingRead { request, granted: given }) = self.readers.get_mut(&reader)
            && let Some(granted) = self.table.take_granted(reader)
        {
            self.unsent_grants.note(*request, granted, false);
            *given = Some(granted);
        }
    }
}
