//! The open files and leases of one session.

use crate::export::open_handles::OpenHandles;
use crate::lease::session_leases::SessionLeases;
use crate::limits::descriptors::Descriptors;
use nigh_types::{Origin, Term};
use std::ops::Deref;
use std::sync::Arc;

/// Per-session server state: a limited number of open files, and the session's leases. Dropping it closes the files.
#[derive(Debug)]
pub struct SessionFiles {
    open: OpenHandles,
    leases: SessionLeases,
}

impl SessionFiles {
    /// A table with at most `limit` open files and grants that end after `term`, for a session with a lease table of
    /// its own.
    #[must_use]
    pub fn new(limit: u64, term: Term) -> SessionFiles {
        SessionFiles::of_session(limit, term, SessionLeases::unshared(term))
    }

    pub(crate) fn of_session(limit: u64, term: Term, leases: SessionLeases) -> SessionFiles {
        SessionFiles { open: OpenHandles::new(limit, term), leases }
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

    pub(crate) fn leases(&self) -> &SessionLeases {
        &self.leases
    }
}

impl Deref for SessionFiles {
    type Target = OpenHandles;

    fn deref(&self) -> &OpenHandles {
        &self.open
    }
}
