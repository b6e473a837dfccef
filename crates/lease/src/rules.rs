//! The rules of docs/decisions/0008-leases.md, as functions of the table's state.

pub(crate) mod deadlock;
pub(crate) mod delays;
pub(crate) mod grants;
pub(crate) mod limits;
pub(crate) mod listing_rights;
pub(crate) mod merging;
pub(crate) mod read_grants;
pub(crate) mod recalls;
pub(crate) mod updates;
pub(crate) mod write_queue;
