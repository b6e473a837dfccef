//! What the lease table takes and puts out.

use super::holds::Told;
use nigh_types::{Bug, Covers, GrantId, Hold, Name, Origin, Recall, RecallId, Span, Time, planted};

/// What is really there: one file system object as the server identifies it (never an export's own number).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Object {
    pub filesystem: u64,
    pub ino: u64,
    /// Nanoseconds since 1970; 0 where the filesystem keeps no birth times.
    pub birth: u64,
}

/// What one grant is on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseKey {
    pub object: Object,
    pub covers: Covers,
}

/// One session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Holder(pub u64);

/// The client of a session, over its sessions: its number and its incarnation.
pub type Client = (u64, u64);

/// The client of a session and the origin that its transport proved. The client number is the peer's own choice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Party {
    pub client: Client,
    pub origin: Origin,
}

/// One change under way, as the table numbers it, from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ChangeId(pub u64);

/// How long is waited, and how much is held. Numbers: docs/decisions/0008.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseConfig {
    /// Of a holder's lease. The table waits 1.1 of it from the latest hearing.
    pub term: Span,
    /// For how long an acknowledgement may be owed before its holder is suspect.
    pub patience: Span,
    /// For how long a client that let others wait again and again is granted nothing, at the most; and how long it
    /// takes after that until it is as if it never had.
    pub most_doubt: Span,
    /// A key that was recalled `contention_recalls` times within this, soon after it was granted, is contended.
    pub contention_window: Span,
    /// At least 1.
    pub contention_recalls: u32,
    /// A recall counts for that if it ends a grant that is younger: one that is older was worth giving.
    pub young: Span,
    /// How long a contended key stays so after its latest change, and a shared one after its last but
    /// one holder.
    pub quiet: Span,
    /// Grants of one holder that were not recalled. It may hold a 64th more (at least one) of which the
    /// recall is out. 0: nothing is granted.
    pub grants_per_holder: u64,
    /// Bytes of memory for merging write-back of several holders into one file, over all. Beyond that the holder that has most of it
    /// loses its part: what it writes back then is refused where others have written.
    pub merge_bytes: u64,
}

impl Default for LeaseConfig {
    fn default() -> LeaseConfig {
        LeaseConfig {
            term: Span::from_secs(15),
            patience: Span::from_secs(2),
            most_doubt: Span::from_secs(600),
            contention_window: Span::from_secs(1),
            contention_recalls: 2,
            young: Span::from_millis(200),
            quiet: Span::from_secs(10),
            grants_per_holder: 1 << 20,
            merge_bytes: 64 << 20,
        }
    }
}

impl LeaseConfig {
    /// What is waited from the latest hearing of a holder before it is fenced.
    #[must_use]
    pub fn lapse(&self) -> Span {
        if planted(Bug::FencesEarly) { Span(self.term.0 / 2) } else { longer(self.term) }
    }

    /// Grants of one holder, recalled ones included.
    pub(super) fn most_grants(&self) -> u64 {
        self.grants_per_holder.saturating_add((self.grants_per_holder / 64).max(1))
    }
}

/// 1.1 of it: what a server waits where its client counts no more than `span`.
pub(super) fn longer(span: Span) -> Span {
    Span(span.0.saturating_add(span.0 / 10))
}

/// A registered grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted {
    pub id: GrantId,
    /// Of names: others hold this key or did lately, so a kernel that cannot drop all names at once is
    /// given no time for them.
    pub shared: bool,
    /// The holder counts no more than this from when it asked. `Span::FOREVER`: it ends by its recall.
    pub limit: Span,
    /// Its recall may carry names. False: of names, for a confined holder that was not seen to have the right to
    /// list the directory ([`LeaseTable::handle_may_list`](super::LeaseTable::handle_may_list)).
    pub listed: bool,
}

/// What a mutation is about to make false.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    pub key: LeaseKey,
    /// With `Covers::Names`: only these names. Empty: all of them.
    pub names: Vec<Name>,
    /// With `Covers::Data`: its maker writes, and may keep what it wrote. Of several makers one at a time
    /// does (rule 10).
    pub writes: bool,
    /// What it becomes can be told: whoever takes pushes need not give the grant back. Not of data, nor of all names.
    pub told: bool,
}

/// What is to be done for the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LeaseOutput {
    /// To be put in this holder's stream before any answer that is put there later.
    Recall { holder: Holder, recall: Recall },
    /// The same, where the holder's grants go on.
    Hold { holder: Holder, hold: Hold },
    /// What of a hold can be told now, behind the answers that were put there before; of the rest nothing is known.
    Commit { holder: Holder, id: RecallId, told: Vec<Told> },
    /// Nobody else holds what this change makes false. Put out after each `handle_change` and
    /// `handle_extend`, at once if nobody is to be asked.
    Ready(ChangeId),
    /// It owes an acknowledgement for too long: not answered until it is trusted again.
    Suspect(Holder),
    /// It acknowledged all that it owed.
    Trusted(Holder),
    /// Its lease ran out: the table knows it no more, and its connection is to be closed.
    Fenced(Holder),
    /// Nothing until then, or until the next input.
    Timeout(Time, LeaseReason),
}

/// Why a timeout was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaseReason {
    /// Nothing is due; the moment is `Time::FAR`.
    Idle,
    /// A holder may become suspect.
    Patience,
    /// A holder's lease may run out.
    Lapse,
    /// A limited grant may have reached its end.
    Limit,
    /// A key may be contended or shared no more.
    Quiet,
    /// Flushes may wait for one another.
    Circle,
}

/// Why a grant was refused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Refusal {
    /// The holder has no session, or its connection is lost.
    Detached,
    /// It lets others wait, or did lately.
    Suspect,
    /// The key is being changed, or a recall of it is out.
    Changing,
    Contended,
    /// The holder has too much whose recall is out.
    Quota,
    /// Somebody has these names for itself alone, and was asked for them.
    Exclusive,
}
