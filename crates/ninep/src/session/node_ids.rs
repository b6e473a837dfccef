//! Generations of node ids, as `nodes.rs` makes them: the kind of the qid.

pub(crate) const DIRECTORY: u64 = 2;
pub(crate) const SYMLINK: u64 = 3;
