//! Prefetch: jobs that bring directories, and walks of readers of files.

mod file_walks;
mod jobs;

pub(crate) use file_walks::{
    DirsOrder, FileWalk, FileWalks, FinishedFile, Reader, ReadingOrder, RestOfHead, WalkAt, WalkEntry,
    WalkLevel, WalkNumber,
};
pub(crate) use jobs::PrefetchJobs;
