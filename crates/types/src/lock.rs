//! Locks on files. See docs/decisions/0011-locks.md.

/// What a lock keeps others from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum LockKind {
    /// Shared: others may read, and so lock for reading.
    Read,
    /// Exclusive.
    Write,
}

/// A lock that stands in another's way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockInfo {
    pub kind: LockKind,
    /// The first and the last byte; `end` is inclusive, and at least `start`.
    pub start: u64,
    pub end: u64,
    /// The process that holds it, 0 where its number means nothing to the one who asks.
    pub pid: u32,
}

impl LockKind {
    /// Whether locks of two owners on the same byte exclude each other.
    #[must_use]
    pub fn excludes(self, other: LockKind) -> bool {
        self == LockKind::Write || other == LockKind::Write
    }
}
