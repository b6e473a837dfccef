//! State of the session with the remote, and what it owes and is owed.
//!
//! ```text
//!  Connecting ──Attached──▶ Active ───Expired───▶ Expired ──Restored──▶ Reclaiming ──▶ Active
//!                             │                      ▲                   │      ▲
//!                             │                      └──────Expired──────┘      │
//!                             └──Lost (from each)──▶ Lost ───────Attached───────┘
//! ```
//!
//! The words on the lines are events of the remote; `Reclaiming` ends when all is reclaimed and the kernel has dropped
//! its facts. All grants end on the way out of `Active`. Calls in flight stay in flight, except on `Lost`, when they
//! fail. Until the next `Active` no request is begun and no reply is delivered except for reclaims: the kernel may still
//! hold facts of ended grants.

use crate::contents::ReadAs;
use crate::op::{Caller, InvalidationId};
use nigh_types::{CallId, Features, Handle, Response, SessionParams, Span, Term, Time};

/// Time that the kernel may take to drop its facts: less than the grace period of a restarted server.
const MAX_FLUSH_TIME: Span = Span::from_secs(10);

/// State of the session with the remote.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SessionState {
    /// There was no session yet.
    Connecting,
    Active,
    /// The term has run out. Calls are accepted, and answered when the remote is back.
    Expired,
    /// The session is over; another one may follow.
    Lost,
    /// A session is active again. Open files and locks are being reclaimed, if the session has forgotten them, and the
    /// kernel is dropping its facts.
    Reclaiming,
}

/// The session with the remote.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    state: SessionState,
    /// Longest time for which facts may be valid.
    term: Term,
    /// What the remote supports.
    supports: Features,
    /// Reclaim calls without a reply; whether lock reclaims are to be sent; whether [`crate::Output::Reclaimed`] is owed.
    pending_reclaims: u64,
    lock_reclaims_due: bool,
    owes_reclaimed: bool,
    /// Handles closed while the remote was away.
    unreleased: Vec<Handle>,
    /// Invalidation of everything that the kernel held when all grants ended. Before it is done a new session answers no
    /// request (`SessionState::Reclaiming`). After `flush_by` the kernel counts as slow, and requests go on.
    flush: Option<InvalidationId>,
    flush_by: Option<Time>,
    kernel_is_slow: bool,
    /// Replies of a new session that wait for that invalidation.
    deferred: Vec<(CallId, Response)>,
}

impl Default for Session {
    fn default() -> Session {
        Session {
            state: SessionState::Connecting,
            term: Term::Session,
            supports: Features::default(),
            pending_reclaims: 0,
            lock_reclaims_due: false,
            owes_reclaimed: false,
            unreleased: Vec::new(),
            flush: None,
            flush_by: None,
            kernel_is_slow: false,
            deferred: Vec::new(),
        }
    }
}

/// State.
impl Session {
    pub fn state(&self) -> SessionState {
        self.state
    }

    pub fn is_active(&self) -> bool {
        self.state == SessionState::Active
    }

    /// Returns whether the remote replies: the session is active, or is being reclaimed.
    pub fn is_attached(&self) -> bool {
        matches!(self.state, SessionState::Active | SessionState::Reclaiming)
    }

    /// Returns whether the remote is away after a session.
    pub fn is_away(&self) -> bool {
        matches!(self.state, SessionState::Expired | SessionState::Lost)
    }

    /// Leaves `Active` or `Reclaiming`.
    pub fn leave(&mut self, to: SessionState) {
        (self.state, self.flush_by) = (to, None);
    }

    /// Records that the session ended while the remote was away.
    pub fn lose(&mut self) {
        if self.state != SessionState::Connecting {
            self.state = SessionState::Lost;
        }
    }

    pub fn begin_reclaiming(&mut self) {
        self.state = SessionState::Reclaiming;
    }

    pub fn apply(&mut self, params: &SessionParams) {
        self.supports = params.supports;
        self.term = params.term;
    }

    pub fn term(&self) -> Term {
        self.term
    }

    pub fn has_acls(&self) -> bool {
        self.supports.acls
    }

    /// Returns whether the session itself prefetches, by its own calls ([`Features::prefetch_in_session`]).
    pub fn prefetches_itself(&self) -> bool {
        self.supports.prefetch_in_session
    }

    /// Returns whether the remote prefetches directories in reversed orders.
    pub fn prefetches_reversed(&self) -> bool {
        self.supports.reversed_prefetch
    }

    /// Returns whether contents that were read for one caller may be served to another ([`Features::uniform_rights`]).
    pub fn serves_callers_alike(&self) -> bool {
        self.supports.uniform_rights
    }

    /// Returns the caller with whose rights a file that this one has opened is read; `None`: with the mount's own, since
    /// the remote reads it alike for all callers. Another process may have the opener's number by the time of the read, so a
    /// caller with known credentials has none.
    pub fn read_as(&self, opener: Caller) -> Option<Caller> {
        let by_credentials = Caller { pid: 0, ..opener };
        let caller = if opener.credentials.is_some() { by_credentials } else { opener };
        (!self.supports.uniform_rights).then_some(caller)
    }

    /// Returns the rights with which a file that this caller has opened is read ahead, and which contents it is served.
    /// `None`: nothing is read ahead of it and no contents are served, since its credentials are unknown.
    pub fn reads_ahead_as(&self, opener: Caller) -> Option<ReadAs> {
        match self.supports {
            Features { uniform_rights: true, .. } => Some(ReadAs::Mount),
            Features { rights_by_uid: true, .. } => Some(ReadAs::Uid(opener.uid)),
            _ => opener.credentials.map(ReadAs::Credentials),
        }
    }

    /// Returns whether the remote lists names without attributes.
    pub fn lists_names(&self) -> bool {
        self.supports.list_names
    }

    /// Returns whether the remote finds an inode by its number.
    pub fn finds_numbers(&self) -> bool {
        self.supports.lookup_number
    }

    #[cfg(test)]
    pub fn set_features(&mut self, has_acls: Option<bool>, lists_names: Option<bool>) {
        self.supports.acls = has_acls.unwrap_or(self.supports.acls);
        self.supports.list_names = lists_names.unwrap_or(self.supports.list_names);
    }

    /// Drops messages to a session that is forgotten: they mean nothing to another one.
    pub fn forget(&mut self) {
        self.unreleased.clear();
        (self.pending_reclaims, self.lock_reclaims_due, self.owes_reclaimed, self.flush_by) =
            (0, false, false, None);
    }
}

/// Reclaim.
impl Session {
    pub fn begin_reclaims(&mut self) {
        (self.owes_reclaimed, self.lock_reclaims_due) = (true, true);
    }

    pub fn add_reclaim(&mut self) {
        self.pending_reclaims += 1;
    }

    pub fn end_reclaim(&mut self) {
        self.pending_reclaims = self.pending_reclaims.saturating_sub(1);
    }

    pub fn has_pending_reclaims(&self) -> bool {
        self.pending_reclaims > 0
    }

    /// Returns whether locks are to be reclaimed now: all files have their replies. Only once.
    pub fn take_lock_reclaims(&mut self) -> bool {
        self.pending_reclaims == 0 && std::mem::take(&mut self.lock_reclaims_due)
    }

    /// Ends reclaiming. Returns whether the remote is to be told.
    pub fn finish_reclaim(&mut self) -> bool {
        (self.state, self.flush_by) = (SessionState::Active, None);
        std::mem::take(&mut self.owes_reclaimed)
    }

    /// Keeps a handle for release in the next session.
    pub fn release_later(&mut self, handle: Handle) {
        self.unreleased.push(handle);
    }

    pub fn take_unreleased(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.unreleased)
    }
}

/// The kernel's facts of the time before.
impl Session {
    /// Records the invalidation of everything, if there is one.
    pub fn begin_flush(&mut self, id: Option<InvalidationId>) {
        self.flush = id.or(self.flush);
        self.kernel_is_slow = false;
    }

    pub fn flush(&self) -> Option<InvalidationId> {
        self.flush
    }

    /// Limits the wait for that invalidation, which is under way or not.
    pub fn limit_flush(&mut self, now: Time, is_under_way: bool) {
        self.kernel_is_slow = false;
        self.flush_by = is_under_way.then(|| now.after(MAX_FLUSH_TIME));
    }

    pub fn flush_due(&self) -> Option<Time> {
        self.flush_by
    }

    /// Ends the wait for a slow kernel. Returns whether its time was over.
    pub fn give_up_flush(&mut self, now: Time) -> bool {
        let is_over = self.flush_by.is_some_and(|due| due <= now);
        if is_over {
            (self.flush_by, self.kernel_is_slow) = (None, true);
        }
        is_over
    }

    pub fn is_kernel_slow(&self) -> bool {
        self.kernel_is_slow
    }

    /// Keeps a reply until the kernel has dropped its facts.
    pub fn defer(&mut self, call: CallId, response: Response) {
        self.deferred.push((call, response));
    }

    pub fn take_deferred(&mut self) -> Vec<(CallId, Response)> {
        std::mem::take(&mut self.deferred)
    }

    pub fn set_deferred(&mut self, deferred: Vec<(CallId, Response)>) {
        self.deferred = deferred;
    }

    pub fn deferred_mut(&mut self) -> impl Iterator<Item = &mut Response> {
        self.deferred.iter_mut().map(|(_, response)| response)
    }
}
