//! What the server uses of the operating system: credentials, descriptors, inodes and filesystems.

pub(crate) mod clock;
pub(crate) mod error;
pub(crate) mod file_lock;
pub(crate) mod filesystem;
pub(crate) mod impersonate;
pub(crate) mod own_mounts;
pub(crate) mod privileged;
pub(crate) mod squash;
pub(crate) mod stat;
pub(crate) mod users;
