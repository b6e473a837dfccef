//! Remote changes for inotify watchers.

pub(crate) mod local_changes;
pub(crate) mod looks;
pub(crate) mod remote_changes;
