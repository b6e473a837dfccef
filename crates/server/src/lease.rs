//! Leases of the server's sessions: the shared table, the grants and the change of one call, and its conflicts.

pub(crate) mod call_leases;
pub(crate) mod change_result;
pub(crate) mod holder;
pub(crate) mod inode_locks;
pub(crate) mod leases;
pub(crate) mod pending_change;
pub(crate) mod session_files;
