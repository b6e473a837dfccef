//! What the kernel of this machine shows of its processes and mounts.

pub(crate) mod signals;
pub(crate) mod submounts;
pub(crate) mod thread_credentials;
pub(crate) mod user_namespace;
pub(crate) mod watchers;
