//! Limits on what clients can use of the server, and which client has to release something: descriptors, memory, calls.

pub(crate) mod descriptors;
pub(crate) mod fair_share;
pub(crate) mod inflight_calls;
pub(crate) mod reaper;
