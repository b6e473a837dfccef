//! The open files and leases of one session.

use crate::export::open_handles::OpenHandles;
use crate::lease::leases::Leases;
use crate::limits::descriptors::Descriptors;
use nigh_lease::{Holder, LeaseConfig};
use nigh_types::{Origin, Span, Term};
use std::ops::Deref;
use std::sync::Arc;

/// Per-session server state: a limited number of open files, and the session's place in the lease table. Dropping it
/// closes the files.
pub struct SessionFiles {
    open: OpenHandles,
    leases: Arc<Leases>,
    holder: Holder,
}

impl SessionFiles {
    /// A table with at most `limit` open files and grants that end after `term`, for a session with a lease table of
    /// its own.
    #[must_use]
    pub fn new(limit: u64, term: Term) -> SessionFiles {
        let leases = Leases::new(LeaseConfig { term: Span(u64::MAX / 2), ..LeaseConfig::default() }, None);
        let holder = Holder(1);
        leases.attach_unconnected(holder, term);
        SessionFiles::of_session(limit, term, (&leases, holder))
    }

    pub(crate) fn of_session(
        limit: u64,
        term: Term,
        (leases, holder): (&Arc<Leases>, Holder),
    ) -> SessionFiles {
        SessionFiles { open: OpenHandles::new(limit, term), leases: Arc::clone(leases), holder }
    }

    /// Sets whether the server trusts the permission checks of the client's kernel
    /// ([`crate::CredentialPolicy::vouches`]). The default is true.
    #[must_use]
    pub fn vouched(self, vouched: bool) -> SessionFiles {
        SessionFiles { open: self.open.vouched(vouched), ..self }
    }

    /// Charges the open files to an origin.
    pub(crate) fn sharing(self, descriptors: &Arc<Descriptors>, origin: Origin) -> SessionFiles {
        SessionFiles { open: self.open.sharing(descriptors, origin), ..self }
    }

    /// Sets whether the session's term limits only grants on unwatched files.
    pub(crate) fn trusting(self, trusts_watch: bool) -> SessionFiles {
        SessionFiles { open: self.open.trusting(trusts_watch), ..self }
    }

    pub(crate) fn leases(&self) -> &Arc<Leases> {
        &self.leases
    }

    /// The session as the lease table sees it.
    pub(crate) fn holder(&self) -> Holder {
        self.holder
    }
}

impl std::fmt::Debug for SessionFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SessionFiles { open, holder, .. } = self;
        f.debug_struct("SessionFiles").field("open", open).field("holder", holder).finish_non_exhaustive()
    }
}

impl Deref for SessionFiles {
    type Target = OpenHandles;

    fn deref(&self) -> &OpenHandles {
        &self.open
    }
}
