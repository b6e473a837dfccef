//! Identities. See docs/decisions/0001-node-ids.md.

/// Identity of an inode of an export, stable over renames, restarts and remounts.
///
/// `ino` is what applications see as `st_ino`. The upper half of `generation` distinguishes inodes that reuse one
/// number (0 where the filesystem cannot), so a reused number is a different node. The lower half is a MAC by which the
/// server recognises ids that it made. Only the server interprets either half. No node has generation 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct NodeId {
    pub ino: u64,
    pub generation: u64,
}

impl NodeId {
    /// Whether a reused inode number would be a different node. (False on filesystems without birth times.)
    #[must_use]
    pub fn distinguishes_reuse(self) -> bool {
        self.generation >> 32 != 0
    }
}

/// Handle of a file that the remote has open; valid within one session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Handle(pub u64);

impl Handle {
    /// Bit that is set in handles assigned by a client ([`crate::Call::PinOpen`]), and in no others.
    pub const CLIENT_ASSIGNED: u64 = 1 << 63;

    /// Whether a client assigned it.
    #[must_use]
    pub fn is_client_assigned(self) -> bool {
        self.0 & Handle::CLIENT_ASSIGNED != 0
    }
}

/// Number of a call from a cache to its remote; never reused within a session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CallId(pub u64);

/// Number of an application's request to a cache (FUSE's `unique`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpId(pub u64);
