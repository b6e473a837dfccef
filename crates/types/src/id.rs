//! Identities. See docs/decisions/0001-node-ids.md.

/// An inode of an export: what stays the same over renames, restarts and remounts.
///
/// `ino` is what applications see as `st_ino`. `generation` is the birth time in nanoseconds since
/// 1970 (0 where the filesystem has none), so a reused inode number is a different node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct NodeId {
    pub ino: u64,
    pub generation: u64,
}

/// An open file kept by the remote, named by it; meaningful within one session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Handle(pub u64);

/// One call from a cache to its remote; never reused within a session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CallId(pub u64);

/// One request of an application to a cache (FUSE's `unique`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpId(pub u64);
