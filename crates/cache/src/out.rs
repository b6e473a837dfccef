//! What goes out: replies, calls, invalidations.

pub(crate) mod invalidate;
pub(crate) mod page_drops;
pub(crate) mod pins;
pub(crate) mod prune;
pub(crate) mod queue;
pub(crate) mod replies;
pub(crate) mod sending;
pub(crate) mod waiting;
