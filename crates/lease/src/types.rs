//! Inputs, outputs and settings of the lease table.

use nigh_types::{
    Bug, Grant, GrantId, LeaseScope, Mode, Name, NodeId, Origin, Recall, RecallId, Span, Term, Time,
    UpdatePrepare, planted,
};
use std::collections::BTreeMap;

/// Server-wide identity of one file system object, never a node id of an export.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Object {
    pub filesystem: u64,
    pub ino: u64,
    /// Nanoseconds since 1970; 0 where the filesystem keeps no birth times.
    pub birth: u64,
}

/// What one grant covers: an object, and a lease scope on it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseKey {
    pub object: Object,
    pub covers: LeaseScope,
}

/// A session that holds leases.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Holder(pub u64);

/// Identity of a client over its sessions: its number and its incarnation.
pub type Client = (u64, u64);

/// A session's client, and the origin that its transport proved. The client number is the peer's own choice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientOrigin {
    pub client: Client,
    pub origin: Origin,
}

/// Id of a change in progress, counted by the table from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ChangeId(pub u64);

/// Waiting times and quotas of the lease table. Values: docs/decisions/0008.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseConfig {
    /// Term of a holder's lease. The table waits 1.1 terms from the holder's latest message.
    pub term: Span,
    /// How long an acknowledgement may be owed before its holder is suspect.
    pub patience: Span,
    /// The longest penalty of a client that delayed others. This long after a penalty has ended, it no longer doubles
    /// the next one.
    pub max_penalty: Span,
    /// A key recalled `contention_recalls` times within this window, each time soon after it was granted, is contended.
    pub contention_window: Span,
    /// At least 1.
    pub contention_recalls: u32,
    /// A recall counts towards contention if the grant that it ends is younger than this: an older grant was worth
    /// giving.
    pub young: Span,
    /// How long a contended key stays contended after its latest change, and a shared key stays shared after its
    /// second-to-last holder left.
    pub cooldown: Span,
    /// Most grants of one holder that were not recalled. It may hold a 64th more (at least one) whose recall is
    /// outstanding. 0: no grants are given.
    pub grants_per_holder: u64,
    /// Bytes of memory for merging write-backs of several holders into one file, over all holders. Beyond that, the
    /// holder that uses most of it loses its share: the server then refuses its write-back of ranges that others have
    /// written.
    pub merge_bytes: u64,
}

impl Default for LeaseConfig {
    fn default() -> LeaseConfig {
        LeaseConfig {
            term: Span::from_secs(15),
            patience: Span::from_secs(2),
            max_penalty: Span::from_secs(600),
            contention_window: Span::from_secs(1),
            contention_recalls: 2,
            young: Span::from_millis(200),
            cooldown: Span::from_secs(10),
            grants_per_holder: 1 << 20,
            merge_bytes: 64 << 20,
        }
    }
}

impl LeaseConfig {
    /// How long the server waits after a holder's latest message before it fences the holder.
    #[must_use]
    pub fn lapse(&self) -> Span {
        if planted(Bug::FencesEarly) { Span(self.term.0 / 2) } else { with_margin(self.term) }
    }

    /// Most grants of one holder, recalled ones included.
    pub(super) fn most_grants(&self) -> u64 {
        self.grants_per_holder.saturating_add((self.grants_per_holder / 64).max(1))
    }
}

/// 1.1 spans: what a server waits while its client counts no more than `span`.
pub(super) fn with_margin(span: Span) -> Span {
    Span(span.0.saturating_add(span.0 / 10))
}

/// A request for a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrantRequest {
    pub holder: Holder,
    pub key: LeaseKey,
    /// The object's node id in the holder's export.
    pub node: NodeId,
    /// `Mode::Write` excludes the grants of all other holders on the key. The server requests read grants only; write
    /// grants are for clients that change facts locally, which none does yet.
    pub mode: Mode,
}

impl GrantRequest {
    pub(super) fn seat(&self) -> (Holder, LeaseKey) {
        (self.holder, self.key)
    }
}

/// A registered grant: what the table decided. What the holder asked for stands in its [`GrantRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted {
    pub id: GrantId,
    /// The requested mode. An earlier write grant of the holder on this key stays a write grant in the table.
    pub mode: Mode,
    /// For a directory lease: other holders have this key or had it lately. A kernel that cannot drop all dentries at
    /// once gets timeout 0 for them.
    pub shared: bool,
    /// How long the holder may count from its request. `Span::FOREVER`: the grant ends by recall.
    pub limit: Span,
    /// Its recall may carry names. False for a directory lease of a confined holder that was not found to have the
    /// right to list the directory ([`LeaseTable::handle_may_list`](super::LeaseTable::handle_may_list)).
    pub listed: bool,
}

impl Granted {
    /// Returns the grant as a reply carries it. `term`: how long the holder may count on it.
    #[must_use]
    pub fn into_grant(self, request: &GrantRequest, term: Term) -> Grant {
        let Granted { id, mode, shared, .. } = self;
        let GrantRequest { key: LeaseKey { covers, .. }, node, .. } = *request;
        Grant { id, node, covers, mode, term, recallable: true, shared }
    }
}

/// A key that a mutation is about to invalidate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    pub key: LeaseKey,
    /// With `LeaseScope::Directory`: only these names. Empty: all names.
    pub names: Vec<Name>,
    /// With `LeaseScope::Data`: the initiator writes and may cache what it wrote. Of several initiators, one at a time
    /// writes (rule 10).
    pub writes: bool,
    /// The new value can be sent: holders that take updates need not give the grant back. Not for data, nor for all
    /// names.
    pub can_update: bool,
}

/// What the server has to do for the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LeaseOutput {
    /// Queue this recall in the holder's stream before any later reply; of data, behind unsent replies with a grant on it.
    Recall { holder: Holder, recall: Recall },
    /// Queue this update prepare likewise; the holder's grants go on.
    Prepare { holder: Holder, hold: UpdatePrepare },
    /// Queue this update commit behind the earlier replies. It carries the keys of the prepare whose values are known;
    /// the others are unknown.
    Commit { holder: Holder, id: RecallId, told: Vec<UpdatedKey> },
    /// All other holders have dropped or suspended what this change invalidates, or a write-back goes before their
    /// acknowledgements. Emitted after each `handle_change` and `handle_extend`, at
    /// once if there is no other holder.
    Ready(ChangeId),
    /// It has owed an acknowledgement for too long: the server does not reply to it until it is trusted again.
    Suspect(Holder),
    /// It has acknowledged every recall and prepare that it owed.
    Trusted(Holder),
    /// Its lease ran out: the table has forgotten it, and its connection is to be closed.
    Fenced(Holder),
    /// Nothing is due until this moment or the next input.
    Timeout(Time, LeaseReason),
}

/// The reason of a timeout.
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
    /// A key may cease to be contended or shared.
    Cooldown,
    /// Write-backs may wait for each other in a cycle.
    Deadlock,
}

/// Why a grant was refused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Refusal {
    /// The holder has no session, or its connection is lost.
    Detached,
    /// The holder delays others, or did so lately.
    Suspect,
    /// The key is being changed, or a recall of it is outstanding.
    Changing,
    Contended,
    /// The holder has too many grants whose recall is outstanding.
    Quota,
    /// The grant of another holder excludes this one, and was recalled: an exclusive directory lease, or one of the two
    /// grants is a write grant.
    Exclusive,
}

/// An updated fact, with the node id in its holder's export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpdatedKey {
    pub key: LeaseKey,
    pub node: NodeId,
    /// With [`LeaseScope::Directory`].
    pub name: Option<Name>,
}

/// When the result of a change was observed, as a count of ended changes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ObservedAt(pub(crate) u64);

/// Counts of events since the table was made; they only grow.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LeaseCounters {
    pub granted: u64,
    pub refused: BTreeMap<Refusal, u64>,
    /// Recalls, each of one grant; a re-emitted recall counts once.
    pub recalled: u64,
    /// Update prepares, each of all facts that one change named to one holder.
    pub prepared: u64,
    pub acknowledged: u64,
    /// Grants returned without a recall, and those that never left the server.
    pub returned: u64,
    /// Limited grants that reached their end.
    pub expired: u64,
    pub suspected: u64,
    pub fenced: u64,
    /// Write-backs of pages that were partly changed by others.
    pub merged: u64,
}

/// What the client of a session has agreed on with the server, as far as its leases depend on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseTerms {
    /// Maximum lifetime of its grants.
    pub term: Term,
    /// Its client, which may have a penalty; `None` for a table of one session.
    pub client: Option<ClientOrigin>,
    /// Rule 9.
    pub needs_exclusive_dir_lease: bool,
    /// Its peer does not act for all users of its machine: the rights of each caller are checked on every call.
    pub confined: bool,
    pub takes_updates: bool,
    pub trusts_watch: bool,
}

impl LeaseTerms {
    /// Terms without a client and without options.
    #[must_use]
    pub fn plain(term: Term) -> LeaseTerms {
        LeaseTerms {
            term,
            client: None,
            needs_exclusive_dir_lease: false,
            confined: false,
            takes_updates: false,
            trusts_watch: false,
        }
    }
}
