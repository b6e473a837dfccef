//! Memory budget, memory pressure, the kernel's inodes.

pub(crate) mod evict;
pub(crate) mod pressure;
pub(crate) mod prune;

use crate::store::Inode;

/// Bytes of an inode record with its slot in the hash table, which is half full to full.
pub(crate) const INODE_BYTES: u64 = (size_of::<Inode>() + 8 + 17 * 3 / 2) as u64;
