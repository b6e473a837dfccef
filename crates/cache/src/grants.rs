//! Grants as the cache holds them.

use nigh_types::{Covers, Grant, GrantId, Mode, NodeId, Term, Time};

/// A grant in force: facts under it may be served before `deadline`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Held {
    pub id: GrantId,
    /// What is granted: a recall of that ends it, whatever its number is by then.
    pub on: (NodeId, Covers),
    pub deadline: Time,
    pub recallable: bool,
    /// Others may hold it too: see [`nigh_types::Grant::shared`].
    pub shared: bool,
    /// It has ended, and facts under it are served all the same: the remote is away, and the user wants that
    /// ([`crate::OnDisconnect::Stale`]).
    pub stale: bool,
}

impl Held {
    /// Begins with the *sending* of the request that brought it.
    pub fn begin(grant: &Grant, sent: Time) -> Held {
        let deadline = match grant.term {
            Term::Session => Time::FAR,
            Term::Limited(span) => sent.after(span),
        };
        tracing::trace!(target: "nigh::grant", ino = grant.node.ino, covers = ?grant.covers, term = ?grant.term);
        let on = (grant.node, grant.covers);
        Held { id: grant.id, on, deadline, recallable: grant.recallable, shared: grant.shared, stale: false }
    }

    /// It goes on until the remote is back.
    pub fn into_stale(self) -> Held {
        Held { deadline: Time::FAR, stale: true, ..self }
    }

    pub fn lives(&self, now: Time) -> bool {
        now < self.deadline
    }

    /// Whether it is recalled before any change of others. One with a limit is recalled before those that the remote makes itself:
    /// the limit is there for what is done behind its back.
    pub fn tells_of_all(&self) -> bool {
        self.recallable && self.deadline == Time::FAR && !self.stale
    }
}

/// The grant among `grants` on those facts of that node.
pub(crate) fn on(grants: &[Grant], node: NodeId, covers: Covers) -> Option<&Grant> {
    grants.iter().find(|g| g.node == node && g.covers == covers)
}

/// A grant on a directory that nobody gave ([`nigh_types::Bug::KeepsUngranted`]).
pub(crate) fn made_up(node: NodeId) -> Grant {
    let (covers, mode, term) = (Covers::Names, Mode::Read, Term::Session);
    Grant { id: GrantId(0), node, covers, mode, term, recallable: true, shared: false }
}
