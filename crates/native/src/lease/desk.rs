//! What a server says and does in which order: recalls, answers that carry grants, and calls that wait for others.
//! Rules: docs/decisions/0008.
//!
//! The table says what is recalled. What a client believes of it depends besides on the order in which recalls and
//! answers stand in its stream, and that is decided here.

use super::unsent::{Carried, Unsent};
use super::words::{Change, ChangeId, Granted, Holder, LeaseConfig, LeaseKey, LeaseOutput, LeaseReason};
use super::{LeaseReport, LeaseTable, Told};
use nigh_types::{Bug, Grant, GrantId, Hold, NodeId, Recall, RecallId, Time, planted};
use std::collections::BTreeMap;

/// The lease table of a server, and `P`: calls that are parked, each with the change that it waits for.
///
/// **Contract.** One lock is held over each input and until `poll_output` has said [`DeskOutput::Timeout`], and
/// over doing what it said up to then: recalls and answers take their places in streams in that order. Calls
/// that go on are executed when the lock is free again. `handle_timeout` follows as with [`LeaseTable`].
#[derive(Clone, Debug)]
pub struct Desk<P> {
    table: LeaseTable,
    unsent: Unsent,
    parked: BTreeMap<ChangeId, P>,
    /// Calls that wait for a grant.
    readers: BTreeMap<ChangeId, Reader>,
    /// It takes its place behind what the table has to say.
    answer: Option<Answer>,
}

/// What is to be done for the desk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeskOutput<P> {
    /// To be put in this holder's stream.
    Recall {
        holder: Holder,
        recall: Recall,
    },
    /// The same.
    Hold {
        holder: Holder,
        hold: Hold,
    },
    Commit {
        holder: Holder,
        id: RecallId,
        told: Vec<Told>,
    },
    /// The answer for which [`Desk::handle_answer`] was called takes its place in its stream, with these grants.
    /// `same`: they are as they were.
    Answer {
        holder: Holder,
        grants: Vec<Grant>,
        same: bool,
    },
    /// This call goes on.
    Ready(P),
    /// As in [`LeaseOutput`], like those below.
    Suspect(Holder),
    Trusted(Holder),
    Fenced(Holder),
    Timeout(Time, LeaseReason),
}

/// Whether data may be read under a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    Granted(Granted),
    /// The call waits until this is ready, takes its grant by [`Desk::take_granted`], and ends it like a change.
    Waits(ChangeId),
    /// It is answered without a grant.
    Refused,
}

/// What becomes of a call that would wait.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Parking<P> {
    Parked,
    /// It need not wait.
    Ready(P),
    /// Nobody waits for its answer.
    Unwanted(P),
}

/// A call that waits for a grant on data.
#[derive(Clone, Debug)]
struct Reader {
    seat: (Holder, LeaseKey),
    node: NodeId,
    /// What it was granted and has not taken.
    given: Option<Granted>,
}

#[derive(Clone, Debug)]
struct Answer {
    holder: Holder,
    grants: Vec<Grant>,
    /// Those whose recall follows in the stream.
    recalled: Vec<GrantId>,
    same: bool,
}

impl<P> Desk<P> {
    #[must_use]
    pub fn new(config: LeaseConfig) -> Desk<P> {
        Desk {
            table: LeaseTable::new(config),
            unsent: Unsent::default(),
            parked: BTreeMap::new(),
            readers: BTreeMap::new(),
            answer: None,
        }
    }

    #[must_use]
    pub fn table(&self) -> &LeaseTable {
        &self.table
    }

    /// For inputs that neither register a grant nor withdraw one. What the table puts out is polled here.
    pub fn table_mut(&mut self) -> &mut LeaseTable {
        &mut self.table
    }

    #[must_use]
    pub fn report(&self) -> LeaseReport {
        self.table.report()
    }

    /// Calls that are parked, in the order in which their changes began.
    pub fn parked(&self) -> impl Iterator<Item = (ChangeId, &P)> {
        self.parked.iter().map(|(change, parked)| (*change, parked))
    }

    /// Registers a grant before what it covers is read. `None`: the answer is given without it.
    pub fn handle_grant(&mut self, now: Time, seat: (Holder, LeaseKey), node: NodeId) -> Option<Granted> {
        self.unsent.register(&mut self.table, now, seat, node)
    }

    /// For a grant that is to be had before data is read (rule 10).
    pub fn handle_read(&mut self, now: Time, seat: (Holder, LeaseKey), node: NodeId) -> Reading {
        if let Some(granted) = self.handle_grant(now, seat, node) {
            return Reading::Granted(granted);
        }
        let Some(id) = self.table.handle_wait(now, seat.0, seat.1, node) else { return Reading::Refused };
        self.readers.insert(id, Reader { seat, node, given: None });
        Reading::Waits(id)
    }

    /// What a call was granted that waited; once.
    pub fn take_granted(&mut self, reader: ChangeId) -> Option<Granted> {
        self.readers.get_mut(&reader)?.given.take()
    }

    /// These were registered and no answer carries them.
    pub fn handle_withdraw(&mut self, now: Time, holder: Holder, grants: &[GrantId]) {
        grants.iter().for_each(|grant| self.unsent.drop(*grant));
        self.table.handle_withdraw(now, holder, grants);
    }

    /// Asks everybody for what they hold of a key. Nobody waits until they have given it back.
    pub fn handle_recall(&mut self, now: Time, key: LeaseKey) {
        let change = self.table.handle_change(
            now,
            None,
            &[Change { key, names: Vec::new(), writes: false, told: false }],
        );
        self.table.handle_done(now, change);
    }

    /// A change of data has its effect and ends; its maker is granted what it wrote.
    pub fn handle_written(
        &mut self,
        now: Time,
        id: ChangeId,
        seat: (Holder, LeaseKey),
        node: NodeId,
    ) -> Option<Granted> {
        let gap = self.unsent.has_gap(&self.table, seat);
        let granted = self.table.handle_written(now, id, seat.1, node)?;
        self.unsent.note(seat, node, granted, gap);
        Some(granted)
    }

    /// A change, or what waited like one, is over.
    pub fn handle_done(&mut self, now: Time, id: ChangeId) {
        if let Some(Reader { seat, given: Some(granted), .. }) = self.readers.remove(&id) {
            self.handle_withdraw(now, seat.0, &[granted.id]);
        }
        self.table.handle_done(now, id);
    }

    /// An answer is about to carry these grants. [`DeskOutput::Answer`] says when, and which of them.
    ///
    /// # Panics
    /// If the outputs of the one before were not polled.
    pub fn handle_answer(&mut self, now: Time, holder: Holder, mut grants: Vec<Grant>) {
        assert!(self.answer.is_none(), "one answer takes its place before the next");
        let (mut same, mut recalled) = (true, Vec::new());
        grants.retain_mut(|grant| {
            let id = grant.id;
            let carried = self.unsent.carry(&mut self.table, now, grant);
            same &= carried != Carried::No && grant.id == id;
            recalled.extend((carried == Carried::Recalled).then_some(grant.id));
            carried != Carried::No || planted(Bug::CarriesWhatEnded)
        });
        self.answer = Some(Answer { holder, grants, recalled, same });
    }

    /// Keeps a call until its change is ready.
    pub fn park(&mut self, change: ChangeId, call: P, is_wanted: impl FnOnce(&P) -> bool) -> Parking<P> {
        if self.table.is_ready(change) {
            return Parking::Ready(call);
        }
        if !is_wanted(&call) {
            return Parking::Unwanted(call);
        }
        self.parked.insert(change, call);
        Parking::Parked
    }

    /// Takes back the calls that are parked and are such. Their changes go on until they are ended.
    pub fn take_parked(&mut self, is_such: impl Fn(&P) -> bool) -> Vec<P> {
        let such: Vec<ChangeId> = self.parked().filter(|(_, call)| is_such(call)).map(|(id, _)| id).collect();
        such.iter().filter_map(|change| self.parked.remove(change)).collect()
    }

    pub fn handle_timeout(&mut self, now: Time) {
        self.table.handle_timeout(now);
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> DeskOutput<P> {
        loop {
            match self.table.poll_output() {
                LeaseOutput::Recall { holder, recall } => {
                    let key = self.table.recalled_key(recall.id);
                    let now_or_later = match key {
                        Some(key) => self.unsent.recall(holder, key, recall),
                        None => Some(recall),
                    };
                    if let Some(recall) = now_or_later {
                        return DeskOutput::Recall { holder, recall };
                    }
                }
                LeaseOutput::Hold { holder, hold } => return DeskOutput::Hold { holder, hold },
                LeaseOutput::Commit { holder, id, told } => return DeskOutput::Commit { holder, id, told },
                LeaseOutput::Ready(change) => {
                    self.note_granted(change);
                    if let Some(call) = self.parked.remove(&change) {
                        return DeskOutput::Ready(call);
                    }
                }
                LeaseOutput::Suspect(holder) => return DeskOutput::Suspect(holder),
                LeaseOutput::Trusted(holder) => return DeskOutput::Trusted(holder),
                LeaseOutput::Fenced(holder) => return DeskOutput::Fenced(holder),
                LeaseOutput::Timeout(due, reason) => {
                    return self.put_answer().unwrap_or_else(|| match self.unsent.take_due() {
                        Some((holder, recall)) => DeskOutput::Recall { holder, recall },
                        None => DeskOutput::Timeout(due, reason),
                    });
                }
            }
        }
    }

    /// The answer that waits for its place. Recalls that it was in the way of come behind it.
    fn put_answer(&mut self) -> Option<DeskOutput<P>> {
        let Answer { holder, mut grants, recalled, same } = self.answer.take()?;
        let before = grants.len();
        // The new numbers may have put the holder above its quota.
        let ended = |grant: &Grant| !recalled.contains(&grant.id) && !self.table.stands(holder, grant.id);
        grants.retain(|grant| !ended(grant) || planted(Bug::CarriesWhatEnded));
        Some(DeskOutput::Answer { holder, same: same && grants.len() == before, grants })
    }

    /// A reader that waits was granted what it waited for; a recall of that follows at the earliest. (Nothing
    /// of its session that was granted before is under way: whoever wrote meanwhile waited for that.)
    fn note_granted(&mut self, reader: ChangeId) {
        if let Some(Reader { seat, node, given }) = self.readers.get_mut(&reader)
            && let Some(granted) = self.table.take_granted(reader)
        {
            self.unsent.note(*seat, *node, granted, false);
            *given = Some(granted);
        }
    }
}
