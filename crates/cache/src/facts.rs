//! What is known, and how it begins and ends: functions over the state that send nothing to the remote for a request.

pub(crate) mod changes;
pub(crate) mod flush;
pub(crate) mod forgetting;
pub(crate) mod inodes;
pub(crate) mod learn;
pub(crate) mod leases;
pub(crate) mod order;
pub(crate) mod victims;
