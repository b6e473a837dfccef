//! What a server without threads keeps of one client.

use super::calls::Job;
use nigh_native::{Resume, ServerConnection, ServerEvent};
use nigh_types::{GrantId, Handle, Response, Term, Time};
use std::collections::{BTreeMap, BTreeSet};

/// A client and its incarnation.
pub(super) type Who = (u64, u64);

#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) connection: ServerConnection,
    /// The connection that is its latest.
    pub(super) link: u64,
    /// When its client made that, by its own clock.
    pub(super) moment: u64,
    pub(super) who: Who,
    pub(super) term: Term,
    pub(super) features: u64,
    /// Its lease has run out, at that moment.
    pub(super) dormant: Option<Time>,
    pub(super) handles: BTreeSet<Handle>,
}

/// Who says hello, and for what.
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

/// An answer that waits for its turn.
#[derive(Clone, Debug)]
pub(super) struct Due {
    pub(super) session: u64,
    pub(super) who: Who,
    pub(super) call: nigh_types::CallId,
    /// Of the operation's name.
    pub(super) sequence: Option<u64>,
    pub(super) response: Response,
}

/// What a server has to do at some moment.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Begin(Job),
    Answer(Due),
    /// A session may have been away for too long.
    Tend(u64),
    /// What was kept for those who may come back after a restart goes.
    Sweep(Vec<Handle>),
}

/// What forgotten sessions were answered and may not have.
#[derive(Clone, Default, Debug)]
pub(super) struct Memory {
    pub(super) answers: BTreeMap<(Who, u64), Remembered>,
}

#[derive(Clone, Debug)]
pub(super) struct Remembered {
    pub(super) response: Response,
    /// The number under which the file that it names is kept open.
    pub(super) kept: Option<Handle>,
}

/// The time after a restart in which nobody changes anything.
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
