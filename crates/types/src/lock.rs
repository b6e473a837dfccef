//! File locks. See docs/decisions/0011-locks.md.

/// Type of a lock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum LockKind {
    /// Shared: other owners may read, and lock for reading.
    Read,
    /// Exclusive.
    Write,
}

/// A locked byte range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockInfo {
    pub kind: LockKind,
    /// The first and the last byte; `end` is inclusive, and at least `start`.
    pub start: u64,
    pub end: u64,
    /// The process that holds it, for `F_GETLK`; 0 if the pid is meaningless to the requesting client.
    pub pid: u32,
}

impl LockKind {
    /// Whether locks of two owners on the same byte exclude each other.
    #[must_use]
    pub fn excludes(self, other: LockKind) -> bool {
        self == LockKind::Write || other == LockKind::Write
    }
}
