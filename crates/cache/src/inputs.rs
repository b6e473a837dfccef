//! What comes in beside requests: replies, session events, recalls, updates, timeouts.

pub(crate) mod recall;
pub(crate) mod reclaim;
pub(crate) mod responses;
pub(crate) mod session_events;
pub(crate) mod timers;
pub(crate) mod updates;
