//! Identities. See docs/decisions/0001-node-ids.md.

/// An inode of an export: what stays the same over renames, restarts and remounts.
///
/// `ino` is what applications see as `st_ino`. The upper half of `generation` tells the births of one
/// inode number apart (0 where the filesystem cannot), so a reused number is a different node; the
/// lower half shows the server that it made the id itself. To everybody else both mean nothing.
/// 0 is no node's generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct NodeId {
    pub ino: u64,
    pub generation: u64,
}

impl NodeId {
    /// Whether a reused inode number would be another node. (False on filesystems without birth times.)
    #[must_use]
    pub fn tells_births_apart(self) -> bool {
        self.generation >> 32 != 0
    }
}

/// An open file kept by the remote, named by it; meaningful within one session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Handle(pub u64);

impl Handle {
    /// Set in the numbers that a client chooses ([`crate::Call::Keep`]), and in no other.
    pub const CHOSEN: u64 = 1 << 63;

    /// Whether a client chose it.
    #[must_use]
    pub fn is_chosen(self) -> bool {
        self.0 & Handle::CHOSEN != 0
    }
}

/// One call from a cache to its remote; never reused within a session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CallId(pub u64);

/// One request of an application to a cache (FUSE's `unique`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpId(pub u64);
