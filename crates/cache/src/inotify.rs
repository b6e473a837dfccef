//! Watched directories and their snapshots (docs/decisions/0017-events.md).
//!
//! Invariant: a snapshot that is not `unsettled` equals the directory's facts, and these are granted.

mod change;
mod snapshot;
mod watches;

pub use change::RemoteChange;
pub(crate) use change::RemoteUpdate;
pub(crate) use snapshot::{ComparedAttrs, SnapshotEntry, seen, seen_child};
pub use watches::WatchStatus;
#[cfg(test)]
pub(crate) use watches::{CONTENDED, FAILED, FIRST_LOOK};
pub(crate) use watches::{MOST_LISTINGS, TOGETHER, Watches};
