//! Per-client state of a server without threads.

use super::calls::Job;
use nigh_native::{Resume, ServerConnection, ServerEvent};
use nigh_types::{GrantId, Handle, Response, Term, Time};
use std::collections::{BTreeMap, BTreeSet};

/// A client id and its incarnation.
pub(super) type Who = (u64, u64);

#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) connection: ServerConnection,
    /// Its latest connection.
    pub(super) link: u64,
    /// When its client made the connection, on the client's clock.
    pub(super) moment: u64,
    pub(super) who: Who,
    pub(super) term: Term,
    pub(super) features: u64,
    /// When its lease expired, if it has.
    pub(super) dormant: Option<Time>,
    pub(super) handles: BTreeSet<Handle>,
}

/// The contents of a client's hello.
pub(super) struct Hello {
    pub(super) who: Who,
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
pub(super) struct Due {
    pub(super) session: u64,
    pub(super) who: Who,
    pub(super) call: nigh_types::CallId,
    /// The sequence number of the mutation's id.
    pub(super) sequence: Option<u64>,
    pub(super) response: Response,
}

/// A task of the server at some time.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Begin(Job),
    Answer(Due),
    /// Checks whether a session has been away for too long.
    Tend(u64),
    /// Frees files that were kept open for clients that might return after a restart.
    Sweep(Vec<Handle>),
}

/// Replies to forgotten sessions that their clients may not have received.
#[derive(Clone, Default, Debug)]
pub(super) struct Memory {
    pub(super) answers: BTreeMap<(Who, u64), Remembered>,
}

#[derive(Clone, Debug)]
pub(super) struct Remembered {
    pub(super) response: Response,
    /// The handle under which the file named in the reply is kept open.
    pub(super) kept: Option<Handle>,
}

/// The grace period after a restart, in which no client changes anything.
#[derive(Clone, Default, Debug)]
pub(super) struct Grace {
    pub(super) absent: BTreeSet<Who>,
    pub(super) until: Time,
    pub(super) parked: Vec<Job>,
}

impl Due {
    pub(super) fn grants(&self) -> Vec<GrantId> {
        self.response.grants.iter().map(|grant| grant.id).collect()
    }
}
