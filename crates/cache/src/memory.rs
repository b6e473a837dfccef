//! Memory budget, memory pressure, the kernel's inodes.

pub(crate) mod evict;
pub(crate) mod pressure;
