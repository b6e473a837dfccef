//! Live grants.

use nigh_types::{Grant, GrantId, LeaseScope, Mode, NodeId, Term, Time};

/// Grant in force: facts under it may be served before `deadline`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LiveGrant {
    pub id: GrantId,
    /// Node and scope. A recall of these ends the grant, whatever the grant's id is by then.
    pub on: (NodeId, LeaseScope),
    pub deadline: Time,
    /// Facts are served alike under both modes. Local changes, which are not built yet, need `Mode::Write`.
    pub mode: Mode,
    pub recallable: bool,
    /// Other clients may hold it too: see [`nigh_types::Grant::shared`].
    pub shared: bool,
    /// The grant has ended, and facts under it are still served: the remote is away, and the user allows stale replies
    /// ([`crate::OnDisconnect::Stale`]).
    pub stale: bool,
}

impl LiveGrant {
    /// Begins a grant. Its term counts from the *sending* of the request that brought it.
    pub fn begin(grant: &Grant, sent: Time) -> LiveGrant {
        let deadline = match grant.term {
            Term::Session => Time::FAR,
            Term::Limited(span) => sent.after(span),
        };
        tracing::trace!(target: "nigh::grant", ino = grant.node.ino, covers = ?grant.covers, mode = ?grant.mode, term = ?grant.term);
        let on = (grant.node, grant.covers);
        LiveGrant {
            id: grant.id,
            on,
            deadline,
            mode: grant.mode,
            recallable: grant.recallable,
            shared: grant.shared,
            stale: false,
        }
    }

    /// Returns the grant as a stale one, which lasts until the remote is back.
    pub fn into_stale(self) -> LiveGrant {
        LiveGrant { deadline: Time::FAR, stale: true, ..self }
    }

    pub fn is_live(&self, now: Time) -> bool {
        now < self.deadline
    }

    /// Returns whether the grant is recalled before any change by other clients. A grant with a deadline is recalled
    /// only before changes that the remote makes itself: the deadline bounds changes made behind its back.
    pub fn recalled_before_any_change(&self) -> bool {
        self.recallable && self.deadline == Time::FAR && !self.stale
    }
}

/// Returns the grant on this node and scope.
pub(crate) fn on(grants: &[Grant], node: NodeId, covers: LeaseScope) -> Option<&Grant> {
    grants.iter().find(|g| g.node == node && g.covers == covers)
}

/// Returns a directory grant that no remote gave ([`nigh_types::Bug::KeepsUngranted`]).
pub(crate) fn fabricated(node: NodeId) -> Grant {
    let (covers, mode, term) = (LeaseScope::Directory, Mode::Read, Term::Session);
    Grant { id: GrantId(0), node, covers, mode, term, recallable: true, shared: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_grant_keeps_mode_and_is_small() {
        for mode in [Mode::Read, Mode::Write] {
            let live =
                LiveGrant::begin(&Grant { mode, ..fabricated(NodeId { ino: 1, generation: 1 }) }, Time(0));
            assert_eq!((live.mode, live.into_stale().mode), (mode, mode));
        }
        assert_eq!((size_of::<LiveGrant>(), size_of::<Option<LiveGrant>>()), (48, 48));
    }
}
