//! Prefetch jobs: what the server may still send, what came, and how much of it was used.

mod jobs;

pub(crate) use jobs::PrefetchJobs;
