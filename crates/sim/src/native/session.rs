//! Per-client state of a server without threads.

use super::calls::PendingCall;
use nigh_native::{Resume, ServerEvent, ServerSession};
use nigh_remote::model_fs::ModelFs;
use nigh_types::{Features, GrantId, Handle, Response, SessionParams, Term, Time};
use std::collections::BTreeSet;

/// A client id and its incarnation.
pub(super) type ClientKey = (u64, u64);

#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) connection: ServerSession,
    /// Its latest connection.
    pub(super) link: u64,
    /// When its client made the connection, on the client's clock.
    pub(super) moment: u64,
    pub(super) who: ClientKey,
    pub(super) term: Term,
    pub(super) features: u64,
    /// When its lease expired, if it has.
    pub(super) expired_at: Option<Time>,
    pub(super) handles: BTreeSet<Handle>,
}

/// Returns the parameters of a session. The server reads each file with the same rights for all callers.
pub(super) fn params(tree: &ModelFs, term: Term) -> SessionParams {
    let params = tree.session(term);
    let supports = Features { uniform_rights: true, ..params.supports };
    SessionParams { supports, ..params }
}

/// The contents of a client's hello.
pub(super) struct Hello {
    pub(super) who: ClientKey,
    pub(super) term: Term,
    pub(super) features: u64,
    pub(super) moment: u64,
    pub(super) resume: Option<Resume>,
}

impl Hello {
    pub(super) fn of(event: ServerEvent) -> Option<Hello> {
        let ServerEvent::Attach { client, incarnation, term, features, moment, resume, .. } = event else {
            return None;
        };
        Some(Hello { who: (client, incarnation), term, features, moment, resume })
    }
}

/// A reply that waits to be sent.
#[derive(Clone, Debug)]
pub(super) struct PendingReply {
    pub(super) session: u64,
    pub(super) who: ClientKey,
    pub(super) call: nigh_types::CallId,
    /// The sequence number of the mutation's id.
    pub(super) sequence: Option<u64>,
    pub(super) response: Response,
}

/// A task of the server at some time.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Begin(PendingCall),
    Answer(PendingReply),
    /// Checks whether a session has been away for too long.
    Tend(u64),
    /// Frees files that were kept open for clients that might return after a restart.
    Sweep(Vec<Handle>),
}

impl PendingReply {
    pub(super) fn grants(&self) -> Vec<GrantId> {
        self.response.grants.iter().map(|grant| grant.id).collect()
    }
}
